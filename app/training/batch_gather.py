"""`Task.gather` in a training: which losses call it, on which layouts, and how their steps run.

Most losses do not call it, and their steps are the layout's own. If the code of the task never
mentions `gather`, its losses do not call it. Otherwise one forward without gradients, in the first
step of a loss, shows whether it does. That forward has no other effect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor

from app.config import Config
from app.data.loader import Batch, rows
from app.data.randomness import Generators
from app.errors import UserError
from app.tasks.base import Task
from strategies import registry
from strategies.gather import BatchGather
from strategies.layout import Layout
from strategies.parallel import Loss
from strategies.parallelize import Parallel

POINTER = (
    "write the loss over self.gather(x), which gives the rows of the whole global batch on every "
    "layout (app/tasks/README.md)"
)
"""What to do about a loss that couples the samples of a batch, as the end of a sentence."""
LAYOUTS = "single, ddp, zero1, zero2, fsdp or hsdp, also with +tensor"
"""The layouts whose losses can gather."""


class StepRunner(Protocol):
    """Runs forward and backward of the micro-batches of a step, such as a `Parallel`."""

    def forward_backward(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
    ) -> Tensor: ...


# --- before a worker starts -----------------------------------------------------------------------


@contextmanager
def watched(task: Task) -> Iterator[list[Tensor]]:
    """Collect what the task gathers; each call returns its tensor as it is."""
    gathered: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        gathered.append(x)
        return x

    task.gathering = collect
    try:
        yield gathered
    finally:
        task.gathering = None


def check(config: Config, task: Task, layout: Layout) -> Iterator[str]:
    """Check the configuration of a task that gathers.

    Args:
        config: The run's configuration.
        task: The task.
        layout: The layout that will train it.

    Yields:
        A sentence for the user about an evaluation whose metrics depend on the workers.

    Raises:
        UserError: The layout cannot gather, or a measurement would mean nothing.
    """
    train = config.train
    obstacle = obstacle_of(layout)
    if obstacle:
        raise UserError(f"the task calls self.gather, but {obstacle}: write strategy={LAYOUTS}")
    if train.noise_scale_every:
        raise UserError(
            "train.noise_scale_every compares the gradients of small and large batches, but the "
            "task calls self.gather, so its loss is not a mean over samples: leave it out"
        )
    is_evaluated = task.eval_data() is not None  # at the end, if not before
    if is_evaluated and train.eval_batch_size is None:
        size = evaluation_batch(config, layout)
        yield (
            "the task calls self.gather, which at an evaluation gives one evaluation batch, here "
            f"of {size:,} samples: write train.eval_batch_size for figures that are the same on "
            "any number of workers"
        )


def evaluation_batch(config: Config, layout: Layout) -> int:
    """The samples of a batch at an evaluation."""
    train = config.train
    share = max(1, train.global_batch_size // layout.dims.dp)
    return train.eval_batch_size or train.micro_batch_size or share


def obstacle_of(layout: Layout) -> str:
    """Why losses cannot gather under a layout; "" if they can."""
    if layout.dims.pp > 1:
        return "a pipeline has one micro-batch at a time where the loss is computed"
    if layout.dims.cp > 1:
        return "with parallel.cp a worker has a part of every sample"
    if any(record.required_package for record in registry.records(layout.name)):
        return f"{layout.name} takes the steps itself"
    return ""


def may_gather(task: Task) -> bool:
    """Whether the code of the task's classes, or of their modules, mentions `gather`."""
    if task.gathers is not None:
        return task.gathers
    classes = [
        cls for cls in type(task).__mro__ if not cls.__module__.startswith(("app.", "builtins"))
    ]
    modules = {cls.__module__ for cls in classes if cls.__module__ in sys.modules}
    codes = [code for cls in classes for code in _codes(vars(cls).values())]
    for module in modules:
        codes += _codes(vars(sys.modules[module]).values(), defined_in=module)
    return any("gather" in code.co_names for code in codes)


def _codes(values: Iterable[object], defined_in: str | None = None) -> Iterator[CodeType]:
    """The code of functions, and of functions within them.

    Args:
        values: Functions, methods, properties and anything else, which is passed over.
        defined_in: Only functions of this module; None means all.
    """
    for value in values:
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        code = getattr(function, "__code__", None)
        is_wanted = defined_in is None or getattr(function, "__module__", None) == defined_in
        if isinstance(code, CodeType) and is_wanted:
            yield from _with_inner_codes(code)


def _with_inner_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner_codes(constant)


# --- in training ----------------------------------------------------------------------------------


class Gathering:
    """Runs the steps of a task's losses, and is what `Task.gather` calls meanwhile.

    Args:
        task: Its `gathering` is set.
        parallel: The model under its layout.
        device: This rank's, whose random numbers a repeated forward draws again.
    """

    def __init__(self, task: Task, parallel: Parallel, device: torch.device) -> None:
        self.task = task
        self.parallel = parallel
        self.obstacle = obstacle_of(parallel.layout)
        self.batch_gather = BatchGather(
            parallel,
            count_samples=rows,
            randomness=Generators(device),
            without_logging=self._without_logging,
        )
        self.parts = 1
        """How many parts the global batch has in the step that is running."""
        self._may_gather = may_gather(task)
        self._losses: dict[Any, tuple[int, bool]] = {}
        """(its number, whether it gathers) of each loss, by its code."""
        task.gathering = self._gather

    def forward_backward(
        self,
        runner: StepRunner,
        batches: Sequence[Batch],
        weights: Sequence[float | Tensor],
        loss: Loss,
        *,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Does what `Parallel.forward_backward` does, for losses that gather too.

        Args:
            runner: Runs the step if the loss does not gather.
            batches: The step's micro-batches.
            weights: Their shares of the global batch.
            loss: (model, batch) → the mean loss.
            scale: Factor of the loss in backward.

        Raises:
            UserError: The noise scale is measured of a loss that gathers.
        """
        self.parts = len(batches) * self.parallel.layout.dims.dp
        number, gathers = self._inspect(loss, batches)
        if not gathers:
            return runner.forward_backward(batches, weights, loss, scale=scale)
        if runner is not self.parallel:
            raise UserError(
                "train.noise_scale_every compares the gradients of small and large batches, but "
                "the task's loss calls self.gather: leave it out"
            )
        return self.batch_gather.forward_backward(
            batches, weights, loss, scale=scale, number=number
        )

    def _inspect(self, loss: Loss, batches: Sequence[Batch]) -> tuple[int, bool]:
        """(the loss's number, whether it gathers), which its first step shows."""
        if not self._may_gather or self.obstacle or self.parts == 1:
            return 0, False
        function = getattr(loss, "__func__", loss)
        code = getattr(function, "__code__", function)
        if code not in self._losses:
            gathers = self.batch_gather.count_calls(batches[0], loss) > 0
            self._losses[code] = (len(self._losses), gathers)
        return self._losses[code]

    def _gather(self, x: Tensor) -> Tensor:
        if self.batch_gather.is_active:
            return self.batch_gather(x)
        if self.parts == 1 or not self.parallel.module.training:
            return x
        if self.obstacle:
            raise UserError(
                f"the task calls self.gather, but {self.obstacle}: write strategy={LAYOUTS}"
            )
        raise UserError(
            "the loss calls self.gather, but did not in its first step, or calls it in code that "
            "is not in the task's module: call it in every step, in a function of that module"
        )

    @contextmanager
    def _without_logging(self) -> Iterator[None]:
        recorded = self.task.recorded
        self.task.recorded = None
        try:
            yield
        finally:
            self.task.recorded = recorded
