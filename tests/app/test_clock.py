"""A clock that is off by hours: the lease of a run does not believe it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import lease
from app.storage import Storage
from tests.running import wait_until

HOUR = 3600


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[threading.Event]:
    """A driver on another machine, whose clock is hours off and jumps with each beat; it dies when this is set."""
    dead = threading.Event()

    def beat() -> None:
        for number in range(10**6):
            off = 5 * HOUR * (-1) ** number
            held = {"attempt": "a", "host": "elsewhere", "pid": 7, "process_started": 1.0, "time": time.time() + off}
            Storage(tmp_path).write_bytes(lease.FILE, json.dumps(held | {"beat": number}).encode())
            if dead.wait(0.2):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    wait_until(lambda: lease.read_lease(Storage(tmp_path)), 5)
    yield dead
    dead.set()
    thread.join()


def test_a_driver_elsewhere_lives_as_long_as_it_renews_its_lease(tmp_path: Path, elsewhere: threading.Event) -> None:
    storage = Storage(tmp_path)
    for _ in range(3):
        held = lease.read_lease(storage)
        assert held and lease.is_alive(storage, held, 2.0), "whatever its clock says"
    elsewhere.set()
    time.sleep(0.5)
    for off in (5 * HOUR, -5 * HOUR, 0):
        held = {"attempt": "a", "host": "elsewhere", "pid": 7, "process_started": 1.0, "time": time.time() + off}
        storage.write_bytes(lease.FILE, json.dumps(held).encode())
        assert not lease.is_alive(storage, held, 1.0), "also one whose clock is hours ahead"
        assert lease.patience(held) == (lease.OLD_SECONDS if off < 0 else lease.LEASE_SECONDS)


def test_on_this_machine_the_kernel_knows_whether_the_very_process_lives(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        began = lease.process_started(process.pid)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert began == float(ticks) > 0, "since the machine started: setting the clock does not change it"
        held = {"host": socket.gethostname(), "pid": process.pid, "process_started": began}
        assert lease.is_alive(Storage(tmp_path), held, 0.0)
        assert not lease.is_alive(Storage(tmp_path), held | {"process_started": began - 1}, 0.0)
    finally:
        process.kill()
    wait_until(lambda: lease.process_started(process.pid) == 0.0, 5)  # a zombie trains nothing
    process.wait()
    assert not lease.is_alive(Storage(tmp_path), held, 0.0)
