"""What is killed, how and when: drawn from a seed, a function of the seed and the run's number alone."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BATCH = 16
EVERY = 10
STEPS = 480
LAYOUTS: dict[str, list[str]] = {
    "ddp": ["strategy=ddp", "launcher=actors"],
    "fsdp": ["strategy=fsdp", "launcher=actors"],
    "pipeline": ["strategy=pipeline", "parallel.pp=2", "parallel.recut=false", "train.micro_batch_size=4"],
    "ddp in Ray Train": ["strategy=ddp", "launcher=ray"],
    "fsdp in Ray Train": ["strategy=fsdp", "launcher=ray"],
}
TURNS = ("ddp", "pipeline", "fsdp", "ddp", "fsdp", "pipeline", "ddp in Ray Train", "fsdp in Ray Train")
"""Layouts of one run after another; Ray Train starts new processes after every death, and is slower."""
WORKERS = 2


@dataclass(frozen=True)
class Kill:
    """victim: worker, boundary (a worker, at a file operation of a save), raylet, driver, server (of MLflow), writer
    (the process that talks to it)."""

    victim: str
    signal: int
    delay: float  # seconds after training goes on, or after the start of the command or of workers ("starting")
    rank: int = 0
    starting: bool = False
    boundary: int = 0  # which file operation of a save, from 1
    what: str = ""  # that operation in words
    torn: float | None = None  # share of the file that a power cut leaves

    @property
    def ends_workers(self) -> bool:
        """Whether the next step must be of workers that began afterwards. One that gets SIGTERM goes on, and saves."""
        return self.victim not in ("server", "writer") and (self.victim, self.signal) != ("worker", signal.SIGTERM)

    def words(self) -> str:
        name = signal.Signals(self.signal).name
        if self.victim == "boundary":
            torn = "" if self.torn is None else f", torn at {self.torn:.0%}"
            return f"{name} of rank {self.rank} before {self.what!r} ({self.boundary}){torn}"
        who = f"rank {self.rank}" if self.victim == "worker" else self.victim
        return f"{name} of {who}{' while starting' if self.starting else ''} after {self.delay:.2f} s"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"words": self.words()}


WEIGHTS: dict[tuple[str, int], float] = {
    ("boundary", signal.SIGKILL): 42,
    ("boundary", signal.SIGSTOP): 3,
    ("worker", signal.SIGKILL): 18,
    ("worker", signal.SIGTERM): 5,
    ("worker", signal.SIGSTOP): 5,
    ("driver", signal.SIGKILL): 8,
    ("driver", signal.SIGTERM): 4,
    ("raylet", signal.SIGKILL): 5,
    ("server", signal.SIGKILL): 5,
    ("writer", signal.SIGKILL): 5,
}


Operations = Mapping[str, Sequence[tuple[int, int, str]]]
"""Of each layout: (rank, number, what) of all file operations of one save."""


def draw(seed: int, number: int, operations: Operations, count: int, victims: Sequence[str] = ()) -> list[Kill]:
    """The kills of one run. victims: only these; () all. File operations are taken in turn, in an order of the seed's,
    so that all are visited."""
    chance = random.Random(f"{seed}-{number}")
    layout = TURNS[number % len(TURNS)]
    kinds = {kind: weight for kind, weight in WEIGHTS.items() if not victims or kind[0] in victims}
    turn = list(operations.get(layout, ()))
    random.Random(f"{seed}-{layout}").shuffle(turn)
    before = number // len(TURNS) * TURNS.count(layout) + TURNS[: number % len(TURNS)].count(layout)
    share = sum(weight for (victim, _), weight in kinds.items() if victim == "boundary") / sum(kinds.values())
    at = before * max(1, round(count * share))
    kills = []
    for _ in range(count):
        victim, number_ = chance.choices(list(kinds), list(kinds.values()))[0]
        delay, rank, starting = chance.uniform(0.0, 1.2), chance.randrange(WORKERS), chance.random() < 0.2
        torn = chance.choice([None, 0.0, chance.random()])
        if victim == "boundary" and turn:
            rank, boundary, what = turn[at % len(turn)]
            at += 1
            kills.append(
                Kill(victim, number_, 0.0, rank, False, boundary, what, torn if what.startswith("sync ") else None)
            )
        elif victim != "boundary":
            starting = starting and victim in ("driver", "worker") and number_ == signal.SIGKILL
            kills.append(Kill(victim, number_, round(delay, 3), rank, starting))
    return kills
