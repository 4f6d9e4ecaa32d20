"""Functions in new processes of this machine, in a process group of their own."""

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


def in_processes(
    function: Callable[..., Any], workers: int, *arguments: Any, timeout: float
) -> Any:
    """What `function(rank, device, *arguments)` gives on rank 0 of new processes, with a device each.

    function: of a module, not of another function. What it gives is passed as JSON.
    Raises:
        RunFailed: a process failed, or all of them took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _run,
            (workers, folder, function, arguments),
            nprocs=workers,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        until = time.monotonic() + timeout
        try:
            while not context.join(timeout=max(0.1, until - time.monotonic())):
                if time.monotonic() > until:
                    raise RunFailed(f"{workers} processes took more than {timeout:.0f} s")
        except multiprocessing.ProcessRaisedException as error:
            raise RunFailed(str(error).strip().splitlines()[-1][:300]) from None
        except (
            multiprocessing.ProcessExitedException
        ) as error:  # killed, perhaps because the host's memory ended
            raise RunFailed(str(error)) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads(Path(folder, "found").read_text())


def _run(
    rank: int, workers: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=workers
    )
    found = function(rank, device, *arguments)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
