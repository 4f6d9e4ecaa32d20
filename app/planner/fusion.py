"""What element-wise operations move where a compiler fuses them, counted beside what they move one by one.

Between two matrix products everything element-wise, norms and RoPE can be one kernel: torch.compile's Inductor makes
such kernels, and trainers like Megatron have them written by hand. A value needs memory only if something else reads
it: a product, an operation behind a product, another part of the model, or backward. So

    level of an operation      the highest level among what it reads
    level of a product's result       one more than the highest among what it reads
    read                       once a level, what a product, an earlier level or another part has written
    written                    once, what is read by a product, by a later level or by another part, or kept

and a level is one kernel. What is kept for backward only because an operation is not fused (a norm's or an activation's
input beside its output) is computed again, by the compiler's partitioner; backward then reads what that is made of,
which is taken to be as large.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

Place = tuple[str, str]
"""Part of the model, and phase."""
SUMMED = 64
"""A result this many times smaller than what is summed is that of another kernel, which reads all of it again."""


@dataclass
class _Storage:
    """What is known of one storage."""

    size: float
    place: Place
    level: int
    is_written: bool  # whether it is in memory, or only on its way inside of a kernel
    read_at: dict[tuple[Place, int], float] = field(default_factory=dict)
    """Bytes of it that each level has read."""


class Fusion:
    """Follows storages through a trace and counts what fused kernels move.

    Args:
        count: Adds to a value of the part that is current (trace.py).
        parameters: Storages of the model's own, which are in memory from the start.
    """

    def __init__(self, count: Callable[[str, float], None], parameters: set[int]) -> None:
        self.count = count
        self.parameters = parameters
        self.storages: dict[int, _Storage] = {}
        self.kernels: set[tuple[Place, int]] = set()

    def elementwise(self, place: Place, name: str, inputs: list[Tensor], outputs: list[Tensor], *, free: bool) -> None:
        """An operation that can be fused. free: of its largest tensor it touches a few places only."""
        if name == "sum" and inputs and outputs and inputs[0].numel() >= SUMMED * outputs[0].numel():
            self.product(place, inputs, outputs)  # a kernel of its own
            self.count(f"fused_moved_{place[1]}", float(inputs[0].nbytes))
            return
        level = self._level(place, inputs)
        largest = max((t.numel() for t in inputs), default=0) if free else -1
        for tensor in inputs:
            if tensor.numel() != largest:
                self._read(place, level, tensor)
        if (place, level) not in self.kernels:
            self.kernels.add((place, level))
            self.count(f"fused_operations_{place[1]}", 1)
        for tensor in _distinct(outputs):
            self._make(place, level, tensor, is_written=False)

    def product(self, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A product or an attention, whose own reading and writing are part of its time."""
        level = self._level(place, inputs) + 1
        for tensor in _distinct(inputs):
            storage = self.storages.get(id(tensor.untyped_storage()))
            if storage is not None:
                self._write(place, storage)
        self.count(f"fused_operations_{place[1]}", 1)
        for tensor in _distinct(outputs):
            self._make(place, level, tensor, is_written=True)

    def save(self, place: Place, key: int) -> None:
        """Backward needs it."""
        if key in self.storages:
            self._write(place, self.storages[key])

    def forget(self, key: int) -> None:
        """The storage is gone."""
        self.storages.pop(key, None)

    def _level(self, place: Place, inputs: list[Tensor]) -> int:
        known = (self.storages.get(id(tensor.untyped_storage())) for tensor in inputs)
        return max((storage.level for storage in known if storage is not None and storage.place == place), default=0)

    def _make(self, place: Place, level: int, tensor: Tensor, *, is_written: bool) -> None:
        key = id(tensor.untyped_storage())
        if key not in self.parameters:
            self.storages[key] = _Storage(float(tensor.untyped_storage().nbytes()), place, level, is_written)

    def _read(self, place: Place, level: int, tensor: Tensor) -> None:
        key = id(tensor.untyped_storage())
        storage = self.storages.get(key)
        if storage is None:  # a parameter, or what was there before
            self.count(f"fused_moved_{place[1]}", float(tensor.nbytes))
            return
        is_inside = storage.place == place and storage.level == level and not storage.is_written
        if not is_inside:
            read = storage.read_at.get((place, level), 0.0)
            more = min(float(tensor.nbytes), storage.size - read)
            storage.read_at[place, level] = read + more
            self.count(f"fused_moved_{place[1]}", more)
            self._write(place, storage)

    def _write(self, place: Place, storage: _Storage) -> None:
        if not storage.is_written:
            storage.is_written = True
            self.count(f"fused_moved_{place[1]}", storage.size)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each storage: the largest."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        key = id(tensor.untyped_storage())
        if key not in found or tensor.numel() > found[key].numel():
            found[key] = tensor
    return list(found.values())
