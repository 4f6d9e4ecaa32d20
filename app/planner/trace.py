"""Traces one forward and backward of a model and records what each part of it costs.

Under fake tensors nothing is computed and nothing allocated, so that a model of 70 billion
parameters is traced on a laptop. The same recorder works on real tensors, for models whose code
looks at values (read.py falls back to that).

A *part* is what comes before the first block, each kind of block, and what comes after the last
one. Of equal blocks (same class, parameter shapes and inputs) the first is traced; the others pass
on tensors of the right shapes.

Fused operations are recorded as GPUs have them (fused.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from app.data.loader import map_tensors, tensors
from app.planner.flex import traced_flex_attention
from app.planner.fused import Fused
from app.planner.fusion import Fusion, Place
from strategies.activation_checkpointing import is_kept
from strategies.pipeline.p2p import sent_dtype
from strategies.row_chunks import chunk_rows, observed_by
from strategies.tensor.loss import VocabularyLogits
from strategies.tensor.ops import ShapePeers
from strategies.torch_internals import OperationMode
from strategies.tree import tree_map

BEFORE, AFTER = "before", "after"
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


class Product(NamedTuple):
    """Matrix products of one operation: 2·m·n·k·batch FLOPs."""

    m: float
    n: float
    k: float
    batch: float


class Moment(NamedTuple):
    """What is alive when something has been allocated.

    Args:
        operation: What has allocated it, and in which phase.
        size: Bytes, without `chunk`.
        chunk: Bytes for each logit of a chunk whose rows do not grow with the batch.
    """

    operation: str
    size: float
    chunk: float

    @property
    def is_in_forward(self) -> bool:
        """Whether forward has allocated it."""
        return self.operation.startswith("forward")


@dataclass
class PartTrace:
    """The costs of one part for the batch that was traced.

    Args:
        values: By name, in bytes unless noted otherwise:

            moved_forward, moved_backward        read and written by what is not a product
            operations_forward, …_backward       how many operations are launched
            misaligned_forward, …_backward       FLOPs of batched products of misaligned rows
            aligned_2_forward, …_8_backward      FLOPs of other products whose rows begin at
                                                 multiples of 2, 4 or 8 bytes
            attention_forward, …_backward        FLOPs of fused attention
            weighted_attention_forward, …        the same, times how far the kernels are from their
                                                 best (fused.py)
            fused_moved_…, fused_operations_…    `moved` and `operations` if a compiler fuses them
            queries, keys                        numbers in queries, and in keys and values
            saved                                storages kept for backward, without parameters
            fusible                              of `saved`, what compiled kernels recompute
            copies                               of `saved`, parameters in the type of products
            kept                                 results that `selective` checkpointing keeps
            boundary                             the input of a block
            crossing                             the same, as a pipeline sends it
            chunked_rows, chunked_numbers        rows and logits of losses whose chunks are bounded
            sent, collectives                    by one tensor-parallel worker: bytes, and how many
                                                 collectives send them
            sent_forward, collectives_forward    of these, in forward
            sent_beside                          of `sent`, while backward multiplies for the
                                                 gradient of a weight
            rearranged_forward, …_backward       read and written to order the rows of several
                                                 samples for collectives
            regathered                           what a recomputed block has besides `saved`, as it
                                                 does not gather its input again
        products: The matrix products of forward and of backward.
        moments: What is alive after each allocation, beyond what is saved.
    """

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    products: dict[str, list[Product]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    moments: list[Moment] = field(default_factory=list)


@dataclass
class Trace:
    """What a model costs for one batch.

    Args:
        parts: By name; the kinds of blocks are called block0, block1 and so on.
        order: The part of each block, in the order of their calls.
    """

    parts: dict[str, PartTrace]
    order: list[str]


class CostRecorder(OperationMode):
    """Records the costs of each operation under the current part and phase.

    It observes the chunks of losses (strategies/row_chunks.py), too.

    Args:
        module: The model, whose parameters and buffers are not counted as activations.
        on_gpu: Whether what a GPU computes in one kernel allocates nothing but its results.
        is_fake: Whether tensors are fake, so that of equal chunks one is enough.
    """

    def __init__(self, module: nn.Module, *, on_gpu: bool = True, is_fake: bool = False) -> None:
        super().__init__()
        self.skips_equal_chunks = is_fake
        self.compiles_kernels = on_gpu
        self.parts: dict[str, PartTrace] = defaultdict(PartTrace)
        self.part = BEFORE
        self.phase = "forward"
        self._times = 1
        # Storages are identified by id() as long as they are alive.
        state = [*module.parameters(), *module.buffers()]
        self._parameters = {_storage_id(tensor) for tensor in state}
        self._alive: dict[int, float] = {}  # bytes of the other storages that are alive
        self._alive_bytes = 0.0
        self._in_kernel: dict[int, float] | None = None
        """Bytes of the storages that the operations of one kernel have made."""
        self._chunk: tuple[float, int] | None = None
        """Bytes that were alive before the chunk at work, and its logits."""
        self._is_later_chunk = False
        self._saved: set[int] = set()
        self._recomputable: dict[int, str] = {}
        """Storages that element-wise operations, norms and casts wrote, with their part.

        The compiled backward of that part computes them again. Another part has to save them.
        """
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        """The first copy of a storage in another type that was made in this part's forward."""
        self._repeated_casts: set[int] = set()
        """Further copies of the same storage in the same type, which a compiler does not make."""
        self._sums: dict[int, tuple[str, float]] = {}
        """For the storage of a sum, its part and the bytes of its smallest term.

        The compiled backward of that part computes the sum again and keeps only that term for it.
        """
        self._parameter_copies: set[int] = set()
        """Storages of parameters in another type."""
        self._part_borders: list[weakref.ref[Tensor]] = []
        self._fusion = Fusion(self.count, self._parameters)

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
        self._is_later_chunk = not is_first
        if is_bounded:
            self._chunk = self._alive_bytes, chunk_rows(rows, words) * words
            part.values["chunked_rows"] = rows
            part.values["chunked_numbers"] = rows * words
        self._times = times
        yield
        self._times = 1
        products.extend(products[before:] * (times - 1))
        self._chunk = None
        self._is_later_chunk = False

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Count only those storages as allocated and written that are alive at the end."""
        self._in_kernel = {}
        yield
        results = self._in_kernel
        self._in_kernel = None
        self.count(f"fused_operations_{self.phase}", CALL_OPERATIONS)
        for key, size in results.items():
            self._add_alive("kernel", key, size)
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
        new = [tensor for tensor in outputs if self._allocate(name, tensor)]
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
            self._record_product(name, flops, inputs=inputs, outputs=outputs)
        elif name not in FREE and (new or name.endswith("_") or "out" in kwargs):
            self._record_elementwise(name, inputs=inputs, outputs=outputs)
            if name in PROMOTING and not self.compiles_kernels:
                self._record_promotion(name, inputs, outputs[0])
            if _is_sum(name, inputs):
                smallest_term = float(min(term.nbytes for term in inputs))
                for tensor in new:
                    self._sums[_storage_id(tensor)] = (self.part, smallest_term)
            elif not is_kept(func):
                for tensor in new:
                    self._recomputable[_storage_id(tensor)] = self.part
        if name == "_to_copy":
            self._record_cast(inputs[0], new)
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

    def _record_cast(self, source: Tensor, copies: list[Tensor]) -> None:
        """Note whether a copy in another type is a parameter's, or one that exists already."""
        key = _storage_id(source)
        for copy in copies:
            copy_key = _storage_id(copy)
            if key in self._parameters:
                self._parameter_copies.add(copy_key)
                continue
            first_copy = self._casts.setdefault((key, copy.dtype), copy_key)
            if first_copy != copy_key and copy.numel() == source.numel():
                self._repeated_casts.add(copy_key)

    def _record_promotion(self, name: str, inputs: list[Tensor], output: Tensor) -> None:
        """Note the moment at which a CPU has copies of operands of another type."""
        operands = [*(x for x in inputs if x.dim()), output]
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in operands))
        copied = sum(x.numel() for x in operands if x.dtype != dtype)
        if copied:
            self._add_moment(name, float(copied * dtype.itemsize))

    @property
    def _place(self) -> Place:
        return self.part, self.phase

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
            flops: Of its products.
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
        """Record what a product or an attention reads.

        Its backward reads it too, from memory, so that no kernel computes it again on the way.
        """
        for tensor in inputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._recomputable or key in self._repeated_casts:
                continue
            part = self._recomputable.pop(key)
            if part == self.part and key in self._saved:
                self.count("fusible", -float(storage.nbytes()))

    def _allocate(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor's storage is new. It is alive until nothing refers to it.

        Args:
            name: The operation that the tensor is a result of.
            tensor: The tensor.
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
            self._add_alive(name, key, size)
        elif key in self._in_kernel:
            return False
        else:
            self._in_kernel[key] = size
        weakref.finalize(storage, self._free, key)
        return True

    def _add_alive(self, name: str, key: int, size: float) -> None:
        """Count a storage as alive, and note the moment.

        Args:
            name: The operation that has made it.
            key: The storage's id().
            size: Its bytes.
        """
        self._alive[key] = size
        self._alive_bytes += size
        self._add_moment(name)

    def _add_moment(self, name: str, copies: float = 0.0) -> None:
        """Note what is alive.

        Args:
            name: The operation that has made it.
            copies: Bytes that the operation itself needs besides.
        """
        if self._is_later_chunk:  # it needs no more than the first
            return
        alive = self._alive_bytes + copies
        moments = self.parts[self.part].moments
        operation = f"{self.phase} {name}"
        if self._chunk is None:
            moments.append(Moment(operation, alive, 0.0))
            return
        before, numbers = self._chunk
        moments.append(Moment(operation, before, (alive - before) / numbers))

    def _free(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key, 0.0)
        if self._in_kernel is not None:
            self._in_kernel.pop(key, None)
        for storages in (self._saved, self._parameter_copies, self._repeated_casts):
            storages.discard(key)
        self._recomputable.pop(key, None)
        self._sums.pop(key, None)
        gone = [cast for cast, copy in self._casts.items() if key in (cast[0], copy)]
        for cast in gone:
            del self._casts[cast]
        self._fusion.forget(key)

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves; for saved_tensors_hooks."""
        key = _storage_id(tensor)
        if key in self._parameters or key in self._saved:
            return tensor
        self._saved.add(key)
        size = float(tensor.untyped_storage().nbytes())
        self.count("saved", size)
        if key in self._parameter_copies:
            self.count("copies", size)
        if self._recomputable.get(key) == self.part:
            self.count("fusible", size)
            return tensor
        self._fusion.save(self._place, key)
        part, smallest_term = self._sums.get(key, ("", size))
        if part == self.part:
            self.count("fusible", size - smallest_term)
        return tensor

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


def watch(
    module: nn.Module,
    blocks: list[str],
    loss: Callable[[nn.Module], Tensor],
    peers: ShapePeers | None = None,
    *,
    on_gpu: bool = True,
    is_fake: bool = False,
) -> Trace:
    """Run a forward and a backward once and record what the parts cost.

    It works on fake and on real tensors.

    Args:
        module: The model. It is changed, and of no use afterwards.
        blocks: The names of its repeating blocks.
        loss: Computes the loss of the model that it is called with.
        peers: Of a model that is split by tensor parallelism, what counts its collectives.
        on_gpu: Whether fused operations are those of a GPU (fused.py).
        is_fake: Whether tensors are fake, so that of equal chunks of a loss one is enough.
    """
    recorder = CostRecorder(module, on_gpu=on_gpu, is_fake=is_fake)
    order: list[str] = []
    for parameter in module.parameters():
        if parameter.requires_grad:  # gradients are counted by the strategies' cost functions
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    if peers is not None:
        peers.current_part = lambda: recorder.part
    traced_blocks: dict[Hashable, _TracedBlock] = {}
    for block in dict.fromkeys(module.get_submodule(name) for name in blocks):
        block.forward = _traced_forward(block, recorder, order, traced_blocks)
    fused = Fused(recorder, on_gpu=on_gpu)
    flex = traced_flex_attention(fused) if on_gpu else contextlib.nullcontext()
    with recorder, fused, flex, observed_by(recorder):
        with saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            value = loss(module)
        sent_forward = dict(peers.sent_bytes) if peers is not None else {}
        collectives_forward = dict(peers.calls) if peers is not None else {}
        rearranged_forward = dict(peers.rearranged_bytes) if peers is not None else {}
        recorder.phase = "backward"
        recorder.part = AFTER if order else BEFORE
        # Called with a tensor, `backward` would be dispatched to Fused and run outside of it.
        torch.autograd.backward(get_gradient_edge(value), torch.ones_like(value))
    if peers is not None:
        for name, part in recorder.parts.items():
            part.values["sent"] = peers.sent_bytes.get(name, 0.0)
            part.values["collectives"] = peers.calls.get(name, 0.0)
            part.values["regathered"] = peers.regathered_bytes.get(name, 0.0)
            part.values["sent_beside"] = peers.sent_beside_bytes.get(name, 0.0)
            rearranged = rearranged_forward.get(name, 0.0)
            part.values["rearranged_forward"] = rearranged
            rearranged_backward = peers.rearranged_bytes.get(name, 0.0) - rearranged
            part.values["rearranged_backward"] = rearranged_backward
            part.values["sent_forward"] = sent_forward.get(name, 0.0)
            part.values["collectives_forward"] = collectives_forward.get(name, 0.0)
    return Trace(_without_saved(recorder.parts, order), order)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _without_saved(parts: dict[str, PartTrace], order: list[str]) -> dict[str, PartTrace]:
    """The parts in order, with moments less what the parts up to each of them have saved."""
    ordered = {}
    saved_bytes = 0.0
    for name in (BEFORE, *dict.fromkeys(order), AFTER):
        if name not in parts:
            continue
        part = parts[name]
        saved_bytes += part.values["saved"]
        part.moments = [moment._replace(size=moment.size - saved_bytes) for moment in part.moments]
        ordered[name] = part
    return ordered


def block_signature(block: nn.Module) -> Hashable:
    """What blocks have in common that cost the same for equal inputs."""
    parameters = tuple((tuple(p.shape), p.requires_grad) for p in block.parameters())
    return type(block), parameters


@dataclass(frozen=True)
class _TensorLike:
    """The shape and type of a tensor, in place of it."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _TracedBlock:
    """A block that was traced: its part, and its output with a _TensorLike for each tensor."""

    part: str
    output: Any


class _Skip(torch.autograd.Function):
    """Stands for a block that equals a traced one: an output of the right shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: _TensorLike) -> Tensor:
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        return x.new_empty(like.shape, dtype=like.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype), None


def _skipped(block_input: Tensor, leaf: Any) -> Any:
    """A value of the output of a skipped block: the input itself if that is like it."""
    if not isinstance(leaf, _TensorLike):
        return leaf
    if (leaf.shape, leaf.dtype) == (block_input.shape, block_input.dtype):
        return block_input
    return _Skip.apply(block_input, leaf)


def _traced_forward(
    block: nn.Module,
    recorder: CostRecorder,
    order: list[str],
    traced_blocks: dict[Hashable, _TracedBlock],
) -> Callable[..., Any]:
    """A block's forward that is run and traced once for equal blocks, and skipped after that.

    Args:
        block: The block.
        recorder: Records the costs.
        order: Gets the part of each block that is called.
        traced_blocks: Those traced so far, shared by all blocks of the model.
    """
    forward = block.forward
    signature = block_signature(block)
    is_frozen = not all(p.requires_grad for p in block.parameters())

    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = tensors((args, kwargs))
        first_input = inputs[0] if inputs else None
        block_input = next((tensor for tensor in inputs if tensor.requires_grad), first_input)
        has_gradient = block_input is not None and block_input.requires_grad
        # Behind a frozen embedding the first block passes no gradient on to its input.
        ends_backward = is_frozen and not has_gradient
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        key = (signature, ends_backward, shapes)
        traced = traced_blocks.get(key)
        if traced is not None and block_input is not None and has_gradient:
            order.append(traced.part)
            return tree_map(lambda leaf: _skipped(block_input, leaf), traced.output)

        part = f"block{len(traced_blocks)}"
        previous_part = _part_before_block(recorder.part, order)
        order.append(part)
        recorder.part = part
        if block_input is not None:
            values = recorder.parts[part].values
            values["boundary"] = block_input.nbytes
            values["crossing"] = block_input.numel() * _sent_itemsize(block_input)
            recorder.enter_with_gradient(block_input, previous_part)
        output = forward(*args, **kwargs)
        for tensor in tensors(output):
            recorder.enter_with_gradient(tensor, part)
        recorder.part = AFTER
        output_like = map_tensors(lambda tensor: _TensorLike(tensor.shape, tensor.dtype), output)
        traced_blocks[key] = _TracedBlock(part, output_like)
        return output

    return call


def _part_before_block(part: str, order: list[str]) -> str:
    """The part that backward enters behind the block that is called now."""
    if part != AFTER:
        return part
    return order[-1] if order else BEFORE


def _sent_itemsize(tensor: Tensor) -> int:
    """Bytes of a number of a tensor that a pipeline sends."""
    autocast_dtype = None
    if torch.is_autocast_enabled("cpu"):
        autocast_dtype = torch.get_autocast_dtype("cpu")
    return sent_dtype(tensor, autocast_dtype).itemsize


def _storage_id(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


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
