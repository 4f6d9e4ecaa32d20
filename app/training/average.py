"""An exponential moving average of the weights, kept beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from strategies.grad_sync import local
from strategies.parallelize import Parallel


class Average:
    """An exponential moving average of the weights; each rank has the average of its own part.

    At step t the decay is min(decay, (1 + t) / (10 + t)), so that the first steps, whose weights
    are far from trained, are soon forgotten.

    Args:
        parallel: The model under its layout.
        decay: The share of the average that a step keeps, 0 to 1.
    """

    def __init__(self, parallel: Parallel, decay: float) -> None:
        self.parallel = parallel
        self.decay = decay
        trained = [(name, p) for name, p in parallel.named_parameters() if p.requires_grad]
        self.values = {name: parameter.detach().clone() for name, parameter in trained}
        """The averages by the names of their parameters."""
        self._averages = [local(self.values[name]) for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after a step into the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [local(parameter.detach()) for parameter in self._parameters]
        get_ema_multi_avg_fn(decay)(self._averages, weights, step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the average in place of its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            weight = local(parameter.detach())
            weight_before = weight.clone()
            weight.copy_(average)
            average.copy_(weight_before)
        drop_gathered(self.parallel)


def drop_gathered(parallel: Parallel) -> None:
    """Make FSDP gather weights anew, because what it has gathered ahead is out of date."""
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
