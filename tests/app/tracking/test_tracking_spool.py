"""The driver's end of tracking, without MLflow: the spool and the tracker that writes it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tracking.settings import Settings
from app.tracking.spool import Spool, look_at_lock, read, take_lock
from app.tracking.tracker import Tracker
from tests.running import end_tree, start

pytestmark = pytest.mark.alone


def events(folder: Path) -> list[dict]:
    found, offset = [], 0
    while some := read(folder, offset):
        found += [event for event, _ in some]
        offset = some[-1][1]
    return [event for event in found if event["type"] != "damaged"]


def append(folder: Path, *some: dict) -> None:
    spool = Spool(folder)
    for event in some:
        spool.append(event)
    spool.close()


def test_what_is_appended_is_read_in_order_whatever_its_size(tmp_path: Path) -> None:
    append(tmp_path, {"type": "text", "text": "x" * 3_000_000})
    append(tmp_path, *({"type": "metrics", "n": n, "value": (-1) ** n * math.inf} for n in range(40_000)))
    found = events(tmp_path)
    assert len(found[0]["text"]) == 3_000_000
    assert [(e["n"], e["value"]) for e in found[1:]] == [(n, (-1) ** n * math.inf) for n in range(40_000)]


def test_a_line_being_written_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"type":"a"}\n{"type"')
    ((event, offset),) = read(tmp_path, 0)
    assert event["type"] == "a" and read(tmp_path, offset) == []
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(':"b"}\n')
    assert [event["type"] for event, _ in read(tmp_path, offset)] == ["b"]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_any_damage_costs_only_the_lines_it_touches(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    append(folder, *({"type": "metrics", "number": number} for number in range(10)))
    data = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(data[:cut] + junk)  # a machine that lost power leaves anything at the end
    whole = max(0, data[:cut].count(b"\n") - 1)  # an empty line is the first
    append(folder, {"type": "metrics", "number": 99})
    numbers = [e["number"] for e in events(folder) if "number" in e]
    assert numbers[:whole] == list(range(whole)) and numbers[-1] == 99


def test_a_lock_is_free_when_its_holder_dies_though_its_children_live(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from app.tracking.spool import take_lock
assert take_lock(Path(sys.argv[1]), "a", text="mine") is not None
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = start([code, str(tmp_path)], program=[sys.executable, "-c"])
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        assert look_at_lock(tmp_path, "a") == (True, "mine") and take_lock(tmp_path, "a") is None
        process.kill()
        process.wait()
        assert look_at_lock(tmp_path, "a") == (False, "mine") and take_lock(tmp_path, "a") is not None
    finally:
        end_tree(child)


def test_a_disabled_tracker_leaves_nothing(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "t", Settings("", ""), run_name="", run_uid="", enabled=False)
    tracker.start()
    tracker.metrics(1, {"a": 1.0})
    tracker.artifact(tmp_path / "missing")
    delivery = tracker.finish("FINISHED")
    assert delivery.complete and delivery.run_id is None and not (tmp_path / "t").exists()


def test_a_full_disk_is_reported_once_and_loses_nothing(tmp_path: Path) -> None:
    warnings: list[str] = []
    spool = Spool(tmp_path, warnings.append)
    there, spool._file = spool._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for n in range(3):
        spool.append({"type": "metrics", "n": n})
    assert len(warnings) == 1 and "metrics wait in memory until there is room" in warnings[0]
    spool._file = there
    spool.append({"type": "metrics", "n": 3})
    assert [event["n"] for event in events(tmp_path)] == [0, 1, 2, 3]
