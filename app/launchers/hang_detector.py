"""Does the run hang, and which rank is to blame? Decided from the ranks' heartbeats alone, without any process.

Progress is any change of any rank's phase, step or ticks. When there has been none for far longer than ever before in
this attempt, and nothing moves for about as long again, the rank that does not answer, does not wait for the others, or
is furthest behind is the one. Where there is no history, limits are longer: before the second step only a rank that
does not answer at all is stuck, loading and saving have half an hour, reading data and evaluating a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.heartbeat import UNBOUNDED_PHASES
from app.launchers.workers import Status

SUSPICIOUS = 5.0
"""A pause is suspicious when it lasts this many times the longest one before."""
WINDOW = 2.0
"""After that, nothing must move for this many times the longest pause."""
COMPILED = 10.0
"""Every limit is this many times longer where a new shape is compiled."""
SILENT, SILENT_SECONDS = 3.0, 20.0
"""Times `least`, and seconds at least, that a rank may not answer before there is a history."""
ANSWER_SECONDS = 3.0
"""A rank whose newest heartbeat is older than this does not answer."""
EVALUATION, MINUTE = 6.0, 60.0
"""A batch of evaluation, or of data, may take this many times the window, a minute at least."""
UNBOUNDED_SECONDS = 1800.0


@dataclass(frozen=True)
class Hang:
    """The rank that holds up the others, why, and all ranks that do not answer."""

    rank: int
    why: str
    silent: frozenset[int]


@dataclass
class HangDetector:
    """least: seconds below which no pause is suspicious; 0 suspects none. now: of the clock that `update` gets."""

    least: float
    now: float
    since: float = field(init=False)
    longest: float = 0.0
    steps: int = 0
    _newest: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = self.now

    def update(self, statuses: Mapping[int, Status], now: float) -> Hang | None:
        """Takes what every rank last said; the hang, once it is sure."""
        newest = {rank: (status.phase, status.step, status.ticks) for rank, status in statuses.items()}
        if newest != self._newest:
            if self._stepped(newest) and self.steps > 2:  # the first steps load, allocate and compile
                self.longest = max(self.longest, now - self.since)
            self._newest, self.since = newest, now
            return None
        if self.least <= 0 or not statuses:
            return None
        return self._judge(statuses, now - self.since)

    def _stepped(self, newest: Mapping[int, tuple[str, int, int]]) -> bool:
        """Whether a step was finished since the last change; counts them."""
        before = max((step for _, step, _ in self._newest.values()), default=None)
        after = max((step for _, step, _ in newest.values()), default=None)
        if before is not None and after is not None and after > before:
            self.steps += 1
        return self.steps > 0

    def _judge(self, statuses: Mapping[int, Status], paused: float) -> Hang | None:
        known = self.steps > 1
        limit = max(self.least, SUSPICIOUS * self.longest) if known else self.least
        window = max(self.least, WINDOW * self.longest) if known else UNBOUNDED_SECONDS
        silent = frozenset(rank for rank, status in statuses.items() if status.age > ANSWER_SECONDS)
        if silent:
            patience = window if known else max(SILENT_SECONDS, SILENT * self.least)
            if paused < limit + patience:
                return None
            return Hang(min(silent), f"does not answer, and nothing has moved for {paused:.0f} s", silent)
        if paused < limit + max(_patience(status.phase, window) for status in statuses.values()):
            return None
        busy = [rank for rank, status in statuses.items() if not status.waiting]
        behind = min(busy or statuses, key=lambda rank: (statuses[rank].step, statuses[rank].ticks, rank))
        status = statuses[behind]
        why = f"has been {status.phase} after step {status.step:,} for {paused:.0f} s without progress"
        return Hang(behind, why, silent)


def _patience(phase: str, window: float) -> float:
    if phase in UNBOUNDED_PHASES:
        return UNBOUNDED_SECONDS
    return max(MINUTE, EVALUATION * window) if phase in ("reading", "evaluating") else window
