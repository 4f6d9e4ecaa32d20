"""Watches one forward and backward of a model and writes down what each part of it costs.

Under fake tensors nothing is computed and nothing allocated: a 70-billion-parameter model is watched on a laptop.
The same watcher works on real tensors, for models whose code looks at values (`read.py` falls back to that).

A *part* is what is before the first block, each kind of block, and what is after the last one. Per part:

- matrix products (and convolutions and attention): their size m × n × k, forward and backward;
- everything else, which moves memory: bytes read and written, and how many operations;
- what forward saves for backward: bytes of distinct storages, parameters excluded; and, of the block's operations
  that `selective` checkpointing keeps, the bytes of their results;
- `extra`: how much more than what is saved is alive at the worst moment of the part's backward;
- `sent`: bytes that a tensor-parallel worker sends, where the model is watched as one of several sees it.

Blocks that are alike (class, parameter shapes, inputs) are watched once; the others pass shapes through.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from app.planner.attention import Fused
from strategies.activation_checkpointing import is_kept
from strategies.tensor.cost import ShapePeers

BEFORE, AFTER = "before", "after"
INDEXED = {"gather", "scatter_add", "scatter_add_", "nll_loss_forward"}
"""Operations that touch a few places of their largest tensor: its other tensors are what they move."""
FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}


@dataclass
class PartTrace:
    """One part's costs for the batch that was traced. A product is (m, n, k, batch); `flops` are multiply-adds × 2."""

    products: dict[str, list[tuple[float, float, float, float]]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    attention: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    moved: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    operations: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    saved: float = 0.0
    kept: float = 0.0
    boundary: float = 0.0
    forward_extra: float = 0.0
    extra: float = 0.0
    sent: float = 0.0
    calls: float = 0.0


@dataclass
class Trace:
    parts: dict[str, PartTrace]
    order: list[str]
    """The part of each block, in the order they were called."""


class _Skip(torch.autograd.Function):
    """Stands for a block that was watched before: the shape of its output, connected to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Any) -> Tensor:
        ctx.like = (x.shape, x.dtype, x.device)
        return torch.empty(like[0], dtype=like[1], device=like[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device), None


class Watcher(TorchDispatchMode):
    """Counts what passes by, for the part and phase that are current."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parts: dict[str, PartTrace] = defaultdict(PartTrace)
        self.part, self.phase = BEFORE, "forward"
        self.parameters = parameters
        self.live = 0.0
        self.sizes: dict[int, float] = {}
        self.owners: dict[int, str] = {}  # storage → the part that saved it first
        self.keep: list[Any] = []

    # --- operations ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        given = {name: value for name, value in kwargs.items() if name != "out"}
        inputs = [t for t in tree_flatten((args, given))[0] if isinstance(t, Tensor)]
        fresh = [t for t in outputs if self._allocate(t)]
        part, packet = self.parts[self.part], func._overloadpacket
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            part.products[self.phase].extend(_products(packet.__name__, inputs, outputs, flops))
            part.operations[self.phase] += 1
        elif packet.__name__ not in FREE and (fresh or func._schema.is_mutable):
            part.moved[self.phase] += _moved(packet.__name__, [*inputs, *outputs])
            part.operations[self.phase] += 1
        if self.phase == "forward" and is_kept(func):
            part.kept += sum(map(_bytes, fresh))
        return out

    def attended(self, flops: float, kept: float) -> None:
        part = self.parts[self.part]
        part.attention[self.phase] += flops
        part.operations[self.phase] += 1
        if self.phase == "forward":
            part.kept += kept

    # --- memory -------------------------------------------------------------------------------------------------

    def _allocate(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is new; then it is alive until nobody holds it."""
        if type(tensor).__name__ == "VocabularyLogits":
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self.parameters:
            return False
        size = float(storage.nbytes())
        self.sizes[key] = size
        self.live += size
        part = self.parts[self.part]
        if self.phase == "forward":
            part.forward_extra = max(part.forward_extra, self.live)
        else:
            part.extra = max(part.extra, self.live)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0.0)
        self.owners.pop(key, None)

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.parameters and key not in self.owners:
            self.owners[key] = self.part
            self.parts[self.part].saved += float(storage.nbytes())
        return tensor

    # --- where we are -------------------------------------------------------------------------------------------

    def enter(self, part: str) -> None:
        self.part = part

    def on_gradient(self, tensor: Any, part: str) -> None:
        """From the moment that the gradient of `tensor` is there, backward is in `part`."""
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: self.enter(part))


def watch(
    module: nn.Module,
    blocks: list[str],
    loss: Callable[[nn.Module], Tensor],
    peers: ShapePeers | None = None,
    gpu: bool = False,
) -> Trace:
    """Runs `loss(module)` and its backward once and tells the parts' costs; works on fake and on real tensors.

    gpu: as a GPU's kernels would do it (attention.py)."""
    parameters = {p.untyped_storage()._cdata for p in [*module.parameters(), *module.buffers()]}
    watcher = Watcher(parameters)
    order: list[str] = []
    for parameter in module.parameters():
        if parameter.requires_grad:  # gradients are counted by the strategies' cost functions
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if peers is not None:
        peers.where = lambda: watcher.part
    with _watched_blocks(module, blocks, watcher, order):
        with (
            watcher,
            Fused(watcher.attended, gpu),
            torch.autograd.graph.saved_tensors_hooks(watcher.pack, lambda t: t),
        ):
            value = loss(module)
            watcher.phase = "backward"
            watcher.enter(AFTER if order else BEFORE)
            _backward(value)
    parts = _relative(dict(watcher.parts), order)
    for name, part in parts.items() if peers is not None else ():
        part.sent, part.calls = peers.sent.get(name, 0.0), peers.calls.get(name, 0)  # type: ignore[union-attr]
    return Trace(parts, order)


def _backward(value: Tensor) -> None:
    """torch.autograd.backward itself would go through, and be what switches off, the mode for functions."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (value,), (torch.ones_like(value),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _relative(parts: dict[str, PartTrace], order: list[str]) -> dict[str, PartTrace]:
    """Peaks beyond what the parts up to this one have saved; of the traced (unlike) blocks only."""
    seen = [name for name in (BEFORE, *dict.fromkeys(order), AFTER) if name in parts]
    held = 0.0
    for name in seen:
        before = held
        held += parts[name].saved
        parts[name].forward_extra = max(0.0, parts[name].forward_extra - before)
        parts[name].extra = max(0.0, parts[name].extra - held)
    return {name: parts[name] for name in seen}


@contextmanager
def _watched_blocks(module: nn.Module, blocks: list[str], watcher: Watcher, order: list[str]) -> Iterator[None]:
    templates: dict[Any, tuple[str, Any]] = {}
    changed = []
    for name in blocks:
        block = module.get_submodule(name)
        changed.append((block, block.__dict__.get("forward")))
        block.forward = _watched(block, block.forward, watcher, order, templates)
    try:
        yield
    finally:
        for block, forward in changed:
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _watched(
    block: nn.Module, forward: Callable[..., Any], watcher: Watcher, order: list[str], templates: dict[Any, Any]
) -> Callable[..., Any]:
    signature = (type(block), tuple(tuple(p.shape) for p in block.parameters()))

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        key = (signature, tuple((tuple(t.shape), t.dtype) for t in tensors))
        flowing = next((t for t in tensors if t.requires_grad), tensors[0] if tensors else None)
        if key in templates and flowing is not None and flowing.requires_grad:
            name, output = templates[key]
            order.append(name)
            return tree_map_only(_Shape, lambda like: _Skip.apply(flowing, like.like), output)
        name = f"block{len(templates)}"
        order.append(name)
        outside = watcher.part
        watcher.enter(name)
        if flowing is not None:
            watcher.parts[name].boundary = _bytes(flowing)
            watcher.on_gradient(flowing, outside if outside != AFTER else order[-2] if len(order) > 1 else BEFORE)
        output = forward(*args, **kwargs)
        for tensor in tree_flatten(output)[0]:
            watcher.on_gradient(tensor, name)
        watcher.enter(AFTER)
        templates[key] = (
            name,
            tree_map_only(Tensor, lambda t: _Shape((tuple(t.shape), t.dtype, t.device)), output),
        )
        return output

    return call


@dataclass(frozen=True)
class _Shape:
    like: tuple[Any, ...]


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _moved(name: str, tensors: list[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    if name.startswith("new_") or name.endswith("_like"):  # looks at shape and type alone
        return _bytes(tensors[-1])
    largest = max((t.numel() for t in tensors), default=0) if name in INDEXED else -1
    return sum(_bytes(t) for t in tensors if t.numel() != largest)


def _products(
    name: str, inputs: list[Tensor], outputs: list[Tensor], flops: float
) -> list[tuple[float, float, float, float]]:
    """(m, n, k, batch) of each product an operation does, with 2·m·n·k·batch = its FLOPs."""
    if not outputs or flops <= 0:
        return []
    if name in ("mm", "addmm"):
        m, n = outputs[0].shape[-2:]
        return [(m, n, flops / (2.0 * m * n), 1)]
    if name in ("bmm", "baddbmm"):
        batch, m, n = outputs[0].shape
        return [(m, n, flops / (2.0 * batch * m * n), batch)]
    if name == "convolution_backward":  # gradients of input and of weight, each as large as the forward
        real = [t for t in outputs if t.dim() > 1]
        return [_convolved(inputs[0], out, flops / len(real)) for out in real]
    return [_convolved(outputs[0], outputs[0], flops)]


def _convolved(like: Tensor, out: Tensor, flops: float) -> tuple[float, float, float, float]:
    n = float(like.shape[1]) if like.dim() > 1 else 1.0
    m = like.numel() / n
    return (m, n, flops / (2.0 * m * n), 1)
