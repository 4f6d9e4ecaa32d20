"""The driver's end of tracking, without MLflow: the spool and the tracker that writes it."""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tracking import Tracker
from app.tracking.spool import Position, Reader, Spool, count_left, segment_path, segments
from app.tracking.state import Delivered, FileLock
from tests.app.tracking.test_tracking_kit import python

pytestmark = pytest.mark.alone


def events(folder: Path) -> list[dict]:
    reader, found = Reader(folder, Position()), []
    while chunk := reader.read():
        found += [event for event, _ in chunk]
    return found


# --- spool --------------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(5):
        spool.append({"type": "metrics", "number": number, "value": [math.inf, -math.inf][number % 2]})
    assert [(e["number"], e["value"]) for e in events(tmp_path)] == [(n, (-1) ** n * math.inf) for n in range(5)]


def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"type": "tags", "n": 1})
    spool.close()
    with segment_path(tmp_path, 1).open("a") as file:
        file.write('{"type":"tags","n":')  # the driver was killed here
    assert [e["n"] for e in events(tmp_path)] == [1]
    assert count_left(tmp_path, Position()) == 1
    Spool(tmp_path).append({"type": "tags", "n": 3})
    assert [e.get("n") for e in events(tmp_path)] == [1, None, 3]
    assert count_left(tmp_path, Position()) == 2


def test_a_line_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    path.write_text('{"type":"a"}\n{"type"')
    reader = Reader(tmp_path, Position())
    assert [e["type"] for e, _ in reader.read()] == ["a"]
    assert reader.read() == []
    with path.open("a") as file:
        file.write(':"b"}\n')
    assert [e["type"] for e, _ in reader.read()] == ["b"]


def test_segments_rotate_and_each_says_whose_it_is(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=200)
    spool.append({"type": "start", "attempt": "x"})
    for number in range(20):
        spool.append({"type": "metrics", "number": number})
    assert len(segments(tmp_path)) > 2
    read = events(tmp_path)
    assert [e["number"] for e in read if e["type"] == "metrics"] == list(range(20))
    starts = [e for e in read if e["type"] == "start"]
    assert len(starts) == len(segments(tmp_path)) and [bool(e.get("again")) for e in starts[:2]] == [False, True]
    assert count_left(tmp_path, Position()) == 21
    reader = Reader(tmp_path, Position())
    while reader.read():
        reader.discard_delivered()
    assert len(segments(tmp_path)) == 1
    assert events(tmp_path)[0]["type"] == "start"


def test_a_reader_finds_the_segment_after_the_one_it_was_at(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=1)
    spool.append({"type": "a"})
    reader = Reader(tmp_path, Position())
    assert [e["type"] for e, _ in reader.read()] == ["a"] and not reader.waiting()
    spool.append({"type": "b"})
    assert reader.waiting() and [e["type"] for e, _ in reader.read()] == ["b"]


def test_one_event_longer_than_a_chunk(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"type": "text", "text": "x" * 3_000_000})
    spool.append({"type": "tags"})
    assert [len(e.get("text", "")) for e in events(tmp_path)] == [3_000_000, 0]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_any_damage_costs_only_the_lines_it_touches(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder)
    for number in range(10):
        spool.append({"type": "metrics", "number": number})
    path = segment_path(folder, 1)
    data = path.read_bytes()
    path.write_bytes(data[:cut] + junk)  # a machine that lost power leaves anything at the end
    whole = data[:cut].count(b"\n")
    later = Spool(folder)
    later.append({"type": "metrics", "number": 99})
    numbers = [e["number"] for e in events(folder) if "number" in e]
    assert numbers[:whole] == list(range(whole)) and numbers[-1] == 99


def test_a_damaged_state_is_as_none(tmp_path: Path) -> None:
    state = Delivered(offset=7, steps={"a": 3})
    state.save(tmp_path)
    assert Delivered.load(tmp_path) == state
    (tmp_path / "delivered.json").write_text('{"offset": 7, "st')
    assert Delivered.load(tmp_path) == Delivered()


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire()


# --- the tracker --------------------------------------------------------------------------------------------------


def test_logging_a_step_takes_microseconds(tmp_path: Path) -> None:
    tracker = Tracker(
        tmp_path, uri="http://127.0.0.1:9", experiment="e", run_name="r", run_uid="u", artifact_location=None
    )
    tracker.start()
    values = {f"train/metric_{number}": 0.1234567 * number for number in range(8)}
    medians = []
    for _ in range(5):
        seconds = []
        for step in range(400):
            begun = time.perf_counter()
            tracker.metrics(step, values)
            seconds.append(time.perf_counter() - begun)
        medians.append(statistics.median(seconds))
    delivery = tracker.finish("FINISHED", timeout=0.1)
    assert min(medians) < 50e-6, medians
    assert (delivery.complete, delivery.left, delivery.run_id) == (False, 2002, None)


def test_a_disabled_tracker_leaves_nothing(tmp_path: Path) -> None:
    tracker = Tracker(
        tmp_path / "t", uri="", experiment="", run_name="", run_uid="", artifact_location=None, enabled=False
    )
    tracker.start()
    tracker.metrics(1, {"a": 1.0})
    tracker.artifact(tmp_path / "missing")
    delivery = tracker.finish("FINISHED")
    assert delivery.complete and tracker.run_id is None and not (tmp_path / "t").exists()


def test_a_full_disk_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(tmp_path, uri="", experiment="", run_name="", run_uid="", artifact_location=None)
    tracker._spool = Spool(tmp_path)
    os.close(tracker._spool._fd)
    tracker._spool._fd = os.open("/dev/full", os.O_WRONLY)
    tracker.metrics(1, {"a": 1.0})
    tracker.metrics(2, {"a": 1.0})
    assert caplog.text.count("metrics wait in memory until there is room") == 1


def test_the_driver_imports_neither_mlflow_nor_torch_nor_ray() -> None:
    code = """
import sys
import app.tracking, app.tracking.provenance, app.tracking.settings
from types import SimpleNamespace
app.tracking.resolve_tracking(SimpleNamespace(uri="http://localhost:5000", experiment=None), "runs")
app.tracking.provenance.provenance_tags()
print({"mlflow", "torch", "ray"} & set(sys.modules))
"""
    out, error = python(code).communicate(timeout=60)
    assert out.strip() == "set()", error
