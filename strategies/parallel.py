"""What `parallelize` returns: the one face that all layouts show to the training loop."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from strategies import state
from strategies.clip import GradNorm
from strategies.context.apply import Context
from strategies.dims import Layout
from strategies.expert.router import RouterLoad
from strategies.mixtures import find_mixtures
from strategies.strategy import MicroStep, no_communication
from strategies.zero_weight import backward_of_zeros, has_no_weight, recorded_outputs

T = TypeVar("T")
Loss = Callable[[nn.Module, Any], torch.Tensor]


class WholeStep(nn.Module):
    """A function of a model and a batch (the loss, say) as one module's forward.

    What a wrapper does around a forward then holds for whatever of the model the function calls: the model, once or
    several times, other methods, parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        return function(self.module, batch)


class Parallel:
    """A model under a layout.

    module: what to call; whole: with a function and a batch, as a WholeStep. inner: the model without a wrapper, whose
    names are plain. notes: remarks for the user, one sentence each. micro_step and autocast are plain functions, so
    that one device pays nothing for them.
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
        whole: bool = False,
        context: Context | None = None,
    ) -> None:
        self.module, self.whole = module, whole
        self.inner = inner if inner is not None else module
        self.layout, self.device, self.notes = layout, device, notes
        self.group, self.context = group, context
        self._micro_step, self._autocast = micro_step, autocast
        self._named = list(self.inner.named_parameters())
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._named}
        self._grad_norm = GradNorm([parameter for _, parameter in self._named if parameter.requires_grad], device)
        mixtures = find_mixtures(self.inner)
        self._routers = RouterLoad(mixtures, group) if mixtures else None

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """To be called once with the optimizer made over `parameters`; what to use as the optimizer from then on."""
        if self._routers is not None:
            update = self._routers.update
            optimizer.register_step_post_hook(lambda *_: update())
        return optimizer

    def router_metrics(self) -> dict[str, list[float]]:
        """Of the last step, by mixture of experts that this rank holds: see RouterLoad.metrics."""
        return self._routers.metrics() if self._routers is not None else {}

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | torch.Tensor],
        loss: Loss,
        scale: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches of one step; gradients are communicated once.

        weights: each micro-batch's part of the global batch, summing to 1 over micro-batches and data-parallel
        workers; 0.0 (not a tensor) for one that is left out, whose loss may be nan. loss: (module, micro-batch) → 0-d
        mean. The gradients left behind are those of scale · Σ weight · loss over all workers.
        Returns this worker's Σ weight · loss, detached, 0-d, unscaled; 0 where not `has_loss`. With cp a micro-batch is
        of whole sequences, and the mean over the workers that share them is theirs.
        """
        total: torch.Tensor | None = None
        if self.context is not None:
            (batches, weights), loss = self.context.split(batches, weights), self.context.loss_of_part(loss)
        ways, last, plain = self.layout.dims.dp, len(batches) - 1, isinstance(scale, float) and scale == 1.0
        for i, (batch, weight) in enumerate(zip(batches, weights)):
            if has_no_weight(weight):
                found = self._leave_out(batch, loss, last=i == last)
                total = found if total is None else total + found
                continue
            with self.micro_step(last=i == last):
                with self.autocast():
                    value = self.call(loss, batch)
                factor = weight * ways  # data-parallel averaging divides by `ways`
                part = value if isinstance(factor, float) and factor == 1.0 else value * factor
                (part if plain else part * scale).backward()
            found = value.detach() * weight
            total = found if total is None else total + found
        assert total is not None, "a step has at least one micro-batch"
        return total

    def _leave_out(self, batch: Any, loss: Loss, *, last: bool) -> torch.Tensor:
        """Forward and backward of a micro-batch of weight 0, in which other workers may take part; returns 0."""
        with self.micro_step(last):
            with self.autocast(), recorded_outputs(self.inner) as outputs:
                value = self.call(loss, batch)
            backward_of_zeros(value, outputs)
        return torch.zeros_like(value.detach())

    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        """Evaluation: `function(module, batch)` under torch.no_grad; None where not `has_loss`."""
        if self.context is not None:
            function = self.context.averaged(function)
        with torch.no_grad(), self.micro_step(last=True), self.autocast():
            return self.call(function, batch)

    def call(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T:
        """`function(model, batch)` with what is around the model; inside micro_step and autocast."""
        return self.module(function, batch) if self.whole else function(self.module, batch)

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
        """The sum over the data-parallel workers. Of workers that share a sequence, their mean."""
        if self.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value if self.layout.dims.cp == 1 else value / self.layout.dims.cp


def seed_generators(value: int, device: torch.device) -> None:
    """torch.manual_seed for the host and one device. (For all devices it takes a millisecond where there is none.)"""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
