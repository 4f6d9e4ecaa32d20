"""Fits the planner's constants to published runs, and writes app/planner/fitted.yaml.

The fit is least squares on the logarithm of seconds per step by Gauss-Newton, with soft L1: a tenth
off counts fully, a factor of two hardly more. Rows are planned with what published_sources.yaml
says of their kernels, so that a constant is not bent by another trainer's. The rows of a source
count together as much as `MAX_ROWS_OF_SOURCE` rows, so that a hundred of one trainer's do not
outvote others. Each constant stays in the interval that datasheets and published measurements of
kernels leave it (`CONSTANTS`), and is held near its start by a weak prior, so that one on which no
run depends stays there. The same rows always give the same constants: nothing is drawn at random.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import yaml
from scipy.optimize import least_squares

from app.planner import device as devices
from app.planner.device import Device
from app.planner.ranges import DENSE, Traits, base_of, distance_of, factor_of
from experiments.benchmarks.published_runs import Run

Values = dict[str, float]
"""Constants: those of all GPUs as `name`, those of a family of GPUs as `family.name`."""


@dataclass(frozen=True)
class Constant:
    """Where a constant is looked for.

    Attributes:
        start: Its value if no run tells.
        low: The least that it can be.
        high: The most that it can be.
    """

    start: float
    low: float
    high: float


CONSTANTS: dict[str, Constant] = {
    # cuBLAS on large bf16 products: 230 to 290 of 312 TFLOP/s on A100, 600 to 800 of 989 on H100
    # (less at full power).
    "ampere.bf16": Constant(0.82, 0.70, 0.93),
    # Of one H100 it is measured (one_gpu.csv): its kernels take 0.78 to 0.82 in trainings of 0.1 to
    # 1.3 B. What runs of many GPUs lose besides is in other constants.
    "hopper.bf16": Constant(0.80, 0.78, 0.82),
    # Without casts; measured too.
    "hopper.fp8": Constant(0.68, 0.64, 0.72),
    # FlashAttention-2 at its best, counted as fused.py does: A100 189 of 312. On H100 torch uses
    # cuDNN's, 450 to 600 of 989, where FlashAttention-2 has 350.
    "ampere.attention": Constant(0.69, 0.55, 0.75),
    # Measured on one H100: 0.54 to 0.60.
    "hopper.attention": Constant(0.58, 0.54, 0.62),
    # The share of the memory's bandwidth that element-wise kernels reach; that of an H100 is of its
    # own trainings (constants.yaml).
    "ampere.stream": Constant(0.78, 0.65, 0.92),
    # The start and the end of a tile, in steps of its inner dimension; an H100's is measured.
    "ampere.k_half": Constant(100, 40, 400),
    # Seconds between two kernels of one stream.
    "kernel": Constant(2e-6, 1.5e-6, 5e-6),
    # The share of NVLink that NCCL reaches: all_reduce_perf has 200 to 208 of 300 GB/s on A100
    # (https://github.com/NVIDIA/nccl-tests/issues/149 and 178).
    "ampere.within": Constant(0.70, 0.5, 0.85),
    # Sums in the switches (NVLS) of H100 make that 480 of 450 GB/s for all-reduces
    # (https://github.com/NVIDIA/nccl/issues/1374); rings of gathers reach less.
    "hopper.within": Constant(0.85, 0.6, 1.05),
    # The share of the network that NCCL reaches.
    "across": Constant(0.80, 0.5, 0.95),
    # The share of processors and of bandwidth that copying kernels take. Computing is 18.9 % slower
    # beside communication, on average of trainings on four A100s or H100s, and 40 % at most (Lee et
    # al. 2025, https://arxiv.org/abs/2507.03114).
    "contention": Constant(0.19, 0.02, 0.4),
    # The share of a step lost with each doubling of GPUs.
    "scale": Constant(0.01, 0.001, 0.03),
    "stage": Constant(0.02, 0.002, 0.08),
    "async_tp": Constant(0.80, 0.4, 0.95),
}
"""The constants that are fitted."""
NAMES = sorted(CONSTANTS)
"""The order of constants in arrays."""
FAMILIES = sorted({name.partition(".")[0] for name in CONSTANTS if "." in name})
"""Families of GPUs that have constants of their own."""
RATES = ("bf16", "fp8")
"""Constants of a family that are rates of matrix products."""
START: Values = {name: constant.start for name, constant in CONSTANTS.items()}
TOLERANCE = 0.1
"""The relative error that counts as one."""
PRIOR = 2.0
"""A constant's residual per unit of its logarithm's distance from the start, in tolerances.

Two constants that the same runs depend on, as those of GPUs' number and of stages, would otherwise
take each other's place: without the runs on H100 they went to their limits at 0.3.
"""
ROUNDS = 3
"""How often the times are made linear in the constants again."""
MAX_ROWS_OF_SOURCE = 12.0
"""As how many rows a source with more of them counts."""
STEP = 0.02
"""By how much the logarithm of a constant is changed to find a derivative."""
QUANTILES = (10.0, 90.0)
"""The quantiles of errors between which the range is that a plan shows."""
ENOUGH = 8
"""Runs of which attention is a large part that are needed to say how much slower it may be."""
ENOUGH_SOURCES = 4
"""Sources that a group of runs needs so that 80 of 100 runs of a fifth source are inside."""
LEAST_WIDER = 0.25
"""By how much a range is wider at least for a trait that no run has.

The few runs of GPUs without fitted constants say nothing of sizes and layouts that nobody has
published.
"""
LARGE_ATTENTION = 0.2
"""The share of computing above which attention is a large part of a step."""


def known_values() -> Values:
    """The constants in use."""
    fitted = devices.constants()["fitted"]
    values = dict(fitted["shared"])
    for family, constants in fitted["families"].items():
        for name, value in (constants | constants.get("matmul", {})).items():
            values[f"{family}.{name}"] = value
    return {name: values.get(name, START[name]) for name in CONSTANTS}


def is_for_fit(run: Run) -> bool:
    """Whether constants may be fitted to a row: to a dense model, on GPUs that have constants."""
    family = devices.family_of(devices.find_gpu(run.gpu))
    return family in FAMILIES and not run.is_mixture and run.method == "pretrain"


def changed(values: Values, ranges: Any = None) -> Callable[[Device], Device]:
    """A function that gives a device other constants.

    Args:
        values: The constants.
        ranges: What `ranges` returns; None leaves the device's.
    """

    def change(device: Device) -> Device:
        family = devices.family_of(device.gpu)
        constants = {name: value for name, value in values.items() if "." not in name}
        rates: Values = {}
        for name, value in values.items():
            prefix, _, of_family = name.partition(".")
            if prefix != family:
                continue
            if of_family in RATES:
                rates[of_family] = value
            elif of_family:
                constants[of_family] = value
        if rates:
            rates["fp16"] = rates["bf16"]
        changes: dict[str, Any] = {**constants, "matmul": device.matmul | rates}
        if ranges is not None:
            changes["ranges"] = ranges
        return replace(device, **changes)

    return change


def weights(runs: Sequence[Run]) -> np.ndarray:
    """How much each row counts."""
    rows = Counter(run.source for run in runs)
    shares = [min(1.0, MAX_ROWS_OF_SOURCE / rows[run.source]) for run in runs]
    return np.sqrt(np.array(shares))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants, and how the planned times of rows depend on them near there.

    Attributes:
        values: The constants.
        point: Their logarithms, in the order of `NAMES`.
        logs: The logarithm of planned over measured seconds, of each row.
        slopes: Its derivatives, (rows, constants).
    """

    values: Values
    point: np.ndarray
    logs: np.ndarray
    slopes: np.ndarray


def with_slopes(
    seconds: Callable[[Values], Sequence[float]],
    measured: Sequence[float],
    values: Values,
) -> Fit:
    """The fit with its derivatives, by a small change of each constant.

    Args:
        seconds: Constants → the planned seconds of each row.
        measured: The measured seconds of each row.
        values: The constants.
    """
    log_measured = np.log(np.array(measured))
    logs = np.log(np.array(seconds(values))) - log_measured
    columns = []
    for name in NAMES:
        step = STEP
        if values[name] * math.exp(STEP) > CONSTANTS[name].high:
            step = -STEP
        changed_values = {**values, name: values[name] * math.exp(step)}
        changed_logs = np.log(np.array(seconds(changed_values))) - log_measured
        columns.append((changed_logs - logs) / step)
    return Fit(
        values=values,
        point=np.log(np.array([values[name] for name in NAMES])),
        logs=logs,
        slopes=np.stack(columns, axis=1),
    )


def without(whole_fit: Fit, kept: np.ndarray, weights_of_kept: np.ndarray) -> Values:
    """The constants fitted to a part of the rows, by the derivatives of the whole fit.

    Nothing is planned again.

    Args:
        whole_fit: The whole fit.
        kept: The indices of the rows that are fitted to.
        weights_of_kept: How much each of these counts.
    """
    start = np.log(np.array([CONSTANTS[name].start for name in NAMES]))
    # The solver wants its start inside the bounds, where a constant may be at its limit.
    low = np.log(np.array([CONSTANTS[name].low for name in NAMES])) - 1e-9
    high = np.log(np.array([CONSTANTS[name].high for name in NAMES])) + 1e-9

    slopes = whole_fit.slopes[kept] * (weights_of_kept / TOLERANCE)[:, np.newaxis]
    logs = whole_fit.logs[kept] * weights_of_kept / TOLERANCE
    jacobian = np.concatenate([slopes, PRIOR * np.eye(len(NAMES))])

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.concatenate([logs + slopes @ (point - whole_fit.point), PRIOR * (point - start)])

    solution: Any = least_squares(
        residuals,
        whole_fit.point,
        jac=lambda _: jacobian,
        bounds=(low, high),
        loss="soft_l1",
    )
    return {name: math.exp(log_value) for name, log_value in zip(NAMES, solution.x)}


def fit(
    seconds: Callable[[Values], Sequence[float]],
    measured: Sequence[float],
    weights_of_rows: np.ndarray | float = 1.0,
) -> Values:
    """The constants under which the plans are nearest to what was measured (Gauss-Newton).

    Args:
        seconds: Constants → the planned seconds of each row.
        measured: The measured seconds of each row.
        weights_of_rows: How much each row counts.
    """
    all_rows = np.arange(len(measured))
    all_weights = np.broadcast_to(weights_of_rows, all_rows.shape)
    values = START
    for _ in range(ROUNDS):
        values = without(with_slopes(seconds, measured, values), all_rows, all_weights)
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: float) -> float:
    """Three digits of a value."""
    return float(f"{value:.3g}")


def intervals(
    whole_fit: Fit,
    sources: Sequence[str],
    weights_of_rows: np.ndarray,
    draws: int = 200,
) -> dict[str, tuple[float, float]]:
    """The middle 80 % of each constant's values when sources are drawn again (bootstrap).

    Args:
        whole_fit: The whole fit.
        sources: The source of each row.
        weights_of_rows: How much each row counts.
        draws: How often the sources are drawn.
    """
    generator = np.random.default_rng(0)
    names = sorted(set(sources))
    rows = {name: np.flatnonzero(np.array(sources) == name) for name in names}
    values = defaultdict[str, list[float]](list)
    for _ in range(draws):
        drawn = generator.integers(len(names), size=len(names))
        kept = np.concatenate([rows[names[i]] for i in drawn])
        for name, value in without(whole_fit, kept, weights_of_rows[kept]).items():
            values[name].append(value)
    ends = {}
    for name, values_of_constant in values.items():
        low, high = np.percentile(values_of_constant, (10, 90))
        ends[name] = (float(low), float(high))
    return ends


# --- ranges ---------------------------------------------------------------------------------------


class Residual(NamedTuple):
    """The error of a run's plan, made with constants that were fitted to other sources' runs.

    Args:
        source: The run's source.
        traits: What the error depends on.
        error: The relative error of the planned speed.
    """

    source: str
    traits: Traits
    error: float


Residuals = Sequence[Residual]


def ranges(residuals: Residuals, quantiles: tuple[float, float] = QUANTILES) -> dict[str, Any]:
    """The ranges that app/planner/ranges.py reads.

    Runs of one source err alike, so that sources are what is drawn at random, and not runs. Each of
    them counts as much, however many runs it has. The ends of the ranges of a kind of layout are
    quantiles of its runs, and groups are wider by a factor that counts the source of the next run
    too, which is not known, and whose errors are taken to be as large as any (Lee, Barber, Willett
    2023, https://arxiv.org/abs/2306.06342). A kind of layout with few sources has the range of all.

    The ends do not count that source, because with few sources it would make them as wide as the
    worst run: of twelve simulated sources 75 to 78 of 100 runs of a new one are inside, not 80.

    Args:
        residuals: The errors that runs had when nothing of their source was fitted to.
        quantiles: Between which quantiles, in percent, the range is.

    Returns:
        "kinds": the range of each layout of dense models, and of each other kind of model;
        "seen": the traits of runs that were fitted to;
        "attention": how many times longer attention may take, less 1: the least with which the
        low end holds for runs that are attention to a large part; "groups": how many times wider
        the ranges of a group are, if too few of its runs would be inside; "wider": by how much a
        range is wider where a run has a trait that none of these has, which is the least by which
        80 % of such runs are inside.
    """
    fitted = [residual for residual in residuals if has_constants(residual.traits)]
    others = _of_other_models(residuals)
    by_layout = defaultdict[str, list[Residual]](list)
    for residual in fitted:
        by_layout["any"].append(residual)
        by_layout[residual.traits.layout].append(residual)
    ends = {}
    for layout, of_layout in by_layout.items():
        if layout == "any" or _sources(of_layout) >= ENOUGH_SOURCES:
            ends[layout] = _ends(of_layout, quantiles)
    for model, of_model in others.items():
        ends[model] = _ends(of_model, quantiles)
    sizes = [residual.traits.billions for residual in fitted]
    lengths = [residual.traits.sequence for residual in fitted if residual.traits.sequence]
    fitted_ranges: dict[str, Any] = {
        "kinds": ends,
        "seen": {
            "models": [DENSE, *sorted(others)],
            "layouts": sorted(set(by_layout) - {"any"}),
            "families": sorted({residual.traits.family for residual in fitted}),
            "billions": [_rounded(min(sizes)), _rounded(max(sizes))],
            "sequence": [min(lengths), max(lengths)],
        },
        "attention": _slower_attention(fitted, ends, quantiles[0]),
        "groups": {},
        "wider": 0.0,
    }
    inside = (quantiles[1] - quantiles[0]) / 100
    with_ends = [*fitted, *itertools.chain(*others.values())]
    fitted_ranges["groups"] = _factors(with_ends, fitted_ranges, inside)
    fitted_ranges["wider"] = _wider(residuals, fitted_ranges, inside)
    return fitted_ranges


def has_constants(traits: Traits) -> bool:
    """Whether constants may be fitted to runs with these traits."""
    return traits.family in FAMILIES and traits.model == DENSE


def _of_other_models(residuals: Residuals) -> dict[str, list[Residual]]:
    """The runs of models that are not dense, by kind, of which there are enough sources."""
    by_model = defaultdict[str, list[Residual]](list)
    for residual in residuals:
        if residual.traits.model != DENSE:
            by_model[residual.traits.model].append(residual)
    return {
        model: of_model
        for model, of_model in by_model.items()
        if _sources(of_model) >= ENOUGH_SOURCES
    }


def _slower_attention(
    residuals: Residuals, ends: dict[str, list[float]], low_quantile: float
) -> float:
    """How many times longer attention may take, less 1, so that the low end of ranges holds.

    Args:
        residuals: Of runs with fitted constants.
        ends: The range of each kind of layout.
        low_quantile: Percent of the runs that may be below the low end.

    Returns:
        0 if fewer than `ENOUGH` runs are attention to a large part.
    """
    needed = []
    for source, traits, error in residuals:
        if traits.attention > LARGE_ATTENTION:
            low = base_of(traits, ends, 0.0)[0]
            needed.append((max(0.0, (low * (1 + error) - 1) / traits.attention), source))
    if len(needed) < ENOUGH:
        return 0.0
    return _rounded_up(_quantile(needed, 1 - low_quantile / 100))


def _factors(
    residuals: Residuals, fitted_ranges: dict[str, Any], inside: float
) -> dict[str, float]:
    """How many times wider ranges are to be, for each group of runs that needs it.

    Groups overlap, so that a factor for one may be enough for another. The one that needs the most
    gets its factor first, and the others are looked at again with it. A group of fewer than
    `ENOUGH_SOURCES` sources has no factor of its own.

    Args:
        residuals: Of runs with fitted constants.
        fitted_ranges: The ranges so far.
        inside: The share of a group's runs that is to be inside.
    """
    members = defaultdict[str, list[Residual]](list)
    for residual in residuals:
        for name in residual.traits.groups:
            members[name].append(residual)
    factors: dict[str, float] = {}
    while True:
        lacking = {}
        for name, group in members.items():
            if _sources(group) < ENOUGH_SOURCES:
                continue
            times = [(_times_wider(each, fitted_ranges), each) for each in group]
            needed = [
                (wider / factor_of(each.traits, factors), each.source) for wider, each in times
            ]
            if _enough_for(needed, inside) > 1:
                lacking[name] = _enough_for([(wider, each.source) for wider, each in times], inside)
        if not lacking:
            return factors
        worst = max(lacking, key=lambda name: lacking[name])
        factors[worst] = lacking[worst]


def _wider(residuals: Residuals, fitted_ranges: dict[str, Any], inside: float) -> float:
    """By how much ranges are wider for each trait that no fitted run has.

    Args:
        residuals: Of runs.
        fitted_ranges: The ranges so far.
        inside: The share of such runs that is to be inside.
    """
    needed = []
    for row, residual in enumerate(residuals):
        distance = distance_of(residual.traits, fitted_ranges["seen"])[1]
        if distance > 0:
            times = _times_wider(residual, fitted_ranges)
            factor = factor_of(residual.traits, fitted_ranges["groups"])
            # There are few sources of each of these traits, so that runs count in place of them.
            needed.append((max(0.0, (times / factor - 1) / distance), str(row)))
    if not needed:
        return LEAST_WIDER
    return max(LEAST_WIDER, _rounded_up(_quantile(needed, inside, counts_unseen=True)))


def _times_wider(residual: Residual, fitted_ranges: dict[str, Any]) -> float:
    """How many times wider than its layout's a range must be so that a run is inside."""
    traits = residual.traits
    distance = distance_of(traits, fitted_ranges["seen"])[1]
    low, high = base_of(
        traits, fitted_ranges["kinds"], distance, attention=fitted_ranges["attention"]
    )
    log_share = math.log(1 / (1 + residual.error))
    return log_share / math.log(high if log_share > 0 else low)


def _sources(residuals: Residuals) -> int:
    """How many sources runs have."""
    return len({residual.source for residual in residuals})


def _enough_for(needed: Sequence[tuple[float, str]], inside: float) -> float:
    """How many times wider ranges must be so that a share of runs is inside, however they count.

    Args:
        needed: How many times wider each run needs its range, with its source.
        inside: The share: of runs of a further source if all sources count as much, and of runs if
            each of these does.
    """
    of_sources = _quantile(needed, inside, counts_unseen=True)
    of_runs = _quantile([(times, str(run)) for run, (times, _) in enumerate(needed)], inside)
    return _rounded_up(max(of_sources, of_runs))


def _quantile(
    values: Sequence[tuple[float, str]], level: float, *, counts_unseen: bool = False
) -> float:
    """The least value that is enough for a share of the runs, if all sources count as much.

    Args:
        values: Of runs, each with its source.
        level: The share.
        counts_unseen: Whether a further source counts too, for which no value is enough.

    Returns:
        The largest value if none is enough.
    """
    rows = Counter(source for _, source in values)
    sources = len(rows) + counts_unseen
    reached = 0.0
    for value, source in sorted(values):
        reached += 1 / (sources * rows[source])
        if reached > level - 1e-9:
            return value
    return max(values)[0]


def _rounded_up(value: float) -> float:
    """Two digits behind the point, rounded up."""
    return math.ceil(100 * value - 1e-6) / 100


def _ends(residuals: Residuals, quantiles: tuple[float, float]) -> list[float]:
    """Both ends of a range, around 1."""
    low, high = quantiles
    shares = [(1 / (1 + residual.error), residual.source) for residual in residuals]
    negative_shares = [(-share, source) for share, source in shares]
    low_end = -_quantile(negative_shares, 1 - low / 100)
    high_end = _quantile(shares, high / 100)
    return [_rounded(min(low_end, 0.99)), _rounded(max(high_end, 1.01))]


def write(
    values: Values,
    intervals_of_values: Mapping[str, tuple[float, float]],
    fitted_ranges: dict[str, Any],
    runs: int,
) -> str:
    """Writes the planner's file.

    Args:
        values: The constants.
        intervals_of_values: What `intervals` returns.
        fitted_ranges: What `ranges` returns.
        runs: The number of runs that were fitted to.

    Returns:
        A sentence that says where it is.
    """
    shared: dict[str, Any] = {}
    families = defaultdict[str, dict[str, Any]](dict)
    for name, value in values.items():
        family, _, of_family = name.rpartition(".")
        constants = families[family] if family else shared
        if family and of_family in RATES:
            rates = constants.setdefault("matmul", {})
            rates[of_family] = _rounded(value)
            if of_family == "bf16":
                rates["fp16"] = _rounded(value)
        else:
            constants[of_family] = _rounded(value)
    ends = {name: [_rounded(end) for end in intervals_of_values[name]] for name in values}
    tree = {
        "shared": shared,
        "families": dict(families),
        "ranges": fitted_ranges,
        "intervals": ends,
    }
    command = "python -m experiments.benchmarks published --fit"
    head = (
        f"# Written by `{command}`: fitted to {runs} published runs.\n"
        "# intervals: of each constant the middle 80 % when sources of runs are drawn again.\n"
    )
    text = yaml.safe_dump(tree, sort_keys=True, default_flow_style=None, width=110)
    devices.FITTED.write_text(head + text)
    return f"written: {devices.FITTED}"
