"""Fits the constants of constants.yaml on the part of the published runs that is not held out.

    python -m app.planner.fit PATH/llm_foundry.csv

Few and physical: per GPU family the share of the peak that products reach, that attention reaches, and that memory
reaches, what overlapping costs, and what the trainer takes per step; each is held near where hardware is known to be.
Prints YAML to put into constants.yaml, and the errors on both parts.
"""

from __future__ import annotations

import sys

import numpy as np

from app.planner.published import Published, compare, is_held_out, rows_of
from app.planner.rates import Rates, apply, rates

FITTED = ("matmul", "attention", "stream", "contention", "trainer", "k_half")
NEAR = {"matmul": 0.75, "attention": 0.5, "stream": 0.65, "contention": 0.3, "trainer": 50e-3, "k_half": 150.0}
"""Where each is expected."""
LOOSE = {"matmul": 0.1, "attention": 0.3, "stream": 0.05, "contention": 0.25, "trainer": 0.5, "k_half": 0.25}
"""How far, in logarithms, it may go without being held back."""


def with_constants(device: Rates, logarithms: np.ndarray) -> Rates:
    values = {name: NEAR[name] * float(np.exp(x)) for name, x in zip(FITTED, logarithms)}
    return apply(device, values | {"matmul": {"bf16": values["matmul"]}})


def fit(rows: list[Published]) -> dict[str, float]:
    """The constants of one family, from rows on its GPUs."""
    from scipy.optimize import least_squares

    devices = {name: rates(name) for name in {row.gpu for row in rows}}
    held_back = np.array([LOOSE[name] for name in FITTED])

    def residuals(x: np.ndarray) -> np.ndarray:
        found = compare(rows, {name: with_constants(device, x) for name, device in devices.items()})
        errors = np.log1p(np.array([one.error for one in found])) / 0.05
        return np.concatenate([errors, x / held_back])

    found = least_squares(residuals, np.zeros(len(FITTED)), loss="soft_l1", diff_step=1e-2, max_nfev=12)
    return {name: NEAR[name] * float(np.exp(x)) for name, x in zip(FITTED, found.x)}


def main() -> None:
    rows = [row for row in rows_of(sys.argv[1]) if row.precision == "bf16"]
    for family in ("a100", "h100"):
        own = [row for row in rows if row.gpu.startswith(family)]
        constants = fit([row for row in own if not is_held_out(row)])
        print(f"{family}:", ", ".join(f"{name}: {value:.4g}" for name, value in constants.items()), flush=True)
        x = np.log([constants[name] / NEAR[name] for name in FITTED])
        devices = {name: with_constants(rates(name), x) for name in {row.gpu for row in own}}
        for title, part in (
            ("fitted", [row for row in own if not is_held_out(row)]),
            ("held out", [row for row in own if is_held_out(row)]),
        ):
            errors = np.abs([one.error for one in compare(part, devices)])
            print(
                f"  {title}: {len(part)} runs, median error {np.median(errors):.3f}, worst {errors.max():.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
