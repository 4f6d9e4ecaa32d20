"""Records the costs of each operation of a model that runs, on fake or on real tensors."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from app.data.loader import tensors
from app.planner.fusion import Fusion, Place
from app.planner.part_trace import BEFORE, Moment, PartTrace, Product
from app.planner.saved_storages import SavedStorages
from app.planner.storages import LiveStorages, storage_id
from strategies.activation_checkpointing import is_kept
from strategies.row_chunks import chunk_rows
from strategies.torch_internals import OperationMode

INDEXED = {"gather", "scatter_add", "scatter_add_", "nll_loss_forward"}
"""Operations that touch a few places of their largest tensor and move the bytes of the others."""
BATCHED = {"bmm", "baddbmm"}
FREE = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
}
"""Operations that move no bytes."""
CALL_OPERATIONS = 4
"""What a call of a compiled function takes the host, in operations.

Its guards and its kernel count as two. Two more copy and add up its results, which the compiled
kernels of a part would otherwise count once for all calls. An assumption, not a measurement.
"""
PROMOTING = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"}
"""Operations of which a CPU's kernel first copies an operand of another type into the result's."""


class CostRecorder(OperationMode):
    """Records the costs of each operation under the current part and phase.

    It observes the chunks of losses (strategies/row_chunks.py), too.

    Args:
        module: The model, whose parameters and buffers are not counted as activations.
        on_gpu: Whether what a GPU computes in one kernel allocates nothing but its results.
        is_fake: Whether tensors are fake, so that of equal chunks one is enough.

    Attributes:
        parts: The costs so far of each part, by its name.
        part: The name of the current part.
        phase: The current phase, forward or backward.
    """

    def __init__(self, module: nn.Module, *, on_gpu: bool = True, is_fake: bool = False) -> None:
        super().__init__()
        self.skips_equal_chunks = is_fake
        self.compiles_kernels = on_gpu
        self.parts: dict[str, PartTrace] = defaultdict(PartTrace)
        self.part = BEFORE
        self.phase = "forward"
        self._times = 1
        parameters = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._live = LiveStorages(parameters, note=self._note_moment, forget=self._forget)
        self._saved = SavedStorages(parameters, self.count)
        self._fusion = Fusion(self.count, parameters)
        self._part_borders: list[weakref.ref[Tensor]] = []

    @property
    def _place(self) -> Place:
        return self.part, self.phase

    def count(self, name: str, value: float) -> None:
        """Add to a value of the current part."""
        self.parts[self.part].values[name] += value * self._times

    @contextlib.contextmanager
    def chunk(
        self, rows: int, words: int, *, times: int, is_first: bool, is_bounded: bool
    ) -> Iterator[None]:
        """Record a chunk as often as it stands for others, in the order of their computation.

        Its arguments are those of `strategies.row_chunks.ChunkObserver.chunk`.
        """
        part = self.parts[self.part]
        products = part.products[self.phase]
        before = len(products)
        logits = None
        if is_bounded:
            logits = chunk_rows(rows, words) * words
            part.values["chunked_rows"] = rows
            part.values["chunked_numbers"] = rows * words
        self._times = times
        with self._live.chunk(logits, is_first=is_first):
            yield
        self._times = 1
        products.extend(products[before:] * (times - 1))

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Count only those storages as allocated and written that are alive at the end."""
        with self._live.kernel() as results:
            yield
        self.count(f"fused_operations_{self.phase}", CALL_OPERATIONS)
        for key, size in results.items():
            self._live.add("kernel", key, size)
            self._fusion.save(self._place, key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        # Under fake tensors three of four operations only ask for the device of a tensor.
        if packet is torch.ops.prim.device:
            return func(*args, **kwargs)
        name = packet.__name__
        result = func(*args, **kwargs)
        outputs = tensors(result)
        inputs = tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
        new = [tensor for tensor in outputs if self._live.allocate(name, tensor)]
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
            self._record_product(name, flops, inputs=inputs, outputs=outputs)
        elif name not in FREE and (new or name.endswith("_") or "out" in kwargs):
            self._record_elementwise(name, inputs=inputs, outputs=outputs)
            if _is_sum(name, inputs):
                self._saved.add_sum(inputs, new, self.part)
            elif not is_kept(func):
                self._saved.add_recomputable(new, self.part)
        if name == "_to_copy":
            self._saved.add_cast(inputs[0], new)
        if self.phase == "forward" and is_kept(func):
            self.count("kept", sum(tensor.nbytes for tensor in new))
        return result

    def _record_product(
        self, name: str, flops: float, *, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        like = inputs[0] if name == "convolution_backward" else outputs[0]
        self.parts[self.part].products[self.phase].append(_product(like, name, flops))
        self.record_reads(inputs)
        self._fusion.product(self._place, inputs, outputs)
        alignment = min(_alignment(matrix) for matrix in [*inputs, *outputs])
        if alignment < 16 and "convolution" not in name:
            kind = "misaligned" if name in BATCHED else f"aligned_{max(alignment, 2)}"
            self.count(f"{kind}_{self.phase}", flops)
        self.count(f"operations_{self.phase}", 1)

    def _record_elementwise(
        self, name: str, *, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self.count(f"moved_{self.phase}", _moved_bytes(name, [*inputs, *outputs]))
        self.count(f"operations_{self.phase}", 1)
        self._fusion.elementwise(
            self._place,
            name,
            inputs=inputs,
            outputs=outputs,
            skips_largest=name in INDEXED,
        )
        if name in PROMOTING and not self.compiles_kernels:
            self._record_promotion(name, inputs, outputs[0])

    def _record_promotion(self, name: str, inputs: list[Tensor], output: Tensor) -> None:
        """Note the moment at which a CPU has copies of operands of another type."""
        operands = [*(x for x in inputs if x.dim()), output]
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in operands))
        copied = sum(x.numel() for x in operands if x.dtype != dtype)
        if copied:
            self._live.note_moment(name, float(copied * dtype.itemsize))

    def record_attention(
        self,
        *,
        flops: float,
        weight: float,
        kept_bytes: float,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Record an attention that `Fused` has replaced.

        Args:
            flops: FLOPs of its products.
            weight: How many times as long as the kernel at its best these take.
            kept_bytes: Bytes of its results.
            inputs: What it reads.
            outputs: What it writes.
        """
        self.count(f"attention_{self.phase}", flops)
        self.count(f"weighted_attention_{self.phase}", flops * weight)
        self.count(f"operations_{self.phase}", 1)
        self._fusion.product(self._place, inputs, outputs)
        if self.phase == "forward":
            self.count("kept", kept_bytes)

    def record_reads(self, inputs: list[Tensor]) -> None:
        """Record what a product or an attention reads."""
        self._saved.add_reads(inputs, self.part)

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves; for saved_tensors_hooks."""
        if self._saved.save(tensor, self.part):
            self._fusion.save(self._place, storage_id(tensor))
        return tensor

    def _note_moment(self, operation: str, size: float, chunk: float) -> None:
        moment = Moment(f"{self.phase} {operation}", size, chunk)
        self.parts[self.part].moments.append(moment)

    def _forget(self, key: int) -> None:
        """Remove a storage that has been freed, by its id()."""
        self._saved.forget(key)
        self._fusion.forget(key)

    def enter_with_gradient(self, tensor: Tensor, part: str) -> None:
        """Let backward enter a part at the moment when it has the gradient of a tensor.

        The first part that is named for a tensor counts: what a block passes to the next block
        belongs to the block that made it.
        """
        if not tensor.requires_grad:
            return
        if any(border() is tensor for border in self._part_borders):
            return
        self._part_borders.append(weakref.ref(tensor))

        def enter(_: Tensor) -> None:
            self.part = part

        tensor.register_hook(enter)


def _moved_bytes(name: str, operands: list[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    skipped_numel = -1
    if name in INDEXED:
        skipped_numel = max((tensor.numel() for tensor in operands), default=0)
    return float(sum(tensor.nbytes for tensor in operands if tensor.numel() != skipped_numel))


def _is_sum(name: str, inputs: list[Tensor]) -> bool:
    """Whether it adds tensors of one shape, such as a layer's output to the residual stream."""
    return name == "add" and len(inputs) > 1 and len({tensor.shape for tensor in inputs}) == 1


def _alignment(matrix: Tensor) -> int:
    """The bytes of a power of two, at most 16, at multiples of which all rows begin."""
    if matrix.dim() < 2:
        return 16
    row_bytes = max(matrix.stride()[-2:]) * matrix.element_size()
    return math.gcd(row_bytes, 16)


def _product(like: Tensor, name: str, flops: float) -> Product:
    """The product with the FLOPs of an operation.

    Args:
        like: The operation's result, or what its result is the gradient of.
        name: The operation.
        flops: Its FLOPs.
    """
    numel = max(like.numel(), 1)
    columns = max(like.shape[1 if "convolution" in name else -1], 1)
    batch = max(like.shape[0], 1) if name in BATCHED else 1
    return Product(m=numel / columns / batch, n=columns, k=flops / (2.0 * numel), batch=batch)
