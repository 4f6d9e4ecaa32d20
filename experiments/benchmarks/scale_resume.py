"""`scale-resume`: a checkpoint saved and read by real gloo ranks: what each tells and holds.

Every rank has a row of each of many small tensors, as fully sharded data parallelism has, so that
DCP's table is larger than the numbers; with --replicas, so many ranks have the same rows. The ranks
are forked from this process after its imports, and share its memory: what is counted is what a rank
has for itself. A save after the first one is put beside what DCP's own planner takes for it, with
its cache of plans and without.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from app import checkpoint
from app.checkpoint.ranks import Ranks
from experiments.benchmarks.harness import show

ROW_NUMBERS = 4
"""Numbers in a rank's row of a tensor."""
SAVES = 3
Answer = dict[str, float]
"""What a rank has found, by what it is."""
COLUMNS = ("cpu_seconds", "told_bytes", "private_bytes", "peak_bytes")


class ExchangedBytes:
    """Counts the bytes that this rank tells others, and is told, as objects.

    Attributes:
        count: The bytes so far.
    """

    FUNCTIONS = (
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "send_object_list",
        "recv_object_list",
    )

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts while the block runs, in every thread."""
        with ExitStack() as patches:
            for name in self.FUNCTIONS:
                counted = partial(self._call, getattr(dist, name))
                patches.enter_context(mock.patch.object(dist, name, counted))
            yield

    def _call(self, function: Callable[..., object], first: Any, *args: Any, **options: Any) -> Any:
        result = function(first, *args, **options)
        # The object that is gathered, or the list that is sent or was filled.
        self.count += len(pickle.dumps(first))
        return result


def state_of(mesh: DeviceMesh, tensors: int, value: float) -> dict[str, Any]:
    """A state in which each rank has a row of each tensor."""
    shards = mesh.size(1)
    model: dict[str, DTensor] = {}
    for number in range(tensors):
        row = torch.full((1, ROW_NUMBERS), value + number)
        model[f"blocks.{number}.weight"] = DTensor.from_local(
            row,
            mesh,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=torch.Size((shards, ROW_NUMBERS)),
            stride=(ROW_NUMBERS, 1),
        )
    return {"model": model, "step": 1}


def private_bytes() -> int:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    amounts = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(amounts)


def measured(work: Callable[[], object]) -> Answer:
    """What a call costs this rank."""
    exchanged = ExchangedBytes()
    private = private_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_cpu = time.process_time()
    with exchanged.counting():
        work()
    return {
        "cpu_seconds": time.process_time() - start_cpu,
        "told_bytes": exchanged.count,
        "private_bytes": private_bytes() - private,
        "peak_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak),
    }


def plan_as_dcp(state: dict[str, Any], *, caches: bool, ranks: Ranks) -> None:
    """Plans a save as `torch.distributed.checkpoint.save` does."""
    planner = DefaultSavePlanner(enable_plan_caching=caches)
    planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
    plan = ranks.run_and_divide(
        planner.create_local_plan, lambda plans: planner.create_global_plan(plans)[0]
    )
    planner.finish_plan(plan)


def run_rank(rank: int, ranks: int, replicas: int, tensors: int, folder: str, answers: Any) -> None:
    """Saves, reads and compares, and answers with what each took."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas))
    by_work: dict[str, Answer] = {}
    saver = checkpoint.Checkpointer(f"{folder}/checkpoints", keep_last=1, attempt="1")
    state = state_of(mesh, tensors, 1.0)

    def save(step: int) -> None:
        saver.save(state, meta={"step": step})
        saver.wait()

    for step in range(1, SAVES + 1):
        dist.barrier()
        by_work[f"save {step}"] = measured(partial(save, step))
    saver.close()
    all_ranks = Ranks(own_group=True)
    for caches in (False, True):
        plan = partial(plan_as_dcp, state, caches=caches, ranks=all_ranks)
        plan()
        dist.barrier()
        name = "DCP's plan for save 2, cached" if caches else "DCP's plan for save 2"
        by_work[name] = measured(plan)
    state = state_of(mesh, tensors, 0.0)
    dist.barrier()
    commit, _ = checkpoint.latest_good(f"{folder}/checkpoints")
    assert commit is not None
    by_work["reading"] = measured(lambda: checkpoint.load(commit, state))
    for number, tensor in enumerate(state["model"].values()):
        assert bool((tensor.to_local() == 1.0 + number).all())
    answers.put((rank, by_work))
    dist.barrier()
    dist.destroy_process_group()


def cell(key: str, value: float) -> str:
    """A cost for a person."""
    if key.endswith("seconds"):
        return f"{value:.2f} s"
    return f"{value / 1e3:,.1f} kB" if key == "told_bytes" else f"{value / 1e6:,.1f} MB"


@click.command(help=__doc__)
@click.option("--ranks", type=int, default=32, show_default=True)
@click.option("--replicas", type=int, default=1, show_default=True)
@click.option("--tensors", type=int, default=1000, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(ranks: int, replicas: int, tensors: int, as_json: bool) -> None:
    if ranks % replicas:
        raise click.UsageError("--ranks must be a multiple of --replicas")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, replicas, tensors, folder, answers))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        by_rank: dict[int, dict[str, Answer]] = dict(answers.get(timeout=900) for _ in processes)
        for process in processes:
            process.join()
        (table,) = Path(folder).glob("checkpoints/*/.metadata")
        table_bytes = os.path.getsize(table)
    others = [by_rank[rank] for rank in range(1, ranks)] or [by_rank[0]]
    rows = []
    for work in by_rank[0]:
        for who, of_ranks in (("rank 0", [by_rank[0]]), ("another rank, at most", others)):
            row = {"what": work, "who": who}
            for key in COLUMNS:
                row[key.replace("_", " ")] = cell(key, max(each[work][key] for each in of_ranks))
            rows.append(row)
    empty = dict.fromkeys((column.replace("_", " ") for column in COLUMNS), "")
    table_row = {"what": f"DCP's table: {table_bytes / 1e6:.1f} MB", "who": "", **empty}
    results = {"table_bytes": table_bytes, "ranks": by_rank}
    show("scale-resume", results, [*rows, table_row], as_json=as_json)


if __name__ == "__main__":
    main()
