"""Which checkpoints may go, and how they go."""

from __future__ import annotations

from typing import Literal

from app.checkpoint.commit import MARKER, Commit, survey
from app.storage import Storage

Mode = Literal["min", "max"]


def best(commits: list[Commit], mode: Mode) -> Commit | None:
    """The commit with the best metric; of equal ones the newest. None if none has a metric."""
    judged = [commit for commit in commits if commit.metric is not None]
    sign = 1.0 if mode == "max" else -1.0
    return max(judged, key=lambda commit: (sign * (commit.metric or 0.0), commit.sequence), default=None)


def superfluous(commits: list[Commit], *, keep_last: int, keep_best: bool, mode: Mode) -> list[Commit]:
    """The commits to remove, oldest first. `commits` is newest first; the newest always stays."""
    kept = {commit.path for commit in commits[: max(1, keep_last)]}
    winner = best(commits, mode) if keep_best else None
    if winner:
        kept.add(winner.path)
    return [commit for commit in reversed(commits) if commit.path not in kept]


def remove(storage: Storage) -> None:
    """Remove a checkpoint's folder, its marker first: cut off at any point, what is left is no checkpoint."""
    storage.remove(MARKER)
    storage.remove_tree()


def prune(commits: list[Commit], *, keep_last: int, keep_best: bool, mode: Mode) -> list[str]:
    """Remove what is not kept, and return a warning for each checkpoint that could not be removed. commits: all that
    there are, newest first; of those that are not among them nothing is touched."""
    warnings = []
    for commit in superfluous(commits, keep_last=keep_last, keep_best=keep_best, mode=mode):
        try:
            remove(commit.storage)
        except Exception as error:  # each object store library has its own exceptions
            warnings.append(f"the old checkpoint {commit.path} could not be removed ({error})")
    return warnings


def sweep(folder: str) -> None:
    """Remove what saves that were cut off have left behind. Nobody may be saving into the folder meanwhile.

    A folder whose marker is damaged goes once a newer good commit exists; until then it may be worth a look.
    """
    storage = Storage(folder)
    listing = survey(storage)
    steps = [commit.step for commit in listing.commits]
    outdated = [name for name in listing.damaged if steps and int(name.split("-")[1]) < max(steps)]
    for name in [*listing.uncommitted, *outdated]:
        remove(storage.join(name))
    for commit in listing.commits:  # a marker's or .metadata's temporary file of a save that was repeated
        for name in commit.storage.list():
            if name.endswith(".tmp"):
                commit.storage.remove(name)
