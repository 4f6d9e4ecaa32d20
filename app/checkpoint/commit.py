"""The commit marker, which makes a checkpoint exist; finding, verifying and removing checkpoints.

    <folder>/step-00000100-<attempt>/   .metadata  __0_0.distcp  __1_0.distcp  COMMIT.json
    <folder>/frozen/step-…/             the same, for frozen weights: saved once, read with each

COMMIT.json is written last and atomically. It has the size and SHA-256 of every file, and a SHA-256
of itself, so that torn writes, flipped bits and missing shards are noticed. A folder without a
valid marker is not a checkpoint: everything here ignores it, and `sweep` removes it.

Commits are ordered by a sequence number, which each takes from those before it, and not by clock
or step: if a run continues from an earlier step because a checkpoint is damaged, the commit that
was written last is the newest, whatever its step.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.checkpoint.ranks import Ranks
from app.errors import UserError
from app.storage.storage import Storage

MARKER = "COMMIT.json"
METADATA = ".metadata"
"""DCP's file with what tensors there are, and where."""
FROZEN = "frozen"
_FOLDER = re.compile(r"step-(\d+)(?:-.*)?$")
_BLOCK_BYTES = 4 << 20
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a damaged marker raises."""

Verify = Literal["size", "sha256"]
Mode = Literal["min", "max"]


@dataclass(frozen=True)
class File:
    """What a file of a checkpoint must be.

    Args:
        size: In bytes.
        sha256: Of its content, hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A committed checkpoint."""

    step: int
    path: str
    """Its folder, as an absolute path or URL."""
    meta: dict[str, Any]
    """What the caller of Checkpointer.save has passed; "step" is in it."""
    files: dict[str, File] = field(repr=False)
    """By name."""
    metric: float | None = None
    """What the checkpoint is judged by, a finite number; None if there was none."""
    attempt: str = ""
    """The start of the run that has written it."""
    sequence: int = 0
    is_share: bool = False
    """Whether `files` are only those that this rank is to compare."""

    @property
    def storage(self) -> Storage:
        """Its folder."""
        return Storage(self.path)


def folder_name(step: int, attempt: str, taken: list[str]) -> str:
    """The name of a new checkpoint's folder.

    The attempt is part of the name, so that a superseded attempt that still writes cannot touch the
    files of a newer one.

    Args:
        step: The checkpoint's.
        attempt: The start of the run that writes it.
        taken: Names that exist, which the new one must not be.
    """
    base = f"step-{step:08d}"
    clean_attempt = re.sub(r"[^A-Za-z0-9_.]+", "_", attempt)
    if clean_attempt:
        base += f"-{clean_attempt}"
    name = base
    number = 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name


def encode(commit: Commit) -> bytes:
    """The content of a marker."""
    files = {
        name: {"size": file.size, "sha256": file.sha256}
        for name, file in sorted(commit.files.items())
    }
    body: dict[str, Any] = {
        "step": commit.step,
        "sequence": commit.sequence,
        "attempt": commit.attempt,
        "metric": commit.metric,
        "meta": commit.meta,
        "files": files,
    }
    return json.dumps({**body, "sha256": _digest(body)}).encode()


def decode(data: bytes, path: str) -> Commit:
    """The commit that a marker describes.

    Args:
        data: The content of the marker.
        path: The checkpoint's folder.

    Raises:
        ValueError: The marker is damaged. Other damage may raise KeyError, TypeError or
            AttributeError.
    """
    body = json.loads(data)
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise ValueError("checksum")
    return Commit(
        step=body["step"],
        path=path,
        meta=body["meta"],
        files={name: File(entry["size"], entry["sha256"]) for name, entry in body["files"].items()},
        metric=body["metric"],
        attempt=body["attempt"],
        sequence=body["sequence"],
    )


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Listing:
    """What a folder of checkpoints contains.

    Args:
        commits: The newest first.
        damaged: A sentence about each folder whose marker is damaged, by the folder's name.
        uncommitted: Names of the folders without a marker, whose saves were cut off or are running.
    """

    commits: list[Commit]
    damaged: dict[str, str]
    uncommitted: list[str]


def survey(folder: str | Storage) -> Listing:
    """Read all markers in a folder of checkpoints."""
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    commits: list[Commit] = []
    damaged: dict[str, str] = {}
    uncommitted: list[str] = []
    for name in storage.list():
        if not _FOLDER.match(name):
            continue
        place = storage.join(name)
        try:
            commits.append(decode(place.read_bytes(MARKER), place.url))
        except (FileNotFoundError, NotADirectoryError):
            uncommitted.append(name)
        except _DAMAGE:
            damaged[name] = f"{place.url} is skipped: its {MARKER} is damaged"
    commits.sort(key=lambda commit: (commit.sequence, commit.step), reverse=True)
    return Listing(commits, damaged, uncommitted)


# --- finding --------------------------------------------------------------------------------------


def commits(folder: str) -> list[Commit]:
    """The committed checkpoints in a folder, the newest first; [] if the folder does not exist."""
    return survey(folder).commits


def find(path: str) -> Commit:
    """The checkpoint that a person means by a path.

    Args:
        path: The folder of a checkpoint; or a folder of checkpoints or the folder of a run, of
            which the newest good checkpoint is meant.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
    """
    storage = Storage(path)
    if storage.exists(MARKER):
        try:
            return decode(storage.read_bytes(MARKER), storage.url)
        except _DAMAGE as error:
            raise UserError(
                f"the checkpoint {storage} is damaged: its {MARKER} cannot be read; give another"
            ) from error
    skipped: list[str] = []
    for folder in (storage, storage.join("checkpoints")):
        commit, skipped_here = _newest_good(survey(folder), _size_faults)
        if commit is not None:
            return commit
        skipped += skipped_here
    if skipped:
        reason = skipped[0]
    elif not storage.exists():
        reason = "it does not exist"
    else:
        reason = f"there is no {MARKER} in it"
    raise UserError(
        f"there is no committed checkpoint in {storage} ({reason}): "
        "give the folder of a checkpoint or of a run"
    )


def _size_faults(commit: Commit) -> list[str]:
    """The faults that show without the other ranks, since `find` is no collective call."""
    return verify(commit, by="size")


def frozen_part(commit: Commit) -> Commit | None:
    """The checkpoint with the frozen weights, which all checkpoints of a folder share.

    Returns:
        None if the checkpoint contains all weights itself.

    Raises:
        UserError: It does not exist.
    """
    if not commit.meta.get(FROZEN):
        return None
    folder = commit.path.rpartition("/")[0]
    return find(f"{folder}/{FROZEN}")


def latest_good(folder: str) -> tuple[Commit | None, list[str]]:
    """The newest checkpoint whose files are as they were committed.

    With torch.distributed it is a collective call: rank 0 reads the markers, and the ranks share
    the reading of files. Each learns of its own share of the files only.

    Args:
        folder: A folder of checkpoints.

    Returns:
        (the checkpoint or None, a sentence about each damaged one that was skipped), the same on
        every rank but for the checkpoint's files.
    """
    ranks = Ranks()
    listing = Listing([], {}, [])
    if ranks.rank == 0:
        listing = survey(folder)
    skipped = ranks.from_first(list(listing.damaged.values()))
    for number in range(ranks.from_first(len(listing.commits))):
        commit = divided(listing.commits[number] if ranks.rank == 0 else None, ranks)
        fault = verify_together(commit, ranks)
        if not fault:
            return commit, skipped
        skipped.append(f"{commit.path} is skipped: {fault}")
    return None, skipped


def divided(commit: Commit | None, ranks: Ranks) -> Commit:
    """A checkpoint that rank 0 has found, on every rank with its own share of the files.

    Collective.

    Args:
        commit: The checkpoint on rank 0; None on other ranks.
        ranks: All ranks.
    """
    if not ranks.distributed:
        assert commit is not None
        return commit
    shares: list[dict[str, File]] = []
    if commit is not None:
        names = [name for name in _largest_first(commit) if name != METADATA]
        shares = [
            {name: commit.files[name] for name in names[rank :: ranks.size]}
            for rank in range(ranks.size)
        ]
        if METADATA in commit.files:  # which rank 0 reads for all
            shares[0][METADATA] = commit.files[METADATA]
        commit = replace(commit, files={}, is_share=True)
    commit = ranks.from_first(commit)
    assert commit is not None
    return replace(commit, files=ranks.scatter(shares))


def find_together(function: Callable[[], Commit | None], ranks: Ranks) -> Commit | None:
    """What rank 0 finds, on every rank with its own share of the files. Collective.

    Raises:
        UserError: The function raises it, on rank 0; the same on every rank.
    """
    commit: Commit | None = None
    problem = ""
    if ranks.rank == 0:
        try:
            commit = function()
        except UserError as error:
            problem = str(error)
    problem, is_found = ranks.from_first((problem, commit is not None))
    if problem:
        raise UserError(problem)
    return divided(commit, ranks) if is_found else None


def _newest_good(
    listing: Listing, faults_of: Callable[[Commit], list[str]]
) -> tuple[Commit | None, list[str]]:
    skipped = list(listing.damaged.values())
    for commit in listing.commits:
        faults = faults_of(commit)
        if not faults:
            return commit, skipped
        skipped.append(f"{commit.path} is skipped: {_and_more(faults[0], len(faults))}")
    return None, skipped


def _and_more(fault: str, faults: int) -> str:
    """The first of so many faults."""
    return f"{fault} and {faults - 1} more" if faults > 1 else fault


# --- damage ---------------------------------------------------------------------------------------


def verify_together(commit: Commit, ranks: Ranks) -> str:
    """Like `verify`, but the ranks share the reading, and all get the same answer.

    Returns:
        The faults in one sentence; "" if the files are good.
    """
    fault, count = ranks.first_of(verify(commit, ranks.rank, ranks.size))
    return _and_more(fault, count)


def verify(
    commit: Commit, rank: int = 0, world_size: int = 1, *, by: Verify = "sha256"
) -> list[str]:
    """Compare the files of a checkpoint, and of its frozen weights, with its marker.

    Args:
        commit: The checkpoint.
        rank: Which share of the files is compared: in the order of their sizes, every
            `world_size`th.
        world_size: The number of shares.
        by: Whether only the sizes or also the contents are compared.

    Returns:
        A sentence about each fault; [] if the files are good.
    """
    storage = commit.storage
    names = _largest_first(commit)
    faults: list[str] = []
    for name in names if commit.is_share else names[rank::world_size]:
        fault = _fault(storage, name, commit.files[name], by=by)
        if fault:
            faults.append(f"{storage.join(name)} {fault}")
    try:
        frozen = frozen_part(commit)
    except UserError as error:
        return [*faults, str(error)]
    if frozen is not None:
        faults += verify(frozen, rank, world_size, by=by)
    return faults


def _largest_first(commit: Commit) -> list[str]:
    """The names of a checkpoint's files, the largest first."""
    return sorted(commit.files, key=lambda name: (-commit.files[name].size, name))


def _fault(storage: Storage, name: str, file: File, *, by: Verify) -> str | None:
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
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# --- removing -------------------------------------------------------------------------------------


def superfluous(
    commits: list[Commit],
    *,
    keep_last: int,
    keep_best: bool,
    mode: Mode,
    late_metrics: Mapping[int, float | None] | None = None,
    needed: Collection[str] = (),
) -> list[Commit]:
    """The commits to remove, the oldest first.

    Args:
        commits: The newest first; the newest always stays.
        keep_last: How many of the newest stay.
        keep_best: Whether the one with the best metric stays; of equally good ones the newest.
        mode: Whether a large or a small metric is good.
        late_metrics: By step, the metrics of commits that were judged after they were written.
        needed: Paths of commits that stay whatever their metric is.
    """
    kept = {commit.path for commit in commits[: max(1, keep_last)]} | set(needed)
    if keep_best:
        sign = 1.0 if mode == "max" else -1.0
        judged = []
        for commit in commits:
            metric = (late_metrics or {}).get(commit.step, commit.metric)
            if metric is not None:
                judged.append((sign * metric, commit.sequence, commit.path))
        if judged:
            _, _, best_path = max(judged)
            kept.add(best_path)
    return [commit for commit in reversed(commits) if commit.path not in kept]


def remove(storage: Storage) -> None:
    """Remove the folder of a checkpoint.

    The marker goes first: if the removal is cut off, what is left is not a checkpoint.
    """
    storage.remove(MARKER)
    storage.remove_tree()


def sweep(folder: str) -> None:
    """Remove what saves that were cut off have left; no process may save into the folder meanwhile.

    A folder with a damaged marker goes once there is a newer good commit; until then a person may
    want to look at it.
    """
    storage = Storage(folder)
    listing = survey(storage)
    newest_step = max((commit.step for commit in listing.commits), default=-1)
    outdated = [name for name in listing.damaged if int(name.split("-")[1]) < newest_step]
    for name in [*listing.uncommitted, *outdated]:
        remove(storage.join(name))
    # A save that was repeated may have left a temporary file of its marker or .metadata.
    for commit in listing.commits:
        for name in commit.storage.list():
            if name.endswith(".tmp"):
                commit.storage.remove(name)
