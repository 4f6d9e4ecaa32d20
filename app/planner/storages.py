"""The storages that are alive at each moment of a trace.

Storages are identified by id() as long as they are alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

from strategies.tensor.loss import VocabularyLogits


def storage_id(tensor: Tensor) -> int:
    """The id() of a tensor's storage."""
    return id(tensor.untyped_storage())


class LiveStorages:
    """Follows which storages are alive, and notes the moments at which something is allocated.

    Args:
        parameters: id() of the storages of parameters and buffers, which do not count.
        note: Is called at each moment with the name of the operation, bytes that are alive, and
            bytes for each logit of a chunk whose rows do not grow with the batch.
        forget: Is called with the id() of each storage that is freed.
    """

    def __init__(
        self,
        parameters: set[int],
        note: Callable[[str, float, float], None],
        forget: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._note = note
        self._forget = forget
        self._alive: dict[int, float] = {}  # bytes of each storage
        self._alive_bytes = 0.0
        self._in_kernel: dict[int, float] | None = None
        """Bytes of the storages that the operations of one kernel have made."""
        self._chunk: tuple[float, int] | None = None
        """Bytes that were alive before the chunk at work, and its logits."""
        self._is_later_chunk = False

    def allocate(self, operation: str, tensor: Tensor) -> bool:
        """Count a tensor's storage as alive until nothing refers to it.

        Args:
            operation: The operation that the tensor is a result of.
            tensor: The tensor.

        Returns:
            Whether the storage is new.
        """
        # Split logits, and the whole logits for which they stand, have no storage of their own.
        if isinstance(tensor, VocabularyLogits) or tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._parameters:
            return False
        size = float(storage.nbytes())
        if self._in_kernel is None:
            self.add(operation, key, size)
        elif key in self._in_kernel:
            return False
        else:
            self._in_kernel[key] = size
        weakref.finalize(storage, self._free, key)
        return True

    def add(self, operation: str, key: int, size: float) -> None:
        """Count a storage as alive, and note the moment.

        Args:
            operation: The operation that has made it.
            key: The storage's id().
            size: Its bytes.
        """
        self._alive[key] = size
        self._alive_bytes += size
        self.note_moment(operation)

    def note_moment(self, operation: str, copies: float = 0.0) -> None:
        """Note what is alive.

        Args:
            operation: The operation at work.
            copies: Bytes that the operation itself needs besides.
        """
        if self._is_later_chunk:  # it needs no more than the first
            return
        alive = self._alive_bytes + copies
        if self._chunk is None:
            self._note(operation, alive, 0.0)
            return
        before, logits = self._chunk
        self._note(operation, before, (alive - before) / logits)

    @contextlib.contextmanager
    def chunk(self, logits: int | None, *, is_first: bool) -> Iterator[None]:
        """While it is active, a chunk of rows is at work.

        Args:
            logits: Logits of the chunk, if its rows do not grow with the batch; otherwise None.
            is_first: Whether it is the first chunk. No later chunk needs more.
        """
        self._is_later_chunk = not is_first
        if logits is not None:
            self._chunk = self._alive_bytes, logits
        yield
        self._chunk = None
        self._is_later_chunk = False

    @contextlib.contextmanager
    def kernel(self) -> Iterator[dict[int, float]]:
        """While it is active, what is allocated does not count.

        Yields:
            Bytes by the id() of each storage that was made in the kernel and is still alive.
        """
        results: dict[int, float] = {}
        self._in_kernel = results
        yield results
        self._in_kernel = None

    def _free(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key, 0.0)
        if self._in_kernel is not None:
            self._in_kernel.pop(key, None)
        self._forget(key)
