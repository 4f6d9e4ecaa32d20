"""Doing one thing on several ranks so that every rank learns how it went on each.

A rank that fails and simply leaves would let the others wait in their next collective until the time-out.
Here a failure is a value that is exchanged like a result, and then raised everywhere with the same words.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from app.checkpoint.errors import said
from strategies.collectives import shared_memory_all_reduce

T = TypeVar("T")
R = TypeVar("R")

ROOM = 8192
"""Bytes of a message that go in one collective, with its length; what is longer needs a second one."""
_LENGTH = 8


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

    On one machine what is short goes through memory that all see: a collective of gloo's takes milliseconds where its
    threads and training's share the cores. Making one is a collective call when torch.distributed is initialised.
    """

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.distributed else None
        self.rank = dist.get_rank() if self.distributed else 0
        self._shared = shared_memory_all_reduce(self.group, torch.device("cpu")) if self.distributed else None

    def any(self, *mine: bool) -> list[bool]:
        """Whether each is so on any rank."""
        if not self.distributed:
            return list(mine)
        flags = self._everyones(torch.tensor(mine, dtype=torch.uint8))
        return [any(flag) for flag in zip(*(each.tolist() for each in flags), strict=True)]

    def all(self, what: Callable[[], T]) -> list[T]:
        """Call `what` on every rank and give everybody all results, by rank. Raises RankFailed on all ranks."""
        return self._results(self._gathered(_Outcome(what, self.rank), everywhere=True))

    def reduce(self, what: Callable[[], T], then: Callable[[list[T]], R]) -> R:
        """Call `what` on every rank, and if that went well `then` on rank 0 with all results, by rank; give everybody
        what that returned. Raises RankFailed on all ranks."""
        outcomes = self._gathered(_Outcome(what, self.rank))
        return self.first(lambda: then(self._results(outcomes)))

    def first(self, what: Callable[[], T]) -> T:
        """Call `what` on rank 0 and give everybody its result. Raises RankFailed on all ranks."""
        mine = _Outcome(what, 0) if self.rank == 0 else None
        if not self.distributed:
            assert mine is not None
            return self._results([mine])[0]
        message = pickle.dumps(mine) if self.rank == 0 else b""
        box = _boxed(message, ROOM)
        if self._shared is not None:
            box = self._shared.gather(box)[0]
        else:
            dist.broadcast(box, src=0, group=self.group)
        if (length := _length(box)) > ROOM - _LENGTH:
            box = _boxed(message, length + _LENGTH)
            dist.broadcast(box, src=0, group=self.group)
        return self._results([_unboxed(box)])[0]

    def _gathered(self, mine: _Outcome[T], everywhere: bool = False) -> list[_Outcome[T]]:
        """All ranks' outcomes, by rank; [] on the others if not `everywhere`."""
        if not self.distributed:
            return [mine]
        message, here = pickle.dumps(mine), everywhere or self.rank == 0
        boxes = self._everyones(_boxed(message, ROOM))
        if (longest := max(map(_length, boxes))) > ROOM - _LENGTH:
            boxes = self._boxes(longest + _LENGTH) if here else []
            box = _boxed(message, longest + _LENGTH)
            if everywhere:
                dist.all_gather(boxes, box, group=self.group)
            else:
                dist.gather(box, boxes or None, dst=0, group=self.group)
        return [_unboxed(box) for box in boxes] if here else []

    def _everyones(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's short tensor, by rank; in shared memory until the next exchange."""
        if self._shared is not None:
            return self._shared.gather(mine)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, mine, group=self.group)
        return found

    def _boxes(self, room: int) -> list[torch.Tensor]:
        return [torch.empty(room, dtype=torch.uint8) for _ in range(dist.get_world_size(self.group))]

    def _results(self, outcomes: list[_Outcome[T]]) -> list[T]:
        reasons: dict[int, str] = {}
        for outcome in outcomes:
            reasons.update(outcome.reasons)
        if reasons:
            named = [f"rank {rank}: {why}" if self.distributed else why for rank, why in sorted(reasons.items())]
            raise RankFailed("; ".join(named), reasons)
        return [outcome.result for outcome in outcomes]


def _boxed(message: bytes, room: int) -> torch.Tensor:
    """A tensor of `room` bytes: the message's length, and as much of it as there is room for."""
    box = bytearray(room)
    box[:_LENGTH] = len(message).to_bytes(_LENGTH, "little")
    fits = message[: room - _LENGTH]
    box[_LENGTH : _LENGTH + len(fits)] = fits
    return torch.frombuffer(box, dtype=torch.uint8)


def _length(box: torch.Tensor) -> int:
    return int.from_bytes(box[:_LENGTH].numpy().tobytes(), "little")


def _unboxed(box: torch.Tensor) -> Any:
    return pickle.loads(box.numpy().data[_LENGTH : _LENGTH + _length(box)])
