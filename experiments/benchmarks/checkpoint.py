"""`checkpoint`: how long a save holds training up, ours beside torch's synchronous and asynchronous ones.

The state is a model with Adam's two moments, replicated on both ranks (so each writes its share). In every round each
way of saving is measured once, in turn, with files of its own that are removed afterwards. Medians over the rounds of
the slowest rank's time:

stall   seconds that the call holds training up
total   seconds until the checkpoint is on disk (ours: hashed and committed too)
"""

from __future__ import annotations

import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from experiments.benchmarks.harness import answer, show, torchrun

TENSORS = 50


def _worker(megabytes: float, rounds: int, folder: str) -> NoReturn:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from app.checkpoint import Checkpointer

    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    group: Any = dist.new_group(backend="gloo")
    state, ours = _state(megabytes), Checkpointer(f"{folder}/ours", keep_last=1)

    def trireme(number: int) -> tuple[float, float]:
        ours.save(state, meta={"step": number})
        ours.wait()
        return ours.last_stall_seconds, ours.last_total_seconds

    def synchronous(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=f"{folder}/torch", process_group=group)
        return (time.perf_counter() - began,) * 2

    def asynchronous(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=f"{folder}/torch", process_group=group)
        stall = time.perf_counter() - began
        future.result()
        return stall, time.perf_counter() - began

    times: dict[str, list[list[float]]] = {}
    for number in range(rounds + 1):  # the first warms up
        for name, save in (("dcp.save", synchronous), ("dcp.async_save", asynchronous), ("trireme", trireme)):
            dist.barrier(group=group)  # as a training step's collectives would
            took = torch.tensor(save(number))
            dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
            if number:
                times.setdefault(name, []).append(took.tolist())
            if dist.get_rank() == 0:
                shutil.rmtree(Path(folder, "torch"), ignore_errors=True)
    answer({name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()})


def _state(megabytes: float) -> dict[str, Any]:
    """A model of TENSORS tensors and two moments of each, `megabytes` (10^6 bytes) in all."""
    import torch

    size = int(megabytes * 1e6 / 4 / 3 / TENSORS)
    names = [f"blocks.{i}.w" for i in range(TENSORS)]
    moments = {name: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size)} for name in names}
    return {"model": {name: torch.randn(size) for name in names}, "optimizer": {"state": moments}}


@click.command()
@click.option("--megabytes", default=100.0, show_default=True, help="Of the state.")
@click.option("--rounds", default=9, type=click.IntRange(1), show_default=True)
@click.option("--ranks", default=2, type=click.IntRange(1), show_default=True)
@click.option("--folder", help="Where to write; default: a temporary folder.")
@click.option("--json", "as_json", is_flag=True)
def main(megabytes: float, rounds: int, ranks: int, folder: str | None, as_json: bool) -> None:
    """What a save costs training, beside torch.distributed.checkpoint's."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = torchrun("experiments.benchmarks.checkpoint", megabytes, rounds, place, processes=ranks)
    rows = [
        {"": name, "stall, ms": f"{1e3 * stall:.1f}", "total, ms": f"{1e3 * total:.1f}"}
        | {"stall / dcp.save": f"{stall / found['dcp.save'][0]:.3f}"}
        for name, (stall, total) in found.items()
    ]
    show("checkpoint", found, rows, as_json)


if __name__ == "__main__":
    _worker(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
