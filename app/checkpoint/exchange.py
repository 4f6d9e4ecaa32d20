"""Doing one thing on several ranks so that every rank learns how it went on each.

A rank that fails and simply leaves would let the others wait in their next collective until the time-out.
Here a failure is a value that is exchanged like a result, and then raised everywhere with the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from app.checkpoint.errors import said

T = TypeVar("T")
R = TypeVar("R")


class RankFailed(Exception):
    """What went wrong on each rank that failed: one line that names them."""

    def __init__(self, line: str, reasons: dict[int, str]) -> None:
        super().__init__(line)
        self.reasons = reasons


class _Outcome(Generic[T]):
    """A result, or reasons by rank; either pickles."""

    def __init__(self, what: Callable[[], T], rank: int) -> None:
        self.reasons: dict[int, str] = {}
        try:
            self.result: T = what()
        except RankFailed as error:  # what an exchange within this one found
            self.reasons = error.reasons
        except BaseException as error:  # whatever it is, the others must hear of it
            self.reasons = {rank: said(error)}


class Ranks:
    """All ranks of the job over a gloo group of its own, or this process alone.

    Making one is a collective call when torch.distributed is initialised.
    """

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.distributed else None
        self.rank = dist.get_rank() if self.distributed else 0

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        if not self.distributed:
            return mine
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def all(self, what: Callable[[], T]) -> list[T]:
        """Call `what` on every rank and give everybody all results, by rank. Raises RankFailed on all ranks."""
        mine = _Outcome(what, self.rank)
        outcomes: list[_Outcome[T]] = [mine]
        if self.distributed:
            outcomes = [mine] * dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, mine, group=self.group)
        return self._results(outcomes)

    def reduce(self, what: Callable[[], T], then: Callable[[list[T]], R]) -> R:
        """Call `what` on every rank, and if that went well `then` on rank 0 with all results, by rank; give everybody
        what that returned. Raises RankFailed on all ranks."""
        mine = _Outcome(what, self.rank)
        outcomes: list[_Outcome[T]] = [mine]
        if self.distributed:
            outcomes = [mine] * dist.get_world_size(self.group) if self.rank == 0 else []
            dist.gather_object(mine, outcomes or None, dst=0, group=self.group)
        return self.first(lambda: then(self._results(outcomes)))

    def first(self, what: Callable[[], T]) -> T:
        """Call `what` on rank 0 and give everybody its result. Raises RankFailed on all ranks."""
        box = [_Outcome(what, 0) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, group=self.group)
        outcome = box[0]
        assert outcome is not None
        return self._results([outcome])[0]

    def _results(self, outcomes: list[_Outcome[T]]) -> list[T]:
        reasons: dict[int, str] = {}
        for outcome in outcomes:
            reasons.update(outcome.reasons)
        if reasons:
            named = [f"rank {rank}: {why}" if self.distributed else why for rank, why in sorted(reasons.items())]
            raise RankFailed("; ".join(named), reasons)
        return [outcome.result for outcome in outcomes]
