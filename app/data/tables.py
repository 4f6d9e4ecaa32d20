"""Tables from CSV and Parquet files, and the encoding of their columns as numbers."""

from __future__ import annotations

import lzma
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.data.files import existing, package_file
from app.data.open_text import (
    BROKEN,
    THOUSANDS_BY_POINT,
    Dialect,
    file_format,
    not_utf8,
    open_utf8,
    table_dialect,
)
from app.data.order import Indices
from app.errors import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BUILT_IN = {"diamonds": ("plotnine", "data/diamonds.csv", "plotnine")}
"""Name: (package, file in it, what to install)."""
MOST_CATEGORIES = 64  # of a text column with an input each; the others share one
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "?"]
"""Cells of a CSV file that are missing values."""
EXACT = 2**53  # float64 represents all whole numbers up to here
FEWEST_STEPS = 1000
"""A column whose range is fewer steps of float64 than this has values that float64 confuses."""
NUMBER_LIKE = r"^\s*[-+(]?\s*[$€£¥]?\s*\d[\d.,'’_/:\s\x{a0}\x{202f}TZ+-]*\s*[%$€£¥]?\)?\s*$"
"""RE2 of a possible number or date, with currency and percent signs, and digits in groups."""
GROUPED_NUMBER = (
    r"^\s*[-+]?\s*[$€£¥]?\s*(\d{1,3}([.,'’_\s\x{a0}\x{202f}]\d{3})+|\d+)"
    r"([.,]\d+)?(\s*[%$€£¥])?\s*$"
)
"""RE2 of what is almost certainly a number, with currency and percent signs and grouped digits."""
PLAIN_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)\s*$"
"""RE2 of a number as Arrow reads it from a CSV file; in a Parquet file's text column it is text."""
LARGEST = float(np.finfo(np.float32).max)
MOSTLY = 0.9  # the share of values like numbers from which a column is meant to be numbers
ROW_SHOWN = 60  # characters of a wrong row that a message shows


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: The column's name.
        values: (n,), float64 with NaN for missing values, or text (object) with None.
    """

    name: str
    values: Array

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, not text."""
        return self.values.dtype.kind == "f"

    def missing(self) -> npt.NDArray[np.bool_]:
        """Whether each value is missing, (n,)."""
        if self.numeric:
            return np.isnan(self.values)
        return np.array([value is None for value in self.values], dtype=bool)

    def classes(self, rows: Indices, source: str) -> tuple[list[str], npt.NDArray[np.int64]]:
        """The classes of a column of labels.

        Args:
            rows: The numbers of rows, none of which has a missing value.
            source: The table, for messages.

        Returns:
            (the names of the classes in order, the class of each row)

        Raises:
            UserError: The values are not classes, or all the same.
        """
        values = self.values[rows]
        if self.numeric and (values != np.floor(values)).any():
            raise UserError(
                f"{source}: column {self.name!r} holds fractions; name a column of classes"
            )
        if self.numeric and np.abs(values).max() >= EXACT:
            raise UserError(
                f"{source}: column {self.name!r} holds numbers above 2**53, "
                "too large to tell classes apart; write names that are text"
            )
        comparable = values if self.numeric else values.astype(str)
        distinct, codes = np.unique(comparable, return_inverse=True)
        if len(distinct) < 2:
            raise UserError(
                f"{source}: column {self.name!r} has one value only, {distinct[0]}; "
                "give at least two classes"
            )
        names = [str(int(each)) if self.numeric else str(each) for each in distinct]
        return names, codes.astype(np.int64)


class Table(Mapping[str, Column]):
    """The columns of a file by name, each converted when it is first used.

    A column that cannot be converted is an error only if it is used.

    Args:
        table: The file's content, from Arrow.
        path: The file, for messages.
        text: Names of columns to read as text, even if they look like numbers.
        refuse_numbers_in_text: See `read_table`.
        decimal_point: The decimal point of the file's numbers.
    """

    def __init__(
        self,
        table: pa.Table,
        *,
        path: Path,
        text: Collection[str],
        refuse_numbers_in_text: bool,
        decimal_point: str,
    ) -> None:
        self._unread = {name: table.column(name) for name in table.column_names}
        self._names = list(table.column_names)
        self._columns: dict[str, Column] = {}
        self._path = path
        self._text = text
        self._refuse_numbers_in_text = refuse_numbers_in_text
        self._decimal_point = decimal_point

    def __getitem__(self, name: str) -> Column:
        """Convert a column.

        Raises:
            UserError: The column is nested, binary or of another type that is not numbers, dates or
                text.
        """
        if name not in self._columns:
            place = f"{self._path}: column {name!r}"
            chunks = self._unread[name]
            if name in self._text:
                values = _text_values(chunks, self._path, place)
            else:
                values = _values(
                    chunks, path=self._path, place=place, decimal_point=self._decimal_point
                )
                if self._refuse_numbers_in_text and values.dtype == object:
                    _require_text(_plain(chunks), place)
            self._columns[name] = Column(name, values)
            del self._unread[name]
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:  # Mapping's method would convert the column
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)


def read_table(
    data: str, *, text: Collection[str] = (), refuse_numbers_in_text: bool = False
) -> tuple[Table, Path]:
    """Read a table.

    Numbers, booleans (0 and 1), dates, times and durations (seconds) become numeric columns, and
    strings become text. The first rows of a CSV file decide its separator (comma, semicolon, tab or
    |) and whether it has decimal commas.

    Args:
        data: The name of a built-in set, or the path of a .csv or .tsv file, which may be
            compressed, or of a .parquet file.
        text: Names of columns to read as text, even if they look like numbers.
        refuse_numbers_in_text: Raise UserError for a column of numbers or dates that would become
            text, because they are in a form that is not supported or there are a few words.

    Returns:
        (the columns by name, the file)

    Raises:
        UserError: The file cannot be read as a table.
    """
    if data in BUILT_IN:
        package, file, install = BUILT_IN[data]
        path = package_file(package, file, data=data, install=install)
    else:
        path = existing(data, "task_args.data")
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes[-1:] in ([".parquet"], [".pq"]):
        table = _read_parquet(path)
        decimal_point = "."
    elif ".csv" in suffixes or ".tsv" in suffixes:
        table, decimal_point = _read_csv(path, text)
    else:
        raise UserError(
            f"task_args.data: {path} is not a table; "
            f"give {', '.join(BUILT_IN)}, a .csv or a .parquet file"
        )
    if table.num_rows == 0:
        raise UserError(f"{path} has no rows; give a table with some")
    names = table.column_names
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"{path} has more than one column {duplicate!r}; rename one")
    columns = Table(
        table,
        path=path,
        text=text,
        refuse_numbers_in_text=refuse_numbers_in_text,
        decimal_point=decimal_point,
    )
    return columns, path


def column_of(columns: Mapping[str, Column], name: str, *, key: str, source: str) -> Column:
    """The column with this name; see `require_column`."""
    require_column(columns, name, key=key, source=source)
    return columns[name]


def require_column(columns: Mapping[str, Column], name: str, *, key: str, source: str) -> None:
    """Check that there is a column with this name.

    Args:
        columns: The columns of a table.
        name: The name to look for.
        key: The configuration key that holds the name.
        source: The table, for messages.

    Raises:
        UserError: There is no such column.
    """
    if name not in columns:
        raise UserError(
            f"{key}: {source} has no column {name!r}{nearest(name, columns)}; "
            f"it has {', '.join(columns)}"
        )


# --- files ----------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _read_csv(path: Path, text: Collection[str]) -> tuple[pa.Table, str]:
    """(the table, its decimal point)"""
    import pyarrow
    from pyarrow import csv

    dialect = table_dialect(path)
    wrong_rows: list[Any] = []

    def on_wrong_row(row: Any) -> str:
        if not row.text.strip():
            return "skip"
        wrong_rows.append(row)
        return "error"

    try:
        with _csv_source(path) as source:
            table = csv.read_csv(
                source,
                read_options=csv.ReadOptions(skip_rows=dialect.skip_rows),
                parse_options=csv.ParseOptions(
                    delimiter=dialect.separator,
                    newlines_in_values=True,
                    invalid_row_handler=on_wrong_row,
                ),
                convert_options=csv.ConvertOptions(
                    null_values=MISSING,
                    decimal_point=dialect.decimal_point,
                    column_types={name: pyarrow.string() for name in text},
                ),
            )
        assert table.column_names is not None  # Arrow decodes the names here
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except (pyarrow.ArrowException, *BROKEN) as error:
        if "invalid UTF8" in str(error):
            raise not_utf8(path) from error
        if wrong_rows:
            raise _ragged(path, wrong_rows[0], dialect) from error
        raise _unreadable(path, "CSV", error) from error
    if table.num_rows and _ends_in_quotes(path, table):
        raise UserError(
            f'{path}: a cell that begins with " never ends, so that the rest of the file is in it; '
            'write "" for a quotation mark, and one at the end of the cell'
        )
    for number, field in enumerate(table.schema):
        if field.name not in text and pyarrow.types.is_string(field.type):
            table = table.set_column(number, field.name, _without_missing(table.column(number)))
    return table, dialect.decimal_point


def _csv_source(path: Path) -> Any:
    """The file's text in UTF-8 for Arrow, decompressed as it is read."""
    import pyarrow

    form = file_format(path)
    if form.encoding not in ("utf-8", "utf-8-sig"):
        with open_utf8(path) as file:
            return pyarrow.BufferReader(file.read())
    if form.compression == "xz":
        return pyarrow.PythonFile(lzma.open(path), mode="r")
    if form.compression:
        return pyarrow.input_stream(str(path), compression=form.compression)
    return pyarrow.OSFile(str(path))


def _ragged(path: Path, row: Any, dialect: Dialect) -> UserError:
    start = row.text[:ROW_SHOWN].splitlines()[0]
    return UserError(
        f"{path} cannot be read as CSV: the row {start!r} has {row.actual_columns} columns, not "
        f"{row.expected_columns} as the first; they are separated by {dialect.separator!r}"
    )


def _unreadable(path: Path, kind: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} cannot be read as {kind}: {reason[:200]}")


def _ends_in_quotes(path: Path, table: pa.Table) -> bool:
    """Whether the last cell begins with a quotation mark that the file does not close.

    Arrow ends such a cell at the end of the file. If the cell is not in the last column, the row
    has too few columns, which is an error of its own.
    """
    cell = table.column(table.num_columns - 1)[table.num_rows - 1].as_py()
    if isinstance(cell, str):
        has_line_end = "\r" in cell or "\n" in cell
    else:
        has_line_end = isinstance(cell, bytes) and (b"\r" in cell or b"\n" in cell)
    if not has_line_end:
        return False
    end = b""
    with open_utf8(path) as file:
        while chunk := file.read(1 << 20):
            end = (end + chunk)[-(1 << 16) :]
    return not end.rstrip().endswith(b'"')


# --- columns --------------------------------------------------------------------------------------


def _without_missing(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa
    from pyarrow import compute

    missing = compute.is_in(column, value_set=pa.array(MISSING))
    return compute.if_else(missing, pa.scalar(None, column.type), column)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without dictionaries and extension types."""
    import pyarrow as pa
    from pyarrow import types

    while True:
        if isinstance(column.type, pa.BaseExtensionType):
            storage = [chunk.storage for chunk in column.chunks]
            column = pa.chunked_array(storage, column.type.storage_type)
        elif types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        elif types.is_string_view(column.type):
            column = column.cast(pa.string())
        else:
            return column


def _values(column: pa.ChunkedArray, *, path: Path, place: str, decimal_point: str) -> Array:
    """Numbers, or text if the column has no type of numbers; see `Column`."""
    import pyarrow as pa
    from pyarrow import types

    column = _plain(column)
    kind = column.type
    if types.is_date(kind) or types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return np.asarray(column.to_numpy(), dtype=np.float64) / 1e6
    if types.is_time(kind) or types.is_duration(kind):
        ticks = column.cast(pa.int32() if types.is_time32(kind) else pa.int64())
        ticks_per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        return np.asarray(ticks.to_numpy(), dtype=np.float64) / ticks_per_second
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if is_number or types.is_boolean(kind):
        numbers = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
        _require_distinguishable(column, numbers, place)
        return numbers
    if types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    grouped = rf"^\s*({THOUSANDS_BY_POINT.pattern}(,\d+)?|\d+(,\d+)?)\s*$"
    if decimal_point == "," and _all_match(column, grouped):
        return _without_groups(column)
    return _strings(column, path, place)


def _text_values(column: pa.ChunkedArray, path: Path, place: str) -> Array:
    """The column as text, with None for empty cells; cells of a CSV file stay as they are."""
    import pyarrow as pa
    from pyarrow import types

    column = _plain(column)
    kind = column.type
    if not (types.is_nested(kind) or _is_binary(kind) or types.is_large_string(kind)):
        column = column.cast(pa.string())
    values = _strings(column, path, place)
    values[values == ""] = None
    return values


def _is_binary(kind: pa.DataType) -> bool:
    from pyarrow import types

    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _strings(column: pa.ChunkedArray, path: Path, place: str) -> Array:
    """Text with None for missing values; raises UserError for a column of another type."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if _is_binary(kind) and ".parquet" not in path.suffixes and ".pq" not in path.suffixes:
        raise not_utf8(path)  # Arrow reads such a column of a CSV file as binary
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            return np.array(column.to_numpy(), dtype=object)
        except (UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{place} holds text that is not UTF-8: write the file again"
            ) from error
    if types.is_nested(kind):
        form = "nested"
    elif _is_binary(kind):
        form = "binary"
    else:
        form = "of a type without numbers or text"
    shown = str(kind).replace("\n", " ")[:ROW_SHOWN]
    raise UserError(
        f"{place} is {form} ({shown}): convert it to columns of numbers, dates or text, or, with "
        "the task tabular, leave it out by task_args.ignore"
    )


def _require_distinguishable(column: pa.ChunkedArray, numbers: Array, place: str) -> None:
    """Raise UserError if float64 cannot distinguish large numbers such as counts of nanoseconds."""
    from pyarrow import compute, types

    finite = numbers[np.isfinite(numbers)]
    largest = float(np.abs(finite).max()) if len(finite) else 0.0
    if largest < EXACT:
        return
    span = float(finite.max()) - float(finite.min())
    if types.is_integer(column.type):
        limits = compute.min_max(column).as_py()
        span = float(limits["max"] - limits["min"])
    if 0 < span < FEWEST_STEPS * math.ulp(largest):
        raise UserError(
            f"{place} holds numbers near {largest:.0f}, which 64-bit floating point cannot tell "
            "apart: subtract a constant from them, or leave the column out by task_args.ignore"
        )


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    from pyarrow import compute

    matches = compute.match_substring_regex(column, pattern)
    return column.null_count < len(column) and bool(compute.all(matches).as_py())


def _without_groups(column: pa.ChunkedArray) -> Array:
    """The numbers in texts such as 1.234,5."""
    import pyarrow as pa
    from pyarrow import compute

    ungrouped = compute.replace_substring(column, ".", "")
    plain = compute.utf8_trim_whitespace(compute.replace_substring(ungrouped, ",", "."))
    return np.asarray(plain.cast(pa.float64()).to_numpy(), dtype=np.float64)


def _require_text(column: pa.ChunkedArray, place: str) -> None:
    """Raise UserError if a text column is numbers in an unsupported form, or with a few words.

    As text, each number would be a category.
    """
    from pyarrow import compute, types

    present = column.drop_null()
    if types.is_null(column.type) or len(present) == 0 or _all_match(present, PLAIN_NUMBER):
        return
    advice = (
        "write numbers as 1234.5, dates as 2024-12-31 and missing values as NA; "
        "or task_args.categories, which names columns of categories, "
        "or task_args.ignore, which leaves columns out"
    )
    if _all_match(present, GROUPED_NUMBER):
        is_plain = compute.match_substring_regex(present, PLAIN_NUMBER)
        unsupported = present.filter(compute.invert(is_plain))[0]
        raise UserError(
            f"{place} holds numbers written as {_shown(unsupported)}, "
            f"which would be read as text; {advice}"
        )
    matches = compute.match_substring_regex(present, NUMBER_LIKE)
    share = compute.mean(matches).as_py()
    if share < MOSTLY or compute.count_distinct(present).as_py() <= MOST_CATEGORIES:
        return
    if share == 1:
        raise UserError(
            f"{place} holds numbers or dates written as {_shown(present[0])}, "
            f"which would be read as text; {advice}"
        )
    word = present.filter(compute.invert(matches))[0]
    number = present.filter(matches)[0]
    raise UserError(
        f"{place} holds numbers such as {_shown(number)}, but also {_shown(word)}; {advice}"
    )


def _shown(value: pa.Scalar) -> str:
    return repr(value.as_py()[:ROW_SHOWN])


@dataclass(frozen=True)
class Encoding:
    """The encoding of a column as numbers, with statistics of the training rows only.

    A numeric column becomes one number with mean 0 and deviation 1, in which missing and infinite
    values are 0. With `other` a second number is 1 for those values and 0 otherwise.

    A text column becomes one number for each of the most frequent `MOST_CATEGORIES` categories of
    the training rows, which is 1 for that category and 0 otherwise. With `other` one more number is
    1 for rarer, unknown and missing values; without it these are all zeros.

    Args:
        name: The column's name.
        other: Whether the training rows have missing values or rarer categories.
        mean: The mean of a numeric column.
        std: The deviation of a numeric column.
        codes: The number of each category of a text column.
    """

    name: str
    other: bool
    mean: float = 0.0
    std: float = 1.0
    codes: dict[str, int] | None = None

    @staticmethod
    def fit(column: Column, train: Indices) -> Encoding:
        """Compute the statistics of a column.

        Args:
            column: The column.
            train: The numbers of the training rows.

        Raises:
            UserError: The numbers are too large for a mean and deviation in float64.
        """
        values = column.values[train]
        if not column.numeric:
            counts = Counter(value for value in values if value is not None)
            frequent = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_CATEGORIES]
            codes = {name: code for code, name in enumerate(sorted(frequent))}
            has_missing = sum(counts.values()) < len(train)
            has_rare = len(frequent) < len(counts)
            return Encoding(column.name, other=has_missing or has_rare, codes=codes)
        finite = values[np.isfinite(values)]
        mean, std = mean_and_deviation(finite, column.name)
        return Encoding(column.name, other=len(finite) < len(train), mean=mean, std=std)

    def encode(self, values: Array) -> Floats:
        """Encode values, (n,) as in a `Column`, as (n, width)."""
        if self.codes is not None:
            width = len(self.codes) + 1
            codes = [self.codes.get(value, width - 1) for value in values]
            one_hot = np.eye(width, dtype=np.float32)[codes]
            return one_hot if self.other else one_hot[:, :-1]
        is_finite = np.isfinite(values)
        centered = np.where(is_finite, values, 0.0) - self.mean
        scaled = np.where(is_finite, centered / self.std, 0.0)
        scaled = np.clip(scaled, -LARGEST, LARGEST)  # no finite number becomes infinite in float32
        columns = [scaled, ~is_finite] if self.other else [scaled]
        return np.stack(columns, axis=1).astype(np.float32)


def mean_and_deviation(values: Array, name: str) -> tuple[float, float]:
    """The mean and deviation of finite numbers.

    Args:
        values: The numbers.
        name: Their column, for messages.

    Returns:
        (mean, deviation); the deviation is 1 if the numbers are all the same, or there are none.

    Raises:
        UserError: The numbers are too large for a mean and deviation in float64.
    """
    if len(values) == 0:
        return 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        deviation = float(values.std())
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise UserError(
            f"column {name!r} holds numbers as large as {np.abs(values).max():g}, "
            "whose deviation is not finite: write them in a larger unit, or take their logarithm"
        )
    # Rounding gives a column of 0.1 a deviation of 1e-17; dividing other rows by it would be wrong.
    is_constant = deviation == 0 or values.min() == values.max()
    return mean, 1.0 if is_constant else deviation
