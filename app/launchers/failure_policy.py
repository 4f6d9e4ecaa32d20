"""What to do after a failure: pure functions, whose decisions the supervisor carries out.

decide(all failures so far, the capacity there is, limits) -> retry, resize, wait, exclude a node, or give up
growth(the capacity there is)                              -> how many workers to continue with when there is room again
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

WINDOW_SECONDS = 3600.0
"""Failures longer ago than this do not count: a run of weeks loses more nodes than any limit would allow."""
MAX_PAUSE_SECONDS = 60.0
EXCLUDE_AFTER = 2
"""A node at which this many of the counted failures began is excluded, where there is room on other nodes."""


class Kind(Enum):
    """What sort of failure it was, by what can be done about it."""

    NON_RETRYABLE = "not retryable"  # another attempt would end the same: wrong input, a loss that is not finite
    EXCEPTION = "exception"  # code raised something; it may or may not come again
    DIED = "died"  # a process is gone
    CRASHED = "crashed"  # a process did what it must not, and died by SIGSEGV, say: its program will do it again
    OUT_OF_MEMORY = "out of memory"  # a process was ended because its node ran out of memory
    DEVICE_FAILED = "device failed"  # a GPU's hardware, by what CUDA says
    HUNG = "hung"  # a process makes no progress
    NODE_LOST = "node lost"
    PREEMPTED = "preempted"  # a machine is gone as announced, and a checkpoint was asked for in time
    NO_CAPACITY = "no capacity"  # nothing new happened: the workers' places have not come back


@dataclass(frozen=True)
class Failure:
    kind: Kind
    sentence: str  # what happened and where, for a person
    step: int  # optimizer steps that were done
    progressed: bool  # whether the attempt had taken a step of its own
    node: str = ""  # the id of the node it began at, where that is known
    at: float = 0.0  # seconds of a monotonic clock
    signal: str = ""  # CRASHED: by which it died


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that decides."""

    max_restarts: int
    elastic_seconds: float | None = None  # how long lost places may take to come back; None: for ever
    min_workers: int = 1


@dataclass(frozen=True)
class Capacity:
    """What there is to continue with. available: workers that could be placed now, those that are left included."""

    workers: int  # of the attempt that failed, or that runs
    wanted: int  # at the start of the run
    available: int
    valid: tuple[int, ...] = ()  # numbers of workers that make a layout
    without: Mapping[str, int] = field(default_factory=dict)  # what would be available without a node, by its id
    missing_seconds: float = 0.0  # since when less has been available than there are workers


class Action(Enum):
    RETRY = "retry"
    RESIZE = "retry with fewer workers"
    WAIT = "wait"
    EXCLUDE_NODE = "exclude a node"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    pause: float = 0.0  # seconds before the next attempt
    workers: int = 0  # RESIZE, EXCLUDE_NODE: with how many
    node: str = ""  # EXCLUDE_NODE: which


def decide(history: list[Failure], limits: Limits, capacity: Capacity | None = None) -> Decision:
    """What to do, given all failures so far, the newest last. capacity: None where the workers cannot change."""
    newest = history[-1]
    if reason := _why_give_up(history, limits.max_restarts):
        return Decision(Action.GIVE_UP, reason)
    pause = _pause(history)
    if capacity is None:
        return Decision(Action.RETRY, newest.sentence, pause)
    node = _suspect_node(history)
    others = _fitting(capacity.without.get(node, 0), capacity, limits) if node else 0
    if others and (others == capacity.workers or limits.elastic_seconds is not None):
        reason = f"{newest.sentence}; {EXCLUDE_AFTER} failures began at that node, which gets no more workers"
        return Decision(Action.EXCLUDE_NODE, reason, pause, others, node)
    if capacity.available >= capacity.workers:
        return Decision(Action.RETRY, newest.sentence, pause)
    missing = f"{newest.sentence}; there is room for {capacity.available} of {capacity.workers} workers"
    if fewer := fewer_workers(capacity, limits):
        return Decision(Action.RESIZE, missing, pause, fewer)
    return Decision(Action.WAIT, missing, pause)


def fewer_workers(capacity: Capacity, limits: Limits) -> int:
    """How many workers to continue with once missing places were waited for long enough; 0: wait on."""
    if limits.elastic_seconds is None or capacity.missing_seconds < limits.elastic_seconds:
        return 0
    return _fitting(capacity.available, capacity, limits)


def growth(capacity: Capacity) -> int | None:
    """How many workers to continue with, where there is room for more than there are; None: no more."""
    most = max((n for n in capacity.valid if n <= min(capacity.available, capacity.wanted)), default=0)
    return most if most > capacity.workers else None


def _fitting(available: int, capacity: Capacity, limits: Limits) -> int:
    """The most workers that find room and make a layout; 0: none."""
    fitting = (n for n in capacity.valid if limits.min_workers <= n <= min(available, capacity.workers))
    return max(fitting, default=0)


def _why_give_up(history: list[Failure], max_restarts: int) -> str:
    """Why another attempt would not help, or is not wanted; "" if it may."""
    newest = history[-1]
    if newest.kind is Kind.NON_RETRYABLE:
        return newest.sentence
    if newest.kind is Kind.EXCEPTION:
        if not newest.progressed:
            return newest.sentence
        same = [f for f in history[:-1] if f.kind is Kind.EXCEPTION and f.sentence == newest.sentence]
        if any(f.step == newest.step for f in same):
            return f"{newest.sentence}, twice at the same step: trying again would not help"
    if newest.kind is Kind.CRASHED:
        # Once may be memory that failed or threads that met; the same again, no step further on, is the program.
        same = [failure for failure in history[:-1] if failure.signal == newest.signal]
        if any(failure.step >= newest.step for failure in same):
            return f"{newest.sentence}, for the second time and no step further: trying again would not help"
    if len(_counted(history)) > max_restarts:
        limit = f"fault.max_restarts={max_restarts} is used up" if max_restarts else "fault.max_restarts is 0"
        return f"{newest.sentence}; {limit}"
    return ""


def _counted(history: list[Failure]) -> list[Failure]:
    """Those that count for the limit: recent, and not announced."""
    since = history[-1].at - WINDOW_SECONDS
    return [f for f in history if f.at >= since and f.kind not in (Kind.PREEMPTED, Kind.NO_CAPACITY)]


def _pause(history: list[Failure]) -> float:
    """Seconds to wait: none after an attempt that took a step; else 1, 2, 4, … since the last one that did."""
    idle = 0
    for failure in reversed([f for f in history if f.kind is not Kind.NO_CAPACITY]):
        if failure.progressed:
            break
        idle += 1
    return min(MAX_PAUSE_SECONDS, 2.0 ** (idle - 1)) if idle else 0.0


def _suspect_node(history: list[Failure]) -> str:
    """The node at which the newest failure and others began; "" if none stands out. A lost node needs no exclusion."""
    if history[-1].kind not in (Kind.DIED, Kind.CRASHED, Kind.OUT_OF_MEMORY, Kind.DEVICE_FAILED, Kind.HUNG):
        return ""
    began = Counter(f.node for f in _counted(history) if f.node)
    node = history[-1].node
    return node if began[node] >= EXCLUDE_AFTER else ""


def mean_time_between_failures(failures: int, seconds: float, nodes: int) -> float:
    """Seconds: as observed, with one failure per node and month as the prior."""
    prior = 30 * 86400.0 / max(1, nodes)
    return (seconds + prior) / (failures + 1)
