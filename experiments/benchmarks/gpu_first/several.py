"""Checks of two GPUs and more, or, without any, of two processes with gloo."""

import datetime
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from app.run.abort import abort
from experiments.benchmarks.gpu_first.check import Here
from experiments.benchmarks.gpu_first.training import trial
from experiments.parity.matrix import EVERYTHING, run_matrix
from experiments.parity.rows import ROWS
from strategies.torch_internals import failed_groups

LET_GO_SECONDS = 30.0
TIMEOUT = datetime.timedelta(minutes=2)
"""Of collectives: longer than survivors may take, so that it is not what lets them go."""


def row(here: Here, name: str) -> None:
    """A row of the parity matrix against one device, plain and with all that a step can have."""
    wanted = next(row for row in ROWS if str(row) == name)
    results = run_matrix(trial, [wanted], variants=["plain", EVERYTHING])
    for result in results:
        key = result.variant.partition(",")[0]
        here.expect(key, 0.0, result.bound.loss, "experiments/parity: the relative difference of the loss, in fp32")
        if result.difference is None:
            raise RuntimeError(f"{result.variant}: {result.refused or result.error}")
        found = result.difference
        here.found(**{key: found.loss, f"{key}_norm": found.norm, f"{key}_weights": found.weights})
        here.expect(f"{key}_norm", 0.0, result.bound.norm, "ten times the loss's")
        here.expect(f"{key}_weights", 0.0, result.bound.weights, "ten times the loss's")


def killed_peer(here: Here) -> None:
    """The last rank is killed within a collective. Whoever watches tells the others, as the supervisor does; they give
    their group up, and go on together in another one."""
    world = torch.cuda.device_count() if here.on_gpu else 2
    here.expect(
        "survivors", world - 1, world - 1, "TORCH_NCCL_ASYNC_ERROR_HANDLING=2: abort, and do not end the process"
    )
    here.expect(
        "told", world - 1, world - 1, "the collective raises, or failed_groups says that it is not to be believed"
    )
    here.expect("seconds", 0.0, LET_GO_SECONDS, "aborting a communicator takes a second or two")
    folder, context = os.environ["TMPDIR"], multiprocessing.get_context("spawn")
    gone = Path(folder, "gone")  # a file: what a process shares in memory, one that is killed may hold for ever
    peers = [
        context.Process(target=_peer, args=(rank, world, folder, here.device.type, gone), daemon=True)
        for rank in range(world)
    ]
    for peer in peers:
        peer.start()
    peers[-1].join()
    begun = time.monotonic()
    here.found(last_rank_ended_with=peers[-1].exitcode)
    gone.touch()
    for peer in peers[:-1]:
        peer.join(max(0.1, 3 * LET_GO_SECONDS - (time.monotonic() - begun)))
    said = [json.loads(path.read_text()) for path in Path(folder).glob("survivor-*")]
    here.found(survivors=sum(total == world - 1 for _, total, *_ in said), codes=[peer.exitcode for peer in peers])
    right = "DistBackendError" if here.on_gpu else "RuntimeError"
    here.found(
        told=sum(bool(raised == right or failed) for *_, raised, failed in said), said=[each[2:] for each in said]
    )
    if said:
        here.found(seconds=max(each[0] for each in said) - begun)


def _peer(rank: int, world: int, folder: str, kind: str, gone: Path) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    group = _group(Path(folder, "first"), rank, world, device)

    def let_go() -> None:
        while not gone.exists():
            time.sleep(0.05)
        if kind == "cuda":
            group.abort()

    watching = threading.Thread(target=let_go, daemon=True)
    watching.start()
    x = torch.ones(1 << 20, device=device)
    raised = ""
    try:
        for step in range(1_000_000):
            if rank == world - 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x)
            x.div_(world)
            float(x[0])  # returns from an aborted collective as if all were well; the next one raises
    except RuntimeError as error:  # gloo's broken connection; of NCCL's, what an aborted collective raises
        raised = type(error).__name__
    watching.join()
    failed = failed_groups()
    dist.destroy_process_group()
    _group(Path(folder, "second"), rank, world - 1, device)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    total = float(one)
    # monotonic is a clock that processes of one machine share
    Path(folder, f"survivor-{rank}").write_text(json.dumps([time.monotonic(), total, raised, failed]))
    abort(0)


def _group(path: Path, rank: int, world: int, device: torch.device) -> dist.ProcessGroup:
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(path), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return group
