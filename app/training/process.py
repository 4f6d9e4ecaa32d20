"""Settings of a training process: of torch, of the memory allocator, and of garbage collection."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

import torch

from app.config import TrainConfig

# Parameters of mallopt, from malloc.h: https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Bytes; glibc takes no larger one on machines of 64 bits, and reaches it by itself at most."""
_DEFAULT_TOP_PAD = 128 * 2**10
"""Bytes."""
_NEVER = 2**31 - 1
_MALLOC_VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"),
    "LD_PRELOAD",  # mostly of another allocator
)


def configure_torch(train: TrainConfig, device: torch.device) -> None:
    """Set what torch keeps per process; on a CPU only what `train.deterministic` asks for.

    Products and convolutions of float32 get the same precision; torch's default is TF32 for
    convolutions alone. Without train.deterministic, cuDNN tries its convolutions whenever it sees a
    new shape, and keeps the fastest
    (https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark).

    Args:
        train: Has `deterministic` and `matmul_precision`.
        device: What this process trains on.
    """
    if train.deterministic:
        # Without this variable torch refuses deterministic products on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(train.matmul_precision)
        torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"
        torch.backends.cudnn.benchmark = not train.deterministic


@contextlib.contextmanager
def freed_memory_stays(device: torch.device) -> Iterator[None]:
    """A context in which a process that trains on a CPU keeps the memory that a step has freed.

    The next step needs as much again. But glibc returns free memory at the end of its heap to the
    kernel, which clears every page again before the next step has it: a thousand pages in each step
    of a small GPT, and all of them in other models. At the end all free memory is returned. Nothing
    is changed where the environment chooses an allocator or its settings, or where the C library is
    not glibc.

    Args:
        device: What this process trains on.
    """
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    is_chosen = any(name in os.environ for name in _MALLOC_VARIABLES)
    if device.type != "cpu" or not is_glibc or is_chosen:
        yield
        return
    # Whoever sets one of the three ends glibc's own choice of the others.
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    # The heaps of threads other than the main one are freed as a whole unless they fit into this.
    libc.mallopt(_M_TOP_PAD, _LARGEST_MMAP_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TOP_PAD, _DEFAULT_TOP_PAD)
        libc.malloc_trim(0)


@contextlib.contextmanager
def garbage_waits() -> Iterator[None]:
    """A context in which only `collect_garbage` collects garbage.

    Python's collector runs when enough objects have been made, which is in a different step on each
    rank, while the other ranks wait. After app.training.loop has been imported it would look at
    300,000 objects, in 0.17 s. So all objects that exist at the start are frozen: the collector no
    longer looks at them. If objects were frozen before, as a server does before it forks, all stay
    frozen at the end, because Python cannot unfreeze only some of them.
    """
    was_enabled = gc.isenabled()
    had_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not had_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage() -> None:
    """Collect garbage, unless Python does so by itself; for a point at which every rank waits."""
    if not gc.isenabled():
        gc.collect()
