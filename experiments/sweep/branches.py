"""What branches of one training say about its batch now: pure functions of their losses.

Branches continue one checkpoint over the same samples, so seeds are compared pair by pair: what a
seed changes for all of them alike cancels. The noise is the standard deviation, over seeds, of the
difference between two branches. The critical batch is the largest whose loss after the same
samples, at its best learning rate, is above the lowest by no more than this noise. A batch that is
shown to be worse than a larger one had no rate that suits it, and is left out.

Intervals are those of draws: the means of all branches are drawn anew with the measured noise,
which is drawn too, since it has few degrees of freedom. Each draw gives its own best rates, losses
and critical batch. Between two batches that were tried the loss may rise early or late, and each
draw takes another course. The central 90 % of the draws contain the truth in at least 80 % of
synthetic cases, which is what the intervals claim.

Where the best rate of a batch is the last that was tried, its loss is an upper bound: a better rate
may lie beyond it. With it the batch may be as good as the best one, or so good that all larger ones
are worse, so the interval of the critical batch contains every such batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.sweep.search import Search
from experiments.sweep.trials import BATCH, RATE, SEED, Trial

Floats = npt.NDArray[np.float64]
Cell = tuple[int, float]
"""A batch size and a learning rate."""
Losses = Mapping[Cell, Sequence[float]]
"""The loss of each cell by seed, lower is better; nan where there is none."""

DRAWS = 1000
TABLES = 4000
"""Of random losses, by which the median of variances is calibrated."""
TAILS = (0.05, 0.95)
"""Quantiles of the draws at the ends of an 80 % interval; see above."""
MISTAKES = 0.05
"""The probability that any batch is called worse although none is."""
SHARPEST = 4.0
"""Between two batches the loss is linear in batch**γ, with γ from 1 / SHARPEST to SHARPEST."""
DECIDED = 2.0
"""The critical batch is decided if its interval spans no more than this factor."""
MOST_SEEDS = 100
WITHOUT_RATE = 1.0
"""The learning rate of a cell whose space has none."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 80 % interval.

    Args:
        value: The estimate.
        low: The lower end.
        high: The upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class BranchBatch:
    """What was found at one batch size.

    Args:
        batch: The batch size.
        rate: Its best learning rate; None with fewer than three.
        edge: Whether the best rate is the smallest or the largest that was tried.
        best_rate: The best of the rates that were tried.
        loss: The loss there, the mean over seeds.
        excess: How far it is above the lowest of all batches.
        verdict: "best", "within noise", "worse", or "undecided" if neither is shown.
    """

    batch: int
    rate: Interval | None
    edge: bool
    best_rate: float
    loss: float
    excess: float
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The answer of branches.

    Args:
        batches: By batch size, rising.
        seeds: How many.
        noise: The standard deviation of the difference between two branches; None with one seed.
        critical: The critical batch; None with one seed or one batch size.
        exponent: γ of best rate ∝ batch**γ; None if fewer than two batches have a best rate.
        more_seeds: How many more would make the noise small enough to decide on the critical batch;
            0 if it is, None if more than MOST_SEEDS would be needed.
        edge_batches: The batch sizes whose best rate is the last of two or more that were tried.
    """

    batches: list[BranchBatch]
    seeds: int
    noise: float | None
    critical: Interval | None
    exponent: Interval | None
    more_seeds: int | None
    edge_batches: list[int]

    @property
    def is_decided(self) -> bool:
        is_narrow = self.critical is None or self.critical.high <= DECIDED * self.critical.low
        return self.more_seeds == 0 and is_narrow

    @property
    def is_open(self) -> bool:
        """Whether the critical batch may be larger than the largest that was tried."""
        return self.critical is not None and self.critical.high >= self.batches[-1].batch

    def loss_of(self, batch: int) -> float:
        """The mean loss of a batch size at the best of the rates that were tried."""
        return next(each.loss for each in self.batches if each.batch == batch)

    def usable(self) -> list[BranchBatch]:
        """The batches up to the critical one; without one, those that are not worse."""
        if self.critical is None:
            return [each for each in self.batches if each.verdict != "worse"]
        best = min(self.batches, key=lambda each: each.loss)
        return [
            each
            for each in self.batches
            if each.batch <= self.critical.value
            and (each.verdict != "worse" or each.batch > best.batch)
        ]


# --- from trials ----------------------------------------------------------------------------------


def losses_of(trials: Iterable[Trial], search: Search, others: Mapping[str, Any]) -> Losses:
    """The last loss of every branch, by batch, rate and seed.

    Args:
        trials: The branches; those that were stopped early or diverged have no loss. A cell with
            one that has not ended is left out.
        search: Says what is compared.
        others: The values of the other keys of the space that are looked at.

    Returns:
        {} if batch sizes were not varied.
    """
    by_cell: dict[Cell, dict[str, float]] = {}
    unfinished: set[Cell] = set()
    for trial in trials:
        values = dict(trial.values)
        if BATCH not in values:
            return {}
        batch = int(values.pop(BATCH))
        rate = float(values.pop(RATE, WITHOUT_RATE))
        seed = str(values.pop(SEED, 0))
        curve = trial.curve(search.metric)
        if values != dict(others):
            continue
        has_ended = trial.status in ("finished", "reached") and bool(curve)
        loss = search.sign * curve[-1][1] if has_ended else math.nan
        by_cell.setdefault((batch, rate), {})[seed] = loss
        if not trial.ended:
            unfinished.add((batch, rate))
    seeds = sorted({seed for losses in by_cell.values() for seed in losses})
    return {
        cell: [losses.get(seed, math.nan) for seed in seeds]
        for cell, losses in by_cell.items()
        if cell not in unfinished
    }


def is_of_cell(trial: Trial, cell: Cell, others: Mapping[str, Any]) -> bool:
    """Whether a trial is a branch of this batch and rate, with these values of other keys."""
    values = dict(trial.values)
    values.pop(SEED, None)
    batch = int(values.pop(BATCH, 0))
    rate = float(values.pop(RATE, WITHOUT_RATE))
    return (batch, rate) == cell and values == dict(others)


def best_cell(losses: Losses) -> Cell:
    """The batch and rate with the lowest mean loss, of those that have one for every seed.

    The lowest loss of one seed would be in part that of the luckiest.
    """
    means = {cell: float(np.mean(values)) for cell, values in losses.items()}
    return min((cell for cell in means if math.isfinite(means[cell])), key=means.__getitem__)


# --- beyond the grid ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A batch size whose best learning rate is the last that was tried.

    Args:
        batch: The batch size.
        rate: That learning rate.
        beyond: The next one, as far from it as it is from its neighbour.
        is_worse: Whether the batch is worse than another at the rates that were tried.
    """

    batch: int
    rate: float
    beyond: float
    is_worse: bool


def edges_of(losses: Losses) -> list[Edge]:
    """Where a better learning rate may lie beyond those that were tried.

    Args:
        losses: From `losses_of`.

    Returns:
        The lowest loss first. A batch that is worse than another is among them, since with a rate
        beyond those that were tried it may not be. A batch that has one rate is left out.
    """
    grid = _grid_of(losses)
    if grid is None:
        return []
    means = [each.mean(axis=1) for each in grid.losses]
    logs, _ = _best(grid, [each[None] for each in means])
    edges = []
    for each in sorted(_by_batch(grid, means, logs[0], None), key=lambda each: each.loss):
        if each.batch not in grid.edge_batches:
            continue
        tried = sorted(rate for batch, rate in losses if batch == each.batch)
        is_highest = math.isclose(each.best_rate, tried[-1])
        rate, neighbour = (tried[-1], tried[-2]) if is_highest else (tried[0], tried[1])
        beyond = float(f"{rate * rate / neighbour:.6g}")
        is_worse = each.verdict == "worse"
        edges.append(Edge(batch=each.batch, rate=rate, beyond=beyond, is_worse=is_worse))
    return edges


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Branches with a loss for every seed.

    Args:
        batches: The batch sizes, rising.
        logs: For each, the logarithms of its rates, rising.
        losses: For each, (rates, seeds).
        edges: For each, whether the best rate is the last that was tried.
        edge_batches: Those of them with two or more rates.
        variance: Of a branch's loss, without what a seed changes for all alike.
        freedom: Degrees of freedom of the variance; 0 if there is one seed.
    """

    batches: list[int]
    logs: list[Floats]
    losses: list[Floats]
    edges: list[bool]
    edge_batches: list[int]
    variance: float
    freedom: int

    @property
    def seeds(self) -> int:
        return int(self.losses[0].shape[1])


@dataclass(frozen=True, kw_only=True)
class _Draws:
    """What each draw says.

    Args:
        logs: Logarithms of best rates, (draws, batches).
        losses: Losses there, (draws, batches).
        noise: (draws,)
        critical: (draws,)
    """

    logs: Floats
    losses: Floats
    noise: Floats
    critical: Floats


def answer_of(losses: Losses, *, seed: int = 0) -> Branches | None:
    """What branches say.

    Args:
        losses: From `losses_of`.
        seed: Of the draws.

    Returns:
        None if no batch size has a finite loss for every seed.
    """
    grid = _grid_of(losses)
    if grid is None:
        return None
    means = [each.mean(axis=1) for each in grid.losses]
    logs, lowest = _best(grid, [each[None] for each in means])
    has_noise = grid.freedom > 0
    draws = _draw(grid, means, seeds=grid.seeds, seed=seed) if has_noise else None
    has_several = len(grid.batches) > 1
    noise = math.sqrt(2 * grid.variance) if has_noise else None
    critical = None
    more_seeds: int | None = 0
    if noise is not None and draws is not None and has_several:
        first = _first_comparable(grid, means)
        batches = grid.batches[first:]
        value = float(_critical(batches, lowest[:, first:], np.array([noise]), np.ones(1))[0])
        by_noise = _interval(value, draws.critical)
        more_seeds = _more_seeds(grid, means, by_noise, seed=seed)
        critical = Interval(
            value=value,
            low=min([by_noise.low, *grid.edge_batches]),
            high=max([by_noise.high, *grid.edge_batches]),
        )
    elif has_several:
        more_seeds = 2
    return Branches(
        batches=_by_batch(grid, means, logs[0], draws),
        seeds=grid.seeds,
        noise=noise,
        critical=critical,
        exponent=_exponent(grid, logs[0], draws),
        more_seeds=more_seeds,
        edge_batches=grid.edge_batches,
    )


def _grid_of(losses: Losses) -> _Grid | None:
    batches = []
    logs = []
    arrays = []
    edges = []
    edge_batches = []
    for batch in sorted({batch for batch, _ in losses}):
        tried = sorted(rate for cell_batch, rate in losses if cell_batch == batch)
        rates = [rate for rate in tried if np.isfinite(losses[batch, rate]).all()]
        if not rates:
            continue
        array = np.array([losses[batch, rate] for rate in rates], dtype=np.float64)
        best = rates[int(array.mean(axis=1).argmin())]
        batches.append(batch)
        logs.append(np.log(rates))
        arrays.append(array)
        edges.append(best in (tried[0], tried[-1]))
        if edges[-1] and len(tried) > 1:
            edge_batches.append(batch)
    if not batches:
        return None
    # At an edge a batch's loss may hardly vary, as a rate near 0 changes nothing: that is not how
    # much it varies at the best rate.
    is_inside = [batch not in edge_batches for batch in batches]
    inside = [array for array, each in zip(arrays, is_inside, strict=True) if each]
    variance, freedom = residual_variance(inside) if inside else (0.0, 0)
    if not freedom:
        variance, freedom = residual_variance(arrays)
    return _Grid(
        batches=batches,
        logs=logs,
        losses=arrays,
        edges=edges,
        edge_batches=edge_batches,
        variance=variance,
        freedom=freedom,
    )


def residual_variance(losses: Sequence[Floats]) -> tuple[float, int]:
    """The variance of a branch's loss, and its degrees of freedom.

    Of each batch the best rate and its neighbours count. It is the median over these cells, not the
    mean: at a rate that is somewhat too high for a small batch losses vary ten times as much, which
    would hide what another seed changes between branches that one might choose.

    Args:
        losses: For each batch, (rates, seeds).
    """
    cells = []
    for array in losses:
        best = int(array.mean(axis=1).argmin())
        cells.append(array[max(0, best - 1) : best + 2])
    table = np.concatenate(cells)
    count, seeds = table.shape
    if count < 2 or seeds < 2:
        return 0.0, 0
    mean, freedom = _of_normal_losses(count, seeds)
    return float(_median_square(table[None])[0]) / mean, freedom


def _median_square(tables: Floats) -> Floats:
    """For each table of (cells, seeds), the median over cells of the sum of squared residuals.

    What a seed changes for all cells alike is taken off first, as a median too.
    """
    centred = tables - tables.mean(axis=2, keepdims=True)
    residuals = centred - np.median(centred, axis=1, keepdims=True)
    return np.asarray(np.median((residuals**2).sum(axis=2), axis=1), dtype=np.float64)


@functools.cache
def _of_normal_losses(cells: int, seeds: int) -> tuple[float, int]:
    """The mean of `_median_square` where all losses have the variance 1, and degrees of freedom.

    A variance with so many degrees of freedom is as uncertain as this median (Satterthwaite 1946).
    """
    random = np.random.default_rng(cells * 1000 + seeds)
    squares = _median_square(random.normal(size=(TABLES, cells, seeds)))
    mean = float(squares.mean())
    return mean, max(1, round(2 * mean**2 / float(squares.var())))


def _first_comparable(grid: _Grid, means: Sequence[Floats]) -> int:
    """The first batch size that is not shown to be worse than a larger one; two at least are left.

    After the same samples a smaller batch, at its best rate, is no worse. One that is was not tried
    at a rate that suits it, and says nothing about how large a batch may be.
    """
    losses = [float(mean.min()) for mean in means]
    best = losses.index(min(losses))
    smallest_shown = shown_difference(
        grid.variance, freedom=grid.freedom, seeds=grid.seeds, batches=len(losses)
    )
    first = 0
    while first < min(best, len(losses) - 2) and losses[first] - losses[best] > smallest_shown:
        first += 1
    return first


def _draw(grid: _Grid, means: Sequence[Floats], *, seeds: int, seed: int) -> _Draws:
    """Draws of what the means might have been with so many seeds."""
    random = np.random.default_rng(seed)
    freedom = grid.freedom * (seeds - 1) // (grid.seeds - 1)
    variances = grid.variance * freedom / random.chisquare(freedom, DRAWS)
    deviations = np.sqrt(variances / seeds)[:, None]
    drawn = [mean + deviations * random.normal(size=(DRAWS, len(mean))) for mean in means]
    logs, losses = _best(grid, drawn)
    noise = np.sqrt(2 * variances)
    courses = np.exp(random.uniform(-1, 1, DRAWS) * math.log(SHARPEST))
    first = _first_comparable(grid, means)
    critical = _critical(grid.batches[first:], losses[:, first:], noise, courses)
    return _Draws(logs=logs, losses=losses, noise=noise, critical=critical)


def _best(grid: _Grid, means: Sequence[Floats]) -> tuple[Floats, Floats]:
    """The logarithm of the best rate at each batch size, and the loss there.

    It is the vertex of the parabola through the best rate and its neighbours.

    Args:
        grid: Has the rates.
        means: For each batch size, (draws, rates).

    Returns:
        Each (draws, batches).
    """
    best_logs = []
    best_losses = []
    for logs, values in zip(grid.logs, means, strict=True):
        rows = np.arange(len(values))
        best = values.argmin(axis=1)
        log = logs[best]
        loss = values[rows, best]
        if len(logs) > 2:
            is_inner = (best > 0) & (best < len(logs) - 1)
            middle = np.clip(best, 1, len(logs) - 2)
            left = logs[middle - 1] - logs[middle]
            right = logs[middle + 1] - logs[middle]
            below = values[rows, middle - 1] - values[rows, middle]
            above = values[rows, middle + 1] - values[rows, middle]
            # value = middle + slope · x + curvature · x², with x from the middle.
            curvature = (below / left - above / right) / (left - right)
            slope = below / left - curvature * left
            is_valley = is_inner & (curvature > 0)
            curvature = np.where(is_valley, curvature, 1.0)
            log = np.where(is_valley, log - slope / (2 * curvature), log)
            loss = np.where(is_valley, loss - slope**2 / (4 * curvature), loss)
        best_logs.append(log)
        best_losses.append(loss)
    return np.stack(best_logs, axis=1), np.stack(best_losses, axis=1)


def _critical(batches: Sequence[int], losses: Floats, noise: Floats, courses: Floats) -> Floats:
    """The critical batch of each draw.

    Args:
        batches: The batch sizes, rising.
        losses: At each, (draws, batches).
        noise: (draws,)
        courses: γ, (draws,): between two batches the loss is linear in batch**γ.
    """
    rising = _isotonic(losses)
    excess = rising - rising[:, :1]
    sizes = np.array(batches, dtype=np.float64)
    last_within = (excess <= noise[:, None]).sum(axis=1) - 1
    reaches_end = last_within == len(sizes) - 1
    first = np.minimum(last_within, len(sizes) - 2)
    rows = np.arange(len(losses))
    before = excess[rows, first]
    after = excess[rows, first + 1]
    share = np.clip((noise - before) / np.maximum(after - before, 1e-300), 0.0, 1.0)
    low = sizes[first] ** courses
    high = sizes[first + 1] ** courses
    between = (low + share * (high - low)) ** (1 / courses)
    return np.where(reaches_end, sizes[-1], between)


def _isotonic(losses: Floats) -> Floats:
    """The closest losses that do not fall as the batch grows, by the max-min formula.

    After the same samples a smaller batch, at its best rate, is no worse: it has taken more steps.
    What says otherwise is noise, or a batch below what the optimizer's own averaging suits.
    """
    count = losses.shape[1]
    sums = np.concatenate([np.zeros((len(losses), 1)), losses.cumsum(axis=1)], axis=1)
    result = np.empty_like(losses)
    for position in range(count):
        best = np.full(len(losses), -np.inf)
        for begin in range(position + 1):
            means = [
                (sums[:, end] - sums[:, begin]) / (end - begin)
                for end in range(position + 1, count + 1)
            ]
            best = np.maximum(best, np.min(means, axis=0))
        result[:, position] = best
    return result


def _interval(value: float, draws: Floats) -> Interval:
    low, high = np.quantile(draws, TAILS)
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def _more_seeds(
    grid: _Grid, means: Sequence[Floats], critical: Interval, *, seed: int
) -> int | None:
    """How many more seeds would decide, if the means and the noise stayed what they are."""
    if critical.high <= DECIDED * critical.low:
        return 0
    more = 1
    while more <= MOST_SEEDS:
        draws = _draw(grid, means, seeds=grid.seeds + more, seed=seed)
        low, high = np.quantile(draws.critical, TAILS)
        if high <= DECIDED * low:
            return more
        more += max(1, more // 3)
    return None


def _exponent(grid: _Grid, logs: Floats, draws: _Draws | None) -> Interval | None:
    """The exponent of the best rate over the batch size.

    Batches whose best rate is the last that was tried are left out: they are no evidence.

    Returns:
        None if fewer than two batches are left, or one seed shows no noise.
    """
    columns = []
    for number, (rates, edge) in enumerate(zip(grid.logs, grid.edges, strict=True)):
        if len(rates) > 2 and not edge:
            columns.append(number)
    if len(columns) < 2 or draws is None:
        return None
    log_batches = np.log([grid.batches[number] for number in columns])
    centred = log_batches - log_batches.mean()
    weights = centred / (centred**2).sum()
    return _interval(float(logs[columns] @ weights), draws.logs[:, columns] @ weights)


def _by_batch(
    grid: _Grid, means: Sequence[Floats], logs: Floats, draws: _Draws | None
) -> list[BranchBatch]:
    lowest = [int(mean.argmin()) for mean in means]
    losses = np.array([mean[best] for mean, best in zip(means, lowest, strict=True)])
    smallest_shown = shown_difference(
        grid.variance, freedom=grid.freedom, seeds=grid.seeds, batches=len(grid.batches)
    )
    rows = []
    for number, batch in enumerate(grid.batches):
        excess = float(losses[number] - losses.min())
        rate = None
        if draws is not None and len(grid.logs[number]) > 2:
            in_logs = _interval(float(logs[number]), draws.logs[:, number])
            rate = Interval(
                value=math.exp(in_logs.value),
                low=math.exp(in_logs.low),
                high=math.exp(in_logs.high),
            )
        rows.append(
            BranchBatch(
                batch=batch,
                rate=rate,
                edge=grid.edges[number],
                best_rate=float(np.exp(grid.logs[number][lowest[number]])),
                loss=float(losses[number]),
                excess=excess,
                verdict=_verdict(excess, smallest_shown, math.sqrt(2 * grid.variance)),
            )
        )
    return rows


def _verdict(excess: float, smallest_shown: float, noise: float) -> str:
    if excess == 0:
        return "best"
    if excess > smallest_shown:
        return "worse"
    return "within noise" if excess <= noise else "undecided"


def shown_difference(variance: float, *, freedom: int, seeds: int, batches: int) -> float:
    """The smallest difference from the best batch that is more than chance.

    If no batch differs, any of them is called worse with a probability of at most `MISTAKES`, since
    all pairs of batches are counted (Bonferroni).

    Args:
        variance: Of a branch's loss.
        freedom: Its degrees of freedom; 0 if it is not known.
        seeds: Over which losses are averaged.
        batches: How many are compared.
    """
    pairs = batches * (batches - 1) // 2
    if not freedom or not pairs:
        return math.inf
    from scipy import stats

    quantile = float(stats.t.ppf(1 - MISTAKES / (2 * pairs), freedom))
    return quantile * math.sqrt(2 * variance / seeds)


# --- what it brings -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The quickest batch on a number of workers, for the same samples and the same loss.

    Args:
        workers: How many.
        batch: The batch size.
        rate: Its best learning rate; None if rates were not varied.
        steps: Optimizer steps.
        hours: Of training.
        dollars: None without a price.
        times_faster: Beside the batch of the run that was forked, on as many workers.
    """

    workers: int
    batch: int
    rate: float | None
    steps: int
    hours: float
    dollars: float | None
    times_faster: float | None


def gains(
    usable: Sequence[BranchBatch],
    seconds: Mapping[tuple[int, int], float],
    *,
    samples: int,
    present_batch: int,
    price: float | None,
) -> list[Gain]:
    """The quickest usable batch on each number of workers.

    Args:
        usable: The batches of which one may be chosen.
        seconds: Of a step, by (batch, workers).
        samples: That are to be seen.
        present_batch: Of the run that was forked.
        price: Dollars per hour of one worker; None if it is not known.
    """

    def duration(batch: int, workers: int) -> float:
        return -(-samples // batch) * seconds[batch, workers]

    rows = []
    for workers in sorted({workers for _, workers in seconds}):
        possible = [each for each in usable if (each.batch, workers) in seconds]
        if not possible:
            continue
        best = min(possible, key=lambda each: duration(each.batch, workers))
        hours = duration(best.batch, workers) / 3600
        times_faster = None
        if (present_batch, workers) in seconds:
            times_faster = duration(present_batch, workers) / (3600 * hours)
        rate = best.rate.value if best.rate else best.best_rate
        rows.append(
            Gain(
                workers=workers,
                batch=best.batch,
                rate=rate,
                steps=-(-samples // best.batch),
                hours=hours,
                dollars=None if price is None else price * workers * hours,
                times_faster=times_faster,
            )
        )
    return rows
