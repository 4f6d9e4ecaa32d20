"""How well the ranges of plans are calibrated, what a plan's choice of layout loses, and how far
publishers of the same run are apart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import click
import numpy as np

from app.planner.advice import PARTS as PARTS_OF_STEP
from app.planner.advice import settings_text
from app.planner.estimate import Estimate
from app.planner.layouts import enumerate_layouts
from app.planner.plan import ranked
from app.planner.ranges import spread_of
from experiments.benchmarks import fit
from experiments.benchmarks.compared import Compared, Prepared
from experiments.benchmarks.published_runs import Run
from experiments.report import figures

BEST_OF_MANY = "/nanotron/"
"""In the address of runs that are the best of many layouts each; the others are not published."""
MIN_LAYOUTS = 3
"""Layouts among which a choice is judged."""
PARTS_OF_TABLE = ("fit", "choose", "held out")
FIXED_KEYS = ("train.activation_checkpointing", "train.precision", "parallel.offload")
"""Settings that a plan does not change when it chooses a layout."""

SAME_SETTINGS = (
    *("model", "d_model", "n_layers", "gpu", "precision", "method", "sequence", "recompute"),
    *("tp", "pp", "cp", "ep"),
)
"""What runs have in common that differ by their publishers."""


def draw_calibration(
    prepared: Sequence[Prepared],
    unseen: Sequence[Compared],
    path: str,
) -> None:
    """Draws how many runs are inside ranges of 10 to 90 %.

    Args:
        prepared: Runs that are planned.
        unseen: The same runs, each planned by what runs of other sources have said.
        path: Of the picture.

    Raises:
        UsageError: There are too few runs.
    """
    traits = {one.run: one.traits for one in prepared if one.plan is not None}
    with_speed = [one for one in unseen if one.has_speed]
    if len(with_speed) < fit.ENOUGH:
        problem = f"--calibration needs {fit.ENOUGH} runs with a speed"
        raise click.UsageError(f"{problem}, and there are {len(with_speed)}")
    fitted = [one for one in with_speed if one.run.part == "fit"] or with_speed
    residuals = [fit.Residual(one.run.source, traits[one.run], one.error) for one in fitted]
    lines: dict[str, list[tuple[float, float]]] = {"as it should be": [(0, 0), (100, 100)]}
    for level in range(10, 100, 10):
        ranges = fit.ranges(residuals, (50 - level / 2, 50 + level / 2))
        for part in PARTS_OF_TABLE:
            are_inside = []
            for one in with_speed:
                if one.run.part == part:
                    spread = spread_of(traits[one.run], ranges)
                    are_inside.append(spread.low <= 1 / (1 + one.error) <= spread.high)
            if are_inside:
                share = 100 * float(np.mean(are_inside))
                lines.setdefault(part, []).append((level, share))
    figure = figures.line_plot(lines, x="% of runs that are to be inside the range", y="% that are")
    figure.savefig(path, dpi=90)


@dataclass(frozen=True)
class Choice:
    """The layout that a plan ranks first, of those in which one model was run on the same GPUs.

    Attributes:
        members: The runs, those that ran out of memory included.
        chosen: The run whose plan is ranked first.
        best: The fastest run.
    """

    members: tuple[Compared, ...]
    chosen: Compared
    best: Compared

    @property
    def loss(self) -> float | None:
        """How much longer the choice took than the fastest, as a share; None: out of memory."""
        if not self.chosen.run.step_seconds:
            return None
        return self.chosen.run.step_seconds / self.best.run.step_seconds - 1

    @property
    def row(self) -> dict[str, str]:
        """The choice as a line."""
        assert self.chosen.plan is not None and self.best.plan is not None
        is_best = self.chosen is self.best
        run = self.chosen.run
        loss = "ran out of memory" if self.loss is None else f"{100 * self.loss:+.1f} %, measured"
        return {
            "run": f"{run.model}, {run.sequence:,} tokens, {run.gpus} GPUs",
            "layouts": str(len(self.members)),
            "chosen": settings_text(self.chosen.plan),
            "best known": "the same" if is_best else settings_text(self.best.plan),
            "chosen takes": loss,
            "mostly": "",
        }


def choices(compared: Sequence[Compared]) -> list[Choice]:
    """What a plan chooses where one model was run in several layouts on the same GPUs."""
    chosen = []
    for members in _same_models(compared).values():
        finished = [one for one in members if one.run.step_seconds]
        if len(members) >= MIN_LAYOUTS and finished:
            best = min(finished, key=lambda one: one.run.step_seconds)
            chosen.append(Choice(tuple(members), _ranked_first(members), best))
    return chosen


def figures_of(chosen: Sequence[Choice]) -> dict[str, object]:
    """The figures of choices together.

    Returns:
        "models"; "ran_out", how many choices ran out of memory; "median_loss", to which these are
        endless (None if the median is one of them); "largest_loss" of the others.
    """
    losses = [math.inf if choice.loss is None else choice.loss for choice in chosen]
    finished = [loss for loss in losses if math.isfinite(loss)]
    median = statistics.median(losses) if losses else math.inf
    return {
        "models": len(chosen),
        "ran_out": len(chosen) - len(finished),
        "median_loss": median if math.isfinite(median) else None,
        "largest_loss": max(finished, default=None),
    }


def _same_models(compared: Sequence[Compared]) -> dict[tuple[Hashable, ...], list[Compared]]:
    """Runs of one model on the same GPUs, which differ in their layout."""
    groups = defaultdict[tuple[Hashable, ...], list[Compared]](list)
    for one in compared:
        run = one.run
        if one.plan is not None and (run.step_seconds or run.ran_out):
            key = (run.source, run.model, run.sequence, run.gpus, run.global_batch, run.kernels)
            groups[key].append(one)
    return groups


def _ranked_first(members: Sequence[Compared]) -> Compared:
    """The run whose plan is ranked first."""
    plans = [one.plan for one in members if one.plan is not None]
    first = ranked(plans)[0]
    # Of equal plans the last one counts.
    return [one for one in members if one.plan is first][-1]


def beside_best(prepared: Sequence[Prepared]) -> list[dict[str, str]]:
    """What a plan would choose of all layouts, beside the best one that somebody found.

    The times of both are planned.
    """
    rows = []
    for one in prepared:
        plan = one.plan
        if plan is None or BEST_OF_MANY not in one.run.source:
            continue
        fixed = {key: plan.fixed[key] for key in FIXED_KEYS}
        candidates = enumerate_layouts(plan.space, fixed)
        chosen = ranked([plan.estimator.estimate(candidate) for candidate in candidates])[0]
        known = plan.rows[0]
        relative = chosen.step_seconds / known.step_seconds - 1
        rows.append(
            {
                "run": f"{one.run.model}, {one.run.gpus} GPUs",
                "layouts": "all",
                "chosen": settings_text(chosen),
                "best known": settings_text(known),
                "chosen takes": f"{100 * relative:+.1f} %, planned",
                "mostly": _largest_saving(known, chosen),
            }
        )
    return rows


def _largest_saving(known: Estimate, chosen: Estimate) -> str:
    """The part of a step in which the chosen layout saves most, in one or two words."""
    savings = {part: seconds - chosen.seconds[part] for part, seconds in known.seconds.items()}
    part = max(savings, key=lambda name: savings[name])
    return PARTS_OF_STEP[part].partition(" (")[0].partition(",")[0]


# --- publishers of the same run -------------------------------------------------------------------


def repository(run: Run) -> str:
    """The site and the repository (or the first two folders) of a run's page."""
    address = urlsplit(run.source if "//" in run.source else f"//{run.source}")
    return "/".join([address.netloc, *address.path.strip("/").split("/")[:2]])


def publishers(runs: Iterable[Run]) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Runs of the same settings in several repositories, whose speeds a plan cannot tell apart.

    A repository's speed is the median of its runs', in tokens/s of a GPU. Micro-batches and the
    number of GPUs may differ.

    Args:
        runs: Published runs.

    Returns:
        (a row for each settings that several repositories have, figures of all pairs of these)
    """
    groups: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        if run.step_seconds and run.sequence:
            settings = (*(getattr(run, name) for name in SAME_SETTINGS), run.data in ("", "ddp"))
            speed = run.global_batch * run.sequence / run.step_seconds / run.gpus
            groups[settings][repository(run)].append(speed)
    rows = []
    ratios = []
    for settings, speeds_by_repository in groups.items():
        speeds = sorted(statistics.median(speeds) for speeds in speeds_by_repository.values())
        if len(speeds) == 1:
            continue
        ratios += [high / low - 1 for low, high in itertools.combinations(speeds, 2)]
        values = dict(zip(SAME_SETTINGS, settings))
        degrees = " ".join(
            f"{name}={values[name]}" for name in ("tp", "pp", "cp", "ep") if values[name] != 1
        )
        rows.append(
            {
                "model": str(values["model"]),
                "GPU": str(values["gpu"]),
                "run": f"{values['method']}, {values['precision']}, {values['sequence']} tokens",
                "recomputes": str(values["recompute"]),
                "degrees": degrees,
                "repositories": str(len(speeds)),
                "tokens/s of a GPU": f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}",
                "apart": f"{100 * (speeds[-1] / speeds[0] - 1):.0f} %",
            }
        )
    figures_of_pairs: dict[str, float] = {"pairs": len(ratios)}
    if ratios:
        figures_of_pairs["median"] = float(np.median(ratios))
        figures_of_pairs["90th"] = float(np.quantile(ratios, 0.9))
    return rows, figures_of_pairs


def apart_text(apart: dict[str, float]) -> str:
    """The figures of `publishers` as a sentence."""
    return (
        f"two repositories of the same run: {apart['pairs']:.0f} pairs, "
        f"{100 * apart['median']:.0f} % apart in the median, "
        f"{100 * apart['90th']:.0f} % at the 90th percentile"
    )
