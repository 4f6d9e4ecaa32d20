"""Regression and classification on the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from app.tasks.parts import Classification, InputsAndTargets, checked_model, one_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

DEFAULT_EVAL_FRACTION = 0.2
TIME_OF_DAY = r"\d{1,2}:\d{2}:\d{2}(\.\d+)?"


@dataclass(kw_only=True)
class TableInput(Preprocessor):
    """Rows as they are in the file: a pandas table or a list of dicts.

    Args:
        encodings: How each input column becomes numbers.
        target: The column to predict.
        classes: The names of the classes; empty for a regression.
        mean: The mean of a regression's target.
        std: The deviation of a regression's target.
        first: One value of each input column, (1,).
    """

    encodings: list[Encoding]
    target: str
    classes: list[str]
    mean: float
    std: float
    first: dict[str, Array]

    @property
    def example(self) -> DataFrame:
        """A table with one row."""
        import pandas

        columns = {name: pandas.Series(values) for name, values in self.first.items()}
        return pandas.DataFrame(columns)

    def __call__(self, rows: Any) -> tuple[Any, ...]:
        """The model's arguments: float32 (n, inputs).

        Args:
            rows: A pandas table, or a list of dicts.

        Raises:
            ValueError: An input column is missing.
        """
        import pandas

        table = pandas.DataFrame(rows)
        encoded = [encoding.encode(_values(table, encoding)) for encoding in self.encodings]
        return (torch.from_numpy(np.concatenate(encoded, 1)),)

    def read(self, output: Any) -> DataFrame:
        """Each row's most probable class, or its predicted value in the target's own units."""
        import pandas

        if self.classes:
            return classes_table(self.target, self.classes, output)
        standardised = output[:, 0].double().cpu().numpy()
        return pandas.DataFrame({self.target: standardised * self.std + self.mean})


def _values(table: DataFrame, encoding: Encoding) -> Array:
    """The values of a column as its encoding takes them: float64, or strings and None."""
    import pandas

    if encoding.name not in table:
        raise ValueError(
            f"the rows have no column {encoding.name!r}, which the model was trained on"
        )
    column = table[encoding.name]
    is_text = encoding.codes is not None
    if is_text:
        texts = [None if pandas.isna(value) else str(value) for value in column]
        return np.array(texts, dtype=object)
    if not pandas.api.types.is_numeric_dtype(column):
        column = _numeric(column)
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _numeric(column: Series) -> Series:
    """Numbers written as text as numbers; dates, times of day and durations in seconds."""
    import pandas
    from pandas.api import types

    second = pandas.Timedelta(seconds=1)
    if types.is_timedelta64_dtype(column):
        return column / second
    # pandas.to_numeric would turn dates into nanoseconds or another unit.
    if not types.is_datetime64_any_dtype(column):
        try:
            return pandas.to_numeric(column)
        except (ValueError, TypeError):
            pass
        text = column.map(str, na_action="ignore")
        if text.dropna().str.fullmatch(TIME_OF_DAY).all():
            return pandas.to_timedelta(text) / second
    epoch = pandas.Timestamp(0, tz="UTC")
    return (pandas.to_datetime(column, utc=True) - epoch) / second


class Tabular(Classification):
    """Predict one column of a table from the others, with a multi-layer perceptron.

    Numbers are standardised with the training rows' mean and deviation, a regression's target too;
    its metrics `mae`, `mse` and `rmse` are in the target's own units, and `r2` is 1 - mse /
    variance of the held-out target.

    Args:
        data: A .csv file (comma, semicolon, tab or | between its columns; .gz too), a .parquet
            file, or `diamonds` (53,940 diamonds, from the plotnine wheel).
        target: The column to predict. Rows without it are left out.
        kind: `regression`, `classification`, or `auto`: classification if the target is text.
        ignore: Columns to leave out.
        categories: Columns whose numbers are names, such as postal codes: they are taken as text.
        eval_samples: Rows held out, always the same, class by class (default: a fifth).
        model_args: Arguments of app/models/feedforward.py: hidden, activation, dropout.
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
        target_column, inputs, path = _read_columns(
            data, target, ignore=ignore or [], categories=categories or []
        )
        target = target_column.name
        rows = np.flatnonzero(~target_column.missing())
        if len(rows) < 2:
            raise UserError(
                f"{path} has {len(rows)} rows with a value in {target!r}; at least two are needed"
            )
        if not inputs:
            raise UserError(
                f"{path} has no column besides the target {target!r}; "
                "there is nothing to predict from"
            )
        self.classes, targets = _targets(target_column, rows, kind, file=path.name)

        count = held_out(len(rows), eval_samples, DEFAULT_EVAL_FRACTION)
        labels = targets if self.classes else None
        train_index, eval_index = hold_out(len(rows), count, labels)
        encodings = [Encoding.fit(column, rows[train_index]) for column in inputs]
        encoded = [
            encoding.encode(column.values)
            for encoding, column in zip(encodings, inputs, strict=True)
        ]
        features = np.concatenate(encoded, 1)
        self.mean = 0.0
        self.std = 1.0
        self.eval_variance = 0.0
        if not self.classes:
            self.mean, self.std = mean_and_deviation(targets[train_index], target)
            if count:
                self.eval_variance = float(targets[eval_index].var())
            targets = ((targets - self.mean) / self.std).astype(np.float32)

        def data_set(index: Indices) -> TensorDataset:
            return TensorDataset(
                torch.from_numpy(features[rows[index]]), torch.from_numpy(targets[index])
            )

        self._train = data_set(train_index)
        self._eval = data_set(eval_index) if count else None
        self._input = TableInput(
            encodings=encodings,
            target=target,
            classes=self.classes,
            mean=self.mean,
            std=self.std,
            first={column.name: _first_value(column) for column in inputs},
        )
        sizes = {"in_features": features.shape[1], "out_features": len(self.classes) or 1}
        self._build = checked_model(MLP, sizes, model_args)

    def loss(self, model: nn.Module, batch: InputsAndTargets) -> Tensor:
        """The mean cross entropy, or the mean squared error of the standardised target."""
        if self.classes:
            return super().loss(model, batch)
        inputs, targets = batch
        return F.mse_loss(model(inputs).float()[:, 0], targets)

    def metrics(self, model: nn.Module, batch: InputsAndTargets) -> dict[str, Tensor]:
        """Loss and accuracy; or loss, mae, mse and r2."""
        if self.classes:
            return super().metrics(model, batch)
        inputs, targets = batch
        error = model(inputs).float()[:, 0] - targets
        loss = error.square().mean()
        mse = loss * self.std**2
        metrics = {"loss": loss, "mae": error.abs().mean() * self.std, "mse": mse}
        if self.eval_variance > 0:
            metrics["r2"] = 1 - mse / self.eval_variance
        return metrics

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The root of the mean squared error over all the held-out rows."""
        return {"rmse": means["mse"] ** 0.5} if "mse" in means else {}


def _read_columns(
    data: str, target: str | None, *, ignore: Sequence[str], categories: Sequence[str]
) -> tuple[Column, list[Column], Path]:
    """The columns of a table.

    Args:
        data: `task_args.data`.
        target: The name of the column to predict.
        ignore: Columns to leave out.
        categories: Columns whose numbers are names.

    Returns:
        (the target, the other columns, the file)

    Raises:
        UserError: The table cannot be read, the target is missing, or there is no such column.
    """
    columns, path = read_table(data, text=list(categories), refuse_numbers_in_text=True)
    if target is None:
        raise UserError(
            f"task_args.target is needed: a column of {data} to predict; "
            f"it has {', '.join(columns)}"
        )
    require_column(columns, target, key="task_args.target", source=data)
    for name in ignore:
        require_column(columns, name, key="task_args.ignore", source=data)
    for name in categories:
        values = column_of(columns, name, key="task_args.categories", source=data).values
        values[[value in MISSING for value in values]] = None
    inputs = [columns[name] for name in columns if name not in (target, *ignore)]
    return columns[target], inputs, path


def _first_value(column: Column) -> Array:
    """The first value of a column that is not missing, (1,); (0,) if all are missing."""
    return column.values[np.flatnonzero(~column.missing())[:1]]


def _targets(column: Column, rows: Indices, kind: str, *, file: str) -> tuple[list[str], Array]:
    """The values or classes to predict.

    Args:
        column: The target.
        rows: The rows that have a value.
        kind: regression, classification or auto.
        file: The table's file, for messages.

    Returns:
        (names of the classes, int64 class of each row) for a classification, or ([], float64 number
        of each row) for a regression.

    Raises:
        UserError: The column does not fit the kind, or has infinite numbers.
    """
    values = column.values[rows]
    if column.numeric and not np.isfinite(values).all():
        raise UserError(f"{file}: column {column.name!r} holds infinite numbers; remove those rows")
    if kind == "regression" and not column.numeric:
        raise UserError(
            f"{file}: column {column.name!r} holds text such as {values[0]!r}; "
            "write task_args.kind=classification"
        )
    if kind == "regression" or (kind == "auto" and column.numeric):
        return [], values
    return column.classes(rows, file)
