"""The one place that knows the order in which parallelisms are put on a model, and why.

1. **tensor** first: its plan matches modules by name, before anything changes what modules do;
2. **activation checkpointing** inside everything that communicates parameters, so that what is recomputed in backward
   uses the parameters that were gathered once, and around the split layers, so that they are recomputed as they ran;
3. **compile** what is now a block's whole forward, but no hook of the sharding around it;
4. **shard or replicate** last, over parameters as the steps before left them.

The optimizer is built by the caller after that, over `Parallel.parameters()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies import activation_checkpointing, compiled, ddp, fsdp, hsdp, precision, single, start, zero
from strategies.blocks import find_blocks
from strategies.dims import LayoutError, ParallelDims
from strategies.names import SHARDED, Layout, choose
from strategies.options import Options, check
from strategies.parallel import Parallel

__all__ = ["Layout", "LayoutError", "Options", "Parallel", "ParallelDims", "check", "choose", "parallelize"]

Blocks = list[str] | Callable[[nn.Module], list[str] | None] | None
Plan = dict[str, str] | Callable[[nn.Module], dict[str, str] | None] | None


def parallelize(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options | None = None,
    *,
    device: torch.device,
    blocks: Blocks = None,
    tensor_plan: Plan = None,
) -> Parallel:
    """Builds the model and puts `layout` on it; collective over all ranks.

    build: gives the same weights whenever it is called, on any rank, and works under torch.device("meta").
    blocks, tensor_plan: for this model, or functions that answer for it; None: found, and every linear and embedding
    layer split by itself.

    Raises:
        LayoutError: one sentence; a model that does not fit the layout.
    """
    options = options or Options()
    check(layout, options)
    if _is_sharded(layout):
        return _sharded(build, layout, options, device, blocks, tensor_plan)
    return _replicated(build, layout, options, device, blocks)


def _is_sharded(layout: Layout) -> bool:
    return layout.dims.tp > 1 or layout.dims.dp_shard > 1


def _replicated(
    build: Callable[[], nn.Module], layout: Layout, options: Options, device: torch.device, blocks: Blocks
) -> Parallel:
    """Whole models: every rank builds its own."""
    module = build()
    start.require_parameters(module)
    _recompute_and_compile(module, find_blocks(module, _answer(blocks, module)), options)
    module.to(device)
    autocast = precision.autocast(options.precision, device.type)
    if layout.dims.world_size == 1:
        return Parallel(single.apply(module), layout, device, autocast=autocast)
    group = layout.dims.data_group(layout.dims.build_mesh(device.type))
    used = ddp.UsedParameters(module)
    wrapped = ddp.apply(module, group, device, options)
    step = ddp.micro_step(wrapped, options, used)
    return Parallel(wrapped, layout, device, inner=module, group=group, micro_step=step, autocast=autocast)


def _sharded(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options,
    device: torch.device,
    blocks: Blocks,
    tensor_plan: Plan,
) -> Parallel:
    """Split models: built on meta, split, then filled from rank 0's, tensor by tensor."""
    module, note = start.structure(build)
    start.require_parameters(module)
    source = build() if dist.get_rank() == 0 else None
    mesh = layout.dims.build_mesh(device.type)
    names = find_blocks(module, _answer(blocks, module))
    _recompute_and_compile(module, names, options)
    step: Any = None
    if layout.dims.dp_shard > 1:
        step = _shard(module, layout, mesh, names, options)
    start.materialise(module, device, torch.device("cpu") if options.offload else device)
    start.fill(module, source, device)
    group = layout.dims.data_group(mesh)
    notes = (note,) if note else ()
    return Parallel(module, layout, device, group=group, micro_step=step, autocast=contextlib.nullcontext, notes=notes)


def _shard(module: nn.Module, layout: Layout, mesh: DeviceMesh, blocks: list[str], options: Options) -> fsdp.MicroStep:
    """Puts the sharded strategy of the layout on the module; returns its micro_step."""
    sides = tuple(side for side in ("dp_replicate", "dp_shard") if getattr(layout.dims, side) > 1)
    mesh = mesh[sides]
    name = next(part for part in layout.parts if part in SHARDED)
    if name in ("zero1", "zero2"):
        return zero.micro_step(zero.apply(module, mesh, blocks, options), int(name[-1]), options)
    free = options.reshard_after_forward is not False
    apply = hsdp.apply if len(sides) > 1 else fsdp.apply
    units = apply(module, mesh, blocks, options, reshard_after_forward=free)
    return fsdp.micro_step(units, accumulate_sharded=bool(options.accumulate_sharded), keep_gathered=not free)


def _recompute_and_compile(module: nn.Module, blocks: list[str], options: Options) -> None:
    activation_checkpointing.apply(module, blocks, options.activation_checkpointing)
    if options.compile:
        compiled.apply(module, blocks, options.compile_backend)


def _answer(asked: Any, module: nn.Module) -> Any:
    return asked(module) if callable(asked) else asked
