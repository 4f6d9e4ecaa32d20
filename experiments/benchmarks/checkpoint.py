"""What a checkpoint costs training: our save beside torch's synchronous and asynchronous ones.

    python experiments/benchmarks/checkpoint.py [--megabytes 100] [--ranks 1 2] [--rounds 9] [--folder DIR]

The state is a model with Adam's two moments, replicated on all ranks (so each writes its share). In every round
each way of saving is measured once, in turn, with files of its own that are removed afterwards; the first round
warms up and does not count. Medians over the rounds of the slowest rank's time:

stall   seconds that the call holds training up
total   seconds until the checkpoint is on disk (ours: hashed and committed too)
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

from app.checkpoint import Checkpointer

TENSORS = 50
Saves = dict[str, Callable[[dict[str, Any], str], tuple[float, float]]]


def state_of(megabytes: float) -> dict[str, Any]:
    """A model of TENSORS tensors and two moments of each, `megabytes` (10^6 bytes) in all."""
    size = int(megabytes * 1e6 / 4 / 3 / TENSORS)
    names = [f"blocks.{i}.w" for i in range(TENSORS)]
    moments = {name: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size)} for name in names}
    return {"model": {name: torch.randn(size) for name in names}, "optimizer": {"state": moments}}


def saves(folder: str, group: dist.ProcessGroup | None) -> Saves:
    """The ways of saving; each returns (stall, total) in seconds."""
    ours = Checkpointer(os.path.join(folder, "ours"), keep_last=1)
    alone = group is None
    steps = iter(range(10**9))

    def trireme(state: dict[str, Any], _: str) -> tuple[float, float]:
        ours.save(state, meta={"step": next(steps)})
        ours.wait()
        return ours.last_stall_seconds, ours.last_total_seconds

    def synchronous(state: dict[str, Any], path: str) -> tuple[float, float]:
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=path, process_group=group, no_dist=alone)
        return (time.perf_counter() - began,) * 2

    def asynchronous(state: dict[str, Any], path: str) -> tuple[float, float]:
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=path, process_group=group, no_dist=alone)
        stall = time.perf_counter() - began
        future.result()
        return stall, time.perf_counter() - began

    return {"dcp.save": synchronous, "dcp.async_save": asynchronous, "trireme": trireme}


def measure(rank: int, ranks: int, port: int, megabytes: float, rounds: int, folder: str, out: str) -> None:
    """On one rank: all rounds; rank 0 writes the medians to `out`."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = None
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        group = dist.new_group(backend="gloo")
    state, ways = state_of(megabytes), saves(folder, group)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, save in ways.items():
            path = os.path.join(folder, f"{number}-{name}")
            if group:
                dist.barrier(group=group)  # as a training step's collectives would
            took = torch.tensor(save(state, path))
            if group:
                dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
            if number:
                times[name].append((took[0].item(), took[1].item()))
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    if rank == 0:
        medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()}
        with open(out, "w") as file:
            json.dump(medians, file)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the state")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"{'ranks':>5}  {'way':<16}{'stall ms':>10}{'total ms':>10}{'stall / dcp.save':>18}")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            out = os.path.join(folder, "medians.json")
            port = 20000 + os.getpid() % 20000
            work = (ranks, port, arguments.megabytes, arguments.rounds, folder, out)
            torch.multiprocessing.spawn(measure, args=work, nprocs=ranks)
            with open(out) as file:
                medians = json.load(file)
        for name, (stall, total) in medians.items():
            ratio = stall / medians["dcp.save"][0]
            print(f"{ranks:>5}  {name:<16}{1e3 * stall:>10.1f}{1e3 * total:>10.1f}{ratio:>18.3f}")


if __name__ == "__main__":
    main()
