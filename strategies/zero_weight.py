"""Backward of a micro-batch that has no part in the step: its weight is 0.

A micro-batch without a counted item (every label is masked) has a mean over nothing for a loss,
0/0, and nan times its weight 0 is still nan, in the loss and in every gradient. Yet it cannot be
skipped: the other workers wait for this one in the collectives of forward and backward (gathered
parameters, averaged gradients, experts of other workers).

So backward runs, and what the *loss* makes of the model's outputs hands on exact zeros. The loss is
what autograd recorded between the value and the outputs of the model's modules. Behind those
outputs backward is the model's own: zeros stay zeros there, and what other workers send through
this one's experts keeps its gradient.

A weight that is known to be 0 is the Python number 0.0, so that no host waits for a device to learn
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from strategies.tree import tree_leaves


def has_no_weight(weight: float | Tensor) -> bool:
    """Whether a micro-batch is left out of the step."""
    return isinstance(weight, float) and weight == 0.0


@contextlib.contextmanager
def recorded_outputs(model: nn.Module, wanted: bool = True) -> Iterator[list[Node]]:
    """While it lasts, collects the autograd nodes of what the model's modules return; nothing unless `wanted`.

    The model's own output is not among them, for it may be the loss; neither is any single number,
    for the same reason.
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


def _hook_children(module: nn.Module, collect: Any, handles: list[RemovableHandle]) -> None:
    """Registers the hook on all modules below this one, but on none inside a forward that was replaced: a compiled
    block would trace it."""
    for child in module.children():
        handles.append(child.register_forward_hook(collect))
        if "forward" not in vars(child):
            _hook_children(child, collect, handles)


def backward_of_zeros(loss: Tensor, outputs: list[Node]) -> None:
    """Backward from a loss of weight 0: every gradient that it adds is exactly zero, whatever the loss is.

    Args:
        loss: 0-dimensional; nan and infinity are allowed.
        outputs: what `recorded_outputs` collected while the loss was computed.
    """
    silence(loss, outputs)
    loss.backward(torch.zeros_like(loss))


def silence(loss: Tensor, outputs: list[Node]) -> None:
    """Lets the nodes between the loss and the outputs hand on zeros in place of what they compute."""
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
            pending.extend(following for following, _ in node.next_functions)


def _zeros(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
    return tuple(
        None if gradient is None else torch.zeros_like(gradient) for gradient in grad_inputs
    )
