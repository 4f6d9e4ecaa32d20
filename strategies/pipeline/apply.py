"""Putting a model on a pipeline.

The model is traced and divided into stages; each worker keeps its own stage's parameters, shards
them over its data-parallel workers, and connects to the stages before and after it. What happens
between these steps, and why it happens there, is in strategies/parallelize.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from strategies import fsdp, precision
from strategies.blocks import separable
from strategies.context.apply import Context
from strategies.dims import Layout, LayoutError, ParallelDims, group_of_this_rank, submesh
from strategies.grad_sync import (
    CombinedSync,
    GradientBuckets,
    GradSync,
    Named,
    ShardedGradients,
    shard_without_hooks,
    split_off_experts,
)
from strategies.module_copy import copy_module
from strategies.options import Options
from strategies.parallel import Loss
from strategies.pipeline import partition, schedules, weight_grad
from strategies.pipeline.p2p import P2PComm
from strategies.pipeline.parallel import PipelineParallel
from strategies.pipeline.runtime import Runtime
from strategies.pipeline.stage import (
    Stage,
    StageAssignment,
    assign_stages,
    remove_other_parts,
    require_chain,
)
from strategies.pipeline.trace import Trace, Tracer, traced_modules
from strategies.state import tensor_attributes
from strategies.strategy import Setup, Strategy
from strategies.tensor import apply as tensor_parallel
from strategies.tensor.layers import SplitLayers
from strategies.traits import CHANGING_OR_HOOKED, Trait
from strategies.tree import tree_map

Example = tuple[Loss, Any]
"""A loss function and a micro-batch: running them shows what the model does."""


class Division:
    """A model divided into stages, of which this worker has one."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[str],
        *,
        layout: Layout,
        options: Options,
        device: torch.device,
        example: Example | None,
    ) -> None:
        """Trace and divide the model.

        Args:
            module: The model; it is not changed.
            blocks: The names of its blocks.
            layout: The degrees of parallelism.
            options: The schedule, and the sizes of stages if they are given.
            device: This worker's.
            example: Shows what the model does.

        Raises:
            LayoutError: There is no example, or the model cannot be divided.
        """
        if example is None:
            raise LayoutError(
                "a pipeline needs an example: give parallelize the loss function and a micro-batch"
            )
        stages = layout.dims.pp
        plan = plan_stages(module, blocks, options, stages=stages, example=example, device=device)
        self._plan = plan
        self._blocks = [call.path for call in plan.trace.blocks]  # in the order of their calls
        self._placement = schedules.Placement.of(options.schedule, stages, options.chunks)
        self._stage = layout.dims.coordinates(dist.get_rank())["pp"]
        self._parts = self._placement.parts_of(self._stage)
        self._deferred = weight_grad.DeferredWeightGrad()

    def keep_own_parts(self, module: nn.Module, options: Options) -> list[str]:
        """Take what other stages hold out of the model, in place.

        Returns:
            The names of this stage's blocks.
        """
        assignment = self._plan.assignment
        remove_other_parts(
            module,
            self._blocks,
            assignment=assignment,
            tracer=self._plan.tracer,
            parts=frozenset(self._parts),
        )
        # The backward of compiled code cannot be split into B and W.
        if options.schedule in schedules.SPLIT and not options.compile:
            for path in traced_modules(module, self._blocks):
                self._deferred.wrap(module.get_submodule(path))
        return [
            call.path
            for call in self._plan.trace.blocks
            if assignment.part_of[call.name] in self._parts
        ]

    def connect(
        self,
        setup: Setup,
        mesh: DeviceMesh,
        *,
        split: SplitLayers | None,
        notes: tuple[str, ...],
        context: Context | None = None,
    ) -> PipelineParallel:
        """Shard this stage over its data-parallel workers, and connect it with the other stages.

        Collective over all workers.

        Args:
            setup: The model and how it is to run.
            mesh: All workers.
            split: The layers that tensor parallelism has split.
            notes: Remarks for the user.
            context: The workers that share a sequence.
        """
        module = setup.module
        options = setup.options
        dims = setup.layout.dims
        sync = self._gradient_sync(setup)
        named = list(module.named_parameters())
        stage_group = submesh(mesh, "pp").get_group()
        stage = Stage(
            module,
            self._blocks,
            assignment=self._plan.assignment,
            tracer=self._plan.tracer,
            parts=self._parts,
        )
        comm = P2PComm(
            self._placement,
            self._stage,
            group=stage_group,
            device=setup.device,
            pipelines=_pipelines(dims),
        )
        runtime = Runtime(
            stage,
            comm,
            self._placement,
            autocast=precision.autocast(options.precision, setup.device.type, options.weight_dtype),
            wire=_narrow_dtype(options),
            sync=sync,
            deferred=self._deferred,
            after_forward=split.forget_inputs if split is not None else _nothing,
        )
        stages_of = self._stages_of_parameters()
        shared = _shared_parameters(named, stages_of, dims)
        # A parameter on several stages counts in the gradient's norm on the first of them.
        counted = [p for name, p in named if stages_of[name][0] == self._stage]
        sums = tensor_parallel.GradientSums(module, split) if split is not None else None
        return PipelineParallel(
            module,
            layout=setup.layout,
            device=setup.device,
            options=options,
            runtime=runtime,
            stage_group=stage_group,
            shared=shared,
            counted=counted,
            after_step=sums.finish if sums is not None else _nothing,
            group=setup.group,
            notes=(*notes, *_unsplit_backward_notes(options)),
            context=context,
        )

    def _stages_of_parameters(self) -> dict[str, tuple[int, ...]]:
        """The name of each parameter → the stages that use it, in order."""
        stages_of: dict[str, tuple[int, ...]] = {}
        for name, parts in self._plan.assignment.owners.items():
            stages = {self._placement.stage_of(part) for part in parts}
            stages_of[name] = tuple(sorted(stages))
        return stages_of

    def _gradient_sync(self, setup: Setup) -> GradSync | None:
        """Shard the model where the strategy says so, load it, and make what reduces its gradients.

        There are up to three kinds of parameters, which different workers share: experts that are
        split over workers, parameters that cannot be sharded, and all others.
        """
        experts = setup.experts
        shards = _shard(setup)
        setup.load()
        of_experts, others = split_off_experts(list(setup.module.named_parameters()), experts)
        of_whole = [(name, p) for name, p in others if name in shards.whole]
        of_others = [(name, p) for name, p in others if name not in shards.whole]

        syncs: list[GradientBuckets | ShardedGradients] = []
        if shards.experts and experts is not None and experts.mesh is not None:
            syncs.append(
                self._reduce_scatter(setup, of_experts, units=shards.experts, mesh=experts.mesh)
            )
        elif experts is not None and experts.group is not None and of_experts:
            syncs.append(self._all_reduce(setup, of_experts, experts.group))
        if setup.group is not None and of_whole:
            syncs.append(self._all_reduce(setup, of_whole, setup.group))
        if shards.others and setup.mesh is not None:
            syncs.append(
                self._reduce_scatter(setup, of_others, units=shards.others, mesh=setup.mesh)
            )
        elif setup.group is not None and of_others:
            syncs.append(self._all_reduce(setup, of_others, setup.group))
        if len(syncs) > 1:
            return CombinedSync(syncs)
        return syncs[0] if syncs else None

    def _all_reduce(self, setup: Setup, named: Named, group: dist.ProcessGroup) -> GradientBuckets:
        return GradientBuckets(self._by_chunk(named), group, setup.options)

    def _reduce_scatter(
        self, setup: Setup, named: Named, *, units: list[FSDPModule], mesh: DeviceMesh
    ) -> ShardedGradients:
        by_chunk = self._by_chunk(named)
        return ShardedGradients(setup.module, units, by_chunk, mesh=mesh, options=setup.options)

    def _by_chunk(self, named: Named) -> dict[int, Named]:
        """For each chunk the parameters whose gradients are complete when the chunk is done.

        Backward passes the chunks of a stage from the last to the first, so these are the
        parameters that no earlier chunk of the stage uses.
        """
        by_chunk: dict[int, Named] = {}
        for name, parameter in named:
            users = self._plan.assignment.owners[name]
            chunks = [chunk for chunk, part in enumerate(self._parts) if part in users]
            by_chunk.setdefault(min(chunks, default=0), []).append((name, parameter))
        return by_chunk


# --- dividing a model -----------------------------------------------------------------------------


class StagePlan(NamedTuple):
    """How a model is divided: what it does, and which part of the pipeline does it."""

    tracer: Tracer
    trace: Trace
    assignment: StageAssignment


def plan_stages(
    module: nn.Module,
    blocks: list[str],
    options: Options,
    *,
    stages: int,
    example: Example,
    device: torch.device,
) -> StagePlan:
    """Trace a model and divide it; needs no process group.

    Args:
        module: The model, on meta or with data; it is not changed.
        blocks: The names of its blocks.
        options: The schedule, its chunks, and the sizes of stages if they are given.
        stages: Number of stages.
        example: Shows what the model does.
        device: The device that its tensors say they are on.

    Raises:
        LayoutError: There are too few blocks, they do not form a chain, or `parallel.stages` does
            not fit them.
    """
    chunks = schedules.chunks_per_stage(options.schedule, options.chunks)
    parts = stages * chunks
    partition.require_blocks(len(blocks), stages, chunks)
    loss, batch = example
    tracer = Tracer(without_data(module), blocks, device)
    trace = tracer.trace(loss, _on_device(batch, device))
    require_chain(trace, blocks)
    if options.stages is not None:
        sizes = partition.require_sizes(options.stages, len(blocks), parts)
    else:
        calls = [(call.cost, call.is_block) for call in trace.calls]
        first, costs, last = partition.costs_around_blocks(calls, trace.last_cost)
        sizes = partition.balanced_partition(costs, parts, first=first, last=last)
    return StagePlan(tracer, trace, assign_stages(tracer, trace, sizes))


def _on_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def without_data(module: nn.Module) -> nn.Module:
    """A copy of a model with its parameters on meta; tied parameters stay tied.

    Tensors that modules have computed from parameters go to meta too, such as the weight of
    torch.nn.utils.weight_norm: Python cannot copy them with their graph.
    """
    replacements: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    for owner in module.modules():
        for _, value in tensor_attributes(owner):
            if not value.is_leaf:
                replacements[id(value)] = torch.empty_like(
                    value, device="meta", requires_grad=False
                )
    return copy_module(module, replacements)


# --- sharding and sharing -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shards:
    """What `_shard` has done.

    Args:
        experts: The units that experts are gathered in.
        others: The units that other parameters are gathered in.
        whole: The names of parameters that cannot be sharded.
    """

    experts: list[FSDPModule]
    others: list[FSDPModule]
    whole: frozenset[str]


def _shard(setup: Setup) -> _Shards:
    """Shard a stage's parameters over its data-parallel workers, if the strategy says so."""
    module = setup.module
    experts = setup.experts
    if setup.mesh is None or not setup.strategy.is_sharded:
        return _Shards([], [], frozenset())
    compute = _narrow_dtype(setup.options)
    expert_units: list[FSDPModule] = []
    if experts is not None and experts.mesh is not None:
        expert_units = shard_without_hooks(
            [mixture.experts for mixture in experts.mixtures],
            experts.mesh,
            placement=experts.placement,
            compute=compute,
        )
    whole = dict(fsdp.unshardable_parameters(module, setup.mesh))
    done = set(whole.values())
    if expert_units and experts is not None:
        for mixture in experts.mixtures:
            done.update(mixture.experts.parameters())
    blocks = [module.get_submodule(name) for name in separable(module, setup.blocks)]
    units = shard_without_hooks(
        [*blocks, module],
        setup.mesh,
        placement=fsdp.placement(setup.mesh),
        excluded=done,
        compute=compute,
    )
    return _Shards(expert_units, units, frozenset(whole))


def _narrow_dtype(options: Options) -> torch.dtype | None:
    """The type of 16-bit arithmetic; None if all arithmetic is in float32."""
    return None if options.precision == "fp32" else precision.DTYPES[options.precision]


def _pipelines(dims: ParallelDims) -> list[list[int]]:
    """The ranks of every pipeline, first stage first."""
    ranks_per_stage = dims.world_size // dims.pp
    return [
        [stage * ranks_per_stage + offset for stage in range(dims.pp)]
        for offset in range(ranks_per_stage)
    ]


def _shared_parameters(
    named: Named, stages_of: dict[str, tuple[int, ...]], dims: ParallelDims
) -> dict[dist.ProcessGroup, Named]:
    """The parameters that this stage shares with others, by the group that shares them.

    Collective over all workers, because every worker takes part in making every group.
    """
    own_parameters = dict(named)
    shared: dict[dist.ProcessGroup, Named] = {}
    sharing = {stages for stages in stages_of.values() if len(stages) > 1}
    for stages in sorted(sharing):
        ranks = [[pipeline[stage] for stage in stages] for pipeline in _pipelines(dims)]
        group = group_of_this_rank(ranks)
        if group is not None:
            names = [name for name, users in stages_of.items() if users == stages]
            shared[group] = [(name, own_parameters[name]) for name in names]
    return shared


def _unsplit_backward_notes(options: Options) -> tuple[str, ...]:
    """Remarks for the user if the schedule would split backward and cannot."""
    if options.schedule not in schedules.SPLIT:
        return ()
    if options.compile:
        cause = "of compiled blocks"
        remedy = "train.compile=false"
    elif options.precision == "fp8":
        cause = "of float8 layers"
        remedy = "train.precision=bf16"
    else:
        return ()
    return (
        f"backward {cause} cannot be split, so {options.schedule} does not defer the gradients of "
        f"weights and has the bubble of 1f1b: {remedy} lets it split backward",
    )


def _nothing() -> None:
    """Has nothing to do."""


STRATEGY = Strategy(
    name="pipeline",
    summary="blocks split into stages",
    degrees=("pp",),
    combines_with=("dp_replicate", "dp_shard", "cp", "tp", "ep"),
    # The loss is computed where the last block is, without the parameters of the other stages. The
    # forward of a stage begins with tensors that were sent to it, and in every micro-batch it sends
    # gradients back for all of them.
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
        Trait.CALLED_TWICE,
        Trait.CALLS_VARY,
        Trait.PARAMETERS_VARY,
        Trait.VARIES_BY_CALL,
        Trait.CHANGES_REQUIRES_GRAD,
    },
)
