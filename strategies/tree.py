"""Values inside tuples, lists and mappings: what batches, arguments and outputs of modules are made of.

A named tuple and any mapping (Hugging Face's outputs and encodings, say) come back as what they were. Anything else is
a leaf, as in torch's own pytree, which has no public name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced by function(leaf)."""
    if isinstance(tree, MutableMapping):
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = tree_map(function, value)
        return made
    if isinstance(tree, (tuple, list)):
        values = [tree_map(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    return list(_leaves(tree))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (MutableMapping, tuple, list)):
        for value in tree.values() if isinstance(tree, MutableMapping) else tree:
            yield from _leaves(value)
    else:
        yield tree


def same_structure(one: Any, other: Any) -> bool:
    """Whether both have leaves in the same places of the same containers."""
    if isinstance(one, MutableMapping):
        return (
            type(one) is type(other)
            and one.keys() == other.keys()
            and all(same_structure(one[key], other[key]) for key in one)
        )
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_structure, one, other))
    return not isinstance(other, (MutableMapping, tuple, list))
