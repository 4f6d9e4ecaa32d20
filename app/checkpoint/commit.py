"""What makes a checkpoint exist, its commit marker; finding, verifying, keeping and removing checkpoints.

    <folder>/step-00000100-<attempt>/   .metadata  __0_0.distcp  __1_0.distcp  COMMIT.json
    <folder>/frozen/step-…/             the same, of weights that are not trained: saved once, read with each

COMMIT.json is written last and atomically. It names every file with its size and SHA-256, and carries a SHA-256 of
itself, so that torn writes, flipped bits and missing shards are found. A folder without a valid marker is not a
checkpoint: it is ignored here and removed by `sweep`.

Commits are ordered by a sequence number that each takes from those before it, not by clock or by step: after a rewind
behind a damaged checkpoint, the one written last is the newest, whatever its step.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from app.checkpoint.ranks import Ranks
from app.errors import UserError
from app.storage.storage import Storage

MARKER = "COMMIT.json"
FROZEN = "frozen"
_FOLDER = re.compile(r"step-(\d+)(?:-.*)?$")
_BLOCK = 4 << 20

Verify = Literal["size", "sha256"]
Mode = Literal["min", "max"]


@dataclass(frozen=True)
class File:
    """What a file of a checkpoint must be: its size in bytes and the hexadecimal SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint."""

    step: int
    path: str
    """Its folder, as an absolute path or URL."""
    meta: dict[str, Any]
    """What the caller of save() gave, "step" among it."""
    files: dict[str, File] = field(repr=False)
    metric: float | None = None
    """The evaluation metric it is judged by, a finite number; None if there was none."""
    attempt: str = ""
    sequence: int = 0

    @property
    def storage(self) -> Storage:
        return Storage(self.path)


def folder_name(step: int, attempt: str, taken: list[str]) -> str:
    """Where a checkpoint of this step is written: beside what is there, never over it.

    The attempt is part of the name, so that a superseded attempt that still writes cannot touch our files.
    """
    clean = re.sub(r"[^A-Za-z0-9_.]+", "_", attempt)
    name = base = f"step-{step:08d}" + (f"-{clean}" if clean else "")
    again = 1
    while name in taken:
        again += 1
        name = f"{base}-{again}"
    return name


def encode(commit: Commit) -> bytes:
    """The marker's content."""
    body: dict[str, Any] = {
        "step": commit.step,
        "sequence": commit.sequence,
        "attempt": commit.attempt,
        "metric": commit.metric,
        "meta": commit.meta,
        "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(commit.files.items())},
    }
    return json.dumps({**body, "sha256": _digest(body)}).encode()


def decode(data: bytes, path: str) -> Commit:
    """The commit that a marker describes. Raises ValueError if the marker is damaged."""
    body = json.loads(data)
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise ValueError("checksum")
    files = {name: File(entry["size"], entry["sha256"]) for name, entry in body["files"].items()}
    return Commit(body["step"], path, body["meta"], files, body["metric"], body["attempt"], body["sequence"])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Listing:
    """What is in a folder of checkpoints."""

    commits: list[Commit]
    """Newest first."""
    damaged: dict[str, str]
    """Folder name → why its marker cannot be believed."""
    uncommitted: list[str]
    """Names of what has no marker: saves that were cut off, or are under way."""


def survey(folder: str | Storage) -> Listing:
    """Read every marker in a folder. What is not a checkpoint's folder is left out."""
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    found: list[Commit] = []
    damaged: dict[str, str] = {}
    uncommitted: list[str] = []
    for name in storage.list():
        if not _FOLDER.match(name):
            continue
        here = storage.join(name)
        try:
            found.append(decode(here.read_bytes(MARKER), here.url))
        except (FileNotFoundError, NotADirectoryError):
            uncommitted.append(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged[name] = f"{here.url} is skipped: its {MARKER} is damaged"
    found.sort(key=lambda commit: (commit.sequence, commit.step), reverse=True)
    return Listing(found, damaged, uncommitted)


# --- finding


def commits(folder: str) -> list[Commit]:
    """The committed checkpoints in a folder, newest first; [] if there is no such folder."""
    return survey(folder).commits


def find(where: str) -> Commit:
    """The checkpoint a person means by a path: a checkpoint's own folder, or the newest good one of a folder of
    checkpoints or of a run (which keeps them in `checkpoints/`). Raises UserError."""
    storage = Storage(where)
    if storage.exists(MARKER):
        try:
            return decode(storage.read_bytes(MARKER), storage.url)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the checkpoint {storage} is damaged: its {MARKER} cannot be read; give another"
            ) from error
    skipped: list[str] = []
    for place in (storage, storage.join("checkpoints")):
        commit, bad = _newest_good(survey(place.url), lambda commit: verify(commit, by="size"))  # not with other ranks
        if commit:
            return commit
        skipped += bad
    why = skipped[0] if skipped else "it does not exist" if not storage.exists() else f"there is no {MARKER} in it"
    raise UserError(
        f"there is no committed checkpoint in {storage} ({why}): give the folder of a checkpoint or of a run"
    )


def frozen_part(commit: Commit) -> Commit | None:
    """What holds the weights that are not trained, once for all checkpoints of the folder; None: the checkpoint itself.
    Raises UserError: it is not there."""
    return find(f"{commit.path.rpartition('/')[0]}/{FROZEN}") if commit.meta.get(FROZEN) else None


def latest_good(folder: str) -> tuple[Commit | None, list[str]]:
    """The newest committed checkpoint whose files are as committed, and a sentence for each bad one skipped.

    With torch.distributed initialised a collective call: all ranks share the reading, and get the same answer.
    """
    ranks = Ranks()
    listing = ranks.all(survey(folder) if ranks.rank == 0 else Listing([], {}, []))[0]
    return _newest_good(listing, lambda commit: verify_together(commit, ranks))


def _newest_good(listing: Listing, faults_of: Callable[[Commit], list[str]]) -> tuple[Commit | None, list[str]]:
    skipped = list(listing.damaged.values())
    for commit in listing.commits:
        faults = faults_of(commit)
        if not faults:
            return commit, skipped
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        skipped.append(f"{commit.path} is skipped: {faults[0]}{more}")
    return None, skipped


# --- damage


def verify_together(commit: Commit, ranks: Ranks) -> list[str]:
    """Like `verify`; the ranks share the reading, and get the same answer."""
    return [fault for part in ranks.all(verify(commit, ranks.rank, ranks.size)) for fault in part]


def verify(commit: Commit, rank: int = 0, world_size: int = 1, *, by: Verify = "sha256") -> list[str]:
    """The faults of a checkpoint's files and its frozen weights', a sentence for each; [] if they are good. Of several
    ranks each takes every `world_size`th file, by size."""
    storage = commit.storage
    names = sorted(commit.files, key=lambda name: (-commit.files[name].size, name))[rank::world_size]
    faults = {name: _fault(storage, name, commit.files[name], by) for name in names}
    found = [f"{storage.join(name)} {fault}" for name, fault in faults.items() if fault]
    try:
        frozen = frozen_part(commit)
    except UserError as error:
        return [*found, str(error)]
    return found + (verify(frozen, rank, world_size, by=by) if frozen else [])


def _fault(storage: Storage, name: str, file: File, by: Verify) -> str | None:
    try:
        size = storage.size(name)
        if size != file.size:
            return f"has {size:,} bytes instead of {file.size:,}"
        if by == "sha256" and _sha256(storage, name) != file.sha256:
            return "does not have the content it was committed with (its SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except Exception as error:  # each object store library has its own exceptions
        return f"cannot be read ({type(error).__name__}: {error})"
    return None


def _sha256(storage: Storage, name: str) -> str:
    digest = hashlib.sha256()
    with storage.open(name) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# --- keeping


def superfluous(commits: list[Commit], *, keep_last: int, keep_best: bool, mode: Mode) -> list[Commit]:
    """The commits to remove, oldest first. `commits` is newest first; the newest always stays. Of those with equally
    good metrics the newest is the best."""
    kept = {commit.path for commit in commits[: max(1, keep_last)]}
    judged = [(commit.metric, commit.sequence, commit.path) for commit in commits if commit.metric is not None]
    if keep_best and judged:
        sign = 1.0 if mode == "max" else -1.0
        kept.add(max(judged, key=lambda entry: (sign * entry[0], entry[1]))[2])
    return [commit for commit in reversed(commits) if commit.path not in kept]


def remove(storage: Storage) -> None:
    """Remove a checkpoint's folder, its marker first: cut off at any point, what is left is not a checkpoint."""
    storage.remove(MARKER)
    storage.remove_tree()


def sweep(folder: str) -> None:
    """Remove what saves that were cut off have left behind. No process may be saving into the folder meanwhile.

    A folder whose marker is damaged goes once a newer good commit exists; until then it may be worth a look.
    """
    storage = Storage(folder)
    listing = survey(storage)
    newest = max((commit.step for commit in listing.commits), default=-1)
    outdated = [name for name in listing.damaged if int(name.split("-")[1]) < newest]
    for name in [*listing.uncommitted, *outdated]:
        remove(storage.join(name))
    for commit in listing.commits:  # a marker's or .metadata's temporary file of a save that was repeated
        for name in commit.storage.list():
            if name.endswith(".tmp"):
                commit.storage.remove(name)
