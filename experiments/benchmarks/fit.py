"""Fits the planner's constants to the half of published.csv that is for it, and writes app/planner/fitted.yaml.

Least squares on the logarithm of seconds per step, soft L1 (a tenth off counts fully, a factor of two hardly more),
each constant held near `START` by a weak prior, so that one on which no run depends stays. The same rows always give
the same constants: nothing is drawn.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from app.planner import device as devices
from app.planner.device import Device

Values = dict[str, float]
"""`name` of a constant of all GPUs, `family.name` of a family's → value."""
START: Values = {
    **{"across": 0.85, "within": 0.5, "compiled_bytes": 0.6, "contention": 0.1, "k_half": 150.0, "mn_half": 2e6},
    **{"async_tp": 0.9, "scale": 0.01, "stage": 0.02, "step": 1e-4},
    **{"ampere.bf16": 0.86, "ampere.stream": 0.3},
    **{"hopper.bf16": 0.74, "hopper.fp8": 0.62, "hopper.stream": 0.35},
}
CEILING = {
    **{"bf16": 0.88, "fp8": 0.88, "stream": 0.95, "within": 0.95, "across": 0.95, "async_tp": 0.95},
    **{"compiled_bytes": 0.7},
}
"""What cannot be more: shares that the best kernels reach, and the share of its bytes that a fused block moves."""
TOLERANCE = 0.1
HELD = 0.3
"""A constant's residual per unit of its logarithm, in tolerances."""
STEPS = 9
QUANTILES = (5, 95)
"""Of the fit half's errors, the range that is shown: unseen runs err more, and 80 % of them are to be inside."""
ENOUGH = 8
"""Runs of a kind of layout that give it a range of its own."""


def changed(values: Values) -> Callable[[Device], Device]:
    """What gives a device the constants."""

    def change(device: Device) -> Device:
        family = devices.family_of(device.gpu)
        own = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{family}.")}
        rates: Values = {rate: own.pop(rate) for rate in ("bf16", "fp8") if rate in own}
        rates |= {"fp16": rates["bf16"]} if rates else {}
        shared = {name: value for name, value in values.items() if "." not in name}
        return replace(device, matmul=device.matmul | rates, **(shared | own))  # type: ignore[arg-type]

    return change


def fit(seconds: Callable[[Values], Sequence[float]], measured: Sequence[float]) -> Values:
    """The constants under which what is planned is nearest to what was measured."""
    names, truth = sorted(START), np.log(np.array(measured))
    centre = np.log(np.array([START[name] for name in names]))
    limit = np.log(np.array([CEILING.get(name.rpartition(".")[2], 1e9) for name in names]))

    def values_at(point: np.ndarray) -> Values:
        return {name: float(math.exp(x)) for name, x in zip(names, point)}

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = (np.log(np.array(seconds(values_at(point)))) - truth) / TOLERANCE
        return np.concatenate([errors, HELD * (point - centre)])

    how: dict[str, Any] = {"loss": "soft_l1", "diff_step": 0.02, "max_nfev": STEPS}
    found: Any = least_squares(residuals, np.minimum(centre, limit - 1e-3), bounds=(centre - 3, limit), **how)
    return {name: float(f"{value:.3g}") for name, value in values_at(found.x).items()}


def ranges(errors: Sequence[tuple[str, float]], quantiles: tuple[float, float] = QUANTILES) -> dict[str, list[float]]:
    """Kind of layout → the shares of the planned speed between which runs of it are; no narrower than that of all runs
    ("any"), of which there are enough to tell. errors: (kind, error)."""
    kinds = defaultdict[str, list[float]](list)
    for kind, error in errors:
        kinds["any"].append(1 / (1 + error))
        kinds[kind].append(1 / (1 + error))
    found = {kind: np.percentile(own, quantiles) for kind, own in kinds.items() if len(own) >= ENOUGH}
    low, high = found.get("any", (math.inf, -math.inf))
    wide = {kind: (min(low, own[0]), max(high, own[1])) for kind, own in found.items()}
    return {kind: [float(f"{value:.3g}") for value in ends] for kind, ends in wide.items()}


def write(values: Values, spread: dict[str, list[float]], runs: int) -> str:
    """Writes the planner's file; a sentence."""
    shared = {name: value for name, value in values.items() if "." not in name}
    families = defaultdict[str, dict[str, Any]](dict)
    for name, value in values.items():
        family, _, own = name.rpartition(".")
        if own in ("bf16", "fp8") and family:
            rates = {"bf16": value, "fp16": value} if own == "bf16" else {own: value}
            families[family].setdefault("matmul", {}).update(rates)
        elif family:
            families[family][own] = value
    tree = {"shared": shared, "families": dict(families), "ranges": spread}
    head = f"# Written by `python -m experiments.benchmarks published --fit`: fitted to {runs} rows of published.csv.\n"
    devices.FITTED.write_text(head + yaml.safe_dump(tree, sort_keys=True, default_flow_style=None, width=110))
    return f"written: {devices.FITTED}"
