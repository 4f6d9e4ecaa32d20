"""What ended the workers: from the exceptions of an attempt, and what nodes and logs know, to one `Failure`.

When one worker dies, the others fail too: their connections break. So the first cause is looked for, and a worker that
only lost its peer is a consequence. What to do about it is decided by `failure_policy.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.errors import NonFiniteError, RunFailed, UserError
from app.launchers.failure_policy import Failure, Kind, describe_death
from app.launchers.workers import Failures, WorkerInfo, WorkerLost
from strategies.layout import LayoutError

NON_RETRYABLE = (UserError, LayoutError, NonFiniteError)
"""What another attempt cannot mend, and says so in a sentence of its own."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a rank's exception says when its peer is gone, and can have no other cause."""
LAST_BYTES = 8192
FATAL = "Fatal Python error: "


class Hung(Exception):
    """A worker made no progress and was ended; says which, and since when."""


class NoCapacity(Exception):
    """The workers' places have not come back."""


@dataclass(frozen=True)
class Nodes:
    """What can be asked about nodes; without Ray there is only this machine, which lives."""

    is_alive: Callable[[str], bool] = lambda node: True
    oom_kills: Callable[[str], int | None] = lambda node: oom_kills()
    preempted: Mapping[str, str] = ()  # type: ignore[assignment]  # notices so far, by node


@dataclass(frozen=True)
class State:
    """What the supervisor knows of the attempt that has ended."""

    workers: Mapping[int, WorkerInfo]  # as they said when they began
    earlier: Mapping[int, WorkerInfo]  # of the attempt before
    step: int
    progressed: bool
    logs: Path  # folder of rank-N.log on this machine
    nodes: Nodes


def classify(failures: Failures, state: State, history: list[Failure]) -> Failure:
    """The failure that an attempt ended with."""
    rank, error = first_cause(failures)
    kind, sentence, inferred = _cause(rank, error, state)
    if kind is Kind.NO_CAPACITY and history:
        before = history[-1]
        sentence, inferred = before.sentence, before.inferred
        # Peers notice at once that a worker is gone, Ray some seconds later that its node is.
        if before.inferred and (lost := _lost_with_node(state.earlier, state)):
            sentence, inferred = lost[1], False
    info = state.workers.get(rank) if rank is not None and not _lost_peer(error) else None
    node = info.node if info else ""
    return Failure(kind, sentence, state.step, state.progressed, node, time.monotonic(), inferred)


def _cause(rank: int | None, error: BaseException, state: State) -> tuple[Kind, str, bool]:
    if isinstance(error, NON_RETRYABLE) or (isinstance(error, RunFailed) and not _lost_peer(error)):
        return Kind.NON_RETRYABLE, str(error), False
    if isinstance(error, NoCapacity):
        return Kind.NO_CAPACITY, str(error), False
    if isinstance(error, Hung):
        return Kind.HUNG, str(error), False
    if isinstance(error, WorkerLost):
        return *_death(rank, error, state), False
    if _lost_peer(error):
        if lost := _lost_with_node(state.workers, state):
            return *lost, False
        when = f"after step {state.step:,}" if state.step else "before the first step"
        return Kind.DIED, f"a worker that worker {rank} was connected to died {when}", True
    text = (str(error).strip().splitlines() or [""])[0]
    where = f" on worker {rank}" if rank is not None else ""
    log = f" (see {state.logs}/rank-{rank}.log)" if rank is not None else ""
    return Kind.EXCEPTION, f"{type(error).__name__}{where}: {text}{log}", False


def _death(rank: int | None, error: WorkerLost, state: State) -> tuple[Kind, str]:
    """With what its node, its log and the launcher know of a rank's end."""
    info = state.workers.get(rank) if rank is not None else None
    ray_oom = "OUT_OF_MEMORY" in error.details or "OutOfMemory" in error.details
    if info is None:
        who = str(error) or (f"worker {rank}" if rank is not None else "a worker")
        return describe_death(who, state.step, ray_oom=ray_oom)
    lost = "node died" in error.details.lower() or not state.nodes.is_alive(info.node)
    kills = None if lost else state.nodes.oom_kills(info.node)
    return describe_death(
        str(info),
        state.step,
        node_lost=lost,
        announced=dict(state.nodes.preempted).get(info.node, ""),
        oom_kills=max(0, kills - info.oom_kills) if kills is not None else 0,
        ray_oom=ray_oom,
        fatal_error=fatal_error(state.logs / f"rank-{rank}.log", info.log_bytes),
    )


def _lost_with_node(workers: Mapping[int, WorkerInfo], state: State) -> tuple[Kind, str] | None:
    """The death of the first of these workers whose node is gone."""
    for _, info in sorted(workers.items()):
        if not state.nodes.is_alive(info.node):
            announced = dict(state.nodes.preempted).get(info.node, "")
            return describe_death(str(info), state.step, node_lost=True, announced=announced)
    return None


def first_cause(failures: Failures) -> tuple[int | None, BaseException]:
    """The rank and the exception that came first: a peer that lost its connection is a consequence."""

    def order(item: tuple[int | None, BaseException]) -> int:
        error = item[1]
        if isinstance(error, NON_RETRYABLE):
            return 0
        if isinstance(error, WorkerLost | Hung):
            return 1
        return 3 if is_consequence(error) else 2

    return min(failures.items(), key=order)


def error_to_raise(failures: Failures, reason: str, *, here: bool) -> BaseException:
    """What to raise when the run is given up. here: the worker is in this process, so its traceback tells."""
    error = first_cause(failures)[1]
    own = isinstance(error, NON_RETRYABLE) or (here and not isinstance(error, WorkerLost | Hung))
    return error if own else RunFailed(reason)


def is_consequence(error: BaseException) -> bool:
    """Whether this may be what a rank says whose peer is gone."""
    signs = (*LOST_PEER, "connectFullMesh", "NCCL", "gloo")
    return type(error).__name__.startswith("Dist") or any(sign in str(error) for sign in signs)


def _lost_peer(error: BaseException) -> bool:
    return not isinstance(error, WorkerLost) and any(sign in str(error) for sign in LOST_PEER)


# --- what a node and a log know ---------------------------------------------------------------------------------


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory, in this container or else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def fatal_error(log: Path, since: int) -> str:
    """What Python wrote into a worker's log, after `since` bytes, when a segmentation fault or the like ended it."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.startswith(FATAL)), "")
