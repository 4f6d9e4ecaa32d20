"""Putting a model on a pipeline: trace it, divide it, keep one's own blocks, split and shard them, connect the stages.

The order is parallelize.py's (tensor, recomputation, then sharding), after other stages' blocks have been taken out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from strategies import activation_checkpointing, fsdp, precision, state
from strategies.blocks import compile_blocks
from strategies.dims import Layout, LayoutError, Options, ParallelDims, own_group, submesh
from strategies.grad_sync import GradientBuckets, GradSync, Named, ShardedGradients
from strategies.parallel import Loss
from strategies.pipeline import partition, schedules, weight_grad
from strategies.pipeline.p2p import P2PComm
from strategies.pipeline.parallel import PipelineParallel
from strategies.pipeline.runtime import Runtime
from strategies.pipeline.stage import Stage, StageAssignment, assign, keep_own, require_chain
from strategies.pipeline.trace import Trace, Tracer, traced_modules
from strategies.strategy import Strategy
from strategies.tensor import apply as tensor_parallel
from strategies.tree import tree_map

Example = tuple[Loss, Any]
"""The loss function, and a micro-batch: a model is understood by running them."""


def apply(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options,
    device: torch.device,
    find: Callable[[nn.Module], list[str]],
    plan: Callable[[nn.Module], dict[str, str] | None],
    example: Example | None,
) -> PipelineParallel:
    """See parallelize.parallelize; collective over all workers."""
    if example is None:
        raise LayoutError("a pipeline needs an example: give parallelize the loss function and a micro-batch")
    module, note = state.structure(build)
    state.require_parameters(module)
    dims, blocks = layout.dims, find(module)
    tracer, trace, assignment = plan_stages(module, blocks, options, dims.pp, example, device)
    blocks = [call.path for call in trace.blocks]  # in the order of their calls
    mesh = dims.build_mesh(device.type)
    placement = schedules.Placement.of(options.schedule, dims.pp, options.chunks)
    stage = dims.coordinates(dist.get_rank())["pp"]
    parts = placement.own(stage)
    notes = (*([note] if note else []), *state.batch_norm_notes(module, layout), *_whole_backward(options))
    split = tensor_parallel.apply(module, submesh(mesh, "tp"), plan(module), options) if dims.tp > 1 else None
    keep_own(module, blocks, assignment, tracer, frozenset(parts))
    own = [call.path for call in trace.blocks if assignment.part_of[call.name] in parts]
    deferred = weight_grad.DeferredWeightGrad()
    if options.schedule in schedules.SPLIT and not options.compile:  # what is compiled has its backward in one piece
        for path in traced_modules(module, blocks):
            deferred.wrap(module.get_submodule(path))
    if options.compile:
        compile_blocks(module, own, options.compile_backend)
    activation_checkpointing.apply(module, own, options.activation_checkpointing)
    units = _shard(module, dims, mesh, own, options) if dims.dp_shard > 1 else None
    state.materialise(module, device, torch.device("cpu") if options.offload else device)
    state.fill(module, build() if dist.get_rank() == 0 else None, device, partly=True)
    named = list(module.named_parameters())
    group = dims.data_group(mesh)
    sync = _grad_sync(module, units, _by_chunk(named, assignment, parts), dims, mesh, group, options)
    stage_group = submesh(mesh, "pp").get_group()
    comm = P2PComm(stage, stage_group, device, _pipelines(dims))
    runtime = Runtime(
        Stage(module, blocks, assignment, tracer, parts),
        comm,
        placement,
        autocast=precision.autocast(options.precision, device.type),
        sync=sync,
        deferred=deferred,
        clear=split.forget if split is not None else lambda: None,
    )
    shared, counted = _shared(named, assignment, dims, placement, stage)
    return PipelineParallel(
        module,
        layout,
        device,
        runtime,
        shared,
        options,
        stage_group=stage_group,
        counted=counted,
        calls=[(call.name, call.is_block) for call in trace.calls],
        after_step=tensor_parallel.GradientSums(module, split).finish if split is not None else lambda: None,
        group=group,
        notes=notes,
    )


def plan_stages(
    module: nn.Module, blocks: list[str], options: Options, stages: int, example: Example, device: torch.device
) -> tuple[Tracer, Trace, StageAssignment]:
    """Looks at the model (on meta or for real, untouched) and divides it; needs no process group.

    Raises:
        LayoutError: too few blocks, no chain, parallel.stages that do not fit.
    """
    chunks = schedules.chunks_of(options.schedule, options.chunks)
    partition.require_blocks(len(blocks), stages, chunks)
    parts = stages * chunks
    tracer = Tracer(without_numbers(module), blocks, device)
    loss, batch = example
    trace = tracer.trace(loss, tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, batch))
    require_chain(trace, blocks)
    if options.stages is not None:
        return tracer, trace, assign(tracer, trace, partition.require_sizes(options.stages, len(blocks), parts))
    calls = ((call.cost, call.is_block) for call in trace.calls)
    first, costs, last = partition.costs_around_blocks(calls, trace.last_cost)
    sizes = partition.balanced_partition(costs, parts, first, last)
    return tracer, trace, assign(tracer, trace, sizes)


def without_numbers(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on meta; tied ones stay tied."""
    kept = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, dict(kept))


def _shard(
    module: nn.Module, dims: ParallelDims, mesh: DeviceMesh, blocks: list[str], options: Options
) -> list[FSDPModule]:
    """Shards the stage's blocks and what is left; arithmetic in 16 bits is autocast's, as for replicas."""
    whole = replace(options, precision="fp32", reduce_dtype="fp32")
    return fsdp.shard(module, dims.data_mesh(mesh), blocks, whole, reshard_after_forward=False)


def _by_chunk(named: Named, assignment: StageAssignment, own: tuple[int, ...]) -> dict[int, Named]:
    """Per chunk the parameters whose gradients are complete when it is: those no later chunk of the stage uses.

    Backward passes the chunks of a stage from the last to the first."""
    ready: dict[int, Named] = {}
    for name, parameter in named:
        using = [chunk for chunk, part in enumerate(own) if part in assignment.owners[name]]
        ready.setdefault(min(using, default=0), []).append((name, parameter))
    return ready


def _grad_sync(
    module: nn.Module,
    units: list[FSDPModule] | None,
    by_chunk: dict[int, Named],
    dims: ParallelDims,
    mesh: DeviceMesh,
    group: dist.ProcessGroup | None,
    options: Options,
) -> GradSync | None:
    if units is not None:
        return ShardedGradients(module, units, by_chunk, dims.data_mesh(mesh), options)
    return None if group is None else GradientBuckets(by_chunk, group, options)


def _pipelines(dims: ParallelDims) -> list[list[int]]:
    """The ranks of every pipeline, first stage first."""
    width = dims.world_size // dims.pp
    return [[stage * width + offset for stage in range(dims.pp)] for offset in range(width)]


def _shared(
    named: Named, assignment: StageAssignment, dims: ParallelDims, placement: schedules.Placement, stage: int
) -> tuple[dict[dist.ProcessGroup, Named], list[nn.Parameter]]:
    """The sums over stages that share a parameter, and the parameters that this stage counts in the norm.

    Collective: every worker makes every group."""
    users = {
        name: tuple(sorted({placement.stage(part) for part in parts})) for name, parts in assignment.owners.items()
    }
    found: dict[dist.ProcessGroup, Named] = {}
    own = dict(named)
    for stages in sorted({stages for stages in users.values() if len(stages) > 1}):
        group = own_group([[ranks[s] for s in stages] for ranks in _pipelines(dims)])
        if group is not None:
            found[group] = [(name, own[name]) for name, several in users.items() if several == stages]
    return found, [p for name, p in named if users[name][0] == stage]


def _whole_backward(options: Options) -> tuple[str, ...]:
    if options.schedule not in schedules.SPLIT or not options.compile:
        return ()
    return (
        f"what is compiled has its backward in one piece, so {options.schedule} defers no weights' gradients and has "
        "1f1b's bubble: train.compile=false lets it split them",
    )


STRATEGY = Strategy(
    "pipeline",
    "blocks split into stages",
    degrees=("pp",),
    also=("dp_replicate", "dp_shard", "tp"),
    precisions=("fp32", "bf16", "fp16"),
)
