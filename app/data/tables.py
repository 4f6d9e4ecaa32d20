"""Tables from CSV and Parquet, and their columns made into numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.data.files import existing, package_file
from app.data.order import Indices
from app.errors import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BUILT_IN = {"diamonds": ("plotnine", "data/diamonds.csv", "plotnine")}  # name: (package, file in it, what to install)
MOST_CATEGORIES = 64  # of a text column, that get an input of their own
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "?"]  # what stands for a missing value in a CSV file


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

    def classes(self, rows: Indices, source: str) -> tuple[list[str], npt.NDArray[np.int64]]:
        """(names of the classes in order, class of each of the rows, none of which is missing)."""
        values = self.values[rows]
        if self.numeric and (values != np.floor(values)).any():
            raise UserError(f"{source}: column {self.name!r} holds fractions; name a column of classes")
        found, codes = np.unique(values if self.numeric else values.astype(str), return_inverse=True)
        if len(found) < 2:
            raise UserError(f"{source}: column {self.name!r} has one value only, {found[0]}; give at least two classes")
        return [f"{each:g}" if self.numeric else str(each) for each in found], codes.astype(np.int64)


def read_table(data: str) -> tuple[dict[str, Column], Path]:
    """(columns by name, the file): a built-in set, a .csv (.gz too) or a .parquet file.

    Numbers, booleans (0 and 1) and dates (seconds) are numeric columns, everything else is text.
    """
    if data in BUILT_IN:
        package, file, install = BUILT_IN[data]
        path = package_file(package, file, data=data, install=install)
    else:
        path = existing(data, "task_args.data")
    kind = "CSV" if ".csv" in path.suffixes[-2:] else "Parquet" if path.suffix in (".parquet", ".pq") else ""
    if not kind:
        raise UserError(f"task_args.data: {path} is not a table; give {', '.join(BUILT_IN)}, a .csv or a .parquet file")
    table, names = _read(path, kind)
    if table.num_rows == 0:
        raise UserError(f"{path} has no rows; give a table with some")
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UserError(f"{path} has more than one column {double!r}; rename one")
    return {name: Column(name, _values(table.column(name))) for name in names}, path


def column_of(columns: dict[str, Column], name: str, key: str, source: str) -> Column:
    """The column called `name`; `key` is the configuration key that names it. Raises UserError."""
    if name not in columns:
        near, known = nearest(name, columns), ", ".join(columns)
        raise UserError(f"{key}: {source} has no column {name!r}{near}; it has {known}")
    return columns[name]


def _read(path: Path, kind: str) -> tuple[pa.Table, list[str]]:
    import pyarrow
    from pyarrow import csv, parquet

    try:
        options = csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
        table = parquet.read_table(path) if kind == "Parquet" else csv.read_csv(path, convert_options=options)
        return table, table.column_names
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8, as CSV is read: convert it, for instance with iconv -t utf-8") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0].rstrip('.')}") from error


def _values(column: pa.ChunkedArray) -> Array:
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if types.is_date(kind) or types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return np.asarray(column.to_numpy(), dtype=np.float64) / 1e6
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    values = np.empty(len(column), dtype=object)
    values[:] = [None if value is None else str(value) for value in column.to_pylist()]
    return values


@dataclass(frozen=True)
class Encoding:
    """How a column becomes numbers, with statistics of the training rows only.

    A numeric column becomes one number of mean 0 and deviation 1, missing (and infinite) values 0, and, if any is
    missing in the training rows (`other`), a second number that is 1 where it is. A text column becomes one number per
    category of the training rows (1 where it is this one), of the most frequent `MOST_CATEGORIES`; others, unknown
    and missing values share one more where there are any (`other`), and are all zeros where not.
    """

    name: str
    other: bool
    mean: float = 0.0
    std: float = 1.0
    codes: dict[str, int] | None = None  # of a text column

    @staticmethod
    def fit(column: Column, train: Indices) -> Encoding:
        values = column.values[train]
        if not column.numeric:
            counts = Counter(value for value in values if value is not None)
            frequent = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_CATEGORIES]
            codes = {name: code for code, name in enumerate(sorted(frequent))}
            return Encoding(column.name, sum(counts.values()) < len(train) or len(frequent) < len(counts), codes=codes)
        present = values[np.isfinite(values)]
        mean, std = (float(present.mean()), float(present.std())) if len(present) else (0.0, 1.0)
        return Encoding(column.name, len(present) < len(train), mean, std if std > 0 else 1.0)

    def encode(self, values: Array) -> Floats:
        """(n,) as in a `Column` → (n, width)."""
        if self.codes is not None:
            width = len(self.codes) + 1
            one_hot = np.eye(width, dtype=np.float32)[[self.codes.get(value, width - 1) for value in values]]
            return one_hot if self.other else one_hot[:, :-1]
        finite = np.isfinite(values)
        scaled = np.where(finite, (np.where(finite, values, 0.0) - self.mean) / self.std, 0.0)
        return np.stack([scaled, ~finite] if self.other else [scaled], axis=1).astype(np.float32)
