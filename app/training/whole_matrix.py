"""Optimizers that need whole matrices, under layouts that split them.

Most optimizers update each number by itself, so a shard is updated like the whole. These do not:

    Muon        turns a matrix's momentum into the nearest orthogonal matrix (Jordan et al. 2024,
                https://kellerjordan.github.io/posts/muon/)
    Adafactor   keeps means over rows and columns in place of second moments, and limits the
                update of a whole tensor (Shazeer and Stern 2018, 1804.04235)

torch has both. Here matrices that are split over workers (zero*, fsdp, hsdp, tensor) are gathered,
one at a time. Every worker computes the update of the whole matrix and keeps its part, so the
results are those of one device. Muon keeps its momentum split and gathers once per matrix and step;
Adafactor gathers the matrix and its gradient, and every worker keeps all the means.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.grad_sync import local
from strategies.state import copy_whole_or_shard, shard_of, whole_tensor

_MUON = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_RPROP = ("lr", "etas", "step_sizes", "maximize")
_ADAFACTOR = ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")


class ByParameter(torch.optim.Optimizer):
    """An optimizer that updates one parameter after another."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter.

        Args:
            parameter: The parameter.
            gradient: Its gradient.
            group: The group that it is in, with its arguments.
        """


class Muon(ByParameter, torch.optim.Muon):
    """torch's Muon, over matrices that may be split; a step is collective where they are."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            momentum = gradient.lerp(momentum, group["momentum"])
        change = _orthogonal_change(_whole(momentum), group)
        own_part = parameter
        if isinstance(parameter, DTensor):
            own_part = parameter.to_local()
            change = shard_of(change, parameter)
        own_part.mul_(1 - group["lr"] * group["weight_decay"])
        own_part.add_(change.to(own_part.device))


def _orthogonal_change(momentum: Tensor, group: dict[str, Any]) -> Tensor:
    """What torch's Muon adds to a whole matrix with this momentum, without weight decay."""
    change = nn.Parameter(torch.zeros_like(momentum))
    change.grad = momentum
    arguments = {name: group[name] for name in _MUON}
    torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **arguments).step()
    return change.detach()


class Adafactor(ByParameter, torch.optim.Adafactor):
    """torch's Adafactor, over tensors that may be split; a step is collective where they are."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        matrix = parameter
        if isinstance(parameter, DTensor):
            matrix = nn.Parameter(_whole(parameter.detach()))
            matrix.grad = _whole(gradient)
        arguments = {name: group[name] for name in _ADAFACTOR}
        optimizer = torch.optim.Adafactor([matrix], foreach=False, **arguments)
        optimizer.state[matrix] = self.state[parameter]  # the same dictionary
        optimizer.step()
        if matrix is not parameter:
            copy_whole_or_shard(parameter, matrix.detach())


class Rprop(ByParameter, torch.optim.Rprop):
    """torch's Rprop, on each worker's own parts, because its indexing does not work on DTensors."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["prev"] = torch.zeros_like(gradient)
            state["step_size"] = torch.full_like(gradient, group["lr"])
        own_part = nn.Parameter(local(parameter.detach()))
        own_part.grad = local(gradient)
        arguments = {name: group[name] for name in _RPROP}
        optimizer = torch.optim.Rprop([own_part], foreach=False, **arguments)
        optimizer.state[own_part] = {name: local(value) for name, value in state.items()}
        optimizer.step()


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on the device of the workers' mesh; collective if it is split."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = torch.device(tensor.device_mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return whole_tensor(tensor, device)
