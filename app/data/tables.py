"""Tables from CSV and Parquet, and their columns made into numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.data.files import existing, package_file
from app.data.order import Indices
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BUILT_IN = {"diamonds": ("plotnine", "data/diamonds.csv", "plotnine")}
"""Name: (package, file in it, what to install)."""

MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "?"]
"""What stands for a missing value in a CSV file."""


@dataclass(frozen=True)
class Column:
    """`values` (n,): float64 with NaN where missing, or text (object) with None where missing."""

    name: str
    values: Array

    @property
    def numeric(self) -> bool:
        return self.values.dtype.kind == "f"

    def missing(self) -> npt.NDArray[np.bool_]:
        """(n,): where there is no value."""
        if self.numeric:
            return np.isnan(self.values)
        return np.array([value is None for value in self.values], dtype=bool)


def read_table(data: str) -> tuple[dict[str, Column], Path]:
    """(columns by name, the file): a built-in set, a .csv (.gz too) or a .parquet file.

    Numbers, booleans (0 and 1) and dates (seconds) are numeric columns, everything else is text.
    """
    if data in BUILT_IN:
        package, file, install = BUILT_IN[data]
        path = package_file(package, file, data=data, install=install)
    else:
        path = existing(data, "task_args.data")
    suffixes = path.suffixes[-2:]
    if ".csv" in suffixes:
        table = _read_csv(path)
    elif path.suffix in (".parquet", ".pq"):
        table = _read_parquet(path)
    else:
        raise UserError(
            f"task_args.data: {path} is no table that is known; give {', '.join(BUILT_IN)}, a .csv or a .parquet file."
        )
    if table.num_rows == 0:
        raise UserError(f"{path} has no rows; give a table with some.")
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has a column whose name is not UTF-8 ({error}); write the file as UTF-8.") from error
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UserError(f"{path} has more than one column {double!r}; rename one.")
    return {name: Column(name, _values(table.column(name))) for name in names}, path


def _read_csv(path: Path) -> pa.Table:
    pyarrow = _pyarrow()
    from pyarrow import csv

    options = csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
    try:
        return csv.read_csv(path, convert_options=options)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as CSV: {str(error).splitlines()[0].rstrip('.')}.") from error


def _read_parquet(path: Path) -> pa.Table:
    pyarrow = _pyarrow()
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}.") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError("The tabular task needs the package pyarrow; run pip install pyarrow.") from error
    return pyarrow


def _values(column: pa.ChunkedArray) -> Array:
    import pyarrow as pa
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if types.is_date(kind) or types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return np.asarray(column.to_numpy(), dtype=np.float64) / 1e6
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    values = np.empty(len(column), dtype=object)
    values[:] = [None if value is None else str(value) for value in column.to_pylist()]
    return values


class Encoder:
    """Columns to one matrix of inputs, with statistics of the training rows only.

    A numeric column becomes one number of mean 0 and deviation 1, missing (and infinite) values 0, and, if any is
    missing in the training rows, a second number that is 1 where it is. A text column becomes one number per
    category of the training rows (1 where it is this one), of the most frequent `max_categories`; others, unknown
    and missing values share one more where there are any.
    """

    def __init__(self, columns: Sequence[Column], train: Indices, max_categories: int) -> None:
        self.columns = list(columns)
        self._fitted = [
            _fit_numeric(column.values[train]) if column.numeric else _fit_text(column.values[train], max_categories)
            for column in columns
        ]

    @property
    def width(self) -> int:
        """Inputs per row."""
        return sum(fitted.width for fitted in self._fitted)

    def encode(self, rows: Indices) -> Floats:
        """(len(rows), width)."""
        encoded = np.zeros((len(rows), self.width), dtype=np.float32)
        begin = 0
        for column, fitted in zip(self.columns, self._fitted, strict=True):
            fitted.write(column.values[rows], encoded[:, begin : begin + fitted.width])
            begin += fitted.width
        return encoded


@dataclass(frozen=True)
class _Numeric:
    mean: float
    std: float
    marks_missing: bool

    @property
    def width(self) -> int:
        return 1 + self.marks_missing

    def write(self, values: Array, out: Floats) -> None:
        present = np.isfinite(values)
        out[present, 0] = (values[present] - self.mean) / self.std
        if self.marks_missing:
            out[:, 1] = ~present


@dataclass(frozen=True)
class _Text:
    codes: dict[str, int]
    has_others: bool

    @property
    def width(self) -> int:
        return len(self.codes) + self.has_others

    def write(self, values: Array, out: Floats) -> None:
        others = len(self.codes)
        codes = np.array([self.codes.get(value, others) for value in values], dtype=np.int64)
        # Without a number for others, an unknown category is all zeros.
        known = np.flatnonzero(codes < self.width)
        out[known, codes[known]] = 1


def _fit_numeric(values: Array) -> _Numeric:
    present = values[np.isfinite(values)]
    mean, std = (float(present.mean()), float(present.std())) if len(present) else (0.0, 1.0)
    return _Numeric(mean, std if std > 0 else 1.0, len(present) < len(values))


def _fit_text(values: Array, max_categories: int) -> _Text:
    present = [value for value in values if value is not None]
    names, counts = np.unique(np.array(present, dtype=str), return_counts=True)
    most = names[np.argsort(-counts, kind="stable")][:max_categories]
    codes = {str(name): code for code, name in enumerate(sorted(most))}
    return _Text(codes, len(present) < len(values) or len(most) < len(names))
