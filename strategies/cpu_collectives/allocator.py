"""How a worker on a CPU treats memory that it frees: it keeps it.

glibc gives large blocks back to the system as soon as they are freed, and every page of the next one is a fault that
the kernel answers with zeros. A step allocates the same blocks as the one before, so up to half of a step's time would
go there (experiments/LOG.md). GNU C Library manual, "Malloc Tunable Parameters".
"""

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
LARGEST = 32 * 2**20
"""Bytes from which on glibc asks the system for every block; it takes no larger value."""


def keep_freed_memory() -> bool:
    """Whether this process now keeps what it frees; not where MALLOC_… in the
    environment says otherwise, or the allocator is not glibc's."""
    if any(name.startswith("MALLOC_") for name in os.environ) or os.environ.get("LD_PRELOAD"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {MMAP_THRESHOLD: LARGEST, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 16 * 2**20}
    return all(mallopt(option, value) == 1 for option, value in wanted.items())
