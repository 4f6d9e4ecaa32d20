"""Host memory that saves are copied into: one piece, used again while the tensors stay the same.

For copies from a GPU the memory is page-locked (pinned), so that they are asynchronous and run at
the full speed of the link. `torch.empty(pin_memory=True)` would round each tensor up to a power of
two, up to twice what is needed, and keep the memory after it is freed. So the memory is ordinary,
and cudaHostRegister of the CUDA runtime, which `torch.cuda.cudart` is documented to return, locks
its pages. If that is refused (ulimit -l, a container), it stays ordinary, and copies block.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class _Slot(NamedTuple):
    """What the buffer has to hold of one tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    is_from_gpu: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def aligned_nbytes(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """Tensors by name, next to each other in one piece of memory.

    Each tensor has a storage of exactly its own size, because DCP's writer would copy a tensor with
    a larger one again.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._locked: Tensor | None = None
        """The memory, if its pages are locked."""

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked memory."""
        return self._locked.nbytes if self._locked is not None else 0

    def like(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors on the host of the sources' shapes and types.

        Returns:
            By name; the tensors of the last call if names, shapes, types and devices are the same.
        """
        slots = [
            _Slot(name, source.shape, source.dtype, is_from_gpu=source.is_cuda)
            for name, source in sources.items()
        ]
        if slots != self._slots:
            self.close()
            self._allocate(slots)
            self._slots = slots
        return dict(self._tensors)

    def _allocate(self, slots: list[_Slot]) -> None:
        memory = torch.empty(sum(slot.aligned_nbytes for slot in slots), dtype=torch.uint8)
        is_for_gpu = any(slot.is_from_gpu for slot in slots)
        if memory.numel() and is_for_gpu and _lock_pages(memory):
            self._locked = memory
        offset = 0
        for slot in slots:
            if slot.nbytes:
                count = slot.nbytes // slot.dtype.itemsize
                flat = torch.frombuffer(
                    memory.numpy(), dtype=slot.dtype, count=count, offset=offset
                )
            else:
                flat = torch.empty(0, dtype=slot.dtype)
            self._tensors[slot.name] = flat.view(slot.shape)
            offset += slot.aligned_nbytes

    def close(self) -> None:
        """Free the memory; nothing may be copied into it any more."""
        if self._locked is not None:
            torch.cuda.cudart().cudaHostUnregister(self._locked.data_ptr())
        self._slots = None
        self._tensors = {}
        self._locked = None


def _lock_pages(memory: Tensor) -> bool:
    """Lock the memory's pages; whether CUDA has done so."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) == 0:
        return True
    # CUDA remembers the error, and torch's next launch raises it; so it is raised and dropped here.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False
