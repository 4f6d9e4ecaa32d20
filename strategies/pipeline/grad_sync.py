"""Gradients after the pipeline: averaged over data-parallel workers, added over stages that share a parameter.

A chunk's gradients are complete with the last micro-batch that passes it, while other chunks and stages still compute:
that is when they are sent off, in buckets (replicas; while that backward still runs, unless a schedule splits it) or
one unit after the other (shards). At the end of the step they are waited for, and then the gradients of parameters that
several stages use (a tied embedding) are added up: one all-reduce per set of stages.

Shards: parameters are `fully_shard`ed and gathered once per step, at its beginning; gradients are reduce-scattered
once, at its end. (To gather them for every micro-batch, as fsdp does without a pipeline, would send m times as much:
Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2.) So nothing hooks into forward and backward, and whatever order a
schedule computes in, W long after B, the sums are right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from strategies.dims import LayoutError
from strategies.options import Options
from strategies.replicate import Bucket, buckets

Named = list[tuple[str, nn.Parameter]]


class Reducer(Protocol):
    def begin(self) -> None:
        """Before a step."""

    def last_backward(self, chunk: int) -> None:
        """The chunk's last backward begins: from here on gradients get complete one after the other."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's gradients are complete; returns at once."""

    def finish(self) -> None:
        """All gradients are reduced when this returns."""


class Nothing:
    """No data parallelism."""

    def begin(self) -> None: ...

    def last_backward(self, chunk: int) -> None: ...

    def chunk_done(self, chunk: int) -> None: ...

    def finish(self) -> None: ...


class Replicas:
    """Averages gradients over `group`. ready: per chunk the parameters that are complete when it is.

    Within a chunk's last backward a bucket goes as soon as autograd has added the last of its gradients, in the order
    of the buckets on every replica; what is left goes when the chunk is done."""

    def __init__(self, ready: dict[int, Named], group: dist.ProcessGroup, options: Options) -> None:
        self.group = group
        half = options.compression == "bf16" or options.reduce_dtype == "bf16"
        self.wire = torch.bfloat16 if half else None
        limit = (options.bucket_mb or 25.0) * 2**20
        self.names = {p: name for named in ready.values() for name, p in named}
        self.buckets = {
            chunk: buckets([p for _, p in reversed(named) if p.requires_grad], limit) for chunk, named in ready.items()
        }
        self.of = {p: bucket for several in self.buckets.values() for bucket in several for p in bucket.parameters}
        self.waiting: list[Bucket] = []
        """Of the chunk whose last backward runs, the buckets that have not gone."""
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self._added)

    def begin(self) -> None: ...

    def last_backward(self, chunk: int) -> None:
        self.waiting = list(self.buckets.get(chunk, []))
        for bucket in self.waiting:
            bucket.pending = len(bucket.parameters)

    def _added(self, parameter: Tensor) -> None:
        bucket = self.of[parameter]  # type: ignore[index]
        if not any(bucket is other for other in self.waiting):
            return
        bucket.pending -= 1
        while self.waiting and self.waiting[0].pending == 0:
            self._send(self.waiting.pop(0))

    def chunk_done(self, chunk: int) -> None:
        self.waiting = []
        for bucket in self.buckets.get(chunk, []):
            if bucket.flat is None:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        missing = [p for p in bucket.parameters if p.grad is None]
        if missing:
            raise LayoutError(
                f"the loss does not depend on parameter {self.names[missing[0]]}, which ddp cannot average: use it "
                "in forward, set its requires_grad to False, or write strategy=fsdp+pipeline"
            )
        flat = torch.cat([local(p.grad).reshape(-1) for p in bucket.parameters])
        bucket.flat = flat.to(self.wire).div_(self.group.size()) if self.wire else flat.div_(self.group.size())
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        for several in self.buckets.values():
            for bucket in several:
                _unpack(bucket)


@torch.no_grad()
def _unpack(bucket: Bucket) -> None:
    if bucket.flat is None:
        return
    bucket.work.wait()
    gradients = [local(p.grad) for p in bucket.parameters]
    parts = bucket.flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])
    bucket.flat = bucket.work = None


class Shards:
    """Gathers parameters, reduce-scatters gradients. ready: per chunk the units that are complete when it is."""

    def __init__(self, root: nn.Module, units: Iterable[FSDPModule], ready: dict[int, list[FSDPModule]]) -> None:
        self.ready = ready
        self.units = list(units)
        states = [unit._get_fsdp_state() for unit in self.units]
        for state in states:  # no hooks: nothing is gathered or reduced but here
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
        states[0]._lazy_init()
        self.states = states
        self.groups = {unit: state._fsdp_param_groups for unit, state in zip(self.units, states)}

    def begin(self) -> None:
        handles = [unit.unshard(async_op=True) for unit in self.units]
        for handle in handles:
            if handle is not None:
                handle.wait()

    def last_backward(self, chunk: int) -> None: ...

    def chunk_done(self, chunk: int) -> None:
        for unit in self.ready.get(chunk, []):
            for group in self.groups[unit]:
                group.post_backward()

    def finish(self) -> None:
        for groups in self.groups.values():
            for group in groups:
                group.finalize_backward()
        comm = self.states[0]._comm_ctx
        for kept in comm.reduce_scatter_states:
            if kept.event is not None:
                comm.device_handle.current_stream().wait_event(kept.event)
        comm.reduce_scatter_states.clear()

    def end(self) -> None:
        """After an evaluation: frees what `begin` gathered."""
        for unit in self.units:
            unit.reshard()


class Shared:
    """Adds up the gradients of parameters that several stages use."""

    def __init__(self, sets: dict[dist.ProcessGroup, Named]) -> None:
        self.sets = sets

    @torch.no_grad()
    def finish(self) -> None:
        for group, named in self.sets.items():
            gradients = [_made(p) for _, p in named if p.requires_grad]
            if not gradients:
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])


def local(gradient: Any) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _made(parameter: nn.Parameter) -> Tensor:
    """This worker's part of the gradient; zeros where the stage has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
