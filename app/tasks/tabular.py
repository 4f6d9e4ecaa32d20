"""Regression and classification on the rows of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.data.order import Indices, held_out, hold_out
from app.data.tables import Array, Column, column_of, encoded, read_table
from app.errors import UserError
from app.models.feedforward import MLP
from app.tasks.base import Batch
from app.tasks.parts import Classification, checked_model, one_of

DEFAULT_EVAL_FRACTION = 0.2


class Tabular(Classification):
    """Predict one column of a table from the others, with a multi-layer perceptron.

    data: a .csv (.gz too) or .parquet file, or `diamonds` (53,940 diamonds, from the plotnine wheel).
    target: the column to predict. Rows without it are left out.
    kind: `regression`, `classification`, or `auto`: classification if the target is text.
    ignore: columns to leave out.
    eval_samples: rows held out, always the same, class by class (default: a fifth).
    model_args: arguments of app/models/feedforward.py: hidden, activation, dropout.

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
        eval_samples: int | None = None,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", "regression", "classification"))
        columns, path = read_table(data)
        if target is None:
            raise UserError(f"task_args.target is needed: a column of {data} to predict; it has {', '.join(columns)}")
        goal = column_of(columns, target, "task_args.target", data)
        for name in ignore or []:
            column_of(columns, name, "task_args.ignore", data)
        rows = np.flatnonzero(~goal.missing())
        if len(rows) < 2:
            raise UserError(f"{path} has {len(rows)} rows with a value in {target!r}; at least two are needed")
        inputs = [column for name, column in columns.items() if name not in (target, *(ignore or []))]
        if not inputs:
            raise UserError(f"{path} has no column besides the target {target!r}; there is nothing to predict from")
        self.classes, goals = _goals(goal, rows, kind, path.name)
        count = held_out(len(rows), eval_samples, DEFAULT_EVAL_FRACTION)
        train_at, eval_at = hold_out(len(rows), count, goals if self.classes else None)
        matrix = encoded(inputs, rows[train_at])
        self.mean, self.std, self.eval_variance = 0.0, 1.0, 0.0
        if not self.classes:
            self.mean, self.std = float(goals[train_at].mean()), float(goals[train_at].std()) or 1.0
            self.eval_variance = float(goals[eval_at].var()) if count else 0.0
            goals = (goals - self.mean) / self.std
        targets = goals if self.classes else goals.astype(np.float32)
        parts = [
            TensorDataset(torch.from_numpy(matrix[rows[at]]), torch.from_numpy(targets[at]))
            for at in (train_at, eval_at)
        ]
        self._train, self._eval = parts[0], parts[1] if count else None
        outputs = len(self.classes) if self.classes else 1
        self._build = checked_model(MLP, {"in_features": matrix.shape[1], "out_features": outputs}, model_args)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return super().loss(model, batch) if self.classes else F.mse_loss(model(inputs).float()[:, 0], targets)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if self.classes:
            return super().metrics(model, batch)
        inputs, targets = batch
        error = model(inputs).float()[:, 0] - targets
        loss = error.square().mean()
        mse = loss * self.std**2
        figures = {"loss": loss, "mae": error.abs().mean() * self.std, "mse": mse}
        if self.eval_variance > 0:
            figures["r2"] = 1 - mse / self.eval_variance
        return figures

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return {"rmse": means["mse"] ** 0.5} if "mse" in means else {}


def _goals(goal: Column, rows: Indices, kind: str, file: str) -> tuple[list[str], Array]:
    """(names of the classes, int64 class of each row), or ([], float64 number of each row) for a regression."""
    values = goal.values[rows]
    if goal.numeric and not np.isfinite(values).all():
        raise UserError(f"{file}: column {goal.name!r} holds infinite numbers; remove those rows")
    if kind == "regression" and not goal.numeric:
        raise UserError(
            f"{file}: column {goal.name!r} holds text such as {values[0]!r}; write task_args.kind=classification"
        )
    if kind == "regression" or (kind == "auto" and goal.numeric):
        return [], values
    return goal.classes(rows, file)
