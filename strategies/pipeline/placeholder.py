"""Tensors that are somewhere else: shape and type, but no numbers and no memory.

A stage runs the whole model's code, of which it owns a part. What the other stages compute, and what that code makes
of it on the way, is `Absent` here: an operation with an absent input has an absent output and costs microseconds.
Everything that depends on the batch alone (masks, positions, rotary tables) is computed for real on every stage. Each
absent tensor knows its *sources*: the calls of modules, and the parameters, that it was made from; so what must travel
between stages is found by running, not by being told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from strategies.dims import LayoutError

META = torch.device("meta")
_VALUES = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__"}
_HERE = {"cpu", "cuda"}


class Absent(Tensor):
    """A meta tensor that says it is on `place`. sources: what it was made from, by name."""

    sources: frozenset[str]
    place: torch.device
    elsewhere = True
    _used: ClassVar[set[str] | None] = None

    @staticmethod
    def make(like: Tensor, sources: Iterable[str], place: torch.device) -> Absent:
        data = like.detach() if like.is_meta else torch.empty_like(like, device=META)
        made: Absent = Tensor._make_subclass(Absent, _plain(data), False)  # type: ignore[assignment]
        made.sources, made.place = frozenset(sources), place
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
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        name = getattr(func, "__name__", "")
        if name == "__get__":
            answer = _attribute(func, found)
            if answer is not None:
                return answer
        elif name == "__len__":
            return int(found[0].shape[0])
        elif name in _VALUES:
            source = min(found[0].sources, default="another part")
            raise LayoutError(
                f"the model's code looks at numbers that come from {source}, which another stage of the pipeline "
                "computes: let it decide by the batch alone, or write strategy=fsdp"
            )
        elif name in _HERE:
            return found[0]
        sources = frozenset().union(*(leaf.sources for leaf in found))
        if cls._used is not None:
            cls._used |= sources
        with torch._C.DisableTorchFunctionSubclass():
            given = tree_map(_to_meta, (list(args), dict(kwargs)))
            with torch.no_grad():
                output = func(*given[0], **given[1])
        place = found[0].place
        return tree_map(lambda o: Absent.make(o, sources, place) if isinstance(o, Tensor) else o, output)


def _attribute(func: Callable, found: list[Absent]) -> Any:
    """What a property is beside what the meta tensor would answer."""
    owner = getattr(func, "__self__", None)
    if owner is Tensor.device:
        return found[0].place
    if owner is Tensor.is_meta:
        return False
    if owner is Tensor.is_cuda:
        return found[0].place.type == "cuda"
    return None


def _to_meta(value: Any) -> Any:
    if isinstance(value, Absent):
        return _plain(value)
    if isinstance(value, Tensor):
        return value.detach().to(META)
    if isinstance(value, torch.device):
        return META
    if isinstance(value, str) and value.split(":")[0] in _HERE:
        return META
    return value


def _plain(value: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def sources_of(values: Any) -> frozenset[str]:
    """What the absent tensors among `values` were made from."""
    return frozenset().union(*(leaf.sources for leaf in tree_leaves(values) if isinstance(leaf, Absent)))


def renamed(values: Any, source: str) -> Any:
    """`values` with its absent tensors made from `source` alone."""
    return tree_map(lambda v: Absent.make(v, [source], v.place) if isinstance(v, Absent) else v, values)
