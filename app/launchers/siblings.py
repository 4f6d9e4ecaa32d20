"""Ends processes that torchrun or Slurm has started beside this one and that are stopped before all have met.

Once they have met, `store_watch.py` finds them; before, everybody would wait for them for half an hour.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import psutil

from app.launchers.whereabouts import is_stopped, kill


@contextlib.contextmanager
def watched(patience: float) -> Iterator[None]:
    """While this lasts, a stopped sibling on this machine is killed. patience: seconds that it may be; 0: for ever."""
    over = threading.Event()
    if patience:
        threading.Thread(target=_run, args=(over, max(0.5, patience / 2)), daemon=True, name="siblings").start()
    try:
        yield
    finally:
        over.set()


def _run(over: threading.Event, every: float) -> None:
    before: set[int] = set()
    while not over.wait(every):
        now = {pid for pid in siblings() if is_stopped(pid)}
        for pid in now & before:
            print(f"process {pid} beside this one was stopped before all had met: ending it", file=sys.stderr)
            kill(pid)
        if now & before and not restarted():
            sys.stderr.flush()
            os._exit(1)  # nobody else would end what waits for it
        before = now


def restarted() -> bool:
    """Whether an agent of torchrun ends and starts all ranks when one has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def siblings() -> list[int]:
    """Processes of this machine that the same parent has started to meet at the same place."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("MASTER_PORT") == os.environ["MASTER_PORT"]:
                    found.append(process.pid)
    return found
