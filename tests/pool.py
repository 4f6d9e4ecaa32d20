"""A pool of gloo processes, with which a distributed test has three lines.

    def _sum(rank: int, x: float) -> float:          # at the top level of the test module
        t = torch.tensor(x + rank)
        dist.all_reduce(t)
        return t.item()

    def test_sum() -> None:
        assert run_distributed(_sum, 2, 1.0) == [3.0, 3.0]

Processes are started once and kept, since importing torch costs more than most tests. A call on
four ranks uses the first four. Every call gets a new process group and a seeded generator, so that
calls cannot affect each other. If a rank raises, dies or hangs, the call ends with
`DistributedFailure`, and the processes are replaced.

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
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

START_TIMEOUT = 120.0
"""Seconds in which a new process must have imported torch, on two busy cores."""
MAX_THREADS = 40
"""Threads of a process above which the pool is started anew after a call.

Some process groups are kept alive by what torch caches, and each has threads that wake up a hundred
times a second: of 89 threads, these took a fifth of a rank's processor.
"""
GRACE = 3.0
"""Seconds that the other ranks get to end by themselves after one has failed."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "strategies.parallelize",
    "tests.strategies.models",
    "app.training.loop",
    "transformers.modeling_utils",
]
"""What every process would import otherwise, or, as transformers, many."""


class DistributedFailure(AssertionError):
    """A rank raised, died or hung; the message says which, with its traceback."""


@dataclass
class _Worker:
    """A process of the pool, and the pipe to it."""

    process: Any
    pipe: Connection


_workers: list[_Worker] = []
_call_numbers = itertools.count()


@functools.cache
def _store() -> Any:
    """The store where ranks meet, each call under a prefix of its own.

    A FileStore would make a rank that waits for another sleep between looks at a file, several
    times for every group of a mesh.
    """
    from app.launchers.store import open_store

    return open_store("127.0.0.1")


def run_distributed(
    func: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
) -> list[Any]:
    """Call `func(rank, *args)` on gloo ranks.

    Args:
        func: A function at the top level of a module.
        world_size: The number of ranks.
        args: Its arguments. They and the results are pickled, so they may not be DTensors.
        timeout: Seconds for the whole call, and for every collective in it. A rank that takes
            longer prints its stacks.

    Returns:
        The results by rank.

    Raises:
        DistributedFailure: A rank raised, died or hung.
    """
    _start_workers(world_size)
    meeting = (_store().port, f"call{next(_call_numbers)}")
    call = pickle.dumps((world_size, timeout, meeting, pickle.dumps((func, args))))
    workers = _workers[:world_size]
    for worker in workers:
        worker.pipe.send_bytes(call)
    results, failures = _collect(workers, timeout)
    if failures:
        close()
        name = getattr(func, "__qualname__", repr(func))
        raise DistributedFailure(f"{name} on {world_size} ranks failed\n" + "\n".join(failures))
    if any(_threads(worker) > MAX_THREADS for worker in workers):
        close(GRACE)
    return [results[rank] for rank in range(world_size)]


def _threads(worker: _Worker) -> int:
    """How many threads a process of the pool has; 0 where it has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{worker.process.pid}/task"))
    return 0


def close(grace: float = 0.0) -> None:
    """End all processes of the pool; the next call starts new ones.

    Args:
        grace: Seconds in which they may end by themselves. `make coverage` needs that to measure
            what they ran.
    """
    deadline = time.monotonic() + grace
    for worker in _workers:
        worker.pipe.close()
    while _workers:
        process = _workers.pop().process
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


atexit.register(close, GRACE)


def _start_workers(count: int) -> None:
    """Make sure that at least `count` processes are alive and ready."""
    if any(not worker.process.is_alive() for worker in _workers):
        close()
    new_workers = [_start_worker(rank) for rank in range(len(_workers), count)]
    _workers.extend(new_workers)
    for worker in new_workers:
        is_ready = False
        with contextlib.suppress(EOFError):
            is_ready = worker.pipe.poll(START_TIMEOUT) and worker.pipe.recv_bytes() == b"ready"
        if not is_ready:
            close()
            raise DistributedFailure("a process of the pool did not start; see its output above")


def _start_worker(rank: int) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pipe, pipe_of_process = context.Pipe()
    process = context.Process(target=_serve, args=(rank, pipe_of_process), name=f"pool-rank-{rank}")
    with mock.patch.dict(os.environ, _ENVIRONMENT):  # torch and gloo read these when loaded
        process.start()
    pipe_of_process.close()
    return _Worker(process, pipe)


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[str]]:
    """Wait for the results of a call.

    Returns:
        The results by rank, and a text for each rank that failed, in the order of the failures.
    """
    results: dict[int, Any] = {}
    failures: list[str] = []
    rank_by_pipe = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout + GRACE
    while rank_by_pipe:
        seconds = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(rank_by_pipe), timeout=seconds)
        if not ready:
            late = f"did not end within {timeout:g} s, or {GRACE:g} s after another had failed"
            failures += [f"--- rank {rank}\n{late}" for rank in rank_by_pipe.values()]
            return results, failures
        for pipe in ready:
            rank = rank_by_pipe.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = workers[rank].process
                process.join(GRACE)
                succeeded = False
                value = f"the process ended with exit code {process.exitcode}"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"--- rank {rank}\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE)
    return results, failures


# --- in the processes -----------------------------------------------------------------------------


def _serve(rank: int, pipe: Connection) -> None:
    """What a process of the pool does: calls, until the pipe closes."""
    # PR_SET_PDEATHSIG: the fork server ends with pytest, and this process with the fork server.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    faulthandler.enable()  # prints Python's stacks if native code ends the process
    import torch
    import torch.distributed

    # Prints the stacks of native threads too.
    getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", bool)(True)
    torch.set_num_threads(1)
    environment = dict(os.environ)
    folder = os.getcwd()
    pipe.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # a test may have left threads behind
        pipe.send_bytes(_do_call(rank, *call))
        restore(environment)
        os.chdir(folder)
        gc.collect()
        gc.freeze()  # collecting the objects of torch's modules again would take longer than a call
        faulthandler.cancel_dump_traceback_later()


def restore(environment: dict[str, str]) -> None:
    """Give this process the environment variables that it had.

    Only variables that differ are changed. A thread that reads one meanwhile, as a look-up of a
    host does, may read memory that glibc has freed, which ends the process.
    """
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _do_call(
    rank: int, world_size: int, timeout: float, meeting: tuple[int, str], work: bytes
) -> bytes:
    """Do a call.

    If the process takes longer than the timeout, until the caller of this function has cleaned up,
    it prints its stacks.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        timeout: Seconds.
        meeting: The port of the store where ranks meet, and the call's prefix there.
        work: The pickled function and its arguments.

    Returns:
        The pickled pair (True, result) or (False, traceback).
    """
    faulthandler.dump_traceback_later(timeout)
    try:
        func, args = pickle.loads(work)
        with _process_group(rank, world_size, timeout=timeout, meeting=meeting):
            return pickle.dumps((True, func(rank, *args)))
    except BaseException:  # the parent must know of SystemExit and pytest's outcomes too
        return pickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _process_group(
    rank: int, world_size: int, *, timeout: float, meeting: tuple[int, str]
) -> Iterator[None]:
    """A new process group for one call, of which nothing remains afterwards."""
    import torch
    import torch.distributed as dist

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.manual_seed(0)
    port, prefix = meeting
    limit = datetime.timedelta(seconds=timeout)
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, client),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    try:
        yield
        dist.barrier()  # a rank must not close connections that another rank still uses
    finally:
        _clear_caches_of_dtensors()
        # DDP's Reducer holds a process group. If it is the last to release it, it waits for gloo's
        # threads while it holds Python's lock, which one of these threads may need to free a tensor
        # (torch 2.13).
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _clear_caches_of_dtensors() -> None:
    """Clear what torch caches of operations on DTensors.

    The caches hold meshes, and so process groups, each of which has a thread that wakes up a
    hundred times a second. (The meshes of another call have other names, so that no call could use
    an entry of another.)
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    importlib.import_module("torch.distributed.tensor.debug")
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed.tensor."):
            for name, value in list(vars(module).items()):
                _clear_caches(value)
                # torch 2.13
                if name in ("clear_redistribute_planner_cache", "_clear_sharding_prop_cache"):
                    value()


def _clear_caches(value: Any) -> None:
    """Clear the cache of a function, or of the methods of a class."""
    cached_function = type(functools.cache(lambda: None))
    candidates = [value]
    if isinstance(value, type):
        candidates += [getattr(member, "__func__", member) for member in vars(value).values()]
    for candidate in candidates:
        if isinstance(candidate, cached_function):
            candidate.cache_clear()
