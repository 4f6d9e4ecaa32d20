"""Backward of a micro-batch that has no part in the step: its weight is 0.

If no item of a micro-batch counts (every label is masked), a loss that is a mean over items is 0/0,
and nan times the weight 0 is still nan, in the loss and in every gradient. Yet the micro-batch
cannot be skipped: other workers wait for this one in the collectives of forward and backward
(gathered parameters, averaged gradients, experts of other workers).

So backward runs, and everything that the *loss* computes from the model's outputs passes on exact
zeros. The loss is what autograd has recorded between the value and the outputs of the model's
modules. Behind those outputs backward is the model's own: zeros stay zeros there, and what other
workers send through this one's experts keeps its gradient.

A weight that is known to be 0 is the Python number 0.0, so that no host waits for a device to find
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from strategies.tree import tree_leaves

ForwardHook = Callable[[nn.Module, Any, Any], None]


def has_no_weight(weight: float | Tensor) -> bool:
    """Whether a micro-batch is left out of the step."""
    return isinstance(weight, float) and weight == 0.0


@contextlib.contextmanager
def recorded_outputs(model: nn.Module, wanted: bool = True) -> Iterator[list[Node]]:
    """Collects the autograd nodes of what the model's modules return, while it lasts.

    The model's own output is not among them, because it may be the loss. Neither is any single
    number, for the same reason.

    Args:
        model: The model.
        wanted: If not, nothing is collected.
    """
    nodes: list[Node] = []

    def collect(_: nn.Module, __: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.grad_fn is not None:
                nodes.append(leaf.grad_fn)

    handles: list[RemovableHandle] = []
    if wanted:
        _hook_children(model, collect, handles)
    try:
        yield nodes
    finally:
        for handle in handles:
            handle.remove()


def _hook_children(module: nn.Module, hook: ForwardHook, handles: list[RemovableHandle]) -> None:
    """Registers a hook on all modules below this one.

    Modules inside a forward that was replaced get none: a compiled block would trace it.
    """
    for child in module.children():
        handles.append(child.register_forward_hook(hook))
        is_forward_replaced = "forward" in vars(child)
        if not is_forward_replaced:
            _hook_children(child, hook, handles)


def backward_of_zeros(loss: Tensor, outputs: list[Node]) -> None:
    """Backward from a loss of weight 0, which adds exact zeros to gradients, whatever the loss is.

    Args:
        loss: 0-dimensional; nan and infinity are allowed.
        outputs: What `recorded_outputs` has collected while the loss was computed.
    """
    silence(loss, outputs)
    loss.backward(torch.zeros_like(loss))


def silence(loss: Tensor, outputs: list[Node]) -> None:
    """Lets the nodes between the loss and the outputs pass on zeros instead of their gradients."""
    boundary = set(outputs)
    seen: set[Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in boundary or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            node.register_hook(_zeros)
            pending.extend(next_node for next_node, _ in node.next_functions)


def _zeros(
    grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if gradient is None else torch.zeros_like(gradient) for gradient in grad_inputs
    )
