"""What `parallelize` returns: the one interface of all layouts to the training loop."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from strategies import state
from strategies.activation_offloading import Moved
from strategies.clip import GradNorm
from strategies.context.apply import Context
from strategies.dims import Layout, LayoutError
from strategies.expert.router import RouterLoad
from strategies.mixtures import find_mixtures
from strategies.strategy import MicroStep, no_communication
from strategies.zero_weight import backward_of_zeros, has_no_weight, recorded_outputs

T = TypeVar("T")
Loss = Callable[[nn.Module, Any], torch.Tensor]


class LossError(LayoutError):
    """What a loss function returns cannot be trained on.

    Args:
        message: One sentence.
        suspicious: A regular expression of what is to blame in the function's `return`.
    """

    def __init__(self, message: str, suspicious: str = "") -> None:
        super().__init__(message)
        self.suspicious = suspicious


def require_loss(value: object) -> None:
    """Checks that backward can begin at what a loss function has returned.

    Raises:
        LossError: It cannot; one sentence.
    """
    must_be = "but it must be a tensor of one number"
    if isinstance(value, (int, float)):
        raise LossError(
            f"the loss is a {type(value).__name__}, {must_be}: "
            "return the tensor itself, without .item() or float()",
            suspicious=r"\.item\(|\.tolist\(|\bfloat\(",
        )
    if not isinstance(value, torch.Tensor):
        raise LossError(
            f"the loss is a {type(value).__name__}, {must_be}: return the loss alone",
            suspicious=r"return [({]|\.numpy\(|\bdict\(",
        )
    if value.numel() != 1:
        raise LossError(
            f"the loss has shape {tuple(value.shape)}, {must_be}: return, for instance, its mean",
            suspicious="reduction|none",
        )
    if not value.requires_grad:
        raise LossError(
            "the loss has no gradient: it depends on no weight that is trained, or is computed "
            "under .detach(), torch.tensor(…) or torch.no_grad(), which must be left out",
            suspicious=r"\.detach\(|\.data\b|\btensor\(",
        )


class WholeStep(nn.Module):
    """A function of a model and a batch (the loss, say) as the forward of one module.

    What a wrapper does around a forward then covers everything of the model that the function
    calls: the model once or several times, other methods, parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        return function(self.module, batch)


class Parallel:
    """A model under a layout.

    Args:
        module: What the step calls.
        layout: The layout that was applied.
        device: This worker's device.
        inner: The model inside of any wrapper, whose names are plain.
        group: The data-parallel workers; None if this worker is the only one.
        micro_step: The context for forward and backward of a micro-batch. Like `autocast` it is a
            plain function, so that one device pays nothing for it.
        autocast: The context for forward.
        notes: Remarks for the user, one sentence each.
        is_whole_step: Whether `module` is called with a function and a batch, as a WholeStep is.
        context: The context parallelism of the layout, if any.
    """

    has_loss: bool = True
    """Whether this rank has the loss; in a pipeline only the stage with the last block does."""
    moved: Moved | None = None
    """What activation offloading has moved to the host on this rank; None without it."""

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
        is_whole_step: bool = False,
        context: Context | None = None,
    ) -> None:
        self.module = module
        self.layout = layout
        self.device = device
        self.inner = inner if inner is not None else module
        self.group = group
        self.notes = notes
        self.is_whole_step = is_whole_step
        self.context = context
        self._micro_step = micro_step
        self._autocast = autocast
        self._named = list(self.inner.named_parameters())
        self._names: dict[torch.Tensor, str] = {p: name for name, p in self._named}
        trained = [p for _, p in self._named if p.requires_grad]
        self._grad_norm = GradNorm(trained, device)
        mixtures = find_mixtures(self.inner)
        self._routers = RouterLoad(mixtures, group) if mixtures else None

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Prepares the optimizer that was made over `parameters`; to be called once.

        Returns:
            What to use as the optimizer from then on.
        """
        if self._routers is not None:
            update = self._routers.update
            optimizer.register_step_post_hook(lambda *_: update())
        return optimizer

    def router_metrics(self) -> dict[str, list[float]]:
        """The load of the last step on each mixture that this rank holds (RouterLoad.metrics)."""
        return self._routers.metrics() if self._routers is not None else {}

    # --- a step -----------------------------------------------------------------------------------

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | torch.Tensor],
        loss: Loss,
        scale: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches of one step.

        Gradients are communicated once. Those that are left in the parameters are the gradients of
        scale · Σ weight · loss, summed over all workers.

        Args:
            batches: This worker's micro-batches. With cp each consists of whole sequences.
            weights: Each micro-batch's part of the global batch; they sum to 1 over micro-batches
                and data-parallel workers. 0.0 (not a tensor) leaves a micro-batch out, whose loss
                may then be nan.
            loss: (module, micro-batch) → the mean loss, 0-dimensional.
            scale: Factor of the gradients, for 16-bit training with loss scaling.

        Returns:
            This worker's Σ weight · loss, detached, 0-dimensional, unscaled; 0 where not
            `has_loss`. With cp it is the mean over the workers that share the sequences.
        """
        if self.context is not None:
            batches, weights = self.context.split(batches, weights)
            loss = self.context.loss_of_part(loss)
        workers = self.layout.dims.dp
        is_unscaled = isinstance(scale, float) and scale == 1.0
        total: torch.Tensor | None = None
        for number, (batch, weight) in enumerate(zip(batches, weights)):
            is_last = number == len(batches) - 1
            if has_no_weight(weight):
                part = self._forward_backward_without_weight(batch, loss, is_last=is_last)
            else:
                with self.micro_step(last=is_last):
                    with self.autocast():
                        value = self.call(loss, batch)
                    require_loss(value)
                    # The average over data-parallel workers divides by their number.
                    factor = weight * workers
                    is_factor_one = isinstance(factor, float) and factor == 1.0
                    weighted = value if is_factor_one else value * factor
                    scaled = weighted if is_unscaled else weighted * scale
                    scaled.backward()
                part = value.detach() * weight
            total = part if total is None else total + part
        assert total is not None, "a step has at least one micro-batch"
        return total

    def _forward_backward_without_weight(
        self, batch: Any, loss: Loss, *, is_last: bool
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch of weight 0, in which other workers may take part.

        Returns:
            0, whatever the loss is.
        """
        with self.micro_step(is_last):
            with self.autocast(), recorded_outputs(self.inner) as outputs:
                value = self.call(loss, batch)
            backward_of_zeros(value, outputs)
        return torch.zeros_like(value.detach())

    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        """Evaluates `function(module, batch)` without gradients; None where not `has_loss`."""
        if self.context is not None:
            function = self.context.averaged(function)
        with torch.no_grad(), self.micro_step(last=True), self.autocast():
            return self.call(function, batch)

    def call(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T:
        """Calls `function(model, batch)` through any wrapper; inside micro_step and autocast."""
        return self.module(function, batch) if self.is_whole_step else function(self.module, batch)

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of one micro-batch.

        Args:
            last: Whether it is the step's last one, in which gradients are communicated.
        """
        return self._micro_step(last)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward, inside micro_step."""
        return self._autocast()

    def grad_norm_(self, clip: float | None) -> torch.Tensor:
        """Measures the gradient, and scales it down to the norm `clip` if it is longer.

        Returns:
            Its total 2-norm over all shards before clipping, 0-dimensional, on the device, the same
            on every rank; inf or nan if any gradient anywhere is.
        """
        return self._grad_norm(clip)

    # --- parameters and state ---------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer is made over: this rank's part of each parameter, once."""
        return iter([parameter for _, parameter in self._named])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with plain names."""
        return iter(self._named)

    def model_state(self) -> dict[str, Any]:
        """Parameters and saved buffers by plain name.

        Sharded ones are DTensors, which DCP reads and writes in place.
        """
        return dict(self.inner.state_dict())

    def load_model_state(self, values: dict[str, Any]) -> None:
        """Copies in what `model_state` or `full_model_state` of any layout has returned.

        Raises:
            LayoutError: It is the state of another model.
        """
        state.load_model_state(self.inner, values)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by plain parameter name; initialised if it has not stepped."""
        return state.optimizer_state(optimizer, self._names)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, values: dict[str, Any]
    ) -> None:
        """Copies in what `optimizer_state` of any layout has returned.

        Raises:
            LayoutError: It is the state of another model or optimizer.
        """
        state.load_optimizer_state(optimizer, values, self._names)

    def full_model_state(self) -> dict[str, torch.Tensor]:
        """All parameters and saved buffers, whole and on the CPU, on rank 0; empty on other ranks.

        Collective. Only one tensor at a time is whole on a device.
        """
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        full_state: dict[str, torch.Tensor] = {}
        for name, tensor in self.model_state().items():
            if not isinstance(tensor, torch.Tensor):
                continue
            value = state.whole_tensor(tensor.detach(), self.device)
            if is_first:
                full_state[name] = state.host_copy(value)
        return full_state

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the data-parallel workers; of workers that share a sequence, their mean."""
        if self.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value if self.layout.dims.cp == 1 else value / self.layout.dims.cp
