"""Ranks as forks of one process, which has imported everything: a process of its own would take seconds to begin."""

import contextlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS = 240.0
"""That ranks may take."""
Work = Callable[[int], dict[str, Any]]


def run(work: Work, workers: int) -> dict[str, Any]:
    """What `work(rank)` gave on every rank, or {"error": …}; and the seconds of CPU that all took."""
    until = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder:
        pids = set()
        for rank in range(workers):
            if (pid := os.fork()) == 0:
                _rank(work, workers, rank, Path(folder))
            pids.add(pid)
        seconds = 0.0
        while pids:
            for pid in list(pids):
                ended, _, usage = os.wait4(pid, os.WNOHANG)
                if ended:
                    pids.discard(pid)
                    seconds += usage.ru_utime + usage.ru_stime
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return {"seconds": seconds, "ranks": [_answer(Path(folder), rank) for rank in range(workers)]}


def _answer(folder: Path, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return json.loads((folder / str(rank)).read_text())
    said = (folder / f"said{rank}").read_text(errors="replace")
    return {"error": f"rank {rank} ended, or took more than {SECONDS:g} s: {said[-1000:]}"}


def _rank(work: Work, workers: int, rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = str(folder)  # what a rank leaves there goes with it
    try:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
        if workers > 1:
            store = dist.FileStore(str(folder / "store"), workers)
            dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=workers)
        answer = work(rank)
        if workers > 1:
            dist.barrier()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    (folder / f"part{rank}").write_text(json.dumps(answer))
    os.replace(folder / f"part{rank}", folder / str(rank))
    os._exit(0)
