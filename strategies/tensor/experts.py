"""A mixture's experts split over tensor-parallel workers, in one of two ways: their parameters tell which.

*gate, up, down*, (E, F, D) and (E, D, F), as app/models/mixture.py has them: each expert's hidden width F is split,
like any feed-forward's (apply.py), so that workers compute alike whatever the router chooses.

*Any others*: the experts themselves are split, worker r of R has E/R. Hugging Face's keep gate and up in one tensor
(E, 2·F, D), of which no contiguous part is a part of both; there may be biases, and weights the other way round. A
worker computes the choices of its own experts, by the model's own code; for Cᵣ, the choices of worker r's:

    y = Σᵣ yᵣ,     yᵣ = Σ over chosen k in Cᵣ of weightₖ · expertₖ(x)

Both send the same, one all-reduce of y (and one of the gradient), and hold 1/R of the weights and of the hidden
activations; in the second the host waits for the number of own choices, and the busiest worker's step is everyone's.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from strategies.mixtures import computed, count_of, rename_counts
from strategies.tensor.ops import Peers
from strategies.tensor.plan import expert_dims


def split_forward(experts: Any, peers: Peers) -> Callable[..., Tensor]:
    """What computes this worker's part of y, by the forward that the experts have now; before they are split."""
    forward = vars(experts).pop("forward", experts.forward)
    if 0 not in expert_dims(experts).values():
        return forward
    count = count_of(experts)
    rename_counts(experts, count, -(-count // peers.size))  # what is only watched may be uneven
    return functools.partial(_of_own, peers, experts, forward)


def _of_own(peers: Peers, experts: Any, forward: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """(…, D), (…, k), (…, k) → (…, D). index: from 0 over the experts of all `peers`."""
    rows, own = x.flatten(0, -2), next(getattr(experts, name) for name in expert_dims(experts)).size(0)
    mine, chosen = peers.choices(index.flatten(), own)
    found = computed(
        forward, rows.index_select(0, mine // index.size(-1)), chosen, weights.flatten().index_select(0, mine)
    )
    y = found.new_zeros(index.numel(), rows.size(1)).index_copy(0, mine, found)
    return y.view(*index.shape, -1).sum(-2)
