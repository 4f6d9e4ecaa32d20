"""Each worker's output, prints included, in a file of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from app.console import output_to
from app.storage import Storage


@contextlib.contextmanager
def worker_output(run: Storage, rank: int) -> Iterator[None]:
    """Sends this worker's output, prints included, to logs/rank-N.log of the run."""
    if not run.is_local:
        yield
        return
    streams = sys.stdout, sys.stderr
    with output_to(run.local_path / "logs" / f"rank-{rank}.log"):
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout, sys.stderr = streams
