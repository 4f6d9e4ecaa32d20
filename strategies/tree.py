"""Trees of tuples, lists and mappings, as batches, arguments and outputs of modules are.

A named tuple and any mapping (such as Hugging Face's outputs and encodings) keep their type.
Everything else is a leaf, as in torch's own pytree, which has no public name.
"""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def tree_map(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """The tree with every leaf replaced by `function(leaf)`.

    Args:
        function: What is done to a leaf.
        tree: The tree.
        is_leaf: Whether a tuple, list or mapping is a leaf itself; None: none is.
    """
    if is_leaf is not None and is_leaf(tree):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapping = copy.copy(tree)
        for key, value in tree.items():
            mapping[key] = tree_map(function, value, is_leaf)
        return mapping
    if isinstance(tree, (tuple, list)):
        values = [tree_map(function, value, is_leaf) for value in tree]
        is_named_tuple = hasattr(tree, "_fields")
        return type(tree)(*values) if is_named_tuple else type(tree)(values)
    return function(tree)


def clone_tensors(tree: Any) -> Any:
    """The tree with a copy of every tensor: a batch for code that may change it in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    if isinstance(tree, MutableMapping):
        return [leaf for value in tree.values() for leaf in tree_leaves(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in tree_leaves(value)]
    return [tree]
