"""Running a function on several ranks so that every rank learns how it went on each.

If a rank failed and simply left, the others would wait in their next collective until the time-out.
Here a failure is a value that is exchanged like a result, and then raised on all ranks in the same
words.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from app.errors import RunFailed

T = TypeVar("T")
R = TypeVar("R")
SUPERSEDED = "superseded: another attempt of this run has taken over"


class CheckpointError(RunFailed):
    """A checkpoint could not be written or committed; those committed before are untouched.

    Every rank raises it with the same sentence, which names the rank that failed.

    Args:
        sentence: For a person.
        superseded: Whether the reason is that another start of the run has taken over.
    """

    def __init__(self, sentence: str, *, superseded: bool = False) -> None:
        super().__init__(sentence)
        self.superseded = superseded


class NotFinite(Exception):
    """The state of a rank is not finite, and nothing was begun. Raised on all ranks."""


class RankFailed(Exception):
    """What went wrong on each rank that failed.

    Args:
        line: For a person; it names the ranks.
        reasons: The reason of each failed rank.
    """

    def __init__(self, line: str, reasons: dict[int, str]) -> None:
        super().__init__(line)
        self.reasons = reasons


class Superseded(Exception):
    """Another start of the run has taken over."""


def describe(error: BaseException) -> str:
    """What went wrong, in one line; in the words of the operating system if it has some."""
    if isinstance(error, Superseded):
        return SUPERSEDED
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Outcome(NamedTuple):
    """What a function has returned, or why it failed."""

    result: Any
    reasons: dict[int, str]
    """By rank; {} if the function has returned."""


class Ranks:
    """All ranks of the job, or this process alone without torch.distributed.

    Args:
        own_group: Whether the ranks communicate over a gloo group of their own, so that a thread
            may do so while training continues. Making the group is a collective call. Without it,
            they use the default group.
    """

    def __init__(self, *, own_group: bool = False) -> None:
        is_initialized = dist.is_available() and dist.is_initialized()
        self.distributed = is_initialized and dist.get_world_size() > 1
        self.group: dist.ProcessGroup | None = None
        self.rank = 0
        self.size = 1
        if self.distributed:
            self.group = dist.new_group(backend="gloo") if own_group else None
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()

    def any(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank. Needs a group for CPUs, as its own is."""
        counts = torch.tensor(flags, dtype=torch.uint8)
        if self.distributed:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.group)
        return [bool(count) for count in counts.tolist()]

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        values = [value]
        if self.distributed:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def scatter(self, values: list[T]) -> T:
        """This rank's one of the values that rank 0 has, one for each rank; [] on other ranks."""
        if not self.distributed:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values or None, src=0, group=self.group)
        value: T = received[0]
        return value

    def send(self, value: object, to: int) -> None:
        """Send a value to another rank, which calls `receive`."""
        dist.send_object_list([value], dst=to, group=self.group)

    def receive(self, source: int) -> Any:
        """The value that another rank sends to this one."""
        received: list[Any] = [None]
        dist.recv_object_list(received, src=source, group=self.group)
        return received[0]

    def first_of(self, texts: Sequence[str]) -> tuple[str, int]:
        """The first text of the first rank that has one, and how many there are on all ranks."""
        if not self.distributed:
            return (texts[0] if texts else ""), len(texts)
        count = torch.tensor([len(texts)])
        first = torch.tensor([self.rank if texts else self.size])
        dist.all_reduce(count, group=self.group)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        if not int(count):
            return "", 0
        chosen = [texts[0] if texts else ""]
        dist.broadcast_object_list(chosen, src=int(first), group=self.group)
        return chosen[0], int(count)

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on every rank.

        Raises:
            RankFailed: On all ranks, if the function has failed.
        """
        outcome = [self._attempt(function) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        return self._results(outcome)[0]

    def run_and_combine(self, function: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Call a function on every rank, and combine the results on rank 0.

        Args:
            function: Called on every rank.
            combine: Called on rank 0 with all results, by rank, if no rank has failed.

        Returns:
            What `combine` has returned, on every rank.

        Raises:
            RankFailed: On all ranks, if the function has failed on any of them, or `combine` has.
        """
        outcomes = self._gather(self._attempt(function))
        return self.run_on_first(lambda: combine(self._results(outcomes)))

    def run_and_divide(self, function: Callable[[], T], divide: Callable[[list[T]], list[R]]) -> R:
        """Like `run_and_combine`, but each rank gets a value of its own.

        Args:
            function: Called on every rank.
            divide: Called on rank 0 with all results, by rank; returns a value for each rank.

        Returns:
            This rank's value.

        Raises:
            RankFailed: On all ranks, if the function has failed on any of them, or `divide` has.
        """
        outcomes = self._gather(self._attempt(function))
        shares: list[_Outcome] = []
        received: list[_Outcome | None] = [None]
        if self.rank == 0:
            divided = self._attempt(lambda: divide(self._results(outcomes)))
            if divided.reasons:
                shares = [divided] * self.size
            else:
                shares = [_Outcome(share, {}) for share in divided.result]
            received = [shares[0]]
        if self.distributed:
            dist.scatter_object_list(received, shares or None, src=0, group=self.group)
        return self._results(received)[0]

    def _gather(self, outcome: _Outcome) -> list[_Outcome]:
        """The outcomes of all ranks, by rank, on rank 0; [] on other ranks."""
        if not self.distributed:
            return [outcome]
        outcomes: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(outcome, outcomes or None, dst=0, group=self.group)
        return outcomes

    def _attempt(self, function: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(function(), {})
        except RankFailed as error:  # of an exchange within this one
            return _Outcome(None, error.reasons)
        except BaseException as error:  # the other ranks must learn of any failure
            return _Outcome(None, {self.rank: describe(error)})

    def _results(self, outcomes: list[Any]) -> list[Any]:
        reasons: dict[int, str] = {}
        for outcome in outcomes:
            reasons |= outcome.reasons
        if reasons:
            lines = [
                f"rank {rank}: {reason}" if self.distributed else reason
                for rank, reason in sorted(reasons.items())
            ]
            raise RankFailed("; ".join(lines), reasons)
        return [outcome.result for outcome in outcomes]
