"""`trireme parity`: an experiment's own model, loss and data through the parity matrix of strategies/matrix.py."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from app.config import Config
from app.config_file import from_dict, to_dict
from app.data.loader import fetch
from app.data.order import Order
from app.errors import UserError
from app.optim import build_optimizer
from app.randomness import seed_everything
from app.tasks import load_task
from app.tracking.delivery import last_start
from app.tracking.tracker import Tracker
from strategies.matrix import Result, run
from strategies.parity import Trial
from strategies.rows import ROWS, Row

ENDED = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
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

    def build() -> torch.nn.Module:
        seed_everything(config.train.seed)
        return task.build_model()

    def batch(step: int) -> Any:
        start = step * size
        return fetch(data, list(zip(order.indices(start, size).tolist(), range(start, start + size), strict=True)))

    config.optimizer.eps = max(config.optimizer.eps, LEAST_EPS)
    return Trial(
        build=build,
        loss=task.loss,
        batch=batch,
        steps=steps,
        blocks=task.blocks,
        tensor_plan=task.tensor_plan,
        optimizer=lambda parameters: build_optimizer(config.optimizer, parameters),
    )


def measure(config: Config, *, steps: int, rows: Iterable[Row], checkpoints: bool) -> list[Result]:
    """Every row beside one device; with `checkpoints` also every ordered pair of rows."""
    task = load_task(config.task, config.task_args)
    if task.items_vary:
        raise UserError(f"task {config.task} has batches of varying size, which parity cannot split: use another")
    return run(functools.partial(make_trial, to_dict(config), steps), list(rows), checkpoints=checkpoints)


def chosen(names: str | None, workers: str | None) -> list[Row]:
    """The matrix rows of these comma-separated names and numbers of workers; all by default.

    Raises:
        UserError: there is no such row.
    """
    wanted, counts = set(filter(None, (names or "").split(","))), set(filter(None, (workers or "").split(",")))
    known = {row.name for row in ROWS}
    if wanted - known:
        raise UserError(f"there is no row {min(wanted - known)!r}: write some of {', '.join(sorted(known))}")
    rows = [r for r in ROWS if (not wanted or r.name in wanted) and (not counts or str(r.workers) in counts)]
    if not rows:
        counts_known = sorted({row.workers for row in ROWS})
        raise UserError(f"no row has workers={workers}: write some of {', '.join(map(str, counts_known))}")
    return rows


def as_dicts(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {
            "row": str(r.row),
            "workers": r.row.workers,
            "variant": r.variant,
            "after": str(r.after) if r.after else None,
            "passed": r.passed,
            "refused": r.error,
            "seconds": r.seconds,
            "difference": asdict(r.found) if r.found else None,
        }
        for r in results
    ]


def certify(folder: Path, config: Config, results: list[Result], text: str) -> Path:
    """Stores the matrix with a run: parity.json in its folder, and both forms among its MLflow artifacts."""
    if not (folder / "run.json").exists():
        raise UserError(f"{folder} holds no run: write the folder that `trireme train` named, such as runs/gpt")
    certificate = folder / "parity.json"
    content = {"time": time.time(), "torch": torch.__version__, "config": to_dict(config), "rows": as_dicts(results)}
    certificate.write_text(json.dumps(content, indent=1, default=str))
    (folder / "parity.txt").write_text(text + "\n")
    manifest = json.loads((folder / "run.json").read_text())
    start = last_start(folder / "tracking")
    if start:  # the run was tracked: the writer finds its MLflow run again, and ends it as it was
        tracker = Tracker(
            folder / "tracking",
            uri=start["uri"],
            experiment=start["experiment"],
            artifact_location=start["artifact_location"],
            run_name=manifest["name"],
            run_uid=manifest["uid"],
        )
        tracker.start()
        tracker.artifact(certificate)
        tracker.artifact(folder / "parity.txt")
        tracker.finish(ENDED.get(manifest["status"], "FAILED"))
    return certificate
