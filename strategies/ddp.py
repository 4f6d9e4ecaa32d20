"""Distributed data parallelism: every worker holds the whole model and its share of the batch.

    gᵣ = ∇ loss on worker r's share        ḡ = (1/R) Σᵣ gᵣ  (all-reduce)        every worker: θ ← θ - η·AdamW(ḡ)

All begin with the same θ and apply the same ḡ, so they stay the same without ever sending θ. Gradients are gathered
in buckets; a bucket is all-reduced as soon as it is full, while backward still computes the layers below. Of several
micro-batches only the last communicates. Li et al. 2020, https://arxiv.org/abs/2006.15704;
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.

Choose it whenever the whole training state fits on a device: nothing is faster. It costs what `single` costs per rank
(plus nothing for the buckets: gradients are views into them) and one all-reduce of the gradients per step.

- *Static graph*: DDP is told that every step uses the same parameters in the same order. Its first backward may not
  be without communication (it would assert), so the first step communicates for each micro-batch, which averages what
  is averaged already and changes nothing. Without it a step may leave parameters out: DDP looks for them after every
  forward, which takes time, and averages the others.
- *Shared memory*: where all workers are processes on the CPUs of one machine, buckets are averaged in memory that they
  share, several times faster than gloo's sockets do (collectives.py); for two workers with the same bits.
- *BatchNorm* normalises with the statistics of one worker's micro-batch, so it is not the same training on another
  number of workers; running statistics are those of rank 0, broadcast before each forward. GroupNorm or SyncBatchNorm
  do not depend on the split.
- *Compression* sends gradients as bfloat16 (half the bytes), or as rank-1 products by PowerSGD with error feedback
  (Vogels et al. 2019, https://arxiv.org/abs/1905.13727): that one is lossy by design.
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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from strategies import replicate
from strategies.collectives import shared_memory_all_reduce
from strategies.costs import Collective, Cost, RankSize, StepShape, UnitSize, replicated
from strategies.dims import LayoutError
from strategies.options import Options
from strategies.strategy import Applied, MicroStep, Setup, Strategy


def apply(setup: Setup) -> Applied:
    """Replicates the module; collective over the data-parallel workers."""
    setup.load()
    if setup.group is None:
        return Applied(setup.module)
    if setup.layout.dims.tp > 1:
        named = list(setup.module.named_parameters())
        return Applied(setup.module, replicate.GradientBuckets({0: named}, setup.group, setup.options).micro_step)
    return wrap(setup.module, setup.group, setup.device, setup.options)


def wrap(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, options: Options, spread: bool = False
) -> Applied:
    """Wraps a module. spread: its parameters are on several devices."""
    used = UsedParameters(module) if options.static_graph else None
    wrapped = _distributed(module, group, device, options, spread)
    return Applied(wrapped, micro_step(wrapped, used))


def _distributed(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, options: Options, spread: bool
) -> DistributedDataParallel:
    several = spread or device.type != "cuda"
    wrapped = DistributedDataParallel(
        module,
        device_ids=None if several else [device],
        process_group=group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
        find_unused_parameters=not options.static_graph,
    )
    if options.shared_memory and options.compression == "none" and options.reduce_dtype == "fp32":
        if (shared := shared_memory_all_reduce(group, device)) is not None:
            wrapped.register_comm_hook(shared, average_in_memory)
    else:
        _compress(wrapped, group, options)
    return wrapped


def _compress(wrapped: DistributedDataParallel, group: dist.ProcessGroup, options: Options) -> None:
    if options.compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif options.compression == "bf16" or options.reduce_dtype == "bf16":
        wrapped.register_comm_hook(group, reduce_as_bfloat16)


def average_in_memory(shared: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket where the ranks are processes of one machine's CPUs."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(shared.average_(bucket.buffer()))
    return done


def reduce_as_bfloat16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in bfloat16. (torch has such a hook, but refuses it by name anywhere but on NCCL.)"""
    whole = bucket.buffer()
    half = whole.to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


for _hook in (average_in_memory, reduce_as_bfloat16):
    # DDP compares these with the types themselves, and postponed annotations are strings.
    _hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def micro_step(wrapped: DistributedDataParallel, used: UsedParameters | None) -> MicroStep:
    """What to put around forward and backward of a micro-batch: only the last one communicates.

    used: of a static graph, whose first step is watched."""
    plain = contextlib.nullcontext()
    state = {"begun": used is None, "watching": used is not None}

    def context(last: bool) -> AbstractContextManager[Any]:
        if state["watching"]:
            return first(last)
        return plain if last else wrapped.no_sync()

    @contextlib.contextmanager
    def first(last: bool) -> Any:
        sync = plain if last or not state["begun"] else wrapped.no_sync()
        with sync:
            yield
        if used is not None and torch.is_grad_enabled() and used.any():
            state["begun"] = True
            if last:
                state["watching"] = False
                used.close()

    return context


class UsedParameters:
    """Notes, during the first step, which parameters received a gradient."""

    def __init__(self, module: nn.Module) -> None:
        self.missing = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.count = len(self.missing)
        self.hooks = [p.register_post_accumulate_grad_hook(self._note(name)) for name, p in self.missing.items()]

    def _note(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.missing.pop(name, None)

        return note

    def any(self) -> bool:
        return len(self.missing) < self.count

    def close(self) -> None:
        """Ends the watch.

        Raises:
            LayoutError: parameters without a gradient, which ddp cannot average.
        """
        for hook in self.hooks:
            hook.remove()
        if self.missing:
            names = list(self.missing)
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LayoutError(
                f"the loss does not depend on parameter {names[0]}{others}, which ddp cannot average: use it in "
                "forward, set its requires_grad to False, or write parallel.static_graph=false or strategy=fsdp"
            )


def cost(size: RankSize, step: StepShape) -> Cost:
    """Exact: what one device holds. With tensor parallelism gradients are packed into buckets of their own
    (replicate.py), else buckets hold the gradients themselves."""
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
    also=("tp", "pp"),
    averages=True,
    compressions=("none", "bf16", "powersgd"),
)
