"""What ended the workers: from the exceptions of an attempt, and what nodes and logs know, to one `Failure`.

When one worker dies, the others fail too: their connections break. So the first cause is looked for, and a worker that
only lost its peer is a consequence. What to do about it is decided by `failure_policy.py`.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil
from torch.distributed import DistError

from app.errors import NonFiniteError, RunFailed, UserError
from app.launchers import crash
from app.launchers.failure_policy import Failure, Kind
from app.launchers.workers import Failures, WorkerLost
from app.training.events import WorkerInfo
from strategies.layout import LayoutError

NON_RETRYABLE = (UserError, LayoutError, NonFiniteError)
"""What another attempt cannot mend, and says so in a sentence of its own."""
LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("ncclRemoteError", "remote process exited or there was a network error", "NCCL communicator was aborted"),
)
"""What a rank's exception says when its peer is gone, or cannot be reached: gloo's words, then NCCL's and torch's."""


class Hung(Exception):
    """A worker made no progress and was ended; says which, and since when."""


class NoCapacity(Exception):
    """The workers' places have not come back."""


@dataclass(frozen=True)
class Nodes:
    """What can be asked about nodes; without Ray there is only this machine, which lives."""

    is_alive: Callable[[str], bool] = lambda node: True
    oom_kills: Callable[[str], int | None] = lambda node: oom_kills()
    preempted: dict[str, str] = field(default_factory=dict)  # notices so far, by node
    reachable: Callable[[], bool] = lambda: True  # from this process: else nothing is to be asked of them


@dataclass(frozen=True)
class State:
    """What the supervisor knows of the attempt that has ended."""

    workers: Mapping[int, WorkerInfo]  # as they said when they began
    step: int
    progressed: bool
    logs: Path  # folder of rank-N.log on this machine
    nodes: Nodes
    log_sizes: Mapping[str, int] = field(default_factory=dict)  # of `crash.log_sizes`, before the attempt

    @property
    def when(self) -> str:
        return f"after step {self.step:,}" if self.step else "before the first step"


def classify(failures: Failures, state: State, history: list[Failure]) -> Failure:
    """The failure that an attempt ended with."""
    rank, error = first_cause(failures)
    if crashed := _crash(rank, error, state):
        return crashed
    kind, sentence = _cause(rank, error, state)
    if kind is Kind.NO_CAPACITY and history:
        sentence = history[-1].sentence
    info = state.workers.get(rank) if rank is not None and not _lost_peer(error) else None
    node = info.node if info else ""
    return Failure(kind, sentence, state.step, state.progressed, node, time.monotonic())


def _crash(rank: int | None, error: BaseException, state: State) -> Failure | None:
    """The failure of a worker that died by a signal of its own making; of one whose peers have only lost it, too."""
    if not (isinstance(error, WorkerLost) or _lost_peer(error)):
        return None
    known = set(state.workers) | ({rank} if rank is not None else set())
    for each in sorted(known, key=lambda number: (number != rank, number)):
        died = crash.fatal_signal(state.logs / f"rank-{each}.log", state.log_sizes)
        if died is None:
            continue
        name, where = died
        info = state.workers.get(each)
        text = f"{_who(each, state)} died {state.when} {crash.sentence(name, where)}{_see_log(each, state)}"
        node = info.node if info else ""
        return Failure(Kind.CRASHED, text, state.step, state.progressed, node, time.monotonic(), name)
    return None


def _cause(rank: int | None, error: BaseException, state: State) -> tuple[Kind, str]:
    if isinstance(error, NON_RETRYABLE) or (isinstance(error, RunFailed) and not _lost_peer(error)):
        return Kind.NON_RETRYABLE, str(error)
    if isinstance(error, NoCapacity):
        return Kind.NO_CAPACITY, str(error)
    if isinstance(error, Hung):
        return Kind.HUNG, str(error)
    if isinstance(error, WorkerLost):
        return _death(rank, error, state)
    if device_failure(error) is Device.HARDWARE:
        return Kind.DEVICE_FAILED, f"the GPU of {_who(rank, state)} failed {state.when}: {_first_line(error)}"
    if _lost_peer(error):
        gone = (info for _, info in sorted(state.workers.items()) if not state.nodes.is_alive(info.node))
        if lost := next(gone, None):
            return _lost_with_node(lost, state)
        if dead := next((info for _, info in sorted(state.workers.items()) if _has_ended_here(info)), None):
            return _death(dead.rank, WorkerLost(), state)
        return Kind.DIED, f"a worker that worker {rank} was connected to died {state.when}"
    where = f" on worker {rank}" if rank is not None else ""
    return Kind.EXCEPTION, f"{type(error).__name__}{where}: {_first_line(error)}{_see_log(rank, state)}"


def _death(rank: int | None, error: WorkerLost, state: State) -> tuple[Kind, str]:
    """What kind of death it was, from what the launcher and the worker's node know; the surest sign decides."""
    info = state.workers.get(rank) if rank is not None else None
    who = str(info or error) or _who(rank, state)
    if info and ("node died" in error.details.lower() or not state.nodes.is_alive(info.node)):
        return _lost_with_node(info, state)
    if "OUT_OF_MEMORY" in error.details or "OutOfMemory" in error.details:
        return Kind.OUT_OF_MEMORY, f"{who} died {state.when}, ended by Ray because its node ran out of memory"
    if info and (state.nodes.oom_kills(info.node) or 0) > info.oom_kills:
        return Kind.OUT_OF_MEMORY, f"{who} died {state.when}, by SIGKILL: killed by the kernel for memory"
    silent = info is not None and (state.logs / f"rank-{rank}.log").exists()
    # A process that ends by a signal of its own making says so in its log (crash.py).
    how = " without a word, as by SIGKILL (`kill -9`, a scheduler, or the kernel for memory)" if silent else ""
    return Kind.DIED, f"{who} died {state.when}{how}{_see_log(rank, state)}"


def _has_ended_here(info: WorkerInfo) -> bool:
    """Whether the process of a worker without Ray, which has names in place of addresses, was here and is gone."""
    if info.node or info.ip != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(info.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _lost_with_node(info: WorkerInfo, state: State) -> tuple[Kind, str]:
    if notice := state.nodes.preempted.get(info.node):
        return Kind.PREEMPTED, f"{info} went {state.when} with its node, as announced ({notice})"
    return Kind.NODE_LOST, f"{info} died {state.when} with its node"


def _who(rank: int | None, state: State) -> str:
    info = state.workers.get(rank) if rank is not None else None
    return str(info or (f"worker {rank}" if rank is not None else "a worker"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _see_log(rank: int | None, state: State) -> str:
    log = state.logs / f"rank-{rank}.log"
    return f" (see {log})" if log.exists() else ""


def first_cause(failures: Failures) -> tuple[int | None, BaseException]:
    """The rank and the exception that came first: a peer that lost its connection is a consequence."""

    def order(item: tuple[int | None, BaseException]) -> int:
        error = item[1]
        if isinstance(error, NON_RETRYABLE):
            return 0
        if isinstance(error, WorkerLost | Hung) or device_failure(error):
            return 1
        return 3 if is_consequence(error) else 2

    return min(failures.items(), key=order)


def error_to_raise(failures: Failures, reason: str, *, here: bool) -> BaseException:
    """What to raise when the run is given up. here: the worker is in this process, so its traceback tells."""
    error = first_cause(failures)[1]
    consequence = isinstance(error, WorkerLost | Hung) or _lost_peer(error)
    own = isinstance(error, NON_RETRYABLE) or (here and not consequence)
    return error if own else RunFailed(reason)


def is_consequence(error: BaseException) -> bool:
    """Whether this may be what a rank says whose peer is gone."""
    signs = (*LOST_PEER, "connectFullMesh", "NCCL", "gloo")
    return isinstance(error, DistError) or any(sign in str(error) for sign in signs)


def _lost_peer(error: BaseException) -> bool:
    return not isinstance(error, WorkerLost) and any(sign in str(error) for sign in LOST_PEER)


# --- what CUDA says of a device -----------------------------------------------------------------------------


class Device(Enum):
    """What has failed, after an error that stays: every later call of CUDA gives it again, so that the process can
    compute no more and must end. Other errors, such as out of memory, are none of these."""

    HARDWARE = "hardware"  # another process, or machine, is what helps
    PROGRAM = "program"  # a kernel did what it must not; the same code will do it again


HARDWARE = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "over nvlink or a hardware error",
    "has fallen off the bus",
    "Xid",
)
PROGRAM = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out",
    "tensor memory not completely freed",
)
"""Parts of what cudaGetErrorString says of errors that leave "the process in an inconsistent state" (CUDA Runtime API,
cudaError: 214, 220, 226; 700, 702, 710, 714-719, 721), and of what NVIDIA's driver writes. A launch fails, and a stack
breaks, mostly by a pointer of the program's."""


def device_failure(error: BaseException) -> Device | None:
    """Whether this is what a process says whose device has failed."""
    text = str(error)
    if any(sign in text for sign in HARDWARE):
        return Device.HARDWARE
    return Device.PROGRAM if "CUDA" in text and any(sign in text for sign in PROGRAM) else None


# --- what a node knows --------------------------------------------------------------------------------------


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory, in this container or else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
