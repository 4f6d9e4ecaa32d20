"""Averages gradients over data-parallel workers where DDP and `fully_shard` cannot.

**Replicas.** This does by hand what DDP does: gradients are packed into buckets from the last layer
to the first, and a bucket is all-reduced over the replicas as soon as backward has added the last
of its gradients, while the layers below are still computed. Each worker reduces only its own slice
of a layer, with the workers that hold the same slice. ddp.py is faster, and serves every model that
is not split. (DDP itself would turn the parameters of tensor parallelism into plain tensors, and
checkpoints would no longer know what they are slices of. `fully_shard` with one shard would hold
every parameter twice.)

**Pipelines.** A chunk's gradients are complete after the last micro-batch that passes it, while
other chunks and stages still compute. They are sent then, in buckets of the chunk's own, the first
of them while that backward still runs (unless the schedule splits backward in two). The step waits
for them at its end. Then the gradients of parameters that several stages use (a tied embedding) are
added up, in one all-reduce per set of stages.

**Shards of a pipeline.** Parameters are sharded by `fully_shard` and gathered once in a step, those
of a block while the blocks before it compute. Their gradients are reduce-scattered once, those of a
bucket while the layers below go backward for the last time. They are gathered in the type of the
arithmetic, so that no forward keeps a cast copy until its backward; gradients add up in float32, or
in the type that they are sent in. (Gathering parameters for every micro-batch, as fsdp does without
a pipeline, would send m times as much: Grattafiori et al. 2024, arXiv 2407.21783, §3.3.2.)
`fully_shard` only keeps the shards. Its hooks never run, and gradients are reduced here, from the
unsharded parameters. So the sums are right in whatever order a schedule computes, even if it
computes the gradients of weights (W) long after those of inputs (B).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from strategies.collectives import reduce_scatter
from strategies.dims import LayoutError, submesh
from strategies.mixtures import SplitExperts
from strategies.options import Options

Named = list[tuple[str, nn.Parameter]]
"""Parameters with their names."""


def local(tensor: Any) -> Tensor:
    """This rank's memory of a tensor that may be a DTensor; to be called under torch.no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wire_dtype(options: Options) -> torch.dtype | None:
    """The type that gradients are sent in; None: their own."""
    return torch.bfloat16 if options.reduce_dtype == "bf16" else None


def require_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Checks that every trained parameter has a gradient, for whose average other workers wait.

    Raises:
        LayoutError: A parameter has none.
    """
    missing = [name for name, p in named if p.requires_grad and p.grad is None]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LayoutError(
            f"the loss does not depend on parameter {missing[0]}{others}, whose gradient cannot be "
            "averaged: use it in forward, set its requires_grad to False, or write strategy=fsdp, "
            "or, with ddp alone, parallel.find_unused_parameters=true"
        )


def split_off_experts(named: Named, experts: SplitExperts | None) -> tuple[Named, Named]:
    """Separates parameters of split experts, which fewer workers average, from all others.

    Args:
        named: Parameters of the model.
        experts: The experts that are split over data-parallel workers, if any are.

    Returns:
        The experts' parameters, and the others.
    """
    expert_names: frozenset[str] = experts.names if experts is not None else frozenset()
    of_experts = [(name, p) for name, p in named if name in expert_names]
    others = [(name, p) for name, p in named if name not in expert_names]
    return of_experts, others


@torch.no_grad()
def all_reduce_(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces local tensors by their sums over the group, in one all-reduce."""
    if gradients:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        unpack_(gradients, flat)


def unpack_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies the numbers of a flat tensor into tensors, in order."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, values in zip(tensors, parts):
        tensor.copy_(values.view_as(tensor))


# --- replicas -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Bucket:
    """Parameters whose gradients are sent together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    pending: int = 0
    """How many gradients backward has not added yet."""
    flat: Tensor | None = None
    """The packed gradients, once they are being sent."""
    work: dist.Work | None = None


def pack_into_buckets(named: Named, limit: float) -> list[Bucket]:
    """Distributes trained parameters over buckets, from the last parameter to the first.

    Args:
        named: The parameters, in the order of the model.
        limit: Bytes at which a bucket is full. Each has one type of number.
    """
    buckets: list[Bucket] = []
    for parameter in [p for _, p in reversed(named) if p.requires_grad]:
        size = parameter.numel() * parameter.element_size()
        fits = (
            bool(buckets)
            and buckets[-1].bytes + size <= limit
            and buckets[-1].parameters[0].dtype == parameter.dtype
        )
        if not fits:
            buckets.append(Bucket())
        buckets[-1].parameters.append(parameter)
        buckets[-1].bytes += size
    return buckets


class GradientBuckets:
    """Averages the gradients of replicas.

    Within a chunk's last backward a bucket is sent as soon as its gradients are there. Buckets are
    sent in their order, which is the same on every replica. What is left is sent when the chunk is
    done.

    Args:
        by_chunk: For each chunk of the model, the parameters that are complete when it is.
        group: The workers that hold the same parameters.
        options: Size of the buckets, and type that gradients are sent in.
    """

    def __init__(
        self, by_chunk: dict[int, Named], group: dist.ProcessGroup, options: Options
    ) -> None:
        self.group = group
        self._wire_dtype = wire_dtype(options)
        self._names = {p: name for named in by_chunk.values() for name, p in named}
        limit = options.bucket_mb * 2**20
        self._buckets = {
            chunk: pack_into_buckets(named, limit) for chunk, named in by_chunk.items()
        }
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._unsent: list[Bucket] = []
        """The buckets of the chunk whose last backward runs that have not been sent."""
        self._has_gradients = False
        for bucket in self._all_buckets():
            self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._gradient_added)

    def _all_buckets(self) -> Iterator[Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def gather(self) -> None:
        """Does nothing: replicas have whole parameters."""

    def free(self) -> None:
        """Does nothing: replicas keep whole parameters."""

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """The context for forward and backward of a micro-batch, for a model that is one chunk."""
        if last:
            self.last_backward(0)
        yield
        if last and torch.is_grad_enabled() and self._has_gradients:
            self.chunk_done(0)
            self.finish()
        self._unsent = []

    def last_backward(self, chunk: int) -> None:
        """The chunk's last backward of a step begins."""
        self._has_gradients = False
        self._unsent = list(self._buckets.get(chunk, []))
        for bucket in self._unsent:
            bucket.pending = len(bucket.parameters)

    def _gradient_added(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]
        if not any(bucket is unsent for unsent in self._unsent):
            return
        self._has_gradients = True
        bucket.pending -= 1
        while self._unsent and self._unsent[0].pending == 0:
            self._send(self._unsent.pop(0))

    def chunk_done(self, chunk: int) -> None:
        """The chunk's gradients are complete."""
        self._unsent = []
        for bucket in self._buckets.get(chunk, []):
            if bucket.flat is None:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        require_gradients((self._names[p], p) for p in bucket.parameters)
        flat = torch.cat([local(p.grad).reshape(-1) for p in bucket.parameters])
        if self._wire_dtype is not None:
            flat = flat.to(self._wire_dtype)
        bucket.flat = flat.div_(self.group.size())
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits until all gradients are averaged."""
        for bucket in self._all_buckets():
            if bucket.flat is None:
                continue
            if bucket.work is not None:
                bucket.work.wait()
            unpack_([local(p.grad) for p in bucket.parameters], bucket.flat)
            bucket.flat = None
            bucket.work = None


# --- shards of a pipeline -------------------------------------------------------------------------


def shard_without_hooks(
    owners: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    placement: Callable[[nn.Parameter], Shard | None],
    excluded: Iterable[nn.Parameter] = (),
    compute: torch.dtype | None = None,
) -> list[FSDPModule]:
    """Shards parameters in place, in units that the caller gathers and frees.

    Each owner is put into a new module, which is never called and on which `fully_shard` puts its
    hooks. Here they would do nothing, and take a tenth of a step's time.

    Args:
        owners: The modules whose parameters are sharded; the last one holds all others.
        mesh: The workers that they are sharded over.
        placement: The dimension along which a parameter is sharded; None: the first.
        excluded: Parameters that are sharded already, or kept whole.
        compute: The type that matrices are gathered in. None: their own.

    Returns:
        The units.
    """
    units: list[FSDPModule] = []
    done = set(excluded)
    # The vectors of norms and biases keep their type, because autocast computes with them in
    # float32.
    vectors = {p for owner in owners for p in owner.parameters() if p.dim() < 2} - done

    def shard(owner: nn.Module, parameters: set[nn.Parameter], dtype: torch.dtype | None) -> None:
        if not parameters:
            return
        unit = fully_shard(
            nn.Sequential(owner),
            mesh=mesh,
            shard_placement_fn=placement,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
            ignored_params=set(owner.parameters()) - parameters,
        )
        units.append(unit)

    for owner in owners:
        for parameters in _of_one_type(owner, set(owner.parameters()) - done - vectors):
            shard(owner, parameters, compute)
        done |= set(owner.parameters()) - vectors
    for owner in reversed(owners):
        # The last one holds the vectors of all.
        for parameters in _of_one_type(owner, set(owner.parameters()) & vectors):
            shard(owner, parameters, None)
    return units


def _of_one_type(owner: nn.Module, parameters: set[nn.Parameter]) -> list[set[nn.Parameter]]:
    """The parameters by the type of those that are trained, in the same order on every worker.

    `fully_shard` takes trained parameters of one type only into a unit. Frozen ones may have any
    type, and go with the first.
    """
    by_type: dict[torch.dtype, set[nn.Parameter]] = {}
    for parameter in owner.parameters():
        if parameter in parameters and parameter.requires_grad:
            by_type.setdefault(parameter.dtype, set()).add(parameter)
    groups = list(by_type.values()) or [set()]
    trained = set[nn.Parameter]().union(*groups)
    groups[0] |= parameters - trained
    return groups


@dataclass(frozen=True, kw_only=True)
class _SentGradients:
    """Gradients that are being reduce-scattered.

    Args:
        names: Their parameters.
        sizes: How many numbers each has in `shard`.
        shard: This rank's shards of the sums, one after the other.
        work: What to wait for.
    """

    names: list[str]
    sizes: list[int]
    shard: Tensor
    work: dist.Work | None


class ShardedGradients:
    """Gathers parameters, and reduce-scatters their gradients.

    Args:
        module: This stage's part of the model.
        units: What `shard_without_hooks` has returned.
        by_chunk: For each chunk, the parameters that are complete when it is.
        mesh: The workers, (replicate ×) shard.
        options: Size of the buckets, and type that gradients are sent in.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[FSDPModule],
        by_chunk: dict[int, Named],
        mesh: DeviceMesh,
        options: Options,
    ) -> None:
        self.module = module
        self.units = units
        self._gathering: dict[FSDPModule, UnshardHandle] = {}
        """The units that are being gathered, and what to wait for."""
        self._owners = {unit: next(cast(nn.Module, unit).children()) for unit in units}
        for unit, owner in self._owners.items():
            if owner is not module:
                owner.register_forward_pre_hook(functools.partial(self._before_forward, unit))
        self._wire_dtype = wire_dtype(options)
        self._names_of_owners = {owner: name for name, owner in module.named_modules()}
        self._sharded = dict(module.named_parameters())
        self._unsharded: dict[str, nn.Parameter] = {}
        self._hooked: dict[Tensor, str] = {}
        """Unsharded parameters that say when their gradient is there, and their names."""
        self._unsent: list[list[str]] = []
        """The buckets of the chunk whose last backward runs that have not been sent."""
        self._pending: set[str] = set()
        """Parameters of these whose gradients are not complete."""
        names = {p: name for name, p in self._sharded.items()}
        limit = options.bucket_mb * 2**20
        self._buckets = {
            chunk: [
                [names[p] for p in bucket.parameters] for bucket in pack_into_buckets(named, limit)
            ]
            for chunk, named in by_chunk.items()
        }
        """For each chunk, the names of the parameters in each bucket."""
        self._shard_group = submesh(mesh, "dp_shard").get_group()
        self._replica_group = submesh(mesh, "dp_replicate").get_group() if mesh.ndim > 1 else None
        self._workers = mesh.size()
        self._shard_dims = {
            name: _shard_dim(parameter, mesh_dim=mesh.ndim - 1)
            for name, parameter in self._sharded.items()
        }
        self._sent: list[_SentGradients] = []

    def gather(self) -> None:
        """Starts to gather the parameters, before a step or an evaluation.

        A block waits for its own when it is called first, while those of later blocks are still
        coming; what is outside of blocks may be read at any time.
        """
        for unit in self.units:
            handle = unit.unshard(async_op=True)
            if handle is not None:
                self._gathering[unit] = handle
        for unit, owner in self._owners.items():
            if owner is self.module:
                self._wait_for(unit)
        self._note_unsharded()

    def _before_forward(self, unit: FSDPModule, owner: nn.Module, args: Any) -> None:
        if unit in self._gathering:
            self._wait_for(unit)
            self._note_unsharded(owner)

    def _wait_for(self, unit: FSDPModule) -> None:
        handle = self._gathering.pop(unit, None)
        if handle is not None:
            handle.wait()

    def _note_unsharded(self, owner: nn.Module | None = None) -> None:
        """Note the parameters that have been gathered."""
        prefix = "" if owner is None else self._names_of_owners[owner]
        for name, parameter in (owner or self.module).named_parameters(prefix):
            if isinstance(parameter, DTensor) and parameter is self._sharded[name]:
                continue  # is still being gathered
            self._unsharded[name] = parameter
            if parameter.is_floating_point():
                # The sum over many micro-batches would lose small numbers in 16 bits.
                sum_dtype = self._wire_dtype or torch.promote_types(parameter.dtype, torch.float32)
                parameter.grad_dtype = sum_dtype  # type: ignore[attr-defined]
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = name
                parameter.register_post_accumulate_grad_hook(self._gradient_added)

    def free(self) -> None:
        """Frees the gathered parameters."""
        for unit in list(self._gathering):
            self._wait_for(unit)  # nothing has called the block
        for unit in self.units:
            unit.reshard()

    def last_backward(self, chunk: int) -> None:
        """The chunk's last backward of a step begins.

        In it a bucket is sent as soon as its gradients are there, in the order of buckets, which is
        the same on all workers. What is left is sent when the chunk is done.
        """
        self._unsent = list(self._buckets.get(chunk, []))
        self._pending = {name for bucket in self._unsent for name in bucket}

    def _gradient_added(self, parameter: Tensor) -> None:
        if not self._unsent:
            return
        self._pending.discard(self._hooked[parameter])
        while self._unsent and self._pending.isdisjoint(self._unsent[0]):
            self._send(self._unsent.pop(0))

    def chunk_done(self, chunk: int) -> None:
        """Sends what is left of the chunk's gradients, which are complete."""
        self._unsent = []
        for bucket in self._buckets.get(chunk, []):
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: list[str]) -> None:
        names = [
            name
            for name in bucket
            if name in self._unsharded and self._unsharded[name].grad is not None
        ]
        if not names:
            return
        by_rank = [self._take_gradient_by_rank(name) for name in names]
        flat = torch.cat(by_rank, 1).reshape(-1)
        if self._wire_dtype is not None:
            flat = flat.to(self._wire_dtype)
        flat.div_(self._workers)
        shard = flat.new_empty(flat.numel() // self._shard_group.size())
        work = reduce_scatter(shard, flat, self._shard_group)
        sizes = [part.size(1) for part in by_rank]
        self._sent.append(_SentGradients(names=names, sizes=sizes, shard=shard, work=work))

    def _take_gradient_by_rank(self, name: str) -> Tensor:
        """Takes a gradient from its unsharded parameter, as (ranks, numbers).

        It is cut along the sharded dimension as torch.chunk would cut it, and padded so that all
        parts are equally long.
        """
        ranks = self._shard_group.size()
        gradient = local(self._unsharded[name].grad)
        self._unsharded[name].grad = None
        gradient = gradient.movedim(self._shard_dims[name], 0)
        missing = -len(gradient) % ranks
        if missing:
            padding = gradient.new_zeros((missing, *gradient.shape[1:]))
            gradient = torch.cat([gradient, padding])
        return gradient.reshape(ranks, -1)

    @torch.no_grad()
    def finish(self) -> None:
        """Frees the gathered parameters, and waits until all gradients are averaged."""
        self.free()
        for sent in self._sent:
            if sent.work is not None:
                sent.work.wait()
            if self._replica_group is not None:
                dist.all_reduce(sent.shard, group=self._replica_group)
            for name, values in zip(sent.names, sent.shard.split(sent.sizes)):
                self._add_gradient(name, values)
        self._sent.clear()

    def _add_gradient(self, name: str, padded: Tensor) -> None:
        """Adds a shard, which is padded at its end, to the gradient of the sharded parameter."""
        parameter: Any = self._sharded[name]
        local_shard = parameter.to_local()
        dim = self._shard_dims[name]
        values = padded[: local_shard.numel()].view(local_shard.movedim(dim, 0).shape)
        gradient = values.movedim(0, dim).contiguous().to(local_shard.dtype)
        if parameter.grad is not None:
            local(parameter.grad).add_(gradient)
            return
        parameter.grad = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _shard_dim(parameter: nn.Parameter, *, mesh_dim: int) -> int:
    """The dimension of a parameter that one dimension of the mesh shards."""
    if not isinstance(parameter, DTensor):
        return 0
    return getattr(parameter.placements[mesh_dim], "dim", 0)


class CombinedSync:
    """The synchronisation of several sets of parameters, each over workers of its own."""

    def __init__(self, parts: Sequence[GradientBuckets | ShardedGradients]) -> None:
        self.parts = parts

    def gather(self) -> None:
        for part in self.parts:
            part.gather()

    def free(self) -> None:
        for part in self.parts:
            part.free()

    def last_backward(self, chunk: int) -> None:
        for part in self.parts:
            part.last_backward(chunk)

    def chunk_done(self, chunk: int) -> None:
        for part in self.parts:
            part.chunk_done(chunk)

    def finish(self) -> None:
        for part in self.parts:
            part.finish()


GradSync = GradientBuckets | ShardedGradients | CombinedSync
"""What a pipeline's data-parallel workers do with gradients in a step."""


def add_over_stages(shared: dict[dist.ProcessGroup, Named]) -> None:
    """Adds up the gradients of parameters that several stages use.

    Args:
        shared: For each group of stages, the parameters that all of them use; one all-reduce each.
    """
    for group, named in shared.items():
        gradients = []
        for _, parameter in named:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                gradients.append(local(parameter.grad))
        all_reduce_(gradients, group)
