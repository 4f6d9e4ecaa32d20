"""The experts of the library's mixtures, computed by our grouped products.

Its own `grouped_mm` takes no float32 tensors without numbers, which planning and pipelines need, and multiplies in
float32 under autocast. Experts with biases or without gates, and those whose weights stand the other way round
(gpt-oss), stay the library's: https://huggingface.co/docs/transformers/experts_interface.
"""

import functools
from typing import Any

from torch import Tensor, nn

from app.models.grouped_linear import by_expert, grouped_linear
from app.models.linear import product_dtype
from strategies.mixtures import find_mixtures

GATE = "_apply_gate"
"""What an expert computes between its two products, by the library's interface for experts."""


def group_experts(model: nn.Module) -> None:
    """In place. A model that is pickled so finds this module where it is read."""
    for found in find_mixtures(model):
        experts = found.experts
        odd = any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
        if not odd and all(hasattr(experts, name) for name in (GATE, "gate_up_proj", "down_proj")):
            experts.forward = functools.partial(_forward, experts)  # type: ignore[method-assign]


def _forward(experts: Any, x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """x (N, D), index and weights (N, k) → (N, D)."""
    both, down = (t.to(product_dtype(x)) for t in (experts.gate_up_proj, experts.down_proj))

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_linear(getattr(experts, GATE)(grouped_linear(rows, both, ends)), down, ends)

    return by_expert(compute, x, index, weights, both.size(0))
