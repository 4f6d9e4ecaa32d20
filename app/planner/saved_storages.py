"""The storages that autograd saves in a trace, and those that compiled code does not need to save.

The compiled backward of a part computes again what element-wise operations, norms and casts of the
same part wrote, and of a sum it keeps the smallest term only. Another part has to save them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from app.planner.storages import storage_id


class SavedStorages:
    """Counts what autograd saves: `saved`, and of it `copies` and `fusible` (part_trace.py).

    Args:
        parameters: id() of the storages of parameters and buffers, which do not count.
        count: Adds to a value of the current part.
    """

    def __init__(self, parameters: set[int], count: Callable[[str, float], None]) -> None:
        self._parameters = parameters
        self._count = count
        self._saved: set[int] = set()
        self._recomputable: dict[int, str] = {}
        """Storages that element-wise operations, norms and casts wrote, with their part."""
        self._sums: dict[int, tuple[str, float]] = {}
        """For the storage of a sum, its part and the bytes of its smallest term."""
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        """The first copy of a storage in another type that was made in this part's forward."""
        self._repeated_casts: set[int] = set()
        """Further copies of the same storage in the same type, which a compiler does not make."""
        self._parameter_copies: set[int] = set()
        """Storages of parameters in another type."""

    def save(self, tensor: Tensor, part: str) -> bool:
        """Count a tensor that autograd saves.

        Args:
            tensor: The tensor.
            part: The part at work.

        Returns:
            Whether its storage is saved for the first time, and compiled code saves it too.
        """
        key = storage_id(tensor)
        if key in self._parameters or key in self._saved:
            return False
        self._saved.add(key)
        size = float(tensor.untyped_storage().nbytes())
        self._count("saved", size)
        if key in self._parameter_copies:
            self._count("copies", size)
        if self._recomputable.get(key) == part:
            self._count("fusible", size)
            return False
        part_of_sum, smallest_term = self._sums.get(key, ("", size))
        if part_of_sum == part:
            self._count("fusible", size - smallest_term)
        return True

    def add_recomputable(self, tensors: list[Tensor], part: str) -> None:
        """Note results that the compiled backward of a part computes again."""
        for tensor in tensors:
            self._recomputable[storage_id(tensor)] = part

    def add_sum(self, terms: list[Tensor], results: list[Tensor], part: str) -> None:
        """Note a sum, which the compiled backward of a part computes again."""
        smallest_term = float(min(term.nbytes for term in terms))
        for tensor in results:
            self._sums[storage_id(tensor)] = (part, smallest_term)

    def add_cast(self, source: Tensor, copies: list[Tensor]) -> None:
        """Note whether a copy in another type is a parameter's, or one that exists already."""
        key = storage_id(source)
        for copy in copies:
            copy_key = storage_id(copy)
            if key in self._parameters:
                self._parameter_copies.add(copy_key)
                continue
            first_copy = self._casts.setdefault((key, copy.dtype), copy_key)
            if first_copy != copy_key and copy.numel() == source.numel():
                self._repeated_casts.add(copy_key)

    def add_reads(self, inputs: list[Tensor], part: str) -> None:
        """Note what a product or an attention reads.

        Its backward reads it too, from memory, so that no kernel computes it again on the way.

        Args:
            inputs: What it reads.
            part: The part at work.
        """
        for tensor in inputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._recomputable or key in self._repeated_casts:
                continue
            part_of_input = self._recomputable.pop(key)
            if part_of_input == part and key in self._saved:
                self._count("fusible", -float(storage.nbytes()))

    def forget(self, key: int) -> None:
        """Remove a storage that has been freed, by its id()."""
        for storages in (self._saved, self._parameter_copies, self._repeated_casts):
            storages.discard(key)
        self._recomputable.pop(key, None)
        self._sums.pop(key, None)
        gone = [cast for cast, copy in self._casts.items() if key in (cast[0], copy)]
        for cast in gone:
            del self._casts[cast]
