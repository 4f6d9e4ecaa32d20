"""`overhead`: whole runs that differ in one thing (tracking, saving, an accelerator), and what it costs or brings.

`trireme train` under torchrun with two workers, with it and without, in turns A B B A. A run's time is that of its
training, so what the thing does in the background on the same cores is counted: the process that writes to MLflow, and
the thread that writes checkpoints.
"""

from __future__ import annotations

import os

import click

from experiments.benchmarks.harness import TORCHRUN, beside, ratio_row, show, trained, tree_without
from experiments.benchmarks.step import NEVER_SAVED, OURS

STEPS = {"mnist": 2000, "gpt": 150}
QUIET = ["launcher=torchrun", "train.eval_every=null", "train.clip_norm=1e9", *NEVER_SAVED]
"""Clipping on both sides, since it computes the gradient's norm, which `tracking` logs."""


THINGS: dict[str, tuple[str, list[str], str]] = {
    "tracking": ("ddp", ["train.log_every=1"], ""),
    "saving": ("ddp", ["checkpoint.every_steps=50"], ""),
    "shared_memory": ("ddp", [], "strategies/cpu_collectives/shared_memory.py"),
    "reduce_scatter": ("fsdp", [], "strategies/cpu_collectives/reduce_scatter.py"),
    "allocator": ("ddp", [], "strategies/cpu_collectives/allocator.py"),
}
"""The strategy, the keys of the side with the thing, and the file that the side without runs without."""


def run(thing: str, model: str, runs: int, steps: int) -> dict[str, dict[str, object]]:
    """Milliseconds a step "without" and "with", and the ratio with a 95 % interval."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    strategy, added, removed = THINGS[thing]
    words = [*OURS[model], *QUIET, f"strategy={strategy}", "train.log_every=1000000", f"train.steps={steps}"]
    with tree_without(*filter(None, [removed])) as copy:
        for number in range(-1, runs):  # the first warms the file cache
            for side in list(times) if number % 2 else list(reversed(times)):
                own = added if side == "with" else []
                ended = trained([*TORCHRUN, "app"], [*words, *own], os.getcwd() if side == "with" else copy)
                if number >= 0:
                    times[side].append(ended["seconds"] / steps)
    return beside(times, "without")


@click.command()
@click.option("--of", "things", multiple=True, default=list(THINGS), type=click.Choice(list(THINGS)))
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(OURS)))
@click.option("--runs", default=8, type=click.IntRange(1), show_default=True, help="Of each side.")
@click.option("--steps", type=click.IntRange(1), help="Of a run; default: about a quarter of a minute.")
@click.option("--json", "as_json", is_flag=True)
def main(things: tuple[str, ...], model: str, runs: int, steps: int | None, as_json: bool) -> None:
    """Whole runs with a thing and without, in turns."""
    found = {thing: run(thing, model, runs, steps or STEPS[model]) for thing in things}
    rows = [ratio_row(f"{model}, {thing}", one, "without", "with") for thing, one in found.items()]
    show("overhead", found, rows, as_json)
