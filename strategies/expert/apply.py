"""Expert parallelism: a mixture's experts are split over data-parallel workers.

Of D data-parallel workers (dp_replicate × dp_shard × cp), each R = `ep` share the experts: each
holds E/R of those of every mixture, and tokens go where their experts are (exchange.py). All the
rest of the model is as the data strategy has it.

Since other workers' tokens are computed by a worker's experts, the gradient of an expert's weights
W on that worker is already the sum over R workers. The average over all D workers is

    ḡ(W) = 1/D · Σ over D workers = R/D · Σ over the D/R workers that hold W of (their gradient / R)

So gradients of W are divided by R where W is read, and then averaged over the D/R workers that hold
the same experts, by what averages or shards the rest of the model: replicas by an all-reduce,
shards by `fully_shard` over a mesh of their own. If R = D nothing is left to average.

Choose it for mixtures whose experts are most of the model. fsdp would gather every expert for every
micro-batch, E/k times as many as a token uses; here only tokens travel. For N tokens, k choices
each, these are 4·N·k times the width of a token in elements, per layer and micro-batch. Keep ep
within a node as long as one node holds all experts. It composes with ddp, fsdp, hsdp, zero1 and
zero2, with tensor parallelism, pipelines and context parallelism. Lepikhin et al. 2020, arXiv
2006.16668; Rajbhandari et al. 2022, arXiv 2201.05596; torchtitan's `ExpertParallel`.

Weights become DTensors, split over `ep` along their first dimension, so that optimizers, clipping
and checkpoints know what they are parts of. What the experts' own code reads is plain, and this
worker's part. So that code runs unchanged.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from strategies.dims import LayoutError, ParallelDims, named_mesh, submesh
from strategies.expert.exchange import Exchange
from strategies.mixtures import (
    Mixture,
    SplitExperts,
    find_mixtures,
    set_expert_count,
    weights_are_optional,
)
from strategies.strategy import Strategy
from strategies.traits import CHANGING_OR_HOOKED, Trait

SplitModule = Any
"""A module of experts whose class `_split_class` has made, with `_expert_mesh`."""


def apply(
    module: nn.Module, dims: ParallelDims, is_sharded: bool, device_type: str
) -> SplitExperts:
    """Split a model's experts, in place. Collective over all workers.

    Args:
        module: The model, which may be on meta.
        dims: The degrees as parameters see them (ParallelDims.for_parameters).
        is_sharded: Whether the data strategy shards.
        device_type: Type of the workers' devices.

    Returns:
        The mixtures, and the workers that hold the same experts.
    """
    mixtures = find_mixtures(module)
    others = dims.for_experts()
    degrees = {
        "pp": others.pp,
        "dp_replicate": others.dp_replicate,
        "dp_shard": others.dp_shard,
        "ep": dims.ep,
        "tp": others.tp,
    }
    mesh = named_mesh(
        device_type,
        {name: degree for name, degree in degrees.items() if degree > 1 or name == "dp_shard"},
    )
    experts_mesh = submesh(mesh, "ep", "tp") if dims.tp > 1 else submesh(mesh, "ep")
    group = submesh(mesh, "ep").get_group()
    for mixture in mixtures:
        _split_experts(mixture, experts_mesh, Exchange(group, mixture.count))
    same_experts: list[str] = []
    if others.dp_replicate > 1:
        same_experts.append("dp_replicate")
    if is_sharded:
        same_experts.append("dp_shard")
    return SplitExperts(mixtures, submesh(mesh, *same_experts) if same_experts else None)


def require(module: nn.Module, ep: int) -> list[Mixture]:
    """The model's mixtures.

    Raises:
        LayoutError: There are none, or ep does not divide their number of experts.
    """
    mixtures = find_mixtures(module)
    if not mixtures:
        raise LayoutError(
            f"parallel.ep is {ep}, but {type(module).__name__} has no experts that can be split "
            "(strategies/mixtures.py says what they look like): leave it out"
        )
    for mixture in mixtures:
        if mixture.count % ep:
            divisors = [n for n in range(1, mixture.count + 1) if mixture.count % n == 0]
            raise LayoutError(
                f"parallel.ep is {ep}, which does not divide the {mixture.count} experts of "
                f"{mixture.name}: write {', '.join(map(str, divisors))}"
            )
    return mixtures


def _split_experts(mixture: Mixture, mesh: DeviceMesh, exchange: Exchange) -> None:
    """Split the experts of one mixture, in place.

    Args:
        mixture: The mixture.
        mesh: (ep,), or (ep, tp) if tensor parallelism has split it before.
        exchange: Sends tokens to the experts.
    """
    experts = mixture.experts
    rank = mesh.get_local_rank(0)
    counts: set[tuple[int, int]] = set()  # (experts before, this worker's), the same for all
    names: list[str] = []
    for name, parameter in list(experts.named_parameters(recurse=False)):
        whole = parameter.detach()
        local = whole
        placements: tuple[Placement, ...] = ()
        if isinstance(whole, DTensor):
            local = whole.to_local()
            placements = whole.placements
        part = local.chunk(exchange.size)[rank].contiguous().clone()
        split = DTensor.from_local(
            part,
            mesh,
            [Shard(0), *placements],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        setattr(experts, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        names.append(name)
        counts.add((len(local), len(part)))
    ((count_before, own_count),) = counts
    set_expert_count(experts, before=count_before, now=own_count)
    kind: Any = type(experts)  # mypy takes its instances' __hash__ for its own
    experts.__class__ = _split_class(kind, tuple(names))
    vars(experts)["_expert_mesh"] = mesh
    # Tensor parallelism has put a forward of its own around that of the experts.
    is_split_by_tensor = hasattr(experts, "_compute_experts")
    forward_name = "_compute_experts" if is_split_by_tensor else "forward"
    forward = getattr(experts, forward_name)
    exchange.passes_weights = not weights_are_optional(forward)
    vars(experts)[forward_name] = functools.partial(exchange, forward)


@functools.cache
def _split_class(kind: type[nn.Module], parameters: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `kind` with properties that read parameters."""
    members = {name: property(functools.partial(_read_parameter, name)) for name in parameters}
    return type(kind.__name__, (kind,), members)


def _read_parameter(name: str, self: SplitModule) -> Any:
    """This worker's part of a parameter, whose gradient is divided by ep.

    One that fsdp has sharded as well is returned as it is, which the experts' code cannot use.
    """
    parameter = nn.Module.__getattr__(self, name)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != self._expert_mesh:
        return parameter
    return _DividedGradient.apply(parameter.to_local(), parameter.device_mesh.size(0))


class _DividedGradient(torch.autograd.Function):
    """The identity, whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.divisor, None


STRATEGY = Strategy(
    name="expert",
    summary="a mixture's experts split over data-parallel workers",
    degrees=("ep",),
    combines_with=("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    # A worker has only some of the experts, and exchanges tokens with the other workers while all
    # of them run the same block.
    cannot_keep=CHANGING_OR_HOOKED
    | {
        Trait.LOSS_READS_PARAMETERS,
        Trait.LISTS_PARAMETERS,
        Trait.GRADIENT_IN_LOSS,
        Trait.CALLS_VARY,
        Trait.CHANGES_REQUIRES_GRAD,
    },
)
