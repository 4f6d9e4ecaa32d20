"""One device: the reference that every other strategy is compared with.

    θ ← θ - η · AdamW(∇ mean over the global batch of loss(θ, sample))

A global batch larger than the memory is split into micro-batches whose gradients add up; nothing else happens. Choose
it when the model, its optimizer state (16 bytes per parameter with AdamW in float32: 4 weight, 4 gradient, 8 state) and
one micro-batch fit on one device and the time is bearable. It sends nothing.
"""

from __future__ import annotations

from strategies.strategy import Applied, Setup, Strategy


def apply(setup: Setup) -> Applied:
    """The module itself."""
    setup.load()
    return Applied(setup.module)


STRATEGY = Strategy("single", "one device", apply=apply, one_process=True)
