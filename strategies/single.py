"""One device: the truth that every other strategy is held against.

    θ ← θ - η · AdamW(∇ mean over the global batch of loss(θ, sample))

A global batch larger than the memory is cut into micro-batches whose gradients add up; nothing else happens. Choose it
when the model, its optimizer state (16 bytes per parameter with AdamW in float32: 4 weight, 4 gradient, 8 state) and
one micro-batch fit on one device and the time is bearable. It sends nothing.
"""

from __future__ import annotations

from torch import nn

from strategies.costs import Cost, ModelSize, replicated


def apply(module: nn.Module) -> nn.Module:
    """The module itself."""
    return module


def cost(size: ModelSize, optimizer: str = "adamw") -> Cost:
    """Exact: everything whole."""
    return replicated(size, optimizer)
