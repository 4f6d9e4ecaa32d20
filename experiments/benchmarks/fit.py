"""Fits the planner's constants to published runs, and writes app/planner/fitted.yaml.

The fit is least squares on the logarithm of seconds per step by Gauss-Newton, with soft L1: a tenth
off counts fully, a factor of two hardly more. Rows are planned with what published_sources.yaml
says of their kernels, so that a constant is not bent by another trainer's. The rows of a source
count together as much as `MAX_ROWS_OF_SOURCE` rows, so that a hundred of one trainer's do not
outvote others. Each constant stays in the interval that datasheets and published measurements of
kernels leave it (`CONSTANTS`), and is held near its start by a weak prior, so that one on which no
run depends stays there. The same rows always give the same constants: nothing is drawn at random.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    # The share of the memory's bandwidth that element-wise kernels reach; that of an H100 is
    # measured (constants.yaml).
    "ampere.stream": Constant(0.78, 0.65, 0.92),
    # The start and the end of a tile, in steps of its inner dimension; an H100's is measured.
    "ampere.k_half": Constant(100, 40, 400),
    # Seconds between two kernels of one stream.
    "kernel": Constant(2e-6, 1.5e-6, 5e-6),
    # The share of NVLink that NCCL reaches.
    "within": Constant(0.75, 0.5, 0.95),
    # The share of the network that NCCL reaches.
    "across": Constant(0.80, 0.5, 0.95),
    # The share of processors and of bandwidth that copying kernels take.
    "contention": Constant(0.10, 0.02, 0.4),
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
PRIOR = 0.3
"""A constant's residual per unit of its logarithm's distance from the start, in tolerances."""
ROUNDS = 3
"""How often the times are made linear in the constants again."""
MAX_ROWS_OF_SOURCE = 12.0
"""As how many rows a source with more of them counts."""
STEP = 0.02
"""By how much the logarithm of a constant is changed to find a derivative."""
QUANTILES = (10.0, 90.0)
"""The quantiles of errors between which the range is that a plan shows."""
ENOUGH = 8
"""Runs that a kind of layout needs for a range of its own."""
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

Errors = Sequence[tuple[Traits, float]]
"""The traits of runs, and the relative errors of their plans' speed."""


def ranges(errors: Errors, quantiles: tuple[float, float] = QUANTILES) -> dict[str, Any]:
    """The ranges that app/planner/ranges.py reads.

    A kind of layout with few runs has the range of all. The ends are those of a conformal range: of
    n errors the one is taken that n + 1 would have there.

    Args:
        errors: The errors that runs had when nothing of their source was fitted to.
        quantiles: Between which quantiles, in percent, the range is.

    Returns:
        "layouts": the range of each kind of layout; "seen": the traits of runs that were fitted to;
        "attention": how many times longer attention may take, less 1: the least with which the
        low end holds for runs that are attention to a large part; "groups": how many times wider
        the ranges of a group are, if too few of its runs would be inside; "wider": by how much a
        range is wider where a run has a trait that none of these has, which is the least by which
        80 % of such runs are inside.
    """
    fitted = [pair for pair in errors if has_constants(pair[0])]
    shares = defaultdict[str, list[float]](list)
    for traits, error in fitted:
        share = 1 / (1 + error)
        shares["any"].append(share)
        shares[traits.layout].append(share)
    ends = {}
    for layout, shares_of_layout in shares.items():
        if len(shares_of_layout) >= ENOUGH:
            ends[layout] = _conformal(shares_of_layout, quantiles)
    sizes = [traits.billions for traits, _ in fitted]
    lengths = [traits.sequence for traits, _ in fitted if traits.sequence]
    fitted_ranges: dict[str, Any] = {
        "layouts": ends,
        "seen": {
            "models": [DENSE],
            "layouts": sorted(set(shares) - {"any"}),
            "families": sorted({traits.family for traits, _ in fitted}),
            "billions": [_rounded(min(sizes)), _rounded(max(sizes))],
            "sequence": [min(lengths), max(lengths)],
        },
        "attention": _slower_attention(fitted, ends, quantiles[0]),
        "groups": {},
        "wider": 0.0,
    }
    inside = (quantiles[1] - quantiles[0]) / 100
    fitted_ranges["groups"] = _factors(fitted, fitted_ranges, inside)
    fitted_ranges["wider"] = _wider(errors, fitted_ranges, inside)
    return fitted_ranges


def has_constants(traits: Traits) -> bool:
    """Whether constants may be fitted to runs with these traits."""
    return traits.family in FAMILIES and traits.model == DENSE


def _slower_attention(errors: Errors, ends: dict[str, list[float]], low_quantile: float) -> float:
    """How many times longer attention may take, less 1, so that the low end of ranges holds.

    Args:
        errors: Of runs with fitted constants.
        ends: The range of each kind of layout.
        low_quantile: Percent of the runs that may be below the low end.

    Returns:
        0 if fewer than `ENOUGH` runs are attention to a large part.
    """
    needed = []
    for traits, error in errors:
        if traits.attention > LARGE_ATTENTION:
            low = base_of(traits, ends, 0.0)[0]
            needed.append(max(0.0, (low * (1 + error) - 1) / traits.attention))
    if len(needed) < ENOUGH:
        return 0.0
    return _least(needed, 1 - low_quantile / 100)


def _factors(errors: Errors, fitted_ranges: dict[str, Any], inside: float) -> dict[str, float]:
    """How many times wider ranges are to be, for each group of runs that needs it.

    Groups overlap, so that a factor for one may be enough for another. The one that needs the most
    gets its factor first, and the others are looked at again with it.

    Args:
        errors: Of runs with fitted constants.
        fitted_ranges: The ranges so far.
        inside: The share of a group's runs that is to be inside.
    """
    times_of_group = defaultdict[str, list[tuple[Traits, float]]](list)
    for traits, error in errors:
        times = _times_wider(traits, error, fitted_ranges)
        for name in traits.groups:
            times_of_group[name].append((traits, times))
    factors: dict[str, float] = {}
    while True:
        lacking = {}
        for name, runs in times_of_group.items():
            needed = [times / factor_of(traits, factors) for traits, times in runs]
            factor = _least(needed, inside) if len(runs) >= ENOUGH else 1.0
            if factor > 1:
                lacking[name] = factor
        if not lacking:
            return factors
        worst = max(lacking, key=lambda name: lacking[name])
        runs = times_of_group[worst]
        factors[worst] = max(_least([times for _, times in runs], inside), factors.get(worst, 1.0))


def _wider(errors: Errors, fitted_ranges: dict[str, Any], inside: float) -> float:
    """By how much ranges are wider for each trait that no fitted run has.

    Args:
        errors: Of runs.
        fitted_ranges: The ranges so far.
        inside: The share of such runs that is to be inside.
    """
    needed = []
    for traits, error in errors:
        distance = distance_of(traits, fitted_ranges["seen"])[1]
        if distance > 0:
            times = _times_wider(traits, error, fitted_ranges)
            factor = factor_of(traits, fitted_ranges["groups"])
            needed.append(max(0.0, (times / factor - 1) / distance))
    return _least(needed, inside) if needed else 0.0


def _times_wider(traits: Traits, error: float, fitted_ranges: dict[str, Any]) -> float:
    """How many times wider than its layout's a range must be so that a run is inside."""
    distance = distance_of(traits, fitted_ranges["seen"])[1]
    low, high = base_of(
        traits, fitted_ranges["layouts"], distance, attention=fitted_ranges["attention"]
    )
    log_share = math.log(1 / (1 + error))
    return log_share / math.log(high if log_share > 0 else low)


def _least(needed: Sequence[float], inside: float) -> float:
    """The least value that is enough for a share of the runs and one more, rounded up."""
    quantile = min(1.0, inside * (len(needed) + 1) / len(needed))
    return math.ceil(100 * float(np.quantile(needed, quantile, method="higher"))) / 100


def _conformal(shares: Sequence[float], quantiles: tuple[float, float]) -> list[float]:
    """Both ends of a conformal range, around 1."""
    count = len(shares)
    low, high = (quantile / 100 for quantile in quantiles)
    low_quantile = max(0.0, low * (count + 1) / count - 1 / count)
    high_quantile = min(1.0, high * (count + 1) / count)
    low_end, high_end = np.quantile(np.array(shares), (low_quantile, high_quantile))
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
