"""A copy of the state of a training on the host, which can take the place of the state itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from app.training.average import Average, drop_gathered
from app.training.optimizer import LossScale
from strategies.grad_sync import local
from strategies.parallelize import Parallel
from strategies.state import host_copy


class Snapshot:
    """A copy of the state of a training, as a checkpoint has it: of each rank its own part.

    It is made at construction, in the host's memory.

    Args:
        parallel: The model under its layout.
        optimizer: The run's.
        loss_scale: Of fp16.
        average: The moving average of the weights.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        average: Average | None,
    ) -> None:
        self.parallel = parallel
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.average = average
        self._saved = _copied(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.parallel.model_state(),
            "optimizer": self.parallel.optimizer_state(self.optimizer),
            "ema": self.average.values if self.average is not None else {},
            "loss_scale": self.loss_scale.state(),
        }

    def swap(self) -> None:
        """Exchange the state and the copy."""
        state = self._state()
        saved = self._saved
        self._saved = _copied(state)
        self._load(state, saved)

    def restore(self) -> None:
        """Give the training the state of the copy, which remains."""
        self._load(self._state(), self._saved)

    @torch.no_grad()
    def _load(self, state: dict[str, Any], saved: dict[str, Any]) -> None:
        state = _with_values(state, saved)
        self.parallel.load_model_state(state["model"])
        self.parallel.load_optimizer_state(self.optimizer, state["optimizer"])
        self.loss_scale.load_state(state["loss_scale"])
        drop_gathered(self.parallel)


def _copied(tree: Any) -> Any:
    """A copy of a state on the host, with this rank's part of each tensor."""
    return _mapped(lambda leaf: host_copy(local(leaf.detach())), tree)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, value) for key, value in tree.items()}
    return function(tree) if isinstance(tree, Tensor) else copy.deepcopy(tree)


def _with_values(tree: Any, saved: Any) -> Any:
    """A state with the values of a copy: tensors are written in place, the rest is copied."""
    if isinstance(tree, Mapping):
        return {key: _with_values(value, saved[key]) for key, value in tree.items()}
    if isinstance(tree, Tensor):
        local(tree.detach()).copy_(saved)
        return tree
    return copy.deepcopy(saved)
