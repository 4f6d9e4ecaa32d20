"""Tables as users have them: read as they are meant, or refused, but never misread."""

import datetime
import gzip
import lzma
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from app.data import tables
from app.data.tables import MOST_CATEGORIES, Encoding, read_table
from app.errors import UserError
from app.tasks.tabular import Tabular

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("own_cache")]

N = 100


def csv_file(
    folder: Path, header: str, row: Callable[[int], str], *, rows: int = N, encoding: str = "utf-8"
) -> Path:
    """Writes a table with rows `row(0)`, `row(1)`, …, and returns its path."""
    path = folder / "a.csv"
    text = "".join([f"{header}\n", *(f"{row(i)}\n" for i in range(rows))])
    path.write_bytes(text.encode(encoding, "surrogatepass"))
    return path


def parquet_file(folder: Path, **columns: Any) -> Path:
    """Writes a Parquet table, and returns its path."""
    path = folder / "a.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


NUMBERS = np.arange(N, dtype=np.float64)
READ: list[tuple[str, Callable[[int], str], dict[str, Any]]] = [
    ("a;b", lambda i: f"{i};x", {"a": NUMBERS, "b": ["x"] * N}),
    ("a;b", lambda i: f"{i},5;1,25", {"a": NUMBERS + 0.5, "b": [1.25] * N}),
    (
        "a;b",
        lambda i: f"{i + 1}.000,5;{i + 1}.000",
        {"a": NUMBERS * 1000 + 1000.5, "b": NUMBERS * 1000 + 1000},
    ),
    ("a\tb", lambda i: f'{i}\t"one, two"', {"a": NUMBERS, "b": ["one, two"] * N}),
    ("a|b", lambda i: f"{i}|;,", {"a": NUMBERS, "b": [";,"] * N}),
    ("\n\na,b", lambda i: f"{i},x", {"a": NUMBERS, "b": ["x"] * N}),
    ("\ufeffa,b", lambda i: f"{i},x\n\n   ", {"a": NUMBERS, "b": ["x"] * N}),
    ("sep=;\na;b", lambda i: f"{i};x", {"a": NUMBERS, "b": ["x"] * N}),
    (
        "a,b",
        lambda i: f'{i},"line\n, ""line"" {i % 2}"',
        {"a": NUMBERS, "b": [f'line\n, "line" {i % 2}' for i in range(N)]},
    ),
    (
        "a,b",
        lambda i: f"{i % 24:02d}:30:00,2024-01-01T01:00:00+01:00",
        {"a": NUMBERS % 24 * 3600 + 1800, "b": [1704067200] * N},
    ),
    (
        "a,b",
        lambda i: f"{10 * (i % 5)}-{10 * (i % 5) + 9},1:{i % 5}",
        {"b": [f"1:{i % 5}" for i in range(N)]},
    ),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(("header", "row", "expected"), READ)
def test_a_csv_file_is_read_as_it_is_meant(
    tmp_path: Path, header: str, row: Callable[[int], str], expected: dict[str, Any], encoding: str
) -> None:
    if encoding == "utf-16":
        header = header.lstrip("\ufeff")
    columns, _ = read_table(str(csv_file(tmp_path, header, row, encoding=encoding)))
    assert list(columns) == ["a", "b"]
    for name, values in expected.items():
        assert columns[name].values.tolist() == list(values)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compressed_under_a_plain_name(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = csv_file(tmp_path, "a;b", lambda i: f"{i};é")
    path.write_bytes(compress(path.read_bytes()))
    columns, _ = read_table(str(path))
    assert columns["a"].values.tolist() == NUMBERS.tolist() and set(columns["b"].values) == {"é"}
    plain = tmp_path / "plain.csv.gz"
    plain.write_text("a,b\n1,2\n")
    assert read_table(str(plain))[0]["b"].values.tolist() == [2]


def test_line_breaks_in_cells_of_a_file_of_many_blocks(tmp_path: Path) -> None:
    """Arrow reads blocks of 1 MB, which may begin within a cell."""
    cell = "word " * 30 + "\nline two, {}\n\nline"
    rows = 20_000
    path = csv_file(tmp_path, "a,b", lambda i: f'{i},"{cell.format(i)}"', rows=rows)
    columns, _ = read_table(str(path))
    assert columns["a"].values.tolist() == list(range(rows))
    assert columns["b"].values.tolist() == [cell.format(i) for i in range(rows)]


def test_parquet_columns_that_are_numbers_dates_or_text(tmp_path: Path) -> None:
    times = [datetime.time(1, 0, 1), datetime.time(0)]
    kinds: dict[str, tuple[pa.Array, list[Any]]] = {
        "half": (pa.array(np.array([1.5, 2], np.float16)), [1.5, 2]),
        "unsigned": (pa.array([2**64 - 2**60, 2**63], pa.uint64()), [2.0**64 - 2**60, 2.0**63]),
        "decimal": (pa.array([Decimal("0.25"), Decimal("-1")], pa.decimal256(50, 2)), [0.25, -1]),
        "duration": (pa.array([1500, 0], pa.duration("ms")), [1.5, 0]),
        "time": (pa.array(times, pa.time64("ns")), [3601, 0]),
        "seconds": (pa.array(times, pa.time32("s")), [3601, 0]),
        "day": (pa.array([datetime.date(1970, 1, 2), None], pa.date64()), [86400, np.nan]),
        "zone": (pa.array([1, 0], pa.timestamp("s", "Europe/Berlin")), [1, 0]),
        "codes": (pa.array([7, 9]).dictionary_encode(), [7, 9]),
        "names": (pa.array(["x", None]).dictionary_encode(), ["x", None]),
        "large": (pa.array(["x", "y"], pa.large_string()), ["x", "y"]),
        "digits": (pa.array(["01", "2"]), ["01", "2"]),
    }
    arrays = {name: array for name, (array, _) in kinds.items()}
    columns, _ = read_table(str(parquet_file(tmp_path, **arrays)))
    for name, (_, expected) in kinds.items():
        values = columns[name].values
        assert columns[name].numeric == (not isinstance(expected[0], str)), name
        if values.tolist() != expected:
            assert np.array_equal(values, expected, equal_nan=True), name


BINARY = pa.array([b"x"] * 2)
UNUSABLE: dict[str, tuple[pa.Array, str]] = {
    "struct": (pa.array([{"x": 1}] * 2), "nested"),
    "list": (pa.array([["a"]] * 2), "nested"),
    "list of structs": (pa.array([[{"x": 1}]] * 2), "nested"),
    "map": (pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int64())), "nested"),
    "fixed list": (pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32(), 2)), "nested"),
    "binary": (BINARY, "binary"),
    "large binary": (BINARY.cast(pa.large_binary()), "binary"),
    "fixed binary": (BINARY.cast(pa.binary(1)), "binary"),
    "dictionary": (BINARY.dictionary_encode(), "binary"),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 2, pa.binary(16))),
        "binary",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_nested_and_binary_columns_are_refused_unless_left_out(tmp_path: Path, kind: str) -> None:
    array, description = UNUSABLE[kind]
    path = str(parquet_file(tmp_path, odd=array, a=[1, 2], target=[0, 1]))
    message = rf"a\.parquet: column 'odd' is {description} \(.*task_args\.ignore"
    with pytest.raises(UserError, match=message):
        Tabular(data=path, target="target")
    assert len(Tabular(data=path, target="target", ignore=["odd"]).train_data()) == 2


REFUSED: list[tuple[str, Callable[[int], str], str]] = [
    ("a,b,target", lambda i: f'"{i},5",x,{i}', "column 'a' holds numbers written as '0,5'"),
    ("a,b,target", lambda i: f'"{17 * i:,}",x,{i}', "column 'a' holds numbers written as '1,003'"),
    ("a;b;target", lambda i: f"{1000 + i:,};x;{i}", "column 'a' holds numbers written as '1,000'"),
    ("a,b,target", lambda i: f"${i % 9}.50,x,{i}", r"column 'a' holds numbers written as '\$0.50'"),
    ("a,b,target", lambda i: f"{i % 9} %,x,{i}", "column 'a' holds numbers written as '0 %'"),
    ("a,b,target", lambda i: f"1'00{i % 9},x,{i}", 'holds numbers written as "1\'000"'),
    ("a,b,target", lambda i: f'{i},x,"{i},5"', "column 'target' holds numbers written as '0,5'"),
    (
        "a,b,target",
        lambda i: f"{1 + i % 28}.{1 + i % 12}.2024,x,{i}",
        "numbers or dates written as '1.1.2024'",
    ),
    (
        "a,b,target",
        lambda i: f"{'abc' if i == 60 else i},x,{i}",
        "numbers such as '0', but also 'abc'",
    ),
    ("a,b,target", lambda i: f"{2**60 + i},x,{i}", "holds numbers near 1152921504606846976, which"),
    (
        "a,b,target",
        lambda i: f"{1.7e308 * (-1) ** i},x,{i}",
        "column 'a' holds numbers as large as 1.7e",
    ),
    (
        "a,b,target",
        lambda i: f"{i},x,{1.7e308 * (-1) ** i}",
        "column 'target' holds numbers as large as 1.7e",
    ),
    (
        "a,b,target",
        lambda i: f"{i},x,{'-inf' if i == 3 else i}",
        "column 'target' holds infinite numbers",
    ),
    (
        "a,b,target",
        lambda i: f"{i},x,{i}" + ",1" * (i == 70),
        r"the row '70,x,70,1' has 4 columns, not 3",
    ),
    (
        "a;b;target",
        lambda i: f"{i};x" + f";{i}" * (i != 70),
        r"the row '70;x' has 2 columns, not 3 .* by ';'",
    ),
    ("a,b,target", lambda i: f"{i},x,{chr(34) * (i == 70)}{i}", "never ends"),
]


@pytest.mark.parametrize(
    ("header", "row", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_a_table_that_would_be_misread_is_refused_with_one_sentence(
    tmp_path: Path, header: str, row: Callable[[int], str], message: str
) -> None:
    path = csv_file(tmp_path, header, row)
    with pytest.raises(UserError, match=message) as raised:
        Tabular(data=str(path), target="target")
    sentence = str(raised.value).replace(str(tmp_path), "")
    assert "\n" not in sentence and len(sentence) < 400 and not sentence.endswith(".")


NOT_UTF8: list[tuple[str, str, Callable[[int], str], int]] = [
    ("latin-1", "a,target", lambda i: f"caf\xe9 {i},gr\xfcn {i}", 2),
    ("cp1252", "a,target", lambda i: f"{i} €,{i % 2}", 2),
    ("latin-1", "größe,target", lambda i: f"{i},{i}", 1),
    ("latin-1", "a,target", lambda i: f"{'ü' if i == 70 else 'x'},{i}", 72),
    ("utf-8", "a,target", lambda i: f"\ud800,{i}", 2),
]


@pytest.mark.parametrize(("encoding", "header", "row", "line"), NOT_UTF8)
def test_a_table_that_is_not_utf8_names_its_line(
    tmp_path: Path, encoding: str, header: str, row: Callable[[int], str], line: int
) -> None:
    path = str(csv_file(tmp_path, header, row, encoding=encoding))
    for text in ((), ("a",)):
        with pytest.raises(UserError, match=rf"a\.csv, line {line}: .* is not UTF-8; convert"):
            columns, _ = read_table(path, text=text)
            [column.values for column in columns.values()]


def test_a_column_that_is_not_utf8_may_be_left_out(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "a,b,target", lambda i: f"{i},ü,{i}", encoding="latin-1")
    assert len(Tabular(data=str(path), target="target", ignore=["b"])._input.encodings) == 1


def test_columns_of_numbers_may_be_categories(tmp_path: Path) -> None:
    """So may the target, also where a float64 could not tell its classes apart."""
    row = lambda i: f"{10_000 + i % 3},$5,{'NA' if i == 9 else 2**60 + i % 2}"  # noqa: E731
    path = str(csv_file(tmp_path, "code,price,target", row))
    categories = ["code", "price", "target"]
    task = Tabular(data=path, target="target", categories=categories, eval_samples=0)
    assert task.classes == [str(2**60), str(2**60 + 1)] and len(task.train_data()) == N - 1
    assert list(task._input.encodings[0].codes or ()) == ["10000", "10001", "10002"]
    with pytest.raises(UserError, match=r"task_args.categories: .* has no column 'cod'"):
        Tabular(data=path, target="target", categories=["cod"])


def test_classes_are_named_by_all_their_digits(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "a,target", lambda i: f"{i},{10_000_000 + i % 3}")
    task = Tabular(data=str(path), target="target", kind="classification")
    assert task.classes == ["10000000", "10000001", "10000002"]
    path = csv_file(tmp_path, "a,target", lambda i: f"{i},{-0.0 if i % 2 else 1}")
    assert Tabular(data=str(path), target="target", kind="classification").classes == ["0", "1"]


def test_a_constant_column_is_encoded_by_small_numbers_whatever_comes_later() -> None:
    """By rounding, the standard deviation of equal numbers is not quite zero."""
    values = np.array([0.1] * 14 + [0.2])
    assert np.std(values[:14]) > 0
    encoded = Encoding.fit(tables.Column("a", values), np.arange(14)).encode(values)
    assert np.abs(encoded).max() < 1
    values = np.array([0.0, 1.0, 1e300])
    assert np.isfinite(Encoding.fit(tables.Column("a", values), np.arange(2)).encode(values)).all()


def test_many_words_among_numbers_are_categories(tmp_path: Path) -> None:
    """As among the numbers of tickets; also where a column has few values."""
    row = lambda i: f"{'PC ' * (i % 5 == 0)}{i},{i % 9 or 'none'},{i}"  # noqa: E731
    path = csv_file(tmp_path, "a,b,target", row)
    encodings = Tabular(data=str(path), target="target")._input.encodings
    assert [len(encoding.codes or ()) for encoding in encodings] == [MOST_CATEGORIES, 9]


def test_a_prediction_takes_dates_times_and_numbers_of_every_pandas_type(tmp_path: Path) -> None:
    """The model gets the inputs that it was trained on."""
    row = lambda i: f"2024-01-{1 + i % 28:02d},{i % 24:02d}:30:00,{i},{i}"  # noqa: E731
    task = Tabular(data=str(csv_file(tmp_path, "day,time,count,target", row)), target="target")
    text = pandas.DataFrame({"day": ["2024-01-03"], "time": ["05:30:00"], "count": ["7"]})
    typed = {
        "day": pandas.to_datetime(text["day"]),
        "time": pandas.to_timedelta(text["time"]),
        "count": [7],
    }
    objects = {"day": [datetime.date(2024, 1, 3)], "time": [datetime.time(5, 30)], "count": [7.0]}
    zoned = typed | {"day": typed["day"].dt.tz_localize("UTC")}
    seconds = {"day": [1704240000], "time": [19800], "count": [7]}
    (expected,) = task.preprocessor()(pandas.DataFrame(seconds))  # type: ignore[misc]
    assert np.abs(expected.numpy()).max() < 3
    for frame in (text, typed, objects, zoned):
        (inputs,) = task.preprocessor()(pandas.DataFrame(frame))  # type: ignore[misc]
        assert np.allclose(inputs, expected, atol=1e-6)
