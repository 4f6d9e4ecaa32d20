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
  share, several times faster than gloo's sockets do (shared_sum.py); for two workers with the same bits.
- *BatchNorm* normalises with the statistics of one worker's micro-batch, so it is not the same training on another
  number of workers; running statistics are those of rank 0, broadcast before each forward. GroupNorm or SyncBatchNorm
  do not depend on the split.
- *Compression* sends gradients as bfloat16 (half the bytes), or as rank-1 products by PowerSGD with error feedback
  (Vogels et al. 2019, https://arxiv.org/abs/1905.13727): that one is lossy by design.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from strategies.costs import Cost, ModelSize, all_reduce, replicated
from strategies.cpu_collectives.shared_memory import SharedSum, shared_sum
from strategies.layout import LayoutError
from strategies.options import Options

BUCKETS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""MiB that are tried when the size of a bucket is measured."""

MicroStep = Callable[[bool], AbstractContextManager[Any]]


def apply(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device, options: Options, spread: bool = False
) -> DistributedDataParallel:
    """Wraps a whole module; collective over `group`. spread: its parameters are on several devices."""
    several = spread or device.type != "cuda"
    size = options.bucket_mb or measured_bucket([p for p in module.parameters() if p.requires_grad], group, device)
    wrapped = DistributedDataParallel(
        module,
        device_ids=None if several else [device],
        process_group=group,
        bucket_cap_mb=size,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
        find_unused_parameters=not options.static_graph,
    )
    if options.shared_memory and options.compression == "none" and options.reduce_dtype == "fp32":
        if (shared := shared_sum(group, device)) is not None:
            wrapped.register_comm_hook(shared, average_in_memory)
    else:
        _compress(wrapped, group, options)
    return wrapped


def measured_bucket(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """MiB: the smallest bucket that is all-reduced at 9/10 of the best rate; smaller ones start earlier. Collective.

    It is not the default: two starts of a run may measure differently, and sums in buckets of another size round
    otherwise, so a resumed run would not be the same to the last bit.
    """
    limit = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    rates: dict[float, float] = {}
    for size in (s for s in BUCKETS if s <= max(limit, BUCKETS[0])):
        buffer = torch.zeros(int(size * 2**18), device=device)
        dist.all_reduce(buffer, group=group)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            dist.all_reduce(buffer, group=group)
            buffer[0].item()  # until it is done, on a GPU too
            seconds.append(time.perf_counter() - begun)
        rates[size] = size / min(seconds)
    chosen = next(size for size, rate in rates.items() if rate >= 0.9 * max(rates.values()))
    agreed = torch.tensor(chosen, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return float(agreed)


def _compress(wrapped: DistributedDataParallel, group: dist.ProcessGroup | None, options: Options) -> None:
    if options.compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif options.compression == "bf16" or options.reduce_dtype == "bf16":
        wrapped.register_comm_hook(group or dist.group.WORLD, reduce_as_bfloat16)


def average_in_memory(shared: SharedSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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


def cost(size: ModelSize, replicas: int, options: Options | None = None, optimizer: str = "adamw") -> Cost:
    """Exact: what one device holds, and one all-reduce of the gradients (buckets hold the gradients themselves)."""
    whole = replicated(size, optimizer)
    halved = options is not None and (options.compression == "bf16" or options.reduce_dtype == "bf16")
    wire = whole.gradients // 2 if halved else whole.gradients
    return replace(whole, sent={"all_reduce": all_reduce(wire, replicas)})
