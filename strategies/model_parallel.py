"""Naive model parallelism: consecutive blocks on several devices of one process, activations moved between them.

    device 0: embedding, blocks 1 … k     →  x  →     device 1: blocks k+1 … n, head     →  output back to device 0

A model too large for one GPU runs on two, with no change to its code. But one device works while the others wait:
n devices are no faster than one. Choose it for a model that must just run, or as `ddp_model_parallel` (a copy per
worker, each over its own devices, gradients averaged by DDP) where several small GPUs make up one large one; a
pipeline keeps the devices busy, fsdp uses the memory of all as well. It costs a copy of the activations between
neighbours, forward and backward. https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html;
Huang et al. 2019, https://arxiv.org/abs/1811.06965, figure 2b, shows the waiting.

What is before the first block goes with it to the first device, what is after the last one to the last. A weight used
in two places has one device, and both places compute there. It is built whole in the worker's host memory first, as
ddp_model_parallel does once per worker, and moved device by device; no GPU ever holds more than its own blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strategies import ddp, devices
from strategies.pipeline import partition
from strategies.strategy import Applied, Setup, Strategy
from strategies.tree import tree_map


def apply(setup: Setup) -> Applied:
    """Moves the module's parts to the worker's devices, in place; with several workers, replicated by DDP."""
    own = devices.own_devices(setup.device)
    used = place(setup.module, own, setup.blocks)
    applied = Applied(setup.module)
    if setup.group is not None:
        applied = ddp.wrap(setup.module, setup.group, setup.device, setup.options, spread=True)
    return replace(applied, notes=devices.remark(setup.strategy.name, own, used))


def place(module: nn.Module, devices: list[torch.device], blocks: list[str]) -> int:
    """Moves the module's blocks, and what is around them, in place and makes activations follow; how many devices are
    used."""
    units = [(name, owner, name in blocks) for name, owner in module.named_modules() if not _is_inside(name, blocks)]
    held = [[*owner.parameters(is_block), *owner.buffers(is_block)] for _, owner, is_block in units]
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in held]
    first, costs, last = partition.costs_around_blocks(zip(sizes, (is_block for *_, is_block in units)))
    counts = partition.balanced_partition(costs, min(len(devices), len(blocks)), first, last) if blocks else (1,)
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    placed: dict[int, torch.device] = {}  # tensors, by id: a shared one stays where it is first
    reached, left = 0, list(indices)
    for (_, owner, is_block), tensors in zip(units, held):
        if is_block:
            reached = left.pop(0)
        if tensors:
            device = next((placed[id(t)] for t in tensors if id(t) in placed), devices[reached])
            for tensor in (t for t in tensors if id(t) not in placed):
                placed[id(tensor)] = device
                tensor.data = tensor.data.to(device)
            owner.register_forward_pre_hook(_follow(device), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: _moved(output, devices[0]))
    return len(set(indices))


def _is_inside(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(block + ".") for block in blocks)


def _follow(device: torch.device) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved(args, device), _moved(kwargs, device)

    return hook


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda v: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v, values)


STRATEGY = Strategy(
    "model_parallel",
    "consecutive blocks on several devices of one process",
    apply=apply,
    one_process=True,
    several_devices=True,
    plannable=False,
)
REPLICATED = replace(
    ddp.STRATEGY,
    name="ddp_model_parallel",
    summary="DDP over workers that each spread the model over several devices",
    apply=apply,
    also=(),
    several_devices=True,
    plannable=False,
)
