"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state are sharded.

Worker r of R owns row-slice r of every parameter. Per block:

    forward:   W = all-gather(Wᵣ)   y = f(x, W)   free W
    backward:  W = all-gather(Wᵣ)   dx, dW = ∂f   free W   dWᵣ = reduce-scatter(dW) / R
    step:      Wᵣ ← Wᵣ - η·AdamW(dWᵣ)        on the shard alone: AdamW works element by element

An all-reduce is a reduce-scatter and an all-gather, so ZeRO-3 (two gathers and a scatter) sends 1.5
times as much as DDP, and holds 16/R bytes per parameter instead of 16. While one block computes,
the next one is being gathered, so at most two blocks are unsharded at a time. Rajbhandari et al.
2020, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, https://arxiv.org/abs/2304.11277;
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.

Choose it when the training state does not fit on one device. It is the first choice among the
sharded strategies, since it scales to any size. Its relatives, ZeRO 1 and 2 and HSDP, are the same
functions (see the end of this file). They differ in when parameters are freed, when gradients are
reduced, and in the shape of the mesh.

- *Units*: each repeating block is a unit. What is left (embeddings, the last norm, the head)
  belongs to the root unit, which stays gathered for the whole step. A weight that is used in two
  places must be in one unit, so blocks that share a weight belong to the root unit.
- *Whole parameters*: a parameter without dimensions (CLIP's temperature) cannot be sharded. Every
  worker keeps it whole, and its gradient is averaged. The same holds for parameters without
  elements, for complex ones, and for those of another type than the rest of their unit (float32
  norms in bfloat16 blocks), because a unit's gradients are reduced together.
- *Padding*: each parameter is split along dimension 0 as torch.chunk does, in slices of ⌈n/R⌉ rows.
  A rank allocates a full slice even if fewer rows, or none, are left: a bias of 10 over 4 ranks is
  3+3+3+1, stored as 12.
- *Accumulation*: of several micro-batches only the last one reduce-scatters, and unsharded
  gradients wait until then (parallel.accumulate_sharded trades that memory for communication).
- *Memory decides*: keeping gathered parameters from forward to backward saves the second gather,
  and letting gradients wait saves repeated reductions. A GPU does each of them where it takes less
  than `MEMORY_SHARE` of its memory, unless the configuration decides.
- *Buffers*, such as BatchNorm's running statistics, are neither sharded nor synchronised. Each
  worker keeps those of its own micro-batches, and rank 0's are saved. GroupNorm and SyncBatchNorm
  do not depend on how the batch is split.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from strategies import precision
from strategies.blocks import separable
from strategies.costs import (
    Collective,
    Cost,
    Number,
    RankSize,
    StepShape,
    UnitSize,
    fsdp_dim,
    optimizer_bytes,
)
from strategies.grad_sync import Named, local
from strategies.mixtures import SplitExperts
from strategies.options import Options
from strategies.parallel import WholeStep
from strategies.strategy import Applied, MicroStep, Setup, Strategy
from strategies.traits import CHANGING_OR_HOOKED, Trait

MEMORY_SHARE = 1 / 8
"""The share of a GPU's memory that may be spent on sending less."""


def apply(setup: Setup) -> Applied:
    """Shards the module in place over the data-parallel workers; collective over them."""
    module = setup.module
    assert setup.mesh is not None
    reshard_after_forward, reshard_notes = _reshard_after_forward(setup)
    reduce_scatter_each_microbatch, reduce_notes = _reduce_scatter_each_microbatch(setup)
    unsharded = whole_parameters(module, setup.mesh, setup.blocks)
    notes = (*reshard_notes, *reduce_notes, *_whole_parameter_notes(unsharded, module))
    whole_names = {name for name, _ in unsharded}

    root = WholeStep(module)
    units = shard(
        root,
        setup.mesh,
        blocks=setup.blocks,
        options=setup.options,
        reshard_after_forward=reshard_after_forward,
        experts=setup.experts,
    )
    setup.load()
    step = micro_step(
        units,
        reduce_scatter_each_microbatch=reduce_scatter_each_microbatch,
        keep_gathered=not reshard_after_forward,
    )
    if setup.group is not None:
        # Loading has replaced the parameters, but not their names.
        loaded = [p for name, p in module.named_parameters() if name in whole_names]
        step = average_whole_parameters(loaded, setup.group, step)
    return Applied(root, micro_step=step, is_whole_step=True, casts=True, notes=notes)


def shard(
    root: WholeStep,
    mesh: DeviceMesh,
    *,
    blocks: list[str],
    options: Options,
    reshard_after_forward: bool,
    experts: SplitExperts | None = None,
) -> list[FSDPModule]:
    """Shards the model in `root` in place.

    Args:
        root: The whole model.
        mesh: The data-parallel workers, (replicate ×) shard.
        blocks: Names of the repeating blocks, each of which becomes a unit.
        options: Precision and offloading.
        reshard_after_forward: Whether blocks free their gathered parameters after forward.
        experts: Experts that are already split over the workers. They are sharded over those
            workers that hold the same experts, as units inside their blocks.

    Returns:
        The units: the root, the blocks, the experts.
    """
    module = root.module
    offload: OffloadPolicy = OffloadPolicy()
    if options.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    policy, root_policy = precision.shard_policies(options.precision, options.reduce_dtype)
    ignored = {p for _, p in whole_parameters(module, mesh, blocks)}
    precision.cast_calls(module, options.precision, options.float_output, whole=ignored)
    place = placement(mesh)

    expert_units: list[Any] = experts.modules_in(module) if experts is not None else []
    for unit in expert_units:
        assert experts is not None
        fully_shard(
            unit,
            mesh=experts.mesh,
            shard_placement_fn=experts.placement,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )
    block_units: list[Any] = []
    for name in separable(module, blocks):
        block = module.get_submodule(name)
        if any(True for _ in block.parameters()):
            block_units.append(block)
    experts_in = {unit: experts.modules_in(unit) if experts else [] for unit in block_units}
    for unit in block_units:
        fully_shard(
            unit,
            mesh=mesh,
            shard_placement_fn=place,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )
    fully_shard(
        root,
        mesh=mesh,
        shard_placement_fn=place,
        reshard_after_forward=False,
        mp_policy=root_policy,
        offload_policy=offload,
        ignored_params=ignored,
    )
    # While a block computes, its neighbour's parameters are gathered.
    for before, after in itertools.pairwise(block_units):
        before.set_modules_to_forward_prefetch([after, *experts_in[after]])
        after.set_modules_to_backward_prefetch([before, *experts_in[before]])
    sharded_root: Any = root  # `fully_shard` has made it an FSDPModule
    return [sharded_root, *block_units, *expert_units]


def micro_step(
    units: list[FSDPModule], *, reduce_scatter_each_microbatch: bool, keep_gathered: bool
) -> MicroStep:
    """The context of a micro-batch, which tells `fully_shard` whether it is the last of the step.

    Args:
        units: What `shard` has returned; the root comes first.
        reduce_scatter_each_microbatch: Whether every micro-batch's gradients are reduced, instead
            of their sum after the last one.
        keep_gathered: Whether parameters stay unsharded between the micro-batches of a step. After
            the last one the optimizer changes the shards, so they are gathered again.
    """
    root = units[0]
    no_context = contextlib.nullcontext()
    was_last = True  # as `fully_shard` assumes

    def context(last: bool) -> AbstractContextManager[Any]:
        nonlocal was_last
        if last is not was_last:
            was_last = last
            root.set_is_last_backward(last)
            if not reduce_scatter_each_microbatch:
                root.set_requires_gradient_sync(last)
            if keep_gathered:
                root.set_reshard_after_backward(last)
        return no_context

    return context


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """The `shard_placement_fn` of `fully_shard` over a mesh.

    Args:
        mesh: The data-parallel workers, (replicate ×) shard.

    Returns:
        A function from a parameter to the dimension that it is sharded along, or to None for a
        parameter that is kept whole.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        shape = tuple(parameter.shape)
        is_uneven = False
        if isinstance(parameter, DTensor):
            shape = tuple(parameter.to_local().shape)
            has_split_rows = parameter.placements[0].is_shard(0)
            is_uneven = has_split_rows and parameter.shape[0] % parameter.device_mesh.size() != 0
        dim = fsdp_dim(shape, is_uneven, mesh.size(-1))
        return None if dim is None else Shard(dim)

    return place


# --- parameters that every worker keeps whole -----------------------------------------------------


def whole_parameters(module: nn.Module, mesh: DeviceMesh, blocks: list[str]) -> Named:
    """The parameters that are not sharded; to be called before the others are."""
    return unshardable_parameters(module, mesh) + parameters_of_other_types(module, blocks)


def unshardable_parameters(module: nn.Module, mesh: DeviceMesh) -> Named:
    """The parameters that cannot be sharded; to be called before the others are.

    These have no dimensions or no elements, or are complex, which no backend reduce-scatters.
    """
    place = placement(mesh)
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if place(parameter) is None or parameter.is_complex() or parameter.numel() == 0
    ]


def parameters_of_other_types(module: nn.Module, blocks: list[str]) -> Named:
    """The trained parameters whose type differs from that of most numbers in their unit.

    `fully_shard` reduces the gradients of a unit in one collective, and so in one type; it wants
    one type of parameters even where a precision of 16 bits casts all of these. They cannot be
    units of their own, because code outside of their module's forward may read them.
    """
    units = separable(module, blocks)
    by_unit: dict[str, Named] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.is_complex():
            unit = next((block for block in units if name.startswith(f"{block}.")), "")
            by_unit.setdefault(unit, []).append((name, parameter))
    of_other_types: Named = []
    for named in by_unit.values():
        numel_by_type: Counter[torch.dtype] = Counter()
        for _, parameter in named:
            numel_by_type[parameter.dtype] += parameter.numel()
        usual_type = numel_by_type.most_common(1)[0][0]
        of_other_types += [(name, p) for name, p in named if p.dtype != usual_type]
    return of_other_types


def _whole_parameter_notes(whole: Named, module: nn.Module) -> list[str]:
    """A remark if whole parameters are a large part of the model."""
    size = sum(parameter.nbytes for _, parameter in whole)
    total = sum(parameter.nbytes for parameter in module.parameters())
    if size <= MEMORY_SHARE * total:
        return []
    others = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    return [
        f"{whole[0][0]}{others}, {size / total:.0%} of the parameters' bytes, are kept whole on "
        "every worker, because they are complex or of another type than the rest of their block: "
        "parameters of one type are sharded"
    ]


def average_whole_parameters(
    parameters: list[nn.Parameter], group: dist.ProcessGroup, step: MicroStep
) -> MicroStep:
    """Extends a MicroStep: a step's last micro-batch averages these parameters' gradients too.

    Args:
        parameters: The parameters that every worker keeps whole.
        group: The data-parallel workers.
        step: The MicroStep of the sharded parameters.
    """
    if not parameters:
        return step
    is_last = True

    @torch.no_grad()
    def average(parameter: torch.Tensor) -> None:
        if is_last and parameter.grad is not None:
            gradient = local(parameter.grad)
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)

    def context(last: bool) -> AbstractContextManager[Any]:
        nonlocal is_last
        is_last = last
        return step(last)

    return context


# --- what memory decides --------------------------------------------------------------------------

GATHERED_KEPT = (
    "blocks keep their gathered parameters between forward and backward, because they need less "
    "than an eighth of the GPU's free memory: parallel.reshard_after_forward=true frees them"
)
GRADIENTS_SCATTERED = (
    "every micro-batch's gradients are scattered, because whole ones would take an eighth of the "
    "GPU's memory or more: parallel.accumulate_sharded=false keeps them until the last"
)


def _reshard_after_forward(setup: Setup) -> tuple[bool, list[str]]:
    """Whether blocks free gathered parameters after forward, and a remark if memory decides."""
    options = setup.options
    choice = setup.strategy.reshards_after_forward(options.reshard_after_forward, None)
    if choice is not None:
        return choice, []
    itemsize = 4 if options.precision == "fp32" else 2
    size = _local_numel(setup.module.parameters()) * itemsize
    free_memory = _gpu_memory(setup.device, "free")
    reshard = _is_true_on_any_rank(parameters_are_large(size, free_memory), setup.device)
    return reshard, [] if reshard else [GATHERED_KEPT]


def _reduce_scatter_each_microbatch(setup: Setup) -> tuple[bool, list[str]]:
    """Whether each micro-batch's gradients are reduced, and a remark if memory decides.

    It depends on all of the GPU's memory, not on what is free: a resumed run must add up gradients
    in the same order.
    """
    options = setup.options
    choice = setup.strategy.reduces_each_microbatch(options.accumulate_sharded, None)
    if choice is not None:
        return choice, []
    trained = (p for p in setup.module.parameters() if p.requires_grad)
    itemsize = 2 if options.reduce_dtype == "bf16" else 4
    size = _local_numel(trained) * itemsize
    total_memory = _gpu_memory(setup.device, "total")
    reduce_each = _is_true_on_any_rank(gradients_are_large(size, total_memory), setup.device)
    return reduce_each, [GRADIENTS_SCATTERED] if reduce_each else []


def parameters_are_large(size: float, memory: float | None) -> bool:
    """Whether gathered parameters take too much memory to be kept from forward to backward.

    Args:
        size: Bytes of the gathered parameters.
        memory: Bytes of the GPU's free memory. None: on a CPU, which never keeps them.
    """
    return memory is None or size >= MEMORY_SHARE * memory


def gradients_are_large(size: float, memory: float | None) -> bool:
    """Whether whole gradients take too much memory to wait for the last micro-batch.

    Args:
        size: Bytes of the whole gradients.
        memory: Bytes of the GPU's memory. None: on a CPU, where they always wait.
    """
    return memory is not None and size >= MEMORY_SHARE * memory


def _gpu_memory(device: torch.device, kind: str) -> int | None:
    """Bytes of a GPU's free or total memory; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return free if kind == "free" else total


def _local_numel(parameters: Iterable[nn.Parameter]) -> int:
    """Number of elements that a rank computes with: its own slices, under tensor parallelism."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def _is_true_on_any_rank(condition: bool, device: torch.device) -> bool:
    """Collective over all ranks, which all get the same answer."""
    flag = torch.tensor(float(condition), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag.item() == 1


# --- what it costs --------------------------------------------------------------------------------


def cost(size: RankSize, step: StepShape) -> Cost:
    """Exact for rank 0, whose shards are never short: parameters and gradients are padded.

    `transient` is what is unsharded at the peak:

    - the root's parameters, and two blocks' (all blocks', if they are not freed after forward);
    - a third block that is being gathered, and one block's gradients that are being reduced;
    - with several micro-batches, the gradients that wait for the last one.
    """
    unsharded_blocks = size.blocks if _keeps_gathered(step) else size.two_largest_blocks
    unsharded = size.root + unsharded_blocks
    trained_numel = size.largest_block * size.sharded_gradients / size.sharded_parameters
    in_flight = size.largest_block * step.compute_itemsize + trained_numel * step.reduce_itemsize
    waits_for_last = step.micro_batches > 1 and not _reduces_each_microbatch(step)
    waiting: Number = 0
    if waits_for_last or step.pp > 1:
        waiting = size.gradients // step.gradient_itemsize * step.reduce_itemsize
    return Cost(
        parameters=size.sharded_parameters,
        gradients=size.sharded_gradients,
        optimizer=optimizer_bytes(
            size.sharded_gradients,
            size.tensors,
            step.optimizer,
            outside=size.outside,
            eight_bit_state=size.sharded_eight_bit_state,
            state_scale=step.state_scale,
        ),
        buffers=size.buffers,
        transient=unsharded * step.compute_itemsize + in_flight + waiting,
    )


def collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """Gathers before forward and backward, and reductions after it.

    Each runs once per step, or once per micro-batch.
    """
    keeps_gathered = _keeps_gathered(step)
    gathered_bytes = unit.gathered * step.compute_itemsize
    forward_gathers = 1 if keeps_gathered else step.micro_batches
    # The root stays gathered from forward to backward.
    backward_gathers = 0 if keeps_gathered or unit.is_root else step.micro_batches
    reductions = step.micro_batches if _reduces_each_microbatch(step) else 1
    shard_numel = (unit.sharded_gradients - unit.whole_gradients) // step.gradient_itemsize
    shard_bytes = shard_numel * step.reduce_itemsize

    forward = functools.partial(Collective, phase="forward")
    backward = functools.partial(Collective, phase="backward")
    sharded = (
        forward(name="all_gather", over="dp_shard", bytes=gathered_bytes, times=forward_gathers),
        backward(name="all_gather", over="dp_shard", bytes=gathered_bytes, times=backward_gathers),
        backward(
            name="reduce_scatter",
            over="dp_shard",
            bytes=shard_bytes * step.dp_shard,
            times=reductions,
        ),
        backward(name="all_reduce", over="dp_replicate", bytes=shard_bytes, times=reductions),
    )
    if not unit.whole_gradients:
        return sharded
    return (
        *sharded,
        backward(name="all_reduce", over="dp_shard", bytes=unit.whole_gradients, times=1),
        backward(name="all_reduce", over="dp_replicate", bytes=unit.whole_gradients, times=1),
    )


def _keeps_gathered(step: StepShape) -> bool:
    """Whether parameters are gathered once per step; a pipeline always does that (grad_sync.py)."""
    return step.pp > 1 or not step.reshard_after_forward


def _reduces_each_microbatch(step: StepShape) -> bool:
    """Whether every micro-batch's gradients are reduced; a pipeline reduces once (grad_sync.py)."""
    return step.pp == 1 and step.reduce_scatter_each_microbatch


STRATEGY = Strategy(
    name="fsdp",
    summary="parameters, gradients and optimizer state sharded over all workers",
    cost=cost,
    collectives=collectives,
    apply=apply,
    degrees=("dp_shard",),
    combines_with=("dp_replicate", "cp", "tp", "pp", "ep"),
    is_sharded=True,
    # Forward sees gathered copies, which are freed, so what it writes into them is lost. A hook
    # stays on the model's parameter, which the shard replaces. A block is gathered only for its
    # forward and its backward, by all workers together.
    cannot_keep=CHANGING_OR_HOOKED
    | {
        Trait.ACTIVATION_HOOK,
        Trait.BLOCK_READ_FROM_OUTSIDE,
        Trait.CHANGES_INPUT,
        Trait.GRADIENT_PAST_OUTPUT,
        Trait.GRADIENT_IN_LOSS,
        Trait.CALLS_VARY,
        Trait.PARAMETERS_VARY,
        Trait.CHANGES_REQUIRES_GRAD,
    },
)

# --- its relatives --------------------------------------------------------------------------------

# ZeRO stages 1 and 2: shard the optimizer state, then also the gradients, but compute with all
# parameters.
#
#     stage   parameters   gradients   AdamW state    communication, compared with DDP's all-reduce
#       0       all          all          all           the same (stage 0 is DDP)
#       1       all          all          1/R           the same: reduce-scatter, then all-gather
#       2       all          1/R          1/R           the same; a reduce-scatter per micro-batch
#       3       1/R          1/R          1/R           1.5 times as much
#
# AdamW needs only a shard's gradient to update the shard. So each worker updates 1/R of the
# parameters, and the results are gathered (Rajbhandari et al., figure 1). Both stages are
# `fully_shard` that keeps gathered parameters until backward is over. The optimizer sees the
# shards; gathering them for the next forward is stage 1's final all-gather. The optimizer state can
# be resharded (that of ZeroRedundancyOptimizer cannot). The stages differ in accumulation: stage 1
# adds up whole gradients and reduces once, stage 2 reduces those of each micro-batch and keeps
# shards. With one micro-batch per step they are the same.
#
# Choose zero1 when a device can hold the parameters and gradients but not the optimizer state, too;
# zero2 when whole gradients do not fit either; and fsdp when whole parameters do not. In a pipeline
# only fsdp exists, because there parameters are gathered once per step and gradients are scattered
# once, whatever the stage of ZeRO.

ZERO1 = replace(
    STRATEGY,
    name="zero1",
    summary="copies, optimizer state sharded",
    combines_with=("dp_replicate", "cp", "tp", "ep"),
    reshard_after_forward=False,
    reduce_scatter_each_microbatch=False,
)
ZERO2 = replace(
    ZERO1,
    name="zero2",
    summary="copies, optimizer state and gradients sharded",
    reduce_scatter_each_microbatch=True,
)
ZERO3 = replace(STRATEGY, name="zero3", alias_of="fsdp")

# Hybrid sharded data parallelism: shard within a node, replicate across nodes. On a mesh of G
# groups of S workers (dp_replicate × dp_shard) every group holds one sharded copy:
#
#     forward, backward:  all-gather parameters within the group        (fast links, every block)
#     backward:           reduce-scatter gradients within the group, then
#                         all-reduce the shards across groups           (slow links, 1/S of the
#                                                                        gradients, once)
#
# It is `fully_shard` on a two-dimensional mesh and nothing else. Choose it when one node's memory
# holds the sharded training state and there are several nodes: FSDP over all of them would gather
# every block over the slow links. It divides memory by S instead of by G·S (Zhao et al., §3.2.2).
# zero1 and zero2 accept a dp_replicate in the same way.

HSDP = replace(
    STRATEGY,
    name="hsdp",
    summary="sharded in groups, groups replicated",
    degrees=("dp_replicate", "dp_shard"),
    combines_with=("cp", "tp", "pp", "ep"),
)
