"""Which modules of a model are mixtures of experts, told by their looks: no name of a model is known here.

*Experts*: a module that holds the experts' weights itself, each parameter with a row per expert,
(E, …), at least one of them a matrix per expert; called with the tokens, which experts each chose,
and how much each counts:

    forward(x (…, D), index (…, k) int, weights (…, k)) → Σ over k of weights · expert_index(x), (…,
    D)

where weights may have the default None, which stands for 1.

So Hugging Face's transformers has them since version 5, in all its mixtures of that kind (Mixtral,
Qwen-MoE, OLMoE, DeepSeek-V3, …), and app/models/mixture.py. *Router*: what stands beside experts
and says how many are chosen (`top_k`); called with tokens it returns a tuple, of which the first is
their scores' logarithms (…, E).
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Mixture:
    """name: of the experts' module. count: E. top_k: k; E where no router says. width: D, of a token."""

    name: str
    experts: nn.Module
    router: nn.Module | None
    count: int
    top_k: int
    width: int

    def parameter_names(self) -> list[str]:
        return [f"{self.name}.{name}" for name, _ in self.experts.named_parameters(recurse=False)]


def find_mixtures(module: nn.Module) -> list[Mixture]:
    """In the order of the modules; [] if there are none."""
    found = []
    for name, experts in module.named_modules():
        if count := count_of(experts):
            beside = module.get_submodule(name.rpartition(".")[0]).children() if name else ()
            routers = [child for child in beside if isinstance(getattr(child, "top_k", None), int)]
            top_k: int = routers[0].top_k if routers else count  # type: ignore[assignment]
            shapes = [
                p.shape for owner in (*routers, experts) for p in owner.parameters() if p.dim() > 1
            ]
            found.append(
                Mixture(name, experts, routers[0] if routers else None, count, top_k, shapes[0][-1])
            )
    return found


def count_of(module: nn.Module) -> int:
    """How many experts the module itself holds; 0 if it is not of the form above."""
    shapes = [p.shape for p in module.parameters(recurse=False)]
    counts = {shape[0] if len(shape) > 1 else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts or not any(len(shape) > 2 for shape in shapes):
        return 0
    takes = list(inspect.signature(type(module).forward).parameters)[1:4]
    as_told = (
        len(takes) == 3 and "ind" in takes[1] and ("weight" in takes[2] or "score" in takes[2])
    )
    return counts.pop() if as_told else 0


def rename_counts(experts: nn.Module, count: int, own: int) -> None:
    """Tells the module's own code, which had `count` experts, that it has `own`."""
    counters = [
        name for name, value in vars(experts).items() if type(value) is int and value == count
    ]
    vars(experts).update({name: own for name in counters if "expert" in name})


def computed(forward: Any, rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """What experts make of rows (M, D) that chose one each: index, weights (M,) → (M, D). Of none as well: they are
    still a part of the graph, so that backward comes to all that experts are computed from."""
    several = len(rows)
    given = [rows, *(t.unsqueeze(-1) for t in (index, weights) if t is not None)]
    if not several:
        given = [torch.cat([t, t.new_zeros(1, t.size(1))]) for t in given]
    return forward(*given).narrow(0, 0, several)


def may_leave_weights_out(forward: Any) -> bool:
    """Whether experts can be called without weights, which then are 1."""
    return list(inspect.signature(forward).parameters.values())[2].default is None


def sorted_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen: (M,). Their order by expert, each one's place in it, and how many chose each expert, (experts,)."""
    order = chosen.argsort(stable=True)
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    return order, place, chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def spread(rows: Tensor, order: Tensor, place: Tensor, times: int = 1) -> Tensor:
    """(N, D), each row `times` times, in another order → (N·times, D). place: the inverse of order, with which the
    gradient is gathered; that of index_select would be added up row by row, on GPUs each time in
    another order."""
    return _Spread.apply(rows, order, place, times)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.times = times
        return rows.index_select(0, order if times == 1 else order // times)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        found = gradient.index_select(0, *ctx.saved_tensors)
        return (
            found if ctx.times == 1 else found.unflatten(0, (-1, ctx.times)).sum(1),
            None,
            None,
            None,
        )


class SplitExperts:
    """A model's mixtures, split over workers. mesh: of the workers that hold the same experts, as Setup.mesh is of all
    data-parallel ones; None where there is one and nothing is sharded."""

    def __init__(self, mixtures: list[Mixture], mesh: DeviceMesh | None) -> None:
        self.mixtures, self.mesh = mixtures, mesh
        self.names = frozenset(name for found in mixtures for name in found.parameter_names())

    @property
    def group(self) -> ProcessGroup | None:
        """Of replicas that hold the same experts."""
        return self.mesh.get_group(0) if self.mesh is not None else None

    def modules_in(self, block: nn.Module) -> list[nn.Module]:
        """Those of the experts' modules that the block holds."""
        inside = set(block.modules())
        return [found.experts for found in self.mixtures if found.experts in inside]

    def placement(self, parameter: nn.Parameter) -> Shard:
        """For fully_shard over `mesh`."""
        assert self.mesh is not None
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(shard_dim(tuple(own.shape), self.mesh.size(-1)))


def shard_dim(shape: tuple[int, ...], ways: int) -> int:
    """Along which dimension shards cut a worker's experts, (own experts, …): between experts, unless not all workers
    would have equally many and rows can be shared evenly."""
    return int(shape[0] % ways != 0 and shape[1] % ways == 0)
