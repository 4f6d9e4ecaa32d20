"""Checks of two GPUs and more, or, without any, of two processes with gloo."""

import datetime
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from app.run.abort import abort
from experiments.benchmarks.gpu_first.check import CheckContext
from experiments.benchmarks.gpu_first.training import make_trial
from experiments.parity.matrix import EVERYTHING, run_matrix
from experiments.parity.rows import ROWS
from strategies.torch_internals import failed_groups

RELEASE_SECONDS = 30.0
"""How long survivors may take to leave a collective whose peer was killed."""
TIMEOUT = datetime.timedelta(minutes=2)
"""The timeout of collectives. It is longer than RELEASE_SECONDS, so that it does not end them."""
KILLED_AT_STEP = 20


def row(context: CheckContext, name: str) -> None:
    """A row of the parity matrix against one device, plain and with all that a step can have."""
    parity_row = next(row for row in ROWS if str(row) == name)
    for result in run_matrix(make_trial, [parity_row], variants=["plain", EVERYTHING]):
        variant, _, _ = result.variant.partition(",")
        context.expect(
            variant,
            0.0,
            result.bound.loss,
            why="experiments/parity: the relative difference of the loss, in fp32",
        )
        difference = result.difference
        if difference is None:
            raise RuntimeError(f"{result.variant}: {result.refused or result.error}")
        context.measured(
            **{
                variant: difference.loss,
                f"{variant}_norm": difference.norm,
                f"{variant}_weights": difference.weights,
            }
        )
        why = "ten times the loss's"
        context.expect(f"{variant}_norm", 0.0, result.bound.norm, why=why)
        context.expect(f"{variant}_weights", 0.0, result.bound.weights, why=why)


# --- a killed peer --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """What a rank has after another one was killed.

    Attributes:
        released_at: When it has summed in a new group, on time.monotonic, which all processes of a
            machine share.
        total: The sum of a one of each survivor.
        raised: The exception that ended its collective; "" for none.
        failed: The groups of which a collective has failed.
    """

    released_at: float
    total: float
    raised: str
    failed: list[str]


def killed_peer(context: CheckContext) -> None:
    """The last rank is killed inside a collective.

    This process tells the others, as the supervisor does. They give their group up, and continue
    together in another one.
    """
    world = torch.cuda.device_count() if context.on_gpu else 2
    context.expect(
        "survivors",
        world - 1,
        world - 1,
        why="TORCH_NCCL_ASYNC_ERROR_HANDLING=2: abort, and do not end the process",
    )
    context.expect(
        "told",
        world - 1,
        world - 1,
        why="the collective raises, or failed_groups says that it is not to be believed",
    )
    context.expect(
        "seconds", 0.0, RELEASE_SECONDS, why="aborting a communicator takes a second or two"
    )
    folder = Path(os.environ["TMPDIR"])
    # A file, since a process that is killed may hold what it shares in memory for ever.
    peer_is_gone = folder / "gone"
    spawn = multiprocessing.get_context("spawn")
    peers = []
    for rank in range(world):
        arguments = (rank, world, folder, context.device.type, peer_is_gone)
        peer = spawn.Process(target=_run_peer, args=arguments, daemon=True)
        peer.start()
        peers.append(peer)
    *others, last = peers
    last.join()
    start = time.monotonic()
    context.measured(last_rank_ended_with=last.exitcode)
    peer_is_gone.touch()
    for peer in others:
        seconds = time.monotonic() - start
        peer.join(max(0.1, 3 * RELEASE_SECONDS - seconds))
    files = sorted(folder.glob("survivor-*"))
    survivors = [Survivor(**json.loads(file.read_text())) for file in files]
    expected_error = "DistBackendError" if context.on_gpu else "RuntimeError"
    context.measured(
        survivors=sum(survivor.total == world - 1 for survivor in survivors),
        codes=[peer.exitcode for peer in peers],
        told=sum(
            survivor.raised == expected_error or bool(survivor.failed) for survivor in survivors
        ),
        said=[[survivor.raised, survivor.failed] for survivor in survivors],
    )
    if survivors:
        released_at = max(survivor.released_at for survivor in survivors)
        context.measured(seconds=released_at - start)


def _run_peer(rank: int, world: int, folder: Path, device_type: str, peer_is_gone: Path) -> None:
    """What a rank does: sums, until the last rank kills itself; then a sum in a new group."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    group = _make_group(folder / "first", rank, world=world, device=device)

    def abort_when_peer_is_gone() -> None:
        while not peer_is_gone.exists():
            time.sleep(0.05)
        if device_type == "cuda":
            group.abort()

    watcher = threading.Thread(target=abort_when_peer_is_gone, daemon=True)
    watcher.start()
    x = torch.ones(1 << 20, device=device)
    raised = ""
    try:
        for step in range(1_000_000):
            if rank == world - 1 and step == KILLED_AT_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x)
            x.div_(world)
            # Reading a number returns from an aborted collective as if nothing had happened. Only
            # the next collective raises.
            float(x[0])
    except RuntimeError as error:  # gloo's broken connection, or an aborted collective of NCCL's
        raised = type(error).__name__
    watcher.join()
    failed = failed_groups()
    dist.destroy_process_group()
    _make_group(folder / "second", rank, world=world - 1, device=device)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    total = float(one)
    survivor = Survivor(released_at=time.monotonic(), total=total, raised=raised, failed=failed)
    (folder / f"survivor-{rank}").write_text(json.dumps(asdict(survivor)))
    abort(0)


def _make_group(path: Path, rank: int, *, world: int, device: torch.device) -> dist.ProcessGroup:
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(path), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return group
