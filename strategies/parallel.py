"""What `parallelize` returns: the one face that all layouts show to the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from strategies import state
from strategies.clip import GradNorm
from strategies.dims import Layout
from strategies.strategy import MicroStep, no_communication

T = TypeVar("T")
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Parallel:
    """A model under a layout.

    module: what to call. inner: the same without a wrapper, whose names are plain. notes: remarks for the user,
    one sentence each. micro_step and autocast are plain functions, so that one device pays nothing for them.
    """

    has_loss: bool = True
    """Whether this rank computes the loss: in a pipeline only the ranks of the stage with the last block do."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        inner: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        micro_step: MicroStep = no_communication,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.module = module
        self.inner = inner if inner is not None else module
        self.layout, self.device, self.notes = layout, device, notes
        self.group = group
        self._micro_step, self._autocast = micro_step, autocast
        self._named = list(self.inner.named_parameters())
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._named}
        self._grad_norm = GradNorm([parameter for _, parameter in self._named if parameter.requires_grad], device)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """To be called once with the optimizer made over `parameters`; what to use as the optimizer from then on."""
        return optimizer

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | torch.Tensor],
        loss: Loss,
        scale: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches of one step; gradients are communicated once.

        weights: each micro-batch's part of the global batch, summing to 1 over micro-batches and data-parallel
        workers. loss: (module, micro-batch) → 0-d mean; it calls the module once. The gradients left behind are those
        of scale · Σ weight · loss over all workers.
        Returns this worker's Σ weight · loss, detached, 0-d, unscaled; 0 where not `has_loss`.
        """
        total: torch.Tensor | None = None
        ways, last, plain = self.layout.dims.dp, len(batches) - 1, isinstance(scale, float) and scale == 1.0
        for i, (batch, weight) in enumerate(zip(batches, weights)):
            with self.micro_step(last=i == last):
                with self.autocast():
                    value = loss(self.module, batch)
                factor = weight * ways  # data-parallel averaging divides by `ways`
                part = value if isinstance(factor, float) and factor == 1.0 else value * factor
                (part if plain else part * scale).backward()
            found = value.detach() * weight
            total = found if total is None else total + found
        assert total is not None, "a step has at least one micro-batch"
        return total

    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        """Evaluation: `function(module, batch)`, which calls the module once, under torch.no_grad; None where not
        `has_loss`."""
        with torch.no_grad(), self.micro_step(last=True), self.autocast():
            return function(self.module, batch)

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Put around forward and backward of one micro-batch; gradients are communicated in the last one."""
        return self._micro_step(last)

    def autocast(self) -> AbstractContextManager[Any]:
        """Put around forward, inside micro_step."""
        return self._autocast()

    def grad_norm_(self, clip: float | None) -> torch.Tensor:
        """The gradient's total 2-norm over all shards, 0-dimensional, on the device, the same on every rank; a longer
        gradient is scaled down to `clip`. inf or nan if any gradient anywhere is."""
        return self._grad_norm(clip)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer is made over: each parameter once, this rank's part."""
        return iter([parameter for _, parameter in self._named])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)

    def model_state(self) -> dict[str, Any]:
        """Parameters and saved buffers by plain name; DTensors where sharded, which DCP reads and writes in place."""
        return dict(self.inner.state_dict())

    def load_model_state(self, values: dict[str, Any]) -> None:
        """Copies in what `model_state` or `full_model_state` of any layout gave.

        Raises:
            LayoutError: state of another model.
        """
        state.load_model_state(self.inner, values)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by plain parameter name; made first where it has not stepped yet."""
        return state.optimizer_state(optimizer, self._names)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Copies in what `optimizer_state` of any layout gave.

        Raises:
            LayoutError: state of another model or optimizer.
        """
        state.load_optimizer_state(optimizer, values, self._names)

    def full_model_state(self) -> dict[str, torch.Tensor]:
        """Everything whole and on the CPU, on rank 0; empty on others. Collective; one tensor at a time is whole."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.model_state().items():
            if not isinstance(tensor, torch.Tensor):
                continue
            value = state.whole_tensor(tensor.detach(), self.device)
            if first:
                whole[name] = value.cpu().clone(memory_format=torch.contiguous_format)
        return whole

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the data-parallel workers."""
        if self.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value


def seed_generators(value: int, device: torch.device) -> None:
    """torch.manual_seed for the host and one device. (For all devices it takes a millisecond where there is none.)"""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
