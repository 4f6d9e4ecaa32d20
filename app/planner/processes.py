"""Runs a function in new processes of this machine, which form a process group of their own."""

import json
import tempfile
import time
from collections.abc import Callable
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
        context = multiprocessing.start_processes(
            _run,
            (workers, folder, function, arguments),
            nprocs=workers,
            join=False,
            daemon=True,
            start_method=start_method,
        )
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=max(0.1, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise RunFailed(f"{workers} processes took more than {timeout:.0f} s")
        except multiprocessing.ProcessRaisedException as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RunFailed(last_line[:300]) from None
        except multiprocessing.ProcessExitedException as error:  # killed, perhaps out of memory
            raise RunFailed(str(error)) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads(Path(folder, RESULT_FILE).read_text())


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
