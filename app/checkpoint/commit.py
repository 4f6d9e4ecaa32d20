"""What makes a checkpoint exist: its commit marker.

    <folder>/step-00000100-<attempt>/   .metadata  __0_0.distcp  __1_0.distcp  rank-0.pt  COMMIT.json

COMMIT.json is written last and atomically. It names every file with its size and SHA-256, and carries a
SHA-256 of itself, so that torn writes, flipped bits and missing shards are found. A folder without a valid
marker is no checkpoint: it is ignored here and removed by `sweep`.

Commits are ordered by a sequence number that each takes from those before it, not by clock or by step:
after a rewind behind a damaged checkpoint, the one written last is the newest, whatever its step.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from app.errors import UserError
from app.storage import Storage

MARKER = "COMMIT.json"
FORMAT = 1
_FOLDER = re.compile(r"step-(\d+)(?:-.*)?$")
_BLOCK = 4 << 20

Verify = Literal["size", "sha256"]


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

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files.values())


def folder_name(step: int, attempt: str, taken: list[str]) -> str:
    """Where a checkpoint of this step is written: beside what is there, never over it.

    The attempt is part of the name, so that a superseded attempt that still writes cannot touch our files.
    """
    clean = re.sub(r"[^A-Za-z0-9_.]+", "_", attempt)
    name = base = f"step-{step:08d}" + (f"-{clean}" if clean else "")
    again = 1
    while name in taken:
        again += 1
        name = f"{base}-{again}" if clean else f"{base}-again-{again}"
    return name


def encode(commit: Commit) -> bytes:
    """The marker's content."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "step": commit.step,
        "sequence": commit.sequence,
        "attempt": commit.attempt,
        "metric": commit.metric,
        "meta": commit.meta,
        "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(commit.files.items())},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {**body, "sha256": _digest(body)}.items()]
    return ("{\n" + ",\n".join(lines) + "\n}").encode()  # json's own indenting is written in Python: ten times slower


def decode(data: bytes, path: str) -> Commit:
    """The commit that a marker describes. Raises ValueError if the marker is damaged."""
    body = json.loads(data)
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise ValueError("checksum")
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']}")
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
            damaged[name] = f"{here.url} is passed over: its {MARKER} is damaged"
    found.sort(key=lambda commit: (commit.sequence, commit.step), reverse=True)
    return Listing(found, damaged, uncommitted)


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
    passed: list[str] = []
    for place in (storage, storage.join("checkpoints")):
        commit, bad = latest_good(place.url, verify="size")
        if commit:
            return commit
        passed += bad
    why = passed[0] if passed else "it does not exist" if not storage.exists() else f"there is no {MARKER} in it"
    raise UserError(
        f"there is no committed checkpoint in {storage} ({why}): give the folder of a checkpoint or of a run"
    )


def verify(commit: Commit, rank: int = 0, world_size: int = 1, *, by: Verify = "sha256") -> list[str]:
    """The faults of this rank's part of a checkpoint's files, a sentence for each; [] if they are good.

    The files are dealt out by size, so that the ranks of a job share the reading.
    """
    storage = commit.storage
    faults = []
    for name in _part(commit, rank, world_size):
        fault = _fault(storage, name, commit.files[name], by)
        if fault:
            faults.append(f"{storage.join(name)} {fault}")
    return faults


def _part(commit: Commit, rank: int, world_size: int) -> list[str]:
    """This rank's files: each, largest first, goes to the rank with the least to read so far."""
    loads = [0] * world_size
    mine = []
    for name, file in sorted(commit.files.items(), key=lambda item: (-item[1].size, item[0])):
        least = loads.index(min(loads))
        loads[least] += file.size + 1
        if least == rank:
            mine.append(name)
    return mine


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


def latest_good(folder: str, *, verify: Verify = "size") -> tuple[Commit | None, list[str]]:
    """The newest committed checkpoint whose files are as committed, and a sentence for each bad one passed over.

    verify: "size" looks at the files' sizes only; "sha256" reads them.
    """
    listing = survey(folder)
    passed = list(listing.damaged.values())
    for commit in listing.commits:
        faults = _verify(commit, by=verify)
        if not faults:
            return commit, passed
        passed.append(passed_over(commit, faults))
    return None, passed


_verify = verify  # latest_good's argument has the same name


def passed_over(commit: Commit, faults: list[str]) -> str:
    """The sentence about a damaged checkpoint."""
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    return f"{commit.path} is passed over: {faults[0]}{more}"
