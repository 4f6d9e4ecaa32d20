"""A reusable pool of gloo processes: `run_distributed(func, world_size, *args)` makes a distributed test three lines.

    def _sum(rank: int, x: float) -> float:          # at the top level of the test module
        t = torch.tensor(x + rank)
        dist.all_reduce(t)
        return t.item()

    def test_sum() -> None:
        assert run_distributed(_sum, 2, 1.0) == [3.0, 3.0]

Processes are started once and kept (importing torch costs more than most tests); a call on four ranks uses the first
four. Every call gets a fresh process group and a seeded generator, so that calls cannot see each other. A rank that
raises, dies or hangs ends the call with `DistributedFailure`, and the processes are replaced.
The idea is OLMo-core's `run_distributed_test`.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import itertools
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
from typing import Any
from unittest import mock

START_TIMEOUT = 120.0
"""Seconds in which a new process must have imported torch (two busy cores)."""
GRACE = 3.0
"""Seconds the other ranks get to end by themselves after one has failed."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class DistributedFailure(AssertionError):
    """A rank raised, died or hung; the message says which, with its traceback."""


@dataclass
class _Worker:
    process: Any
    pipe: Connection


_workers: list[_Worker] = []
_stores: list["tempfile.TemporaryDirectory[str]"] = []
"""Where ranks meet. Kept as long as there are ranks: one that lets go of its store while the folder is being removed
waits for the file until the call's timeout, and then ends (torch 2.13, FileStore)."""
_numbers = itertools.count()


def run_distributed(func: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `func(rank, *args)` on `world_size` gloo ranks and return their results by rank.

    func: a function at the top level of a module. args and results are pickled: no DTensors.
    timeout: seconds, for the whole call and for every collective in it; a rank that takes longer prints its stacks.
    Raises DistributedFailure.
    """
    _start(world_size)
    store = os.path.join(_stores[0].name, f"store{next(_numbers)}")
    call = pickle.dumps((world_size, timeout, store, pickle.dumps((func, args))))
    for worker in _workers[:world_size]:
        worker.pipe.send_bytes(call)
    results, failures = _collect(_workers[:world_size], timeout)
    if failures:
        close()
        name = getattr(func, "__qualname__", repr(func))
        raise DistributedFailure(f"{name} on {world_size} ranks failed\n" + "\n".join(failures))
    return [results[rank] for rank in range(world_size)]


def close(grace: float = 0.0) -> None:
    """End all processes of the pool; the next call starts new ones. grace: seconds in which they may end by themselves,
    as who measures what they ran needs it (`make coverage`)."""
    until = time.monotonic() + grace
    for worker in _workers:
        worker.pipe.close()
    while _workers:
        process = _workers.pop().process
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
        process.join()
    while _stores:
        _stores.pop().cleanup()


atexit.register(close, GRACE)


def _start(count: int) -> None:
    """Have at least `count` living, ready processes."""
    if any(not worker.process.is_alive() for worker in _workers):
        close()
    if not _stores:
        _stores.append(tempfile.TemporaryDirectory(prefix="pool-"))
    fresh = [_spawn(rank) for rank in range(len(_workers), count)]
    _workers.extend(fresh)
    for worker in fresh:
        ready = False
        with contextlib.suppress(EOFError):
            ready = worker.pipe.poll(START_TIMEOUT) and worker.pipe.recv_bytes() == b"ready"
        if not ready:
            close()
            raise DistributedFailure("a process of the pool did not start; see what it printed above")


def _spawn(rank: int) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "strategies.parallelize", "tests.strategies.models", "app.training.loop"]
    )
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(rank, theirs), name=f"pool-rank-{rank}")
    with mock.patch.dict(os.environ, _ENVIRONMENT):  # torch and gloo read these when they are loaded
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[str]]:
    """Every rank's result, and one text per rank that failed, in the order in which they did."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout + GRACE
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = f"did not end within {timeout:g} s, or {GRACE:g} s after another had failed"
            return results, failures + [f"--- rank {rank}\n{late}" for rank in waiting.values()]
        for pipe in ready:
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


# --- in the processes -------------------------------------------------------------------------------------------------


def _serve(rank: int, pipe: Connection) -> None:
    """A process of the pool: do calls until the pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the fork server ends with pytest, and this with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    faulthandler.enable()  # of what ends it in native code, the stacks
    import torch
    import torch.distributed

    getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", bool)(True)  # and of native threads
    torch.set_num_threads(1)
    environment, folder = dict(os.environ), os.getcwd()
    pipe.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # whatever threads a test has left behind
        pipe.send_bytes(_answer(rank, *call))
        restore(environment)
        os.chdir(folder)
        gc.collect()
        gc.freeze()  # what torch's modules hold is not looked at again: a collection would take longer than the call
        faulthandler.cancel_dump_traceback_later()


def restore(environment: dict[str, str]) -> None:
    """Gives the process these variables. Only what differs is touched: a thread that asks for one meanwhile, as looking
    up a host does, may read memory that glibc has given up, and the process ends."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


def _answer(rank: int, world_size: int, timeout: float, store: str, work: bytes) -> bytes:
    """The pickled pair (True, result) or (False, traceback). Whoever calls it says when what is left is put in order:
    what takes too long until then prints the stacks."""
    faulthandler.dump_traceback_later(timeout)
    try:
        func, args = pickle.loads(work)
        with _process_group(rank, world_size, timeout, store):
            return pickle.dumps((True, func(rank, *args)))
    except BaseException:  # SystemExit and pytest's outcomes too: the parent must hear of every end
        return pickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, timeout: float, store: str) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    size = str(world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    torch.manual_seed(0)
    files = dist.FileStore(store, world_size)
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=patience)
    try:
        yield
        dist.barrier()  # nobody tears its connections down while another rank still uses them
    finally:
        _forget_meshes()
        # DDP's Reducer holds a process group, and where it is the last to let go it waits, with Python's lock, for
        # gloo's threads, one of which may need that lock to free a tensor (torch 2.13).
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _forget_meshes() -> None:
    """Clears what torch remembers of operations on DTensors: it holds their meshes, and so process groups, each with a
    thread that wakes a hundred times a second. (Another row's meshes have other names: nothing of it serves twice.)"""
    if "torch.distributed.tensor" not in sys.modules:
        return
    importlib.import_module("torch.distributed.tensor.debug")
    remembering = type(functools.cache(lambda: None))
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor.")]:
        for name, value in list(vars(module).items()):
            members = vars(value).values() if isinstance(value, type) else ()
            for each in (value, *(getattr(member, "__func__", member) for member in members)):
                if isinstance(each, remembering):
                    each.cache_clear()
            if name in ("clear_redistribute_planner_cache", "_clear_sharding_prop_cache"):  # torch 2.13
                value()
