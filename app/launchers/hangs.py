"""Is a rank stuck? Decided by pure functions from what the ranks last said; `actor_group.py` asks and acts.

While rank 0 is heard of nobody is asked anything. When it has been silent for far longer than ever before in this run,
all ranks are asked, every second, how far they are. If nothing moves for twice the longest silence, the rank that does
not answer, does not wait for its peers, or is furthest behind, is the one.

What has no history gets more: before a second step is heard of, only a rank that does not answer at all is stuck, and
later; what compiles may do so again for a shape that is new; reading data and evaluating have a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.heartbeat import SLOW, Beat

FACTOR = 5.0
"""A silence is suspicious when it lasts this many times the longest one before."""
WINDOW = 2.0
"""And nothing must move for this many times the longest one."""
COMPILED = 10.0
"""How many times longer every silence may be where a new shape is compiled."""
DUMB, DUMB_SECONDS = 3.0, 20.0
"""How many times `least`, and seconds at least, a rank may not answer at all before there is a history: what is
loaded or compiled leaves its other threads a moment now and then, and a process that is stopped does not."""
EVALUATION = 6.0
"""A batch of evaluation has no history: it may take this many times longer than a step."""
MINUTE = 60.0
"""What reading data and a batch of evaluation may take at least."""
PATIENCE_SECONDS = 1800.0
"""How long a rank may load, save, or compile its first step without a sign of progress."""
LOOKS_APART_SECONDS = 1.0


@dataclass
class Silence:
    """Since when rank 0 has said nothing, and how long it usually does.

    least: seconds below which a silence is never looked into; 0 suspects nobody.
    """

    least: float
    since: float
    longest: float = 0.0  # the first news is left out: it comes after loading, compiling and the first step
    news: int = 0

    def heard(self, now: float) -> None:
        if self.news:
            self.longest = max(self.longest, now - self.since)
        self.since, self.news = now, self.news + 1

    @property
    def known(self) -> bool:
        """Whether there is a history."""
        return self.news > 1

    @property
    def limit(self) -> float:
        """Seconds after which a silence is suspicious."""
        return max(self.least, FACTOR * self.longest) if self.known else self.least

    @property
    def window(self) -> float:
        """Seconds in which nothing must have moved after that."""
        return max(self.least, WINDOW * self.longest) if self.known else PATIENCE_SECONDS

    @property
    def dumb(self) -> float:
        """Seconds after which a rank that does not answer is stuck."""
        return self.window if self.known else max(DUMB_SECONDS, DUMB * self.least)

    def suspicious(self, now: float) -> bool:
        """Whether to look closer."""
        return self.least > 0 and now - self.since > self.limit


@dataclass(frozen=True)
class Sign:
    """What one rank answered."""

    beat: Beat
    waits: bool  # whether it is in a collective, or waits for a transfer


Signs = Mapping[int, Sign | None]
"""Every rank's answer; None: it did not answer in time."""


def moved(before: Signs, after: Signs) -> bool:
    """Whether any rank has got on, or answers that did not, or was not known of."""
    if before.keys() != after.keys():
        return True
    for rank, new in after.items():
        old = before[rank]
        if (old is None) != (new is None) or (old and new and old.beat != new.beat):
            return True
    return False


def stuck(signs: Signs, lasted: float, limit: float, dumb: float) -> tuple[int, str] | None:
    """The rank that holds the others up, and why it is thought so; None as long as it may yet get on.

    lasted: seconds since when the answers have been the same. limit: seconds that a rank may take in a step. dumb:
    seconds that it may not answer.
    """
    if silent := [rank for rank, sign in signs.items() if sign is None]:
        return (min(silent), "does not answer") if lasted >= dumb else None
    found = {rank: sign for rank, sign in signs.items() if sign is not None}
    if lasted < max(_patience(sign.beat, limit) for sign in found.values()):
        return None
    busy = [rank for rank, sign in found.items() if not sign.waits]
    behind = min(busy or found, key=lambda rank: (found[rank].beat.step, found[rank].beat.ticks, rank))
    beat = found[behind].beat
    return behind, f"has been {beat.doing} after step {beat.step:,} without getting on"


def _patience(beat: Beat, limit: float) -> float:
    if beat.doing in SLOW:
        return PATIENCE_SECONDS
    if beat.doing in ("reading", "evaluating"):
        return max(MINUTE, EVALUATION * limit)
    return limit
