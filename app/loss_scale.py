"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training").

The usual scaler asks each rank's gradients whether they overflowed. Here the question is put to the total gradient
norm, which is the same number on every rank whatever the layout, so all ranks skip the same steps without another
collective. Reading it costs one synchronisation per step, in fp16 only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.errors import NonFiniteError

SMALLEST = 2.0**-10
LARGEST = 2.0**24


class LossScale:
    """Multiplies the loss, divides the gradients; halves after an overflow, doubles after `growth_interval` steps."""

    def __init__(self, enabled: bool, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.skipped = 0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divides the gradients by the scale, a power of two and therefore exactly."""
        for parameter in parameters if self.enabled else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def accepts(self, grad_norm: torch.Tensor | None, step: int) -> bool:
        """Whether the optimizer may take this step; adapts the scale.

        Raises:
            NonFiniteError: the gradients overflow at every scale, so the loss itself is not finite.
        """
        if not self.enabled or grad_norm is None:
            return True
        if bool(torch.isfinite(grad_norm)):
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale = min(LARGEST, self.scale * 2)
            return True
        self.good_steps = 0
        self.skipped += 1
        self.scale /= 2
        if self.scale < SMALLEST:
            raise NonFiniteError(
                f"at step {step} the fp16 gradient overflows at every loss scale, on all ranks; the last good "
                "checkpoint is intact: try train.precision=bf16, a lower optimizer.lr or train.clip_norm=1.0"
            )
        return False

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale = float(state["scale"])
            self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
