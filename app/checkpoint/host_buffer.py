"""Host memory that a save is copied into: one piece, used again by every save while the tensors stay the same.

For a GPU's copies it is page-locked (pinned), so that they are asynchronous and run at the link's full speed.
`torch.empty(pin_memory=True)` would round each tensor up to a power of two, up to twice what is needed, and keep it for
good once it is freed. So the memory is ordinary, and cudaHostRegister of the CUDA runtime, which `torch.cuda.cudart` is
documented to give, locks its pages. Where that is refused (ulimit -l, a container) it stays as it is, and copies block.
"""

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNED = 64  # bytes
_Layout = list[tuple[str, torch.Size, torch.dtype, bool]]


class HostBuffer:
    """Tensors by name, beside each other in one piece of memory, each with a storage of exactly its own size: DCP's
    writer would copy once more what has a larger one."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._tensors: dict[str, Tensor] = {}
        self._locked: Tensor | None = None

    @property
    def locked_bytes(self) -> int:
        return self._locked.nbytes if self._locked is not None else 0

    def like(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tensor of the host's for each: the same as in the last call if names, shapes and types are."""
        layout = [(name, source.shape, source.dtype, source.is_cuda) for name, source in sources.items()]
        if layout != self._layout:
            self.close()
            self._make(layout)
            self._layout = layout
        return dict(self._tensors)

    def _make(self, layout: _Layout) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in layout]
        rounded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        memory, offset = torch.empty(sum(rounded), dtype=torch.uint8), 0
        if memory.numel() and any(on_gpu for *_, on_gpu in layout) and _lock(memory):
            self._locked = memory
        for (name, shape, dtype, _), size, step in zip(layout, sizes, rounded, strict=True):
            if size:
                count = size // dtype.itemsize
                flat = torch.frombuffer(memory.numpy(), dtype=dtype, count=count, offset=offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            self._tensors[name] = flat.view(shape)
            offset += step

    def close(self) -> None:
        """Lets go of the memory; nothing may be copied into it any more."""
        if self._locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self._locked.data_ptr())
        self._layout, self._tensors, self._locked = None, {}, None


def _lock(memory: Tensor) -> bool:
    """Whether its pages are locked now."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA keeps the refusal, and torch's next launch would raise it: this one
        torch.ones(1, device="cuda")
    return False
