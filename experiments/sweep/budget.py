"""What all trials of a sweep together may take: samples, seconds, dollars.

    budget: {samples: 200_000, seconds: 3600, dollars: 5}

Samples are known before anything starts: a sweep whose trials would see more is refused. Seconds
and dollars are counted while trials run, over all starts. What is counted is written down before it
is spent, so that a sweep that is killed at any moment has spent no more than its folder says. Short
of the budget running trials are asked to save; those that still run near its end are ended, by
their own clock and by the sweep.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.errors import Interrupted, UserError, nearest
from app.run.cost import RESERVE_SECONDS
from app.storage.storage import Storage
from experiments.sweep.search import number

FILE = "budget.json"
AHEAD_SECONDS = 2.0
"""How much is written down before it is spent: a sweep that is killed loses at most this."""
POLL_SECONDS = 0.25
RESERVE_SHARE = 0.1
"""Of the budget, at most, for trials to save in; a small budget keeps more."""
LEAST_RESERVE_SECONDS = 8.0
"""Half of it is for a machine under load to end what does not save in time."""


class BudgetSpent(Interrupted):
    """A sweep's budget is spent; its trials have saved or were ended."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a sweep may take; None is no limit.

    Attributes:
        samples: Of all trials together.
        seconds: In which trials run.
        dollars: By the prices of the nodes.
    """

    samples: int | None = None
    seconds: float | None = None
    dollars: float | None = None

    def __str__(self) -> str:
        limits = []
        if self.samples is not None:
            limits.append(f"{self.samples:,} samples")
        if self.seconds is not None:
            limits.append(f"{self.seconds:,g} seconds")
        if self.dollars is not None:
            limits.append(f"{self.dollars:,g} dollars")
        return ", ".join(limits)


@dataclass(kw_only=True)
class Taken:
    """What a sweep has taken so far, over all its starts."""

    seconds: float = 0.0
    dollars: float = 0.0


def read_budget(value: Any) -> Budget:
    """Reads the budget of a sweep file.

    Args:
        value: A mapping, or a number of dollars.

    Raises:
        UserError: It is neither, or a limit is not a number greater than 0.
    """
    if not isinstance(value, Mapping):
        value = {} if value is None else {"dollars": value}
    kinds = ("samples", "seconds", "dollars")
    limits: dict[str, Any] = {}
    for key, limit in value.items():
        if key not in kinds:
            hint = nearest(str(key), kinds)
            raise UserError(f"budget has {key!r}{hint}: write one or more of {', '.join(kinds)}")
        amount = number(limit)
        if amount is None or amount <= 0:
            raise UserError(f"budget.{key} is {limit!r}, but it must be a number greater than 0")
        limits[key] = int(amount) if key == "samples" else float(amount)
    return Budget(**limits)


class Ledger:
    """Counts what the trials of a sweep take, in its folder.

    Args:
        budget: What they may take.
        storage: The sweep's folder.
        clock: The time in seconds.
    """

    def __init__(
        self, budget: Budget, storage: Storage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget = budget
        self.storage = storage
        self.clock = clock
        self.written = _read(storage)
        """What the file says, which is ahead of what was spent."""
        self.taken = Taken(**asdict(self.written))
        self._counted = clock()

    def count(self, dollars_per_hour: float) -> None:
        """Adds what was taken since the last call.

        Args:
            dollars_per_hour: Of the trials that run now.
        """
        now = self.clock()
        seconds = max(0.0, now - self._counted)
        self._counted = now
        self.taken.seconds += seconds
        self.taken.dollars += seconds * dollars_per_hour / 3600
        ahead_dollars = self.taken.dollars + AHEAD_SECONDS / 2 * dollars_per_hour / 3600
        is_covered = (
            self.taken.seconds + AHEAD_SECONDS / 2 <= self.written.seconds
            and ahead_dollars <= self.written.dollars
        )
        if not is_covered:
            self._write(dollars_per_hour)

    def begin(self) -> None:
        """Begins to count: what was done before is not of this budget."""
        self._counted = self.clock()

    def close(self) -> None:
        """Writes down what was taken, without what was written ahead of it."""
        self.written = Taken(**asdict(self.taken))
        self._save()

    def _write(self, dollars_per_hour: float) -> None:
        self.written = Taken(
            seconds=self.taken.seconds + AHEAD_SECONDS,
            dollars=self.taken.dollars + AHEAD_SECONDS * dollars_per_hour / 3600,
        )
        self._save()

    def _save(self) -> None:
        self.storage.write_bytes(FILE, json.dumps(asdict(self.written)).encode())

    def left_seconds(self, dollars_per_hour: float) -> float:
        """Seconds until the budget is spent, with the trials that run now."""
        left = math.inf
        if self.budget.seconds is not None:
            left = self.budget.seconds - self.taken.seconds
        if self.budget.dollars is not None and dollars_per_hour > 0:
            dollars = self.budget.dollars - self.taken.dollars
            left = min(left, 3600 * dollars / dollars_per_hour)
        return left

    def is_ending(self, dollars_per_hour: float) -> bool:
        """Whether trials are to save and stop now, so that their end is within the budget.

        Args:
            dollars_per_hour: Of the trials that run, or would run.
        """
        return self.left_seconds(dollars_per_hour) <= self._reserve(dollars_per_hour)

    def is_spent(self, dollars_per_hour: float) -> bool:
        """Whether nothing may run any longer: early by what an end takes, half of the reserve."""
        return self.left_seconds(dollars_per_hour) <= self._reserve(dollars_per_hour) / 2

    def seconds_to_save(self, dollars_per_hour: float) -> float:
        """Seconds until nothing may run any longer."""
        left = self.left_seconds(dollars_per_hour) - self._reserve(dollars_per_hour) / 2
        return max(0.0, left)

    def _reserve(self, dollars_per_hour: float) -> float:
        """Seconds of the budget that are kept for trials to save in; 0 without a budget."""
        lengths = []
        if self.budget.seconds is not None:
            lengths.append(self.budget.seconds)
        if self.budget.dollars is not None and dollars_per_hour > 0:
            lengths.append(3600 * self.budget.dollars / dollars_per_hour)
        if not lengths:
            return 0.0
        length = min(lengths)
        reserve = min(RESERVE_SECONDS, RESERVE_SHARE * length)
        return max(reserve, min(LEAST_RESERVE_SECONDS, length / 2))

    def sentence(self) -> str:
        """What was taken of the budget, for a person."""
        parts = []
        if self.budget.seconds is not None:
            parts.append(f"{self.taken.seconds:,.0f} of {self.budget.seconds:,g} seconds")
        if self.budget.dollars is not None:
            parts.append(f"{self.taken.dollars:,.3g} of {self.budget.dollars:,g} dollars")
        return " and ".join(parts)


@contextlib.contextmanager
def watched(
    ledger: Ledger,
    dollars_per_hour: Callable[[], float],
    *,
    ask: Callable[[], object],
    end: Callable[[threading.Event], object],
) -> Any:
    """Counts in a thread while the block runs.

    Args:
        ledger: Counts.
        dollars_per_hour: Of the trials that run now.
        ask: Asks trials to save and stop; called once, short of the budget.
        end: Ends those that still run; called once, near the end of the budget, with an event that
            is set when the block has ended.
    """
    is_over = threading.Event()

    def watch() -> None:
        has_asked = False
        has_ended = False
        while not is_over.wait(POLL_SECONDS):
            rate = dollars_per_hour()
            ledger.count(rate)
            if not has_asked and ledger.is_ending(rate):
                has_asked = True
                ask()
            if not has_ended and ledger.is_spent(rate):
                has_ended = True
                # In a thread of its own: meanwhile seconds and dollars are still taken.
                threading.Thread(target=end, args=(is_over,), daemon=True, name="end").start()

    ledger.begin()
    ledger.count(dollars_per_hour())
    thread = threading.Thread(target=watch, daemon=True, name="budget")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        ledger.count(dollars_per_hour())
        ledger.close()


def _read(storage: Storage) -> Taken:
    try:
        return Taken(**json.loads(storage.read_bytes(FILE)))
    except (OSError, ValueError, TypeError):
        return Taken()
