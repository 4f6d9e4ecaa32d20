"""`tracking`: what logging every step costs, beside logging none.

Two trainings of ours live in the same two torchrun processes and take turns, block by block, in the order A B B A: one
logs every step (loss, rate, gradient norm, learning rate to the spool, from which the writer process feeds MLflow), the
other none. The gradient norm itself is computed by both (train.clip_norm), because clipping needs it, not tracking.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, in_turns, torchrun
from experiments.benchmarks.step import BLOCK_STEPS, OURS, interval

EVERY = {"every step": 1, "none": 10**9}


def run(model: str, blocks: int) -> dict[str, Any]:
    """Median milliseconds per step with and without, and the ratio with a 95 % interval."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        torchrun("experiments.benchmarks.tracking", model, str(blocks), folder, str(out))
        times = json.loads(out.read_text())
    medians = {name: statistics.median(own) for name, own in times.items()}
    low, high = interval(times["none"], times["every step"])
    return {
        "every_step_ms": 1e3 * medians["every step"],
        "none_ms": 1e3 * medians["none"],
        "ratio": medians["every step"] / medians["none"],
        "interval": [low, high],
    }


def worker(model: str, blocks: int, folder: str, out: str) -> None:
    """One of the two processes."""
    import torch.distributed as dist

    from app.config_file import load_config

    dist.init_process_group("gloo")
    each = BLOCK_STEPS[model]
    trainings: dict[str, Ours] = {}
    for number, (name, every) in enumerate(EVERY.items()):
        how = ["strategy=ddp", f"train.steps={each * (blocks + 2)}", f"train.log_every={every}", "train.clip_norm=1e9"]
        config = load_config([], [*OURS[model], *how, f"run.name=run-{number}", f"run.storage={folder}"])
        trainings[name] = Ours(config, tracked=True).build()
    times = in_turns({name: training.advance for name, training in trainings.items()}, blocks, each)
    for training in trainings.values():
        training.close()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--model", default="gpt", show_default=True, type=click.Choice(list(OURS)))
@click.option("--blocks", default=40, show_default=True, help="Blocks of steps per side.")
@click.option("--json", "as_json", is_flag=True)
def main(model: str, blocks: int, as_json: bool) -> None:
    """A step that is logged beside one that is not; asked: at most 1 % more."""
    found = run(model, blocks)
    if as_json:
        click.echo(json.dumps(found))
        return
    low, high = found["interval"]
    heads = [model, "every step logged, ms", "none, ms", "ratio", "95 % interval"]
    figures = [f"{found['every_step_ms']:.2f}", f"{found['none_ms']:.2f}", f"{found['ratio']:.3f}"]
    click.echo(table(heads, [["step", *figures, f"{low:.3f} to {high:.3f}"]]))


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main()
