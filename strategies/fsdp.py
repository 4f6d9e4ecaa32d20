"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state split over the workers.

Worker r of R owns row-slice r of every parameter. Per block:

    forward:   W = all-gather(Wᵣ)   y = f(x, W)   free W
    backward:  W = all-gather(Wᵣ)   dx, dW = ∂f   free W   dWᵣ = reduce-scatter(dW) / R
    step:      Wᵣ ← Wᵣ - η·AdamW(dWᵣ)        on the slice alone: AdamW is element by element

An all-reduce is a reduce-scatter and an all-gather, so ZeRO-3 sends half as much again as DDP (two gathers and a
scatter) and holds 16/R bytes per parameter instead of 16. While one block computes the next is being gathered: at most
two blocks are whole at a time. Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Zhao et al. 2023,
https://arxiv.org/abs/2304.11277; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.

Choose it when the training state does not fit on one device: first among the sharded ones, as it scales to any size.
The same function serves its relatives, which differ in when parameters are freed (zero.py) and in the shape of the
mesh (hsdp.py).

- *Units*: each repeating block; what is left (embeddings, the last norm, the head) is the root's, gathered for the
  whole step. A weight used in two places must be in one unit: blocks that share a weight stay with the root.
- *Padding*: each parameter is cut along dimension 0 as torch.chunk does, in slices of ⌈n/R⌉ rows, and a rank's memory
  holds a full slice even where fewer or no rows are left: a bias of 10 over 4 ranks is 3+3+3+1, stored as 12.
- *Accumulation*: of several micro-batches only the last reduce-scatters, and whole gradients wait until then
  (`accumulate_sharded` trades that memory for communication; `scatters_each` says when it is the default).
- *Buffers*, such as BatchNorm's running statistics, are not sharded and not synchronised: each worker keeps those of
  its own micro-batches, and rank 0's are saved. GroupNorm or SyncBatchNorm do not depend on the split.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from strategies import precision
from strategies.blocks import separable
from strategies.costs import STATES, Cost, ModelSize, ParameterSize, gather, step_bytes
from strategies.cpu_collectives import reduce_scatter
from strategies.options import Options

ROOM = 1 / 8

MicroStep = Callable[[bool], AbstractContextManager[Any]]


def apply(
    module: nn.Module, mesh: DeviceMesh, blocks: list[str], options: Options, *, reshard_after_forward: bool
) -> list[FSDPModule]:
    """Shards the module in place over `mesh` (2-D: replicate × shard) and returns its units, the root first."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    units: list[nn.Module] = []
    for name in separable(module, blocks):
        block = module.get_submodule(name)
        if not any(True for _ in block.parameters()):
            continue
        policy = precision.shard_policy(options.precision, options.reduce_dtype)
        fully_shard(
            block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, offload_policy=offload
        )
        units.append(block)
    policy = precision.root_policy(options.precision, options.reduce_dtype, options.float_output)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    _prefetch(units)  # type: ignore[arg-type]
    reduce_scatter.use_between_cpus([module, *units], mesh.device_type)  # type: ignore[list-item]
    return [module, *units]  # type: ignore[list-item]


def frees_after_forward(module: nn.Module, options: Options, device: torch.device) -> bool:
    """Whether blocks free their gathered parameters between forward and backward; the same on every rank. Collective.

    Keeping them saves the second gathering and holds all of them at once: that is done on a GPU where they take less
    than `ROOM` of what is free. What the person wrote goes before.
    """
    if options.reshard_after_forward is not None or device.type != "cuda":
        return options.reshard_after_forward is not False
    whole = sum(map(_numbers, module.parameters())) * (4 if options.precision == "fp32" else 2)
    return not _everywhere(whole < ROOM * torch.cuda.mem_get_info(device)[0], device)


def decided(asked: Options, chosen: Options) -> tuple[str, ...]:
    """What was decided by memory and is not what the name says, one sentence each."""
    found = []
    if asked.reshard_after_forward is None and not chosen.reshard_after_forward:
        found.append(
            "blocks keep their gathered parameters between forward and backward, for these take less than an eighth of "
            "the GPU's free memory: parallel.reshard_after_forward=true frees them"
        )
    if asked.accumulate_sharded is None and chosen.accumulate_sharded:
        found.append(
            "every micro-batch's gradients are scattered, for whole ones would take an eighth of the GPU's memory or "
            "more: parallel.accumulate_sharded=false keeps them until the last"
        )
    return tuple(found)


def scatters_each(module: nn.Module, options: Options, device: torch.device) -> bool:
    """Whether every micro-batch's gradients are reduced, or whole ones wait for the last; the same on every rank.
    Collective.

    Waiting saves communication and takes a whole model's gradients: that is done where they take less than `ROOM` of
    the GPU. (Of all its memory, not of what is free: a run that goes on later must add up in the same order.)
    """
    if options.accumulate_sharded is not None or device.type != "cuda":
        return bool(options.accumulate_sharded)
    number = 2 if options.reduce_dtype == "bf16" else 4
    whole = sum(_numbers(p) for p in module.parameters() if p.requires_grad) * number
    return not _everywhere(whole < ROOM * torch.cuda.mem_get_info(device)[1], device)


def _numbers(parameter: nn.Parameter) -> int:
    """What a rank computes with: its own part, where tensor parallelism has split it."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _everywhere(here: bool, device: torch.device) -> bool:
    """Whether it holds on every rank."""
    holds = torch.tensor(float(here), device=device)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN)
    return holds.item() == 1


def _prefetch(units: list[FSDPModule]) -> None:
    """Each block gathers its neighbour's parameters while it computes, instead of only when the neighbour begins."""
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def micro_step(units: list[FSDPModule], *, accumulate_sharded: bool, keep_gathered: bool) -> MicroStep:
    """What to put around forward and backward of a micro-batch.

    accumulate_sharded: reduce every micro-batch's gradients. keep_gathered: parameters stay whole between
    micro-batches (of one step: after the last the optimizer changes the shards).
    """
    root, nothing = units[0], contextlib.nullcontext()
    state = {"last": True}

    def context(last: bool) -> AbstractContextManager[Any]:
        if last is not state["last"]:
            state["last"] = last
            root.set_is_last_backward(last)
            if not accumulate_sharded:
                root.set_requires_gradient_sync(last)
            if keep_gathered:
                root.set_reshard_after_backward(last)
        return nothing

    return context


def shard_bytes(parameter: ParameterSize, ways: int) -> int:
    """What a rank holds of a parameter: a full slice, padding included."""
    return parameter.part(ways).bytes


def rows_held(parameter: ParameterSize, ways: int, rank: int) -> int:
    """Rows of dimension 0 that are the rank's, padding excluded."""
    rows = (parameter.shape or (1,))[0]
    part = -(-rows // ways)
    return max(0, min(part, rows - rank * part))


def cost(
    size: ModelSize,
    ways: int,
    options: Options | None = None,
    *,
    reshard_after_forward: bool = True,
    accumulate_sharded: bool = False,
    micro_batches: int = 1,
    optimizer: str = "adamw",
) -> Cost:
    """Exact for what rank 0 holds, whose slices are never short: parameters and gradients padded, optimizer state.

    `transient` is what is whole at the peak: the root's parameters and two blocks' (all blocks', if they are not freed
    after forward), and with several micro-batches and not `accumulate_sharded` the gradients waiting for the last.
    """
    options = options or Options()
    parameters = sum(shard_bytes(p, ways) for p in size.parameters)
    gradients = sum(shard_bytes(p, ways) for p in size.trainable)
    states = STATES[optimizer] * gradients + step_bytes(size.trainable, optimizer)
    compute, wire = (4 if options.precision == "fp32" else 2), (2 if options.reduce_dtype == "bf16" else 4)
    units = {unit: sum(_padded_numel(p, ways) for p in members) * compute for unit, members in size.units.items()}
    root = units.pop("", 0)
    blocks = sorted(units.values(), reverse=True)
    waiting = 0 if accumulate_sharded or micro_batches == 1 else sum(p.numel for p in size.trainable) * wire
    if reshard_after_forward:  # the root's parameters stay from forward to backward
        whole, gathered = root + sum(blocks[:2]), (root + 2 * sum(blocks)) * micro_batches
    else:
        whole, gathered = root + sum(blocks), root + sum(blocks)
    scattered = (
        sum(_padded_numel(p, ways) for p in size.trainable) * wire * (micro_batches if accumulate_sharded else 1)
    )
    sent = {"all_gather": gather(gathered, ways), "reduce_scatter": gather(scattered, ways)}
    return Cost(parameters, gradients, states, size.buffer_bytes, transient=whole + waiting, sent=sent)


def _padded_numel(parameter: ParameterSize, ways: int) -> int:
    return parameter.part(ways).numel * ways
