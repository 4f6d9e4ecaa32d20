"""A reusable pool of gloo processes: `run_distributed(func, world_size, *args)` makes a distributed test three lines.

    def _sum(rank: int, x: float) -> float:          # at the top level of the test module
        t = torch.tensor(x + rank)
        dist.all_reduce(t)
        return t.item()

    def test_sum() -> None:
        assert run_distributed(_sum, 2, 1.0) == [3.0, 3.0]

Processes are started once and kept (importing torch costs more than most tests); a call on four ranks
uses the first four. Every call gets a fresh process group and a seeded generator,
so that calls cannot see each other. A rank that raises, dies or hangs ends the call with
`DistributedFailure`, which carries that rank's traceback, and the processes are replaced.
The idea is OLMo-core's `run_distributed_test`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import IO, Any

for _name in ("pool", "tests.pool"):  # either way of importing this must find the same processes
    sys.modules.setdefault(_name, sys.modules[__name__])

START_TIMEOUT = 120.0
"""Seconds in which a new process must have imported torch (two busy cores)."""
GRACE = 3.0
"""Seconds the other ranks get to end by themselves after one has failed."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_LINUX = sys.platform == "linux"


class DistributedFailure(AssertionError):
    """A rank raised, died or hung; the message holds the traceback of each rank concerned."""


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    stacks: IO[bytes]
    """Where the process writes its stacks when it gets SIGUSR1."""

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.stacks.close()


_workers: list[_Worker] = []


def run_distributed(
    func: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, init: bool = True
) -> list[Any]:
    """Call `func(rank, *args)` on `world_size` gloo ranks and return their results by rank.

    func: a function at the top level of a module. args and results are pickled: no DTensors.
    timeout: seconds, for the whole call and for every collective in it.
    init: False leaves torch.distributed uninitialised; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT (a free port) are set either way, for code that initialises it itself.
    Raises DistributedFailure.
    """
    _start(world_size)
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        call = (world_size, timeout, init, os.path.join(folder, "store"), _free_port(), pickle.dumps((func, args)))
        for worker in _workers[:world_size]:
            worker.pipe.send_bytes(pickle.dumps(call))
        results, failures = _collect(_workers[:world_size], timeout)
    if failures:
        close()
        name = getattr(func, "__qualname__", repr(func))
        raise DistributedFailure(f"{name} on {world_size} ranks failed\n" + "\n".join(failures))
    return [results[rank] for rank in range(world_size)]


def close() -> None:
    """End all processes of the pool; the next call starts new ones."""
    while _workers:
        _workers.pop().kill()


atexit.register(close)


def _start(count: int) -> None:
    """Have at least `count` living, ready processes."""
    if any(not worker.process.is_alive() for worker in _workers):
        close()
    fresh = []
    for rank in range(len(_workers), count):
        fresh.append(_spawn(rank))
        _workers.append(fresh[-1])
    deadline = time.monotonic() + START_TIMEOUT
    for worker in fresh:
        try:
            ready = worker.pipe.poll(max(0.0, deadline - time.monotonic())) and worker.pipe.recv_bytes() == b"ready"
        except EOFError:
            ready = False
        if not ready:
            close()
            raise DistributedFailure("a process of the pool did not start; see what it printed above")


def _spawn(rank: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stacks = tempfile.NamedTemporaryFile(prefix=f"pool-stacks-{rank}-")  # noqa: SIM115  lives as long as the process
    process = context.Process(target=_serve, args=(rank, theirs, stacks.name, os.getpid()), name=f"pool-rank-{rank}")
    before = {key: os.environ.get(key) for key in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)  # torch and gloo read these when they are loaded
    try:
        process.start()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
    theirs.close()
    return _Worker(process, ours, stacks)


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[str]]:
    """Every rank's result, and one text per rank that failed, in the order in which they did."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            if not failures:
                failures = [_hung(rank, workers[rank], timeout) for rank in waiting.values()]
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join(GRACE)
                ok, value = False, f"the process ended with exit code {workers[rank].process.exitcode}"
            if ok:
                results[rank] = value
            else:
                failures.append(f"--- rank {rank}\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE)
    return results, failures


def _hung(rank: int, worker: _Worker, timeout: float) -> str:
    """What the process is doing, from its own stacks."""
    if worker.process.pid is not None and hasattr(signal, "SIGUSR1"):
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    with open(worker.stacks.name, errors="replace") as file:
        return f"--- rank {rank} did not end within {timeout:g} s\n{file.read()}"


# ---------------------------------------------------------------------------------------------------------------
# In the processes


def _serve(rank: int, pipe: Connection, stacks: str, parent: int) -> None:
    """A process of the pool: do calls until the pipe closes."""
    if _LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a killed pytest
        if os.getppid() != parent:
            return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    environment, folder = dict(os.environ), os.getcwd()
    pipe.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # whatever threads a test has left behind
        pipe.send_bytes(_answer(rank, *call))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        gc.collect()


def _answer(rank: int, world_size: int, timeout: float, init: bool, store: str, port: int, work: bytes) -> bytes:
    """The pickled pair (True, result) or (False, traceback)."""
    try:
        func, args = pickle.loads(work)
        with _process_group(rank, world_size, timeout, init, store, port):
            return pickle.dumps((True, func(rank, *args)))
    except BaseException:  # SystemExit and pytest's outcomes too: the parent must hear of every end
        return pickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, timeout: float, init: bool, store: str, port: int) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(0)
    if init:
        files = dist.FileStore(store, world_size)
        patience = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=patience)
    try:
        yield
        if init:
            dist.barrier()  # nobody tears its connections down while another rank still uses them
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
