"""An exponential moving average of the weights, beside those that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from strategies.grad_sync import local
from strategies.parallelize import Parallel


class Average:
    """An exponential moving average of the weights, each worker's of its own part; in the first steps of fewer:
    decay min(d, (1 + t) / (10 + t))."""

    def __init__(self, parallel: Parallel, decay: float) -> None:
        self.parallel, self.decay = parallel, decay
        self.values = {n: p.detach().clone() for n, p in parallel.named_parameters() if p.requires_grad}
        self._pairs = [(local(self.values[n]), p) for n, p in parallel.named_parameters() if n in self.values]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = [a for a, _ in self._pairs], [local(p.detach()) for _, p in self._pairs]
        get_ema_multi_avg_fn(decay)(averages, weights, step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts the model has the average for weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in self._pairs:
            weight = local(parameter.detach())
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        for module in self.parallel.module.modules():
            if isinstance(module, FSDPModule):  # what was gathered, or is on its way, is the other's
                module.unshard()
                module.reshard()
