"""What one of several tensor-parallel workers (apply.py) computes and sends, found without the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from strategies.tensor import apply as tensor_parallel
from strategies.tensor import ops
from strategies.tensor.plan import Plan, make_plan


class ShapePeers(ops.Peers):
    """Peers that are not there: every collective gives a tensor of the right shape, and notes what it would send."""

    def __init__(self, ways: int) -> None:
        self.size, self.rank = ways, 0
        self.where: Callable[[], str] = str
        """Names the part of the model that is at work."""
        self.sent: dict[str, float] = defaultdict(float)
        """Bytes that one of them sends by ring algorithms, by part."""
        self.calls: dict[str, int] = defaultdict(int)

    def _note(self, whole: Tensor, factor: float) -> None:
        """A collective whose whole tensor is `whole`; rings send factor × (ways - 1) / ways of it."""
        self.sent[self.where()] += factor * whole.numel() * whole.element_size() * (self.size - 1) / self.size
        self.calls[self.where()] += 1

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        self._note(x, 2)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        whole = x.new_empty(shape)
        self._note(whole, 1)
        return whole

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._note(x, 1)
        shape = list(x.shape)
        shape[dim] //= self.size
        return x.new_empty(shape)


def one_part(
    module: nn.Module,
    given: dict[str, str] | None,
    ways: int,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> tuple[ShapePeers, Plan]:
    """Makes a module without storage, in place, what one of `ways` workers computes; no process is needed.

    Raises:
        LayoutError: a plan that does not fit the model.
    """
    plan, peers = make_plan(module, given, sequence_parallel), ShapePeers(ways)

    def slice_of(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        if dim is None:
            return parameter
        shape = list(parameter.shape)
        shape[dim] = -(-shape[dim] // ways)
        return nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)

    tensor_parallel.rewrite(module, tensor_parallel.SplitLayers(None, plan, loss_parallel, peers), slice_of)
    return peers, plan
