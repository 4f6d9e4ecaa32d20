"""Tables: read from CSV and Parquet, encoded with the training rows' statistics only. Bad ones: test_data_bad_input."""

import datetime
import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from app.data import tables
from app.data.tables import Column, Encoding, read_table
from tests.app.data.test_data_text import write

CSV = "size,colour,day,ok\n1,red,2024-01-01,true\n2.5,,2024-01-02,false\n,blue,,true\n"


@pytest.mark.parametrize("compress", [False, True])
def test_csv(tmp_path: Path, compress: bool) -> None:
    content = gzip.compress(CSV.encode()) if compress else CSV.encode()
    columns, _ = read_table(str(write(tmp_path / ("a.csv" + ".gz" * compress), content)))
    assert list(columns) == ["size", "colour", "day", "ok"]
    assert np.array_equal(columns["size"].values, [1, 2.5, np.nan], equal_nan=True)
    assert columns["colour"].values.tolist() == ["red", None, "blue"]
    assert columns["day"].values[1] - columns["day"].values[0] == 86400
    assert np.array_equal(columns["ok"].values, [1, 0, 1])


def test_parquet_of_every_kind_of_column(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "huge": [2**62 + 1, None],
            "money": [Decimal("1.5"), None],
            "when": pa.array([moment, None], pa.timestamp("ns", "UTC")),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "list": [[1, 2], None],
            "nothing": pa.nulls(2),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    columns, _ = read_table(str(tmp_path / "a.parquet"))
    assert {name: column.values[0] for name, column in columns.items()} == {
        "huge": float(2**62), "money": 1.5, "when": moment.timestamp(), "kind": "a", "list": "[1, 2]", "nothing": None,
    }  # fmt: skip
    assert all(column.missing().tolist() == [False, True] for name, column in columns.items() if name != "nothing")
    assert columns["nothing"].missing().all()


def test_encoding_uses_the_training_rows_only() -> None:
    number = Column("n", np.array([1.0, 3.0, np.nan, 100.0, np.inf]))
    complete = Column("c", np.array([1.0, 1.0, 1.0, 2.0, np.nan]))
    names = Column("t", np.array(["a", "b", "a", "new", None], dtype=object))
    nothing = [Column("n", np.full(5, np.nan)), Column("t", np.array([None] * 5, dtype=object))]
    columns, train = [number, complete, names, *nothing], np.array([0, 1, 2])
    assert np.concatenate([Encoding.fit(c, train).encode(c.values) for c in columns], 1).tolist() == [
        [-1, 0, 0, 1, 0, 0, 1, 1],
        [1, 0, 0, 0, 1, 0, 1, 1],
        [0, 1, 0, 1, 0, 0, 1, 1],
        [98, 0, 1, 0, 0, 0, 1, 1],
        [0, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_rare_and_missing_categories_share_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_CATEGORIES", 2)
    names = Column("t", np.array(["a", "a", "b", "b", "c", None, "never seen"], dtype=object))
    found = Encoding.fit(names, np.arange(6)).encode(names.values)
    assert found.argmax(axis=1).tolist() == [0, 0, 1, 1, 2, 2, 2] and found.sum(axis=1).tolist() == [1] * 7
