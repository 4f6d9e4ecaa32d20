"""What a model does with a batch, found by running its own code once without numbers: no rewriting, no annotations.

The model's modules are of three kinds. *Blocks* repeat, and are what is divided among stages. *Around* them are modules
that neither hold nor are in a block: embeddings, norms, heads, a dropout. What contains blocks (a decoder, a container,
the model itself) is plain code that every stage runs. A trace notes in which order blocks and the modules around them
are called, which of these calls each call's inputs were made from, how much each computes, and what comes out; so the
partition knows what to balance, and each stage what it must be sent: values that skip ahead of a block included.

Without numbers: what other stages compute, and what the code makes of it on the way, is a PlaceholderTensor: an
operation with a placeholder gives a placeholder and costs microseconds. Everything that depends on the batch alone
(masks, positions, rotary tables) is computed for real on every stage. Each placeholder knows its *sources*: the calls
of modules, and the parameters, that it was made from; so what must be sent between stages is found by running, not by
being told.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from strategies.dims import LayoutError
from strategies.state import tensor_attributes
from strategies.torch_internals import OperationMode
from strategies.tree import tree_leaves, tree_map

META = torch.device("meta")
_VALUES = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_DEVICES = {"cpu", "cuda"}
_OF_THE_COPY = (LookupError, AttributeError, TypeError, NameError)
"""What the code after the last block raises not because there are no numbers, but because a hook or a closure has put
something into the model that was copied. What it would have used then is not known, so it may be anything."""
LEFT = "@"
"""Begins the source of what a module leaves in an attribute: the call's name and the attribute's follow."""

ELEMENT = 50.0
"""What reading or writing one number outside of matrix products counts, in floating-point operations: on two CPU cores
a float32 product makes about 50 operations in the time of one such access."""


class PlaceholderTensor(Tensor):
    """A meta tensor that says it is on `place`. sources: what it was made from, by name."""

    sources: frozenset[str]
    place: torch.device
    meta: Tensor
    is_placeholder = True
    _used: ClassVar[set[str] | None] = None

    @staticmethod
    def make(like: Tensor, sources: Iterable[str], place: torch.device) -> PlaceholderTensor:
        if isinstance(like, PlaceholderTensor):
            like = like.meta
        meta = like.detach() if like.is_meta else torch.empty_like(like, device=META)
        made = meta.as_subclass(PlaceholderTensor)
        made.meta, made.sources, made.place = meta, frozenset(sources), place
        return made

    @classmethod
    @contextlib.contextmanager
    def watched(cls) -> Iterator[set[str]]:
        """The sources of everything that is computed with while this lasts."""
        before, cls._used = cls._used, set()
        try:
            yield cls._used
        finally:
            cls._used = before

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PlaceholderTensor)]
        place, name = found[0].place, getattr(func, "__name__", "")
        if name == "__get__":
            known = {Tensor.device: place, Tensor.is_meta: False, Tensor.is_cuda: place.type == "cuda"}
            if (answer := known.get(func.__self__)) is not None:  # type: ignore[attr-defined]
                return answer
        elif name in _VALUES:
            source = min(found[0].sources, default="another stage").removeprefix(LEFT)
            raise LayoutError(
                f"the model's code looks at numbers that come from {source}, which another stage of the pipeline "
                "computes: let it decide by the batch alone, or write strategy=fsdp"
            )
        elif name in _DEVICES:
            return found[0]
        elif name == "register_hook":
            return RemovableHandle(
                OrderedDict()
            )  # the stage that has the tensor's numbers, and its gradient, has the hook
        elif name == "retain_grad":
            return None
        sources = frozenset().union(*(leaf.sources for leaf in found))
        if cls._used is not None:
            cls._used |= sources
        args, kwargs = tree_map(_to_meta, (tuple(args), dict(kwargs)))
        with torch.no_grad():
            output = func(*args, **kwargs)
        return tree_map(lambda o: PlaceholderTensor.make(o, sources, place) if isinstance(o, Tensor) else o, output)


def _to_meta(value: Any) -> Any:
    if isinstance(value, PlaceholderTensor):
        return value.meta
    if isinstance(value, Tensor):
        return value.detach().to(META)
    if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in _DEVICES):
        return META
    return value


def sources_of(values: Any) -> frozenset[str]:
    """What the placeholders among `values` were made from."""
    return frozenset().union(*(leaf.sources for leaf in tree_leaves(values) if isinstance(leaf, PlaceholderTensor)))


@dataclass
class Call:
    """One call of a block or of a module around the blocks. name: its path, with #1, #2 … from its second call on."""

    name: str
    path: str
    is_block: bool
    uses: frozenset[str]
    output: Any = None
    """Placeholders in the structure that the module returned."""
    assumed: str = ""
    """Why it could not be run without numbers, where `output` is only assumed to be like its input."""
    cost: float = 0.0
    """Floating-point operations, or what takes as long, of one forward and backward."""


@dataclass
class Trace:
    """calls: in order. last_uses, last_cost: of what the model and the loss function do after all calls."""

    calls: list[Call] = field(default_factory=list)
    last_uses: frozenset[str] = frozenset()
    last_cost: float = 0.0

    @property
    def blocks(self) -> list[Call]:
        return [call for call in self.calls if call.is_block]


class Tracer:
    """A copy of the model without numbers, whose code can be run to see what it does."""

    def __init__(self, module: nn.Module, blocks: list[str], place: torch.device) -> None:
        """module: on meta, its own; it is changed. place: where the model says its placeholders are."""
        self.module, self.blocks, self.place = module, frozenset(blocks), place
        canonical = {id(p): name for name, p in module.named_parameters()}
        self.sizes = {name: p.numel() for name, p in module.named_parameters()}
        self.canonical = {name: canonical[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        """Every name a parameter goes by → the one under which it is counted."""
        self.names = set(module.state_dict())
        self.held = {
            path: [canonical[id(p)] for p in module.get_submodule(path).parameters()]
            for path in traced_modules(module, blocks)
        }
        """Of each module that is traced, its parameters."""
        self._trace: Trace | None = None
        self._seen: dict[str, int] = {}
        self._left: set[str] = set()
        """Sources of what modules left in attributes."""
        self._twice = False
        remember_in_evaluation(module)
        for owner in list(module.modules()):
            for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                hide(owner, name, PlaceholderTensor.make(parameter, ["=" + canonical[id(parameter)]], place))
            for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(owner, name, torch.zeros_like(buffer, device=place) if buffer.is_meta else buffer.to(place))
            for name, value in tensor_attributes(owner):
                if value.is_meta:
                    setattr(owner, name, torch.zeros_like(value, device=place))
        for path in self.held:
            child = module.get_submodule(path)
            child.forward = self._watched(path, child.forward)

    def trace(self, loss: Callable[[nn.Module, Any], Any], batch: Any, training: bool = True) -> Trace:
        """Runs `loss(model, batch)` without numbers, on a copy of the batch, which the model may change in place.

        Raises:
            LayoutError: a model whose blocks do not form a chain.
        """
        self.module.train(training)
        self._trace, self._seen, self._twice = Trace(), {}, False
        self._left = set()
        batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        with _OperationCount() as self._count, torch.no_grad():
            with PlaceholderTensor.watched() as self._used:
                try:
                    loss(self.module, batch)
                except Exception as error:  # after the last block everything is on one stage, and may look at numbers
                    if self._twice or not all(self._seen.get(path) for path, held in self.held.items() if held):
                        raise
                    if isinstance(error, _OF_THE_COPY):
                        self._used |= self._left.union(call.name for call in self._trace.calls)
            self._trace.last_cost = self._count.take()
        self._trace.last_uses = frozenset(self._used)
        found, self._trace = self._trace, None
        if not found.blocks:
            raise LayoutError("the loss function calls none of the model's blocks, so no pipeline can be made")
        return found

    def _watched(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            trace, seen = self._trace, self._seen.get(path, 0)
            if trace is None:
                return forward(*args, **kwargs)
            self._seen[path] = seen + 1
            call = Call(numbered(path, seen), path, path in self.blocks, sources_of((args, kwargs)))
            if call.is_block and seen:
                self._twice = True
                raise LayoutError(
                    f"the model calls its block {path} twice in one forward, or the task calls the model twice, so its "
                    "blocks do not form a chain: write strategy=fsdp"
                )
            between = self._count.take()  # the code between two calls counts with the first of them
            (trace.calls[-1] if trace.calls else call).cost += between
            kept = _kept_tensors(self.module.get_submodule(path))
            output = self._output(forward, call, args, kwargs)
            self._mark_what_is_left(call, kept)
            self._used.clear()
            call.cost += self._count.take() + 2 * ELEMENT * sum(self.sizes[name] for name in self.held[path])
            if call.is_block:
                _require_tensors(path, output)
            if call.is_block or self.held[path] or sources_of(output):
                # The output of a block, and of a module with parameters, is another stage's entirely.
                output = call.output = tree_map(
                    lambda v: PlaceholderTensor.make(v, [call.name], self.place) if isinstance(v, Tensor) else v, output
                )
            trace.calls.append(call)
            return output

        return watched

    def _mark_what_is_left(self, call: Call, kept: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Notes as a source of its own each tensor that the module has put into an attribute of itself."""
        for (owner, name), value in _kept_tensors(self.module.get_submodule(call.path)).items():
            if kept.get((owner, name)) is not value:
                source = f"{LEFT}{call.name} {name}"
                vars(owner)[name] = PlaceholderTensor.make(value, [source], self.place)
                self._left.add(source)

    def _output(self, forward: Callable[..., Any], call: Call, args: Any, kwargs: Any) -> Any:
        """What the module returns. A block is on one stage, so its code may look at numbers (a router of experts does),
        of which there are none here: it is then taken to return something like its input, until it is seen to."""
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            if not call.is_block or first is None:
                raise
            call.assumed = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return first


def _kept_tensors(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Of it and what it holds, the tensors among plain attributes."""
    return {
        (owner, name): value
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, Tensor)
    }


def remember_in_evaluation(module: nn.Module) -> None:
    """In evaluation the model answers as before when it is called again with the same tensors: metrics may call it once
    for the loss and once for a figure. In training it does not: dropout draws anew."""
    forward, before = module.forward, list[tuple[Any, Any]]()

    def once(*args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        if not module.training and before:
            known, output = before[0]
            if len(known) == len(given) and all(a is b for a, b in zip(known, given)):
                return output
        before.clear()
        output = forward(*args, **kwargs)
        if not module.training:
            before.append((given, output))
        return output

    module.forward = once


def numbered(path: str, before: int) -> str:
    return f"{path}#{before}" if before else path


def traced_modules(module: nn.Module, blocks: list[str]) -> list[str]:
    """Blocks, and the modules around them: the outermost that hold no block."""
    above = {".".join(name.split(".")[:i]) for name in blocks for i in range(name.count(".") + 1)}
    return [
        name
        for name, _ in module.named_modules()
        if name in blocks or (name and name not in above and name.rpartition(".")[0] in above)
    ]


def hide(owner: nn.Module, name: str, placeholder: PlaceholderTensor) -> None:
    """Takes a parameter from its module; the module's code that reads it finds `placeholder`."""
    delattr(owner, name)
    if isinstance(getattr(type(owner), name, None), property):  # as tensor parallelism has it
        owner.__class__ = type(type(owner).__name__, (type(owner),), {name: property(lambda self: placeholder)})
    else:
        vars(owner)[name] = placeholder


def _require_tensors(path: str, output: Any) -> None:
    leaves = tree_leaves(output)
    odd = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, int, float, str, bool, type(None)))]
    if odd or not any(isinstance(leaf, Tensor) for leaf in leaves):
        kind = type(odd[0] if odd else output).__name__
        raise LayoutError(
            f"the block {path} returns a {kind}, which cannot be sent to the next stage: let it return a tensor, or a "
            "tuple or dict of tensors"
        )


class _OperationCount(OperationMode):  # type: ignore[misc]
    """Counts operations: of matrix products, and for each number that anything else writes. Backward is twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __enter__(self) -> _OperationCount:
        super().__enter__()
        return self

    def take(self) -> float:
        found, self.total = self.total, 0.0
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            with contextlib.suppress(Exception):  # a formula that does not know this call; it counts as the rest does
                self.total += 3 * formula(*args, **(kwargs or {}), out_val=output)
                return output
        if not getattr(func, "is_view", False):
            self.total += 3 * ELEMENT * sum(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output
