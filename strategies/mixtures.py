"""Find a model's mixtures of experts by the form of its modules, not by their names.

*Experts* are a module that holds the weights of all experts itself. Each of its parameters has one
row per expert, (E, …), and at least one has a matrix per expert. The module is called with tokens,
the experts that each token chose, and how much each of them counts:

    forward(x (…, D), index (…, k) int, weights (…, k)) → (…, D)

    forward(x, index, weights) = Σ over k of weights · expert_index(x)

`weights` may have the default None, which stands for 1.

Hugging Face's transformers has written all its mixtures of this kind in this form since version 5
(Mixtral, Qwen-MoE, OLMoE, DeepSeek-V3, …), and so does app/models/mixture.py.

A *router* is a module beside the experts, with an attribute `top_k`: the number of experts that
each token chooses. Called with tokens it returns a tuple, which begins with the logarithms of their
scores (…, E).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One mixture of experts of a model.

    Attributes:
        name: The name of the experts' module.
        experts: The experts' module.
        router: The module beside it that chooses experts; None if there is none.
        count: E, the number of experts.
        top_k: k, how many of them each token chooses; E if no router says it.
        width: D, the size of a token.
    """

    name: str
    experts: nn.Module
    router: nn.Module | None
    count: int
    top_k: int
    width: int

    def parameter_names(self) -> list[str]:
        """The names of the experts' parameters in the model."""
        return [f"{self.name}.{name}" for name, _ in self.experts.named_parameters(recurse=False)]


def find_mixtures(module: nn.Module) -> list[Mixture]:
    """The mixtures of a model, in the order of its modules."""
    mixtures = []
    for name, part in module.named_modules():
        count = expert_count(part)
        if count:
            siblings = module.get_submodule(name.rpartition(".")[0]).children() if name else ()
            mixtures.append(_mixture(name, part, count=count, siblings=list(siblings)))
    return mixtures


def _mixture(name: str, experts: nn.Module, *, count: int, siblings: list[nn.Module]) -> Mixture:
    """The record of one mixture.

    Args:
        name: The name of the experts' module.
        experts: The experts' module.
        count: The number of experts.
        siblings: The modules beside it.
    """
    routers = [module for module in siblings if isinstance(getattr(module, "top_k", None), int)]
    router = routers[0] if routers else None
    top_k: int = count if router is None else router.top_k  # type: ignore[assignment]
    parameters = (p for owner in (*routers, experts) for p in owner.parameters())
    first_matrix = next(p for p in parameters if p.dim() > 1)
    return Mixture(
        name=name,
        experts=experts,
        router=router,
        count=count,
        top_k=top_k,
        width=first_matrix.shape[-1],
    )


def expert_count(module: nn.Module) -> int:
    """How many experts a module holds itself; 0 if it does not have the form of experts."""
    shapes = [p.shape for p in module.parameters(recurse=False)]
    row_counts = {shape[0] if len(shape) > 1 else 0 for shape in shapes}
    has_matrix_per_expert = any(len(shape) > 2 for shape in shapes)
    if len(row_counts) != 1 or 0 in row_counts or not has_matrix_per_expert:
        return 0
    argument_names = list(inspect.signature(type(module).forward).parameters)[1:4]
    if len(argument_names) != 3:
        return 0
    _, index_name, weights_name = argument_names
    takes_index = "ind" in index_name
    takes_weights = "weight" in weights_name or "score" in weights_name
    return row_counts.pop() if takes_index and takes_weights else 0


def set_expert_count(experts: nn.Module, *, before: int, now: int) -> None:
    """Change the attributes from which the code of an experts' module knows how many it has.

    Args:
        experts: The module, which keeps fewer experts than it was built with.
        before: How many it was built with.
        now: How many it keeps.
    """
    attributes = vars(experts)
    for name, value in list(attributes.items()):
        if "expert" in name and type(value) is int and value == before:
            attributes[name] = now


def apply_experts(
    forward: Callable[..., Tensor], rows: Tensor, *, index: Tensor, weights: Tensor | None
) -> Tensor:
    """Compute rows by one expert each.

    If there are no rows, the experts compute a row of zeros that is cut off again. They are then
    still a part of the graph, so that backward reaches whatever their weights are computed from.

    Args:
        forward: The experts' forward.
        rows: (M, D).
        index: (M,), the expert of each row.
        weights: (M,); None to call the experts without weights.

    Returns:
        (M, D).
    """
    arguments = [rows, index.unsqueeze(-1)]
    if weights is not None:
        arguments.append(weights.unsqueeze(-1))
    row_count = len(rows)
    if not row_count:
        arguments = [torch.cat([t, t.new_zeros(1, t.size(1))]) for t in arguments]
    return forward(*arguments).narrow(0, 0, row_count)


def weights_are_optional(forward: Callable[..., Tensor]) -> bool:
    """Whether experts can be called without weights, which then are 1."""
    weights_parameter = list(inspect.signature(forward).parameters.values())[2]
    return weights_parameter.default is None


def sorted_by_expert(choices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert.

    Args:
        choices: (M,), the expert of each choice.
        experts: The number of experts.

    Returns:
        The order (M,), its inverse (M,), which is the position of each choice in the order, and how
        many choices each expert has (experts,).
    """
    order = choices.argsort(stable=True)
    positions = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, positions)
    ones = torch.ones_like(choices)
    counts = choices.new_zeros(experts).scatter_add_(0, choices, ones)
    return order, inverse, counts


def permute_rows(rows: Tensor, order: Tensor, inverse: Tensor, *, repeats: int = 1) -> Tensor:
    """Repeat each row, and put the result into another order.

    The gradient is gathered with the inverse of the order. The gradient of `index_select` would be
    added up row by row, on GPUs in a different order each time.

    Args:
        rows: (N, D).
        order: (N · repeats,), indices of the repeated rows.
        inverse: (N · repeats,), the inverse of the order.
        repeats: How often each row is repeated.

    Returns:
        (N · repeats, D).
    """
    return _PermuteRows.apply(rows, order, inverse, repeats)


class _PermuteRows(torch.autograd.Function):
    """See `permute_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeats = repeats
        return rows.index_select(0, order if repeats == 1 else order // repeats)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows_gradient = gradient.index_select(0, inverse)
        if ctx.repeats > 1:
            rows_gradient = rows_gradient.unflatten(0, (-1, ctx.repeats)).sum(1)
        return rows_gradient, None, None, None


class SplitExperts:
    """A model's mixtures, with their experts split over workers.

    Attributes:
        mixtures: The mixtures.
        mesh: The workers that hold the same experts, in the dimensions that Setup.mesh has for all
            data-parallel workers. None if a single worker holds them and nothing is sharded.
        names: The names of all experts' parameters in the model.
    """

    def __init__(self, mixtures: list[Mixture], mesh: DeviceMesh | None) -> None:
        self.mixtures = mixtures
        self.mesh = mesh
        self.names = frozenset(name for mixture in mixtures for name in mixture.parameter_names())

    @property
    def group(self) -> ProcessGroup | None:
        """The group of replicas that hold the same experts."""
        return self.mesh.get_group(0) if self.mesh is not None else None

    def modules_in(self, block: nn.Module) -> list[nn.Module]:
        """The experts' modules inside a block."""
        parts = set(block.modules())
        return [mixture.experts for mixture in self.mixtures if mixture.experts in parts]

    def placement(self, parameter: nn.Parameter) -> Shard:
        """How `fully_shard` shards a parameter of the experts over `mesh`."""
        # Not at the top: costs and tasks import this file too, and this import takes a second.
        from torch.distributed.tensor import DTensor, Shard

        assert self.mesh is not None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(shard_dim(tuple(local.shape), self.mesh.size(-1)))


def shard_dim(shape: tuple[int, ...], shards: int) -> int:
    """The dimension along which a parameter of a worker's experts is sharded.

    It is the dimension of the experts, unless the experts cannot be divided evenly and the rows of
    their matrices can.

    Args:
        shape: (the worker's experts, rows, …).
        shards: The number of shards.
    """
    experts_divide = shape[0] % shards == 0
    rows_divide = shape[1] % shards == 0
    return 1 if rows_divide and not experts_divide else 0
