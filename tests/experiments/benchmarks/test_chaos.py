"""The chaos harness judges rightly; a slice of its kills; and what torchrun restarts goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.data.order import Order
from experiments.benchmarks.chaos import campaign, kills, page, record
from experiments.benchmarks.chaos.boundaries import operations
from experiments.benchmarks.chaos.record import Start, lost_or_repeated
from tests.running import committed, finish, start, wait_until

BATCH, STEPS, SAMPLES = 4, 6, 10


def steps(rank: int, began: float, first: int, last: int) -> Start:
    """A start of one of two ranks that took the steps first … last, two samples each."""
    order = Order(SAMPLES, 0).indices(0, 100).tolist()
    lines = []
    for step in range(first, last + 1):
        begin = (step - 1) * BATCH + 2 * rank
        positions = [begin, begin + 1]
        lines.append((began + step, positions, [order[p] for p in positions]))
    return Start(began, rank, 1, lines)


def judged(*starts: Start) -> list[str]:
    return lost_or_repeated(starts, STEPS, BATCH, SAMPLES, 0)


def test_a_rewind_to_a_checkpoint_loses_nothing() -> None:
    assert judged(steps(0, 0, 1, 6), steps(1, 0, 1, 6)) == []
    again = [steps(0, 0, 1, 4), steps(1, 0, 1, 3), steps(0, 10, 3, 6), steps(1, 10, 3, 6)]
    assert judged(*again) == []
    assert judged(*again[:2], Start(5, 0, 2), *again[2:]) == [], "a start that took no step"


def test_what_preparations_tried_out_is_no_training(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    lines = ["[1.0, [0, 1], [0, 1]]", "[2.0, [0, 1], [7, 3]]", "[3.0, [2, 3], [5,"]  # the last one was cut off
    (tmp_path / "seen" / "2000000000-1-99.jsonl").write_text("\n".join(lines))
    (tmp_path / "seen" / "10000000000-0-98.jsonl").write_text("")
    first, second = record.read(tmp_path)
    assert (first.began, first.rank, first.pid, first.lines) == (2.0, 1, 99, [(2.0, [0, 1], [7, 3])])
    assert (second.began, second.lines, second.first) == (10.0, [], None)
    assert record.read(tmp_path, 1) == [second]


def test_what_was_lost_or_repeated_is_said() -> None:
    whole = [steps(0, 0, 1, 6), steps(1, 0, 1, 6)]
    assert judged(whole[0]) == ["12 samples lost, the first at position 2"]
    skipped = [steps(0, 0, 1, 2), steps(1, 0, 1, 2), steps(0, 10, 4, 6), steps(1, 10, 4, 6)]
    assert "rank 0 went on at position 12, though only 8 had been seen" in judged(*skipped)
    assert "4 samples lost, the first at position 8" in judged(*skipped)
    twice = steps(0, 0, 1, 6)
    twice.lines.append(twice.lines[2])
    assert "rank 0 used position 8 twice in one start" in judged(twice, whole[1])
    assert "4 samples too many, the first at position 24" in judged(steps(0, 0, 1, 7), steps(1, 0, 1, 7))
    other = steps(0, 0, 1, 6)
    other.lines[0] = (0.0, [0, 1], [other.lines[0][2][1], other.lines[0][2][0]])
    assert judged(other, whole[1]) == ["2 samples other than the order has, the first at position 0"]
    same = [steps(0, 0, 1, 6), Start(0, 1, 1, steps(0, 0, 1, 6).lines)]
    assert any("were used by rank 1 and another" in said for said in judged(*same))


def test_the_kills_are_the_seeds_and_visit_every_file_operation() -> None:
    saves = {layout: [(rank, n, f"op {n}") for rank in (0, 1) for n in range(1, 9)] for layout in kills.LAYOUTS}
    assert kills.draw(3, 7, saves, 6) == kills.draw(3, 7, saves, 6) != kills.draw(4, 7, saves, 6)
    drawn = [(kills.TURNS[n % len(kills.TURNS)], kill) for n in range(200) for kill in kills.draw(0, n, saves, 5)]
    assert {kill.victim for _, kill in drawn} == {victim for victim, _ in kills.WEIGHTS}
    visited = {(layout, kill.rank, kill.boundary) for layout, kill in drawn if kill.victim == "boundary"}
    assert visited == {(layout, rank, n) for layout in kills.LAYOUTS for rank in (0, 1) for n in range(1, 9)}
    assert {kill.victim for kill in kills.draw(0, 0, saves, 9, ["driver"])} == {"driver"}


def test_the_page_counts_what_went_wrong() -> None:
    kill = kills.Kill("worker", signal.SIGKILL, 0.5).as_dict()
    row = kill | {"run": "run-0", "layout": "ddp", "problems": [], "recovered_seconds": 1.5, "seconds": 3.0}
    row |= {"committed": 10, "resumed_from": 10}
    bad = row | {"run": "run-<1>", "problems": ["the final weights are not those of the undisturbed run"]}
    bad["again"] = campaign.again(0, 1, 10, ["worker"])
    totals = page.summary([row, bad], 0)
    assert (totals["kills"], totals["other_weights"], totals["lost_or_repeated"]) == (2, 1, 0)
    assert totals["of"] == {"ddp": {"worker": 2}} and totals["hangs"] == 0


@pytest.mark.alone
def test_torchrun_starts_the_workers_again_and_they_go_on(tmp_path: Path) -> None:
    """A rank is killed at a file operation of a save; `torchrun --max-restarts` starts both again, in one command."""
    (tmp_path / "list").touch()
    (tmp_path / "slow").touch()
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1"]
    task = ["task=experiments.benchmarks.chaos.task:Recorded", f"task_args.folder={tmp_path}", "tracking.enabled=false"]
    more = ["task_args.step_seconds=0.02", "train.steps=60", "train.global_batch_size=16", "checkpoint.every_steps=10"]
    place = ["run.name=run", f"run.storage={tmp_path}", "strategy=ddp"]
    process = start(["train", *task, *more, *place], program=[*program, "--monitor-interval=0.1", "-m", "app"])
    wait_until(lambda: max(committed(tmp_path / "run"), default=0) >= 20, 90)
    (tmp_path / "order-1.json").write_text(f'{{"boundary": 2, "signal": {signal.SIGKILL}, "torn": 0.5}}')
    ended = finish(process)
    assert ended.code == 0, ended.err
    starts = record.read(tmp_path)
    assert (tmp_path / "struck.json").exists() and len({s.pid for s in starts}) == 4, "both were started again"
    later = [s for s in starts if s.rank == 0 and s.lines][-1]
    assert later.first_step(16) > 20, "from the newest commit, not from the beginning"
    assert lost_or_repeated(starts, 60, 16, 250, 0) == []
    assert any(rank == 1 and what.startswith("open __1_0") for rank, _, what in operations(tmp_path))


@pytest.mark.alone
@pytest.mark.parametrize(("minutes", "least"), [("1", 4), pytest.param("5", 12, marks=pytest.mark.slow)])
def test_minutes_of_chaos(minutes: str, least: int, tmp_path: Path) -> None:
    """Runs with four kills each, until the time is over; the last one is finished. A slow machine may do few."""
    command = [sys.executable, "-m", "experiments.benchmarks", "chaos", "--seed", "5", "--kills", "60", "--each", "4"]
    command += ["--minutes", minutes, "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, env={**os.environ})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"wrong": {}' in ended.stdout
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) >= least
