"""Tensors that another stage computes: shape and type, but no numbers and no memory.

A stage runs the whole model's code, of which it owns some blocks. What the other stages compute, and what that code
makes of it on the way, is a PlaceholderTensor here: an operation with a placeholder gives a placeholder and costs
microseconds. Everything that depends on the batch alone (masks, positions, rotary tables) is computed for real on every
stage. Each placeholder knows its *sources*: the calls of modules, and the parameters, that it was made from; so what
must be sent between stages is found by running, not by being told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from strategies.dims import LayoutError
from strategies.tree import tree_leaves, tree_map

META = torch.device("meta")
_VALUES = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_DEVICES = {"cpu", "cuda"}


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
            source = min(found[0].sources, default="another stage")
            raise LayoutError(
                f"the model's code looks at numbers that come from {source}, which another stage of the pipeline "
                "computes: let it decide by the batch alone, or write strategy=fsdp"
            )
        elif name in _DEVICES:
            return found[0]
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
