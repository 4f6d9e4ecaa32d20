"""Where each rank of the present attempt is, as it said itself; and what its node knows of its end."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LAST_BYTES = 8192
FATAL = "Fatal Python error: "
KILLS = "oom_kill "
NO_NEWS = ("warning", "notice", "system", "here")
"""Events of any rank; they do not tell that training gets on."""


@dataclass(frozen=True)
class Where:
    rank: int
    pid: int
    ip: str
    node: str  # Ray's id
    kernel_kills: int = 0  # that its kernel had counted when the attempt began
    log_bytes: int = 0  # of its log at that time
    actor: Any = None  # the Ray actor that it is, or is in

    def __str__(self) -> str:
        return f"worker {self.rank}, process {self.pid} on {self.ip},"


@dataclass
class Whereabouts:
    """ranks: of the present or last attempt. before: of the last one that had any, once another has begun. announced:
    nodes that are about to go, and why, by id. told: the same for ranks of this attempt whose process was asked to
    end."""

    ranks: dict[int, Where] = field(default_factory=dict)
    before: dict[int, Where] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)

    def begin(self) -> None:
        self.ranks, self.before, self.told = {}, self.ranks or self.before, {}

    def end(self) -> None:
        """Keeps no actor alive whose attempt is over."""
        self.ranks = {rank: replace(where, actor=None) for rank, where in self.ranks.items()}


def kill(pid: int) -> None:
    """Ends a process of this machine at once, also one that is stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP; not by a debugger). False where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def kernel_kills() -> int:
    """How many processes the kernel has ended for lack of memory, in this container or else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith(KILLS):
                    return int(line.split()[1])
    return 0


def here(rank: int, ip: str, node: str, log: Path | None, actor: Any = None) -> Where:
    """Said by a rank that begins."""
    size = log.stat().st_size if log is not None and log.exists() else 0
    return Where(rank, os.getpid(), ip, node, kernel_kills(), size, actor)


def last_words(log: Path, since: int) -> str:
    """What Python wrote into a worker's log, behind `since` bytes, when an error of its own ended it, such as a
    segmentation fault."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.startswith(FATAL)), "")
