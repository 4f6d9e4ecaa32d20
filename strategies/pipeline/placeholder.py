"""Tensors without data that know what they were made from.

A placeholder stands for a tensor that another stage computes. Its shape, type and device are right,
but it has no data. An operation with a placeholder returns a placeholder and costs microseconds, so
that a model's own code runs over whatever other stages compute.

Each placeholder knows its *sources*: the outputs of modules, and the parameters, that it was made
from. So running the code shows which tensors a stage needs from other stages.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from strategies.dims import LayoutError
from strategies.tree import tree_leaves, tree_map

META = torch.device("meta")
_READS_VALUES = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
}
_MOVES = {"cpu", "cuda"}
"""Methods, and types of device, that move a tensor."""


@dataclass(frozen=True)
class CallOutput:
    """The output of one call of a module, by the call's name."""

    call: str

    def __str__(self) -> str:
        return self.call


@dataclass(frozen=True)
class ParameterValue:
    """A parameter, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that one call of a module has put into an attribute of the module."""

    call: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.call} {self.attribute}"


Source = CallOutput | ParameterValue | KeptTensor
"""Something that a placeholder was made from."""


class PlaceholderTensor(Tensor):
    """A tensor without data; create it with `like`."""

    meta: Tensor
    """The same tensor on the meta device."""
    sources: frozenset[Source]
    """What it was made from."""
    claimed_device: torch.device
    """What its attribute `device` returns."""
    is_placeholder = True
    """Whether it is one, for code that does not import this class."""
    _used_sources: ClassVar[set[Source] | None] = None

    @staticmethod
    def like(tensor: Tensor, sources: Iterable[Source], device: torch.device) -> PlaceholderTensor:
        """A placeholder with a tensor's shape and type.

        Args:
            tensor: Any tensor, a placeholder included.
            sources: What the placeholder was made from.
            device: The device that it says it is on.
        """
        if isinstance(tensor, PlaceholderTensor):
            tensor = tensor.meta
        meta = tensor.detach() if tensor.is_meta else torch.empty_like(tensor, device=META)
        placeholder = meta.as_subclass(PlaceholderTensor)
        placeholder.meta = meta
        placeholder.sources = frozenset(sources)
        placeholder.claimed_device = device
        return placeholder

    @classmethod
    @contextlib.contextmanager
    def recorded_sources(cls) -> Iterator[set[Source]]:
        """Collects the sources of all placeholders that are computed with inside."""
        outer = cls._used_sources
        used: set[Source] = set()
        cls._used_sources = used
        try:
            yield used
        finally:
            cls._used_sources = outer

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, dict(kwargs)))
        placeholders = [leaf for leaf in leaves if isinstance(leaf, PlaceholderTensor)]
        first = placeholders[0]
        device = first.claimed_device
        name = getattr(func, "__name__", "")
        if name == "__get__":
            claims = {
                Tensor.device: device,
                Tensor.is_meta: False,
                Tensor.is_cuda: device.type == "cuda",
            }
            attribute = func.__self__  # type: ignore[attr-defined]
            if attribute in claims:
                return claims[attribute]
        elif name in _READS_VALUES:
            source = min((str(source) for source in first.sources), default="another stage")
            raise LayoutError(
                f"the model's code reads values of a tensor that comes from {source}, which "
                "another stage of the pipeline computes: let it depend on the batch alone, or "
                "write strategy=fsdp"
            )
        elif name in _MOVES:
            return first
        elif name == "register_hook":
            # The stage that computes the tensor registers the hook, too.
            return RemovableHandle(OrderedDict())
        elif name == "retain_grad":
            return None
        sources = frozenset[Source]().union(*(leaf.sources for leaf in placeholders))
        if cls._used_sources is not None:
            cls._used_sources |= sources
        meta_args, meta_kwargs = tree_map(_to_meta, (tuple(args), dict(kwargs)))
        with torch.no_grad():
            output = func(*meta_args, **meta_kwargs)
        return placeholders_like(output, sources, device)


def placeholders_like(values: Any, sources: Iterable[Source], device: torch.device) -> Any:
    """`values` with every tensor replaced by a placeholder.

    Args:
        values: Tensors and other values in tuples, lists and mappings.
        sources: What all of them were made from.
        device: The device that the placeholders say they are on.
    """

    def placeholder(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return PlaceholderTensor.like(leaf, sources, device)
        return leaf

    return tree_map(placeholder, values)


def _to_meta(value: object) -> object:
    """An argument of an operation that is done on the meta device."""
    if isinstance(value, PlaceholderTensor):
        return value.meta
    if isinstance(value, Tensor):
        return value.detach().to(META)
    if isinstance(value, torch.device):
        return META
    if isinstance(value, str) and value.split(":")[0] in _MOVES:
        return META
    return value


def sources_of(values: object) -> frozenset[Source]:
    """What the placeholders among `values` were made from."""
    leaves = tree_leaves(values)
    sources = (leaf.sources for leaf in leaves if isinstance(leaf, PlaceholderTensor))
    return frozenset[Source]().union(*sources)


def hide_parameter(owner: nn.Module, name: str, placeholder: PlaceholderTensor) -> None:
    """Remove a parameter from its module; code that reads it gets the placeholder."""
    delattr(owner, name)
    if isinstance(getattr(type(owner), name, None), property):
        # Tensor parallelism reads parameters through a property of the class, which would win over
        # an attribute of the module.
        members = {name: property(lambda self: placeholder)}
        owner.__class__ = type(type(owner).__name__, (type(owner),), members)
    else:
        vars(owner)[name] = placeholder
