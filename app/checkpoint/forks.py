"""Marks that keep a checkpoint for as long as a fork needs it.

A fork is a new run that continues from a checkpoint of another run. The checkpoint is not copied:
the fork reads it until it has a checkpoint of its own. Meanwhile a mark beside the checkpoint says
so, and the run that owns the checkpoint does not remove it:

    <checkpoints>/forks/<id>.json    {"checkpoint": "step-00000300-…", "fork": "<folder>"}

Code that removes checkpoints reads the marks first (`needed_by_forks`), which also removes marks
that are no longer needed.
"""

import contextlib
import hashlib
import json
import time

from app.checkpoint.commit import Commit, survey
from app.errors import FORBIDDEN, UserError
from app.storage.storage import Storage

MARKS = "forks"
FORK_START_SECONDS = 3600.0
"""How long a mark is valid without its fork's run.json, which a start writes before it trains."""


def hold(commit: Commit, fork: str, *, until_released: bool = False) -> bool:
    """Keep a checkpoint until a fork has one of its own.

    Args:
        commit: The checkpoint that the fork continues from.
        fork: The folder of the fork, as an absolute path or URL.
        until_released: Keep it until `release` is called or the folder is gone: for a study whose
            forks are yet to begin.

    Returns:
        Whether it is marked. It cannot be where nothing may be written, as in another person's run.

    Raises:
        UserError: The checkpoint was removed before it was marked.
    """
    folder, _, name = commit.path.rpartition("/")
    mark = {
        "checkpoint": name,
        "fork": fork,
        "time": time.time(),
        "until_released": until_released,
    }
    is_marked = True
    try:
        Storage(folder).join(MARKS).make()
        Storage(folder).write_bytes(f"{MARKS}/{_mark_name(fork)}", json.dumps(mark).encode())
    except OSError as error:
        if error.errno not in FORBIDDEN:
            raise
        is_marked = False
    if all(existing.path != commit.path for existing in survey(folder).commits):
        raise UserError(
            f"the checkpoint {commit.path} has just been removed by its run: fork again, from a "
            "newer one"
        )
    return is_marked


def release(checkpoint: str, fork: str) -> None:
    """Remove the mark of a fork, or of a study of forks, that needs the checkpoint no longer.

    Args:
        checkpoint: The folder of the checkpoint, as an absolute path or URL.
        fork: The folder that was given to `hold`.
    """
    folder = checkpoint.rpartition("/")[0]
    with contextlib.suppress(FileNotFoundError):
        Storage(folder).remove(f"{MARKS}/{_mark_name(fork)}")


def needed_by_forks(folder: str | Storage) -> set[str]:
    """The names of the checkpoints that forks need.

    Removes the marks of forks that have a checkpoint of their own, or that are gone.

    Args:
        folder: A folder of checkpoints.
    """
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    if not storage.exists(MARKS):
        return set()
    names: set[str] = set()
    for mark_name in storage.list(MARKS):
        path = f"{MARKS}/{mark_name}"
        try:
            mark = json.loads(storage.read_bytes(path))
            if _is_needed(mark):
                names.add(mark["checkpoint"])
            else:
                storage.remove(path)
        except FileNotFoundError:  # another start was faster
            continue
        except (ValueError, KeyError, TypeError):  # a mark that was cut off holds nothing
            storage.remove(path)
    return names


def _is_needed(mark: dict[str, str | float]) -> bool:
    fork = Storage(str(mark["fork"]))
    if mark.get("until_released"):
        return fork.exists()
    if not fork.exists("run.json"):
        return time.time() - float(mark["time"]) < FORK_START_SECONDS
    return not survey(fork.join("checkpoints")).commits


def _mark_name(fork: str) -> str:
    return f"{hashlib.sha256(fork.encode()).hexdigest()[:16]}.json"
