"""Which of several runs is better, and whether the difference is more than noise.

Runs that see the same samples in the same order (forks of one checkpoint, or runs with the same
seed and data) share most of the noise in their training losses, because it comes from the samples.
So the losses are compared pair by pair, over the same samples: both curves are cut at the same
positions in the data, and the difference of each piece is one observation.

Observations that follow one another are correlated, for which their interval allows
(app/training/paired.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from app.checkpoint import commits
from app.errors import UserError
from app.results.history import history
from app.results.trained import config_of
from app.storage.storage import Storage
from app.training.paired import Floats, mean_of
from app.training.reporting import SAMPLES_SEEN

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of a metric over a run.

    Args:
        name: The run's name.
        samples: Position in the data after each value; rising.
        values: The values.
    """

    name: str
    samples: Floats
    values: Floats


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one run's metric is from another's, over the same samples.

    Args:
        name: The run that is compared.
        reference: The run that it is compared with.
        mean: The mean of the run's values less that of the reference's.
        low: The lower end of the interval for the mean; -inf with too few pieces.
        high: The upper end; inf with too few pieces.
        pieces: The number of observations.
        first_sample: Where in the data the comparison begins.
        last_sample: Where it ends.
    """

    name: str
    reference: str
    mean: float
    low: float
    high: float
    pieces: int
    first_sample: int
    last_sample: int

    @property
    def verdict(self) -> str:
        """better (lower), worse (higher), within noise, or undecided with too few pieces."""
        if math.isinf(self.high):
            return "undecided"
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "within noise"


def mean_interval(differences: Floats) -> tuple[float, float, float]:
    """The mean of correlated observations, with an interval for it.

    Args:
        differences: The observations, in order.

    Returns:
        (the mean, the lower and the upper end of the interval); an infinite interval with fewer
        than `LEAST_PIECES` (app/training/paired.py).
    """
    estimate = mean_of(differences)
    half = estimate.above((1 + CONFIDENCE) / 2)
    return estimate.mean, estimate.mean - half, estimate.mean + half


def compare_curves(run: Curve, reference: Curve, *, share: float) -> Difference:
    """Compare two curves over the last part of the samples that both have seen.

    Args:
        run: The curve that is judged.
        reference: The curve that it is compared with.
        share: Which share of the common samples, at their end, is compared.

    Raises:
        UserError: The runs have no samples in common.
    """
    first = max(run.samples[0], reference.samples[0])
    last = min(run.samples[-1], reference.samples[-1])
    if last <= first:
        raise UserError(
            f"{run.name} has logged samples {run.samples[0]:,.0f} to {run.samples[-1]:,.0f} and "
            f"{reference.name} {reference.samples[0]:,.0f} to {reference.samples[-1]:,.0f}, of "
            "which none are the same: train one of them further, or fork both from one checkpoint"
        )
    first = last - share * (last - first)
    edges = _common_edges(run, reference, first=first, last=last)
    differences = _piece_means(run, edges) - _piece_means(reference, edges)
    mean, low, high = mean_interval(differences)
    return Difference(
        name=run.name,
        reference=reference.name,
        mean=mean,
        low=low,
        high=high,
        pieces=len(differences),
        first_sample=round(edges[0]),
        last_sample=round(edges[-1]),
    )


def _common_edges(run: Curve, reference: Curve, *, first: float, last: float) -> Floats:
    """Positions in the data between which each curve has at least one value."""
    values_of_both = []
    for curve in (run, reference):
        inside = curve.samples[(curve.samples > first) & (curve.samples <= last)]
        values_of_both.append(inside)
    coarser = min(values_of_both, key=len)
    finer = max(values_of_both, key=len)
    edges = [first]
    for position in coarser:
        if np.any((finer > edges[-1]) & (finer <= position)):
            edges.append(float(position))
    if len(edges) < 2:
        raise UserError(
            f"{run.name} and {reference.name} have logged too few values in common: train them "
            "further, or log more often (train.log_every)"
        )
    return np.array(edges)


def _piece_means(curve: Curve, edges: Floats) -> Floats:
    """The mean of a curve's values between each two neighbouring edges."""
    means = []
    for start, end in pairwise(edges):
        inside = (curve.samples > start) & (curve.samples <= end)
        means.append(float(np.mean(curve.values[inside])))
    return np.array(means)


# --- runs -----------------------------------------------------------------------------------------


def curve_of(storage: Storage, metric: str) -> Curve:
    """The values of a metric over a run, by position in the data.

    Args:
        storage: The run's folder.
        metric: Its name, such as train/loss.

    Raises:
        UserError: The run has not logged the metric, or has no checkpoint.
    """
    name = storage.url.rpartition("/")[2]
    table = history(storage)
    if metric not in table:
        known = ", ".join(sorted(table.columns)) or "none"
        raise UserError(f"{name} has not logged {metric}: its metrics are {known}")
    values = table[metric].dropna()
    if SAMPLES_SEEN in table:
        # The batch changes: between two steps that have logged it, the samples are interpolated.
        positions = table[SAMPLES_SEEN].dropna()
        values = values.loc[positions.index[0] : positions.index[-1]]
        return Curve(
            name=name,
            samples=np.interp(
                values.index.to_numpy(dtype=np.float64),
                positions.index.to_numpy(dtype=np.float64),
                positions.to_numpy(dtype=np.float64),
            ),
            values=values.to_numpy(dtype=np.float64),
        )
    saved = commits(storage.join("checkpoints").url)
    if not saved:
        raise UserError(
            f"{name} has no checkpoint, which says how many samples it has seen: let it save one"
        )
    batch = config_of(storage).train.global_batch_size
    # Every step of this run has the same batch, also in a fork of a run with another one.
    samples_before = saved[0].meta["samples_seen"] - saved[0].step * batch
    return Curve(
        name=name,
        samples=values.index.to_numpy(dtype=np.float64) * batch + samples_before,
        values=values.to_numpy(dtype=np.float64),
    )


def compare_runs(
    runs: list[Storage], *, metric: str = "train/loss", share: float = 0.5
) -> list[Difference]:
    """Compare every run with the first one.

    Args:
        runs: The folders of the runs; the first is the reference.
        metric: The metric, of which a lower value is better.
        share: Which share of the common samples, at their end, is compared.

    Raises:
        UserError: There are fewer than two runs, or they cannot be compared.
    """
    if len(runs) < 2:
        raise UserError("a comparison needs two runs or more: write their folders")
    reference, *others = [curve_of(run, metric) for run in runs]
    return [compare_curves(curve, reference, share=share) for curve in others]


def sentence(difference: Difference) -> str:
    """A difference as a line for a person."""
    over = (
        f"over samples {difference.first_sample:,} to {difference.last_sample:,} "
        f"({difference.pieces} piece{'' if difference.pieces == 1 else 's'})"
    )
    amount = f"{difference.mean:+.4f}"
    if difference.verdict == "undecided":
        return (
            f"{difference.name} is undecided beside {difference.reference}: {amount}, but too few "
            f"values {over}: train both further, or log more often (train.log_every)"
        )
    relation = "of" if difference.verdict == "within noise" else "than"
    interval = f"{amount} (95 %: {difference.low:+.4f} to {difference.high:+.4f})"
    return (
        f"{difference.name} is {difference.verdict} {relation} {difference.reference}: {interval} "
        f"{over}"
    )
