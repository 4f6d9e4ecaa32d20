"""Settings of a training process: those of torch, and when Python collects garbage."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from app.config import TrainConfig


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
