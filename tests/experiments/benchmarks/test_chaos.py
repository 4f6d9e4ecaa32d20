"""Chaos judges rightly."""

import signal
from types import SimpleNamespace
from typing import Any

import torch

from app.data.order import Order
from experiments.benchmarks.chaos import Kill, summary, unlike
from experiments.benchmarks.chaos_task import Start, lost_or_repeated

BATCH, STEPS, SAMPLES = 4, 6, 10
ORDER = Order(SAMPLES, 0).indices(0, 100).tolist()


def steps(rank: int, began: float, first: int, last: int) -> Start:
    """A start of one of two ranks that took the steps first … last, two samples each."""
    places = [[BATCH * (step - 1) + 2 * rank + i for i in (0, 1)] for step in range(first, last + 1)]
    return Start(began, rank, 1, [(began + p[0], p, [ORDER[at] for at in p]) for p in places])


def judged(*starts: Start) -> list[str]:
    return lost_or_repeated(starts, STEPS * BATCH, SAMPLES)


def test_samples_that_were_lost_or_repeated_are_named() -> None:
    whole = [steps(0, 0, 1, 6), steps(1, 0, 1, 6)]
    again = [steps(0, 0, 1, 4), steps(1, 0, 1, 3), Start(50, 0, 2, []), steps(0, 100, 3, 6), steps(1, 100, 3, 6)]
    assert judged(*whole) == judged(*again) == [], "going back to a checkpoint loses nothing"
    assert judged(whole[0])[0].endswith("samples lost, the first at position 2")
    twice = steps(0, 0, 1, 6)
    twice.lines.append(twice.lines[2])
    assert "rank 0 used position 8 twice in one start" in judged(twice, whole[1])
    assert "4 samples too many, the first at position 24" in judged(steps(0, 0, 1, 7), steps(1, 0, 1, 7))
    other = steps(0, 0, 1, 6)
    other.lines[0] = (0.0, [0, 1], [ORDER[1], ORDER[0]])
    assert judged(other, whole[1]) == ["2 samples other than the order has, the first at position 0"]


def test_a_run_that_ended_otherwise_is_wrong() -> None:
    calm: Any = SimpleNamespace(weights={"w": torch.ones(2)}, curve=[(1, 0.5)], problems=[])
    good, bad = Kill("worker", signal.SIGKILL, 0.5, 0, False), Kill("worker", signal.SIGKILL, 0.5, 0, False)
    bad.committed, bad.resumed_from = 20, 10
    assert unlike(calm, calm, [good]) == []
    other: Any = SimpleNamespace(weights={"w": torch.zeros(2)}, curve=[(1, 0.6)], problems=["lost"])
    found = unlike(other, calm, [good, bad])
    assert len(found) == 4 and "SIGKILL of rank 0 after 0.50 s: went on before step 20" in found[-1]
    rows = [{"layout": "ddp", "victim": "worker", "run": "1", "problems": found, "seconds": s} for s in (1.0, 3.0)]
    assert list(summary(rows)[0].values()) == ["ddp", "worker", "2", "1", "2.00", "3.00"]
