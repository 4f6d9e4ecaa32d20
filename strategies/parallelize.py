"""The one place that knows the order in which parallelisms are put on a model, and why.

1. **tensor** first: its plan matches modules by name, before anything changes what modules do;
   Then **float8**, whose layers are those that nobody has split, and what is recomputed or compiled holds them;
2. **activation checkpointing** inside everything that communicates parameters, so that what is recomputed in backward
   uses the parameters that were gathered once, and around the split layers, so that they are recomputed as they ran;
3. **compile** what is now a block's whole forward, but no hook of the sharding around it;
4. **shard or replicate** last, over parameters as the steps before left them.

The optimizer is built by the caller after that, over `Parallel.parameters()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from strategies import (
    activation_checkpointing,
    data_parallel,
    ddp,
    deepspeed,
    devices,
    float8,
    fsdp,
    hsdp,
    initialization,
    model_parallel,
    precision,
    replicate,
    single,
    zero,
)
from strategies import compile as compile_blocks
from strategies.blocks import find_blocks
from strategies.layout import MANY_DEVICES, Layout, LayoutError, ParallelDims, choose
from strategies.options import Options, check
from strategies.parallel import Parallel, no_communication
from strategies.pipeline.apply import Example
from strategies.pipeline.apply import apply as pipelined
from strategies.tensor import apply as tensor_parallel

__all__ = ["Example", "Layout", "LayoutError", "Options", "Parallel", "ParallelDims", "check", "choose", "parallelize"]

MicroStep = Callable[[bool], AbstractContextManager[Any]]
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
    example: Example | None = None,
) -> Parallel:
    """Builds the model and puts `layout` on it; collective over all ranks.

    build: gives the same weights whenever it is called, on any rank, and works under torch.device("meta").
    blocks, tensor_plan: for this model, or functions that answer for it; None: found, and every linear and embedding
    layer split by itself. example: (loss, micro-batch), as for Parallel.forward_backward; a pipeline needs it, because
    it learns from running them what the model does. The micro-batch may be of one row.

    Raises:
        LayoutError: one sentence; a model that does not fit the layout.
    """
    options = options or Options()
    check(layout, options)
    if layout.name == "deepspeed":
        return _deepspeed(build, layout, options, device, blocks)
    if layout.dims.pp > 1:
        return pipelined(
            build,
            layout,
            options,
            device,
            lambda module: find_blocks(module, _answer(blocks, module)),
            lambda module: _answer(tensor_plan, module),
            example,
        )
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
    initialization.require_parameters(module)
    names = find_blocks(module, _answer(blocks, module))
    narrowed = _float8(module, names, options, device)
    _recompute_and_compile(module, names, options)
    spread = layout.name in ("model_parallel", "ddp_model_parallel")
    if not spread:  # a model that is to be spread may be too large for one device
        module.to(device)
    autocast = precision.autocast(options.precision, device.type)
    notes = (*initialization.unsynchronised(module, layout), *narrowed)
    if layout.name in MANY_DEVICES:
        own = devices.own_devices(device)
        used = model_parallel.apply(module, own, names) if spread else len(own)
        notes = (*notes, *devices.remark(layout.name, own, used))
        if layout.name == "dp":
            return Parallel(
                data_parallel.apply(module, own), layout, device, inner=module, autocast=autocast, notes=notes
            )
    if layout.dims.world_size == 1:
        return Parallel(single.apply(module), layout, device, autocast=autocast, notes=notes)
    group = layout.dims.data_group(layout.dims.build_mesh(device.type))
    used_parameters = ddp.UsedParameters(module) if options.static_graph else None
    wrapped = ddp.apply(module, group, device, options, spread=spread)
    step = ddp.micro_step(wrapped, used_parameters)
    return Parallel(wrapped, layout, device, inner=module, group=group, micro_step=step, autocast=autocast, notes=notes)


def _deepspeed(
    build: Callable[[], nn.Module], layout: Layout, options: Options, device: torch.device, blocks: Blocks
) -> Parallel:
    deepspeed.require()
    config = deepspeed.configuration(options.deepspeed, options)
    module = build()
    initialization.require_parameters(module)
    _recompute_and_compile(module, find_blocks(module, _answer(blocks, module)), options)
    group = layout.dims.data_group(layout.dims.build_mesh(device.type)) if layout.dims.world_size > 1 else None
    return deepspeed.DeepSpeedParallel(
        module.to(device),
        layout,
        device,
        config,
        group=group,
        autocast=precision.autocast(options.precision, device.type),
        notes=(*initialization.unsynchronised(module, layout), *deepspeed.remark(config)),
    )


def _sharded(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options,
    device: torch.device,
    blocks: Blocks,
    tensor_plan: Plan,
) -> Parallel:
    """Split models: built on meta, split, then filled from rank 0's, tensor by tensor."""
    module, note = initialization.structure(build)
    initialization.require_parameters(module)
    source = build() if dist.get_rank() == 0 else None
    mesh = layout.dims.build_mesh(device.type)
    names = find_blocks(module, _answer(blocks, module))
    split = _split(module, layout, mesh, _answer(tensor_plan, module), options) if layout.dims.tp > 1 else None
    narrowed = _float8(module, names, options, device)
    _recompute_and_compile(module, names, options, split=split is not None)
    decided: tuple[str, ...] = ()
    if layout.dims.dp_shard > 1 and _stage(layout) == 3:
        asked = options
        options = replace(
            options,
            reshard_after_forward=fsdp.frees_after_forward(module, options, device),
            accumulate_sharded=fsdp.scatters_each(module, options, device),
        )
        decided = fsdp.decided(asked, options)
    units = _shard(module, layout, mesh, names, options) if layout.dims.dp_shard > 1 else None
    initialization.materialise(module, device, torch.device("cpu") if options.offload else device)
    initialization.fill(module, source, device)
    group = layout.dims.data_group(mesh)
    step: MicroStep = no_communication
    if units is not None:
        step = _shard_step(units, layout, options)
    elif group is not None:
        step = replicate.micro_step(list(module.named_parameters()), group, options, device)
    if split is not None:
        step = tensor_parallel.GradientSums(module, split).micro_step(step)
    autocast = contextlib.nullcontext if units is not None else precision.autocast(options.precision, device.type)
    notes = (*([note] if note else []), *initialization.unsynchronised(module, layout), *decided, *narrowed)
    return Parallel(module, layout, device, group=group, micro_step=step, autocast=autocast, notes=notes)


def _split(
    module: nn.Module, layout: Layout, mesh: DeviceMesh, plan: dict[str, str] | None, options: Options
) -> tensor_parallel.Split:
    return tensor_parallel.apply(
        module,
        mesh["tp"],
        plan,
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
    )


def _shard(
    module: nn.Module, layout: Layout, mesh: DeviceMesh, blocks: list[str], options: Options
) -> list[FSDPModule]:
    """Puts the sharded strategy of the layout on the module; its units."""
    sides = tuple(side for side in ("dp_replicate", "dp_shard") if getattr(layout.dims, side) > 1)
    if _stage(layout) < 3:
        return zero.apply(module, mesh[sides], blocks, options)
    apply = hsdp.apply if len(sides) > 1 else fsdp.apply
    return apply(module, mesh[sides], blocks, options, reshard_after_forward=options.reshard_after_forward is not False)


def _shard_step(units: list[FSDPModule], layout: Layout, options: Options) -> MicroStep:
    if _stage(layout) < 3:
        return zero.micro_step(units, _stage(layout), options)
    kept = options.reshard_after_forward is False
    return fsdp.micro_step(units, accumulate_sharded=bool(options.accumulate_sharded), keep_gathered=kept)


def _stage(layout: Layout) -> int:
    """1, 2 or 3, of ZeRO."""
    return {"zero1": 1, "zero2": 2}.get(layout.parts[0], 3)


def _float8(module: nn.Module, blocks: list[str], options: Options, device: torch.device) -> tuple[str, ...]:
    if options.precision != "fp8":
        return ()
    float8.require(device)
    return float8.apply(module, blocks)


def _recompute_and_compile(module: nn.Module, blocks: list[str], options: Options, split: bool = False) -> None:
    if options.compile and split:  # torch 2.13 cannot trace the recomputation of a block that holds DTensors
        compile_blocks.apply(module, blocks, options.compile_backend)
    activation_checkpointing.apply(module, blocks, options.activation_checkpointing)
    if options.compile and not split:
        compile_blocks.apply(module, blocks, options.compile_backend)


def _answer(asked: Any, module: nn.Module) -> Any:
    return asked(module) if callable(asked) else asked
