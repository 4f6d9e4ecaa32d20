"""`memory`: peak memory of a rank beside the same strategy written by hand, and beside the row's own cost function.

Each training runs in processes of its own. The figure is what a rank's resident memory peaks at during steps 3 to 6,
over what it was just before the training was built, with the allocator told to give freed memory back to the system
(otherwise one measures its history). The prediction is the planner's for this machine; the measured figures hold the
data set and the communication library's own buffers besides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, torchrun
from experiments.benchmarks.plain import PROCESSES, WRAPS

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SHAPE = {"d_model": 256, "n_layers": 8, "n_heads": 8}
BATCH, LENGTH, STEPS = 16, 128, 6


def run(strategies: list[str]) -> dict[str, dict[str, float]]:
    """MiB per rank, the largest of all ranks: by hand, ours, and what was predicted, by parts."""
    return {
        name: {"by hand": _measure("plain", name), "Trireme": _measure("ours", name), **_predict(name)}
        for name in strategies
    }


def _experiment(strategy: str, folder: str) -> list[str]:
    from experiments.benchmarks.step import DEGREES

    shape = ", ".join(f"{key}: {value}" for key, value in SHAPE.items())
    return [
        "task=language_modelling",
        f"task_args={{data: python, sequence_length: {LENGTH}, {shape}}}",
        f"train.global_batch_size={BATCH}",
        "optimizer.weight_decay=0.01",
        f"strategy={strategy}",
        *DEGREES.get(strategy, []),
        f"train.steps={STEPS + 1}",
        "run.name=ours",
        f"run.storage={folder}",
        "tracking.enabled=false",
    ]


def _predict(strategy: str) -> dict[str, float]:
    from app.config_io import load_config
    from app.planner.prediction import predict
    from app.run.prepare import prepare, read_task

    with tempfile.TemporaryDirectory() as folder:
        config = load_config([], _experiment(strategy, folder))
        task = read_task(config)
        prepared = prepare(config, task, PROCESSES.get(strategy, 2), devices_per_node=None)
        found = predict(config, task, prepared.layout)
    return {part: size / 2**20 for part, size in (("predicted", found.memory_bytes), *found.memory.items())}


def _measure(side: str, strategy: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        module, processes = "experiments.benchmarks.memory", PROCESSES.get(strategy, 2)
        torchrun(module, side, strategy, folder, processes=processes, environment=ENVIRONMENT)
        return max(json.loads(path.read_text()) for path in Path(folder).glob("peak-*")) / 2**20


def _status(key: str) -> int:
    """Bytes, of this process, as the kernel counts them: VmRSS now, VmHWM the most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this benchmark needs Linux")


def _ours(strategy: str, folder: str) -> Any:
    from app.config_io import load_config

    prepared = Ours(load_config([], _experiment(strategy, folder)))  # what is measured begins with build()
    return lambda: prepared.build().advance


def _plain(strategy: str) -> Any:
    from experiments.benchmarks.plain import language_model

    return lambda: language_model(STEPS, strategy, batch=BATCH, length=LENGTH, **SHAPE).advance


def worker(side: str, strategy: str, folder: str) -> None:
    """One rank: writes its peak, in bytes, to FOLDER/peak-RANK."""
    import gc

    import torch.distributed as dist

    dist.init_process_group("gloo")
    build = _ours(strategy, folder) if side == "ours" else _plain(strategy)
    gc.collect()
    before = _status("VmRSS")
    advance = build()
    for _ in range(2):
        advance()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    for _ in range(STEPS - 2):
        advance()
    Path(folder, f"peak-{dist.get_rank()}").write_text(json.dumps(_status("VmHWM") - before))
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that shuts down around them


@click.command()
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(list(WRAPS)), help="Default: all.")
@click.option("--json", "as_json", is_flag=True)
def main(strategies: tuple[str, ...], as_json: bool) -> None:
    """Peak memory of a rank: by hand, ours, and what the strategy's cost function says."""
    found = run(list(strategies) or list(WRAPS))
    if as_json:
        click.echo(json.dumps(found))
        return
    heads = ["peak per rank, MiB", *next(iter(found.values()))]
    click.echo(table(heads, [[name, *(f"{value:.0f}" for value in row.values())] for name, row in found.items()]))


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], sys.argv[3])
    else:
        main()
