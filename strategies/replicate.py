"""Averaging gradients over replicas of a tensor-parallel model: ddp × tp.

What `DistributedDataParallel` does, for parameters that are DTensors, which it does not take: the gradients are packed
into buckets from the last layer to the first, and a bucket is all-reduced over the replicas as soon as backward has
filled it, while the layers below are still being computed. Each worker reduces only its own part of a layer with the
workers that hold the same part. ddp.py says the rest; that file is the faster one and serves every model that is not
split.

(Composing DDP itself with tensor parallelism would turn the parameters into plain tensors, and checkpoints would no
longer know what they are parts of; `fully_shard` with one shard would hold every parameter twice.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.dims import LayoutError
from strategies.options import Options

BUCKETS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""MiB that are tried when the size of a bucket is measured."""


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    pending: int = 0
    flat: torch.Tensor | None = None
    work: Any = None


class Replicas:
    """Averages the gradients of `parameters` over `group` at the end of a step's last micro-batch."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup, options: Options, device: torch.device
    ) -> None:
        self.names = {parameter: name for name, parameter in named}
        self.group = group
        half = options.compression == "bf16" or options.reduce_dtype == "bf16"
        self.wire = torch.bfloat16 if half else None
        size = options.bucket_mb or measured_bucket([_part(p) for _, p in named if p.requires_grad], group, device)
        self.buckets = buckets([p for _, p in reversed(named) if p.requires_grad], size * 2**20)
        self.of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.active = False
        self.launched = 0
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        self.active, self.launched = last, 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)
        yield
        if last and torch.is_grad_enabled() and any(b.pending < len(b.parameters) for b in self.buckets):
            self._finish()
        self.active = False

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.active:
            return
        self.of[parameter].pending -= 1  # type: ignore[index]
        # In order, because collectives must be issued in one order on every rank.
        while self.launched < len(self.buckets) and self.buckets[self.launched].pending == 0:
            self._launch(self.buckets[self.launched])
            self.launched += 1

    def _launch(self, bucket: Bucket) -> None:
        flat = torch.cat([_local(p).reshape(-1) for p in bucket.parameters])
        bucket.flat = flat.to(self.wire).div_(self.group.size()) if self.wire else flat.div_(self.group.size())
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        if self.launched < len(self.buckets):
            missing = [self.names[p] for b in self.buckets for p in b.parameters if p.grad is None] or ["?"]
            raise LayoutError(
                f"the loss does not depend on parameter {missing[0]}, which ddp cannot average: use it in forward, set "
                "its requires_grad to False, or write strategy=fsdp"
            )
        for bucket in self.buckets:
            bucket.work.wait()
            gradients = [_local(p) for p in bucket.parameters]
            assert bucket.flat is not None
            parts = bucket.flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])
            bucket.flat = bucket.work = None


def buckets(parameters: list[nn.Parameter], limit: float) -> list[Bucket]:
    """In order, each full at `limit` bytes, one type of number per bucket."""
    buckets: list[Bucket] = []
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        fits = buckets and buckets[-1].bytes + size <= limit and buckets[-1].parameters[0].dtype == parameter.dtype
        if not fits:
            buckets.append(Bucket())
        buckets[-1].parameters.append(parameter)
        buckets[-1].bytes += size
    return buckets


def _local(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _part(parameter: nn.Parameter) -> torch.Tensor:
    """What this worker holds of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def micro_step(
    named: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup, options: Options, device: torch.device
) -> Callable[..., Any]:
    """What to put around forward and backward of a micro-batch."""
    return Replicas(named, group, options, device).micro_step


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
