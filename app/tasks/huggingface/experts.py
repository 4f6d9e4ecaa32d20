"""Computes the experts of the library's mixtures by our grouped matrix products.

The library's own `grouped_mm` does not take float32 meta tensors, which planning and pipelines
need, and multiplies in float32 under autocast. Experts with biases, without gates or with
transposed weights (gpt-oss) are left to the library:
https://huggingface.co/docs/transformers/experts_interface
"""

import functools
from typing import Any

from torch import Tensor, nn

from app.models.grouped_linear import by_expert, grouped_linear
from app.models.linear import product_dtype
from strategies.frozen import CASTS_WEIGHTS
from strategies.mixtures import find_mixtures

GATE = "_apply_gate"
"""What an expert computes between its two products, by the library's interface for experts."""
NEEDED = (GATE, "gate_up_proj", "down_proj")
UNSUPPORTED = ("has_bias", "is_transposed", "has_post_expert_norm")
"""Attributes of experts that are computed in another way than here."""


def group_experts(model: nn.Module) -> None:
    """Replace, in place, the forward of the model's experts where that is possible.

    A pickled model refers to this module by its name, and needs it where it is read.
    """
    for mixture in find_mixtures(model):
        experts = mixture.experts
        is_unsupported = any(getattr(experts, name, False) for name in UNSUPPORTED)
        if not is_unsupported and all(hasattr(experts, name) for name in NEEDED):
            experts.forward = functools.partial(_forward, experts)  # type: ignore[method-assign]
            setattr(experts, CASTS_WEIGHTS, True)


# Pickled models refer to this function by its name.
def _forward(experts: Any, x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """x (N, D), index and weights (N, k) → (N, D)."""
    dtype = product_dtype(x)
    gate_up = experts.gate_up_proj.to(dtype)
    down = experts.down_proj.to(dtype)

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        hidden = getattr(experts, GATE)(grouped_linear(rows, gate_up, ends))
        return grouped_linear(hidden, down, ends)

    return by_expert(compute, x, index, weights=weights, experts=gate_up.size(0))
