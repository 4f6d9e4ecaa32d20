"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state split over the workers.

Worker r of R owns row-slice r of every parameter. Per block:

    forward:   W = all-gather(Wᵣ)   y = f(x, W)   free W
    backward:  W = all-gather(Wᵣ)   dx, dW = ∂f   free W   dWᵣ = reduce-scatter(dW) / R
    step:      Wᵣ ← Wᵣ - η·AdamW(dWᵣ)        on the shard alone: AdamW is element by element

An all-reduce is a reduce-scatter and an all-gather, so ZeRO-3 sends half as much again as DDP (two gathers and a
scatter) and holds 16/R bytes per parameter instead of 16. While one block computes the next is being gathered: at most
two blocks are unsharded at a time. Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Zhao et al. 2023,
https://arxiv.org/abs/2304.11277; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.

Choose it when the training state does not fit on one device: first among the sharded ones, as it scales to any size.
Its relatives, ZeRO 1 and 2 and HSDP, are the same functions (at the end of this file): they differ in when parameters
are freed and gradients reduced, and in the shape of the mesh.

- *Units*: each repeating block; what is left (embeddings, the last norm, the head) is the root's, gathered for the
  whole step. A weight used in two places must be in one unit: blocks that share a weight stay with the root.
- *Whole*: a parameter without dimensions (CLIP's temperature) cannot be cut; every worker keeps it, and its gradient
  is averaged. So are parameters without elements, complex ones, and those of another type than the rest of their unit
  (float32 norms in bfloat16 blocks), because a unit's gradients are reduced together.
- *Padding*: each parameter is cut along dimension 0 as torch.chunk does, in slices of ⌈n/R⌉ rows, and a rank's memory
  holds a full slice even where fewer or no rows are left: a bias of 10 over 4 ranks is 3+3+3+1, stored as 12.
- *Accumulation*: of several micro-batches only the last reduce-scatters, and unsharded gradients wait until then
  (parallel.accumulate_sharded trades that memory for communication).
- *By memory*: keeping gathered parameters from forward to backward saves the second gathering, letting gradients wait
  saves their repeated reduction; each is done on a GPU of which it takes less than `ROOM`, unless the person decides.
- *Buffers*, such as BatchNorm's running statistics, are not sharded and not synchronised: each worker keeps those of
  its own micro-batches, and rank 0's are saved. GroupNorm or SyncBatchNorm do not depend on the split.
"""

from __future__ import annotations

import contextlib
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

ROOM = 1 / 8
"""Of a GPU's memory, what may be spent on sending less."""


def apply(setup: Setup) -> Applied:
    """Shards the module in place over the mesh of data-parallel workers (2-D: replicate × shard); collective."""
    module, options, device = setup.module, setup.options, setup.device
    assert setup.mesh is not None
    reshard = setup.strategy.reshards(options.reshard_after_forward, None)
    each = setup.strategy.reduces_each(options.accumulate_sharded, None)
    notes: list[str] = []
    free, memory = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    if reshard is None:
        size = _numel(module.parameters()) * (4 if options.precision == "fp32" else 2)
        reshard = _on_any_rank(parameters_are_large(size, free), device)
        notes += [] if reshard else [KEPT]
    if each is None:  # of all memory instead of the free: a resumed run must add up in the same order
        size = _numel(p for p in module.parameters() if p.requires_grad) * (2 if options.reduce_dtype == "bf16" else 4)
        each = _on_any_rank(gradients_are_large(size, memory), device)
        notes += [SCATTERED] if each else []
    root = WholeStep(module)
    kept = kept_whole(module, setup.mesh) + of_other_types(module, setup.blocks, options)
    whole = {name for name, _ in kept}
    notes += _whole_note(kept, module)
    units = shard(root, setup.mesh, setup.blocks, options, reshard_after_forward=reshard, experts=setup.experts)
    setup.load()
    step = micro_step(units, reduce_scatter_each_microbatch=each, keep_gathered=not reshard)
    if setup.group is not None:
        step = average_whole([p for name, p in module.named_parameters() if name in whole], setup.group, step)
    return Applied(root, step, casts=True, notes=tuple(notes), whole=True)


def shard(
    root: WholeStep,
    mesh: DeviceMesh,
    blocks: list[str],
    options: Options,
    *,
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
        experts: Experts that are split already: sharded over the workers that hold the same ones, as units inside
            their blocks.

    Returns:
        The units: the root, the blocks, the experts.
    """
    module = root.module
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    policy, root_policy = precision.shard_policies(options.precision, options.reduce_dtype)
    precision.cast_calls(module, options.precision, options.float_output)
    units: list[Any] = [module.get_submodule(name) for name in separable(module, blocks)]
    units = [block for block in units if any(True for _ in block.parameters())]
    whole = {p for _, p in kept_whole(module, mesh) + of_other_types(module, blocks, options)}
    inner: dict[Any, list[Any]] = {block: experts.modules_in(block) if experts else [] for block in [*units, module]}
    for expert_module in inner[module]:
        assert experts is not None
        fully_shard(
            expert_module,
            mesh=experts.mesh,
            shard_placement_fn=experts.placement,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
    place = placement(mesh)
    for block in units:
        fully_shard(
            block,
            mesh=mesh,
            shard_placement_fn=place,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
    fully_shard(
        root,
        mesh=mesh,
        shard_placement_fn=place,
        reshard_after_forward=False,
        mp_policy=root_policy,
        offload_policy=offload,
        ignored_params=whole,
    )
    for before, after in itertools.pairwise(units):  # each gathers its neighbour's parameters while it computes
        before.set_modules_to_forward_prefetch([after, *inner[after]])
        after.set_modules_to_backward_prefetch([before, *inner[before]])
    return [root, *units, *inner[module]]


def micro_step(units: list[FSDPModule], *, reduce_scatter_each_microbatch: bool, keep_gathered: bool) -> MicroStep:
    """keep_gathered: parameters stay unsharded between micro-batches (of one step: after the last the optimizer changes
    the shards)."""
    root, nothing = units[0], contextlib.nullcontext()
    state = {"last": True}

    def context(last: bool) -> AbstractContextManager[Any]:
        if last is not state["last"]:
            state["last"] = last
            root.set_is_last_backward(last)
            if not reduce_scatter_each_microbatch:
                root.set_requires_gradient_sync(last)
            if keep_gathered:
                root.set_reshard_after_backward(last)
        return nothing

    return context


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """For fully_shard over `mesh`: along which dimension a parameter is cut; None for one that is kept whole."""

    def place(parameter: nn.Parameter) -> Shard | None:
        own, is_uneven = tuple(parameter.shape), False
        if isinstance(parameter, DTensor):
            own = tuple(parameter.to_local().shape)
            is_uneven = parameter.placements[0].is_shard(0) and parameter.shape[0] % parameter.device_mesh.size() != 0
        dim = fsdp_dim(own, is_uneven, mesh.size(-1))
        return None if dim is None else Shard(dim)

    return place


def kept_whole(module: nn.Module, mesh: DeviceMesh) -> Named:
    """Before others are cut, the parameters that cannot be: every worker keeps them.

    Those without dimensions or elements, and complex ones, whose gradients no backend reduce-scatters.
    """
    place = placement(mesh)
    return [(name, p) for name, p in module.named_parameters() if place(p) is None or p.is_complex() or p.numel() == 0]


def of_other_types(module: nn.Module, blocks: list[str], options: Options) -> Named:
    """The trained parameters of another type than most of their unit: every worker keeps them whole.

    `fully_shard` reduces the gradients of a unit in one collective, of one type. (They are cast to one by a precision
    of 16 bits, so that then there are none.) They could be units of their own only where nothing but their module's
    forward reads them.
    """
    if options.precision != "fp32":
        return []
    units = separable(module, blocks)
    by_unit: dict[str, Named] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.is_complex():
            unit = next((block for block in units if name.startswith(f"{block}.")), "")
            by_unit.setdefault(unit, []).append((name, parameter))
    odd: Named = []
    for named in by_unit.values():
        numbers: Counter[torch.dtype] = Counter()
        for _, parameter in named:
            numbers[parameter.dtype] += parameter.numel()
        usual = numbers.most_common(1)[0][0]
        odd += [(name, parameter) for name, parameter in named if parameter.dtype != usual]
    return odd


def _whole_note(whole: Named, module: nn.Module) -> list[str]:
    """A remark where what is not sharded is a large part of the model."""
    size = sum(parameter.nbytes for _, parameter in whole)
    total = sum(parameter.nbytes for parameter in module.parameters())
    if size <= ROOM * total:
        return []
    others = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    return [
        f"{whole[0][0]}{others}, {size / total:.0%} of the parameters' bytes, are kept whole on every worker, because "
        "they are complex or of another type than the rest of their block: parameters of one type are sharded"
    ]


def average_whole(parameters: list[nn.Parameter], group: dist.ProcessGroup, step: MicroStep) -> MicroStep:
    """The MicroStep that also averages these parameters' gradients over the workers, in a step's last micro-batch."""
    if not parameters:
        return step
    state = {"last": True}

    @torch.no_grad()
    def average(parameter: torch.Tensor) -> None:
        if state["last"] and parameter.grad is not None:
            own = local(parameter.grad)
            dist.all_reduce(own, group=group)
            own /= group.size()

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)

    def context(last: bool) -> AbstractContextManager[Any]:
        state["last"] = last
        return step(last)

    return context


# --- what memory decides ----------------------------------------------------------------------------------------

KEPT = (
    "blocks keep their gathered parameters between forward and backward, for these take less than an eighth of the "
    "GPU's free memory: parallel.reshard_after_forward=true frees them"
)
SCATTERED = (
    "every micro-batch's gradients are scattered, for whole ones would take an eighth of the GPU's memory or more: "
    "parallel.accumulate_sharded=false keeps them until the last"
)


def parameters_are_large(size: float, memory: float | None) -> bool:
    """Whether gathered parameters are not kept: `size` bytes of a GPU's `memory`; None: on a CPU, which keeps none."""
    return memory is None or size >= ROOM * memory


def gradients_are_large(size: float, memory: float | None) -> bool:
    """Whether gradients do not wait for the last micro-batch; None: on a CPU, where they do."""
    return memory is not None and size >= ROOM * memory


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    """Of what a rank computes with: its own slice, where tensor parallelism has split a parameter."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def _on_any_rank(here: bool, device: torch.device) -> bool:
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item() == 1


# --- what it costs ----------------------------------------------------------------------------------------------


def cost(size: RankSize, step: StepShape) -> Cost:
    """Exact for what rank 0 holds, whose shards are never short: parameters and gradients padded, optimizer state.

    `transient` is what is unsharded at the peak: the root's parameters and two blocks' (all blocks', if they are not
    freed after forward), the gathering of a third and one block's gradients on their way; and with several
    micro-batches the gradients that wait for the last.
    """
    keeps, each, gathered = _behaviour(step)
    held = size.root + size.two_largest_blocks + keeps * (size.blocks - size.two_largest_blocks)
    trained = size.largest_block * size.sharded_gradients / size.sharded_parameters
    on_the_way = size.largest_block * gathered + trained * step.reduce_itemsize
    several = (step.micro_batches > 1) * (1 - each)
    waiting = size.gradients // 4 * step.reduce_itemsize * max(several, step.pp > 1)
    return Cost(
        size.sharded_parameters,
        size.sharded_gradients,
        optimizer_bytes(size.sharded_gradients, size.tensors, step.optimizer),
        size.buffers,
        transient=held * gathered + on_the_way + waiting,
    )


def collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """Gathers before forward and backward, and reductions after it; each once per step or per micro-batch."""
    keeps, each, gathered = _behaviour(step)
    again = step.micro_batches - 1
    gather = unit.gathered * gathered
    reductions = 1 + again * each
    numbers, whole = (unit.sharded_gradients - unit.whole_gradients) // 4, unit.whole_gradients
    of_whole = [Collective("all_reduce", over, whole, 1, "backward") for over in ("dp_shard", "dp_replicate")]
    return (
        Collective("all_gather", "dp_shard", gather, 1 + again * (1 - keeps), "forward"),
        Collective("all_gather", "dp_shard", gather, step.micro_batches * (1 - keeps) * (1 - unit.is_root), "backward"),
        Collective(
            "reduce_scatter", "dp_shard", numbers * step.dp_shard * step.reduce_itemsize, reductions, "backward"
        ),
        Collective("all_reduce", "dp_replicate", numbers * step.reduce_itemsize, reductions, "backward"),
        *(of_whole if whole else ()),
    )


def _behaviour(step: StepShape) -> tuple[Number, Number, Number]:
    """Whether gathered parameters are kept, whether each micro-batch is reduced, bytes of a gathered number. A pipeline
    gathers once per step, and reduces once (grad_sync.py)."""
    piped = (step.pp > 1) * 1
    keeps = 1 - (1 - piped) * step.reshard_after_forward
    return keeps, (1 - piped) * step.reduce_scatter_each_microbatch, step.compute_itemsize


STRATEGY = Strategy(
    "fsdp",
    "parameters, gradients and optimizer state sharded over all workers",
    cost,
    collectives,
    apply,
    degrees=("dp_shard",),
    also=("dp_replicate", "cp", "tp", "pp", "ep"),
    is_sharded=True,
    # Forward sees gathered copies, which are freed: what it writes into them is lost. A hook is on the parameter that
    # the shard replaces. A block is gathered for its forward and its backward alone, and by all workers together.
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

# --- its relatives ----------------------------------------------------------------------------------------------

# ZeRO stages 1 and 2: shard the optimizer state, then also the gradients, but compute with all parameters.
#
#     stage   parameters   gradients   AdamW state    sends, beside DDP's all-reduce
#       0       all          all          all           the same (that is DDP)
#       1       all          all          1/R           the same: reduce-scatter, then all-gather
#       2       all          1/R          1/R           the same; one reduce-scatter per micro-batch
#       3       1/R          1/R          1/R           half as much again
#
# AdamW needs only a shard's gradient to update the shard; so each worker updates 1/R of the parameters and the results
# are gathered (Rajbhandari et al., figure 1). Both are `fully_shard` that keeps gathered parameters until backward is
# over: the shards are the parameters that the optimizer sees, gathering them at the next forward is stage 1's final
# all-gather, and the state stays reshardable (ZeroRedundancyOptimizer's does not). The stages differ in accumulation:
# stage 1 sums full gradients and reduces once, stage 2 reduces each micro-batch's and keeps shards. With one
# micro-batch per step they are the same run.
#
# Choose zero1 when a device holds the model and its gradients but not the optimizer state as well, zero2 when full
# gradients are too much too; fsdp when parameters are. In a pipeline parameters are gathered once per step and
# gradients scattered once whatever the stage of ZeRO, so there is only fsdp.

ZERO1 = replace(
    STRATEGY,
    name="zero1",
    summary="copies, optimizer state sharded",
    also=("dp_replicate", "cp", "tp", "ep"),
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

# Hybrid sharded data parallelism: shard within a node, replicate across nodes. On a mesh of G groups of S workers
# (dp_replicate × dp_shard) every group holds one sharded copy:
#
#     forward, backward:  all-gather parameters within the group           (fast links, every block)
#     backward:           reduce-scatter gradients within the group, then
#                         all-reduce the shards across groups              (slow links, 1/S of the gradients, once)
#
# It is `fully_shard` on a two-dimensional mesh and nothing else. Choose it when one node's memory holds the sharded
# training state and there are several nodes: FSDP over all of them would gather every block over the slow links. It
# costs S-way memory instead of (G·S)-way (Zhao et al., §3.2.2). zero1 and zero2 take a dp_replicate in the same way.

HSDP = replace(
    STRATEGY,
    name="hsdp",
    summary="sharded in groups, groups replicated",
    degrees=("dp_replicate", "dp_shard"),
    also=("cp", "tp", "pp", "ep"),
)
