"""The benchmarks' own machinery: who runs when, what a ratio and its interval are, what is kept of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from experiments.benchmarks import abba, pairs
from experiments.benchmarks.record import Ratio, keep, kept
from experiments.benchmarks.step import BLOCK_STEPS, OURS
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


def test_blocks_take_turns_both_ways_and_the_first_of_each_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str, seconds: float) -> Callable[[int], None]:
        def block(steps: int) -> None:
            order.append(f"{name}{steps}")
            time.sleep(seconds)

        return block

    times = abba.in_blocks({"A": turn("A", 0.02), "B": turn("B", 0.04)}, 2, 4, lambda: order.append("|"))
    assert "".join(order) == "|A4|B4|B4|A4|A4|B4"
    assert [len(times["A"]), len(times["B"])] == [2, 2]
    assert min(times["A"]) >= 0.005 and min(times["B"]) >= 0.01


def test_a_ratio_is_that_of_neighbouring_blocks_whatever_the_machine_does_meanwhile() -> None:
    speed = [1.0, 1.0, 3.0, 3.0, 9.0, 9.0, 2.0, 2.0]
    sides = abba.beside({"A": speed, "B": [1.1 * each for each in speed]}, "A")
    assert sides["B"]["ratio"] == pytest.approx(1.1) and sides["B"]["interval"] == pytest.approx((1.1, 1.1))
    assert sides["A"]["ratio"] == 1.0 and sides["A"]["ms"] == 2500.0
    low, high = abba.interval([1.0] * 40, [1.0, 1.0, 1.4, 1.4] * 10)
    assert low == pytest.approx(1.0) and high == pytest.approx(1.4), "half of the blocks say this, half that"


def test_blocks_of_saving_hold_as_many_saves_each_in_their_middle() -> None:
    pair = pairs.PAIRS["saving"]
    for model in OURS:
        steps, begun = pair.steps(model), pair.period // 2
        saves = [
            [s for s in range(begun + b * steps + 1, begun + (b + 1) * steps + 1) if s % 50 == 0] for b in range(4)
        ]
        assert {len(block) for block in saves} == {steps // 50} and steps >= 50
        assert all(begun <= (block[0] - begun) % steps <= steps - 25 for block in saves)
    assert pairs.PAIRS["tracking"].steps("gpt") == BLOCK_STEPS["gpt"]


def test_a_kept_ratio_replaces_its_own_label_alone_and_says_where_it_is_from(tmp_path: Path) -> None:
    keep("step", {"a": Ratio(1.0, 0.9, 1.1, 40, 1.0), "b": Ratio(1.2, 1.1, 1.3, 40)}, tmp_path)
    keep("step", {"b": Ratio(0.98764, 0.9, 1.0, 20)}, tmp_path)
    assert kept(tmp_path) == {"step": {"a": Ratio(1.0, 0.9, 1.1, 40, 1.0), "b": Ratio(0.9876, 0.9, 1.0, 20)}}
    one = json.loads((tmp_path / "step.json").read_text())["ratios"]["a"]
    assert one["versions"]["torch"] == version("torch") and "cores" in one["machine"] and one["load"] >= 0
    assert one["command"].startswith("python -m experiments.benchmarks step")


@pytest.mark.alone
@pytest.mark.slow
def test_both_pairs_are_measured_in_one_run() -> None:
    for name in pairs.PAIRS:
        found = pairs.run(name, "mnist", 2)
        low, high = found["interval"]
        assert low <= found["ratio"] <= high and min(found["ms"].values()) > 0
