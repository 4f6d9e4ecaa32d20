"""`step`: one training step of ours beside the same strategy written by hand (plain.py); a pipeline beside torch's.

Both trainings live in the same processes and process group, on CPUs, and take turns (harness.py). Ours is the loop as a
worker runs it, its data thread and the agreement between ranks included.
"""

import os
import tempfile
from typing import Any

import click

from experiments.benchmarks.harness import Times, beside, measured, ratio_row, show

BLOCK_STEPS = {"mnist": 40, "gpt": 10, "mixture": 10}
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
}
OURS["mixture"] = [*OURS["gpt"], "task_args.mixture={n_experts: 8, top_k: 2}"]
"""The experiments of plain.py's models."""
TIMEOUT = 3600.0
NEVER_SAVED = ["checkpoint.every_seconds=null", "checkpoint.every_steps=null"]


def run(model: str, strategy: str, blocks: int, keys: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Milliseconds of "by hand" and "Trireme", and the ratio with a 95 % interval."""
    from app.planner.processes import in_processes

    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    times = in_processes(_worker, _keys(strategy)[0], model, strategy, blocks, keys, timeout=TIMEOUT)
    return beside(times, "by hand")


def _keys(strategy: str) -> tuple[int, list[str]]:
    """Workers, and the keys of the experiment: of a strategy as in the parity matrix's smallest row, of a schedule of
    torch's with stages as large."""
    from experiments.benchmarks.plain import MICRO_BATCHES, SCHEDULES
    from experiments.parity.rows import MIXTURES, ROWS, SINGLE

    if strategy in SCHEDULES:
        chunks = SCHEDULES[strategy][1]
        stages = [4 // (2 * chunks)] * (2 * chunks)
        words = ["strategy=pipeline", "parallel.pp=2", f"parallel.schedule={strategy}", f"parallel.chunks={chunks}"]
        return 2, [*words, f"parallel.stages={stages}", f"train.micro_batch_size={16 // MICRO_BATCHES}"]
    name, _, workers = strategy.partition(" ")
    row = next(
        row
        for row in (SINGLE, *ROWS, *MIXTURES)
        if row.name == name and str(row.workers).endswith(workers) and row.degrees.get("ep", row.workers) == row.workers
    )
    keys = row.degrees | ({"context": "ulysses"} if name == "context" else {})  # what is written by hand
    return row.workers, [f"strategy={name}", *(f"parallel.{key}={value}" for key, value in keys.items())]


def _worker(rank: int, device: Any, model: str, strategy: str, blocks: int, keys: tuple[str, ...]) -> Times:
    """Seconds per step of both sides, in one of the processes."""
    import torch.distributed as dist

    from app.config.io import load_config
    from app.run.prepare import prepare, read_task
    from app.training.job import Job, Place, SilentChannel
    from app.training.loop import Training
    from experiments.benchmarks.plain import MODELS

    each, world = BLOCK_STEPS[model], dist.get_world_size()
    steps = each * (blocks + 2)
    with tempfile.TemporaryDirectory() as folder:
        words = [*OURS[model], *_keys(strategy)[1], f"train.steps={steps}", f"run.storage={folder}", "run.name=ours"]
        config = load_config([], [*words, *NEVER_SAVED, *keys])
        prepared = prepare(config, read_task(config), world, devices_per_node=None)
        job = Job(
            config=prepared.config,
            layout=prepared.layout,
            folder=f"{folder}/ours",
            attempt="ours",
            run_uid="ours",
            steps=steps,
            cwd=os.getcwd(),
        )
        place = Place(rank=rank, world_size=world, local_rank=rank, device=device)
        ours = Training(job, place, SilentChannel())
        batches: Any = ours.batches()
        plain = MODELS[model](steps, strategy)
        sides = {"by hand": plain.advance, "Trireme": lambda: ours.advance(batches)}
        times = measured(sides, blocks, each, dist.barrier)
        batches.close()
    return times


def _goes(model: str, strategy: str) -> bool:
    return (model == "mixture") is ("expert" in strategy) and (model != "mnist" or strategy == "ddp")


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(OURS)), help="Default: all.")
@click.option("--strategy", "strategies", multiple=True, default=("ddp",), show_default=True, metavar="NAME|SCHEDULE")
@click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("keys", nargs=-1)
def main(
    models: tuple[str, ...], strategies: tuple[str, ...], blocks: int, as_json: bool, keys: tuple[str, ...]
) -> None:
    """One step of ours beside one written by hand, in the same processes. (mnist is for ddp only.)

    KEYS: of an experiment, such as parallel.bucket_mb=5; they change ours alone.
    """
    from experiments.benchmarks.plain import SCHEDULES, WRAPS

    if unknown := set(strategies) - WRAPS.keys() - SCHEDULES.keys():
        choice = ", ".join([*WRAPS, *SCHEDULES])
        raise click.UsageError(f"{min(unknown)} is not written by hand here: write one of {choice}")
    pairs = [(m, s) for m in models or OURS for s in strategies if _goes(m, s)]
    if not pairs:
        raise click.UsageError("mnist is for ddp only, a mixture for ddp+expert: write --strategy ddp, or --model gpt")
    found = {f"{model}, {strategy}": run(model, strategy, blocks, keys) for model, strategy in pairs}
    show("step", found, [ratio_row(name, one, "by hand", "Trireme") for name, one in found.items()], as_json)
