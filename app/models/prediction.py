"""A trained model for a user: from rows of a table, images or texts to answers in their terms.

What the training data decided (means, categories, a tokenizer) is in a `Preprocessor`, which holds
no data and is kept with the model in MLflow. `mlflow.pytorch.load_model` returns a `Predictor`
around the network (`.model`), and `mlflow.pyfunc.load_model(…).predict` returns its answers in
words. A task without a preprocessor returns the network itself, whose arguments are those of a call
that was watched. MLflow loads this file in a process that has only torch, NumPy and pandas.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    import pandas

FILE = "preprocessor.pt"
"""In a model's `data` folder in MLflow: the preprocessor of a model that is not a Predictor."""


class Preprocessor:
    """Turns what a user has into a model's arguments, and its output into answers.

    Attributes:
        example: What a user has, for one row.
    """

    example: Any

    def __call__(self, given: Any) -> tuple[Any, ...] | dict[str, Any]:
        """The arguments of the model, by position or by name."""
        raise NotImplementedError

    def read(self, output: Any) -> Any:
        """What the model's output means: a table, or arrays."""
        return _arrays(logits_of(output))

    def predict(self, model: nn.Module, given: Any) -> Any:
        """The answers of the model."""
        return self.read(call_model(model, self(given)))


class Predictor(nn.Module):
    """A network with its preprocessing.

    `forward` returns the network's output, and `predict` answers in the user's terms; both take
    what the user has.

    Args:
        model: The network.
        preprocessor: Makes its arguments.
    """

    def __init__(self, model: nn.Module, preprocessor: Preprocessor) -> None:
        super().__init__()
        self.model = model
        self.preprocessor = preprocessor

    def forward(self, given: Any) -> Any:
        return call_model(self.model, self.preprocessor(given))

    @torch.no_grad()
    def predict(self, given: Any, params: Any = None) -> Any:
        """The answers of the model, with the signature that MLflow calls."""
        return self.preprocessor.predict(self.model, given)


def call_model(model: nn.Module, arguments: tuple[Any, ...] | dict[str, Any]) -> Any:
    """The output of a model, whose arguments are moved to its device.

    Args:
        model: The model.
        arguments: By position or by name.
    """
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if isinstance(arguments, dict):
        return model(**{name: _to(device, value) for name, value in arguments.items()})
    return model(*(_to(device, value) for value in arguments))


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


# --- MLflow ---------------------------------------------------------------------------------------


def _load_pyfunc(path: str, model_config: Any = None) -> Predictor:
    """Load a model for `mlflow.pyfunc`, which calls this function by its name.

    Args:
        path: The model's `data` folder.
        model_config: Not used.
    """
    import mlflow.pytorch

    folder = Path(path).parent
    extend_package_paths(folder / "code")
    model = mlflow.pytorch.load_model(str(folder)).eval()
    if isinstance(model, Predictor):
        return model
    return Predictor(model, torch.load(Path(path) / FILE, weights_only=False))


def extend_package_paths(code: Path) -> None:
    """Let packages that are imported already find a model's own modules too.

    In a process that has loaded another model, the packages are those of that model, without the
    modules that only this one has.

    Args:
        code: The folder with the code of this model.
    """
    for name, module in list(sys.modules.items()):
        folder = code.joinpath(*name.split("."))
        is_package = hasattr(module, "__path__")
        if is_package and folder.is_dir() and str(folder) not in module.__path__:
            module.__path__.append(str(folder))


# --- what preprocessors share ---------------------------------------------------------------------


def classes_table(column: str, classes: Sequence[Any], output: Any) -> pandas.DataFrame:
    """A table of each row's most probable class, and its probability.

    Args:
        column: The name of the column of classes.
        classes: The classes.
        output: Logits (n, classes), or an output that has them.
    """
    import pandas

    probabilities = F.softmax(logits_of(output).float().cpu(), -1)
    largest, index = probabilities.max(-1)
    names = [classes[i] for i in index.tolist()]
    return pandas.DataFrame({column: names, "probability": largest.numpy()})


def logits_of(output: Any) -> Any:
    """The logits of a model of `transformers`; the output itself for other models."""
    return getattr(output, "logits", output)


def texts_of(given: Any) -> list[str]:
    """The texts in a string, a list, or the first column of a table."""
    if isinstance(given, str):
        return [given]
    values = given.iloc[:, 0] if hasattr(given, "iloc") else np.ravel(given)
    return [str(text) for text in values]


# --- tasks without a preprocessor -----------------------------------------------------------------


class Arguments(Preprocessor):
    """The arguments of a model as arrays by name, after a call that was watched.

    A single array needs no name.

    Args:
        model: The model.
        call: The call.
    """

    def __init__(self, model: nn.Module, call: _Call) -> None:
        parameters = list(inspect.signature(model.forward).parameters)
        by_position = {}
        for i, value in enumerate(call.args):
            name = parameters[i] if i < len(parameters) else f"input_{i}"
            by_position[name] = value
        is_single = len(call.args) + len(call.kwargs) == 1
        self.slots: dict[str, tuple[torch.dtype, Tensor]] = {}  # name: type, example
        self.args = [
            self._with_slots("" if is_single else name, name, value)
            for name, value in by_position.items()
        ]
        self.kwargs = {
            name: self._with_slots("" if is_single else name, name, value)
            for name, value in call.kwargs.items()
        }
        arrays = {name: _arrays(example) for name, (_, example) in self.slots.items()}
        self.example = next(iter(arrays.values())) if len(arrays) == 1 else arrays

    def _with_slots(self, prefix: str, name: str, value: Any) -> Any:
        """The value with a _Slot in place of each tensor.

        Args:
            prefix: Begins the names of the tensors inside; "" for none.
            name: Of the value itself.
            value: A tensor, or what may have tensors inside.
        """
        if isinstance(value, Tensor):
            name = prefix or name
            self.slots[name] = (value.dtype, value)
            return _Slot(name)
        if isinstance(value, Mapping):
            start = f"{prefix}." if prefix else ""
            return {
                key: self._with_slots(f"{start}{key}", str(key), item)
                for key, item in value.items()
            }
        if isinstance(value, (tuple, list)):
            return [
                self._with_slots(f"{prefix or name}_{i}", name, item)
                for i, item in enumerate(value)
            ]
        return value

    def __call__(self, given: Any) -> tuple[Any, ...]:
        """(positional arguments, arguments by name)

        Raises:
            ValueError: An array is missing.
        """
        if not isinstance(given, Mapping):
            given = {next(iter(self.slots)): given}
        missing = self.slots.keys() - given.keys()
        if missing:
            names = ", ".join(self.slots)
            raise ValueError(f"the model needs {names}, but {min(missing)} is not given")
        tensors = {
            name: torch.as_tensor(np.asarray(given[name])).to(dtype)
            for name, (dtype, _) in self.slots.items()
        }
        return _filled(self.args, tensors), _filled(self.kwargs, tensors)

    def predict(self, model: nn.Module, given: Any) -> Any:
        args, kwargs = self(given)
        return self.read(model(*args, **kwargs))


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a model's arguments."""

    name: str


def _filled(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with its tensors in place of the slots."""
    if isinstance(value, _Slot):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    return value


class _Call(Exception):
    """Carries the first call of a model out of the code that makes it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


def watched_arguments(
    model: nn.Module, loss: Callable[[nn.Module, Any], object], batch: Any
) -> Arguments:
    """The arguments with which a loss calls its model.

    Args:
        model: The model, which is not run.
        loss: Called with the model and the batch.
        batch: A batch.

    Raises:
        ValueError: The loss does not call the model.
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Call(args, kwargs)

    handle = model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        loss(model, batch)
    except _Call as call:
        return Arguments(model, call)
    finally:
        handle.remove()
    raise ValueError("the task's loss does not call its model")


def _arrays(value: Any) -> Any:
    """Tensors as NumPy arrays: by name, or the first of several."""
    if isinstance(value, Mapping):
        return {str(key): _arrays(item) for key, item in value.items() if isinstance(item, Tensor)}
    if isinstance(value, (tuple, list)):
        return _arrays(value[0])
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16
        value = value.float()
    return value.numpy()
