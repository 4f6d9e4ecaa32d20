"""A host of the lab on which runs are disturbed.

Nothing else lives there, so that everything that a run leaves can be found.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab import Lab
from tests.running import LONG, POINTS, Lines, committed, torchrun_program, wait_until, writes

SETTLE_SECONDS = 30.0
"""Until all of a run is gone: it takes some, but the machine may be busy. Ray's agents take 60."""
STEPS = 60
RUN = [
    *POINTS,
    f"train.steps={STEPS}",
    "checkpoint.every_steps=5",
    "train.log_every=5",
    "run.name=run",
]
PACE = "task_args.step_seconds=0.1"
TORCHRUN = torchrun_program()
TWO = [
    "workers=2",
    "strategy=ddp",
    "resources_per_worker.CPU=0.5",
    "fault.hang_seconds=10",
]

Remains = dict[str, list[str]]
"""What is left on a host: its names, by kind."""


@dataclass
class Started:
    """A command on a host.

    Attributes:
        popen: What entered the host to run the command.
        lines: What the command prints.
        process: The command itself.
        started_at: When it started.
        ended_at: When it ended; 0.0 before.
    """

    popen: Any
    lines: Lines
    process: psutil.Process
    started_at: float = field(default_factory=time.time)
    ended_at: float = 0.0

    def wait(self, seconds: float = 240.0) -> int:
        """The exit code; waits for the end."""
        try:
            return int(self.popen.wait(seconds))
        except subprocess.TimeoutExpired:
            message = f"did not end within {seconds:g} s: {self.lines.text}"
            raise AssertionError(message) from None
        finally:
            self.ended_at = self.ended_at or time.time()

    def longest_silence(self) -> float:
        """The longest time, in seconds, in which a user saw nothing new."""
        times = [self.started_at, *(at for at, _ in self.lines.heard), self.ended_at]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


class Host:
    """One host of a lab."""

    def __init__(self, lab: Lab, number: int = 0) -> None:
        self.lab = lab
        self.number = number
        self.pid_namespace = os.readlink(f"/proc/{lab.first_process(number)}/ns/pid")
        self.own_pids = {process.pid for process in self.processes()}
        """Processes of the host itself."""

    # --- processes ---

    def processes(self) -> list[psutil.Process]:
        """The living processes on the host, without those that sleep for the lab."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") != self.pid_namespace:
                    continue
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                is_sleep = Path(process.name()).name == "sleep"
                if is_alive and not is_sleep:
                    processes.append(process)
        return processes

    def find(self, part: str) -> psutil.Process:
        """The first process on the host whose program or title has this part."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                title, _, _ = " ".join(process.cmdline()).partition(" --")
                if part in title:
                    return process
        command_lines = [process.cmdline() for process in self.processes()]
        raise AssertionError(f"no process {part} on this host: {command_lines}")

    def worker(self, storage: Path, rank: int) -> psutil.Process:
        """The process of a rank of the run `run`."""
        log = str(storage / "run" / "logs" / f"rank-{rank}.log")

        def find() -> psutil.Process | None:
            return next((process for process in self.processes() if writes(process, log)), None)

        return wait_until(find, 60)

    def start(
        self,
        *words: str,
        program: list[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> Started:
        """Start a command on the host.

        Args:
            words: Its arguments.
            program: What to run in place of `trireme`.
            env: Environment variables.
        """
        program = program or [sys.executable, "-m", "app"]
        popen = self.lab.start(self.number, [*program, *words], env)

        def find_child() -> psutil.Process | None:
            return next(iter(psutil.Process(popen.pid).children()), None)

        process = wait_until(find_child)
        return Started(popen, Lines(popen), process)

    def end_processes(self) -> None:
        """End what a failed test has left, so that it does not disturb the next one."""
        for process in self.processes():
            if process.pid not in self.own_pids:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    # --- what is left ---

    def left(self) -> Remains:
        """Processes, sockets, shared memory and temporary files that are not the host's own."""
        first_process = self.lab.first_process(self.number)
        root = Path(f"/proc/{first_process}/root")
        return {
            "processes": self._command_lines(),
            "sockets": _unix_sockets(first_process),
            "shared memory": _shared_memory(root),
            "temporary": _temporary_files(root),
        }

    def _command_lines(self) -> list[str]:
        command_lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid not in self.own_pids:
                    command_line = " ".join(process.cmdline())
                    command_lines.append(f"{process.pid} {command_line[:120]}")
        return command_lines

    def settled(self, before: Remains | None = None) -> tuple[Remains, float]:
        """Wait until nothing is left that was not there before, for SETTLE_SECONDS at most.

        Returns:
            What is left, and the seconds until then.
        """
        before = before or {}
        start = time.monotonic()
        while True:
            remains = {}
            for kind, names in self.left().items():
                known = before.get(kind, [])
                remains[kind] = [name for name in names if name not in known]
            seconds = time.monotonic() - start
            if not any(remains.values()) or seconds > SETTLE_SECONDS:
                return remains, seconds
            time.sleep(0.5)


def _unix_sockets(pid: int) -> list[str]:
    """The paths of the sockets in the network of a process."""
    _, *lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()
    rows = [line.split() for line in lines]
    return sorted({row[7] for row in rows if len(row) > 7})


def _shared_memory(root: Path) -> list[str]:
    names = os.listdir(root / "dev" / "shm")
    return sorted(name for name in names if "faketime" not in name)  # libfaketime leaves its own


def _temporary_files(root: Path) -> list[str]:
    """What is in a host's /tmp, without what exists once for each user and torchrun's own logs."""
    once_per_user = ("trireme-0", "lock", "torchinductor_root")
    paths = []
    for path in [*(root / "tmp").glob("*"), *(root / "tmp").glob("trireme-0/*")]:
        if path.name not in once_per_user and not path.name.startswith("torchelastic_"):
            paths.append(str(path.relative_to(root)))
    return sorted(paths)


# --- faults ---------------------------------------------------------------------------------------


def reached(folder: Path, step: int, seconds: float = LONG) -> None:
    """Wait until a run has committed a checkpoint of a step or a later one."""
    wait_until(lambda: max(committed(folder), default=0) >= step, seconds)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group of the kernel, of either version.

    Args:
        limit: How many bytes its processes may take, beside what they have already.
    """
    version_1 = Path("/sys/fs/cgroup/memory")
    is_version_1 = version_1.is_dir()
    parent = version_1 if is_version_1 else Path("/sys/fs/cgroup")
    limit_file = "memory.limit_in_bytes" if is_version_1 else "memory.max"
    group = parent / f"trireme-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()
