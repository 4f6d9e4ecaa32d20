"""The gradient noise scale, measured while training.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1: the mean
gradient g_b of a batch of b samples has

    E|g_b|² = |G|² + tr(Σ) / b

where G is the true gradient and Σ the covariance of the gradient of one sample. From gradients of
small batches and of the whole batch B in the same step follow the unbiased estimates

    tr(Σ) ≈ (mean |g_small|² − |g_B|²) / (mean 1/b_small − 1/B)
    |G|²  ≈ |g_B|² − tr(Σ) / B

Their ratio, the noise scale tr(Σ) / |G|², would be biased in a single step. So both are averaged
over the last measured steps before they are divided. As long as the batch is smaller than about the
noise scale, doubling it nearly halves the number of steps.

The small batches are the micro-batches of the step, each over all workers. If there is only one,
it is cut in two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.data.loader import Batch, map_tensors, number_on, rows
from strategies.parallel import Loss, require_loss
from strategies.parallelize import Parallel
from strategies.zero_weight import backward_of_zeros, has_no_weight, recorded_outputs

WINDOW = 100  # measured steps in the average: gradients change while training continues
FEWEST = 5  # measured steps before a value is reported


class Interval(NamedTuple):
    """A noise scale in samples with its 95 % confidence interval.

    Attributes:
        value: The noise scale; infinite if the gradient could not be told from its noise.
        low: The lower end.
        high: The upper end; infinite if the batch is too small to bound it.
    """

    value: float
    low: float
    high: float


class Estimate:
    """Averages measurements.

    Args:
        window: Measured steps in the average.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=window)
        """(tr(Σ), |G|²) of each measured step."""

    def add(self, *, small: float, large: float, inverse_small: float, batch_size: float) -> None:
        """Add a measured step.

        Args:
            small: The mean of |g_small|².
            large: |g_B|².
            inverse_small: The mean of 1 / b_small.
            batch_size: B, in samples.
        """
        # If one micro-batch had all items, there was no smaller batch.
        if inverse_small <= 1 / batch_size:
            return
        covariance = (small - large) / (inverse_small - 1 / batch_size)
        if math.isfinite(covariance):
            self._measured.append((covariance, large - covariance / batch_size))

    def value(self) -> Interval | None:
        """The noise scale; None if it is not known.

        The interval is Fieller's for a ratio of two means (J. R. Stat. Soc. B 16, 1954): all ratios
        r for which mean(tr(Σ)) − r · mean(|G|²) is zero within its error. Far above the batch size
        |G|² is small beside its error, and the interval has no upper end.
        """
        count = len(self._measured)
        if count < FEWEST:
            return None
        covariance = sum(each for each, _ in self._measured) / count
        gradient = sum(each for _, each in self._measured) / count
        if covariance <= 0:
            return None
        # The variances of both means, and their covariance.
        errors = [0.0, 0.0, 0.0]
        for each_covariance, each_gradient in self._measured:
            off = each_covariance - covariance
            gradient_off = each_gradient - gradient
            errors[0] += off * off
            errors[1] += off * gradient_off
            errors[2] += gradient_off * gradient_off
        square = _student(count - 1) ** 2 / (count * (count - 1))
        # The interval is where leading · r² − 2 · linear · r + constant is at most 0.
        leading = gradient * gradient - square * errors[2]
        linear = covariance * gradient - square * errors[1]
        constant = covariance * covariance - square * errors[0]
        root = math.sqrt(max(0.0, linear * linear - leading * constant))
        if leading > 0:
            if gradient <= 0:
                return None  # no ratio above 0 agrees with what was measured
            low, high = (linear - root) / leading, (linear + root) / leading
        else:
            # Of the two half-lines, the one of negative ratios cannot be.
            low, high = _positive_end(leading, linear, constant, root), math.inf
        value = covariance / gradient if gradient > 0 else math.inf
        return Interval(value, max(0.0, low), high)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, within 1 % from 4 degrees of freedom on.

    Abramowitz and Stegun 26.7.5, since SciPy takes a second to import.
    """
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _positive_end(leading: float, linear: float, constant: float, root: float) -> float:
    """The lower end of Fieller's interval if it has no upper one.

    Args:
        leading: The coefficient of r², at most 0.
        linear: That of −2 r.
        constant: The constant.
        root: The root of the discriminant; 0 if there is none, and every ratio is possible.
    """
    if not root:
        return 0.0
    # The roots are (linear ± root) / leading; this form also holds for a leading coefficient of 0.
    denominator = linear + root
    return max(0.0, constant / denominator) if denominator > 0 else 0.0


class NoiseScale:
    """Measures the noise scale in every k-th step, in place of `Parallel.forward_backward`.

    Args:
        parallel: The model under its layout.
        every: k.
        batch_size: The global batch size in samples; whoever changes it does so before a step.
    """

    def __init__(self, parallel: Parallel, every: int, batch_size: int) -> None:
        self.parallel = parallel
        self.every = every
        self.batch_size = batch_size
        self.estimate = Estimate()
        self.count_items: Callable[[Batch], float] | None = None
        """What a batch's loss is the mean of; None means its rows."""
        self._on_device: list[Tensor] = []
        """(mean |g_small|², |g_B|², mean 1 / b_small, B) of steps that have not been copied yet."""

    @classmethod
    def of(cls, parallel: Parallel, every: int | None, batch_size: int) -> NoiseScale | None:
        """The noise scale of a training.

        Args:
            parallel: The model under its layout.
            every: Steps from one measurement to the next; None means that none is wanted.
            batch_size: The smallest global batch size in samples.

        Returns:
            None if it is not wanted, if a worker has one sample per step, or if the layout has a
            backward pass of its own.
        """
        dims = parallel.layout.dims
        if not every or batch_size < 2 * dims.dp:
            return None
        has_own_backward = type(parallel).forward_backward is not Parallel.forward_backward
        if dims.pp * dims.cp > 1 or has_own_backward:
            return None
        return cls(parallel, every, batch_size)

    def is_due(self, step: int) -> bool:
        """Whether a step is measured; never the first, in which DDP learns the graph."""
        return step > 1 and step % self.every == 0

    def forward_backward(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Does what `Parallel.forward_backward` does, and measures.

        The gradients that are left differ only by rounding.
        """
        parallel = self.parallel
        parameters = list(parallel.parameters())
        total_loss = torch.zeros((), device=parallel.device)
        small_norms: list[Tensor] = []
        inverse_sizes: list[Tensor] = []
        sums: list[Tensor | None] = []
        for batch, weight in self._at_least_two(batches, weights):
            value = self._micro_batch(batch, weight, loss=loss, scale=scale)
            total_loss = total_loss.to(value.device) + value
            share = parallel.total(number_on(value.device, weight).float())
            norm = parallel.grad_norm_(None) / (share * scale)
            small_norms.append(norm.double().square())
            inverse_sizes.append(1 / (share.double() * self.batch_size))
            _move_gradients(parameters, sums)
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        large = (parallel.grad_norm_(None) / scale).double().square()
        # A micro-batch without items on any worker is no batch: its values are infinite or nan.
        inverse_small = torch.stack(inverse_sizes).to(large.device)
        is_batch = torch.isfinite(inverse_small)
        count = is_batch.sum().clamp(min=1)
        mean_small = torch.where(is_batch, torch.stack(small_norms), 0.0).sum() / count
        mean_inverse = torch.where(is_batch, inverse_small, 0.0).sum() / count
        batch_size = number_on(large.device, self.batch_size)
        self._on_device.append(torch.stack([mean_small, large, mean_inverse, batch_size]))
        return total_loss

    def _micro_batch(
        self,
        batch: Batch,
        weight: float | Tensor,
        loss: Loss,
        scale: float | Tensor,
    ) -> Tensor:
        """Forward and backward of one micro-batch; its weighted loss, detached."""
        parallel = self.parallel
        is_left_out = has_no_weight(weight)
        with parallel.micro_step(last=True):  # so that workers add up each micro-batch's gradient
            with parallel.autocast(), recorded_outputs(parallel.inner, is_left_out) as outputs:
                value = parallel.call(loss, batch)
            if is_left_out:
                backward_of_zeros(value, outputs)
            else:
                require_loss(value)
                (value * (weight * parallel.layout.dims.dp * scale)).backward()
        full_value = value.full_tensor() if isinstance(value, DTensor) else value
        if is_left_out:  # its loss may be nan
            return torch.zeros_like(full_value.detach())
        return full_value.detach() * weight

    def _at_least_two(
        self, batches: Sequence[Batch], weights: Sequence[float | Tensor]
    ) -> list[tuple[Batch, float | Tensor]]:
        """The micro-batches with their weights; a single one is cut in two."""
        if len(batches) > 1:
            return list(zip(batches, weights, strict=True))
        middle = rows(batches[0]) // 2
        halves = [
            map_tensors(lambda x: x[:middle] if x.dim() else x, batches[0]),
            map_tensors(lambda x: x[middle:] if x.dim() else x, batches[0]),
        ]
        # Counting the items of a batch on a GPU makes the host wait: in measured steps only.
        count_items = self.count_items or _count_rows
        counts = [count_items(half) for half in halves]
        parts: list[tuple[Batch, float | Tensor]] = []
        for half, count in zip(halves, counts, strict=True):
            parts.append((half, weights[0] * (count / sum(counts)) if count else 0.0))
        return parts

    def values(self) -> dict[str, float]:
        """The metrics; {} until enough steps are measured. Waits for the device."""
        if not self._on_device:
            return {}
        for small, large, inverse_small, batch_size in torch.stack(self._on_device).tolist():
            self.estimate.add(
                small=small,
                large=large,
                inverse_small=inverse_small,
                batch_size=batch_size,
            )
        self._on_device = []
        estimate = self.estimate.value()
        if estimate is None:
            return {}
        values = {
            "train/noise_scale": estimate.value,
            "train/noise_scale_low": estimate.low,
            "train/noise_scale_high": estimate.high,
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}


def _count_rows(batch: Batch) -> float:
    return float(rows(batch))


def _move_gradients(parameters: list[nn.Parameter], sums: list[Tensor | None]) -> None:
    """Add the parameters' gradients to sums, which an empty list begins, and clear them.

    The sums have memory of their own, since DDP uses that of its gradients again.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    if not sums:
        for gradient in gradients:
            sums.append(None if gradient is None else torch.zeros_like(gradient))
    for gradient_sum, gradient in zip(sums, gradients, strict=True):
        if gradient_sum is not None and gradient is not None:
            gradient_sum.add_(gradient)
