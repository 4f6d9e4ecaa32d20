"""A task's model beside its base model, from which rates and initial weights are transferred.

How the model's own initial weights follow its width is measured, since its code decides that: the
base model and one of twice the width are built, and the standard deviations of each tensor are
compared. They follow the width by a power of 0 (a constant), ½ (as torch's layers do) or 1. What is
missing to the power that app/training/width_transfer.py wants is multiplied in once, when the
weights of a new run are drawn.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from app.config import Config
from app.data.randomness import Generators, seed_everything
from app.errors import UserError
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.build import build_model
from app.training.hooks import overrides
from app.training.width_transfer import KEY, TensorWidth, compare, require_rule
from strategies.state import build_on_meta

ENOUGH_NUMBERS = 400
"""How many elements of a tensor, and of those like it, are drawn if possible.

Their standard deviation is then exact enough to distinguish powers of the width that differ by ½.
"""
MOST_BUILDS = 16
MOST_PARAMETERS = 50_000_000
"""Parameters that are built in all, unless building the two models once takes more."""


def widths_of(config: Config, task: Task) -> dict[str, TensorWidth]:
    """Each parameter of a task's model beside that of optimizer.width_transfer.base, by name.

    Args:
        config: Of the run.
        task: Its task.

    Returns:
        {} without optimizer.width_transfer, and where the model is the base model.

    Raises:
        UserError: Rates cannot be transferred to this model.
    """
    values = config.optimizer.width_transfer.get("base")
    if not values:
        return {}
    require_rule(config.optimizer.name)
    if overrides(task, "optimizer"):
        raise UserError(
            f"{KEY} does not work with a task that makes its own optimizer: leave one of the two "
            "out"
        )
    arguments = arguments_of(config, task)
    if is_part_of(values, arguments):
        return {}
    generators = Generators(torch.device("cpu"))
    state = generators.state()
    try:
        base = _task_with(config, values)
        widths = compare(_structure(task), _structure(base))
        if _starts_from_weights(config):
            return widths
        wider = _task_with(config, grown(values, arguments, 2))
        return _with_initial(widths, base, wider)
    finally:
        generators.restore(state)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with some of them replaced, mappings inside them key by key."""
    result = dict(values)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def arguments_of(config: Config, task: Task) -> dict[str, Any]:
    """A task's arguments, with the defaults of those that are not written."""
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(type(task)).parameters.values()
        if parameter.default is not parameter.empty
    }
    return {**defaults, **config.task_args}


def grown(values: Mapping[str, Any], arguments: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The arguments of a model that is wider than the base model.

    Args:
        values: The base model's.
        arguments: The model's own. What is the same in both, such as a number of layers, stays.
        factor: How much wider.

    Raises:
        UserError: A whole number would not stay one.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        model_value = arguments.get(key)
        if isinstance(value, Mapping):
            result[key] = grown(
                value, model_value if isinstance(model_value, Mapping) else {}, factor
            )
        elif key in arguments and _plain(model_value) == _plain(value):
            result[key] = value
        else:
            result[key] = _multiplied(value, factor)
    return result


def _multiplied(value: Any, factor: float) -> Any:
    if isinstance(value, (list, tuple)):
        return [_multiplied(item, factor) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    product = value * factor
    if isinstance(value, float):
        return product
    if product != round(product):
        raise UserError(f"{KEY}.base has the number {value}, whose {factor:g} times is not whole")
    return round(product)


def _task_with(config: Config, values: Mapping[str, Any]) -> Task:
    seed_everything(config.train.seed)
    try:
        return load_task(config.task, merged(config.task_args, values))
    except UserError as error:
        raise UserError(f"{KEY}: no model with {_words(values)} can be made: {error}") from error


def _structure(task: Task) -> nn.Module:
    return build_on_meta(lambda: build_model(task))[0]


def is_part_of(values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether arguments already have all these values."""
    for key, value in values.items():
        old = arguments.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if not is_part_of(value, old):
                return False
        elif key not in arguments or _plain(old) != _plain(value):
            return False
    return True


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _starts_from_weights(config: Config) -> bool:
    """Whether the weights that training starts with are not drawn."""
    is_pretrained = bool(config.task_args.get("pretrained"))
    return is_pretrained or bool(config.checkpoint.load) or bool(config.checkpoint.fork)


def _words(values: Mapping[str, Any]) -> str:
    words = []
    for key, value in values.items():
        words.append(
            f"{key} {{{_words(value)}}}" if isinstance(value, Mapping) else f"{key}={value}"
        )
    return ", ".join(words)


# --- the model's own initial weights --------------------------------------------------------------


@dataclass
class _Numbers:
    """The count, the sum and the sum of squares of numbers, and the largest and the smallest."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    def add(self, tensor: Tensor) -> None:
        values = tensor.detach().double()
        if not values.numel():
            return
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())
        self.largest = max(self.largest, float(values.max()))
        self.smallest = min(self.smallest, float(values.min()))

    @property
    def is_drawn(self) -> bool:
        """Whether the numbers differ; if not, they are a constant such as 0 or 1."""
        return self.largest > self.smallest

    @property
    def deviation(self) -> float:
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.squares / self.count - mean**2))


@dataclass
class _Tensors:
    """Tensors of one place in the repeating blocks, in the base model and in the wider one."""

    growth: float
    """Of what the initial weights may follow, from the base model to the wider one."""
    base: _Numbers
    wider: _Numbers

    @property
    def is_drawn(self) -> bool:
        return self.base.is_drawn and self.wider.is_drawn

    @property
    def power(self) -> float:
        """The power of 1/width that the deviation follows: 0, ½ or 1."""
        if not self.is_drawn or self.growth == 1:
            return 0.0
        ratio = self.base.deviation / self.wider.deviation
        return min(1.0, max(0.0, round(2 * math.log(ratio, self.growth)) / 2))


def _with_initial(
    widths: Mapping[str, TensorWidth], base: Task, wider: Task
) -> dict[str, TensorWidth]:
    """The widths with what the model's own initial weights are multiplied by.

    Args:
        widths: Of the model.
        base: The task of the base model.
        wider: That of a model of twice the width.

    Raises:
        UserError: The wider model is not as wide as it should be.
    """
    wider_widths = compare(_structure(wider), _structure(base))
    tensors = _measure(
        wider_widths,
        build_base=lambda: build_model(base),
        build_wider=lambda: build_model(wider),
    )
    result = {}
    for name, width in widths.items():
        tensor = tensors[name]
        layer = tensors.get(_weight_beside(name), tensor)
        growth = _followed_growth(name, widths)
        if growth != 1 and tensor.is_drawn and tensor.growth == 1:
            raise UserError(
                f"{KEY}.base: {name} does not grow when the numbers in base are doubled: "
                "write a larger base"
            )
        few = tensor.base.count < ENOUGH_NUMBERS / 4
        power = layer.power if few and tensor.is_drawn else tensor.power
        factor = growth**power * width.initial_growth if tensor.is_drawn else 1.0
        result[name] = replace(width, initial=factor)
    return result


def _measure(
    widths: Mapping[str, TensorWidth],
    *,
    build_base: Callable[[], nn.Module],
    build_wider: Callable[[], nn.Module],
) -> dict[str, _Tensors]:
    """The numbers of each parameter in new models, of several seeds if it has few.

    Args:
        widths: Of the wider model beside the base model.
        build_base: Builds the base model.
        build_wider: Builds the wider one.
    """
    by_place: dict[tuple[Any, ...], _Tensors] = {}
    tensors: dict[str, _Tensors] = {}
    for name, width in widths.items():
        growth = _followed_growth(name, widths)
        place = (re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), width.fans, width.base, growth)
        tensors[name] = by_place.setdefault(place, _Tensors(growth, _Numbers(), _Numbers()))
    built = 0
    for seed in range(MOST_BUILDS):
        for build, numbers_of in (
            (build_base, lambda of: of.base),
            (build_wider, lambda of: of.wider),
        ):
            seed_everything(seed)
            for name, parameter in build().named_parameters():
                numbers_of(tensors[name]).add(parameter)
                built += parameter.numel()
        is_enough = all(
            of.base.count >= ENOUGH_NUMBERS for of in by_place.values() if of.base.is_drawn
        )
        if is_enough or built * (seed + 2) / (seed + 1) > MOST_PARAMETERS:
            break
    return tensors


def _followed_growth(name: str, widths: Mapping[str, TensorWidth]) -> float:
    """How much that has grown which the initial weights of a tensor may follow.

    That is fan_in, else fan_out; for a bias, those of the weight beside it.
    """
    layer = widths.get(_weight_beside(name), widths[name])
    for width in (layer, widths[name]):
        if width.in_growth != 1:
            return width.in_growth
    return widths[name].out_growth


def _weight_beside(name: str) -> str:
    """The name of the weight of the layer that a bias is in; the name itself for other tensors."""
    layer, dot, attribute = name.rpartition(".")
    return f"{layer}{dot}weight" if attribute == "bias" else name
