"""What the task wrote down, read again: was every sample used once, as the weights have it?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from app.data.order import Order


@dataclass
class Start:
    """One process's part in one start of the workers."""

    began: float  # Unix time
    rank: int
    pid: int
    lines: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    """(Unix time, positions in the stream, samples) of each micro-batch, in order."""

    @property
    def first(self) -> int | None:
        return self.lines[0][1][0] if self.lines else None

    def last_step(self, batch: int) -> int:
        """The last step it began, from 1; 0 if none."""
        return self.lines[-1][1][0] // batch + 1 if self.lines else 0

    def first_step(self, batch: int) -> int:
        return self.lines[0][1][0] // batch + 1 if self.lines else 0


def read(folder: Path, newest: int | None = None) -> list[Start]:
    """All starts, or the newest, the first one first."""
    found = []
    paths = sorted(folder.glob("seen/*.jsonl"), key=lambda path: int(path.stem.split("-")[0]))
    for path in paths[-newest:] if newest else paths:
        began, rank, pid = path.stem.split("-")
        lines = []
        for line in path.read_bytes().split(b"\n")[:-1]:
            when, positions, samples = json.loads(line)
            if positions != samples:  # preparations try the model out with the first samples as they lie
                lines.append((when, positions, samples))
        found.append(Start(int(began) / 1e9, int(rank), int(pid), lines))
    return found


def lost_or_repeated(starts: Iterable[Start], steps: int, batch: int, samples: int, seed: int) -> list[str]:
    """What is wrong with the samples that the final weights come from, a sentence each; [] if nothing is.

    A start that begins at position p takes back all its rank did from p on: what is left of the starts before it and
    what it does itself are the samples that the weights come from. They must be positions 0 … steps × batch, each
    once, with the samples that the order of (seed, position) has there. And a start must go on inside, or just after,
    what was done before it.
    """
    kept, problems = survivors(starts, batch)
    return problems + _unlike_the_order(kept, steps, batch, samples, seed)


def survivors(starts: Iterable[Start], batch: int) -> tuple[dict[int, dict[int, int]], list[str]]:
    """Of each rank, position → sample, of what the final weights come from; and what is wrong with that by itself."""
    kept: dict[int, dict[int, int]] = {}
    problems: list[str] = []
    for start in starts:
        mine = kept.setdefault(start.rank, {})
        if start.first is None:
            continue
        begin = start.first - start.first % batch
        if begin > (reached := max((p for own in kept.values() for p in own), default=-1) + 1) and begin != 0:
            problems.append(f"rank {start.rank} went on at position {begin:,}, though only {reached:,} had been seen")
        for position in [p for p in mine if p >= begin]:
            del mine[position]
        for _, positions, picked in start.lines:
            for position, sample in zip(positions, picked, strict=True):
                if position in mine:
                    problems.append(f"rank {start.rank} used position {position:,} twice in one start")
                mine[position] = sample
    return kept, problems


def _unlike_the_order(kept: dict[int, dict[int, int]], steps: int, batch: int, samples: int, seed: int) -> list[str]:
    whole: dict[int, int] = {}
    problems = []
    for rank, mine in sorted(kept.items()):
        twice = sorted(whole.keys() & mine.keys())
        if twice:
            problems.append(f"{len(twice)} samples were used by rank {rank} and another, the first at {twice[0]:,}")
        whole |= mine
    total = steps * batch
    missing = sorted(set(range(total)) - whole.keys())
    beyond = sorted(p for p in whole if p >= total)
    expected = Order(samples, seed).indices(0, total).tolist()
    other = [p for p in range(total) if p in whole and whole[p] != expected[p]]
    for what, where in (("lost", missing), ("too many", beyond), ("other than the order has", other)):
        if where:
            problems.append(f"{len(where)} samples {what}, the first at position {where[0]:,}")
    return problems
