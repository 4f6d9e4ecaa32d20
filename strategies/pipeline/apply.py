"""Putting a model on a pipeline: trace it, divide it, keep one's own blocks; then shard them and connect the stages.

What comes between, and why there, is in parallelize.py.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies import fsdp, precision
from strategies.blocks import separable
from strategies.context.apply import Context
from strategies.dims import Layout, LayoutError, ParallelDims, group_of_this_rank, submesh
from strategies.grad_sync import (
    GradientBuckets,
    GradSync,
    Named,
    ShardedGradients,
    Together,
    shard_without_hooks,
    split_off_experts,
)
from strategies.options import Options
from strategies.parallel import Loss
from strategies.pipeline import partition, schedules, weight_grad
from strategies.pipeline.p2p import P2PComm
from strategies.pipeline.parallel import PipelineParallel
from strategies.pipeline.runtime import Runtime
from strategies.pipeline.stage import Stage, StageAssignment, assign, keep_own, require_chain
from strategies.pipeline.trace import Trace, Tracer, traced_modules
from strategies.state import tensor_attributes
from strategies.strategy import Setup, Strategy
from strategies.tensor import apply as tensor_parallel
from strategies.tensor.layers import SplitLayers
from strategies.traits import CHANGING_OR_HOOKED, Trait
from strategies.tree import tree_map

Example = tuple[Loss, Any]
"""The loss function, and a micro-batch: a model is understood by running them."""


class Division:
    """A model divided into stages, of which this worker has one. Collective over all workers."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[str],
        layout: Layout,
        options: Options,
        device: torch.device,
        example: Example | None,
    ) -> None:
        if example is None:
            raise LayoutError("a pipeline needs an example: give parallelize the loss function and a micro-batch")
        dims = layout.dims
        self.tracer, self.trace, self.assignment = plan_stages(module, blocks, options, dims.pp, example, device)
        self.blocks = [call.path for call in self.trace.blocks]  # in the order of their calls
        self.placement = schedules.Placement.of(options.schedule, dims.pp, options.chunks)
        self.stage = dims.coordinates(dist.get_rank())["pp"]
        self.parts = self.placement.own(self.stage)
        self.deferred = weight_grad.DeferredWeightGrad()

    def keep_own(self, module: nn.Module, options: Options) -> list[str]:
        """Takes what other stages own out of the module, in place; this stage's blocks."""
        keep_own(module, self.blocks, self.assignment, self.tracer, frozenset(self.parts))
        # What is compiled has its backward in one piece.
        if options.schedule in schedules.SPLIT and not options.compile:
            for path in traced_modules(module, self.blocks):
                self.deferred.wrap(module.get_submodule(path))
        return [call.path for call in self.trace.blocks if self.assignment.part_of[call.name] in self.parts]

    def connect(
        self,
        setup: Setup,
        mesh: DeviceMesh,
        split: SplitLayers | None,
        notes: tuple[str, ...],
        context: Context | None = None,
    ) -> PipelineParallel:
        """Shards this stage over its data-parallel workers, and connects it with the others."""
        module, options, device, dims = setup.module, setup.options, setup.device, setup.layout.dims
        sync = self._gradient_sync(setup)
        named = list(module.named_parameters())
        stage_group = submesh(mesh, "pp").get_group()
        runtime = Runtime(
            Stage(module, self.blocks, self.assignment, self.tracer, self.parts),
            P2PComm(self.placement, self.stage, stage_group, device, _pipelines(dims)),
            self.placement,
            autocast=precision.autocast(options.precision, device.type),
            wire=None if options.precision == "fp32" else precision.DTYPES[options.precision],
            sync=sync,
            deferred=self.deferred,
            clear=split.forget if split is not None else lambda: None,
        )
        shared, counted = _shared(named, self.assignment, dims, self.placement, self.stage)
        return PipelineParallel(
            module,
            setup.layout,
            device,
            runtime,
            shared,
            options,
            stage_group=stage_group,
            counted=counted,
            after_step=tensor_parallel.GradientSums(module, split).finish if split is not None else lambda: None,
            group=setup.group,
            notes=(*notes, *_whole_backward(options)),
            context=context,
        )

    def _gradient_sync(self, setup: Setup) -> GradSync | None:
        """Shards what is sharded, and loads. Experts that are split have fewer workers to share them with."""
        module, options, experts = setup.module, setup.options, setup.experts
        split: list[Any] = []
        units: list[Any] = []
        whole: set[str] = set()
        compute = None if options.precision == "fp32" else precision.DTYPES[options.precision]
        if setup.mesh is not None and setup.strategy.is_sharded:
            if experts is not None and experts.mesh is not None:
                split = shard_without_hooks(
                    [found.experts for found in experts.mixtures],
                    experts.mesh,
                    placement=experts.placement,
                    compute=compute,
                )
            owners = [module.get_submodule(name) for name in separable(module, setup.blocks)]
            kept = dict(fsdp.unshardable_parameters(module, setup.mesh))
            whole, done = set(kept), set(kept.values()).union(*(unit.parameters() for unit in split))
            units = shard_without_hooks(
                [*owners, module],
                setup.mesh,
                placement=fsdp.placement(setup.mesh),
                but=done,
                compute=compute,
            )
        setup.load()
        syncs: list[GradientBuckets | ShardedGradients] = []
        own, others = split_off_experts(list(module.named_parameters()), experts)
        of_experts = (own, split, experts.mesh, experts.group) if experts is not None else ([], [], None, None)
        of_whole: Any = ([(n, p) for n, p in others if n in whole], [], None, setup.group)
        of_others = ([(n, p) for n, p in others if n not in whole], units, setup.mesh, setup.group)
        for named, sharded, mesh, group in (of_experts, of_whole, of_others):
            by_chunk = _by_chunk(named, self.assignment, self.parts)
            if sharded and mesh is not None:
                syncs.append(ShardedGradients(module, sharded, by_chunk, mesh, options))
            elif group is not None and named:
                syncs.append(GradientBuckets(by_chunk, group, options))
        return Together(syncs) if len(syncs) > 1 else syncs[0] if syncs else None


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
    """A copy whose parameters are on meta; tied ones stay tied. So are tensors that modules have computed from them
    (the weight of torch.nn.utils.weight_norm), which Python cannot copy with their graph."""
    kept: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    for owner in module.modules():
        for _, value in tensor_attributes(owner):
            if not value.is_leaf:
                kept[id(value)] = torch.empty_like(value, device="meta", requires_grad=False)
    return copy.deepcopy(module, kept)


def _by_chunk(named: Named, assignment: StageAssignment, own: tuple[int, ...]) -> dict[int, Named]:
    """Per chunk the parameters whose gradients are complete when it is: those no later chunk of the stage uses.

    Backward passes the chunks of a stage from the last to the first."""
    ready: dict[int, Named] = {}
    for name, parameter in named:
        using = [chunk for chunk, part in enumerate(own) if part in assignment.owners[name]]
        ready.setdefault(min(using, default=0), []).append((name, parameter))
    return ready


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
        group = group_of_this_rank([[ranks[s] for s in stages] for ranks in _pipelines(dims)])
        if group is not None:
            found[group] = [(name, own[name]) for name, several in users.items() if several == stages]
    return found, [p for name, p in named if users[name][0] == stage]


def _whole_backward(options: Options) -> tuple[str, ...]:
    if options.schedule not in schedules.SPLIT or not (options.compile or options.precision == "fp8"):
        return ()
    what, instead = (
        ("what is compiled", "train.compile=false") if options.compile else ("float8", "train.precision=bf16")
    )
    return (
        f"{what} has its backward in one piece, so {options.schedule} defers no weights' gradients and has 1f1b's "
        f"bubble: {instead} lets it split them",
    )


STRATEGY = Strategy(
    name="pipeline",
    summary="blocks split into stages",
    degrees=("pp",),
    combines_with=("dp_replicate", "dp_shard", "cp", "tp", "ep"),
    # The loss is computed where the last block is, without the parameters of the other stages; forward of a stage
    # begins at tensors that were sent to it, and gradients come back for all of them in every micro-batch.
    cannot_keep=CHANGING_OR_HOOKED
    | {
        Trait.ACTIVATION_HOOK,
        Trait.BACKWARD_HOOK,
        Trait.LOSS_READS_PARAMETERS,
        Trait.LISTS_PARAMETERS,
        Trait.CUTS_GRAPH,
        Trait.CHANGES_INPUT,
        Trait.CHANGES_OUTPUT,
        Trait.RUNS_WITHOUT_GRADIENT,
        Trait.GRADIENT_IN_LOSS,
        Trait.FUNCTIONAL_CALL,
        Trait.CALLS_VARY,
        Trait.PARAMETERS_VARY,
        Trait.VARIES_BY_CALL,
        Trait.CHANGES_REQUIRES_GRAD,
    },
)
