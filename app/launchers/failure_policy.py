"""What to do after a failure, and what to call it: pure functions, whose answers the launchers carry out.

death_of(what is known of a rank that is gone)          -> a kind and one sentence
decide(every failure so far, what there is, the limits) -> go on here, smaller, wait, without a node, or give up
grown(what there is)                                    -> how many workers to go on with when there is room again
interval(cost of a checkpoint, seconds between failures) -> how often to save
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

WINDOW_SECONDS = 3600.0
"""Failures longer ago than this are forgiven: a run of weeks loses more nodes than any limit would allow."""
LONGEST_PAUSE_SECONDS = 60.0
SURE_SECONDS = 3.0
"""Room must have been missing this long before excluded nodes are used again: Ray may be moving places just now."""
BLAME = 2
"""A node at which this many of the counted failures began is avoided, where there is room elsewhere."""


class Kind(Enum):
    """What sort of thing went wrong, by what can be done about it."""

    HOPELESS = "hopeless"  # trying again would give the same: wrong input, a loss that is not finite
    EXCEPTION = "exception"  # code raised something; may or may not come again
    DIED = "died"  # a process is gone
    MEMORY = "memory"  # a process was ended because its node ran out of memory
    HUNG = "hung"  # a process does not get on
    NODE = "node"  # a machine is gone
    NOTICE = "notice"  # a machine or process is gone as it was announced to, and a checkpoint was asked for in time
    NO_ROOM = "no room"  # nothing new happened: the workers' places have not come back


@dataclass(frozen=True)
class Failure:
    kind: Kind
    sentence: str  # what happened, where, for a person
    step: int  # optimizer steps that were done when it happened
    progressed: bool  # whether this start had taken a step of its own
    node: str = ""  # the id of the node it began at, where that is known
    at: float = 0.0  # seconds of a clock that does not jump
    hearsay: bool = False  # only its peers told of it, and nobody knows yet whom they lost


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that decides."""

    max_restarts: int
    elastic_seconds: float | None = None  # how long lost places may take to come back; None: for ever
    min_workers: int = 1


@dataclass(frozen=True)
class Room:
    """What there is to go on with; room: workers that could be placed now, those that are left included."""

    workers: int  # of the attempt that failed, or that runs
    wanted: int  # at the start of the run
    room: int
    valid: tuple[int, ...] = ()  # numbers of workers that make a layout
    without: Mapping[str, int] = field(default_factory=dict)  # the room there would be without a node, by its id
    lacking_seconds: float = 0.0  # since when there has been less room than workers
    pardoned: int = 0  # the room there would be with the nodes that were excluded for their failures


class Action(Enum):
    RETRY = "retry here"
    SMALLER = "retry smaller"
    WAIT = "wait"
    EXCLUDE = "exclude the node"
    PARDON = "use excluded nodes again"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    pause: float = 0.0  # seconds before the next start
    workers: int = 0  # SMALLER, EXCLUDE, PARDON: with how many
    node: str = ""  # EXCLUDE: which


def decide(history: list[Failure], limits: Limits, there: Room | None = None) -> Decision:
    """What to do, given every failure so far, the newest last. there: None where the workers are what they are."""
    newest = history[-1]
    if reason := _hopeless(history, limits.max_restarts):
        return Decision(Action.GIVE_UP, reason)
    pause = _pause(history)
    if there is None:
        return Decision(Action.RETRY, newest.sentence, pause)
    node = _to_blame(history)
    others = _fits(there.without.get(node, 0), there, limits) if node else 0
    if others and (others == there.workers or limits.elastic_seconds is not None):
        reason = f"{newest.sentence}; {BLAME} failures began at that node, which gets no more workers"
        return Decision(Action.EXCLUDE, reason, pause, others, node)
    if there.room >= there.workers:
        return Decision(Action.RETRY, newest.sentence, pause)
    lacking = f"{newest.sentence}; there is room for {there.room} of {there.workers} workers"
    if _without_need(there):
        return Decision(Action.PARDON, f"{lacking} without the excluded nodes", pause, there.workers)
    late = limits.elastic_seconds is not None and there.lacking_seconds >= limits.elastic_seconds
    if late and (smaller := _fits(max(there.room, there.pardoned), there, limits)):
        return Decision(Action.SMALLER if smaller <= there.room else Action.PARDON, lacking, pause, smaller)
    return Decision(Action.WAIT, lacking, pause)


def _without_need(there: Room) -> bool:
    """Whether nodes are excluded that there would be room with: one that has failed is better than none."""
    return there.pardoned >= there.workers > there.room and there.lacking_seconds >= SURE_SECONDS


def settled(there: Room, limits: Limits) -> bool:
    """Whether what is waited for need not be waited for any longer: `decide` would say so."""
    if _without_need(there):
        return True
    late = limits.elastic_seconds is not None and there.lacking_seconds >= limits.elastic_seconds
    return late and _fits(max(there.room, there.pardoned), there, limits) > 0


def grown(there: Room) -> int | None:
    """How many workers to go on with, where there is room for more than there are; None: no more."""
    most = max((n for n in there.valid if n <= min(there.room, there.wanted)), default=0)
    return most if most > there.workers else None


def _fits(room: int, there: Room, limits: Limits) -> int:
    """The most workers that find room and make a layout; 0: none."""
    fitting = (n for n in there.valid if limits.min_workers <= n <= min(room, there.workers))
    return max(fitting, default=0)


def _hopeless(history: list[Failure], max_restarts: int) -> str:
    """Why another start would not help, or is not wanted; "" if it may."""
    newest = history[-1]
    if newest.kind is Kind.HOPELESS:
        return newest.sentence
    if newest.kind is Kind.EXCEPTION:
        if not newest.progressed:
            return newest.sentence
        same = [f for f in history[:-1] if f.kind is Kind.EXCEPTION and f.sentence == newest.sentence]
        if any(f.step == newest.step for f in same):
            return f"{newest.sentence}, twice at the same step: trying again would not help"
    if len(_counted(history)) > max_restarts:
        limit = f"fault.max_restarts={max_restarts} is used up" if max_restarts else "fault.max_restarts is 0"
        return f"{newest.sentence}; {limit}"
    return ""


def _counted(history: list[Failure]) -> list[Failure]:
    """Those that the limit is about: not long ago, and not announced."""
    since = history[-1].at - WINDOW_SECONDS
    return [f for f in history if f.at >= since and f.kind not in (Kind.NOTICE, Kind.NO_ROOM)]


def _pause(history: list[Failure]) -> float:
    """Seconds to wait: none after a start that took a step; else 1, 2, 4, … since the last one that did."""
    idle = 0
    for failure in reversed([f for f in history if f.kind is not Kind.NO_ROOM]):
        if failure.progressed:
            break
        idle += 1
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** (idle - 1)) if idle else 0.0


def _to_blame(history: list[Failure]) -> str:
    """The node at which the newest failure and others began; "" if none stands out. A node that is gone needs none."""
    if history[-1].kind not in (Kind.DIED, Kind.MEMORY, Kind.HUNG):
        return ""
    began = Counter(f.node for f in _counted(history) if f.node)
    node = history[-1].node
    return node if began[node] >= BLAME else ""


# --- what to call it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """What is known of a rank that is gone."""

    who: str  # "worker 3, process 4711 on 10.0.0.2,"
    step: int
    node_gone: bool = False
    announced: str = ""  # the warning that came before: "AWS takes it back at 12:03"
    told: str = ""  # how its process was asked to end: "SIGTERM"
    kernel_kills: int = 0  # processes that the kernel of its node has ended for memory since the attempt began
    ray_memory: bool = False  # Ray says it ended it for memory
    last_words: str = ""  # of its log: "Fatal Python error: Segmentation fault"


def death_of(death: Death) -> tuple[Kind, str]:
    """What kind of end it was, and the sentence for a person; the surest sign decides."""
    when = f"after step {death.step:,}" if death.step else "before the first step"
    if death.node_gone and death.announced:
        return Kind.NOTICE, f"{death.who} went {when} with its node, as announced ({death.announced})"
    if death.node_gone:
        return Kind.NODE, f"{death.who} died {when} with its node"
    if death.ray_memory:
        return Kind.MEMORY, f"{death.who} died {when}, ended by Ray because its node ran out of memory"
    if death.told:
        return Kind.NOTICE, f"{death.who} went {when}, as announced ({death.told})"
    if death.last_words:
        return Kind.DIED, f"{death.who} died {when}: {death.last_words}"
    if death.kernel_kills:
        return Kind.MEMORY, f"{death.who} died {when}, killed by the kernel for memory"
    return Kind.DIED, f"{death.who} died {when}"


# --- how often to save ------------------------------------------------------------------------------------------


def interval(stall: float, write: float, between_failures: float) -> float:
    """Seconds between two checkpoints that lose least, by Young's formula (1974) with Daly's next terms (2006).

    stall: seconds that a save holds training up. write: seconds until it is committed in the background; one begins
    only when the one before has ended. between_failures: mean seconds.
    """
    if stall >= 2 * between_failures:
        return max(write, between_failures)
    ratio = math.sqrt(stall / (2 * between_failures))
    best = math.sqrt(2 * stall * between_failures) * (1 + ratio / 3 + ratio**2 / 9) - stall
    return max(write, best)


def between_failures(failures: int, seconds: float, nodes: int) -> float:
    """Mean seconds between failures: what was seen, and before that one failure per node and month."""
    prior = 30 * 86400.0 / max(1, nodes)
    return (seconds + prior) / (failures + 1)
