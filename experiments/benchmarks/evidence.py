"""Of published runs and their plans: how well ranges are calibrated, and what a plan's choice of layout loses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from app.planner.advice import PARTS, settings_text
from app.planner.layouts import enumerate_layouts
from app.planner.plan import ranked
from app.planner.ranges import spread_of
from experiments.benchmarks import fit
from experiments.benchmarks.compared import Compared, Prepared
from experiments.report import figures

BEST_OF_MANY = "/nanotron/"
"""The source of runs that are the best of many layouts each, of which the others' figures are not told."""


def draw(prepared: Sequence[Prepared], unseen: Sequence[Compared], path: str) -> None:
    """How many runs are inside ranges of 10 to 90 %.

    Args:
        prepared: Runs that are planned.
        unseen: The same runs, each planned by what other sources' runs have said.
        path: Of the picture.
    """
    traits = {one.run: one.traits for one in prepared if one.plan is not None}
    errors = [(traits[one.run], one.error) for one in unseen if one.has_speed]
    if len(errors) < fit.ENOUGH:
        raise click.UsageError(f"--calibration needs {fit.ENOUGH} runs with a speed, and there are {len(errors)}")
    lines: dict[str, list[tuple[float, float]]] = {"as it should be": [(0, 0), (100, 100)]}
    lines |= {part: [] for part in ("fit", "choose", "held out")}
    for level in range(10, 100, 10):
        own = [(traits[one.run], one.error) for one in unseen if one.has_speed and one.run.part == "fit"]
        ranges = fit.ranges(own or errors, (50 - level / 2, 50 + level / 2))
        for part in ("fit", "choose", "held out"):
            members = [one for one in unseen if one.has_speed and one.run.part == part]
            spreads = [spread_of(traits[one.run], ranges) for one in members]
            inside = [s.low <= 1 / (1 + one.error) <= s.high for one, s in zip(members, spreads)]
            if inside:
                lines[part].append((level, 100 * float(np.mean(inside))))
    lines = {name: points for name, points in lines.items() if points}
    figure = figures.line_plot(lines, x="% of runs that are to be inside the range", y="% that are")
    figure.savefig(path, dpi=90)


def among_published(compared: Sequence[Compared]) -> list[dict[str, str]]:
    """Where one model was run in several layouts on the same GPUs: how much longer the one took that a plan ranks first
    than the one that was fastest, and whether it ran out of memory. Layouts that ran out of memory are among them."""
    groups = defaultdict[Any, list[Compared]](list)
    for one in compared:
        if one.plan is not None and (one.run.step_seconds or one.run.ran_out):
            key = (one.run.source, one.run.model, one.run.sequence, one.run.gpus, one.run.global_batch, one.run.kernels)
            groups[key].append(one)
    rows = []
    for (_, model, sequence, gpus, *_), own in groups.items():
        plans = {id(one.plan): one for one in own}
        chosen = plans[id(ranked([one.plan for one in own if one.plan is not None])[0])]
        ran = [one for one in own if one.run.step_seconds]
        if len(own) < 3 or not ran:
            continue
        best = min(ran, key=lambda one: one.run.step_seconds)
        assert chosen.plan is not None and best.plan is not None
        loss = "ran out of memory"
        if chosen.run.step_seconds:
            loss = f"{100 * (chosen.run.step_seconds / best.run.step_seconds - 1):+.1f} %, measured"
        rows.append(
            {
                "run": f"{model}, {sequence:,} tokens, {gpus} GPUs",
                "layouts": str(len(own)),
                "chosen": settings_text(chosen.plan),
                "best known": "the same" if chosen is best else settings_text(best.plan),
                "chosen takes": loss,
                "mostly": "",
            }
        )
    return rows


def beside_best(prepared: Sequence[Prepared]) -> list[dict[str, str]]:
    """What a plan would choose of all layouts, beside the best that somebody found; how long it is planned to take."""
    rows = []
    for one in prepared:
        run, plan = one.run, one.plan
        if BEST_OF_MANY not in run.source or plan is None:
            continue
        fixed = {
            key: plan.fixed[key] for key in ("train.activation_checkpointing", "train.precision", "parallel.offload")
        }
        every = [plan.estimator.estimate(candidate) for candidate in enumerate_layouts(plan.space, fixed)]
        best, own = ranked(every)[0], plan.rows[0]
        more = {part: seconds - best.seconds[part] for part, seconds in own.seconds.items()}
        part = PARTS[max(more, key=lambda name: more[name])]
        rows.append(
            {
                "run": f"{run.model}, {run.gpus} GPUs",
                "layouts": "all",
                "chosen": settings_text(best),
                "best known": settings_text(own),
                "chosen takes": f"{100 * (best.step_seconds / own.step_seconds - 1):+.1f} %, planned",
                "mostly": part.partition(" (")[0].partition(",")[0],
            }
        )
    return rows
