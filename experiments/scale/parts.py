"""Where a step's time goes, and whether workers share the work: pure functions of what the workers of a point told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config import Config

EVEN = 0.95
"""Workers whose mean computing time is at least this share of the slowest's have the same to do."""


@dataclass
class Told:
    """What one worker tells. Seconds, per step and one for each block, unless it says otherwise."""

    node: str
    steps: list[float] = field(default_factory=list)  # whole steps
    data: list[float] = field(default_factory=list)  # of them, waiting for data
    alone: list[float] = field(default_factory=list)  # steps with nothing sent, and no waiting for data
    busy: list[float] = field(default_factory=list)  # CPU-seconds per second of those
    stalls: list[float] = field(default_factory=list)  # per checkpoint: until training could have gone on
    saves: list[float] = field(default_factory=list)  # per checkpoint: until it was committed
    spans: list[list[tuple[Any, ...]]] = field(default_factory=list)  # of a pipeline: per profiled step
    unknown: str = ""  # why there are no such steps
    items: float = 0.0  # samples (or tokens, where they vary) of a step
    memory: int = 0  # bytes, at most


@dataclass
class Measured:
    """A point. Seconds per step: step = computing + bubble + communication + data; stall and save per checkpoint."""

    step: float
    computing: float
    bubble: float  # of a pipeline: what its schedule leaves idle with the measured times
    communication: float | None  # what is not hidden behind computing; None: unknown, and part of computing
    data: float
    stall: float
    save: float
    workers_computing: list[float]  # each one's own
    balance: float  # mean of them over the largest
    why: str  # where that is far below 1
    memory: list[int]  # bytes


def measured(told: Sequence[Told], config: Config) -> Measured:
    """Medians over blocks; of the workers the slowest, since the others wait for it."""
    step = max(statistics.median(t.steps) for t in told)
    data = min(step, max(statistics.median(t.data) for t in told))
    bubble = sent = 0.0
    known = len(told) == 1 or all(t.alone or t.spans for t in told)
    if told[0].spans:
        own, bubble, sent = _pipeline(told, config)
    elif len(told) > 1 and known:
        own = [statistics.median(t.alone) for t in told]
        sent = max(0.0, step - data - max(own))
    else:
        own = [statistics.median(t.steps) - statistics.median(t.data) for t in told]
    bubble = min(bubble, step - data)
    sent = min(sent, step - data - bubble)
    return Measured(
        step,
        step - data - bubble - sent,
        bubble,
        sent if known else None,
        data,
        max(t.stalls[-1] for t in told),
        max(t.saves[-1] for t in told),
        own,
        statistics.mean(own) / max(own),
        why_uneven(told, own) if known else "",
        [t.memory for t in told],
    )


def _pipeline(told: Sequence[Told], config: Config) -> tuple[list[float], float, float]:
    """Each stage's computing, the bubble, and what sending adds to it and to the reduction; medians over steps."""
    from app.pipeline_profile import COMPUTE, figures

    from strategies.pipeline.simulate import Span

    own, bubbles, sent = [list[float]() for _ in told], list[float](), list[float]()
    for number in range(len(told[0].spans)):
        ranks = [[Span(*span) for span in t.spans[number]] for t in told]
        found = figures(ranks, config)
        for seconds, spans in zip(own, ranks):
            seconds.append(sum(s.end - s.start for s in spans if s.kind in COMPUTE))
        window, idle = found["pipeline/seconds"], found["pipeline/bubble"]
        due = min(idle, found["pipeline/bubble_by_simulation"])
        reduced = statistics.mean(sum(s.end - s.start for s in spans if s.kind == "REDUCE") for spans in ranks)
        bubbles.append(window * due)
        sent.append(window * (idle - due) + reduced)
    return [statistics.median(seconds) for seconds in own], statistics.median(bubbles), statistics.median(sent)


def why_uneven(told: Sequence[Told], own: Sequence[float]) -> str:
    """Which worker the others wait for, by how much, and why, as far as that can be seen; "" where they are even."""
    mean, slowest = statistics.mean(own), max(range(len(own)), key=own.__getitem__)
    if mean / own[slowest] >= EVEN:
        return ""
    slow = told[slowest]
    what = f"worker {slowest} on {slow.node} computes {own[slowest] / mean:.2f} times as long as the mean: "
    items = statistics.mean(t.items for t in told)
    if slow.spans:
        return what + "its stage of the pipeline holds more of the model; move blocks with parallel.stages"
    if items and slow.items > 1.03 * items:
        return what + f"it is given {slow.items / items:.2f} times the samples"
    busy = [statistics.median(t.busy) for t in told]
    if busy[slowest] < 0.9 * max(busy):
        return (
            what + f"it got {busy[slowest]:.0%} of a core where another got {max(busy):.0%}; something else runs there"
        )
    elsewhere = [seconds for t, seconds in zip(told, own) if t.node != slow.node]
    beside = [seconds for t, seconds in zip(told, own) if t.node == slow.node]
    if elsewhere and min(beside) > max(elsewhere):
        return what + f"all workers on {slow.node} are slower than those elsewhere, so the machines differ"
    return what + "it has the same work and a core of its own, so its device is slower than the others'"
