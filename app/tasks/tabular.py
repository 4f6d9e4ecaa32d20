"""Regression and classification on the rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.data.order import Indices, held_out, hold_out
from app.data.tables import (
    MISSING,
    Array,
    Column,
    Encoding,
    column_of,
    mean_and_deviation,
    read_table,
    require_column,
)
from app.errors import UserError
from app.models.feedforward import MLP
from app.models.prediction import Preprocessor, classes_table
from app.tasks.base import Batch
from app.tasks.parts import Classification, checked_model, one_of

DEFAULT_EVAL_FRACTION = 0.2
TIME_OF_DAY = r"\d{1,2}:\d{2}:\d{2}(\.\d+)?"


@dataclass
class TableInput(Preprocessor):
    """Rows as they are in the file, in a pandas table or a list of dicts."""

    encodings: list[Encoding]
    target: str
    classes: list[str]
    mean: float  # of the target, where there are no classes
    std: float
    first: dict[str, Array]  # a value of each column

    @property
    def example(self) -> Any:
        import pandas

        return pandas.DataFrame({name: pandas.Series(values) for name, values in self.first.items()})

    def __call__(self, given: Any) -> tuple[Any, ...]:
        import pandas

        table = pandas.DataFrame(given)
        parts = [each.encode(self._values(table, each)) for each in self.encodings]
        return (torch.from_numpy(np.concatenate(parts, 1)),)

    @staticmethod
    def _values(table: Any, encoding: Encoding) -> Array:
        import pandas

        if encoding.name not in table:
            raise ValueError(f"the rows have no column {encoding.name!r}, which the model was trained on")
        column = table[encoding.name]
        if encoding.codes is not None:
            return np.array([None if pandas.isna(value) else str(value) for value in column], dtype=object)
        if not pandas.api.types.is_numeric_dtype(column):
            column = _numbers(column)
        return column.to_numpy(dtype=np.float64, na_value=np.nan)

    def read(self, output: Any) -> Any:
        import pandas

        if self.classes:
            return classes_table(self.target, self.classes, output)
        return pandas.DataFrame({self.target: output[:, 0].double().cpu().numpy() * self.std + self.mean})


def _numbers(column: Any) -> Any:
    """A pandas column of numbers as text, dates, times of day or durations, as numbers and seconds."""
    import pandas
    from pandas.api import types

    second = pandas.Timedelta(seconds=1)
    if types.is_timedelta64_dtype(column):
        return column / second
    if not types.is_datetime64_any_dtype(column):  # of which to_numeric would count nanoseconds or so
        try:
            return pandas.to_numeric(column)
        except (ValueError, TypeError):
            pass
        text = column.map(str, na_action="ignore")
        if text.dropna().str.fullmatch(TIME_OF_DAY).all():
            return pandas.to_timedelta(text) / second
    return (pandas.to_datetime(column, utc=True) - pandas.Timestamp(0, tz="UTC")) / second


class Tabular(Classification):
    """Predict one column of a table from the others, with a multi-layer perceptron.

    data: a .csv file (comma, semicolon, tab or | between its columns; .gz too), a .parquet file, or `diamonds`
        (53,940 diamonds, from the plotnine wheel).
    target: the column to predict. Rows without it are left out.
    kind: `regression`, `classification`, or `auto`: classification if the target is text.
    ignore: columns to leave out.
    categories: columns whose numbers are names, such as postal codes: they are taken as text.
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
        categories: list[str] | None = None,
        eval_samples: int | None = None,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", "regression", "classification"))
        left_out = list(ignore or [])
        named = list(categories or [])
        columns, path = read_table(data, text=named, refuse_numbers_in_text=True)
        if target is None:
            raise UserError(f"task_args.target is needed: a column of {data} to predict; it has {', '.join(columns)}")
        require_column(columns, target, key="task_args.target", source=data)
        for name in left_out:
            require_column(columns, name, key="task_args.ignore", source=data)
        for name in named:
            values = column_of(columns, name, key="task_args.categories", source=data).values
            values[[value in MISSING for value in values]] = None
        goal = columns[target]
        rows = np.flatnonzero(~goal.missing())
        if len(rows) < 2:
            raise UserError(f"{path} has {len(rows)} rows with a value in {target!r}; at least two are needed")
        inputs = [columns[name] for name in columns if name not in (target, *left_out)]
        if not inputs:
            raise UserError(f"{path} has no column besides the target {target!r}; there is nothing to predict from")
        self.classes, goals = _goals(goal, rows, kind, path.name)
        count = held_out(len(rows), eval_samples, DEFAULT_EVAL_FRACTION)
        train_at, eval_at = hold_out(len(rows), count, goals if self.classes else None)
        encodings = [Encoding.fit(column, rows[train_at]) for column in inputs]
        matrix = np.concatenate([e.encode(column.values) for e, column in zip(encodings, inputs, strict=True)], 1)
        self.mean, self.std, self.eval_variance = 0.0, 1.0, 0.0
        if not self.classes:
            self.mean, self.std = mean_and_deviation(goals[train_at], target)
            self.eval_variance = float(goals[eval_at].var()) if count else 0.0
            goals = (goals - self.mean) / self.std
        targets = goals if self.classes else goals.astype(np.float32)
        parts = [
            TensorDataset(torch.from_numpy(matrix[rows[at]]), torch.from_numpy(targets[at]))
            for at in (train_at, eval_at)
        ]
        self._train, self._eval = parts[0], parts[1] if count else None
        outputs = len(self.classes) if self.classes else 1
        first = {c.name: c.values[np.flatnonzero(~c.missing())[:1]] for c in inputs}
        self._input = TableInput(encodings, target, self.classes, self.mean, self.std, first)
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
