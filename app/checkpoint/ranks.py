"""Doing one thing on several ranks so that every rank learns how it went on each.

A rank that fails and simply leaves would let the others wait in their next collective until the time-out. Here a
failure is a value that is exchanged like a result, and then raised everywhere with the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from app.errors import RunFailed

T = TypeVar("T")
R = TypeVar("R")


class CheckpointError(RunFailed):
    """A checkpoint could not be written or committed; what was committed before is untouched.

    Every rank raises it with the same sentence, which names the rank that failed. superseded: not for want of room or
    the like, but because another start of the run has taken over.
    """

    def __init__(self, sentence: str, *, superseded: bool = False) -> None:
        super().__init__(sentence)
        self.superseded = superseded


class Superseded(Exception):
    """Another start of the run has taken over."""


class NotFinite(Exception):
    """The state of some rank is not finite; nothing was begun. Raised on all ranks."""


class RankFailed(Exception):
    """What went wrong on each rank that failed: one line that names them."""

    def __init__(self, line: str, reasons: dict[int, str], superseded: bool) -> None:
        super().__init__(line)
        self.reasons, self.superseded = reasons, superseded


def describe(error: BaseException) -> str:
    """What went wrong, as one line: the operating system's words where it has some."""
    if isinstance(error, (CheckpointError, Superseded)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class _Outcome(Generic[T]):
    """A result, or why there is none, by rank; either pickles."""

    result: T | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    superseded: bool = False


def _attempt(what: Callable[[], T], rank: int) -> _Outcome[T]:
    try:
        return _Outcome(what())
    except RankFailed as error:  # what an exchange within this one found
        return _Outcome(None, error.reasons, error.superseded)
    except BaseException as error:  # whatever it is, the others must learn of it
        return _Outcome(None, {rank: describe(error)}, isinstance(error, Superseded))


class Ranks:
    """All ranks of the job over a gloo group of its own, or this process alone.

    Making one is a collective call when torch.distributed is initialised.
    """

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.distributed else None
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1

    def any(self, *mine: bool) -> list[bool]:
        """Whether each is so on any rank."""
        flags = torch.tensor(mine, dtype=torch.uint8)
        if self.distributed:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def reduce(self, what: Callable[[], T], then: Callable[[list[T]], R]) -> R:
        """Call `what` on every rank, and if that went well `then` on rank 0 with all results, by rank; give every rank
        what that returned. Raises RankFailed on all ranks."""
        outcomes = self._gather(what)
        return self.first(lambda: then(self._results(outcomes)))

    def reduce_scatter(self, what: Callable[[], T], then: Callable[[list[T]], list[R]]) -> R:
        """Like `reduce`, but each rank is given its own element of what `then` returned."""
        outcomes, each = self._gather(what), [_Outcome[R]()] * self.size
        if self.rank == 0:
            whole = _attempt(lambda: then(self._results(outcomes)), 0)
            if whole.result is None:
                each = [_Outcome(None, whole.reasons, whole.superseded)] * self.size
            else:
                each = [_Outcome(result) for result in whole.result]
        if not self.distributed:
            return self._results(each)[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, each if self.rank == 0 else None, src=0, group=self.group)
        return self._results(mine)[0]

    def first(self, what: Callable[[], T]) -> T:
        """Call `what` on rank 0 and give every rank its result. Raises RankFailed on all ranks."""
        box = [_attempt(what, 0) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return self._results(box)[0]

    def _gather(self, what: Callable[[], T]) -> list[Any]:
        """All ranks' outcomes on rank 0."""
        mine = _attempt(what, self.rank)
        if not self.distributed:
            return [mine]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=self.group)
        return gathered or []

    def _results(self, outcomes: list[Any]) -> list[Any]:
        reasons = {rank: why for outcome in outcomes for rank, why in outcome.reasons.items()}
        if reasons:
            named = [f"rank {rank}: {why}" if self.distributed else why for rank, why in sorted(reasons.items())]
            raise RankFailed("; ".join(named), reasons, any(outcome.superseded for outcome in outcomes))
        return [outcome.result for outcome in outcomes]
