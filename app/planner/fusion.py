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
which nothing is fused with. What is saved for backward only because an operation is not fused (the
input of a norm or an activation, beside its output) is computed again by the compiler's
partitioner. Backward then reads what it is computed from, which is assumed to be of the same size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

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
"""A sum over at least so many numbers for each of its results is a kernel of its own."""


@dataclass(kw_only=True)
class _Storage:
    """What is known of a storage.

    Args:
        size: Its bytes.
        place: Where it was made.
        level: The level of the operation that made it.
        is_written: Whether it is in memory rather than inside a kernel only.
        read_bytes: Bytes of it that each level has read.
    """

    size: float
    place: Place
    level: int
    is_written: bool
    read_bytes: dict[tuple[Place, int], float] = field(default_factory=dict)


class Fusion:
    """Follows storages through a trace and counts what fused kernels move.

    Args:
        count: Adds to a value of the current part (trace.py).
        parameters: id() of the storages of parameters, which are in memory from the start.
    """

    def __init__(self, count: Callable[[str, float], None], parameters: set[int]) -> None:
        self._count = count
        self._parameters = parameters
        self._storages: dict[int, _Storage] = {}
        self._kernels: set[tuple[Place, int]] = set()

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
        level = self._level(place, inputs)
        for tensor in inputs:
            if tensor.numel() != skipped_numel:
                self._read(place, level, tensor)
        if self._is_of_parameters(inputs):
            self._count(f"fused_operations_{place[1]}", 1)
        elif (place, level) not in self._kernels:
            self._kernels.add((place, level))
            self._count(f"fused_operations_{place[1]}", 1)
        for tensor in _largest_of_storages(outputs):
            self._add(tensor, place=place, level=level, is_written=False)

    def product(self, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Count a product or an attention, whose own reads and writes are part of its time."""
        level = self._level(place, inputs) + 1
        for tensor in _largest_of_storages(inputs):
            storage = self._storages.get(_storage_id(tensor))
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

    def _level(self, place: Place, inputs: list[Tensor]) -> int:
        storages = (self._storages.get(_storage_id(tensor)) for tensor in inputs)
        levels = (
            storage.level for storage in storages if storage is not None and storage.place == place
        )
        return max(levels, default=0)

    def _is_of_parameters(self, inputs: list[Tensor]) -> bool:
        return bool(inputs) and all(_storage_id(tensor) in self._parameters for tensor in inputs)

    def _add(self, tensor: Tensor, *, place: Place, level: int, is_written: bool) -> None:
        key = _storage_id(tensor)
        if key in self._parameters:
            return
        self._storages[key] = _Storage(
            size=float(tensor.untyped_storage().nbytes()),
            place=place,
            level=level,
            is_written=is_written,
        )

    def _read(self, place: Place, level: int, tensor: Tensor) -> None:
        storage = self._storages.get(_storage_id(tensor))
        if storage is None:  # a parameter, or a tensor that is older than the trace
            self._count(f"fused_moved_{place[1]}", float(tensor.nbytes))
            return
        is_inside_kernel = (
            storage.place == place and storage.level == level and not storage.is_written
        )
        if is_inside_kernel:
            return
        already_read = storage.read_bytes.get((place, level), 0.0)
        newly_read = min(float(tensor.nbytes), storage.size - already_read)
        storage.read_bytes[place, level] = already_read + newly_read
        self._count(f"fused_moved_{place[1]}", newly_read)
        self._write(place, storage)

    def _write(self, place: Place, storage: _Storage) -> None:
        if not storage.is_written:
            storage.is_written = True
            self._count(f"fused_moved_{place[1]}", storage.size)


def _is_large_reduction(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    if not inputs or not outputs:
        return False
    return inputs[0].numel() >= REDUCTION * outputs[0].numel()


def _largest_of_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """For each storage the largest of its tensors."""
    largest: dict[int, Tensor] = {}
    for tensor in tensors:
        key = _storage_id(tensor)
        if key not in largest or tensor.numel() > largest[key].numel():
            largest[key] = tensor
    return list(largest.values())


def _storage_id(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
