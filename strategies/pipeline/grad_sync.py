"""Gradients after the pipeline: averaged over data-parallel workers, added over stages that share a parameter.

A chunk's gradients are complete with the last micro-batch that passes it, while other chunks and stages still compute:
that is when they are sent, in buckets (replicas: replicate.py; while that backward still runs, unless a schedule splits
it). At the end of the step they are waited for, and then the gradients of parameters that several stages use (a tied
embedding) are added up: one all-reduce per set of stages.

Shards: parameters are `fully_shard`ed and gathered once per step, at its beginning; gradients are reduce-scattered
once, at its end. (To gather them for every micro-batch, as fsdp does without a pipeline, would send m times as much:
Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2.) `fully_shard` is told to leave gradients alone, and they are reduced
here, from the unsharded parameters; so whatever order a schedule computes in, W long after B, the sums are right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from strategies.collectives import reduce_scatter
from strategies.dims import submesh
from strategies.options import Options
from strategies.replicate import GradientBuckets, Named, all_reduce_, buckets, local, wire_dtype


class ShardedGradients:
    """Gathers parameters, reduce-scatters gradients. by_chunk: per chunk the parameters that are complete when it is.

    mesh: (replicate ×) shard."""

    def __init__(
        self,
        module: nn.Module,
        units: list[FSDPModule],
        by_chunk: dict[int, Named],
        mesh: DeviceMesh,
        options: Options,
    ) -> None:
        self.module, self.units, self.dtype = module, units, wire_dtype(options)
        self.sharded = dict(module.named_parameters())
        names = {p: name for name, p in self.sharded.items()}
        self.buckets = {
            chunk: [
                [names[p] for p in bucket.parameters]
                for bucket in buckets([p for _, p in reversed(named) if p.requires_grad], options.bucket_mb * 2**20)
            ]
            for chunk, named in by_chunk.items()
        }
        self.group = submesh(mesh, "dp_shard").get_group()
        self.replicas = submesh(mesh, "dp_replicate").get_group() if mesh.ndim > 1 else None
        self.ways = mesh.size()
        self.sent: list[tuple[list[str], list[int], Tensor, Any]] = []
        """Names, numbers of each, this rank's shards of the sums of their gradients, and what to wait for."""
        units[0].set_requires_gradient_sync(False)
        units[0].set_reshard_after_backward(False)

    def gather(self) -> None:
        """Before a step or an evaluation."""
        for handle in [unit.unshard(async_op=True) for unit in self.units]:
            if handle is not None:
                handle.wait()
        self.unsharded = dict(self.module.named_parameters())

    def free(self) -> None:
        """Frees what has been gathered. (A module whose forward was left before its end counts as in forward, in which
        `reshard` does what reshard_after_forward says.)"""
        self.units[0].set_reshard_after_forward(True)
        for unit in self.units:
            unit.reshard()
        self.units[0].set_reshard_after_forward(False)

    def last_backward(self, chunk: int) -> None:
        """Nothing goes before the chunk is done."""

    @torch.no_grad()
    def chunk_done(self, chunk: int) -> None:
        for names in self.buckets.get(chunk, []):
            used = [name for name in names if self.unsharded[name].grad is not None]
            if used:
                slices = [self._by_rank(name) for name in used]
                flat = torch.cat(slices, 1).reshape(-1)
                flat = (flat.to(self.dtype) if self.dtype else flat).div_(self.ways)
                shard = flat.new_empty(flat.numel() // self.group.size())
                work = reduce_scatter(shard, flat, self.group)
                self.sent.append((used, [part.size(1) for part in slices], shard, work))

    def _by_rank(self, name: str) -> Tensor:
        """(ranks, numbers): the gradient in the slices of rows that torch.chunk would make, padded to equal ones."""
        gradient, ranks = local(self.unsharded[name].grad), self.group.size()
        self.unsharded[name].grad = None
        missing = -len(gradient) % ranks
        if missing:
            gradient = torch.cat([gradient, gradient.new_zeros((missing, *gradient.shape[1:]))])
        return gradient.reshape(ranks, -1)

    @torch.no_grad()
    def finish(self) -> None:
        self.free()
        for names, numbers, shard, work in self.sent:
            if work is not None:
                work.wait()
            if self.replicas is not None:
                dist.all_reduce(shard, group=self.replicas)
            for name, values in zip(names, shard.split(numbers)):
                self._add(self.sharded[name], values)
        self.sent.clear()

    def _add(self, parameter: Any, values: Tensor) -> None:
        """Adds a shard, padded at its end, to the gradient of the sharded parameter."""
        own = parameter.to_local()
        found = values[: own.numel()].view_as(own).to(own.dtype)
        if parameter.grad is None:
            spec: dict[str, Any] = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
            parameter.grad = DTensor.from_local(found, parameter.device_mesh, parameter.placements, **spec)
        else:
            local(parameter.grad).add_(found)


def add_over_stages(shared: dict[dist.ProcessGroup, Named]) -> None:
    """Adds up the gradients of parameters that several stages use, a group's parameters at once."""
    for group, named in shared.items():
        gradients = []
        for parameter in (p for _, p in named if p.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                gradients.append(local(parameter.grad))
        all_reduce_(gradients, group)


GradSync = GradientBuckets | ShardedGradients
"""What data-parallel workers do with gradients in a step."""
