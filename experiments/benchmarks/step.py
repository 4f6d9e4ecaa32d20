"""`step`: what one training step of ours costs beside the same strategy written by hand.

Both trainings live in the same two torchrun processes and take turns, block by block, in the order A B B A, so that
whatever else the machine does falls on both. Ours includes all that a real run does: the data thread, pulses, the
spool and the writer process that feeds MLflow. The figure is the ratio of the median step times, with a bootstrap
confidence interval over blocks.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import machine
from experiments.benchmarks.plain import PROCESSES, WRAPS

BLOCK_STEPS = {"mnist": 40, "gpt": 10, "gpt-10m": 2}
OURS = {
    "mnist": [
        "task=image_classification",
        "train.global_batch_size=64",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.01",
        "schedule.name=cosine",
    ],
    "gpt": [
        "task=language_modelling",
        "task_args={data: python, sequence_length: 128, d_model: 128, n_layers: 4, n_heads: 4}",
        "train.global_batch_size=16",
        "optimizer.weight_decay=0.01",
        "schedule.name=cosine",
    ],
    "gpt-10m": [
        "task=language_modelling",
        "task_args={data: python, sequence_length: 128, d_model: 384, n_layers: 6, n_heads: 6}",
        "train.global_batch_size=8",
        "optimizer.weight_decay=0.01",
        "schedule.name=cosine",
    ],
}


DEGREES = {"hsdp": ["parallel.dp_shard=2"], "fsdp+tensor": ["parallel.tp=2"]}


def run(models: list[str], strategies: list[str], blocks: int) -> dict[str, Any]:
    """Runs the benchmark in processes of its own; per model and strategy the median step times and their ratio."""
    pairs = [(name, strategy) for name in models for strategy in strategies if name != "mnist" or strategy == "ddp"]
    return {f"{name}, {strategy}": _measure(name, strategy, blocks) for name, strategy in pairs}


def _measure(name: str, strategy: str, blocks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        processes = PROCESSES.get(strategy, 2)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "experiments.benchmarks.step", name, strategy, str(blocks), folder, str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        times = json.loads(out.read_text())
    plain, ours = times["plain"], times["ours"]
    low, high = interval(plain, ours)
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        "ours_ms": 1e3 * statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(plain),
        "interval": [low, high],
        "blocks": len(plain),
        "steps_per_block": BLOCK_STEPS[name],
    }


def interval(a: list[float], b: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of median(b) / median(a), pairs drawn together."""
    draw = random.Random(0)
    pairs = list(zip(a, b, strict=True))
    ratios = []
    for _ in range(draws):
        picked = [draw.choice(pairs) for _ in pairs]
        ratios.append(statistics.median(y for _, y in picked) / statistics.median(x for x, _ in picked))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def worker(name: str, strategy: str, blocks: int, folder: str, out: str) -> None:
    """One of the two processes: seconds per step of each block, plain and ours."""
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
    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    rank, world, each = dist.get_rank(), dist.get_world_size(), BLOCK_STEPS[name]
    steps = each * (blocks + 2)
    how = [f"strategy={strategy}", *DEGREES.get(strategy, []), f"train.steps={steps + 1}"]
    config = load_config([], [*OURS[name], *how, "run.name=ours", f"run.storage={folder}"])
    prepared = prepare(config, read_task(config), world, devices_per_node=None)
    channel: Any = Silence()
    if rank == 0:
        channel = Driver(Run(config), Console(quiet=True), resolve_tracking(config.tracking, folder))
        channel.run.open()
        channel.begin_tracking()
    job = Job(config, prepared.layout, f"{folder}/ours", "benchmark", "benchmark", prepared.steps, os.getcwd())
    ours = Training(job, Place(rank, world, rank, torch.device("cpu")), channel)
    batches = ours.batches()
    plain = MODELS[name](steps, strategy)

    def block(advance: Any) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(each):
            advance()
        return (time.perf_counter() - begun) / each

    advances = {"plain": plain.advance, "ours": lambda: ours.advance(batches)}
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(-1, blocks):  # the first pair warms up
        for which in ("plain", "ours") if number % 2 else ("ours", "plain"):
            seconds = block(advances[which])
            if number >= 0:
                times[which].append(seconds)
    batches.close()  # type: ignore[attr-defined]
    if rank == 0:
        channel.tracker.finish("FINISHED", timeout=20.0)
        channel.run.end("stopped")
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(OURS)), help="Default: all.")
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(list(WRAPS)), help="Default: ddp.")
@click.option("--blocks", default=40, show_default=True, help="Blocks of steps per side.")
@click.option("--json", "as_json", is_flag=True)
def main(models: tuple[str, ...], strategies: tuple[str, ...], blocks: int, as_json: bool) -> None:
    """One step of ours beside one written by hand, in the same processes. (mnist is for ddp only.)"""
    found = run(list(models) or list(OURS), list(strategies) or ["ddp"], blocks)
    click.echo(json.dumps(found) if as_json else f"{machine()}\n\n{table(found)}")


def table(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| step | by hand, ms | Trireme, ms | ratio | 95 % interval |", "|---|---|---|---|---|"]
    for name, r in found.items():
        low, high = r["interval"]
        figures = f"{r['plain_ms']:.2f} | {r['ours_ms']:.2f} | {r['ratio']:.3f} | {low:.3f} to {high:.3f}"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
