"""Averaging gradients over replicas where DistributedDataParallel cannot: of DTensors, and of pipeline stages.

What DDP does, by hand: gradients are packed into buckets from the last layer to the first, and a bucket is all-reduced
over the replicas as soon as backward has added the last of its gradients, while the layers below are still computed.
Each worker reduces only its own slice of a layer, with the workers that hold the same slice. ddp.py says the rest; that
file is the faster one and serves every model that is not split. A pipeline has a set of buckets per chunk of the model,
each sent in the last backward that passes the chunk.

(Composing DDP itself with tensor parallelism would turn the parameters into plain tensors, and checkpoints would no
longer know what they are slices of; `fully_shard` with one shard would hold every parameter twice.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.dims import LayoutError
from strategies.options import Options

Named = list[tuple[str, nn.Parameter]]


def local(tensor: Any) -> Tensor:
    """This rank's own memory of a tensor that may be a DTensor; to be called under torch.no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wire_dtype(options: Options) -> torch.dtype | None:
    """What gradients are sent as; None: as they are."""
    return torch.bfloat16 if "bf16" in (options.compression, options.reduce_dtype) else None


def require_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises LayoutError unless every parameter that is trained has a gradient: others would wait for it to average."""
    missing = [name for name, p in named if p.requires_grad and p.grad is None]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LayoutError(
            f"the loss does not depend on parameter {missing[0]}{others}, whose gradient cannot be averaged: use it in "
            "forward, set its requires_grad to False, or write strategy=fsdp, or, with ddp alone, "
            "parallel.find_unused_parameters=true"
        )


@torch.no_grad()
def all_reduce_(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces local tensors by their sums over the group, in one all-reduce."""
    if gradients:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        unpack_(gradients, flat)


def unpack_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies out of `flat`, in order."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view_as(tensor))


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    pending: int = 0
    flat: Tensor | None = None
    work: Any = None


class GradientBuckets:
    """Averages gradients over `group`. by_chunk: per chunk of the model the parameters that are complete when it is.

    Within a chunk's last backward a bucket goes as soon as its gradients are there, in the order of the buckets, which
    is that of every replica; what is left goes when the chunk is done."""

    def __init__(self, by_chunk: dict[int, Named], group: dist.ProcessGroup, options: Options) -> None:
        self.group, self.wire = group, wire_dtype(options)
        self.names = {p: name for named in by_chunk.values() for name, p in named}
        self.buckets = {
            chunk: buckets([p for _, p in reversed(named) if p.requires_grad], options.bucket_mb * 2**20)
            for chunk, named in by_chunk.items()
        }
        self.of = {p: bucket for several in self.buckets.values() for bucket in several for p in bucket.parameters}
        self.waiting: list[Bucket] = []
        """Of the chunk whose last backward runs, the buckets that have not gone."""
        self.arrived = False
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self._added)

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch, for a model that is one chunk."""
        if last:
            self.last_backward(0)
        yield
        if last and torch.is_grad_enabled() and self.arrived:
            self.chunk_done(0)
            self.finish()
        self.waiting = []

    def last_backward(self, chunk: int) -> None:
        """The chunk's last backward begins."""
        self.arrived = False
        self.waiting = list(self.buckets.get(chunk, []))
        for bucket in self.waiting:
            bucket.pending = len(bucket.parameters)

    def _added(self, parameter: Tensor) -> None:
        bucket = self.of[parameter]  # type: ignore[index]
        if not any(bucket is other for other in self.waiting):
            return
        self.arrived = True
        bucket.pending -= 1
        while self.waiting and self.waiting[0].pending == 0:
            self._send(self.waiting.pop(0))

    def chunk_done(self, chunk: int) -> None:
        """The chunk's gradients are complete."""
        self.waiting = []
        for bucket in self.buckets.get(chunk, []):
            if bucket.flat is None:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        require_gradients((self.names[p], p) for p in bucket.parameters)
        flat = torch.cat([local(p.grad).reshape(-1) for p in bucket.parameters])
        bucket.flat = (flat.to(self.wire) if self.wire else flat).div_(self.group.size())
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Returns when all gradients are averaged."""
        for bucket in (bucket for several in self.buckets.values() for bucket in several):
            if bucket.flat is not None:
                bucket.work.wait()
                unpack_([local(p.grad) for p in bucket.parameters], bucket.flat)
                bucket.flat = bucket.work = None


def buckets(parameters: list[nn.Parameter], limit: float) -> list[Bucket]:
    """In order, each full at `limit` bytes, one type of number per bucket."""
    found: list[Bucket] = []
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        fits = found and found[-1].bytes + size <= limit and found[-1].parameters[0].dtype == parameter.dtype
        if not fits:
            found.append(Bucket())
        found[-1].parameters.append(parameter)
        found[-1].bytes += size
    return found
