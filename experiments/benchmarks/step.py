"""`step`: one training step of ours beside the same strategy written by hand (plain.py).

A pipeline is compared with torch's. Both trainings run in the same processes and process group, on
CPUs, and take turns (harness.py). Ours is the loop as a worker runs it, with its data thread and
the agreement between ranks.
"""

import os
import tempfile
from typing import Any

import click

from experiments.benchmarks.harness import (
    Comparison,
    Times,
    compare_times,
    measure_in_turns,
    ratio_row,
    show,
)

BY_HAND = "by hand"
OURS = "Trireme"
BLOCK_STEPS = {"mnist": 40, "gpt": 10, "mixture": 10}
"""Steps in a block."""
WARM_UP_BLOCKS = 2
LAYERS = 4
"""Layers of the language models."""
BATCH = 16
"""The global batch size of the language models."""
_LANGUAGE_MODEL = [
    "task=language_modelling",
    "task_args={data: python, sequence_length: 128, d_model: 128, n_layers: 4, n_heads: 4}",
    "train.global_batch_size=16",
    "optimizer.weight_decay=0.01",
    "schedule.name=cosine",
]
EXPERIMENTS = {
    "mnist": [
        "task=image_classification",
        "train.global_batch_size=64",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.01",
        "schedule.name=cosine",
    ],
    "gpt": _LANGUAGE_MODEL,
    "mixture": [*_LANGUAGE_MODEL, "task_args.mixture={n_experts: 8, top_k: 2}"],
}
"""The experiments of plain.py's models."""
TIMEOUT = 3600.0
NEVER_SAVED = ["checkpoint.every_seconds=null", "checkpoint.every_steps=null"]


def run(
    model: str,
    strategy: str,
    *,
    blocks: int,
    keys: tuple[str, ...] = (),
) -> dict[str, Comparison]:
    """Measures a step of both sides.

    Args:
        model: A key of `EXPERIMENTS`.
        strategy: A strategy or a pipeline's schedule that plain.py has.
        blocks: The number of blocks of each side.
        keys: key=value of the experiment, which change ours alone.
    """
    from app.planner.processes import in_processes

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    workers, _ = _layout(strategy)
    times = in_processes(_worker, workers, model, strategy, blocks, keys, timeout=TIMEOUT)
    return compare_times(times, BY_HAND)


def _layout(strategy: str) -> tuple[int, list[str]]:
    """The number of workers and the experiment's keys for a strategy.

    A strategy is as in the smallest row of the parity matrix. A schedule has stages as large as
    those of torch's.
    """
    from experiments.benchmarks.plain import MICRO_BATCHES, SCHEDULES
    from experiments.parity.rows import MIXTURES, ROWS, SINGLE

    if strategy in SCHEDULES:
        _, chunks = SCHEDULES[strategy]
        parts = 2 * chunks
        keys = [
            "strategy=pipeline",
            "parallel.pp=2",
            f"parallel.schedule={strategy}",
            f"parallel.chunks={chunks}",
            f"parallel.stages={[LAYERS // parts] * parts}",
            f"train.micro_batch_size={BATCH // MICRO_BATCHES}",
        ]
        return 2, keys
    name, _, workers = strategy.partition(" ")
    for row in (SINGLE, *ROWS, *MIXTURES):
        has_all_experts_apart = row.degrees.get("ep", row.workers) == row.workers
        has_workers = str(row.workers).endswith(workers)  # "" if the strategy does not say it
        if row.name == name and has_workers and has_all_experts_apart:
            break
    else:
        raise ValueError(f"the parity matrix has no row {strategy!r}")
    degrees: dict[str, Any] = dict(row.degrees)
    if name == "context":
        degrees["context"] = "ulysses"  # the method that is written by hand
    keys = [f"parallel.{key}={value}" for key, value in degrees.items()]
    return row.workers, [f"strategy={name}", *keys]


def _worker(
    rank: int,
    device: Any,
    model: str,
    strategy: str,
    blocks: int,
    keys: tuple[str, ...],
) -> Times:
    """Seconds per step of both sides, in one of the processes."""
    import torch.distributed as dist

    from app.config.io import load_config
    from app.run.prepare import prepare, read_task
    from app.training.job import Job, Place, SilentChannel
    from app.training.loop import Training
    from experiments.benchmarks.plain import MODELS

    steps_per_block = BLOCK_STEPS[model]
    world_size = dist.get_world_size()
    steps = steps_per_block * (blocks + WARM_UP_BLOCKS)
    _, layout_keys = _layout(strategy)
    with tempfile.TemporaryDirectory() as folder:
        run_keys = [f"train.steps={steps}", f"run.storage={folder}", "run.name=ours"]
        config = load_config(
            [], [*EXPERIMENTS[model], *layout_keys, *run_keys, *NEVER_SAVED, *keys]
        )
        prepared = prepare(config, read_task(config), world_size, devices_per_node=None)
        job = Job(
            config=prepared.config,
            layout=prepared.layout,
            folder=f"{folder}/ours",
            attempt="ours",
            run_uid="ours",
            steps=steps,
            cwd=os.getcwd(),
        )
        place = Place(rank=rank, world_size=world_size, local_rank=rank, device=device)
        training = Training(job, place, SilentChannel())
        batches: Any = training.batches()
        plain = MODELS[model](steps, strategy)
        times = measure_in_turns(
            {BY_HAND: plain.advance, OURS: lambda: training.advance(batches)},
            blocks=blocks,
            steps_per_block=steps_per_block,
            synchronize=dist.barrier,
        )
        batches.close()
    return times


def _is_written_by_hand(model: str, strategy: str) -> bool:
    """Whether plain.py trains a model under a strategy."""
    if model == "mixture":
        return "expert" in strategy
    if "expert" in strategy:
        return False
    return model != "mnist" or strategy == "ddp"


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(list(EXPERIMENTS)),
    help="Default: all.",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    default=("ddp",),
    show_default=True,
    metavar="NAME|SCHEDULE",
)
@click.option(
    "--blocks",
    default=40,
    type=click.IntRange(1),
    show_default=True,
    help="Blocks of steps per side.",
)
@click.option("--json", "as_json", is_flag=True)
@click.argument("keys", nargs=-1)
def main(
    models: tuple[str, ...],
    strategies: tuple[str, ...],
    blocks: int,
    as_json: bool,
    keys: tuple[str, ...],
) -> None:
    """One step of ours beside one written by hand, in the same processes. (mnist is for ddp only.)

    KEYS: of an experiment, such as parallel.bucket_mb=5; they change ours alone.
    """
    from experiments.benchmarks.plain import SCHEDULES, WRAPS

    unknown = set(strategies) - WRAPS.keys() - SCHEDULES.keys()
    if unknown:
        choice = ", ".join([*WRAPS, *SCHEDULES])
        problem = f"{min(unknown)} is not written by hand here"
        raise click.UsageError(f"{problem}: write one of {choice}")
    comparisons = {}
    for model in models or EXPERIMENTS:
        for strategy in strategies:
            if _is_written_by_hand(model, strategy):
                result = run(model, strategy, blocks=blocks, keys=keys)
                comparisons[f"{model}, {strategy}"] = result
    if not comparisons:
        problem = "mnist is for ddp only, a mixture for ddp+expert"
        raise click.UsageError(f"{problem}: write --strategy ddp, or --model gpt")
    rows = [
        ratio_row(name, comparison, base=BY_HAND, side=OURS)
        for name, comparison in comparisons.items()
    ]
    show("step", comparisons, rows, as_json=as_json)
