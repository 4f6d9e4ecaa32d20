"""Values inside tuples, lists and mappings: what batches, arguments and outputs of modules are made of.

A named tuple and any mapping (Hugging Face's outputs and encodings, say) come back as what they
were. Anything else is a leaf, as in torch's own pytree, which has no public name.
"""

import copy
from collections.abc import Callable, MutableMapping
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
    if isinstance(tree, (MutableMapping, tuple, list)):
        values = tree.values() if isinstance(tree, MutableMapping) else tree
        return [leaf for value in values for leaf in tree_leaves(value)]
    return [tree]
