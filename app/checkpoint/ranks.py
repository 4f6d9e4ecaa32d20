"""Doing one thing on several ranks so that every rank learns how it went on each.

A rank that fails and simply leaves would let the others wait in their next collective until the time-out. Here a
failure is a value that is exchanged like a result, and then raised everywhere with the same words.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from app.errors import RunFailed

T = TypeVar("T")
R = TypeVar("R")
SUPERSEDED = "superseded: another attempt of this run has taken over"


class CheckpointError(RunFailed):
    """A checkpoint could not be written or committed; what was committed before is untouched.

    Every rank raises it with the same sentence, which names the rank that failed. superseded: not for want of room or
    the like, but because another start of the run has taken over.
    """

    def __init__(self, sentence: str, *, superseded: bool = False) -> None:
        super().__init__(sentence)
        self.superseded = superseded


class NotFinite(Exception):
    """The state of some rank is not finite; nothing was begun. Raised on all ranks."""


class RankFailed(Exception):
    """What went wrong on each rank that failed: one line that names them."""

    def __init__(self, line: str, reasons: dict[int, str]) -> None:
        super().__init__(line)
        self.reasons = reasons


class Superseded(Exception):
    """Another start of the run has taken over."""


def describe(error: BaseException) -> str:
    """What went wrong, as one line: the operating system's words where it has some."""
    if isinstance(error, Superseded):
        return SUPERSEDED
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Outcome(NamedTuple):
    """A result, or why there is none, by rank; either pickles."""

    result: Any
    reasons: dict[int, str]


class Ranks:
    """All ranks of the job, or this process alone.

    own_group: they talk over a gloo group of their own, so that a thread may do it while training continues; making one
        is a collective call when torch.distributed is initialised. Else over the default group.
    """

    def __init__(self, *, own_group: bool = False) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.distributed and own_group else None
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1

    def any(self, *mine: bool) -> list[bool]:
        """Whether each is so on any rank. Needs a group of its own."""
        flags = torch.tensor(mine, dtype=torch.uint8)
        if self.distributed:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def all(self, mine: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if not self.distributed:
            return [mine]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, mine, group=self.group)
        return values

    def first(self, what: Callable[[], T]) -> T:
        """Call `what` on rank 0 and give every rank its result. Raises RankFailed on all ranks."""
        box = [self._attempt(what) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return self._results(box)[0]

    def reduce(self, what: Callable[[], T], then: Callable[[list[T]], R]) -> R:
        """Call `what` on every rank, and if that went well `then` on rank 0 with all results, by rank; give every rank
        what that returned. Raises RankFailed on all ranks."""
        outcomes = self._gather(self._attempt(what))
        return self.first(lambda: then(self._results(outcomes)))

    def divide(self, what: Callable[[], T], then: Callable[[list[T]], list[R]]) -> R:
        """As `reduce`, but `then` returns a value for each rank, which gets that one alone."""
        outcomes, shares, box = self._gather(self._attempt(what)), list[Any](), [None]
        if self.rank == 0:
            divided = self._attempt(lambda: then(self._results(outcomes)))
            shares = [_Outcome(part, {}) for part in divided.result or ()] or [divided] * self.size
            box = shares[:1]
        if self.distributed:
            dist.scatter_object_list(box, shares or None, src=0, group=self.group)
        return self._results(box)[0]

    def _gather(self, mine: _Outcome) -> list[_Outcome]:
        """Every rank's, by rank, on rank 0."""
        outcomes: list[Any] = [mine] if self.rank == 0 else []
        if self.distributed:
            outcomes *= self.size
            dist.gather_object(mine, outcomes or None, dst=0, group=self.group)
        return outcomes

    def _attempt(self, what: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(what(), {})
        except RankFailed as error:  # what an exchange within this one found
            return _Outcome(None, error.reasons)
        except BaseException as error:  # whatever it is, the others must learn of it
            return _Outcome(None, {self.rank: describe(error)})

    def _results(self, outcomes: list[Any]) -> list[Any]:
        reasons = {rank: why for outcome in outcomes for rank, why in outcome.reasons.items()}
        if reasons:
            named = [f"rank {rank}: {why}" if self.distributed else why for rank, why in sorted(reasons.items())]
            raise RankFailed("; ".join(named), reasons)
        return [outcome.result for outcome in outcomes]
