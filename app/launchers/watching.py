"""Watches the ranks of one attempt: asks them when rank 0 has been silent for long, and says who is stuck.

The decisions are those of `hangs.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.config import Config
from app.launchers.hangs import COMPILED, LOOKS_APART_SECONDS, Sign, Signs, Silence, moved, stuck

if TYPE_CHECKING:
    from app.run.driver import Driver

ANSWER_SECONDS = 1.0

Ask = Callable[[str], dict[int, Any]]
"""Asks every rank for its "beat" or "stack" (`answers.py`), or its "flight" (`flight.py`); None for one that does not
answer soon. Nothing at all where the attempt is ending anyhow."""


@dataclass(frozen=True)
class Stuck:
    """What was found: the rank, why it is thought so, and the ranks that do not answer."""

    rank: int
    why: str
    dumb: frozenset[int]


class Watching:
    def __init__(self, config: Config, ask: Ask) -> None:
        self.ask = ask
        least = config.fault.hang_seconds * (COMPILED if config.train.compile else 1.0)
        self.silence = Silence(least, time.monotonic())
        self.same: tuple[float, Signs] | None = None  # the ranks' signs, and since when they have not changed

    def heard(self) -> None:
        """Rank 0 has said something that tells that training gets on."""
        self.silence.heard(time.monotonic())
        self.same = None

    def look(self) -> Stuck | None:
        """Asks everybody how far they are, at most every second, once there is reason to; who is stuck."""
        now = time.monotonic()
        if not self.silence.suspicious(now):
            return None
        before = self.same
        if before is not None and now - before[0] < LOOKS_APART_SECONDS:
            return None
        signs = {rank: None if found is None else Sign(*found) for rank, found in self.ask("beat").items()}
        if not signs:
            self.same = None
            return None
        if before is None or moved(before[1], signs):
            self.same = (now, signs)
            return None
        found = stuck(signs, now - before[0], self.silence.window, self.silence.dumb)
        if found is None:
            return None
        rank, why = found
        quiet = f"{why}, and nothing was heard for {now - self.silence.since:.0f} s"
        return Stuck(rank, quiet, frozenset(other for other, sign in signs.items() if sign is None))

    def keep(self, driver: Driver, name: Callable[[int], str]) -> None:
        """Keeps with the MLflow run where every rank stands, and what its flight recorder holds."""
        driver.tracker.text(self.stacks(name), f"hangs/step-{driver.step}.txt")
        for rank, record in self.ask("flight").items():
            if record:
                driver.tracker.text(record, f"hangs/step-{driver.step}-rank-{rank}.json")

    def stacks(self, name: Callable[[int], str]) -> str:
        """Where every rank stands."""
        return "\n".join(f"--- {name(rank)}\n{text or 'does not answer'}\n" for rank, text in self.ask("stack").items())


def gather(calls: dict[int, Any]) -> dict[int, Any]:
    """What Ray calls answer, by rank; None for those that fail or do not answer within `ANSWER_SECONDS`."""
    import ray

    ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else None
    answers: dict[int, Any] = {}
    for rank, call in calls.items():
        try:
            answers[rank] = ray.get(call, timeout=0)
        except ray.exceptions.RayError:
            answers[rank] = None
    return answers
