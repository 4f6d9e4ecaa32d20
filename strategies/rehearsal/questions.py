"""The values of tensors that Python asks for (`bool(x)`, `x.item()`), and runs with other answers.

Such a value may decide which code Python runs next, and it may depend on the batch. A run in which
one of these questions gets another answer shows what the model would do with a rare batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_QUESTIONS_ON_META = 200
"""Questions that a forward may ask on the meta device.

There a loop that ends only when a tensor has a certain value would not end.
"""
FAR = 1000.0
"""A number beyond what floats are usually compared with, and small enough to be a size."""

QUESTIONS = {
    "__bool__",
    "is_nonzero",
    "equal",
    "allclose",
    "__contains__",
    "item",
    "__int__",
    "__index__",
    "__float__",
}
"""Calls by which Python asks for one number, to decide by it."""
_TRUTH_QUESTIONS = ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")


@dataclass(kw_only=True)
class Answers:
    """The answers that one run gives to Python's questions.

    Args:
        other_answer: The number of a question, among those about the batch, and the answer that it
            gets instead of the true one.
        drawn: What a single number that is drawn evenly from [0, 1) is replaced by, or the nearest
            number below 1. None: it stays as it is.
    """

    other_answer: tuple[int, Any] | None = None
    drawn: float | None = None
    has_drawn: bool = False
    """Whether such a number was drawn. Layers are dropped by these."""
    question_count: int = 0
    batch_answers: list[Any] = field(default_factory=list)
    """The answers that depend on the batch, in order."""
    is_made_up: bool = False
    """Whether any answer was made up, because a tensor had no data."""

    def answer(
        self, func: Callable[..., Any], tensor: Tensor, name: str, args: Any, *, is_data: bool
    ) -> Any:
        """Answers a question.

        Args:
            func: The call of torch that asks.
            tensor: The tensor that is asked about.
            name: The call's name, one of QUESTIONS.
            args: The call's arguments.
            is_data: Whether the answer depends on the batch.

        Raises:
            RuntimeError: There are too many questions on the meta device.
        """
        self.question_count += 1
        if tensor.is_meta:
            if self.question_count > MAX_QUESTIONS_ON_META:
                raise RuntimeError("a loop waits for a value, and tensors on meta have none")
            self.is_made_up = True
            value = _made_up_answer(name, tensor)
        else:
            value = func(*args)
        if not is_data:
            return value
        number = len(self.batch_answers)
        self.batch_answers.append(value)
        if self.other_answer is not None and self.other_answer[0] == number:
            return type(value)(self.other_answer[1])
        return value

    def note_draw(self, number: Tensor) -> None:
        """Notes that a single number was drawn, and replaces it in place."""
        self.has_drawn = True
        if self.drawn is not None:
            largest = 1 - torch.finfo(number.dtype).eps
            number.fill_(min(self.drawn, largest))

    def with_extreme_draws(self) -> list[Answers]:
        """Runs in which all draws are as small, or as large, as they can be.

        What is decided by a draw and happens in neither run never happens.
        """
        if not self.has_drawn:
            return []
        return [Answers(drawn=0.0), Answers(drawn=1.0)]

    def with_other_answers(self, at_most: int) -> list[Answers]:
        """Runs in which one answer is another one.

        Args:
            at_most: The number of runs. If there are more questions, evenly spaced ones are chosen.
        """
        other_answers = [
            (number, other)
            for number, value in enumerate(self.batch_answers)
            for other in _other_values(value)
        ]
        stride = max(1, -(-len(other_answers) // at_most))
        return [Answers(other_answer=other) for other in other_answers[::stride]]


def _made_up_answer(name: str, tensor: Tensor) -> bool | int | float:
    """The answer about a tensor without data: zero, so that checks pass and loops end."""
    if name in _TRUTH_QUESTIONS or (name == "item" and tensor.dtype == torch.bool):
        return False
    is_float = name == "__float__" or (name == "item" and tensor.is_floating_point())
    return 0.0 if is_float else 0


def _other_values(value: Any) -> tuple[Any, ...]:
    """Values of the same type that may lead to other code."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (1 - value,) if value in (0, 1) else (0, value + 1)
    if isinstance(value, float):
        return (FAR, -FAR)
    return ()
