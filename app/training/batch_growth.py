"""When a run tries twice its batch size, and how it decides: pure functions of samples and losses.

With train.batch_schedule=auto a run tests whether twice its batch trains as well, first after
`FIRST_STEPS` steps and then whenever the samples seen have doubled. From one state, two branches
train over the same next samples: one with the batch, and one with twice the batch and the rate that
belongs to it (optimizer.lr_scaling). Their losses are compared pair by pair: a step of the larger
batch with the two steps of the smaller one over the same samples. If the larger batch is not worse
beyond noise, the run continues from the end of its branch, and otherwise from the end of the other.

The test is one-sided, on the mean difference over the last `COMPARED` of the branches, with the
variance of correlated pairs (app/training/paired.py). If both batches are equally good, twice the
batch is refused in `LEVEL` of the cases. If twice the batch is worse by one standard error of the
difference, it is still accepted in 23 % of the cases, and if it is worse by two, in 4 %.

The samples of the branch that is dropped are the cost of this. All such branches together have at
most `MOST_MEASURING` of the samples of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from app.config.batch_schedule import BatchSchedule
from app.errors import NonFiniteError
from app.training.paired import Floats, MeanEstimate, mean_of
from app.training.step_sync import Agreement

FIRST_STEPS = 256
"""Steps after which a run tests for the first time; schedule.warmup_steps if that is more."""
PIECES = 64
"""Steps of the larger batch in a branch, at least."""
WINDOW_SHARE = 1 / 8
"""A branch has at least this share of the samples seen before it, since a batch acts slowly."""
COMPARED = 0.75
"""The share of a branch, at its end, that is compared: at first the branches hardly differ."""
LEVEL = 0.4
"""The probability that twice the batch is refused although it is as good.

It is high, because a wrong batch would harm the rest of the run, which is much longer than a
branch. A wrong refusal costs only additional steps, until the samples have doubled once more.
"""
MOST_MEASURING = 0.2
"""The largest share of the run's samples that all dropped branches together may have."""
LEAST_LEFT = 4
"""No branch begins unless this many times its samples are left."""


@dataclass(frozen=True, kw_only=True)
class BranchPoint:
    """Where two branches begin.

    Args:
        samples: The samples seen before them.
        batch: The global batch of one; the other has twice as many.
        window: The samples of each branch, a multiple of twice the batch.
    """

    samples: int
    batch: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a comparison of two branches has decided.

    Args:
        samples: The samples seen before the branches.
        batch: The global batch until then.
        window: The samples of each branch.
        difference: The mean loss of twice the batch less that of the batch; inf if it diverged,
            -inf if only the batch did.
        error: The standard error of the difference; 0 if either diverged.
        doubled: Whether the run went on with twice the batch.
        dropped_steps: Steps of the branch that was dropped.
        dropped_seconds: Seconds of training in it.
    """

    samples: int
    batch: int
    window: int
    difference: float
    error: float
    doubled: bool
    dropped_steps: int
    dropped_seconds: float

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """For a person."""
        place = f"at {self.samples:,} samples"
        if math.isinf(self.difference):
            diverged = 2 * self.batch if self.difference > 0 else self.batch
            difference = f"{diverged:,} diverged"
        else:
            difference = f"loss difference {self.difference:+.3g} ± {self.error:.2g}"
        if self.doubled:
            return f"{place}: {self.batch:,} → {2 * self.batch:,}, {difference}"
        return f"{place}: {self.batch:,} stays, not {2 * self.batch:,}, {difference}"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The batch of a run that decides on it while it trains.

    Args:
        first_batch: The global batch that the run begins with.
        total: The samples of the whole run.
        first_samples: The samples after which the run tests for the first time.
        decisions: What was decided until now.
    """

    first_batch: int
    total: int
    first_samples: int
    decisions: tuple[Decision, ...] = field(default=())

    @classmethod
    def of(cls, *, batch: int, steps: int, warmup_steps: int) -> Growth:
        """The growth of a run that has taken no step.

        Args:
            batch: The global batch that it begins with.
            steps: The steps that it would take with this batch.
            warmup_steps: Of its schedule.
        """
        first_samples = batch * max(FIRST_STEPS, warmup_steps)
        return cls(first_batch=batch, total=batch * steps, first_samples=first_samples)

    @staticmethod
    def least_steps(warmup_steps: int) -> int:
        """The fewest steps of the first batch with which a run tests at all."""
        first_step = max(FIRST_STEPS, warmup_steps)
        window = 2 * max(PIECES, math.ceil(WINDOW_SHARE * first_step / 2))
        return max(math.ceil(window / MOST_MEASURING), first_step + LEAST_LEFT * window)

    @property
    def batches(self) -> BatchSchedule:
        """The global batch over the samples seen, as decided until now."""
        rows = [(0, self.first_batch)]
        rows += [(each.samples, 2 * each.batch) for each in self.decisions if each.doubled]
        return BatchSchedule(tuple(rows))

    @property
    def dropped_samples(self) -> int:
        """The samples of the branches that were dropped."""
        return sum(each.window for each in self.decisions)

    def steps_left(self, samples: int) -> int:
        """The steps that are left, if the batch stays.

        Args:
            samples: The samples seen.
        """
        return self.batches.steps_until(self.total, start=samples)

    def next_point(self, samples: int) -> int | None:
        """The samples seen at which the next branches begin, at the first step that reaches them.

        Args:
            samples: The samples seen.

        Returns:
            At most `samples` if they begin now; None if they never do.
        """
        point = self.first_samples
        last = self.decisions[-1].samples if self.decisions else 0
        # A fork of another run begins with many samples: it tests once, not for every doubling.
        while point <= last or 2 * point <= samples:
            point *= 2
        return point if self._is_affordable(self._point_at(max(point, samples))) else None

    def point_at(self, samples: int) -> BranchPoint | None:
        """The branches that begin now; None if none do.

        Args:
            samples: The samples seen.
        """
        point = self.next_point(samples)
        return None if point is None or point > samples else self._point_at(samples)

    def _point_at(self, samples: int) -> BranchPoint:
        batch = self.batches.batch_at(samples)
        pieces = max(PIECES, math.ceil(WINDOW_SHARE * samples / (2 * batch)))
        return BranchPoint(samples=samples, batch=batch, window=2 * batch * pieces)

    def _is_affordable(self, point: BranchPoint) -> bool:
        is_within_share = self.dropped_samples + point.window <= MOST_MEASURING * self.total
        return is_within_share and LEAST_LEFT * point.window <= self.total - point.samples

    def summary(self) -> dict[str, Any]:
        """The batches and the cost of deciding on them, for the summary of the run."""
        return {
            "first": self.first_batch,
            "last": self.batches.rows[-1][1],
            "decisions": [each.to_meta() for each in self.decisions],
            "dropped_samples": self.dropped_samples,
            "dropped_share": self.dropped_samples / self.total,
            "dropped_steps": sum(each.dropped_steps for each in self.decisions),
            "dropped_seconds": sum(each.dropped_seconds for each in self.decisions),
        }

    def step_on_curve(self, samples: int, batch: int) -> float:
        """The position on the learning-rate curve, in steps of the first batch.

        A step with a larger batch counts as several steps of the first batch, and has the rate of
        the last of them, so that the curve ends with the run.

        Args:
            samples: The samples seen before the step.
            batch: Of the step.
        """
        return (samples + batch) / self.first_batch - 1

    def possible_batches(self) -> list[int]:
        """The batches that the run may reach, the first one included."""
        growth = replace(self, decisions=())
        batches = [self.first_batch]
        point = growth.next_point(0)
        while point is not None:
            branches = growth._point_at(point)
            doubled = Decision(
                samples=point,
                batch=branches.batch,
                window=branches.window,
                difference=0.0,
                error=0.0,
                doubled=True,
                dropped_steps=0,
                dropped_seconds=0.0,
            )
            growth = replace(growth, decisions=(*growth.decisions, doubled))
            batches.append(2 * branches.batch)
            point = growth.next_point(point + branches.window)
        return batches


# --- the decision ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is in its steps and its data."""

    step: int
    samples_seen: int
    stream: str


@dataclass(frozen=True, kw_only=True)
class BranchLosses:
    """The losses of a branch.

    Args:
        losses: Of each step, over the global batch.
        items: Of each step, what the loss is the mean over; 0 if it has none and no loss.
        diverged: Whether a loss was not finite; there may be fewer losses then.
    """

    losses: Sequence[float]
    items: Sequence[float]
    diverged: bool = False


@dataclass
class Branch:
    """What the steps of a branch have left.

    Args:
        end: Where the branch has ended.
        agreements: What the ranks have agreed on; every step is logged.
        stopped: Whether the run is to stop, so that steps are missing.
        diverged: Why steps are missing, if a loss was not finite.
    """

    end: Position
    agreements: list[Agreement] = field(default_factory=list)
    stopped: bool = False
    diverged: NonFiniteError | None = None

    @property
    def losses(self) -> BranchLosses:
        """The losses over the global batch, the same on all ranks."""
        logged = [entry for agreed in self.agreements for entry in agreed.logged]
        return BranchLosses(
            losses=[entry.loss for entry in logged],
            items=[entry.items for entry in logged],
            diverged=self.diverged is not None,
        )


def pairs_of(same: BranchLosses, doubled: BranchLosses) -> Floats:
    """The mean losses of both branches over the same samples, for each step of the larger batch.

    Args:
        same: Of the branch with the batch: two steps for each step of the other.
        doubled: Of the branch with twice the batch.

    Returns:
        (steps of the larger batch that have a loss, 2)
    """
    items = np.asarray(same.items, dtype=np.float64).reshape(-1, 2)
    losses = np.asarray(same.losses, dtype=np.float64).reshape(-1, 2)
    counts = items.sum(axis=1)
    has_items = counts > 0
    # The mean over the items of both steps, as the loss of one step over both is.
    sums = np.where(items > 0, losses * items, 0.0).sum(axis=1)
    means = sums[has_items] / counts[has_items]
    return np.stack([means, np.asarray(doubled.losses, dtype=np.float64)[has_items]], axis=1)


def compare(same: BranchLosses, doubled: BranchLosses) -> MeanEstimate:
    """The difference of two branches over the same samples.

    Args:
        same: Of the branch with the batch: two steps for each step of the other.
        doubled: Of the branch with twice the batch.

    Returns:
        The mean loss of `doubled` less that of `same`; ±inf without an error if one diverged.
    """
    if doubled.diverged or same.diverged:
        return MeanEstimate(mean=math.inf if doubled.diverged else -math.inf, error=0.0, freedom=1)
    pairs = pairs_of(same, doubled)
    differences = pairs[:, 1] - pairs[:, 0]
    return mean_of(differences[-math.ceil(COMPARED * len(differences)) :])


def is_as_good(difference: MeanEstimate) -> bool:
    """Whether twice the batch is not worse beyond noise.

    Args:
        difference: From `compare`.
    """
    if math.isinf(difference.mean):
        return difference.mean < 0
    if math.isinf(difference.error):  # too few steps have a loss
        return False
    return difference.mean <= difference.above(1 - LEVEL)
