"""`scale-resume`: a checkpoint saved and read by real gloo ranks, with what each of them holds.

Every rank has a row of each of many small tensors, as fully sharded data parallelism has, so that
DCP's table is larger than the numbers. The ranks are forked from this process after its imports,
and share its memory: what is counted is what a rank has for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from app import checkpoint
from experiments.benchmarks.harness import show

ROW_NUMBERS = 4
"""Numbers in a rank's row of a tensor."""


def state_of(mesh: DeviceMesh, tensors: int, value: float) -> dict[str, Any]:
    """A state in which each rank has a row of each tensor."""
    model: dict[str, DTensor] = {}
    for number in range(tensors):
        weight = torch.full((mesh.size(), ROW_NUMBERS), value + number)
        model[f"blocks.{number}.weight"] = distribute_tensor(weight, mesh, [Shard(0)])
    return {"model": model, "step": 1}


def private_bytes() -> int:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    amounts = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(amounts)


def run_rank(rank: int, ranks: int, tensors: int, folder: str, answers: Any) -> None:
    """Saves, reads and compares, and answers with what it took."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    saver = checkpoint.Checkpointer(f"{folder}/checkpoints", keep_last=1, attempt="1")
    saver.save(state_of(mesh, tensors, 1.0), meta={"step": 1})
    saver.close()
    state = state_of(mesh, tensors, 0.0)
    dist.barrier()
    commit, _ = checkpoint.latest_good(f"{folder}/checkpoints")
    assert commit is not None
    private = private_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    start_cpu = time.process_time()
    checkpoint.load(commit, state)
    answer = {
        "rank": rank,
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "private_bytes": private_bytes() - private,
        "peak_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak),
    }
    for number, tensor in enumerate(state["model"].values()):
        assert bool((tensor.to_local() == 1.0 + number).all())
    answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


@click.command(help=__doc__)
@click.option("--ranks", type=int, default=32, show_default=True)
@click.option("--tensors", type=int, default=1000, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(ranks: int, tensors: int, as_json: bool) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, tensors, folder, answers))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        results = sorted((answers.get(timeout=900) for _ in processes), key=lambda it: it["rank"])
        for process in processes:
            process.join()
        (table,) = Path(folder).glob("checkpoints/*/.metadata")
        table_bytes = os.path.getsize(table)
    others = results[1:] or results
    rows = []
    for name, of_ranks in (("rank 0", results[:1]), ("another rank, at most", others)):
        row = {"what": name}
        for key, unit, scale in (
            ("peak_bytes", "MB", 1e6),
            ("private_bytes", "MB", 1e6),
            ("cpu_seconds", "s", 1.0),
        ):
            row[key.replace("_", " ")] = f"{max(it[key] for it in of_ranks) / scale:.1f} {unit}"
        rows.append(row)
    rows.append(
        {"what": f"the table of {ranks} ranks", "peak bytes": f"{table_bytes / 1e6:.1f} MB"}
    )
    show("scale-resume", {"table_bytes": table_bytes, "ranks": results}, rows, as_json=as_json)


if __name__ == "__main__":
    main()
