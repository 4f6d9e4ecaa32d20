"""The gradient noise scale, measured while training: McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1.

The mean gradient of a batch of b samples has  E|g_b|² = |G|² + tr(Σ) / b,  with G the true gradient and Σ the
covariance of one sample's. From the same step's gradients of small batches (one per worker before they are averaged,
or one per micro-batch) and of the whole batch B,

    tr(Σ) ≈ (mean |g_small|² − |g_B|²) / (mean 1/b_small − 1/B)          |G|² ≈ |g_B|² − tr(Σ) / B

are unbiased. Their ratio B_noise = tr(Σ) / |G|² is not, step by step; so both are averaged over the last measured steps
first. It predicts the batch size up to which twice the batch nearly halves the steps.

With data-parallel replicas the small batches are the workers': on a measured step their gradients are measured before
they are averaged. Sharded and single-device layouts measure micro-batches, which are made where a step has only one.
Only every k-th step is measured, and nobody waits for the numbers before the loop reports anyway.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from app.data.batch import rows
from strategies.parallelize import Parallel

Loss = Callable[[nn.Module, Any], torch.Tensor]
WINDOW = 100
"""Measured steps that are averaged over: gradients change while training goes on."""
LEAST = 5
"""Measured steps before anything is said."""


class Estimate:
    """Averages measurements; pure arithmetic on the host."""

    def __init__(self, window: int = WINDOW) -> None:
        self.pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, small: float, large: float, inverse_small: float, batch: float) -> None:
        """small, large: mean |g_small|² and |g_B|². inverse_small: mean of 1 / b_small."""
        covariance = (small - large) / (inverse_small - 1 / batch)
        if math.isfinite(covariance):
            self.pairs.append((covariance, large - covariance / batch))

    def value(self) -> tuple[float, float, float] | None:
        """The noise scale in samples and its 95 % interval, by the jackknife over measured steps; None where too little
        is known, or where the true gradient is lost in the noise."""
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
    """Measures every k-th step in place of `Parallel.forward_backward`.

    batch: the global batch size in samples.
    """

    def __init__(self, parallel: Parallel, every: int, batch: int) -> None:
        self.parallel, self.every, self.batch = parallel, every, batch
        dims = parallel.layout.dims
        sharded = any(isinstance(parameter, DTensor) for parameter in parallel.parameters())
        self.by_rank = dims.dp > 1 and not sharded and dims.tp == 1
        self.estimate = Estimate()
        self.waiting: list[torch.Tensor] = []  # measurements that are still on the device

    @classmethod
    def of(cls, parallel: Parallel, every: int | None, batch: int) -> NoiseScale | None:
        """None where nothing is to be measured, or this layout's gradients cannot be seen one by one."""
        if not every or batch < 2 or not measurable(parallel):
            return None
        return cls(parallel, every, batch)

    def due(self, step: int) -> bool:
        """Not the first step: DDP learns the graph in it."""
        return step > 1 and step % self.every == 0

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | torch.Tensor],
        loss: Loss,
        scale: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        """As `Parallel.forward_backward`: the same gradients are left behind."""
        if self.by_rank:
            return self._by_rank(batches, weights, loss, scale)
        return self._by_micro_batch(*_at_least_two(batches, weights), loss, scale)

    def values(self) -> dict[str, float]:
        """What to log: {} until enough is known. Waits for the device, so it is asked where the loop does so anyway."""
        if self.waiting:
            for small, large, inverse in torch.stack(self.waiting).tolist():
                self.estimate.add(small, large, inverse, self.batch)
            self.waiting = []
            if found := self.estimate.value():
                names = ("train/noise_scale", "train/noise_scale_low", "train/noise_scale_high")
                return dict(zip(names, found))
        return {}

    # --- measured steps -------------------------------------------------------------------------------------------

    def _backward(self, batch: Any, weight: Any, loss: Loss, scale: Any, last: bool) -> torch.Tensor:
        parallel = self.parallel
        with parallel.micro_step(last=last):
            with parallel.autocast():
                value = loss(parallel.module, batch)
            (value * (weight * parallel.layout.dims.dp * scale)).backward()
        whole = getattr(value, "full_tensor", None)
        return (whole() if whole else value).detach() * weight

    def _by_rank(self, batches: Sequence[Any], weights: Sequence[Any], loss: Loss, scale: Any) -> torch.Tensor:
        """Every worker's own gradient, then their mean: the all-reduce that DDP would have done."""
        parallel, group = self.parallel, self.parallel.group
        total = sum(self._backward(b, w, loss, scale, last=False) for b, w in zip(batches, weights))
        assert isinstance(total, torch.Tensor)
        share, ways = _tensor(sum(weights), total), parallel.layout.dims.dp
        own = (parallel.grad_norm_(None) / (share * ways * scale)).double().square()
        gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= ways
        torch._foreach_copy_(gradients, _unflatten(flat, gradients))
        means = torch.stack([own, 1 / (share.double() * self.batch)])
        dist.all_reduce(means, group=group)
        self._measured(means[0] / ways, means[1] / ways, scale)
        return total

    def _by_micro_batch(self, batches: Sequence[Any], weights: Sequence[Any], loss: Loss, scale: Any) -> torch.Tensor:
        """Each micro-batch's gradient by itself, over all workers; their sum is the step's."""
        parallel, total = self.parallel, None
        norms, inverses, kept = [], [], list[torch.Tensor | None]()
        parameters = list(parallel.parameters())
        for batch, weight in zip(batches, weights):
            found = self._backward(batch, weight, loss, scale, last=True)
            total = found if total is None else total + found
            share = parallel.total(_tensor(weight, found).clone())  # of this micro-batch on all workers together
            norms.append((parallel.grad_norm_(None) / (share * scale)).double().square())
            inverses.append(1 / (share.double() * self.batch))
            gradients = [parameter.grad for parameter in parameters]
            if kept:
                pairs = [(a, b) for a, b in zip(kept, gradients) if a is not None and b is not None]
                torch._foreach_add_([_local(a) for a, _ in pairs], [_local(b) for _, b in pairs])
            else:
                kept = gradients
            for parameter in parameters:
                parameter.grad = None
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient
        assert total is not None
        self._measured(torch.stack(norms).mean(), torch.stack(inverses).mean(), scale)
        return total

    def _measured(self, small: torch.Tensor, inverse: torch.Tensor, scale: Any) -> None:
        large = (self.parallel.grad_norm_(None) / scale).double().square()
        self.waiting.append(torch.stack([small, large, inverse.to(large.device)]))


def measurable(parallel: Parallel) -> bool:
    """Pipelines and DeepSpeed run the backward pass themselves."""
    dims = parallel.layout.dims
    return dims.pp == 1 and type(parallel).forward_backward is Parallel.forward_backward


def _at_least_two(batches: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """A step's only micro-batch cut in two, its weight with it."""
    if len(batches) > 1 or rows(batches[0]) < 2:
        return list(batches), list(weights)
    from torch.utils._pytree import tree_map

    whole = rows(batches[0])
    cut = whole // 2

    def part(begin: int, end: int) -> Any:
        return tree_map(lambda x: x[begin:end] if isinstance(x, torch.Tensor) and x.dim() else x, batches[0])

    return [part(0, cut), part(cut, whole)], [weights[0] * (cut / whole), weights[0] * (1 - cut / whole)]


def _tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=like.device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like)]
