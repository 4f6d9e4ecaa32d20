"""The benchmarks' own machinery: who runs when, what a ratio and its interval are, what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from experiments.benchmarks.turns import TakesTurns
from tests.pool import run_distributed


def test_what_takes_turns_runs_only_while_it_is_waited_for() -> None:
    seen: list[str] = []

    def loop(pause: Callable[[], None]) -> None:
        for number in range(3):
            pause()
            seen.append(f"begin {number}")
            time.sleep(0.02)
            seen.append(f"end {number}")

    turns = TakesTurns(loop)
    for number in range(2):
        seen.append(f"mine {number}")
        time.sleep(0.02)
        turns.advance()
    assert seen == ["mine 0", "begin 0", "end 0", "mine 1", "begin 1", "end 1"]


def test_what_takes_turns_and_fails_or_ends_says_so() -> None:
    def fails(pause: Callable[[], None]) -> None:
        pause()
        raise ValueError("the cause")

    turns = TakesTurns(fails)
    with pytest.raises(RuntimeError, match="the cause"):
        turns.advance()
    with pytest.raises(RuntimeError, match="has ended"):
        turns.advance()
    with pytest.raises(RuntimeError, match=r"no pause within 0\.1 s"):
        TakesTurns(lambda pause: time.sleep(1), timeout=0.1)


def _one_group(rank: int) -> list[float]:
    """Collectives before the first step and after every step, as Lightning has them, beside a side's own."""

    def loop(pause: Callable[[], None]) -> None:
        dist.broadcast(torch.zeros(1000), src=0)
        while True:
            pause()
            time.sleep(0.01 * (1 - rank))  # ranks never come at the same time
            value = torch.full((3,), 1.0)
            dist.all_reduce(value)
            found.append(value[0].item())
            dist.barrier()

    found: list[float] = []
    turns = TakesTurns(loop, timeout=20)
    for _ in range(20):
        value = torch.full((5,), 10.0 + rank)
        dist.all_reduce(value)
        found.append(value[0].item())
        turns.advance()
    return found


def test_two_sides_share_a_process_group_without_meeting() -> None:
    assert run_distributed(_one_group, 2, timeout=60) == [[21.0, 2.0] * 20] * 2
