"""The gradient noise scale, measured while training: McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1.

The mean gradient of a batch of b samples has  E|g_b|² = |G|² + tr(Σ) / b,  with G the true gradient and Σ the
covariance of one sample's. From the same step's gradients of small batches and of the whole batch B,

    tr(Σ) ≈ (mean |g_small|² − |g_B|²) / (mean 1/b_small − 1/B)          |G|² ≈ |g_B|² − tr(Σ) / B

are unbiased. Their ratio B_noise = tr(Σ) / |G|² is not, step by step; so both are averaged over the last measured steps
first. It predicts the batch size up to which twice the batch nearly halves the steps.

The small batches are the step's micro-batches, each over all workers; an only one is cut in two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.data.loader import map_tensors, number_on, rows
from strategies.parallelize import Parallel
from strategies.zero_weight import backward_of_zeros, has_no_weight, recorded_outputs

WINDOW = 100  # measured steps that are averaged over: gradients change while training continues
LEAST = 5  # measured steps before a value is reported


class Estimate:
    """Averages measurements; pure arithmetic on the host."""

    def __init__(self, window: int = WINDOW) -> None:
        self.pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, small: float, large: float, inverse_small: float, batch: float) -> None:
        """small, large: mean |g_small|² and |g_B|². inverse_small: mean of 1 / b_small."""
        if inverse_small <= 1 / batch:  # one part had all items: there was no smaller batch
            return
        covariance = (small - large) / (inverse_small - 1 / batch)
        if math.isfinite(covariance):
            self.pairs.append((covariance, large - covariance / batch))

    def value(self) -> tuple[float, float, float] | None:
        """The noise scale in samples and its 95 % interval, by the jackknife over measured steps; None if not known."""
        n = len(self.pairs)
        covariance, gradient = (sum(pair[i] for pair in self.pairs) for i in (0, 1))
        if n < LEAST or gradient <= 0 or covariance <= 0:
            return None
        left_out = [(covariance - c) / (gradient - g) for c, g in self.pairs if gradient > g]
        middle = sum(left_out) / len(left_out)
        error = math.sqrt((n - 1) / n * sum((value - middle) ** 2 for value in left_out))
        found = covariance / gradient
        return found, max(0.0, found - 1.96 * error), found + 1.96 * error


class NoiseScale:
    """Measures every k-th step in place of `Parallel.forward_backward`; batch: the global batch size in samples."""

    def __init__(self, parallel: Parallel, every: int, batch: int) -> None:
        self.parallel, self.every, self.batch = parallel, every, batch
        self.estimate = Estimate()
        self.waiting: list[Tensor] = []  # measurements that are still on the device
        self.items: Callable[[Any], float] | None = None
        """What a batch's loss is the mean of; None: its rows."""

    @classmethod
    def of(cls, parallel: Parallel, every: int | None, batch: int) -> NoiseScale | None:
        """None if not asked for, for one sample per worker, and where the layout runs the backward pass itself."""
        dims = parallel.layout.dims
        if not every or batch < 2 * dims.dp:
            return None
        own = dims.pp * dims.cp > 1 or type(parallel).forward_backward is not Parallel.forward_backward
        return None if own else cls(parallel, every, batch)

    def due(self, step: int) -> bool:
        """Not the first step: DDP learns the graph in it."""
        return step > 1 and step % self.every == 0

    def forward_backward(
        self, batches: Sequence[Any], weights: Sequence[Any], loss: Any, scale: float | Tensor = 1.0
    ) -> Tensor:
        """As `Parallel.forward_backward`: the same gradients are left behind, but for rounding."""
        parallel, total = self.parallel, torch.zeros((), device=self.parallel.device)
        parameters = list(parallel.parameters())
        norms, inverses, kept = [], [], list[Tensor | None]()
        for batch, weight in self._at_least_two(batches, weights):
            with parallel.micro_step(last=True):
                is_left_out = has_no_weight(weight)
                with parallel.autocast(), recorded_outputs(parallel.inner, is_left_out) as outputs:
                    value = parallel.call(loss, batch)
                if is_left_out:
                    backward_of_zeros(value, outputs)
                else:
                    (value * (weight * parallel.layout.dims.dp * scale)).backward()
            whole_value = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            found = torch.zeros_like(whole_value) if is_left_out else whole_value * weight
            total = total.to(found.device) + found
            share = parallel.total(number_on(found.device, weight).float())
            norms.append((parallel.grad_norm_(None) / (share * scale)).double().square())
            inverses.append(1 / (share.double() * self.batch))
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            # Sums of their own: DDP uses its gradients' memory again.
            kept = kept or [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients]
            for sum_, gradient in zip(kept, gradients):
                if sum_ is not None and gradient is not None:
                    sum_.add_(gradient)
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient
        whole = (parallel.grad_norm_(None) / scale).double().square()
        # Of a part without an item on any worker, which is no batch at all, both are infinite or nan.
        norm, inverse = torch.stack(norms), torch.stack(inverses).to(whole.device)
        counts = torch.isfinite(inverse)
        number = counts.sum().clamp(min=1)
        small, inverse_small = (torch.where(counts, each, 0.0).sum() / number for each in (norm, inverse))
        self.waiting.append(torch.stack([small, whole, inverse_small]))
        return total

    def _at_least_two(self, batches: Sequence[Any], weights: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The micro-batches with their weights; an only one is cut in two, each half with its part of the items."""
        if len(batches) > 1:
            return list(zip(batches, weights))
        middle = rows(batches[0]) // 2
        halves = [
            map_tensors(lambda x: x[:middle] if x.dim() else x, batches[0]),
            map_tensors(lambda x: x[middle:] if x.dim() else x, batches[0]),
        ]
        # Of halves that are on a GPU the host waits for a count here: in measured steps, and nowhere else.
        counts = [float(rows(half)) if self.items is None else self.items(half) for half in halves]
        return [(half, weights[0] * (count / sum(counts)) if count else 0.0) for half, count in zip(halves, counts)]

    def values(self) -> dict[str, float]:
        """What to log; {} until enough is known. Waits for the device."""
        if not self.waiting:
            return {}
        for small, large, inverse in torch.stack(self.waiting).tolist():
            self.estimate.add(small, large, inverse, self.batch)
        self.waiting = []
        found = self.estimate.value()
        names = ("train/noise_scale", "train/noise_scale_low", "train/noise_scale_high")
        return dict(zip(names, found)) if found else {}
