"""Fits the planner's constants to the rows that are for it, and writes app/planner/fitted.yaml.

Least squares on the logarithm of seconds per step by Gauss-Newton, soft L1 (a tenth off counts fully, a factor of two
hardly more). Rows are planned with what published_sources.yaml says of their kernels, so that a constant is not bent
by another trainer's. A source's rows count together as much as `COUNTED` rows, so that a hundred of one trainer's do
not outvote others. Each constant stays in the interval that datasheets and published measurements of kernels leave it
(`CONSTANTS`), and is held near its start by a weak prior, so that one on which no run depends stays. The same rows
always give the same constants: nothing is drawn.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from app.planner import device as devices
from app.planner.device import Device
from app.planner.ranges import DENSE, Traits, base_of, distance_of
from experiments.benchmarks.published_runs import Run

Values = dict[str, float]
"""`name` of a constant of all GPUs, `family.name` of a family's → value."""


@dataclass(frozen=True)
class Constant:
    """Where a constant is looked for.

    Args:
        start: What it is where no run tells.
        low: The least that it can be.
        high: The most.
    """

    start: float
    low: float
    high: float


CONSTANTS: dict[str, Constant] = {
    # cuBLAS on large bf16 products: 230 to 290 of 312 TFLOP/s on A100, 600 to 800 of 989 on H100 (less at full power)
    "ampere.bf16": Constant(0.82, 0.70, 0.93),
    "hopper.bf16": Constant(0.72, 0.55, 0.82),
    "hopper.fp8": Constant(0.55, 0.35, 0.70),  # with what casts and scaling of tensors take
    # FlashAttention-2 at its best, weighed as fused.py does: A100 189 of 312. On H100 torch takes cuDNN's: 450 to 600
    # of 989, FlashAttention-2's being 350
    "ampere.attention": Constant(0.69, 0.55, 0.75),
    "hopper.attention": Constant(0.55, 0.40, 0.70),
    "stream": Constant(0.80, 0.65, 0.92),  # of the memory's bandwidth that an addition reaches
    "k_half": Constant(150, 60, 400),  # a tile's start and end, in steps of its inner dimension
    "kernel": Constant(2e-6, 1.5e-6, 5e-6),  # seconds between two kernels of one stream
    "operation": Constant(7e-6, 4e-6, 2e-5),  # seconds of the host for an operation of PyTorch, autograd's share too
    "step": Constant(2e-5, 5e-6, 3e-5),  # seconds of the host a tensor: the optimizer's list, FSDP's hooks
    "loop": Constant(1e-3, 2e-4, 3e-3),  # seconds a step: the loop waits for nothing, others' trainers log every step
    "within": Constant(0.75, 0.5, 0.95),  # of NVLink that NCCL reaches
    "across": Constant(0.80, 0.5, 0.95),
    "contention": Constant(0.10, 0.02, 0.4),  # the copying kernels' share of processors and of bandwidth
    "scale": Constant(0.01, 0.001, 0.06),
    "stage": Constant(0.02, 0.002, 0.08),
    "async_tp": Constant(0.80, 0.4, 0.95),
}
"""Those that are fitted."""
FAMILIES = sorted({name.partition(".")[0] for name in CONSTANTS if "." in name})
"""Of GPUs with constants of their own."""
START: Values = {name: constant.start for name, constant in CONSTANTS.items()}
TOLERANCE = 0.1
HELD = 0.3
"""A constant's residual per unit of its logarithm, in tolerances."""
ROUNDS = 3
"""How often the times are made linear in the constants again."""
COUNTED = 12.0
"""Rows as which a source with more of them counts."""
QUANTILES = (10.0, 90.0)
"""Of errors, the range that is shown."""
ENOUGH = 8
"""Runs of a kind of layout that give it a range of its own."""


def known_values() -> Values:
    """The constants that are in use."""
    fitted = devices.constants()["fitted"]
    values = dict(fitted["shared"])
    for family, own in fitted["families"].items():
        rates = own.get("matmul", {})
        values |= {
            f"{family}.{name}": value for name, value in (own | rates).items() if f"{family}.{name}" in CONSTANTS
        }
    return {name: values.get(name, START[name]) for name in CONSTANTS}


def is_for_fit(run: Run) -> bool:
    """Whether a row may be fitted to: a dense model of a kind and on a GPU whose family has constants."""
    return devices.family_of(devices.find_gpu(run.gpu)) in FAMILIES and not run.is_mixture and run.method == "pretrain"


def changed(values: Values, spread: Any = None) -> Callable[[Device], Device]:
    """What gives a device the constants, and ranges where they are given."""

    def change(device: Device) -> Device:
        family = devices.family_of(device.gpu)
        own = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{family}.")}
        rates: Values = {rate: own.pop(rate) for rate in ("bf16", "fp8") if rate in own}
        rates |= {"fp16": rates["bf16"]} if rates else {}
        shared = {name: value for name, value in values.items() if "." not in name}
        others = {"ranges": spread} if spread is not None else {}
        return replace(device, matmul=device.matmul | rates, **(shared | own | others))  # type: ignore[arg-type]

    return change


def weights(runs: Sequence[Run]) -> np.ndarray:
    """How much each row counts."""
    counts = Counter(run.source for run in runs)
    return np.array([min(1.0, COUNTED / counts[run.source]) ** 0.5 for run in runs])


@dataclass(frozen=True)
class Fit:
    """Constants, and how the planned times of the rows depend on them near there.

    Args:
        values: The constants.
        point: Their logarithms, by name in order.
        logs: The logarithm of planned over measured seconds, a row each.
        slopes: Its derivatives, (rows, constants).
    """

    values: Values
    point: np.ndarray
    logs: np.ndarray
    slopes: np.ndarray


def with_slopes(seconds: Callable[[Values], Sequence[float]], measured: Sequence[float], values: Values) -> Fit:
    """The fit with its derivatives, by small steps of each constant."""
    names, step = sorted(CONSTANTS), 0.02
    truth = np.log(np.array(measured))
    logs = np.log(np.array(seconds(values))) - truth
    columns = []
    for name in names:
        sign = -1.0 if values[name] * math.exp(step) > CONSTANTS[name].high else 1.0
        moved = np.log(np.array(seconds({**values, name: values[name] * math.exp(sign * step)}))) - truth
        columns.append((moved - logs) / (sign * step))
    return Fit(values, np.log(np.array([values[name] for name in names])), logs, np.stack(columns, axis=1))


def without(known: Fit, kept: np.ndarray, counted: np.ndarray) -> Values:
    """The constants fitted to a part of the rows, by the derivatives at the whole fit: nothing is planned again.

    Args:
        known: The whole fit.
        kept: Which rows are fitted to.
        counted: How much each of these counts.
    """
    names = sorted(CONSTANTS)
    centre = np.log(np.array([CONSTANTS[name].start for name in names]))
    low = np.log(np.array([CONSTANTS[name].low for name in names])) - 1e-9
    high = np.log(np.array([CONSTANTS[name].high for name in names])) + 1e-9

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = counted * (known.logs[kept] + known.slopes[kept] @ (point - known.point)) / TOLERANCE
        return np.concatenate([errors, HELD * (point - centre)])

    found: Any = least_squares(residuals, known.point, bounds=(low, high), loss="soft_l1")
    return {name: float(math.exp(x)) for name, x in zip(names, found.x)}


def fit(
    seconds: Callable[[Values], Sequence[float]], measured: Sequence[float], counted: np.ndarray | float = 1.0
) -> Values:
    """The constants under which what is planned is nearest to what was measured (Gauss-Newton).

    Args:
        seconds: What is planned with constants, a row each.
        measured: What was measured.
        counted: How much each row counts.
    """
    every = np.arange(len(measured))
    values = START
    for _ in range(ROUNDS):
        values = without(with_slopes(seconds, measured, values), every, np.broadcast_to(counted, every.shape))
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def intervals(
    known: Fit, sources: Sequence[str], counted: np.ndarray, draws: int = 200
) -> dict[str, tuple[float, float]]:
    """Of each constant, the middle 80 % of its values when sources are drawn again (the bootstrap over sources)."""
    draw = np.random.default_rng(0)
    unlike = sorted(set(sources))
    rows = {source: np.flatnonzero(np.array(sources) == source) for source in unlike}
    found = defaultdict[str, list[float]](list)
    for _ in range(draws):
        kept = np.concatenate([rows[unlike[i]] for i in draw.integers(len(unlike), size=len(unlike))])
        for name, value in without(known, kept, counted[kept]).items():
            found[name].append(value)
    ends = {name: np.percentile(values, (10, 90)) for name, values in found.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


# --- ranges -----------------------------------------------------------------------------------------------------------


def ranges(errors: Sequence[tuple[Traits, float]], quantiles: tuple[float, float] = QUANTILES) -> dict[str, Any]:
    """What ranges.py reads, from runs' traits and the errors that they had when nothing of their source was fitted to.

    A kind of layout with few runs has the range of all. Ends are those of a conformal range: of n errors the one is
    taken that n + 1 would have there. `wider` is the least by which 80 % of those runs are inside that have a trait
    which no fitted run has.
    """
    fitted = [(traits, error) for traits, error in errors if traits.family in FAMILIES and traits.model == DENSE]
    layouts = defaultdict[str, list[float]](list)
    for traits, error in fitted:
        layouts["any"].append(1 / (1 + error))
        layouts[traits.layout].append(1 / (1 + error))
    ends = {name: _conformal(shares, quantiles) for name, shares in layouts.items() if len(shares) >= ENOUGH}
    sizes = [traits.billions for traits, _ in fitted]
    lengths = [traits.sequence for traits, _ in fitted if traits.sequence]
    seen = {
        "models": [DENSE],
        "layouts": sorted(set(layouts) - {"any"}),
        "families": sorted({traits.family for traits, _ in fitted}),
        "billions": [float(f"{min(sizes):.3g}"), float(f"{max(sizes):.3g}")],
        "sequence": [min(lengths), max(lengths)],
    }
    found: dict[str, Any] = {"layouts": ends, "seen": seen, "wider": 0.0}
    needed = []
    for traits, error in errors:
        distance = distance_of(traits, seen)[1]
        low, high = base_of(traits, ends, distance)
        if distance > 0:
            share = math.log(1 / (1 + error))
            needed.append(max(0.0, (share / math.log(high if share > 0 else low) - 1) / distance))
    if needed:
        place = min(1.0, (quantiles[1] - quantiles[0]) / 100 * (len(needed) + 1) / len(needed))
        found["wider"] = math.ceil(100 * float(np.quantile(needed, place, method="higher"))) / 100
    return found


def _conformal(shares: Sequence[float], quantiles: tuple[float, float]) -> list[float]:
    low, high = (quantile / 100 for quantile in quantiles)
    many = len(shares)
    places = (max(0.0, low * (many + 1) / many - 1 / many), min(1.0, high * (many + 1) / many))
    found = np.quantile(np.array(shares), places)
    return [float(f"{min(found[0], 0.99):.3g}"), float(f"{max(found[1], 1.01):.3g}")]


def write(values: Values, between: dict[str, tuple[float, float]], spread: dict[str, Any], runs: int) -> str:
    """Writes the planner's file; a sentence."""
    values = {name: float(f"{value:.3g}") for name, value in values.items()}
    shared = {name: value for name, value in values.items() if "." not in name}
    families = defaultdict[str, dict[str, Any]](dict)
    for name, value in values.items():
        family, _, own = name.rpartition(".")
        if own in ("bf16", "fp8") and family:
            rates = {"bf16": value, "fp16": value} if own == "bf16" else {own: value}
            families[family].setdefault("matmul", {}).update(rates)
        elif family:
            families[family][own] = value
    ends = {name: [float(f"{end:.3g}") for end in between[name]] for name in values}
    tree = {"shared": shared, "families": dict(families), "ranges": spread, "intervals": ends}
    head = (
        f"# Written by `python -m experiments.benchmarks published --fit`: fitted to {runs} published runs.\n"
        "# intervals: of each constant the middle 80 % when sources of runs are drawn again.\n"
    )
    devices.FITTED.write_text(head + yaml.safe_dump(tree, sort_keys=True, default_flow_style=None, width=110))
    return f"written: {devices.FITTED}"
