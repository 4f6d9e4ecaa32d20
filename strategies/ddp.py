"""Distributed data parallelism: every worker has the whole model and its share of the batch.

    each worker r:  gᵣ = ∇ loss on worker r's share of the batch
    all-reduce:     ḡ  = (1/R) Σᵣ gᵣ
    each worker:    θ ← θ - η·AdamW(ḡ)

All workers start with the same θ and apply the same ḡ, so their copies stay the same without θ ever
being sent. Gradients are collected in buckets. A bucket is all-reduced as soon as it is full, while
backward still computes the layers below. If a step has several micro-batches, only the last one
communicates. Li et al. 2020, https://arxiv.org/abs/2006.15704;
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.

Choose it whenever the whole training state fits on a device: nothing is faster. A rank holds as
much as under `single` (buckets take no memory, because gradients are views into them), and each
step sends one all-reduce of the gradients.

- *Unused parameters*: DDP waits for the gradient of every parameter, so a parameter that the loss
  does not depend on is an error, which is found after the first step. `find_unused_parameters`
  allows a step to leave parameters out: DDP then searches for them after every forward, which takes
  time, and averages the others.
- *BatchNorm* normalises with the statistics of one worker's micro-batch, so another number of
  workers trains another model. Its running statistics are those of rank 0, broadcast before each
  forward. GroupNorm and SyncBatchNorm do not depend on how the batch is split.
- *Compression*: parallel.reduce_dtype=bf16 sends gradients in half the bytes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from strategies.costs import (
    Collective,
    Cost,
    RankSize,
    StepShape,
    UnitSize,
    replicated,
)
from strategies.grad_sync import GradientBuckets, require_gradients, split_off_experts
from strategies.options import Options
from strategies.parallel import WholeStep
from strategies.strategy import Applied, MicroStep, Setup, Strategy
from strategies.traits import Trait


def apply(setup: Setup) -> Applied:
    """Replicates the module; collective over the data-parallel workers.

    Only some of these workers hold the same experts, if experts are split. The gradients of those
    experts are averaged in buckets of their own. Tensor parallelism needs such buckets for all
    gradients, because DDP would turn the DTensors into plain tensors (grad_sync.py).
    """
    setup.load()
    if setup.group is None:
        return Applied(setup.module)
    named = list(setup.module.named_parameters())
    expert_parameters, other_parameters = split_off_experts(named, setup.experts)
    if setup.layout.dims.tp > 1:
        buckets = GradientBuckets({0: other_parameters}, setup.group, setup.options)
        applied = Applied(setup.module, micro_step=buckets.micro_step)
    else:
        # DDP leaves out parameters that need no gradient when it is constructed.
        trained_experts = [p for _, p in expert_parameters if p.requires_grad]
        for parameter in trained_experts:
            parameter.requires_grad_(False)
        applied = wrap(
            setup.module,
            setup.group,
            device=setup.device,
            options=setup.options,
            init_sync=not expert_parameters,
        )
        for parameter in trained_experts:
            parameter.requires_grad_(True)
    expert_group = setup.experts.group if setup.experts is not None else None
    if expert_group is None:
        return applied
    expert_buckets = GradientBuckets({0: expert_parameters}, expert_group, setup.options)
    return replace(applied, micro_step=nested(applied.micro_step, expert_buckets.micro_step))


def nested(outer: MicroStep, inner: MicroStep) -> MicroStep:
    """A MicroStep that enters both contexts around a micro-batch."""

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        with outer(last), inner(last):
            yield

    return context


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    options: Options,
    is_spread: bool = False,
    init_sync: bool = True,
) -> Applied:
    """Wraps a module in DistributedDataParallel; collective over the group.

    Args:
        module: The model, already on its device or devices.
        group: The data-parallel workers.
        device: This worker's device.
        options: Size of the buckets, type of the gradients, and whether parameters may be unused.
        is_spread: Whether the parameters are on several devices.
        init_sync: Whether DDP compares shapes and broadcasts rank 0's values at the start.
    """
    is_on_one_gpu = device.type == "cuda" and not is_spread
    replica = DistributedDataParallel(
        WholeStep(module),
        device_ids=[device] if is_on_one_gpu else None,
        process_group=group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=options.find_unused_parameters,
        init_sync=init_sync,
    )
    if options.reduce_dtype == "bf16":
        # A lambda, because DDP refuses torch's own bfloat16 hook, by its name, except on NCCL.
        replica.register_comm_hook(
            group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
        )
    return Applied(
        replica,
        micro_step=micro_step(replica, may_be_unused=options.find_unused_parameters),
        is_whole_step=True,
    )


def micro_step(replica: DistributedDataParallel, *, may_be_unused: bool) -> MicroStep:
    """The context of a micro-batch: only the last one of a step communicates.

    Args:
        replica: The wrapped model.
        may_be_unused: Whether a step may leave parameters without a gradient. Otherwise every
            parameter must have one after the first step.
    """
    is_checked = may_be_unused

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        nonlocal is_checked
        with contextlib.nullcontext() if last else replica.no_sync():
            yield
        if last and not is_checked and torch.is_grad_enabled():
            is_checked = True
            require_gradients(replica.module.module.named_parameters())

    return context


def cost(size: RankSize, step: StepShape) -> Cost:
    """Exact: what one device holds, and with tensor parallelism the buckets.

    DDP's buckets hold the gradients themselves; those of grad_sync.py are copies.
    """
    on_one_device = replicated(size, step)
    has_bucket_copies = step.tp > 1 and step.dp_replicate > 1
    buckets = size.gradients if has_bucket_copies else 0
    return replace(on_one_device, transient=buckets)


def collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """One all-reduce of the gradients per step, however many micro-batches it has."""
    size = unit.gradients * step.reduce_itemsize // step.gradient_itemsize
    return (
        Collective(name="all_reduce", over="dp_replicate", bytes=size, times=1, phase="backward"),
    )


STRATEGY = Strategy(
    name="ddp",
    summary="a copy of the model per GPU",
    cost=cost,
    collectives=collectives,
    apply=apply,
    degrees=("dp_replicate",),
    combines_with=("cp", "tp", "pp", "ep"),
    averages_gradients=True,
    # Every worker's forward changes its own copy of the model, and a hook sees the gradient of one
    # worker instead of the average.
    cannot_keep=frozenset(
        {
            Trait.CHANGES_PARAMETERS_BY_DATA,
            Trait.REPLACES_PARAMETERS,
            Trait.CHANGES_REQUIRES_GRAD,
            Trait.UNUSED_PARAMETERS,
            Trait.GRADIENT_HOOK,
            Trait.ACTIVATION_HOOK,
            Trait.USED_BY_REENTRANT_CHECKPOINTS,
            Trait.PARAMETERS_VARY,
            Trait.VARIES_BY_CALL,
        }
    ),
)
