"""What to do after a failure: pure functions, whose decisions the supervisor carries out.

decide   all failures so far, capacity, limits → retry, resize, take a smaller layout, wait,
         exclude a node, or give up
growth   capacity → how many workers to continue with when there is room again
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

WINDOW_SECONDS = 3600.0
"""Older failures do not count: a run of weeks loses more nodes than any limit would allow."""
MAX_PAUSE_SECONDS = 60.0
SMALLER_LAYOUTS = 4
"""How many layouts are tried after one that was too large; each is a start of all workers."""
USE_LESS_MEMORY = (
    "write a smaller train.micro_batch_size or train.activation_checkpointing=selective; "
    "`trireme plan` lists what fits"
)
EXCLUDE_AFTER = 2
"""How many of the counted failures must begin at a node to exclude it, if others have room."""


class Kind(Enum):
    """What sort of failure it was, by what can be done about it."""

    NON_RETRYABLE = "not retryable"
    """Another attempt would end the same: wrong input, or a loss that is not finite."""
    EXCEPTION = "exception"
    """Code raised an exception, which may or may not come again."""
    DIED = "died"
    """A process is gone."""
    CRASHED = "crashed"
    """A process died by a signal of its own making, such as SIGSEGV; it may do so again."""
    OUT_OF_MEMORY = "out of memory"
    """A process was ended because its node ran out of memory."""
    DEVICE_FULL = "device full"
    """A worker's GPU has less memory than its part of the training takes."""
    DEVICE_FAILED = "device failed"
    """A GPU's hardware failed, according to CUDA."""
    HUNG = "hung"
    """A process makes no progress."""
    NODE_LOST = "node lost"
    PREEMPTED = "preempted"
    """A machine is gone as announced, after a checkpoint was saved."""
    NO_CAPACITY = "no capacity"
    """No new failure, but the places of the workers have not come back."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt ended.

    Args:
        kind: What sort of failure it was.
        sentence: What happened and where, for a person.
        step: Optimizer steps that were done.
        progressed: Whether the attempt had taken a step of its own.
        node: The id of the node at which the failure began; "" if that is not known.
        clock: When, in seconds of the monotonic clock.
        signal: The signal's name if the kind is CRASHED; "" otherwise.
    """

    kind: Kind
    sentence: str
    step: int
    progressed: bool
    node: str = ""
    clock: float = 0.0
    signal: str = ""

    @property
    def too_large_to_start(self) -> bool:
        """Whether a GPU's memory was full before the attempt had taken a step."""
        return self.kind is Kind.DEVICE_FULL and not self.progressed


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that decides.

    Args:
        max_restarts: Counted failures after which the run is given up.
        elastic_seconds: How long lost places may take to come back; None means for ever.
        min_workers: The smallest number of workers to continue with.
    """

    max_restarts: int
    elastic_seconds: float | None = None
    min_workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What there is to continue with.

    Args:
        workers: Workers of the attempt that failed, or that runs.
        wanted: Workers at the start of the run.
        available: Workers that could be placed now, including those that are left.
        valid: Numbers of workers that make a layout.
        available_without: What would be available without a node, by the node's id.
        missing_seconds: How long less has been available than there are workers.
        smaller_layout: Whether `strategy: auto` has a layout that takes less memory of a GPU.
    """

    workers: int
    wanted: int
    available: int
    valid: tuple[int, ...] = ()
    available_without: Mapping[str, int] = field(default_factory=dict)
    missing_seconds: float = 0.0
    smaller_layout: bool = False


class Action(Enum):
    """What the supervisor can do after a failure."""

    RETRY = "retry"
    RESIZE = "retry with fewer workers"
    SMALLER_LAYOUT = "retry with a layout that takes less memory"
    WAIT = "wait"
    EXCLUDE_NODE = "exclude a node"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do after a failure.

    Args:
        action: What to do.
        reason: Why, for a person.
        pause: Seconds before the next attempt.
        workers: How many to continue with, for RESIZE and EXCLUDE_NODE; 0 otherwise.
        node: The node's id for EXCLUDE_NODE; "" otherwise.
    """

    action: Action
    reason: str
    pause: float = 0.0
    workers: int = 0
    node: str = ""


def decide(history: list[Failure], limits: Limits, capacity: Capacity | None = None) -> Decision:
    """Decides what to do after the newest failure.

    Args:
        history: All failures so far, the newest last.
        limits: Of the configuration.
        capacity: What there is to continue with; None if the number of workers cannot change.
    """
    newest = history[-1]
    too_large = sum(failure.too_large_to_start for failure in history)
    has_smaller = capacity is not None and capacity.smaller_layout
    if newest.too_large_to_start and has_smaller and too_large <= SMALLER_LAYOUTS:
        return Decision(action=Action.SMALLER_LAYOUT, reason=newest.sentence)
    give_up_reason = _why_give_up(history, limits.max_restarts)
    if give_up_reason:
        return Decision(action=Action.GIVE_UP, reason=give_up_reason)
    pause = _pause(history)
    retry = Decision(action=Action.RETRY, reason=newest.sentence, pause=pause)
    if capacity is None:
        return retry
    suspect = _suspect_node(history)
    workers_elsewhere = 0
    if suspect:
        available_elsewhere = capacity.available_without.get(suspect, 0)
        workers_elsewhere = _fitting(available_elsewhere, capacity, limits)
    is_elastic = limits.elastic_seconds is not None
    if workers_elsewhere and (workers_elsewhere == capacity.workers or is_elastic):
        return Decision(
            action=Action.EXCLUDE_NODE,
            reason=(
                f"{newest.sentence}; {EXCLUDE_AFTER} failures began at that node, which is excluded"
            ),
            pause=pause,
            workers=workers_elsewhere,
            node=suspect,
        )
    if capacity.available >= capacity.workers:
        return retry
    reason = (
        f"{newest.sentence}; there is room for {capacity.available} of {capacity.workers} workers"
    )
    fewer = fewer_workers(capacity, limits)
    if fewer:
        return Decision(action=Action.RESIZE, reason=reason, pause=pause, workers=fewer)
    return Decision(action=Action.WAIT, reason=reason, pause=pause)


def fewer_workers(capacity: Capacity, limits: Limits) -> int:
    """How many workers to continue with if missing places were waited for long enough; 0: wait."""
    if limits.elastic_seconds is None or capacity.missing_seconds < limits.elastic_seconds:
        return 0
    return _fitting(capacity.available, capacity, limits)


def growth(capacity: Capacity) -> int | None:
    """How many workers to continue with if there is room for more than there are; None: no more."""
    limit = min(capacity.available, capacity.wanted)
    most = max((workers for workers in capacity.valid if workers <= limit), default=0)
    return most if most > capacity.workers else None


def _fitting(available: int, capacity: Capacity, limits: Limits) -> int:
    """The most workers that find room and make a layout; 0 if none do."""
    limit = min(available, capacity.workers)
    fitting = [workers for workers in capacity.valid if limits.min_workers <= workers <= limit]
    return max(fitting, default=0)


def _why_give_up(history: list[Failure], max_restarts: int) -> str:
    """Why another attempt would not help, or is not wanted; "" if it may help."""
    newest = history[-1]
    earlier = history[:-1]
    if newest.kind is Kind.NON_RETRYABLE:
        return newest.sentence
    if newest.too_large_to_start:
        return f"{newest.sentence}: {USE_LESS_MEMORY}"
    if newest.kind in (Kind.EXCEPTION, Kind.DEVICE_FULL):
        if not newest.progressed:
            return newest.sentence
        for failure in earlier:
            is_same = failure.kind is newest.kind and failure.sentence == newest.sentence
            if is_same and failure.step == newest.step:
                return f"{newest.sentence}, twice at the same step: trying again would not help"
    if newest.kind is Kind.CRASHED:
        # A single crash may come from faulty memory or a race. If it comes again, no step further
        # on, it is the program.
        for failure in earlier:
            if failure.signal == newest.signal and failure.step >= newest.step:
                return (
                    f"{newest.sentence}, for the second time and no step further: trying again "
                    "would not help"
                )
    if len(_counted(history)) > max_restarts:
        if not max_restarts:
            return f"{newest.sentence}; fault.max_restarts is 0"
        return f"{newest.sentence}; fault.max_restarts={max_restarts} is used up"
    return ""


def _counted(history: list[Failure]) -> list[Failure]:
    """The failures that count for the limit: recent, not announced, and not of a layout."""
    window_start = history[-1].clock - WINDOW_SECONDS
    not_counted = (Kind.PREEMPTED, Kind.NO_CAPACITY)
    return [
        failure
        for failure in history
        if failure.clock >= window_start
        and failure.kind not in not_counted
        and not failure.too_large_to_start
    ]


def _pause(history: list[Failure]) -> float:
    """Seconds to wait before the next attempt.

    None after an attempt that took a step; otherwise 1, 2, 4, … for each attempt since the last one
    that did.
    """
    idle_attempts = 0
    for failure in reversed(history):
        if failure.kind is Kind.NO_CAPACITY:
            continue
        if failure.progressed:
            break
        idle_attempts += 1
    if not idle_attempts:
        return 0.0
    return min(MAX_PAUSE_SECONDS, 2.0 ** (idle_attempts - 1))


def _suspect_node(history: list[Failure]) -> str:
    """The node at which the newest failure and others began; "" if none stands out.

    A lost node is no suspect, because it need not be excluded.
    """
    node_failures = (
        Kind.DIED,
        Kind.CRASHED,
        Kind.OUT_OF_MEMORY,
        Kind.DEVICE_FAILED,
        Kind.HUNG,
    )
    newest = history[-1]
    if newest.kind not in node_failures:
        return ""
    failures_by_node = Counter(failure.node for failure in _counted(history) if failure.node)
    return newest.node if failures_by_node[newest.node] >= EXCLUDE_AFTER else ""


def mean_time_between_failures(failures: int, seconds: float, nodes: int) -> float:
    """Seconds between failures, with one failure per node and month as the prior.

    Args:
        failures: Observed so far.
        seconds: Of observation.
        nodes: How many nodes there are.
    """
    prior_seconds = 30 * 86400.0 / max(1, nodes)
    return (seconds + prior_seconds) / (failures + 1)
