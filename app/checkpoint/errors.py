"""The error of a checkpoint that could not be saved."""

from __future__ import annotations

from app.errors import RunFailed


class CheckpointError(RunFailed):
    """A checkpoint could not be written or committed; what was committed before is untouched.

    Every rank raises it with the same sentence, which names the rank that failed. superseded: not for want of room or
    the like, but because another start of the run has taken over.
    """

    def __init__(self, sentence: str, *, superseded: bool = False) -> None:
        super().__init__(sentence)
        self.superseded = superseded


class Unsound(Exception):
    """The state of some rank is not worth keeping; nothing was begun. Raised on all ranks."""


class Unexchangeable(Exception):
    """Stands for an exception that need not survive pickling; its text is already what `said` makes of it."""


def said(error: BaseException) -> str:
    """What went wrong, as one line: the operating system's words where it has some."""
    if isinstance(error, (Unexchangeable, CheckpointError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
