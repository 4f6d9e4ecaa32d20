"""What a call of torch does with its arguments, as far as its name and its arguments tell.

A call is named as its function is; reading and setting an attribute are "__get__ NAME" and
"__set__ NAME".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strategies.tree import tree_leaves

TAKES_GRADIENT = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that compute gradients."""
SHARES_MEMORY = {
    "__get__ data",
    "detach",
    "view",
    "flatten",
    "t",
    "__get__ T",
    "__getitem__",
    "select",
    "narrow",
}
"""Calls that return a tensor in the memory of their first argument."""
_NUMERIC_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that have its numbers."""
_RETURNS_NUMBERS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "__array__",
}
"""Calls that return numbers of Python or NumPy."""
_READS_NO_NUMBERS = {
    "requires_grad_",
    "type_as",
    "expand_as",
    "view_as",
    "reshape_as",
    "register_hook",
}
"""Calls that return a tensor, but read only the shape or type of the other argument."""
_NOT_IN_PLACE = {"requires_grad_", "share_memory_", "rename_", "retains_grad_"}
"""Calls whose names end in an underscore, but that do not write into their first argument."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in _OPERATORS}


def call_name(func: Any) -> str:
    """The name of a call of torch, of which TorchFunctionMode gives the function."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", "")
        return f"{name} {attribute}"
    return name


def written_tensors(name: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes into."""
    has_in_place_name = name.endswith("_") and not name.endswith("__")
    is_in_place = has_in_place_name and name not in _NOT_IN_PLACE
    is_assignment = name in ("__setitem__", "__set__ data") or name in _IN_PLACE_OPERATORS
    targets: list[Any] = [kwargs.get("out")]
    if is_in_place or is_assignment or kwargs.get("inplace"):
        targets.append(args[0])
    if name in ("embedding", "embedding_bag"):
        # With max_norm, looking rows up shortens them in place.
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        if max_norm is not None:
            targets.append(args[1])
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]


def computes(name: str, answer: Any) -> bool:
    """Whether a call uses the numbers of its arguments, and not only their shapes and types.

    Args:
        name: The call's name.
        answer: What it has returned.
    """
    if name.startswith(("__get__", "__set__")):
        return name.partition(" ")[2] in _NUMERIC_ATTRIBUTES
    if name in _RETURNS_NUMBERS:
        return True
    if name in _READS_NO_NUMBERS or name.endswith("_like") or name.startswith("new_"):
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(answer))
