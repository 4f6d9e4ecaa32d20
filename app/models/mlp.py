"""A multi-layer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class Layer(nn.Module):
    """Linear, activation, dropout: (N, in) to (N, out)."""

    def __init__(self, in_features: int, out_features: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.linear(x)))


class MLP(nn.Module):
    """Hidden layers and a linear output: (N, …) with `in_features` numbers per row, to (N, out_features)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        pairs = itertools.pairwise(widths)
        self.blocks = nn.ModuleDict(
            {str(i): Layer(before, after, activation, dropout) for i, (before, after) in enumerate(pairs)}
        )
        self.head = nn.Linear(widths[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)
