"""A trained model as a person asks it: from rows of a table, images or texts to what the answer means.

What the training data decided (means, categories, a tokenizer) is in a `Preprocessor`, which holds no data, and is kept
with the model in MLflow: `mlflow.pytorch.load_model` gives a `Predictor` around the network (`.model`), and
`mlflow.pyfunc.load_model(…).predict` its answers in words. A task without one gives the network itself, whose arguments
are found by watching a call. MLflow loads this file in a process that has only torch, NumPy and pandas.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FILE = "preprocessor.pt"


class Preprocessor:
    """example: what a person has, for one row."""

    example: Any

    def __call__(self, given: Any) -> tuple[Any, ...] | dict[str, Any]:
        """What the model is called with, positional or by name."""
        raise NotImplementedError

    def read(self, output: Any) -> Any:
        """What the model's output means: a table, or arrays."""
        return _arrays(logits_of(output))

    def predict(self, model: nn.Module, given: Any) -> Any:
        return self.read(called(model, self(given)))


class Predictor(nn.Module):
    """A network and its preprocessing: `forward` as the network, but from what a person has; `predict` for a person."""

    def __init__(self, model: nn.Module, preprocessor: Preprocessor) -> None:
        super().__init__()
        self.model, self.preprocessor = model, preprocessor

    def forward(self, given: Any) -> Any:
        return called(self.model, self.preprocessor(given))

    @torch.no_grad()
    def predict(self, given: Any, params: Any = None) -> Any:
        """As MLflow calls it."""
        return self.preprocessor.predict(self.model, given)


def called(model: nn.Module, given: tuple[Any, ...] | dict[str, Any]) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(given, dict):
        return model(**{name: _there(value, device) for name, value in given.items()})
    return model(*(_there(value, device) for value in given))


def _there(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _load_pyfunc(path: str, model_config: Any = None) -> Predictor:
    """What MLflow calls; path: the model's `data`."""
    import mlflow.pytorch

    find_also_in(Path(path).parent / "code")
    model = mlflow.pytorch.load_model(str(Path(path).parent)).eval()
    if isinstance(model, Predictor):
        return model
    return Predictor(model, torch.load(Path(path) / FILE, weights_only=False))


def find_also_in(code: Path) -> None:
    """Packages of a process that has loaded another model are that one's, without modules that only this one has."""
    for name, module in list(sys.modules.items()):
        part = code.joinpath(*name.split("."))
        if hasattr(module, "__path__") and part.is_dir() and str(part) not in module.__path__:
            module.__path__.append(str(part))


def classes_table(column: str, classes: Sequence[Any], output: Any) -> Any:
    """A table of each row's most probable class, and how probable it is, from logits (n, classes)."""
    import pandas

    sure, at = F.softmax(logits_of(output).float().cpu(), -1).max(-1)
    return pandas.DataFrame({column: [classes[i] for i in at.tolist()], "probability": sure.numpy()})


def logits_of(output: Any) -> Any:
    """Of a model of `transformers`, which answers with more; of another its output."""
    return getattr(output, "logits", output)


def texts_of(given: Any) -> list[str]:
    """The texts in a string, a list, or the first column of a table."""
    if isinstance(given, str):
        return [given]
    return [str(text) for text in (given.iloc[:, 0] if hasattr(given, "iloc") else np.ravel(given))]


# --- of a task without one ------------------------------------------------------------------------------------------


class Arguments(Preprocessor):
    """The arguments of a model, as arrays by name: those of a call that was watched. A single one needs no name."""

    def __init__(self, model: nn.Module, call: _Called) -> None:
        names = list(inspect.signature(model.forward).parameters)
        self.slots: dict[str, tuple[torch.dtype, Any]] = {}  # name: type, example
        arguments = {(names[i] if i < len(names) else f"input_{i}"): value for i, value in enumerate(call.args)}
        alone = len(arguments) + len(call.kwargs) == 1
        self.args = [self._slot("" if alone else name, name, value) for name, value in arguments.items()]
        self.kwargs = {name: self._slot("" if alone else name, name, value) for name, value in call.kwargs.items()}
        arrays = {name: _arrays(value) for name, (_, value) in self.slots.items()}
        self.example = next(iter(arrays.values())) if len(arrays) == 1 else arrays

    def _slot(self, prefix: str, name: str, value: Any) -> Any:
        """The value with a _Slot instead of each tensor."""
        if isinstance(value, Tensor):
            name = prefix or name
            self.slots[name] = (value.dtype, value)
            return _Slot(name)
        if isinstance(value, Mapping):
            return {k: self._slot(f"{prefix}.{k}" if prefix else str(k), str(k), v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return [self._slot(f"{prefix or name}_{i}", name, v) for i, v in enumerate(value)]
        return value

    def __call__(self, given: Any) -> tuple[Any, ...]:
        if not isinstance(given, Mapping):
            given = {next(iter(self.slots)): given}
        missing = self.slots.keys() - given.keys()
        if missing:
            raise ValueError(f"the model needs {', '.join(self.slots)}, but {min(missing)} is not given")
        found = {n: torch.as_tensor(np.asarray(given[n])).to(kind) for n, (kind, _) in self.slots.items()}
        return _filled(self.args, found), _filled(self.kwargs, found)

    def predict(self, model: nn.Module, given: Any) -> Any:
        args, kwargs = self(given)
        return self.read(model(*args, **kwargs))


@dataclass(frozen=True)
class _Slot:
    name: str


def _filled(value: Any, found: dict[str, Tensor]) -> Any:
    if isinstance(value, _Slot):
        return found[value.name]
    if isinstance(value, dict):
        return {key: _filled(each, found) for key, each in value.items()}
    return [_filled(each, found) for each in value] if isinstance(value, list) else value


class _Called(Exception):
    """Carries the first call of a model out of the code that makes it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def watched_arguments(model: nn.Module, loss: Any, batch: Any) -> Arguments:
    """What `loss(model, batch)` calls the model with. Raises ValueError: it does not call it."""

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Called(args, kwargs)

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        loss(model, batch)
    except _Called as call:
        return Arguments(model, call)
    finally:
        handle.remove()
    raise ValueError("the task's loss does not call its model")


def _arrays(value: Any) -> Any:
    """Tensors as NumPy arrays; of several answers the first."""
    if isinstance(value, Mapping):
        return {str(key): _arrays(each) for key, each in value.items() if isinstance(each, Tensor)}
    if isinstance(value, (tuple, list)):
        return _arrays(value[0])
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
