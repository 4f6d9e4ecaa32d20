"""A mixture's experts over tensor-parallel workers, split in one of two ways.

Their parameters tell which way:

- *gate, up and down* of (E, F, D), (E, F, D) and (E, D, F), as app/models/mixture.py has them. The
  hidden width F of each expert is split, as in any feed-forward block (apply.py), so that all
  workers compute equally much whatever the router chooses.
- *Any others*. The experts themselves are split: worker r of R holds E/R of them. Those of Hugging
  Face keep gate and up in one tensor (E, 2·F, D), of which no contiguous part is a part of both;
  there may be biases, and weights in the other order. A worker computes the choices Cᵣ that are its
  own experts, by the model's own code:

      y = Σᵣ yᵣ,     yᵣ = Σ over chosen k in Cᵣ of weightₖ · expertₖ(x)

Both ways send the same, one all-reduce of y and one of its gradient, and hold 1/R of the weights
and the hidden activations. The second way makes the host wait for the number of the worker's own
choices, and makes all workers wait for the one that most choices go to.
"""

import functools
from collections.abc import Callable

from torch import Tensor, nn

from strategies.mixtures import apply_experts, expert_count, set_expert_count
from strategies.tensor.ops import Peers
from strategies.tensor.plan import expert_dims, splits_between_experts

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens (…, D), chosen experts (…, k), weights (…, k)) → (…, D)."""


def split_forward(experts: nn.Module, peers: Peers) -> ExpertsForward:
    """What computes this worker's part of y; to be called before the experts are split.

    Args:
        experts: The module of the experts. A forward of its own, which another strategy has put
            into it, is taken out of it and used.
        peers: The workers.
    """
    forward = vars(experts).pop("forward", experts.forward)
    if not splits_between_experts(experts):
        return forward
    count = expert_count(experts)
    # Without processes, the number need not be divisible.
    set_expert_count(experts, before=count, now=-(-count // peers.size))
    return functools.partial(_own_experts_forward, peers, experts, forward)


def _own_experts_forward(
    peers: Peers,
    experts: nn.Module,
    forward: Callable[..., Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """What this worker's experts add to y.

    Args:
        peers: The workers.
        experts: The module of the experts, of which this worker has some.
        forward: Computes tokens by them.
        x: (…, D).
        index: (…, k), over the experts of all workers.
        weights: (…, k).

    Returns:
        (…, D).
    """
    tokens = x.flatten(0, -2)
    top_k = index.size(-1)
    first_parameter = next(iter(expert_dims(experts)))
    own_count = getattr(experts, first_parameter).size(0)
    positions, own_index = peers.own_choices(index.flatten(), own_count)
    own_tokens = tokens.index_select(0, positions // top_k)
    own_weights = weights.flatten().index_select(0, positions)
    own_rows = apply_experts(forward, own_tokens, index=own_index, weights=own_weights)
    rows = own_rows.new_zeros(index.numel(), tokens.size(1)).index_copy(0, positions, own_rows)
    return rows.view(*index.shape, -1).sum(-2)
