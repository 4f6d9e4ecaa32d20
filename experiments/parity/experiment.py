"""`trireme parity`: an experiment's own model, loss and data through the parity matrix; the table, the certificate."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from app.config import Config
from app.config_io import from_dict, to_dict
from app.data.loader import fetch
from app.data.order import Order
from app.errors import UserError
from app.job import strategy_options
from app.masking import mask_tree
from app.optimizer import build_optimizer
from app.randomness import seed_everything
from app.run.manifest import Run
from app.tasks import load_task
from experiments.parity.curves import Trial
from experiments.parity.matrix import Result, run
from experiments.parity.rows import DEEPSPEED, ROWS, THREE, Row
from experiments.report.runs import store_artifacts

LEAST_EPS = 1e-5
"""Adam's epsilon is raised to this: a gradient that is zero but for rounding would otherwise be scaled up to a step of
full size in a random direction, on one device too."""


def make_trial(values: dict[str, Any], steps: int) -> Trial:
    """The trial that an experiment's configuration (as `to_dict` gives it) describes; called in every worker."""
    config = from_dict(values)
    task = load_task(config.task, config.task_args)
    data = task.train_data()
    order = Order(len(data), config.train.seed)  # type: ignore[arg-type]
    size = config.train.global_batch_size
    optimizer = replace(config.optimizer, eps=max(config.optimizer.eps, LEAST_EPS))

    def build() -> torch.nn.Module:
        seed_everything(config.train.seed)
        return task.build_model()

    def batch(step: int) -> Any:
        start = step * size
        return fetch(data, list(zip(order.indices(start, size).tolist(), range(start, start + size), strict=True)))

    return Trial(
        build=build,
        loss=task.loss,
        batch=batch,
        steps=steps,
        clip=config.train.clip_norm,
        blocks=task.blocks,
        tensor_plan=task.tensor_plan,
        heads=task.heads(),
        optimizer=lambda parameters: build_optimizer(optimizer, parameters),
    )


def measure(config: Config, *, steps: int, rows: Iterable[Row], checkpoints: bool) -> list[Result]:
    """Every row beside one device; with `checkpoints` also every ordered pair of rows.

    Precision, clipping, recomputation and what train.* and parallel.* say of how layouts behave are the experiment's,
    but for what is lossy by design (compression, reduce_dtype) and what a row decides itself (schedule, stages).
    """
    least = 2 if checkpoints else 1
    if steps < least:
        raise UserError(f"--steps is {steps}: write at least {least}")
    task = load_task(config.task, config.task_args)
    if task.items_vary:
        raise UserError(f"task {config.task} has batches of varying size, which parity cannot split: use another task")
    own = replace(
        strategy_options(config), compression="none", reduce_dtype="fp32", stages=None, float_output=task.float_output
    )
    return run(functools.partial(make_trial, to_dict(config), steps), rows, options=own, checkpoints=checkpoints)


def chosen(names: str | None, workers: str | None) -> list[Row]:
    """The matrix rows of these comma-separated names and numbers of workers; all by default.

    Raises:
        UserError: there is no such row.
    """
    wanted, counts = (set(filter(None, (text or "").split(","))) for text in (names, workers))
    rows = (*ROWS, *THREE, *((DEEPSPEED,) if find_spec("deepspeed") or DEEPSPEED.name in wanted else ()))
    known = {row.name for row in (*rows, DEEPSPEED)}
    if wanted - known:
        raise UserError(f"there is no row {min(wanted - known)!r}: write some of {', '.join(sorted(known))}")
    named = [row for row in rows if not wanted or row.name in wanted]
    found = [row for row in named if not counts or str(row.workers) in counts]
    if not found:
        choice = ", ".join(sorted({str(row.workers) for row in named}))
        raise UserError(f"these strategies have no row with {workers} workers: write some of {choice}")
    return found


# --- what was found ---------------------------------------------------------------------------------------------


def table(results: list[Result]) -> str:
    """One line per row and variant: the largest relative differences, and what is allowed where it is not met; of the
    checkpoints that a row continued, the one after which it was furthest off. Then what strategies reported."""
    width = max((len(str(result.row)) for result in results), default=3)
    lines = [f"{'row':<{width}} {'variant':<32} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>6}"]
    lines += [_line(result, result.variant, width) for result in results if result.after is None]
    resumed: dict[str, list[Result]] = {}
    for result in results:
        if result.after is not None:
            resumed.setdefault(str(result.row), []).append(result)
    for pairs in resumed.values():
        worst = max(pairs, key=lambda r: float("inf") if r.found is None else r.found.loss / r.bound.loss)
        wrong = [r for r in pairs if not r.passed and r is not worst]
        lines.append(_line(worst, f"after {len(pairs)} others, worst: {worst.after}", width))
        lines += [_line(r, f"after {r.after}", width) for r in wrong]
    said: dict[str, set[str]] = {}
    for result in results:
        for note in result.curve.notes if result.curve else ():
            said.setdefault(note, set()).add(str(result.row))
    return "\n".join([*lines, *(f"{note} ({', '.join(sorted(rows))})" for note, rows in said.items())])


def _line(result: Result, variant: str, width: int) -> str:
    start, found, bound = f"{result.row!s:<{width}} {variant:<32}", result.found, result.bound
    if found is None:
        return f"{start} {result.verdict}: {result.refused or result.error}"
    line = f"{start} {found.loss:8.1e} {found.norm:8.1e} {found.weights:8.1e} {result.seconds:6.1f}"
    allowed = f"(allowed {bound.loss:.0e} {bound.norm:.0e} {bound.weights:.0e})"
    return line if result.passed else f"{line}  {result.verdict} {allowed}"


def as_dicts(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {
            "row": str(r.row),
            "workers": r.row.workers,
            "variant": r.variant,
            "after": str(r.after) if r.after else None,
            "passed": r.passed,
            "verdict": r.verdict,
            "why": r.refused or r.error,
            "notes": list(r.curve.notes) if r.curve else [],
            "allowed": asdict(r.bound),
            "seconds": r.seconds,
            "difference": asdict(r.found) if r.found else None,
        }
        for r in results
    ]


def run_of(config: Config) -> Run:
    """The run that the configuration names.

    Raises:
        UserError: there is none, or it trains something else.
    """
    run = Run(config)
    if not run.manifest.starts:
        raise UserError(f"{run.folder} is not a run's folder: train this experiment first, or write its run.name")
    return run


def certify(run: Run, results: list[Result], text: str) -> str:
    """Stores the matrix with a run, as parity.json and parity.txt in its folder and among its MLflow artifacts; where
    it is now."""
    config = mask_tree(to_dict(run.config))
    content = {"time": time.time(), "torch": torch.__version__, "config": config, "rows": as_dicts(results)}
    made = {"parity.json": json.dumps(content, indent=1, default=str), "parity.txt": text + "\n"}
    with tempfile.TemporaryDirectory() as copies:
        for name, what in made.items():
            run.storage.write_bytes(name, what.encode())
            Path(copies, name).write_text(what)
        note = store_artifacts(run.local_folder, *(Path(copies, name) for name in made))
    return f"{run.folder}/parity.json{f'; {note}' if note else ''}"
