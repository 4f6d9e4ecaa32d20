"""Each worker's output, prints included, in a file of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from app.storage import Storage


@contextlib.contextmanager
def worker_output(run: Storage, rank: int) -> Iterator[None]:
    """Sends this worker's output, prints included, to logs/rank-N.log of the run."""
    if not run.is_local:
        yield
        return
    log = run.local_path / "logs" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout, sys.stderr = streams
        for fd, original in enumerate(saved, start=1):
            os.dup2(original, fd)
            os.close(original)
