"""`step`: what one training step of ours costs beside the same strategy written by hand.

Both trainings live in the same two torchrun processes and take turns, block by block, in the order A B B A, so that
whatever else the machine does falls on both. Ours includes all that a real run does: the data thread, pulses, the
spool and the writer process that feeds MLflow. The figure is the ratio of the median step times, with a bootstrap
confidence interval over blocks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.abba import beside, in_turns
from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, torchrun
from experiments.benchmarks.plain import PROCESSES, WRAPS
from experiments.benchmarks.record import FOLDER, Ratio, keep

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
        arguments = (name, strategy, str(blocks), folder, str(out))
        torchrun("experiments.benchmarks.step", *arguments, processes=PROCESSES.get(strategy, 2))
        times = json.loads(out.read_text())
    sides = beside(times, "plain")
    plain, ours = sides["plain"], sides["ours"]
    measured = {"plain_ms": plain["ms"], "ours_ms": ours["ms"], "ratio": ours["ratio"], "interval": ours["interval"]}
    return {**measured, "blocks": blocks, "steps_per_block": BLOCK_STEPS[name]}


def worker(name: str, strategy: str, blocks: int, folder: str, out: str) -> None:
    """One of the processes: seconds per step of each block, plain and ours."""
    import torch.distributed as dist

    from app.config_io import load_config
    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    each = BLOCK_STEPS[name]
    steps = each * (blocks + 2)
    how = [f"strategy={strategy}", *DEGREES.get(strategy, []), f"train.steps={steps + 1}"]
    config = load_config([], [*OURS[name], *how, "run.name=ours", f"run.storage={folder}"])
    ours = Ours(config, tracked=True).build()
    plain = MODELS[name](steps, strategy)
    times = in_turns({"plain": plain.advance, "ours": ours.advance}, blocks, each)
    ours.close()
    if ours.rank == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(OURS)), help="Default: all.")
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(list(WRAPS)), help="Default: ddp.")
@click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--results", default=str(FOLDER), show_default=True, help="Folder that the ratios are kept in.")
def main(models: tuple[str, ...], strategies: tuple[str, ...], blocks: int, as_json: bool, results: str) -> None:
    """One step of ours beside one written by hand, in the same processes. (mnist is for ddp only.)"""
    found = run(list(models) or list(OURS), list(strategies) or ["ddp"], blocks)
    if not found:
        raise click.UsageError("mnist is for ddp only: write --strategy ddp, or --model gpt")
    keep(
        "step",
        {name: Ratio.of(r, blocks, at_most=1.0) for name, r in found.items()},
        Path(results),
    )
    click.echo(json.dumps(found) if as_json else shown(found))


def shown(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for name, r in found.items():
        low, high = r["interval"]
        figures = [f"{r['plain_ms']:.2f}", f"{r['ours_ms']:.2f}", f"{r['ratio']:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([name, *figures])
    return table(["step", "by hand, ms", "Trireme, ms", "ratio", "95 % interval"], rows)


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
