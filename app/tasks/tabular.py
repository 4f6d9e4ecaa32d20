"""Regression and classification on the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.order import Indices
from app.data.split import hold_out
from app.data.tables import Array, Column, Encoder, read_table
from app.errors import UserError
from app.models.mlp import MLP
from app.tasks.arguments import checked_model, held_out, nearest, one_of, whole
from app.tasks.base import Batch
from app.tasks.parts import InParts

DEFAULT_EVAL_FRACTION = 0.2
FEW = 10
"""A target of at most this many different whole numbers is taken for classes."""

DEFAULT_TARGETS = {"diamonds": "price"}


class Tabular(InParts):
    """Predict one column of a table from the others, with a multi-layer perceptron.

    data: a .csv (.gz too) or .parquet file, or `diamonds` (53,940 diamonds, from the plotnine wheel).
    target: the column to predict (diamonds: price). Rows without it are left out.
    kind: `regression`, `classification`, or `auto`: classification if the target is text or at most 10 different
        whole numbers.
    ignore: columns to leave out. categorical: numeric columns whose numbers are names.
    max_categories: a text column's categories that get an input of their own; rarer ones share one.
    eval_samples or eval_fraction: rows held out, always the same, class by class (default: a fifth).
    model_args: arguments of app/models/mlp.py: hidden, activation, dropout.

    Numbers are standardised with the training rows' mean and deviation, a regression's target too; its metrics
    `mae`, `mse` and `rmse` are in the target's own units, and `r2` is 1 - mse / variance of the held-out target.
    """

    def __init__(
        self,
        *,
        data: str,
        target: str | None = None,
        kind: str = "auto",
        ignore: list[str] | None = None,
        categorical: list[str] | None = None,
        max_categories: int = 64,
        eval_samples: int | None = None,
        eval_fraction: float | None = None,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", "regression", "classification"))
        columns, path = read_table(data)
        self.target = _target(target or DEFAULT_TARGETS.get(data), columns, data)
        self.source = data
        for key, names in (("ignore", ignore or []), ("categorical", categorical or [])):
            for name in names:
                _known(f"task_args.{key}", name, columns)
        goal = columns[self.target]
        rows = np.flatnonzero(~goal.missing())
        if len(rows) < 2:
            raise UserError(f"{path} has {len(rows)} rows with a value in {self.target!r}; at least two are needed.")
        self.classes, goals = _goals(goal, rows, kind, path.name)
        count = held_out(len(rows), eval_fraction, eval_samples, DEFAULT_EVAL_FRACTION)
        train_at, eval_at = hold_out(len(rows), count, goals if self.classes else None)

        inputs = [
            _as_names(column) if name in (categorical or []) else column
            for name, column in columns.items()
            if name != self.target and name not in (ignore or [])
        ]
        if not inputs:
            raise UserError(
                f"{path} has no column besides the target {self.target!r}; there is nothing to predict from."
            )
        encoder = Encoder(inputs, rows[train_at], whole("max_categories", max_categories))
        self.mean, self.std, self.eval_variance = _target_statistics(goals, train_at, eval_at, bool(self.classes))
        self._train = self._rows(encoder, rows, goals, train_at)
        self._eval = self._rows(encoder, rows, goals, eval_at) if count else None
        outputs = len(self.classes) if self.classes else 1
        self._build = checked_model(MLP, {"in_features": encoder.width, "out_features": outputs}, model_args)
        self._columns = (sum(column.numeric for column in inputs), sum(not column.numeric for column in inputs))

    def _rows(self, encoder: Encoder, rows: Indices, goals: Array, at: Indices) -> Rows:
        targets = goals[at] if self.classes else ((goals[at] - self.mean) / self.std).astype(np.float32)
        return Rows(encoder.encode(rows[at]), targets)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        outputs = model(inputs).float()
        return F.cross_entropy(outputs, targets) if self.classes else F.mse_loss(outputs[:, 0], targets)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = model(inputs).float()
        if self.classes:
            right = (outputs.argmax(dim=-1) == targets).float().mean()
            return {"loss": F.cross_entropy(outputs, targets), "accuracy": right}
        error = outputs[:, 0] - targets
        loss = error.square().mean()
        mse = loss * self.std**2
        figures = {"loss": loss, "mae": error.abs().mean() * self.std, "mse": mse}
        if self.eval_variance > 0:
            figures["r2"] = 1 - mse / self.eval_variance
        return figures

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return {"rmse": means["mse"] ** 0.5} if "mse" in means else {}

    def describe(self) -> str:
        held = 0 if self._eval is None else len(self._eval)
        goal = f"{self.target} in {len(self.classes)} classes" if self.classes else f"{self.target}, a number"
        numeric, text = self._columns
        return (
            f"{self.source}: {len(self._train) + held:,} rows, {numeric} numeric and {text} text columns to predict "
            f"{goal}; {len(self._train):,} rows to train on"
        )


class Rows(Dataset[Any]):
    """(inputs (width,) float32, target: int64 class or float32) of each row."""

    def __init__(self, inputs: Array, targets: Array) -> None:
        self.inputs, self.targets = torch.from_numpy(inputs), torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def _known(key: str, name: str, columns: dict[str, Column]) -> str:
    if name not in columns:
        raise UserError(f"{key}: there is no column {name!r}{nearest(name, columns)}; there are {', '.join(columns)}.")
    return name


def _target(target: str | None, columns: dict[str, Column], data: str) -> str:
    if target is None:
        raise UserError(
            f"task_args.target is needed: which column of {data} to predict; there are {', '.join(columns)}."
        )
    return _known("task_args.target", target, columns)


def _as_names(column: Column) -> Column:
    """The column with its numbers as text, so that they are encoded as categories."""
    if not column.numeric:
        return column
    names = np.array([None if np.isnan(value) else f"{value:g}" for value in column.values], dtype=object)
    return Column(column.name, names)


def _goals(goal: Column, rows: Indices, kind: str, file: str) -> tuple[list[str], Array]:
    """(names of the classes, int64 class of each row), or ([], float64 number of each row) for a regression."""
    values = goal.values[rows]
    if goal.numeric and not np.isfinite(values).all():
        raise UserError(f"{file}: column {goal.name!r} holds infinite numbers; remove those rows.")
    if kind == "regression" and not goal.numeric:
        raise UserError(f"{file}: column {goal.name!r} holds text such as {values[0]!r}; write kind: classification.")
    few_whole = goal.numeric and (values == np.floor(values)).all() and len(np.unique(values)) <= FEW
    if kind == "regression" or (kind == "auto" and goal.numeric and not few_whole):
        return [], values
    found, codes = np.unique(values if goal.numeric else values.astype(str), return_inverse=True)
    if len(found) < 2:
        raise UserError(f"{file}: column {goal.name!r} has one value only, {found[0]}; there is nothing to tell apart.")
    return [f"{each:g}" if goal.numeric else str(each) for each in found], codes.astype(np.int64)


def _target_statistics(goals: Array, train: Indices, held: Indices, classes: bool) -> tuple[float, float, float]:
    """(mean and deviation of the training targets, variance of the held-out ones); (0, 1, 0) for classes."""
    if classes:
        return 0.0, 1.0, 0.0
    std = float(goals[train].std())
    return float(goals[train].mean()), std if std > 0 else 1.0, float(goals[held].var()) if len(held) else 0.0
