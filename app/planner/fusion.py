"""The bytes and kernels of element-wise operations if a compiler fuses them.

Between two matrix products all element-wise operations, norms and rotary embeddings can be one
kernel: torch.compile's Inductor makes such kernels, and trainers like Megatron have them written by
hand. A value has to be written to memory only if something else reads it: a product, an operation
behind a product, another part of the model, or backward. Therefore

    the level of an operation          is the highest level of what it reads
    the level of a product's result    is one more than the highest level of what it reads
    a value is read                    once a level, if a product, an earlier level or another part
                                       has written it
    a value is written                 once, if a product, a later level or another part reads it,
                                       or backward needs it

and the operations of a level are one kernel, but for those of parameters alone (casts to 16
bits), each of which is one, because their sizes differ, and for sorting, choosing and scattering,
which nothing is fused with.

A value that no kernel has written is computed again where another kernel reads it, unless that
means to read more bytes than to write the value and to read it: a compiler inlines what comes
before a kernel, and its partitioner keeps little for backward. So backward reads the input of a
GELU that is written out, whatever autograd saves of it. See min_cut_rematerialization_partition in
torch/_functorch/partitioners.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from app.planner.storages import storage_id

UNFUSIBLE = {
    *("sort", "topk", "histc", "bincount", "nonzero"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_"),
    *("index_add", "index_add_", "index_copy", "index_copy_"),
}
"""Operations that are kernels of their own: those that route tokens to experts, above all.

Inductor calls torch's kernels for the first five (its fallbacks), and what it scatters is in memory
afterwards.
"""
Place = tuple[str, str]
"""(part of the model, phase)"""
REDUCTION = 64
"""A sum over at least so many numbers for each of its results is a kernel of its own, unless it is
one of rows: a kernel that has a row at hand sums it on the way, as in a norm or a softmax."""


@dataclass(kw_only=True)
class _Storage:
    """What is known of a storage.

    Args:
        size: Its bytes.
        place: Where it was made.
        level: The level of the operation that made it.
        is_written: Whether it is in memory rather than inside a kernel only.
        sources: What a kernel that computes it again reads: storages that are in memory.
        read_bytes: Bytes of it that each level has read.
    """

    size: float
    place: Place
    level: int
    is_written: bool
    sources: list[_Storage] = field(default_factory=list)
    read_bytes: dict[tuple[Place, int], float] = field(default_factory=dict)

    def unread_bytes(self, place: Place, level: int) -> float:
        """Bytes that a level has not read yet."""
        return self.size - self.read_bytes.get((place, level), 0.0)


class Fusion:
    """Follows storages through a trace and counts what fused kernels move.

    Args:
        count: Adds to a value of the current part (part_trace.py).
        parameters: id() of the storages of parameters, which are in memory from the start.
    """

    def __init__(self, count: Callable[[str, float], None], parameters: set[int]) -> None:
        self._count = count
        self._parameters = parameters
        self._storages: dict[int, _Storage] = {}
        self._kernels: set[tuple[Place, int]] = set()
        self._last_levels: dict[Place, int] = {}
        """The highest level so far of each place, that of the kernel that a program is at."""

    def elementwise(
        self,
        place: Place,
        name: str,
        *,
        inputs: list[Tensor],
        outputs: list[Tensor],
        skips_largest: bool,
    ) -> None:
        """Count an operation that can be fused.

        Args:
            place: The part and the phase.
            name: The operation.
            inputs: What it reads.
            outputs: What it writes.
            skips_largest: Whether it touches only a few places of its largest input.
        """
        if name == "sum" and _is_large_reduction(inputs, outputs):
            self.product(place, inputs, outputs)
            self._count(f"fused_moved_{place[1]}", float(inputs[0].nbytes))
            return
        skipped_numel = -1
        if skips_largest:
            skipped_numel = max((tensor.numel() for tensor in inputs), default=0)
        if name in UNFUSIBLE:
            self.product(place, inputs, outputs)
            moved = (x.nbytes for x in [*inputs, *outputs] if x.numel() != skipped_numel)
            self._count(f"fused_moved_{place[1]}", float(sum(moved)))
            return
        level = self._kernel_level(place, inputs)
        for tensor in inputs:
            if tensor.numel() != skipped_numel:
                self._read(place, level, tensor)
        if self._is_of_parameters(inputs):
            self._count(f"fused_operations_{place[1]}", 1)
        elif (place, level) not in self._kernels:
            self._kernels.add((place, level))
            self._count(f"fused_operations_{place[1]}", 1)
        sources = self._sources(inputs)
        for tensor in _largest_of_storages(outputs):
            self._add(tensor, place=place, level=level, is_written=False, sources=sources)

    def product(self, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Count a product or an attention, whose own reads and writes are part of its time."""
        level = self._level(place, inputs) + 1
        self._last_levels[place] = max(level, self._last_levels.get(place, 0))
        for tensor in _largest_of_storages(inputs):
            storage = self._storages.get(storage_id(tensor))
            if storage is not None:
                self._write(place, storage)
        self._count(f"fused_operations_{place[1]}", 1)
        for tensor in _largest_of_storages(outputs):
            self._add(tensor, place=place, level=level, is_written=True)

    def save(self, place: Place, key: int) -> None:
        """Write a storage that backward needs, by its id()."""
        if key in self._storages:
            self._write(place, self._storages[key])

    def forget(self, key: int) -> None:
        """Remove a storage that has been freed, by its id()."""
        self._storages.pop(key, None)

    def _kernel_level(self, place: Place, inputs: list[Tensor]) -> int:
        """The level of the kernel in which an operation is.

        What an operation reads of other places alone is at hand for the kernel that needs its
        result, which in the order of a program is the next.
        """
        level = self._level(place, inputs)
        last_level = self._last_levels.get(place, 0)
        self._last_levels[place] = max(level, last_level)
        return level or last_level

    def _level(self, place: Place, inputs: list[Tensor]) -> int:
        storages = (self._storages.get(storage_id(tensor)) for tensor in inputs)
        levels = (
            storage.level for storage in storages if storage is not None and storage.place == place
        )
        return max(levels, default=0)

    def _is_of_parameters(self, inputs: list[Tensor]) -> bool:
        return bool(inputs) and all(storage_id(tensor) in self._parameters for tensor in inputs)

    def _sources(self, inputs: list[Tensor]) -> list[_Storage]:
        """What a kernel has to read to compute what an operation makes of these inputs."""
        sources: dict[int, _Storage] = {}
        for tensor in inputs:
            storage = self._storages.get(storage_id(tensor))
            if storage is None:  # a parameter, which is small beside activations
                continue
            for source in [storage] if storage.is_written else storage.sources:
                sources[id(source)] = source
        return list(sources.values())

    def _add(
        self,
        tensor: Tensor,
        *,
        place: Place,
        level: int,
        is_written: bool,
        sources: Iterable[_Storage] = (),
    ) -> None:
        key = storage_id(tensor)
        if key in self._parameters:
            return
        self._storages[key] = _Storage(
            size=float(tensor.untyped_storage().nbytes()),
            place=place,
            level=level,
            is_written=is_written,
            sources=list(sources),
        )

    def _read(self, place: Place, level: int, tensor: Tensor) -> None:
        storage = self._storages.get(storage_id(tensor))
        if storage is None:  # a parameter, or a tensor that is older than the trace
            self._count(f"fused_moved_{place[1]}", float(tensor.nbytes))
            return
        is_inside_kernel = (
            storage.place == place and storage.level == level and not storage.is_written
        )
        if is_inside_kernel:
            return
        if self._is_computed_again(place, level, storage):
            for source in storage.sources:
                self._read_storage(place, level, source, source.size)
            return
        self._read_storage(place, level, storage, float(tensor.nbytes))
        self._write(place, storage)

    def _is_computed_again(self, place: Place, level: int, storage: _Storage) -> bool:
        """Whether a kernel computes again what another one has not written."""
        if storage.is_written or storage.place[0] != place[0]:
            return False
        to_read = sum(source.unread_bytes(place, level) for source in storage.sources)
        return to_read < 2 * storage.size  # to write it in the other kernel, and to read it

    def _read_storage(self, place: Place, level: int, storage: _Storage, size: float) -> None:
        newly_read = min(size, storage.unread_bytes(place, level))
        storage.read_bytes[place, level] = storage.read_bytes.get((place, level), 0.0) + newly_read
        self._count(f"fused_moved_{place[1]}", newly_read)

    def _write(self, place: Place, storage: _Storage) -> None:
        if not storage.is_written:
            storage.is_written = True
            self._count(f"fused_moved_{place[1]}", storage.size)


def _is_large_reduction(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    if not inputs or not outputs:
        return False
    rows = inputs[0].shape[:-1]
    if outputs[0].shape in (rows, (*rows, 1)):
        return False
    return inputs[0].numel() >= REDUCTION * outputs[0].numel()


def _largest_of_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """For each storage the largest of its tensors."""
    largest: dict[int, Tensor] = {}
    for tensor in tensors:
        key = storage_id(tensor)
        if key not in largest or tensor.numel() > largest[key].numel():
            largest[key] = tensor
    return list(largest.values())
