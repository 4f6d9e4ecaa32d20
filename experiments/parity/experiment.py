"""`trireme parity`: an experiment's own model, loss and data through the parity matrix, and the table."""

import functools
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import torch

from app.config import Config
from app.config.io import from_dict, to_dict
from app.data.loader import fetch
from app.data.mixture import order_of
from app.data.randomness import seed_everything
from app.data.stream import is_stream
from app.errors import UserError
from app.tasks import load_task
from app.tasks.build import build_model
from app.training.job import strategy_options
from app.training.optimizer import build_optimizer
from experiments.parity.curves import Trial
from experiments.parity.matrix import Result, run
from experiments.parity.rows import ALL_FIVE, DEEPSPEED, MIXTURES, ROWS, THREE, Row
from strategies.mixtures import find_mixtures

LEAST_EPS = 1e-5
"""Adam's epsilon is raised to this: a gradient that is zero but for rounding would otherwise be scaled up to a step of
full size in a random direction, on one device too."""


def make_trial(values: dict[str, Any], steps: int) -> Trial:
    """The trial that an experiment's configuration (as `to_dict` gives it) describes; called in every worker."""
    config = from_dict(values)
    seed_everything(config.train.seed)
    task = load_task(config.task, config.task_args)
    data = task.train_data()
    if is_stream(data):
        raise UserError("parity takes the same samples again and again: give data that is asked by number, no stream")
    order = order_of(data, config.train.seed)
    size = config.train.global_batch_size
    optimizer = replace(config.optimizer, eps=max(config.optimizer.eps, LEAST_EPS))

    def build() -> torch.nn.Module:
        seed_everything(config.train.seed)
        return build_model(task)

    def batch(step: int) -> Any:
        start = step * size
        return fetch(data, list(zip(order.indices(start, size).tolist(), range(start, start + size), strict=True)))

    return Trial(
        build=build,
        loss=task.loss,
        batch=batch,
        items=task.items,
        steps=steps,
        clip=config.train.clip_norm,
        blocks=task.blocks,
        tensor_plan=task.tensor_plan,
        context_plan=task.context_plan,
        heads=task.heads(),
        optimizer=lambda parameters: build_optimizer(optimizer, parameters),
    )


def measure(config: Config, *, steps: int, rows: Iterable[Row], checkpoints: bool) -> list[Result]:
    """Every row beside one device; with `checkpoints` also every ordered pair of rows.

    Precision, clipping, recomputation and what train.* and parallel.* say of how layouts behave are the experiment's,
    but for what is lossy by design (reduce_dtype) and what a row decides itself (schedule, stages).
    """
    least = 2 if checkpoints else 1
    if steps < least:
        raise UserError(f"--steps is {steps}: write at least {least}")
    task = load_task(config.task, config.task_args)
    own = replace(strategy_options(config), reduce_dtype="fp32", stages=None, float_output=task.float_output)
    return run(functools.partial(make_trial, to_dict(config), steps), rows, options=own, checkpoints=checkpoints)


def has_experts(config: Config) -> bool:
    """Whether the experiment's model is a mixture of experts."""
    with torch.device("meta"):
        return bool(find_mixtures(load_task(config.task, config.task_args).build_model()))


def chosen(names: str | None, workers: str | None, mixture: bool = False) -> list[Row]:
    """The matrix rows of these comma-separated names and numbers of workers; all by default. mixture: those of experts
    too.

    Raises:
        UserError: there is no such row.
    """
    wanted, counts = (set(filter(None, (text or "").split(","))) for text in (names, workers))
    experts = [row for row in (*MIXTURES, *ALL_FIVE) if mixture or row.name in wanted]
    rows = (*ROWS, *THREE, *experts, *((DEEPSPEED,) if find_spec("deepspeed") or DEEPSPEED.name in wanted else ()))
    known = {row.name for row in (*rows, *MIXTURES, *ALL_FIVE, DEEPSPEED)}
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
    checkpoints that a row continued, the one after which it was furthest off and all that differ. Then what strategies
    reported."""
    width = max((len(str(result.row)) for result in results), default=3)
    lines = [f"{'row':<{width}} {'variant':<32} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>6}"]
    lines += [_line(result, result.variant, width) for result in results if result.after is None]
    resumed = [result for result in results if result.after is not None]
    for row in dict.fromkeys(str(result.row) for result in resumed):
        pairs = [result for result in resumed if str(result.row) == row]
        worst = max(pairs, key=lambda r: float("inf") if r.found is None else r.found.loss / r.bound.loss)
        lines.append(_line(worst, f"after {len(pairs)} others, worst: {worst.after}", width))
        lines += [_line(r, f"after {r.after}", width) for r in pairs if not r.passed and r is not worst]
    said = dict.fromkeys((note, str(r.row)) for r in results if r.curve for note in r.curve.notes)
    return "\n".join([*lines, *(f"{note} ({row})" for note, row in said)])


def _line(result: Result, variant: str, width: int) -> str:
    start, found, bound = f"{result.row!s:<{width}} {variant:<32}", result.found, result.bound
    if found is None:
        return f"{start} {result.verdict}: {result.refused or result.error}"
    line = f"{start} {found.loss:8.1e} {found.norm:8.1e} {found.weights:8.1e} {result.seconds:6.1f}"
    allowed = f"(allowed {bound.loss:.0e} {bound.norm:.0e} {bound.weights:.0e})"
    return line if result.passed else f"{line}  {result.verdict} {allowed}"


def as_dicts(results: list[Result]) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [
        {
            "row": str(r.row),
            "workers": r.row.workers,
            "variant": r.variant,
            "after": str(r.after) if r.after else None,
            "verdict": r.verdict,
            "why": r.refused or r.error,
            "notes": list(r.curve.notes) if r.curve else [],
            "allowed": asdict(r.bound),
            "seconds": r.seconds,
            "difference": asdict(r.found) if r.found else None,
        }
        for r in results
    ]
