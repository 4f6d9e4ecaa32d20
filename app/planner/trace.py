"""Watches one forward and backward of a model and writes down what each part of it costs.

Under fake tensors nothing is computed and nothing allocated: a 70-billion-parameter model is watched on a laptop. The
same watcher works on real tensors, for models whose code looks at values (read.py falls back to that).

A *part* is what is before the first block, each kind of block, and what is after the last one. Blocks that are alike
(class, parameter shapes, inputs) are watched once; the others pass shapes through.

Fused operations are watched as GPUs have them (fused.py).
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from app.data.loader import map_tensors, tensors
from app.planner.fused import Fused
from app.planner.fusion import Fusion
from strategies.activation_checkpointing import is_kept
from strategies.pipeline.p2p import sent_dtype
from strategies.tensor.loss import VocabularyLogits
from strategies.tensor.ops import ShapePeers
from strategies.torch_internals import OperationMode
from strategies.tree import tree_map

BEFORE, AFTER = "before", "after"
INDEXED = {"gather", "scatter_add", "scatter_add_", "nll_loss_forward"}
"""Operations that touch a few places of their largest tensor: its other tensors are what they move."""
BATCHED = {"bmm", "baddbmm"}
FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
Product = tuple[float, float, float, float]
"""m, n, k, number in a batch: 2·m·n·k·number FLOPs."""


@dataclass
class PartTrace:
    """One part's costs for the batch that was traced.

    values, in bytes unless said otherwise:
        moved_forward, moved_backward            read and written by all that is not a product
        operations_forward, …_backward           how many are launched
        misaligned_forward, …_backward           FLOPs of batched products of misaligned rows
        attention_forward, …_backward            FLOPs of fused attention
        attending_forward, …_backward            the same, weighed by how far kernels are from their best (fused.py)
        fused_moved_…, fused_operations_…        of `moved` and `operations`, what is left where a compiler fuses
        queries, keys                            numbers of its queries, of its keys and values
        saved                                    distinct storages kept for backward, parameters excluded
        fusible                                  of `saved`, what compiled kernels compute again on their way
        copies                                   of `saved`, parameters in the type of products (autocast)
        kept                                     results that `selective` checkpointing keeps
        boundary, crossing                       what flows into a block; the same as a pipeline sends it
        forward_extra, extra                     alive at the worst moment of forward, of backward, beyond what is saved
        sent, calls                              by one tensor-parallel worker: bytes, and number of collectives
        sent_forward, calls_forward              of these, in forward
        again                                    that a recomputed block has besides `saved`: it gathers no input again
    """

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    products: dict[str, list[Product]] = field(default_factory=lambda: {"forward": [], "backward": []})


@dataclass
class Trace:
    parts: dict[str, PartTrace]
    order: list[str]  # the part of each block, in the order they were called


class Watcher(OperationMode):
    """Counts what passes by, for the part and phase that are current."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parts: dict[str, PartTrace] = defaultdict(PartTrace)
        self.part, self.phase = BEFORE, "forward"
        self.parameters = {id(p.untyped_storage()) for p in [*module.parameters(), *module.buffers()]}
        self.sizes: dict[int, float] = {}  # of the storages that are alive
        self.live = 0.0  # their sum
        self.saved: set[int] = set()
        self.fusible: dict[int, str] = {}
        """Of storages that element-wise operations, norms and casts have written, the part that did, whose compiled
        backward has them again. What another part saves of them, it saves."""
        self.casts: dict[tuple[int, torch.dtype], int] = {}
        """Of a storage in another type, the first that was made in this forward of a part."""
        self.doubles: set[int] = set()
        """Storages of further casts of the same to the same, which a compiler does not make."""
        self.smaller: dict[int, tuple[str, float]] = {}
        """Of a sum's storage the part that made it, whose compiled backward has it again, and the bytes that it keeps
        for that, its smallest term's."""
        self.copies: set[int] = set()
        """Storages of parameters in another type."""
        self.entered: list[weakref.ref[Tensor]] = []
        self.fusion = Fusion(self.count, self.parameters)

    def count(self, name: str, value: float) -> None:
        self.parts[self.part].values[name] += value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is torch.ops.prim.device:  # three of four operations under fake tensors only ask where a tensor is
            return func(*args, **kwargs)
        name, out = packet.__name__, func(*args, **kwargs)
        outputs = tensors(out)
        given = {key: value for key, value in kwargs.items() if key != "out"}
        inputs = tensors((args, given))
        fresh = [t for t in outputs if self._allocate(t)]
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            like = inputs[0] if name == "convolution_backward" else outputs[0]
            self.parts[self.part].products[self.phase].append(_product(like, name, flops))
            self.read_whole(inputs)
            self.fusion.product(self._place, inputs, outputs)
            if name in BATCHED and not all(map(_aligned, [*inputs, *outputs])):
                self.count(f"misaligned_{self.phase}", flops)
            self.count(f"operations_{self.phase}", 1)
        elif name not in FREE and (fresh or name.endswith("_") or "out" in kwargs):
            self.count(f"moved_{self.phase}", _moved(name, [*inputs, *outputs]))
            self.count(f"operations_{self.phase}", 1)
            self.fusion.elementwise(self._place, name, inputs, outputs, free=name in INDEXED)
            if _is_sum(name, inputs):
                smallest = float(min(term.nbytes for term in inputs))
                self.smaller |= {id(tensor.untyped_storage()): (self.part, smallest) for tensor in fresh}
            elif not is_kept(func):
                self.fusible |= {id(t.untyped_storage()): self.part for t in fresh}
        if name == "_to_copy":
            self._cast(inputs[0], fresh)
        if self.phase == "forward" and is_kept(func):
            self.count("kept", sum(t.nbytes for t in fresh))
        return out

    def _cast(self, source: Tensor, fresh: list[Tensor]) -> None:
        """Notes a copy in another type: whether it is a parameter's, and whether there is one already."""
        key = id(source.untyped_storage())
        for tensor in fresh:
            copy = id(tensor.untyped_storage())
            if key in self.parameters:
                self.copies.add(copy)
            elif self.casts.setdefault((key, tensor.dtype), copy) != copy and tensor.numel() == source.numel():
                self.doubles.add(copy)

    @property
    def _place(self) -> tuple[str, str]:
        return self.part, self.phase

    def attended(self, flops: float, weight: float, kept: float, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Counts an attention that `Fused` has seen.

        Args:
            flops: Of its products.
            weight: How many times as long as the kernel's best these take.
            kept: Bytes of its results.
            inputs: What it reads.
            outputs: What it writes.
        """
        self.count(f"attention_{self.phase}", flops)
        self.count(f"attending_{self.phase}", flops * weight)
        self.count(f"operations_{self.phase}", 1)
        self.fusion.product(self._place, inputs, outputs)
        self.count("kept", kept if self.phase == "forward" else 0.0)

    def read_whole(self, given: list[Tensor]) -> None:
        """Told of what a product or an attention reads, whose backward does too: no kernel computes that on the way."""
        for tensor in given:
            storage = tensor.untyped_storage()
            if id(storage) in self.fusible and id(storage) not in self.doubles:
                computed = self.fusible.pop(id(storage)) == self.part and id(storage) in self.saved
                self.count("fusible", -float(storage.nbytes()) * computed)

    def _allocate(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is new; then it is alive until nothing refers to it."""
        if isinstance(tensor, VocabularyLogits) or tensor.is_meta:  # it, and the whole logits that it stands for
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.sizes or key in self.parameters:
            return False
        self.sizes[key] = float(storage.nbytes())
        self.live += self.sizes[key]
        values, peak = self.parts[self.part].values, "forward_extra" if self.phase == "forward" else "extra"
        values[peak] = max(values[peak], self.live)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0.0)
        for known in (self.saved, self.copies, self.doubles):
            known.discard(key)
        for by_storage in (self.fusible, self.smaller):
            by_storage.pop(key, None)
        for cast in [cast for cast, copy in self.casts.items() if key in (cast[0], copy)]:
            del self.casts[cast]
        self.fusion.forget(key)

    def pack(self, tensor: Tensor) -> Tensor:
        """Told by autograd of each tensor that it saves."""
        key = id(tensor.untyped_storage())
        if key not in self.parameters and key not in self.saved:
            self.saved.add(key)
            is_computed_again = self.fusible.get(key) == self.part
            if not is_computed_again:
                self.fusion.save(self._place, key)
            self.count("saved", float(tensor.untyped_storage().nbytes()))
            size = float(tensor.untyped_storage().nbytes())
            part, smallest = self.smaller.get(key, ("", size))
            self.count("fusible", size if is_computed_again else (size - smallest) * (part == self.part))
            self.count("copies", float(tensor.untyped_storage().nbytes()) * (key in self.copies))
        return tensor

    def enter_with_gradient(self, tensor: Tensor, part: str) -> None:
        """From the moment that the gradient of `tensor` is there, backward is in `part`; as it was first told: what one
        block gives another, or passes by, is the one's."""
        if tensor.requires_grad and not any(other() is tensor for other in self.entered):
            self.entered.append(weakref.ref(tensor))
            tensor.register_hook(lambda _: setattr(self, "part", part))


def watch(
    module: nn.Module,
    blocks: list[str],
    loss: Callable[[nn.Module], Tensor],
    peers: ShapePeers | None = None,
) -> Trace:
    """Runs `loss(module)` and its backward once and tells the parts' costs; works on fake and on real tensors.

    The module is changed: it is of no use afterwards."""
    watcher, order = Watcher(module), list[str]()
    for parameter in module.parameters():
        if parameter.requires_grad:  # gradients are counted by the strategies' cost functions
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if peers is not None:
        peers.current_part = lambda: watcher.part
    templates: dict[Any, Any] = {}
    for block in dict.fromkeys(map(module.get_submodule, blocks)):
        block.forward = _watched(block, block.forward, watcher, order, templates)
    with watcher, Fused(watcher):
        with saved_tensors_hooks(watcher.pack, lambda t: t):
            value = loss(module)
        sent, calls = (dict(peers.sent_bytes), dict(peers.calls)) if peers is not None else ({}, {})
        watcher.phase, watcher.part = "backward", AFTER if order else BEFORE
        # of a tensor, backward would be taken by Fused, and run without it
        torch.autograd.backward(get_gradient_edge(value), torch.ones_like(value))
    for name, part in watcher.parts.items() if peers is not None else ():
        found = {"sent": peers.sent_bytes, "calls": peers.calls, "again": peers.regathered_bytes}  # type: ignore[union-attr]
        found |= {"sent_forward": sent, "calls_forward": calls}
        part.values |= {key: by_part.get(name, 0.0) for key, by_part in found.items()}
    return Trace(_beyond_saved(watcher.parts, order), order)


def _beyond_saved(parts: dict[str, PartTrace], order: list[str]) -> dict[str, PartTrace]:
    """Makes peaks those beyond what the parts up to this one have saved; of the traced (unlike) blocks only."""
    found, held = {}, 0.0
    for name in (BEFORE, *dict.fromkeys(order), AFTER):
        if name in parts:
            found[name], values = parts[name], parts[name].values
            values["forward_extra"] = max(0.0, values["forward_extra"] - held)
            held += values["saved"]
            values["extra"] = max(0.0, values["extra"] - held)
    return found


def alike(block: nn.Module) -> Any:
    """What blocks have in common that cost the same, given like inputs."""
    return type(block), tuple((tuple(p.shape), p.requires_grad) for p in block.parameters())


@dataclass(frozen=True)
class _Like:
    """Instead of a tensor, what it is like."""

    shape: torch.Size
    dtype: torch.dtype


class _Skip(torch.autograd.Function):
    """Stands for a block that was watched before: what is like its output, connected to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: _Like) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_empty(like.shape, dtype=like.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype), None


def _skipped(flowing: Tensor, leaf: Any) -> Any:
    """One value that a block gives which was watched before: its input itself where that is like it."""
    if not isinstance(leaf, _Like):
        return leaf
    return flowing if (leaf.shape, leaf.dtype) == (flowing.shape, flowing.dtype) else _Skip.apply(flowing, leaf)


def _watched(
    block: nn.Module, forward: Callable[..., Any], watcher: Watcher, order: list[str], templates: dict[Any, Any]
) -> Callable[..., Any]:
    """The block's forward; of alike blocks, but for the first, only what its output is like."""
    signature = alike(block)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        flowing = next((t for t in given if t.requires_grad), given[0] if given else None)
        back = flowing is not None and flowing.requires_grad
        of_adapters = not back and not all(p.requires_grad for p in block.parameters())  # behind a frozen embedding
        key = (signature, of_adapters, tuple((tuple(t.shape), t.dtype) for t in given))
        if key in templates and flowing is not None and back:
            name, output = templates[key]
            order.append(name)
            return tree_map(lambda leaf: _skipped(flowing, leaf), output)
        name, outside = f"block{len(templates)}", watcher.part
        order.append(name)
        watcher.part = name
        if flowing is not None:
            wire = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            values = watcher.parts[name].values
            values["boundary"], values["crossing"] = (
                flowing.nbytes,
                flowing.numel() * sent_dtype(flowing, wire).itemsize,
            )
            before = outside if outside != AFTER else order[-2] if len(order) > 1 else BEFORE
            watcher.enter_with_gradient(flowing, before)
        output = forward(*args, **kwargs)
        for tensor in tensors(output):
            watcher.enter_with_gradient(tensor, name)
        watcher.part = AFTER
        templates[key] = name, map_tensors(lambda t: _Like(t.shape, t.dtype), output)
        return output

    return call


def _moved(name: str, tensors: list[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    largest = max((t.numel() for t in tensors), default=0) if name in INDEXED else -1
    return float(sum(t.nbytes for t in tensors if t.numel() != largest))


def _is_sum(name: str, inputs: list[Tensor]) -> bool:
    """Whether it adds what a layer gives to what went around it: to have the sum again takes one as large."""
    return name == "add" and len({t.shape for t in inputs}) == 1 < len(inputs)


def _aligned(tensor: Tensor) -> bool:
    """Whether all rows of a matrix begin at multiples of 16 bytes, as fast kernels want them."""
    longest = max(tensor.stride()[-2:], default=0) if tensor.dim() > 1 else 0
    return longest * tensor.element_size() % 16 == 0


def _product(like: Tensor, name: str, flops: float) -> Product:
    """The product that has as many FLOPs as an operation. like: its result, or what its result is the gradient of."""
    size, columns = max(like.numel(), 1), max(like.shape[1 if "convolution" in name else -1], 1)
    batch = max(like.shape[0], 1) if name in ("bmm", "baddbmm") else 1
    return size / columns / batch, columns, flops / (2.0 * size), batch
