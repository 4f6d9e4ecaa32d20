"""What the task wrote down, read again: was every sample used once?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.data.order import Order


@dataclass
class Start:
    """One process's part in one start of the workers. lines: (Unix time, positions in the stream, samples) of each
    micro-batch, in order."""

    began: float
    rank: int
    pid: int
    lines: list[tuple[float, list[int], list[int]]]

    def step(self, line: int, batch: int) -> int:
        """The step of its first (0) or last (-1) line, from 1."""
        return self.lines[line][1][0] // batch + 1


def read(folder: Path, newest: int = 0) -> list[Start]:
    """All starts, or the newest ones, the first one first."""
    found = []
    paths = sorted(folder.glob("seen/*.jsonl"), key=lambda path: int(path.stem.split("-")[0]))
    for path in paths[-newest:]:
        began, rank, pid = path.stem.split("-")
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        # What is tried out before training has the first samples as they lie.
        found.append(Start(int(began) / 1e9, int(rank), int(pid), [line for line in lines if line[1] != line[2]]))
    return found


def seen(starts: Iterable[Start]) -> tuple[dict[int, tuple[float, int, int]], list[str]]:
    """Position → (Unix time, rank, sample) of when it was computed last, which is what the final weights come from; and
    what one start did twice, a sentence each."""
    last: dict[int, tuple[float, int, int]] = {}
    problems = []
    for start in starts:
        own: set[int] = set()
        for at, positions, samples in start.lines:
            if twice := own.intersection(positions):
                problems.append(f"rank {start.rank} used position {min(twice):,} twice in one start")
            own.update(positions)
            for position, sample in zip(positions, samples, strict=True):
                last[position] = max(last.get(position, (0.0, 0, 0)), (at, start.rank, sample))
    return last, problems


def lost_or_repeated(starts: Iterable[Start], total: int, samples: int, seed: int = 0) -> list[str]:
    """What is wrong with the `total` positions that were trained on, a sentence each; [] if nothing is.

    Each must have been used, with the sample that the order of (seed, position) has there. That what was used came to
    be in the weights is another question, which their bits answer.
    """
    last, problems = seen(starts)
    expected = Order(samples, seed).indices(0, total).tolist()
    kinds = {
        "lost": [p for p in range(total) if p not in last and p != expected[p]],
        "too many": sorted(p for p in last if p >= total),
        "other than the order has": [p for p in range(total) if p in last and last[p][2] != expected[p]],
    }
    where = {what: found for what, found in kinds.items() if found}
    return problems + [f"{len(at)} samples {what}, the first at position {at[0]:,}" for what, at in where.items()]
