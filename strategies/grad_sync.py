"""Averaging gradients over data-parallel workers where DDP and `fully_shard` cannot: of DTensors, and of a pipeline.

**Replicas.** What DDP does, by hand: gradients are packed into buckets from the last layer to the
first, and a bucket is all-reduced over the replicas as soon as backward has added the last of its
gradients, while the layers below are still computed. Each worker reduces only its own slice of a
layer, with the workers that hold the same slice. ddp.py says the rest; that file is the faster one
and serves every model that is not split. (Composing DDP itself with tensor parallelism would turn
the parameters into plain tensors, and checkpoints would no longer know what they are slices of;
`fully_shard` with one shard would hold every parameter twice.)

**Pipelines.** A chunk's gradients are complete with the last micro-batch that passes it, while
other chunks and stages still compute: that is when they are sent, from a set of buckets per chunk
(replicas: while that backward still runs, unless a schedule splits it). At the end of the step they
are waited for, and then the gradients of parameters that several stages use (a tied embedding) are
added up: one all-reduce per set of stages.

**Shards of a pipeline.** Parameters are `fully_shard`ed and gathered once per step, at its
beginning; gradients are reduce-scattered once, at its end. They are gathered in the type of the
arithmetic, so that no forward keeps a cast copy of its own until its backward; gradients add up in
float32, or in the type that they are sent in. (To gather parameters for every micro-batch, as fsdp
does without a pipeline, would send m times as much: Grattafiori et al. 2024, arXiv 2407.21783,
§3.3.2.) `fully_shard` only keeps the shards: its hooks never run, and gradients are reduced here,
from the unsharded parameters; so whatever order a schedule computes in, W long after B, the sums
are right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from strategies.collectives import reduce_scatter
from strategies.dims import LayoutError, submesh
from strategies.mixtures import SplitExperts
from strategies.options import Options

Named = list[tuple[str, nn.Parameter]]


def local(tensor: Any) -> Tensor:
    """This rank's own memory of a tensor that may be a DTensor; to be called under torch.no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wire_dtype(options: Options) -> torch.dtype | None:
    """What gradients are sent as; None: as they are."""
    return torch.bfloat16 if options.reduce_dtype == "bf16" else None


def require_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises LayoutError unless every parameter that is trained has a gradient: others would wait for it to average."""
    missing = [name for name, p in named if p.requires_grad and p.grad is None]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LayoutError(
            f"the loss does not depend on parameter {missing[0]}{others}, whose gradient cannot be "
            "averaged: use it in forward, set its requires_grad to False, or write strategy=fsdp, "
            "or, with ddp alone, parallel.find_unused_parameters=true"
        )


def split_off_experts(named: Named, experts: SplitExperts | None) -> tuple[Named, Named]:
    """Those of experts that are split over data-parallel workers, which fewer of them average; and all others."""
    names: frozenset[str] = experts.names if experts is not None else frozenset()
    return [(n, p) for n, p in named if n in names], [(n, p) for n, p in named if n not in names]


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

    Within a chunk's last backward a bucket goes as soon as its gradients are there, in the order of
    the buckets, which is that of every replica; what is left goes when the chunk is done."""

    def __init__(
        self, by_chunk: dict[int, Named], group: dist.ProcessGroup, options: Options
    ) -> None:
        self.group, self.wire = group, wire_dtype(options)
        self.names = {p: name for named in by_chunk.values() for name, p in named}
        self.buckets = {
            chunk: buckets(named, options.bucket_mb * 2**20) for chunk, named in by_chunk.items()
        }
        self.of = {
            p: bucket
            for several in self.buckets.values()
            for bucket in several
            for p in bucket.parameters
        }
        self.waiting: list[Bucket] = []
        """Of the chunk whose last backward runs, the buckets that have not gone."""
        self.arrived = False
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self._added)

    def gather(self) -> None:
        """Parameters are whole."""

    def free(self) -> None:
        """And stay so."""

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


def buckets(named: Named, limit: float) -> list[Bucket]:
    """From the last parameter to the first, each full at `limit` bytes, one type of number per bucket."""
    found: list[Bucket] = []
    for parameter in [p for _, p in reversed(named) if p.requires_grad]:
        size = parameter.numel() * parameter.element_size()
        fits = (
            found
            and found[-1].bytes + size <= limit
            and found[-1].parameters[0].dtype == parameter.dtype
        )
        if not fits:
            found.append(Bucket())
        found[-1].parameters.append(parameter)
        found[-1].bytes += size
    return found


def shard_without_hooks(
    owners: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    placement: Callable[[nn.Parameter], Shard | None],
    but: Iterable[nn.Parameter] = (),
    compute: torch.dtype | None = None,
) -> list[FSDPModule]:
    """Shards parameters in place, in units that the caller gathers (`unshard`) and frees (`reshard`).

    `fully_shard`'s hooks go to a module that holds the owner and is never called: they would do
    nothing, in a tenth of a step's time here.

    Args:
        owners: The modules whose parameters are sharded; the last holds all others.
        mesh: The workers that they are sharded over.
        placement: Along which dimension a parameter is sharded; None: the first.
        but: What is sharded already or kept whole.
        compute: Type that matrices are gathered in. None: their own.

    Returns:
        The units.
    """
    units: list[FSDPModule] = []
    done = set(but)
    # of norms and biases: autocast computes with those in float32
    vectors = {p for owner in owners for p in owner.parameters() if p.dim() < 2} - done

    def shard(owner: nn.Module, own: set[nn.Parameter], dtype: torch.dtype | None) -> None:
        if own:
            unit = fully_shard(
                nn.Sequential(owner),
                mesh=mesh,
                shard_placement_fn=placement,
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
                ignored_params=set(owner.parameters()) - own,
            )
            units.append(unit)

    for owner in owners:
        shard(owner, set(owner.parameters()) - done - vectors, compute)
        done |= set(owner.parameters()) - vectors
    for owner in reversed(owners):  # the last holds all
        shard(owner, set(owner.parameters()) & vectors, None)
    return units


class ShardedGradients:
    """Gathers parameters, reduce-scatters gradients. by_chunk: per chunk the parameters that are complete when it is.

    units: of shard_without_hooks. mesh: (replicate ×) shard."""

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
                for bucket in buckets(named, options.bucket_mb * 2**20)
            ]
            for chunk, named in by_chunk.items()
        }
        self.group = submesh(mesh, "dp_shard").get_group()
        self.replicas = submesh(mesh, "dp_replicate").get_group() if mesh.ndim > 1 else None
        self.ways = mesh.size()
        self.dims = {name: _sharded_along(p, mesh.ndim - 1) for name, p in self.sharded.items()}
        """Of each parameter the dimension that is cut."""
        self.sent: list[tuple[list[str], list[int], Tensor, Any]] = []
        """Names, numbers of each, this rank's shards of the sums of their gradients, and what to wait for."""

    def gather(self) -> None:
        """Before a step or an evaluation."""
        for handle in [unit.unshard(async_op=True) for unit in self.units]:
            if handle is not None:
                handle.wait()
        self.unsharded = dict(self.module.named_parameters())
        for (
            parameter
        ) in self.unsharded.values():  # of many micro-batches 16 bits would lose what is small
            if parameter.is_floating_point():
                summed_in = self.dtype or torch.promote_types(parameter.dtype, torch.float32)
                parameter.grad_dtype = summed_in  # type: ignore[attr-defined]

    def free(self) -> None:
        """Frees what has been gathered."""
        for unit in self.units:
            unit.reshard()

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
        """(ranks, numbers): the gradient in the slices of rows that torch.chunk would make, padded to equal ones; or of
        the dimension that it is sharded along."""
        gradient, ranks = local(self.unsharded[name].grad), self.group.size()
        self.unsharded[name].grad = None
        gradient = gradient.movedim(self.dims[name], 0)
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
                self._add(name, values)
        self.sent.clear()

    def _add(self, name: str, values: Tensor) -> None:
        """Adds a shard, padded at its end, to the gradient of the sharded parameter."""
        parameter: Any = self.sharded[name]
        own = parameter.to_local()
        dim = self.dims[name]
        found = (
            values[: own.numel()]
            .view(own.movedim(dim, 0).shape)
            .movedim(0, dim)
            .contiguous()
            .to(own.dtype)
        )
        if parameter.grad is None:
            spec: dict[str, Any] = {
                "run_check": False,
                "shape": parameter.shape,
                "stride": parameter.stride(),
            }
            parameter.grad = DTensor.from_local(
                found, parameter.device_mesh, parameter.placements, **spec
            )
        else:
            local(parameter.grad).add_(found)


def _sharded_along(parameter: Any, side: int) -> int:
    """side: of the mesh."""
    return getattr(parameter.placements[side], "dim", 0) if isinstance(parameter, DTensor) else 0


class Together:
    """Several, each for parameters that other workers share: what one is told, all are."""

    def __init__(self, parts: Sequence[GradientBuckets | ShardedGradients]) -> None:
        self.parts = parts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: [getattr(part, name)(*args) for part in self.parts]


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


GradSync = GradientBuckets | ShardedGradients | Together
"""What data-parallel workers do with gradients in a step."""
