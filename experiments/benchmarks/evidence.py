"""Of published runs and their plans: how well ranges are calibrated, and what a plan's choice of layout loses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from app.planner.advice import PARTS, settings_text
from app.planner.layouts import Space, enumerate_layouts
from app.planner.plan import ranked
from experiments.benchmarks import fit
from experiments.benchmarks.compared import Compared, estimator_of
from experiments.report import figures

SHOWN = 80  # % of runs that are to be inside the range that a plan shows, which is fit.QUANTILES of errors
BEST_OF_MANY = "/nanotron/"
"""The source of runs that are the best of many layouts each, of which the others' figures are not told."""


def draw(compared: Sequence[Compared], path: str) -> None:
    """How many runs are inside ranges of 10 to 90 %, ranges being made from the errors of the half for the fit."""
    ran = [one for one in compared if one.run.step_seconds]
    errors = [(one.run.kind, one.error) for one in ran if not one.run.is_unseen]
    if len(errors) < fit.ENOUGH:
        raise click.UsageError(
            f"--calibration needs {fit.ENOUGH} runs that are for the fit, and there are {len(errors)}"
        )
    lines: dict[str, list[tuple[float, float]]] = {"as it should be": [(0, 0), (100, 100)], "fit": [], "unseen": []}
    for level in range(10, 100, 10):
        half = min(50.0, level * (50 - fit.QUANTILES[0]) / SHOWN)
        spread = fit.ranges(errors, (50 - half, 50 + half))
        for name in ("fit", "unseen"):
            own = [one for one in ran if one.run.is_unseen == (name == "unseen")]
            ends = [spread.get(one.run.kind, spread["any"]) for one in own]
            inside = [low <= 1 / (1 + one.error) <= high for one, (low, high) in zip(own, ends)]
            lines[name].append((level, 100 * float(np.mean(inside))))
    figure = figures.lines(lines, x="% of runs that are to be inside the range", y="% that are")
    figure.savefig(path, dpi=90)


def among_published(compared: Sequence[Compared]) -> list[dict[str, str]]:
    """Where one model was run in several layouts on the same GPUs: how much longer the one took that is planned fastest
    than the one that was."""
    groups = defaultdict[Any, list[Compared]](list)
    for one in compared:
        if one.run.step_seconds:
            groups[one.run.model, one.run.sequence, one.run.gpus, one.run.global_batch].append(one)
    rows = []
    for (model, sequence, gpus, _), own in groups.items():
        layouts = {one.plan.candidate for one in own}
        chosen = min(own, key=lambda one: (not one.plan.fits, one.plan.step_seconds))
        best = min(own, key=lambda one: one.run.step_seconds)
        if len(layouts) > 2:
            rows.append(
                {
                    "run": f"{model}, {sequence:,} tokens, {gpus} GPUs",
                    "layouts": str(len(layouts)),
                    "chosen": settings_text(chosen.plan),
                    "best known": "the same" if chosen is best else settings_text(best.plan),
                    "chosen takes": f"{100 * (chosen.run.step_seconds / best.run.step_seconds - 1):+.1f} %, measured",
                    "mostly": "",
                }
            )
    return rows


def beside_best(compared: Sequence[Compared]) -> list[dict[str, str]]:
    """What a plan would choose of all layouts, beside the best that somebody found; how long it is planned to take."""
    rows = []
    for one in compared:
        if BEST_OF_MANY not in one.run.source:
            continue
        run, estimator = one.run, estimator_of(one.run, overlap=True)
        reader = estimator.reader
        sizes = (run.gpus, run.per_node, run.global_batch, reader.blocks, reader.heads, run.sequence)
        space = Space(*sizes, bool(reader.tp), (run.precision,), offload=False)
        fixed = {"train.activation_checkpointing": run.recompute}
        best = ranked([estimator.estimate(candidate) for candidate in enumerate_layouts(space, fixed)])[0]
        more = {part: seconds - best.seconds[part] for part, seconds in one.plan.seconds.items()}
        part = PARTS[max(more, key=lambda name: more[name])]
        rows.append(
            {
                "run": f"{run.model}, {run.gpus} GPUs",
                "layouts": "all",
                "chosen": settings_text(best),
                "best known": settings_text(one.plan),
                "chosen takes": f"{100 * (best.step_seconds / one.plan.step_seconds - 1):+.1f} %, planned",
                "mostly": part.partition(" (")[0].partition(",")[0],
            }
        )
    return rows
