"""`tracking`: what logging every step costs, beside logging none.

Two trainings of ours live in the same two torchrun processes and take turns, block by block, in the order A B B A: one
logs every step (loss, rate, gradient norm, learning rate to the spool, from which the writer process feeds MLflow), the
other none. The gradient norm itself is computed by both (train.clip_norm), because clipping needs it, not tracking.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import machine
from experiments.benchmarks.step import BLOCK_STEPS, OURS, interval

EVERY = {"every step": 1, "none": 10**9}


def run(model: str, blocks: int) -> dict[str, Any]:
    """Median milliseconds per step with and without, and the ratio with a 95 % interval."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "experiments.benchmarks.tracking", model, str(blocks), folder, str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
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
    import torch
    import torch.distributed as dist

    from app.config_file import load_config
    from app.console import Console
    from app.driver import Driver
    from app.job import Job, Place
    from app.launchers.torchrun import Silence
    from app.prepare import prepare, read_task
    from app.run import Run
    from app.tracking.settings import resolve_tracking
    from app.worker import Training

    dist.init_process_group("gloo")
    rank, world, each = dist.get_rank(), dist.get_world_size(), BLOCK_STEPS[model]
    steps = each * (blocks + 2)
    trainings, channels = {}, []
    for number, (name, every) in enumerate(EVERY.items()):
        how = ["strategy=ddp", f"train.steps={steps}", f"train.log_every={every}", "train.clip_norm=1e9"]
        config = load_config([], [*OURS[model], *how, f"run.name=run-{number}", f"run.storage={folder}"])
        prepared = prepare(config, read_task(config), world, devices_per_node=None)
        channel: Any = Silence()
        if rank == 0:
            channel = Driver(Run(config), Console(quiet=True), resolve_tracking(config.tracking, folder))
            channel.run.open()
            channel.begin_tracking()
            channels.append(channel)
        job = Job(
            config, prepared.layout, f"{folder}/run-{number}", "benchmark", "benchmark", prepared.steps, os.getcwd()
        )
        training = Training(job, Place(rank, world, rank, torch.device("cpu")), channel)
        trainings[name] = (training, training.batches())
    times: dict[str, list[float]] = {name: [] for name in EVERY}
    for number in range(-1, blocks):  # the first pair warms up
        for name in list(EVERY) if number % 2 else list(reversed(EVERY)):
            training, batches = trainings[name]
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(each):
                training.advance(batches)
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / each)
    for _, batches in trainings.values():
        batches.close()  # type: ignore[attr-defined]
    for channel in channels:
        channel.tracker.finish("FINISHED", timeout=20.0)
        channel.run.end("stopped")
    if rank == 0:
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
    click.echo(f"{machine()}\n\n| {model} | every step logged, ms | none, ms | ratio | 95 % interval |")
    click.echo("|---|---|---|---|---|")
    figures = f"{found['every_step_ms']:.2f} | {found['none_ms']:.2f} | {found['ratio']:.3f}"
    click.echo(f"| step | {figures} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main()
