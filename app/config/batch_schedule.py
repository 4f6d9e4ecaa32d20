"""The global batch as a function of the samples that a run has seen.

A step takes the batch of the last row that begins at or before the samples seen so far. Nothing
else decides it, so that every layout, and every resumed start, takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

AUTO = "auto"
"""The schedule of a run that decides on its batch while it trains."""


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch over the samples seen.

    Args:
        rows: (samples seen, global batch from there on). The first begins at 0, each later one
            after the one before it.
    """

    rows: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, batch: int) -> BatchSchedule:
        """The same batch in every step."""
        return cls(((0, batch),))

    @property
    def is_constant(self) -> bool:
        return len(set(self.batches)) == 1

    @property
    def batches(self) -> list[int]:
        """The batch of each row."""
        return [batch for _, batch in self.rows]

    @property
    def largest(self) -> int:
        return max(self.batches)

    @property
    def smallest(self) -> int:
        return min(self.batches)

    @property
    def common_divisor(self) -> int:
        """The largest number of workers that can share every batch evenly."""
        return math.gcd(*self.batches)

    def batch_at(self, samples: int) -> int:
        """The samples of the step that begins after so many samples."""
        batch = self.rows[0][1]
        for begin, row_batch in self.rows:
            if begin <= samples:
                batch = row_batch
        return batch

    def batches_from(self, samples: int) -> tuple[int, ...]:
        """The batch of the step that begins after so many samples, and of each later row."""
        later = [batch for begin, batch in self.rows if begin > samples]
        return (self.batch_at(samples), *later)

    def samples_after(self, steps: int, *, start: int = 0) -> int:
        """The samples seen after some steps.

        Args:
            steps: How many.
            start: The samples seen before the first of them.
        """
        samples = start
        for batch, end in self._parts(start):
            steps_in_part = steps
            if end is not None:
                steps_in_part = min(steps, max(0, -(-(end - samples) // batch)))
            samples += steps_in_part * batch
            steps -= steps_in_part
        return samples

    def steps_until(self, samples: int, *, start: int = 0) -> int:
        """The fewest steps after which at least so many samples have been seen.

        Args:
            samples: How many, from the beginning of the run.
            start: The samples seen before the first of the steps.
        """
        steps = 0
        seen = start
        for batch, end in self._parts(start):
            target = samples if end is None else min(samples, end)
            steps_in_part = max(0, -(-(target - seen) // batch))
            steps += steps_in_part
            seen += steps_in_part * batch
            if seen >= samples:
                break
        return steps

    def _parts(self, start: int) -> Iterator[tuple[int, int | None]]:
        """(batch, samples seen at which it ends) of each row that has not ended by `start`.

        The last one has no end. A row that the steps of an earlier one jump over has no step.
        """
        for number, (_, batch) in enumerate(self.rows):
            if number + 1 == len(self.rows):
                yield batch, None
            elif self.rows[number + 1][0] > start:
                yield batch, self.rows[number + 1][0]

    def step_on_curve(self, step: int, *, samples: int, first: int, steps: int) -> float:
        """Where a curve over the steps of a run is, if it is to be a curve over samples.

        If every batch is the same, both are the same curve. If the batch grows, a curve over steps
        would spend most samples at its end.

        Args:
            step: Steps taken so far.
            samples: Samples seen so far.
            first: The step at which the curve begins.
            steps: Steps of the whole run; the curve ends at the last one.

        Returns:
            The step of a run with equal batches at which the same share of the curve's samples has
            been seen.
        """
        last = steps - 1
        if self.is_constant or not first <= step <= last:
            return step
        samples_at_first = self.samples_after(first)
        samples_at_last = self.samples_after(last - step, start=samples)
        if samples_at_last <= samples_at_first:
            return step
        seen = max(0, samples - samples_at_first)
        return first + (last - first) * seen / (samples_at_last - samples_at_first)


def schedule_mistake(schedule: Any) -> str:
    """What is wrong with train.batch_schedule, for a sentence; "" if nothing is.

    Args:
        schedule: As it is written.
    """
    if schedule == AUTO:
        return ""
    if not isinstance(schedule, list):
        return f"it must be a list of rows, or {AUTO}"
    rows: Sequence[Any] = schedule
    if not all(isinstance(row, list) and _is_whole_pair(row) for row in rows):
        return "each row must be two whole numbers, the samples seen and the batch from there on"
    begins = [begin for begin, _ in rows]
    if begins and begins[0] != 0:
        return "the first row must begin at 0 samples"
    if any(begin >= next_begin for begin, next_begin in pairwise(begins)):
        return "each row must begin at more samples than the one before it"
    if any(batch < 1 for _, batch in rows):
        return "each batch must be greater than 0"
    return ""


def _is_whole_pair(row: Sequence[Any]) -> bool:
    return len(row) == 2 and all(type(number) is int for number in row)
