"""What a training process decides for itself as a whole: torch's settings, and when Python collects garbage."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from app.config import TrainConfig


def configure_torch(train: TrainConfig, device: torch.device) -> None:
    """Sets what torch keeps per process; of a CPU only what `train.deterministic` asks for.

    Without train.deterministic cuDNN tries its convolutions the first time that it sees a shape, and takes the fastest
    (https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark). Products and convolutions of
    float32 have the same precision: torch's own default is TF32 for convolutions alone.
    """
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products on a GPU
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(train.matmul_precision)
        torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"
        torch.backends.cudnn.benchmark = not train.deterministic


@contextlib.contextmanager
def garbage_waits() -> Iterator[None]:
    """While this lasts garbage is collected where `collect_garbage` is called and nowhere else.

    Python's collector runs whenever enough objects have been made: in another step on each rank, while the others wait
    for it. In a process that has imported app.training.loop it looks at 300,000 objects, in 0.17 s; what there is when
    this begins is therefore not looked at again. Where somebody has frozen objects before, as a server does before it
    forks, all stay frozen: Python cannot thaw a part.
    """
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
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
    """To be called where every rank waits anyway; does nothing where Python collects by itself."""
    if not gc.isenabled():
        gc.collect()
