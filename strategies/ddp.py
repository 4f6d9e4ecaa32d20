"""Distributed data parallelism: every worker holds the whole model and its share of the batch.

    gᵣ = ∇ loss on worker r's share        ḡ = (1/R) Σᵣ gᵣ  (all-reduce)        every worker: θ ← θ - η·AdamW(ḡ)

All begin with the same θ and apply the same ḡ, so they stay the same without ever sending θ. Gradients are gathered
in buckets; a bucket is all-reduced as soon as it is full, while backward still computes the layers below. Of several
micro-batches only the last communicates. Li et al. 2020, https://arxiv.org/abs/2006.15704;
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.

Choose it whenever the whole training state fits on a device: nothing is faster. It costs what `single` costs per rank
(plus nothing for the buckets: gradients are views into them) and one all-reduce of the gradients per step.

- *Unused parameters*: DDP waits for every parameter's gradient, so one that the loss does not depend on is an error,
  found after the first step. `find_unused_parameters` lets a step leave some out: DDP looks for them after every
  forward, which takes time, and averages the others.
- *BatchNorm* normalises with the statistics of one worker's micro-batch, so it is not the same training on another
  number of workers; running statistics are those of rank 0, broadcast before each forward. GroupNorm or SyncBatchNorm
  do not depend on the split.
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

from strategies import grad_sync
from strategies.costs import Collective, Cost, RankSize, StepShape, UnitSize, replicated
from strategies.options import Options
from strategies.parallel import WholeStep
from strategies.strategy import Applied, MicroStep, Setup, Strategy
from strategies.traits import Trait


def apply(setup: Setup) -> Applied:
    """Replicates the module; collective over the data-parallel workers."""
    setup.load()
    if setup.group is None:
        return Applied(setup.module)
    own, others = grad_sync.experts_apart(list(setup.module.named_parameters()), setup.experts)
    group = setup.experts.group if setup.experts is not None else None
    experts = grad_sync.GradientBuckets({0: own}, group, setup.options).micro_step if group is not None else None
    if setup.layout.dims.tp > 1:
        applied = Applied(setup.module, grad_sync.GradientBuckets({0: others}, setup.group, setup.options).micro_step)
    else:
        trained = [p for _, p in own if p.requires_grad]
        for p in trained:  # so that DDP leaves them out
            p.requires_grad_(False)
        applied = wrap(setup.module, setup.group, setup.device, setup.options, init_sync=not own)
        for p in trained:
            p.requires_grad_(True)
    return applied if experts is None else replace(applied, micro_step=both(applied.micro_step, experts))


def both(one: MicroStep, other: MicroStep) -> MicroStep:
    """Around a micro-batch, one inside the other."""

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        with one(last), other(last):
            yield

    return context


def wrap(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    options: Options,
    spread: bool = False,
    init_sync: bool = True,
) -> Applied:
    """Wraps a module. spread: its parameters are on several devices. init_sync: let DDP compare shapes and send rank
    0's values."""
    several = spread or device.type != "cuda"
    wrapped = DistributedDataParallel(
        WholeStep(module),
        device_ids=None if several else [device],
        process_group=group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=options.find_unused_parameters,
        init_sync=init_sync,
    )
    # A lambda, because DDP refuses torch's bfloat16 hook by its name anywhere but on NCCL.
    if options.reduce_dtype == "bf16":
        wrapped.register_comm_hook(group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    return Applied(wrapped, micro_step(wrapped, options.find_unused_parameters), whole=True)


def micro_step(wrapped: DistributedDataParallel, may_leave_out: bool) -> MicroStep:
    """What to put around forward and backward of a micro-batch: only the last one communicates. After the first step
    every parameter must have a gradient, unless a step may leave some out."""
    checked = may_leave_out

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        nonlocal checked
        with contextlib.nullcontext() if last else wrapped.no_sync():
            yield
        if last and not checked and torch.is_grad_enabled():
            checked = True
            grad_sync.require_gradients(wrapped.module.module.named_parameters())

    return context


def cost(size: RankSize, step: StepShape) -> Cost:
    """Exact: what one device holds. With tensor parallelism gradients are packed into buckets of their own
    (grad_sync.py), else buckets hold the gradients themselves."""
    found = replicated(size, step)
    return replace(found, transient=found.transient + size.gradients * ((step.tp > 1) & (step.dp_replicate > 1)))


def collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """One all-reduce of the gradients per step, however many micro-batches."""
    return (Collective("all_reduce", "dp_replicate", unit.gradients * step.reduce_itemsize // 4, 1, "backward"),)


STRATEGY = Strategy(
    "ddp",
    "a copy of the model per GPU",
    cost,
    collectives,
    apply,
    degrees=("dp_replicate",),
    also=("cp", "tp", "pp", "ep"),
    averages=True,
    # Every worker's forward changes its own copy, and a hook sees its own gradient instead of the average.
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
