"""What share of the time training gets on, with a kill every minute; and what it should be by arithmetic.

A kill costs the seconds until workers compute again (R), the steps since the newest commit (on average half a
checkpoint interval, C/2), and those taken while that commit was being written (L), so that with a kill every T seconds
the share is 1 - (R + C/2 + L) / T (Young 1974, A first order approximation to the optimum checkpoint interval).
R, C and L are measured first, on kills of their own and on undisturbed training.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.benchmarks.chaos import record
from experiments.benchmarks.chaos.kills import BATCH, EVERY, WORKERS
from experiments.benchmarks.chaos.session import Session, until
from experiments.benchmarks.chaos.trial import Trial

CALM_SECONDS = 20.0
GAP_SECONDS = 12.0
"""Between the kills that R is measured on: a spare is warm again by then."""


@dataclass
class Useful:
    """Seconds, and shares of 1."""

    share: float
    predicted: float
    recovery: float
    interval: float
    latency: float
    kills: int
    every: float
    seconds_per_step: float


def measure(folder: Path, layout: str, kills: int, every: float, seed: int, step_seconds: float) -> Useful:
    """kills: that the share is measured over, `every` seconds each; 3 more are for R."""
    session = Session(folder, server=False)
    trial = Trial(session, "useful", layout, "train.steps=10000000", f"task_args.step_seconds={step_seconds}")
    chance = random.Random(seed)
    (trial.folder / "slow").touch()
    try:
        trial.start()
        until(lambda: _step(trial.folder) > 3 * EVERY, 90)
        begin, first = time.time(), _step(trial.folder)
        time.sleep(CALM_SECONDS)
        per_step = (time.time() - begin) / (_step(trial.folder) - first)
        latency = _latency(trial)
        # The median: the second of them has its node excluded, which happens once.
        recovery = statistics.median(_kill(trial, chance, GAP_SECONDS) for _ in range(3))
        begin, first = time.time(), _step(trial.folder)
        for number in range(kills):
            moment = begin + every * (number + chance.uniform(0.25, 0.75))
            time.sleep(max(0.0, moment - time.time()))
            _kill(trial, chance, 0.0)
        time.sleep(max(0.0, begin + every * kills - time.time()))
        wall, steps = time.time() - begin, _step(trial.folder) - first
    finally:
        trial.give_up()
        session.close()
    interval = EVERY * per_step
    predicted = 1 - (recovery + interval / 2 + latency) / every
    return Useful(steps * per_step / wall, predicted, recovery, interval, latency, kills, every, per_step)


def _step(folder: Path) -> int:
    """The step being taken by the newest start of the workers."""
    last = [start for start in record.read(folder, 2 * WORKERS) if start.lines]
    return max(last, key=lambda start: start.lines[-1][0]).last_step(BATCH) if last else 0


def _kill(trial: Trial, chance: random.Random, then: float) -> float:
    """Kills a worker; seconds until workers compute again. then: seconds to wait after that."""
    pid = until(lambda: trial.worker(chance.randrange(WORKERS)), 30)
    struck = time.time()
    os.kill(pid, signal.SIGKILL)

    def again() -> float:
        starts = [s for s in record.read(trial.folder, 2 * WORKERS) if s.began > struck and s.lines]
        return min((s.lines[0][0] for s in starts), default=0.0)

    seconds = until(again, 60, pause=0.05) - struck
    time.sleep(then)
    return float(seconds)


def _latency(trial: Trial) -> float:
    """Median seconds from the end of a step's computation to the commit of its checkpoint, of those that are there."""
    began = {}
    for start in record.read(trial.folder):
        for when, positions, _ in start.lines:
            began[positions[0] // BATCH + 1] = when
    markers = trial.run.glob("checkpoints/*/COMMIT.json")
    waits = [m.stat().st_mtime - began[s] for m in markers if (s := int(m.parent.name.split("-")[1])) in began]
    return max(0.0, statistics.median(waits))


def table(found: Useful, layout: str) -> str:
    lines = ["| layout | kill every | useful | predicted | until it computes again | interval | commit takes |"]
    lines.append("|---|---|---|---|---|---|---|")
    numbers = asdict(found)
    lines.append(
        "| {layout} | {every:.0f} s ({kills}) | {share:.1%} | {predicted:.1%} | {recovery:.2f} s | {interval:.2f} s | "
        "{latency:.2f} s |".format(layout=layout, **numbers)
    )
    return "\n".join(lines)
