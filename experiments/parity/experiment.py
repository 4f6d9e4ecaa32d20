"""`trireme parity`: an experiment's own model, loss and data through the parity matrix of matrix.py."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import torch

from app.config import Config
from app.config_io import from_dict, to_dict
from app.data.loader import fetch
from app.data.order import Order
from app.errors import UserError
from app.job import options
from app.optimizer import build_optimizer
from app.randomness import seed_everything
from app.run.manifest import local_folder
from app.storage import Storage
from app.tasks import load_task
from app.tracking.delivery import last_start
from app.tracking.masking import mask_tree
from app.tracking.tracker import Tracker
from experiments.parity.curves import Trial, dropout
from experiments.parity.matrix import Result, run
from experiments.parity.rows import DEEPSPEED, ROWS, THREE, Row
from strategies.initialization import structure

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

    optimizer = replace(config.optimizer, eps=max(config.optimizer.eps, LEAST_EPS))
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
        raise UserError(f"steps is {steps}: write at least {least}")
    task = load_task(config.task, config.task_args)
    if task.items_vary:
        raise UserError(f"task {config.task} has batches of varying size, which parity cannot split: use another")
    own = options(config)
    lossless = replace(own, compression="none", reduce_dtype="fp32", stages=None, float_output=task.float_output)
    make = functools.partial(make_trial, to_dict(config), steps)
    return run(make, list(rows), options=lossless, checkpoints=checkpoints)


def cautions(config: Config) -> list[str]:
    """Why rows of this experiment will differ although nothing is wrong, one sentence each."""
    module, _ = structure(load_task(config.task, config.task_args).build_model)
    drawn = dropout(module)
    if not drawn:
        return []
    return [
        f"the model drops out at random in {drawn}, and other numbers are drawn where the batch is split otherwise, so "
        "rows will differ: set it to 0 in task_args"
    ]


def chosen(names: str | None, workers: str | None) -> list[Row]:
    """The matrix rows of these comma-separated names and numbers of workers; all by default.

    Raises:
        UserError: there is no such row.
    """
    wanted, counts = set(filter(None, (names or "").split(","))), set(filter(None, (workers or "").split(",")))
    everything = (*ROWS, *THREE, *((DEEPSPEED,) if find_spec("deepspeed") or "deepspeed" in wanted else ()))
    known = {row.name for row in everything} | {"deepspeed"}
    if wanted - known:
        raise UserError(f"there is no row {min(wanted - known)!r}: write some of {', '.join(sorted(known))}")
    rows = [r for r in everything if (not wanted or r.name in wanted) and (not counts or str(r.workers) in counts)]
    if not rows:
        counts_known = sorted({row.workers for row in everything if not wanted or row.name in wanted})
        raise UserError(f"no such row has {workers} workers: write some of {', '.join(map(str, counts_known))}")
    return rows


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
            "notes": list(r.notes),
            "allowed": asdict(r.bound),
            "seconds": r.seconds,
            "difference": asdict(r.found) if r.found else None,
        }
        for r in results
    ]


def document(arguments: Iterable[str], text: str) -> str:
    """The matrix as a Markdown file: the command, the machine, the table."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    gpus = f", {torch.cuda.device_count()} × {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"# Parity\n\n`trireme parity {' '.join(arguments)}` on {when}, torch {torch.__version__}, {os.cpu_count()} "
        f"cores{gpus}.\n\nLargest relative differences from one device: of a step's loss, of its gradient norm, of a "
        f"weight tensor at the end (root mean squares).\n\n```\n{text}\n```\n"
    )


def certifiable(folder: str, config: Config) -> dict[str, Any]:
    """The manifest of the run in `folder` (a path, or s3://…), which trains what `config` does.

    Raises:
        UserError: there is no run, or it trains something else.
    """
    try:
        manifest = json.loads(Storage(folder).read_bytes("run.json"))
    except (FileNotFoundError, ValueError):
        raise UserError(
            f"{folder} holds no run: write the folder that `trireme train` named, such as runs/gpt"
        ) from None
    # As a run writes them down: without their secrets.
    own = mask_tree({"task": config.task, "task_args": to_dict(config)["task_args"]})
    own, identity = json.loads(json.dumps(own, default=str)), mask_tree(manifest["identity"])
    for key, value in own.items():
        trained = identity.get(key)
        if trained != value:
            raise UserError(
                f"the run in {folder} has {key} {trained!r}, and this matrix {value!r}: certify a run of this "
                "experiment"
            )
    return dict(manifest)


def certify(folder: str, config: Config, results: list[Result], text: str) -> str:
    """Stores the matrix with a run: parity.json and parity.txt in its folder and among its MLflow artifacts.

    Raises:
        UserError: see `certifiable`.
    """
    manifest, storage = certifiable(folder, config), Storage(folder)
    content = {"time": time.time(), "torch": torch.__version__, "config": to_dict(config), "rows": as_dicts(results)}
    made = {"parity.json": json.dumps(content, indent=1, default=str), "parity.txt": text + "\n"}
    for name, what in made.items():
        storage.write_bytes(name, what.encode())
    here = local_folder(storage, manifest["name"], manifest["uid"])
    start = last_start(here / "tracking")
    if start:  # the run was tracked from here: the writer finds its MLflow run again, and ends it as it was
        tracker = Tracker(
            here / "tracking",
            uri=start["uri"],
            experiment=start["experiment"],
            artifact_location=start["artifact_location"],
            run_name=manifest["name"],
            run_uid=manifest["uid"],
        )
        tracker.start()
        for name, what in made.items():
            tracker.text(what, name)
        tracker.finish(ENDED.get(manifest["status"], "FAILED"))
    return f"{storage.url}/parity.json"
