"""Which branches are stopped early: those that are shown to be worse over the same samples.

Trials with the same batch size and seed train on the same samples step by step, so what the samples
do to the loss is the same for all of them, and the differences of their training losses say what
the learning rate does. A trial is stopped if, over the last half of its steps so far, its loss is
above that of a trial with another rate by more than chance would make of rates that do not differ,
and if the difference, going on as it has, is still there at the last step: a high rate often begins
worse and ends better.

Only rates of one batch size are compared, since a batch is judged by its best rate, and rates next
to the better one are kept, because the interval of the best rate rests on them.

The differences follow one another and are correlated, for which app/training/paired.py allows. The
level of one comparison is `MISTAKES` shared out over all that are made of a setting, with each seed
beside every other rate at every report. A setting is judged by all of its seeds, so one that is
stopped with one seed is stopped with the others at their first report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.training.paired import Floats, mean_of

MISTAKES = 0.05
"""The probability that a setting is stopped although its rate is as good as the others."""
COMPARED = 0.5
"""The share of the steps so far, at their end, that is compared."""
PIECES = 64
"""About how many losses a trial reports between two evaluations."""
LEAST_RATES = 3
"""With fewer all rates are next to the best one."""

Losses = Mapping[int, float]
"""Training losses by step."""


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """What a sweep can compare.

    Args:
        rates: The learning rates of its grid, rising.
        seeds: How many seeds it has.
        looks: How many reports of a trial come before its last one, at most.
    """

    rates: Sequence[float]
    seeds: int
    looks: int

    @property
    def level(self) -> float:
        """The probability of a mistake that one comparison may have (Bonferroni)."""
        others = max(1, len(self.rates) - 1)
        return MISTAKES / (others * self.seeds * max(1, self.looks))

    def rates_apart(self, first: float, second: float) -> int:
        """How many steps of the grid lie between two of its rates."""
        return abs(self._index(first) - self._index(second))

    def _index(self, rate: float) -> int:
        return min(range(len(self.rates)), key=lambda index: abs(self.rates[index] - rate))


@dataclass(kw_only=True)
class Branch:
    """A trial as far as it has trained.

    Args:
        rate: Its learning rate.
        last_step: The step at which it ends.
        losses: Its training losses.
    """

    rate: float
    last_step: int
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step that has a loss."""
        return max(self.losses, default=0)


def better_branch(
    branch: Branch, others: Iterable[Branch], comparisons: Comparisons
) -> Branch | None:
    """The branch beside which a branch is shown to be worse; None if there is none.

    Args:
        branch: The branch that is judged, at its last step so far.
        others: Branches with the same batch size and seed.
        comparisons: What the sweep can compare.
    """
    for other in others:
        is_as_far = other.step >= branch.step
        is_neighbour = comparisons.rates_apart(branch.rate, other.rate) <= 1
        if is_as_far and not is_neighbour and is_worse(branch, other, level=comparisons.level):
            return other
    return None


def is_worse(branch: Branch, other: Branch, *, level: float) -> bool:
    """Whether a branch is shown to be worse than another one, now and at its end.

    Args:
        branch: The branch that is judged.
        other: A branch over the same samples, step by step.
        level: The probability that this is said of branches that do not differ.
    """
    common_steps = sorted(branch.losses.keys() & other.losses.keys())
    compared = common_steps[len(common_steps) - math.ceil(COMPARED * len(common_steps)) :]
    differences = np.array([branch.losses[step] - other.losses[step] for step in compared])
    if len(differences) < 2 or not np.isfinite(differences).all():
        return False
    estimate = mean_of(differences)
    if not estimate.mean > estimate.above(1 - level):
        return False
    return difference_at(branch.last_step, np.array(compared, dtype=np.float64), differences) > 0


def difference_at(last_step: float, steps: Floats, differences: Floats) -> float:
    """What a difference comes to at a later step if it goes on along a straight line.

    Args:
        last_step: That step.
        steps: The steps of the differences, rising.
        differences: The differences, two or more.
    """
    half = len(steps) // 2
    earlier = float(differences[:half].mean())
    later = float(differences[half:].mean())
    between = float(steps[half:].mean() - steps[:half].mean())
    ahead = last_step - float(steps[half:].mean())
    return later + (later - earlier) * ahead / between
