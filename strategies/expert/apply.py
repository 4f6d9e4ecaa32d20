"""Expert parallelism: a mixture's experts are split over data-parallel workers, and tokens go to where theirs are.

With R = `ep` workers of D data-parallel ones (dp_replicate × dp_shard × cp), each holds E/R of every mixture's experts;
everything else of the model is as the data strategy has it. A worker's tokens are computed by other workers' experts
(exchange.py), so for an expert's weights W its worker already has the sum of R workers' parts of the gradient:

    ḡ(W) = 1/D · Σ over D workers = R/D · Σ over the D/R workers that hold W of (gradient there / R)

Gradients of W are divided by R where W is read, and then averaged over the D/R that hold the same experts, by what
averages or shards the rest: replicas by an all-reduce, shards by `fully_shard` over a mesh of their own. Where R = D
nothing is left to average.

Choose it for mixtures whose experts are most of the model: fsdp would gather every expert for every micro-batch, which
is E/k times what a token uses; here only tokens travel, 4·N·k·D numbers per layer and micro-batch (exchange.py). Within
a node while that holds the experts. It composes with ddp, fsdp, hsdp, zero1 and zero2, tensor parallelism (an expert's
hidden width is split), pipelines and context parallelism. Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668;
Rajbhandari et al. 2022, https://arxiv.org/abs/2201.05596; torchtitan's `ExpertParallel`.

How: weights become DTensors, split over `ep` along their first dimension, so that optimizers, clipping and checkpoints
know what they are parts of; what the experts' own code reads is plain and its own part. So that code runs unchanged.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from strategies.dims import LayoutError, ParallelDims, named_mesh, submesh
from strategies.expert.exchange import Exchange
from strategies.mixtures import (
    Mixture,
    SplitExperts,
    find_mixtures,
    may_leave_weights_out,
    rename_counts,
)
from strategies.strategy import Strategy
from strategies.traits import CHANGING_OR_HOOKED, Trait


def apply(module: nn.Module, dims: ParallelDims, sharded: bool, device_type: str) -> SplitExperts:
    """Splits the experts of a module, which may be on meta, in place; collective over all ranks.

    dims: as parameters see them (ParallelDims.for_parameters). sharded: whether the data strategy shards.
    """
    mixtures = find_mixtures(module)
    left = dims.for_experts()
    sides = {"pp": left.pp, "dp_replicate": left.dp_replicate, "dp_shard": left.dp_shard, "ep": dims.ep, "tp": left.tp}
    whole = named_mesh(device_type, {name: ways for name, ways in sides.items() if ways > 1 or name == "dp_shard"})
    experts = submesh(whole, *("ep", "tp")[: 1 + (dims.tp > 1)])
    group = submesh(whole, "ep").get_group()
    for found in mixtures:
        _split(found, experts, Exchange(group, found.count))
    names = ["dp_replicate"] * (left.dp_replicate > 1) + ["dp_shard"] * sharded
    return SplitExperts(mixtures, submesh(whole, *names) if names else None)


def require(module: nn.Module, ep: int) -> list[Mixture]:
    """The model's mixtures.

    Raises:
        LayoutError: there are none, or ep does not divide their number.
    """
    mixtures = find_mixtures(module)
    if not mixtures:
        raise LayoutError(
            f"parallel.ep is {ep}, but {type(module).__name__} has no experts that can be split "
            "(strategies/mixtures.py says what they look like): leave it out"
        )
    for found in mixtures:
        if found.count % ep:
            divisors = ", ".join(str(n) for n in range(1, found.count + 1) if found.count % n == 0)
            raise LayoutError(
                f"parallel.ep is {ep}, which does not divide the {found.count} experts of {found.name}: write "
                f"{divisors}"
            )
    return mixtures


def _split(found: Mixture, mesh: DeviceMesh, exchange: Exchange) -> None:
    """mesh: ep, or ep × tp."""
    experts, ways = found.experts, exchange.size
    for name, parameter in list(experts.named_parameters(recurse=False)):
        data = parameter.detach()
        local, of_tp = (data.to_local(), data.placements) if isinstance(data, DTensor) else (data, ())
        own = local.chunk(ways)[mesh.get_local_rank(0)].contiguous().clone()
        spec: dict[str, Any] = {"run_check": False, "shape": data.shape, "stride": data.stride()}
        split = DTensor.from_local(own, mesh, [Shard(0), *of_tp], **spec)
        setattr(experts, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    rename_counts(experts, len(local), len(own))
    kind: Any = type(experts)
    experts.__class__ = _class(kind, tuple(name for name, _ in experts.named_parameters(recurse=False)))
    vars(experts)["_expert_mesh"] = mesh
    name = "computed" if hasattr(experts, "computed") else "forward"  # tensor parallelism has a forward around it
    inner = getattr(experts, name)
    exchange.unweighted = may_leave_weights_out(inner)
    vars(experts)[name] = functools.partial(exchange, inner)


@functools.cache
def _class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """`kind` with plain reading of its parameters."""
    return type(kind.__name__, (kind,), {name: property(functools.partial(_read, name)) for name in names})


def _read(name: str, self: Any) -> Any:
    """This worker's part of a parameter; its gradient is divided by ep. (Sharded by fsdp it is not for reading.)"""
    parameter = nn.Module.__getattr__(self, name)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != self._expert_mesh:
        return parameter
    return _Divided.apply(parameter.to_local(), parameter.device_mesh.size(0))


class _Divided(torch.autograd.Function):
    """As it is; in backward divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.by, None


STRATEGY = Strategy(
    name="expert",
    summary="a mixture's experts split over data-parallel workers",
    degrees=("ep",),
    combines_with=("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    # A worker has some of the experts only, and tokens go to the others' while all run the same block.
    cannot_keep=CHANGING_OR_HOOKED
    | {
        Trait.LOSS_READS_PARAMETERS,
        Trait.LISTS_PARAMETERS,
        Trait.GRADIENT_IN_LOSS,
        Trait.CALLS_VARY,
        Trait.CHANGES_REQUIRES_GRAD,
    },
)
