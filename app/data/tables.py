"""Tables from CSV and Parquet, and their columns made into numbers."""

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

BUILT_IN = {"diamonds": ("plotnine", "data/diamonds.csv", "plotnine")}  # name: (package, file in it, what to install)
MOST_CATEGORIES = 64  # of a text column, that get an input of their own
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "?"]  # what stands for a missing value in a CSV file
EXACT = 2**53  # whole numbers up to here are what they are in float64
FEWEST_STEPS = 1000  # of float64 between the least and the largest value of a column, for its values to be told apart
NUMBER_LIKE = r"^\s*[-+(]?\s*[$€£¥]?\s*\d[\d.,'’_/:\s\x{a0}\x{202f}TZ+-]*\s*[%$€£¥]?\)?\s*$"
"""RE2 of what may be meant as a number or a date, with currency and percent signs, and digits in groups."""
GROUPED_NUMBER = r"^\s*[-+]?\s*[$€£¥]?\s*(\d{1,3}([.,'’_\s\x{a0}\x{202f}]\d{3})+|\d+)([.,]\d+)?(\s*[%$€£¥])?\s*$"
"""RE2 of what can hardly be anything but a number."""
PLAIN_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)\s*$"
"""RE2 of what a CSV file's column would be numbers of; a Parquet file's, which says that it is text, is text."""
LARGEST = float(np.finfo(np.float32).max)
MOSTLY = 0.9  # of a column's values look like numbers: then it is a column of numbers
ROW_SHOWN = 60  # characters of a wrong row that a message shows


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
        if self.numeric and np.abs(values).max() >= EXACT:
            raise UserError(
                f"{source}: column {self.name!r} holds numbers above 2**53, too large to tell classes apart; write "
                "names that are text"
            )
        distinct, codes = np.unique(values if self.numeric else values.astype(str), return_inverse=True)
        if len(distinct) < 2:
            raise UserError(
                f"{source}: column {self.name!r} has one value only, {distinct[0]}; give at least two classes"
            )
        return [str(int(each)) if self.numeric else str(each) for each in distinct], codes.astype(np.int64)


class Table(Mapping[str, Column]):
    """The columns of a file by name, each converted when it is first asked for.

    So a column that cannot be used does no harm to those who leave it out.

    Args:
        table: As Arrow has read it.
        path: The file, for messages.
        text: Names of columns that are text whatever they look like.
        refuse_numbers_in_text: See `read_table`.
        decimal_point: Of the file's numbers.
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
        """The column. Raises UserError: it is nested, binary or otherwise neither numbers, dates nor text."""
        if name not in self._columns:
            place = f"{self._path}: column {name!r}"
            chunks = self._unread[name]
            if name in self._text:
                values = _text_values(chunks, self._path, place)
            else:
                values = _values(chunks, self._path, place, self._decimal_point)
                if self._refuse_numbers_in_text and values.dtype == object:
                    _require_text(_plain(chunks), place)
            self._columns[name] = Column(name, values)
            del self._unread[name]
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:  # Mapping's own would convert the column
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)


def read_table(data: str, *, text: Collection[str] = (), refuse_numbers_in_text: bool = False) -> tuple[Table, Path]:
    """A built-in set, a .csv or .tsv file (compressed too), or a .parquet file.

    Numbers, booleans (0 and 1), dates, times and durations (seconds) are numeric columns, strings are text. A CSV
    file's separator (comma, semicolon, tab or |) and decimal comma are told from its first rows.

    Args:
        data: The built-in set's name or the file's path.
        text: Names of columns that are taken as text, as they are written; of the others, what looks like numbers is
            numbers.
        refuse_numbers_in_text: Raise for a column of numbers or dates in a form that is not read, or with a few words
            among them, which would otherwise be text.

    Returns:
        The columns by name, and the file.

    Raises:
        UserError: The file cannot be read, or not as a table; a column that is asked for cannot be used.
    """
    if data in BUILT_IN:
        package, file, install = BUILT_IN[data]
        path = package_file(package, file, data=data, install=install)
    else:
        path = existing(data, "task_args.data")
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes[-1:] in ([".parquet"], [".pq"]):
        table, decimal_point = _read_parquet(path), "."
    elif ".csv" in suffixes or ".tsv" in suffixes:
        table, decimal_point = _read_csv(path, text)
    else:
        raise UserError(f"task_args.data: {path} is not a table; give {', '.join(BUILT_IN)}, a .csv or a .parquet file")
    if table.num_rows == 0:
        raise UserError(f"{path} has no rows; give a table with some")
    names = table.column_names
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UserError(f"{path} has more than one column {double!r}; rename one")
    columns = Table(
        table,
        path=path,
        text=text,
        refuse_numbers_in_text=refuse_numbers_in_text,
        decimal_point=decimal_point,
    )
    return columns, path


def column_of(columns: Mapping[str, Column], name: str, key: str, source: str) -> Column:
    """The column called `name`; `key` is the configuration key that names it. Raises UserError."""
    require_column(columns, name, key, source)
    return columns[name]


def require_column(columns: Mapping[str, Column], name: str, key: str, source: str) -> None:
    """Raise UserError if there is no column called `name`; see `column_of`."""
    if name not in columns:
        near, known = nearest(name, columns), ", ".join(columns)
        raise UserError(f"{key}: {source} has no column {name!r}{near}; it has {known}")


# --- files ----------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _read_csv(path: Path, text: Collection[str]) -> tuple[pa.Table, str]:
    """The table, and what its numbers have for a decimal point."""
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
        assert table.column_names is not None  # decodes them
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
            f'{path}: a cell that begins with " never ends, so that the rest of the file is in it; write "" for a '
            "quotation mark, and one at the cell's end"
        )
    for number, field in enumerate(table.schema):
        if field.name not in text and pyarrow.types.is_string(field.type):
            table = table.set_column(number, field.name, _without_missing(table.column(number)))
    return table, dialect.decimal_point


def _csv_source(path: Path) -> Any:
    """What Arrow reads: bytes of UTF-8, decompressed as they are read."""
    import pyarrow

    known = file_format(path)
    if known.encoding not in ("utf-8", "utf-8-sig"):
        with open_utf8(path) as file:
            return pyarrow.BufferReader(file.read())
    if known.compression == "xz":
        return pyarrow.PythonFile(lzma.open(path), mode="r")
    if known.compression:
        return pyarrow.input_stream(str(path), compression=known.compression)
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

    Arrow takes the end of the file for the end of such a cell. One that is not the last of its row lacks the columns
    after it, which is an error already.
    """
    last = table.column(table.num_columns - 1)[table.num_rows - 1].as_py()
    if not isinstance(last, (str, bytes)) or not (set(last) & set("\r\n" if isinstance(last, str) else b"\r\n")):
        return False
    with open_utf8(path) as file:
        end = b""
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
    """Without dictionaries and extension types."""
    import pyarrow as pa
    from pyarrow import types

    while True:
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        elif types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        elif types.is_string_view(column.type):
            column = column.cast(pa.string())
        else:
            return column


def _values(column: pa.ChunkedArray, path: Path, place: str, decimal_point: str) -> Array:
    import pyarrow as pa
    from pyarrow import types

    column = _plain(column)
    kind = column.type
    if types.is_date(kind) or types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return np.asarray(column.to_numpy(), dtype=np.float64) / 1e6
    if types.is_time(kind) or types.is_duration(kind):
        ticks = column.cast(pa.int32() if types.is_time32(kind) else pa.int64())
        return np.asarray(ticks.to_numpy(), dtype=np.float64) / {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        numbers = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
        _require_distinguishable(column, numbers, place)
        return numbers
    if types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    if decimal_point == "," and _all_match(column, f"^\\s*({THOUSANDS_BY_POINT.pattern}(,\\d+)?|\\d+(,\\d+)?)\\s*$"):
        return _without_groups(column)
    return _strings(column, path, place)


def _text_values(column: pa.ChunkedArray, path: Path, place: str) -> Array:
    """As text, numbers and dates too; in a CSV file as they are written, with None for empty cells."""
    import pyarrow as pa
    from pyarrow import types

    column = _plain(column)
    if not (types.is_nested(column.type) or _is_binary(column.type) or types.is_large_string(column.type)):
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
    """Text, None where missing. Raises UserError for anything else."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if _is_binary(kind) and ".parquet" not in path.suffixes and ".pq" not in path.suffixes:
        raise not_utf8(path)  # Arrow reads a CSV file's column of such bytes as binary
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            return np.array(column.to_numpy(), dtype=object)
        except (UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise UserError(f"{place} holds text that is not UTF-8: write the file again") from error
    form = "nested" if types.is_nested(kind) else "binary" if _is_binary(kind) else "of a type without numbers or text"
    shown = str(kind).replace("\n", " ")[:ROW_SHOWN]
    raise UserError(
        f"{place} is {form} ({shown}): make columns of numbers, dates or text of it, or, with the task tabular, "
        "leave it out by task_args.ignore"
    )


def _require_distinguishable(column: pa.ChunkedArray, numbers: Array, place: str) -> None:
    """Raise UserError if large numbers, such as counts of nanoseconds, become (nearly) all the same in float64."""
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
            f"{place} holds numbers near {largest:.0f}, which 64-bit floating point cannot tell apart: subtract a "
            "constant from them, or leave the column out by task_args.ignore"
        )


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    from pyarrow import compute

    matches = compute.match_substring_regex(column, pattern)
    return column.null_count < len(column) and bool(compute.all(matches).as_py())


def _without_groups(column: pa.ChunkedArray) -> Array:
    """Numbers such as 1.234,5."""
    import pyarrow as pa
    from pyarrow import compute

    digits = compute.replace_substring(compute.replace_substring(column, ".", ""), ",", ".")
    return np.asarray(compute.utf8_trim_whitespace(digits).cast(pa.float64()).to_numpy(), dtype=np.float64)


def _require_text(column: pa.ChunkedArray, place: str) -> None:
    """Raise UserError if text is numbers in a form that is not read, or with a few other words among them.

    As text each number would be a category of its own.
    """
    from pyarrow import compute, types

    present = column.drop_null()
    if types.is_null(column.type) or len(present) == 0 or _all_match(present, PLAIN_NUMBER):
        return
    advice = (
        "write numbers as 1234.5, dates as 2024-12-31 and missing values as NA; or task_args.categories, which names "
        "columns of categories, or task_args.ignore, which leaves columns out"
    )
    if _all_match(present, GROUPED_NUMBER):
        unread = present.filter(compute.invert(compute.match_substring_regex(present, PLAIN_NUMBER)))[0]
        raise UserError(f"{place} holds numbers written as {_shown(unread)}, which would be read as text; {advice}")
    matches = compute.match_substring_regex(present, NUMBER_LIKE)
    share = compute.mean(matches).as_py()
    if share < MOSTLY or compute.count_distinct(present).as_py() <= MOST_CATEGORIES:
        return
    if share == 1:
        raise UserError(
            f"{place} holds numbers or dates written as {_shown(present[0])}, which would be read as text; {advice}"
        )
    other = present.filter(compute.invert(matches))[0]
    number = present.filter(matches)[0]
    raise UserError(f"{place} holds numbers such as {_shown(number)}, but also {_shown(other)}; {advice}")


def _shown(value: pa.Scalar) -> str:
    return repr(value.as_py()[:ROW_SHOWN])


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
        """Raises UserError: the numbers are too large for their mean and deviation."""
        values = column.values[train]
        if not column.numeric:
            counts = Counter(value for value in values if value is not None)
            frequent = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_CATEGORIES]
            codes = {name: code for code, name in enumerate(sorted(frequent))}
            return Encoding(column.name, sum(counts.values()) < len(train) or len(frequent) < len(counts), codes=codes)
        present = values[np.isfinite(values)]
        mean, std = mean_and_deviation(present, column.name)
        return Encoding(column.name, len(present) < len(train), mean, std)

    def encode(self, values: Array) -> Floats:
        """(n,) as in a `Column` → (n, width)."""
        if self.codes is not None:
            width = len(self.codes) + 1
            one_hot = np.eye(width, dtype=np.float32)[[self.codes.get(value, width - 1) for value in values]]
            return one_hot if self.other else one_hot[:, :-1]
        finite = np.isfinite(values)
        scaled = np.where(finite, (np.where(finite, values, 0.0) - self.mean) / self.std, 0.0)
        scaled = np.clip(scaled, -LARGEST, LARGEST)  # so that no finite number becomes infinite in float32
        return np.stack([scaled, ~finite] if self.other else [scaled], axis=1).astype(np.float32)


def mean_and_deviation(values: Array, name: str) -> tuple[float, float]:
    """Of finite numbers; the deviation is 1 where they are all the same, or none.

    Raises:
        UserError: They are too large for float64; `name` is the column's.
    """
    if len(values) == 0:
        return 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        deviation = float(values.std())
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise UserError(
            f"column {name!r} holds numbers as large as {np.abs(values).max():g}, whose deviation is not finite: write "
            "them in a larger unit, or take their logarithm"
        )
    # Rounding gives a column of 0.1 a deviation of 1e-17, by which other rows must not be divided.
    is_constant = deviation == 0 or values.min() == values.max()
    return mean, 1.0 if is_constant else deviation
