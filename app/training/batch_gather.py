"""`Task.gather` wired to a training: which losses call it, which layouts can do it, and what a step then is.

Most losses do not, and their steps are the layout's own. Whether one does is known from its code where that never
mentions the word, else from one forward in its first step, without gradients, of which nothing remains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from app.config import Config
from app.data.loader import rows
from app.data.randomness import Generators
from app.errors import UserError
from app.tasks.base import Task
from strategies import registry
from strategies.gather import BatchGather
from strategies.layout import Layout
from strategies.parallelize import Parallel

POINTER = (
    "write the loss over self.gather(x), which gives the rows of the whole global batch on every layout "
    "(app/tasks/README.md)"
)
"""The end of a sentence about a loss that couples the samples of a batch: what makes it right."""
LAYOUTS = "single, ddp, zero1, zero2, fsdp or hsdp, also with +tensor"
"""Those whose losses can gather."""


# --- before a worker starts -------------------------------------------------------------------------------------------


@contextmanager
def watched(task: Task) -> Iterator[list[Tensor]]:
    """What the task gathers while it is tried; each as it is."""
    gathered: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        gathered.append(x)
        return x

    task.gathering = keep
    try:
        yield gathered
    finally:
        task.gathering = None


def check(config: Config, task: Task, layout: Layout) -> Iterator[str]:
    """Remarks for the user on a task that gathers.

    Raises:
        UserError: a layout that cannot gather, or a measurement that has no meaning then.
    """
    if why := _cannot(layout):
        raise UserError(f"the task calls self.gather, but {why}: write strategy={LAYOUTS}")
    if config.train.noise_scale_every:
        raise UserError(
            "train.noise_scale_every compares the gradients of small and large batches, but the task calls "
            "self.gather, so its loss is no mean over samples: leave it out"
        )
    train = config.train
    if task.eval_data() is not None and train.eval_every and train.eval_batch_size is None:
        size = train.micro_batch_size or max(1, train.global_batch_size // layout.dims.dp)
        yield (
            f"the task calls self.gather, which at an evaluation gives one evaluation batch, here of {size:,} samples: "
            "write train.eval_batch_size for figures that are the same on any number of workers"
        )


def _cannot(layout: Layout) -> str:
    """Why a loss cannot gather; "" where it can."""
    if layout.dims.pp > 1:
        return "a pipeline has one micro-batch at a time where the loss is computed"
    if layout.dims.cp > 1:
        return "with parallel.cp a worker has a part of every sample"
    if any(record.required_package for record in registry.records(layout.name)):
        return f"{layout.name} takes the steps itself"
    return ""


def may_gather(task: Task) -> bool:
    """Whether the code of the task's class, or of the modules that it is made in, mentions `gather`."""
    classes = [cls for cls in type(task).__mro__ if not cls.__module__.startswith(("app.", "builtins"))]
    modules = {cls.__module__ for cls in classes if cls.__module__ in sys.modules}
    return any("gather" in code.co_names for cls in classes for code in _codes(vars(cls).values())) or any(
        "gather" in code.co_names for name in modules for code in _codes(vars(sys.modules[name]).values(), name)
    )


def _codes(values: Iterable[Any], module: str | None = None) -> Iterator[CodeType]:
    """Of functions, and of functions within them. module: of those that were written there."""
    for value in values:
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and (module is None or getattr(function, "__module__", None) == module):
            waiting = [code]
            while waiting:
                inner = waiting.pop()
                yield inner
                waiting += [constant for constant in inner.co_consts if isinstance(constant, CodeType)]


# --- in training ------------------------------------------------------------------------------------------------------


class Gathering:
    """Computes the steps of a task's losses; what `Task.gather` calls while it trains."""

    def __init__(self, task: Task, parallel: Parallel, device: torch.device) -> None:
        self.task, self.parallel = task, parallel
        self.cannot = _cannot(parallel.layout)
        self.batch_gather = BatchGather(parallel, rows, Generators(device), self._unlogged)
        self.parts = 1
        """How many parts the global batch has in the step that is computed."""
        self._may = may_gather(task)
        self._known: dict[Any, tuple[int, bool]] = {}
        """By code of a loss: its number, and whether it gathers."""
        task.gathering = self._gather

    def forward_backward(
        self,
        passes: Any,
        batches: Sequence[Any],
        weights: Sequence[Any],
        loss: Callable[[Any, Any], Tensor],
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """As Parallel.forward_backward. passes: who computes the step of a loss that does not gather."""
        self.parts = len(batches) * self.parallel.layout.dims.dp
        number, gathers = self._loss(loss, batches)
        if not gathers:
            return passes.forward_backward(batches, weights, loss, scale)
        if passes is not self.parallel:
            raise UserError(
                "train.noise_scale_every compares the gradients of small and large batches, but the task's loss calls "
                "self.gather: leave it out"
            )
        return self.batch_gather.forward_backward(batches, weights, loss, scale, number=number)

    def _loss(self, loss: Callable[[Any, Any], Tensor], batches: Sequence[Any]) -> tuple[int, bool]:
        if not self._may or self.cannot or self.parts == 1:
            return 0, False
        function = getattr(loss, "__func__", loss)
        code = getattr(function, "__code__", function)
        if code not in self._known:
            gathers = self.batch_gather.calls(batches[0], loss) > 0
            self._known[code] = (len(self._known), gathers)
        return self._known[code]

    def _gather(self, x: Tensor) -> Tensor:
        if self.batch_gather.is_active:
            return self.batch_gather(x)
        if self.parts == 1 or not self.parallel.module.training:
            return x
        if self.cannot:
            raise UserError(f"the task calls self.gather, but {self.cannot}: write strategy={LAYOUTS}")
        raise UserError(
            "the loss calls self.gather in some steps and not in its first one, or where its module does not show it: "
            "call it in every step, in a function of the task's own module"
        )

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        recorded, self.task.recorded = self.task.recorded, None
        try:
            yield
        finally:
            self.task.recorded = recorded
