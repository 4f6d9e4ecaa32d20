"""Runs a function in new processes of this machine, which form a process group of their own."""

import contextlib
import json
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from app.errors import RunFailed

RESULT_FILE = "result.json"


def in_processes(
    function: Callable[..., Any],
    workers: int,
    *arguments: Any,
    timeout: float,
    start_method: str = "spawn",
) -> Any:
    """Call `function(rank, device, *arguments)` in new processes, each with a device of its own.

    Args:
        function: Of a module, not of another function. Its result must have a JSON form.
        workers: The number of processes.
        arguments: Further arguments.
        timeout: Seconds.
        start_method: "fork" saves the imports, for a process that has no threads and no GPU.

    Returns:
        The result of rank 0.

    Raises:
        RunFailed: A process failed, or they took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_to_the_end(
            _run,
            workers,
            workers,
            folder,
            function,
            arguments,
            timeout=timeout,
            start_method=start_method,
        )
        return json.loads(Path(folder, RESULT_FILE).read_text())


def run_to_the_end(
    main: Callable[..., None],
    workers: int,
    *arguments: Any,
    timeout: float | None = None,
    start_method: str = "spawn",
) -> None:
    """Call `main(rank, *arguments)` in new processes, and wait until all have ended.

    Args:
        main: Of a module, not of another function.
        workers: The number of processes.
        arguments: Further arguments.
        timeout: Seconds; None for no limit.
        start_method: As `torch.multiprocessing.start_processes` takes it.

    Raises:
        RunFailed: A process failed, or they took too long. If several have failed, it says what the
            first one raised, since the others have only lost their connection to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        first_error = Path(folder, "first_error")
        context = multiprocessing.start_processes(
            _keep_first_error,
            (str(first_error), main, arguments),
            nprocs=workers,
            join=False,
            daemon=True,
            start_method=start_method,
        )
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                failure = _failure(context.processes, first_error)
                if failure:
                    raise RunFailed(failure[:300])
                running = [each.sentinel for each in context.processes if each.exitcode is None]
                if not running:
                    return
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not wait(running, timeout=left):
                    raise RunFailed(f"{workers} processes took more than {timeout:.0f} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _keep_first_error(
    rank: int, first_error: str, main: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """The main function of a process: writes what it raises, unless another one has done so.

    What a process raises because a peer is gone comes after what that peer has raised.
    """
    try:
        main(rank, *arguments)
    except Exception as error:
        line = "".join(traceback.format_exception_only(error)).splitlines()[0]
        with contextlib.suppress(FileExistsError), open(first_error, "x") as file:
            file.write(line)
        raise


def _failure(processes: Sequence[BaseProcess], first_error: Path) -> str:
    """Why one of the processes has failed; "" if none has.

    None of them has been ended from here yet, so one that a signal ended is the cause of what the
    others raise.

    Args:
        processes: By rank.
        first_error: The file of the first exception.
    """
    codes = [process.exitcode for process in processes]
    if not any(codes):
        return ""
    for rank, code in enumerate(codes):
        if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
            return f"process {rank} was ended by {signal.Signals(-code).name}"
    if first_error.exists():
        return first_error.read_text()
    failed_rank = next(rank for rank, code in enumerate(codes) if code)
    return f"process {failed_rank} ended with exit code {codes[failed_rank]}"


def _run(
    rank: int,
    workers: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a process."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", workers)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers)
    result = function(rank, device, *arguments)
    if rank == 0:
        Path(folder, RESULT_FILE).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
