"""A host of the lab on which runs are disturbed: nothing else lives there, so what is left can be counted."""

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
from tests.running import POINTS, Lines, committed, torchrun_program, wait_until, writes

SETTLE_SECONDS = 30.0  # for all of a run to be gone: some seconds, but the machine may be busy; Ray's agents take 60
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
TWO = ["workers=2", "strategy=ddp", "resources_per_worker.CPU=0.5", "fault.hang_seconds=10"]


@dataclass
class Started:
    """A command on a host. process: the command itself, of which `popen` is only the way in."""

    popen: Any
    lines: Lines
    process: psutil.Process
    since: float = field(default_factory=time.time)
    until: float = 0.0

    def wait(self, seconds: float = 240.0) -> int:
        try:
            return int(self.popen.wait(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds:g} s: {self.lines.text}") from None
        finally:
            self.until = self.until or time.time()

    def silence(self) -> float:
        """The longest time, in seconds, that a person saw nothing new."""
        times = [self.since, *(at for at, _ in self.lines.heard), self.until]
        return max(later - before for before, later in itertools.pairwise(times))


class Host:
    """One host of a lab."""

    def __init__(self, lab: Lab, number: int = 0) -> None:
        self.lab, self.number = lab, number
        self.space = os.readlink(f"/proc/{lab.first_process(number)}/ns/pid")
        self.own = {process.pid for process in self.processes()}  # of the host itself

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                same = os.readlink(f"/proc/{process.pid}/ns/pid") == self.space
                if (
                    same
                    and process.status() != psutil.STATUS_ZOMBIE
                    and Path(process.name()).name not in ("sleep",)
                ):
                    found.append(process)
        return found

    def find(self, part: str) -> psutil.Process:
        """The first process on the host whose program or title has this part."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()).partition(" --")[0]:
                    return process
        raise AssertionError(
            f"no process {part} on this host: {[p.cmdline() for p in self.processes()]}"
        )

    def worker(self, storage: Path, rank: int) -> psutil.Process:
        log = str(storage / "run" / "logs" / f"rank-{rank}.log")
        return wait_until(
            lambda: next((process for process in self.processes() if writes(process, log)), None),
            60,
        )

    def start(
        self, *words: str, program: list[str] | None = None, env: dict[str, str] | None = None
    ) -> Started:
        """`trireme WORDS` there."""
        begin = program or [sys.executable, "-m", "app"]  # program: in place of `trireme`
        popen = self.lab.start(self.number, [*begin, *words], env)
        process = wait_until(lambda: next(iter(psutil.Process(popen.pid).children()), None))
        return Started(popen, Lines(popen), process)

    def left(self) -> dict[str, list[str]]:
        """What lives or lies there and is not the host's own: processes, sockets, shared memory, temporary files."""
        first = self.lab.first_process(self.number)
        root = Path(f"/proc/{first}/root")
        rows = [
            line.split() for line in Path(f"/proc/{first}/net/unix").read_text().splitlines()[1:]
        ]
        titles = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid not in self.own:
                    titles.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return {
            "processes": titles,
            "sockets": sorted({row[7] for row in rows if len(row) > 7}),
            "shared memory": sorted(
                n for n in os.listdir(root / "dev" / "shm") if "faketime" not in n
            ),  # not ours
            "temporary": sorted(
                str(path.relative_to(root))
                for path in [*(root / "tmp").glob("*"), *(root / "tmp").glob("trireme-0/*")]
                if path.name
                not in ("trireme-0", "lock", "torchinductor_root")  # one a user, for ever
                and not path.name.startswith("torchelastic_")  # torchrun's own logs
            ),
        }

    def settled(
        self, before: dict[str, list[str]] | None = None
    ) -> tuple[dict[str, list[str]], float]:
        """What is left that was not there before, after SETTLE_SECONDS at most, and the seconds until then."""
        began = time.monotonic()
        while True:
            left, known = self.left(), before or {}
            more = {
                kind: [one for one in ones if one not in known.get(kind, [])]
                for kind, ones in left.items()
            }
            if not any(more.values()) or time.monotonic() > began + SETTLE_SECONDS:
                return more, time.monotonic() - began
            time.sleep(0.5)


def reached(folder: Path, step: int, seconds: float = 90.0) -> None:
    wait_until(lambda: max(committed(folder), default=0) >= step, seconds)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group of the kernel whose processes may take `limit` bytes more than they have; either version."""
    first = Path("/sys/fs/cgroup/memory")
    group = (
        first if first.is_dir() else Path("/sys/fs/cgroup")
    ) / f"trireme-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(
            str(limit)
        )
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()
