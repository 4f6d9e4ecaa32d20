"""Whether the driver that holds a run's lease lives, without relying on clocks."""

import json
import os
import queue
import re
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.storage import lease
from app.storage.storage import Storage
from tests.running import wait_until


def test_a_driver_on_another_machine_lives_while_it_renews_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)

    def renew(seconds: float = 0.0, beat: int = 2) -> None:
        content = {
            "attempt": "a",
            "host": "elsewhere",
            "pid": 7,
            "process_started": 1.0,
            "beat": beat,
        }
        storage.write_bytes(lease.FILE, json.dumps(content).encode())

    renew(beat=1)
    first = lease.read_lease(storage)
    assert first and not lease.is_alive(storage, first, 0.2)
    monkeypatch.setattr("app.storage.lease.time.sleep", renew)  # renewed while we wait
    assert lease.is_alive(storage, first, 3.0)


def test_on_this_machine_the_kernel_tells_whether_the_process_lives(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = lease.process_started(process.pid)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        # In ticks since the machine started, which setting the clock does not change.
        assert started == float(ticks) > 0
        of_process = lease.Lease(
            attempt="a", host=socket.gethostname(), pid=process.pid, process_started=started
        )
        assert lease.is_alive(Storage(tmp_path), of_process, 0.0)
        earlier = replace(of_process, process_started=started - 1)
        assert not lease.is_alive(Storage(tmp_path), earlier, 0.0)
    finally:
        process.kill()
    wait_until(lambda: lease.process_started(process.pid) == 0.0)  # a zombie trains nothing
    process.wait()
    assert not lease.is_alive(Storage(tmp_path), of_process, 0.0)


def test_a_start_that_is_superseded_and_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "OWN_SECONDS", 0.01)
    monkeypatch.setattr(lease, "END_SECONDS", 0.2)
    storage = Storage(tmp_path)
    lost = queue.Queue[str]()

    def holder(attempt: str) -> lease.LeaseHolder:
        return lease.LeaseHolder(storage, "name", attempt, is_newest=lambda: True, on_lost=lost.put)

    ends = holder("ends")
    ends.take(None)
    hangs = holder("hangs")
    hangs.take(lease.read_lease(storage))
    ends.release()
    newest = holder("newest")
    newest.take(lease.read_lease(storage))
    assert f"'name' was taken over by process {os.getpid()}" in lost.get(timeout=30)
    newest.release()
    assert lost.empty(), "the first has ended, and the last was not superseded"


def test_a_lease_is_described_also_with_impossible_numbers() -> None:
    training = lease.Lease(
        attempt="a",
        host="far",
        pid=7,
        process_started=1.0,
        since=int(time.time()) - 42,
        step=3,
        steps=9,
    )
    assert re.fullmatch(r"process 7 on far, for 0:00:4\d, at step 3 of 9", lease.describe(training))
    for change in ({"since": -(10**18)}, {"step": -1}, {"steps": None}):
        assert lease.describe(replace(training, **change)) == "process 7 on far"
