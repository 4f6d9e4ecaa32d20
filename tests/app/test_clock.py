"""A clock that jumps by hours: neither the lease of a run, nor the run, believes it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import lease
from app.storage import Storage
from tests.running import POINTS, committed, curve, environment, finish, mlflow_run, start, trireme, wait_until

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
/* The time of day of this process, moved by as many seconds as the file $CLOCK_OFFSET says just now. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && getenv("CLOCK_OFFSET")) {
        long offset = 0;
        FILE *file = fopen(getenv("CLOCK_OFFSET"), "r");
        if (file) { if (fscanf(file, "%ld", &offset) != 1) offset = 0; fclose(file); }
        now->tv_sec += offset;
    }
    return code;
}
"""
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


@pytest.mark.alone
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for a library that moves a process's clock")
def test_a_run_whose_clock_jumps_goes_on_and_keeps_its_lease(tmp_path: Path) -> None:
    library, source, offset = tmp_path / "clock.so", tmp_path / "clock.c", tmp_path / "offset"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset.write_text("0")
    run = ["train", *POINTS, "train.steps=120", "task_args.step_seconds=0.05", "checkpoint.every_steps=10"]
    run += ["train.log_every=1", "launcher=local", f"run.storage={tmp_path}"]
    env = environment(LD_PRELOAD=str(library), CLOCK_OFFSET=str(offset))
    process = start([*run, "run.name=run"], env=env)
    folder = tmp_path / "run"
    for jump in (5 * HOUR, -60 * 24 * HOUR, 3 * HOUR):
        done = max(committed(folder), default=0)
        wait_until(lambda done=done: max(committed(folder), default=0) > done, 60)
        offset.write_text(str(jump))
    second = trireme(*run, "run.name=run")
    assert second.code == 2 and f"is being trained by process {process.pid}" in second.err, second.out + second.err
    ended = finish(process)
    assert ended.code == 0, ended.err
    calm = trireme(*run, "run.name=calm", "task_args.step_seconds=0")
    assert calm.code == 0, calm.err
    assert curve(tmp_path, "run") == curve(tmp_path, "calm"), "no point lost or twice"
    assert mlflow_run(tmp_path, "run").info.status == "FINISHED"
