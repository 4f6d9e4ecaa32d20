"""A copy of a module whose own functions work on the copy.

`copy.deepcopy` copies a module with its dictionaries, bound methods and partial functions, but does
not copy plain functions. So a hook that is a lambda in the module's constructor, and that puts
something into `self`, would still write into the original, while the code of the copy looks for it
in the copy.
"""

import contextlib
import copy
import types
from collections.abc import MutableMapping
from typing import Any

from torch import nn


def copy_module(module: nn.Module, replacements: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a module, whose functions refer to the copy in their closures and defaults.

    These are functions that are attributes of a module, or that are in a mapping which is an
    attribute, as hooks are.

    Args:
        module: Any module; it is not changed.
        replacements: What replaces some objects in the copy, by the `id` of the original.
    """
    copies = dict(replacements or {})
    copied = copy.deepcopy(module, copies)
    functions = _Functions(copies)
    for owner in copied.modules():
        functions.rebind(vars(owner))
        for value in vars(owner).values():
            if isinstance(value, MutableMapping):
                functions.rebind(value)
    return copied


class _Functions:
    """Makes functions that refer to copies where the original functions refer to originals.

    Args:
        copies: The copy of each object that was copied, by the `id` of the original.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = copies

    def rebind(self, values: MutableMapping[Any, Any]) -> None:
        """Replaces the functions among the values of a mapping by those that refer to copies."""
        for name, value in list(values.items()):
            if isinstance(value, types.FunctionType):
                values[name] = self._copied(value)

    def _copied(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, types.FunctionType):
            return self._rebound(value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._copies:
            return types.MethodType(value.__func__, self._copies[id(value.__self__)])
        return value

    def _rebound(self, function: types.FunctionType) -> types.FunctionType:
        """The function with copies in its closure and defaults."""
        closure = function.__closure__ or ()
        cells = tuple(types.CellType() for _ in closure)
        rebound = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=cells,
        )
        # Before its closure is copied, because a function may refer to itself there.
        self._copies[id(function)] = rebound
        for cell, original in zip(cells, closure, strict=True):
            with contextlib.suppress(ValueError):  # the variable has no value yet
                cell.cell_contents = self._copied(original.cell_contents)
        if function.__defaults__:
            rebound.__defaults__ = tuple(self._copied(value) for value in function.__defaults__)
        if function.__kwdefaults__:
            named = function.__kwdefaults__.items()
            rebound.__kwdefaults__ = {name: self._copied(value) for name, value in named}
        rebound.__dict__.update(function.__dict__)
        return rebound
