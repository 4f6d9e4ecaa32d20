"""What ended the workers, as one `Failure`: from their exceptions, and what nodes and logs know.

When one worker dies, the others fail too, because their connections break. So the first cause is
looked for; a worker that only lost its peer is a consequence. What to do about it is decided by
`failure_policy.py`.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil
import torch
from torch.distributed import DistError

from app.errors import NonFiniteError, RunFailed, UserError, described, own_line, with_line
from app.launchers import crash
from app.launchers.failure_policy import Failure, Kind
from app.launchers.workers import Failures, WorkerLost
from app.training.events import WorkerInfo
from strategies.layout import LayoutError

NON_RETRYABLE = (UserError, LayoutError, NonFiniteError)
"""Errors that another attempt cannot mend; their message is a sentence for a person."""
LOST_PEER = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL and torch
    "ncclRemoteError",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)
"""Parts of what a rank's exception says when its peer is gone, or cannot be reached."""


class Hung(Exception):
    """A worker made no progress and was ended; the message says which, and since when."""


class NoCapacity(Exception):
    """The workers' places have not come back."""


class NotStarted(Exception):
    """Workers have their places, but did not start in time; the message says which."""


def _none_lost(nodes: Collection[str]) -> set[str]:
    return set()


def _is_reachable() -> bool:
    return True


def _none_pending(excluded: Sequence[str]) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What can be asked about nodes. By default there is only this machine, which lives.

    Args:
        lost: Which of these nodes, by their ids, do not live any more.
        oom_kills: How many processes of a node the kernel has ended for lack of memory; None if the
            node does not answer.
        preempted: The reasons of preemption notices so far, by the node's id.
        reachable: Whether nodes can be asked from this process at all.
        pending: Why workers have no places while nodes of these ids are excluded; "" if they have.
    """

    lost: Callable[[Collection[str]], set[str]] = _none_lost
    oom_kills: Callable[[str], int | None] = lambda node: oom_kills()
    preempted: dict[str, str] = field(default_factory=dict)
    reachable: Callable[[], bool] = _is_reachable
    pending: Callable[[Sequence[str]], str] = _none_pending


@dataclass(frozen=True, kw_only=True)
class State:
    """What the supervisor knows of the attempt that has ended.

    Args:
        workers: Those that have begun, by rank.
        step: Optimizer steps that were done.
        progressed: Whether the attempt had taken a step of its own.
        logs: The folder of rank-N.log on this machine.
        nodes: What can be asked about nodes.
        log_sizes: Of `crash.log_sizes`, before the attempt.
    """

    workers: Mapping[int, WorkerInfo]
    step: int
    progressed: bool
    logs: Path
    nodes: Nodes
    log_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def when(self) -> str:
        """When the attempt ended, for a sentence."""
        return f"after step {self.step:,}" if self.step else "before the first step"


def classify(failures: Failures, state: State, history: list[Failure]) -> Failure:
    """The failure that an attempt ended with.

    Args:
        failures: What ended each worker.
        state: Of the attempt.
        history: The failures of earlier attempts.
    """
    rank, error = first_cause(failures)
    crash_failure = _crash(rank, error, state)
    if crash_failure is not None:
        return crash_failure
    kind, sentence = _cause(rank, error, state)
    if kind is Kind.NO_CAPACITY and history:
        sentence = history[-1].sentence
    info = None if rank is None or _has_lost_peer(error) else state.workers.get(rank)
    return Failure(
        kind=kind,
        sentence=sentence,
        step=state.step,
        progressed=state.progressed,
        node=info.node if info else "",
        clock=time.monotonic(),
    )


def _crash(rank: int | None, error: BaseException, state: State) -> Failure | None:
    """The failure of a worker that died by a signal of its own making.

    The rank with the error may only have lost its peer. So the logs of all ranks are read, that of
    this rank first.
    """
    if not (isinstance(error, WorkerLost | NotStarted) or _has_lost_peer(error)):
        return None
    other_ranks = sorted(state.workers.keys() - {rank})
    ranks = other_ranks if rank is None else [rank, *other_ranks]
    read_bytes = crash.bytes_of_each_log(len(ranks))
    for suspect in ranks:
        log = state.logs / f"rank-{suspect}.log"
        died_by = crash.fatal_signal(log, state.log_sizes, read_bytes)
        if died_by is None:
            continue
        signal_name, where = died_by
        info = state.workers.get(suspect)
        return Failure(
            kind=Kind.CRASHED,
            sentence=(
                f"{_name_worker(suspect, state)} died {state.when} "
                f"{crash.sentence(signal_name, where)}{_see_log(suspect, state)}"
            ),
            step=state.step,
            progressed=state.progressed,
            node=info.node if info else "",
            clock=time.monotonic(),
            signal=signal_name,
        )
    return None


def _cause(rank: int | None, error: BaseException, state: State) -> tuple[Kind, str]:
    """The kind of failure that an error is, and a sentence about it."""
    lost_peer = _has_lost_peer(error)
    if isinstance(error, NON_RETRYABLE) or (isinstance(error, RunFailed) and not lost_peer):
        return Kind.NON_RETRYABLE, str(error)
    if isinstance(error, NoCapacity):
        return Kind.NO_CAPACITY, str(error)
    if isinstance(error, NotStarted):
        return Kind.DIED, str(error)
    if isinstance(error, Hung):
        return Kind.HUNG, str(error)
    if isinstance(error, WorkerLost):
        return _death(rank, error, state)
    if device_failure(error) is Device.HARDWARE:
        who = _name_worker(rank, state)
        return Kind.DEVICE_FAILED, f"the GPU of {who} failed {state.when}: {_first_line(error)}"
    if lost_peer:
        return _death_of_peer(rank, state)
    if isinstance(error, torch.OutOfMemoryError):
        # torch's text goes on with sizes and settings of its allocator, which are in the log.
        who = _name_worker(rank, state)
        sentence = f"{who} ran out of its GPU's memory {state.when}{_see_log(rank, state)}"
        return Kind.DEVICE_FULL, sentence
    kind, colon, message = described(error).partition(":")
    where = f" on worker {rank}" if rank is not None else ""
    return Kind.EXCEPTION, f"{kind}{where}{colon}{message}{_see_log(rank, state)}"


def _death_of_peer(rank: int | None, state: State) -> tuple[Kind, str]:
    """What became of the peer that a rank has lost."""
    workers = [info for _, info in sorted(state.workers.items())]
    lost_nodes = state.nodes.lost({info.node for info in workers})
    for info in workers:
        if info.node in lost_nodes:
            return _lost_with_node(info, state)
    for info in workers:
        if _has_ended_here(info):
            return _death(info.rank, WorkerLost(), state)
    return Kind.DIED, f"a worker that worker {rank} was connected to died {state.when}"


def _death(rank: int | None, error: WorkerLost, state: State) -> tuple[Kind, str]:
    """The kind of a death, from what the launcher and the worker's node know.

    The surest sign comes first.
    """
    info = state.workers.get(rank) if rank is not None else None
    who = str(info or error) or _name_worker(rank, state)
    node_died = "node died" in error.details.lower()
    if info is not None and (node_died or state.nodes.lost({info.node})):
        return _lost_with_node(info, state)
    if "OUT_OF_MEMORY" in error.details or "OutOfMemory" in error.details:
        return (
            Kind.OUT_OF_MEMORY,
            f"{who} died {state.when}, ended by Ray because its node ran out of memory",
        )
    if info is not None and (state.nodes.oom_kills(info.node) or 0) > info.oom_kills:
        return (
            Kind.OUT_OF_MEMORY,
            f"{who} died {state.when}, by SIGKILL: killed by the kernel for lack of memory",
        )
    how = ""
    if info is not None and (state.logs / f"rank-{rank}.log").exists():
        # A process that dies by a signal of its own making says so in its log (crash.py).
        how = " without a message, as after SIGKILL (`kill -9`, a scheduler, or lack of memory)"
    return Kind.DIED, f"{who} died {state.when}{how}{_see_log(rank, state)}"


def _has_ended_here(info: WorkerInfo) -> bool:
    """Whether a worker's process was on this machine and is gone.

    Only for launchers without Ray, where a WorkerInfo has the host's name in place of its address.
    """
    if info.node or info.ip != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(info.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _lost_with_node(info: WorkerInfo, state: State) -> tuple[Kind, str]:
    notice = state.nodes.preempted.get(info.node)
    if notice:
        sentence = f"{info} was lost {state.when} with its node, as announced ({notice})"
        return Kind.PREEMPTED, sentence
    return Kind.NODE_LOST, f"{info} died {state.when} with its node"


def _name_worker(rank: int | None, state: State) -> str:
    if rank is None:
        return "a worker"
    info = state.workers.get(rank)
    return str(info) if info else f"worker {rank}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _see_log(rank: int | None, state: State) -> str:
    log = state.logs / f"rank-{rank}.log"
    return f" (see {log})" if log.exists() else ""


def first_cause(failures: Failures) -> tuple[int | None, BaseException]:
    """The rank and the exception that came first; a lost connection to a peer is a consequence."""

    def order(failure: tuple[int | None, BaseException]) -> int:
        error = failure[1]
        if isinstance(error, NON_RETRYABLE):
            return 0
        if isinstance(error, WorkerLost | Hung | NotStarted) or device_failure(error):
            return 1
        return 3 if is_consequence(error) else 2

    return min(failures.items(), key=order)


def error_to_raise(failures: Failures, reason: str, *, here: bool) -> BaseException:
    """The error of a run that is given up.

    Args:
        failures: What ended each worker.
        reason: Why the run is given up, for a person.
        here: Whether the worker is in this process, so that its traceback is worth keeping.
    """
    error = first_cause(failures)[1]
    if isinstance(error, NON_RETRYABLE):
        return error
    was_ended = isinstance(error, WorkerLost | Hung | NotStarted) or _has_lost_peer(error)
    if here and not was_ended and not isinstance(error, torch.OutOfMemoryError):
        return error
    return RunFailed(with_line(reason, own_line(error)))


def is_consequence(error: BaseException) -> bool:
    """Whether a rank may raise this because its peer is gone."""
    signs = (*LOST_PEER, "connectFullMesh", "NCCL", "gloo")
    return isinstance(error, DistError) or any(sign in str(error) for sign in signs)


def _has_lost_peer(error: BaseException) -> bool:
    if isinstance(error, WorkerLost):
        return False
    return any(sign in str(error) for sign in LOST_PEER)


# --- what CUDA says of a device -------------------------------------------------------------------


class Device(Enum):
    """What has failed, after an error that stays.

    Every later call of CUDA raises such an error again, so the process can compute no more and must
    end. Other errors, such as out of memory, are not of this kind.
    """

    HARDWARE = "hardware"
    """Another process, or another machine, may help."""
    PROGRAM = "program"
    """A kernel did something wrong, and the same code will do it again."""


HARDWARE = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "over nvlink or a hardware error",
    "has fallen off the bus",
    "Xid",
)
"""Parts of what cudaGetErrorString, or NVIDIA's driver, says of failed hardware."""
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
"""Parts of what cudaGetErrorString says of programs.

These errors leave "the process in an inconsistent state" (CUDA Runtime API, cudaError: 214, 220,
226; 700, 702, 710, 714-719, 721). A launch fails, and a stack breaks, mostly by a wrong pointer.
"""


def device_failure(error: BaseException) -> Device | None:
    """What has failed if the device can compute no more; None if it can."""
    text = str(error)
    if any(sign in text for sign in HARDWARE):
        return Device.HARDWARE
    if "CUDA" in text and any(sign in text for sign in PROGRAM):
        return Device.PROGRAM
    return None


# --- what a node knows ----------------------------------------------------------------------------


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory.

    Counted in this container, or else on this machine.
    """
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
