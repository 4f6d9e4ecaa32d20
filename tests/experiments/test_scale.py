"""Scaling laws against made-up machines that follow them, what a study refuses, and one study as a person runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from app.cli import group
from app.config import Config, ParallelConfig
from app.config_io import load_config
from app.console import Console
from app.job import Job, Place
from app.persistence import Persistence
from app.run.prepare import prepare, read_task
from experiments.scale import fits, run
from experiments.scale.parts import Told, measured
from experiments.scale.plan import Plan
from experiments.scale.point import Bench, steps_of
from tests.running import POINTS, mlflow_run, trireme


def machine(sigma: float, kappa: float, counts: tuple[int, ...], noise: float = 0.01, weak: bool = False) -> fits.Times:
    draw = random.Random(0)
    found = {}
    for n in counts:
        gain = n / (1 + sigma * (n - 1) + kappa * n * (n - 1))
        found[n] = [(n if weak else 1) / gain * (1 + draw.gauss(0, noise)) for _ in range(5)]
    return found


@pytest.mark.parametrize("weak", [False, True])
def test_the_universal_law_finds_its_constants_and_the_peak(weak: bool) -> None:
    times = machine(0.05, 0.002, (1, 2, 4, 8, 16), weak=weak)
    law = fits.fit_laws(times, weak)[-1]
    for name, true in (("sigma", 0.05), ("kappa", 0.002)):
        value, low, high = law.parameters[name]
        assert low <= value <= high and abs(value - true) < 0.3 * true, name
    peak = fits.most_useful(law)
    assert peak is not None and abs(peak / (0.95 / 0.002) ** 0.5 - 1) < 0.15
    ahead = fits.forecast(law, times, weak)
    assert [f.workers for f in ahead] == [16, 32, 64, 256]
    assert ahead[3].speedup < ahead[2].speedup, "past the peak more is slower"
    whole = fits.forecast(law, times, weak, steps=1000)[0]
    assert whole.run_seconds == pytest.approx(1000 * statistics.median(times[1]) / whole.speedup)
    assert "does not pay" in fits.verdict(law, times, weak)


def test_amdahl_and_gustafson_find_the_serial_fraction() -> None:
    strong = {n: [10 * (0.1 + 0.9 / n)] * 3 for n in (1, 2, 4, 8)}
    assert fits.fit_laws(strong, False)[0].value("s") == pytest.approx(0.1)
    weak = {n: [n / (n - 0.2 * (n - 1))] * 3 for n in (1, 2, 4)}
    assert fits.fit_laws(weak, True)[0].value("s") == pytest.approx(0.2)


def test_two_points_tell_contention_only_and_say_so() -> None:
    times = {1: [1.0, 1.02, 0.98], 2: [0.62, 0.63, 0.61]}
    law = fits.fit_laws(times, False)[-1]
    assert law.value("kappa") == 0 and "two numbers" in law.note
    assert law.speedup(2) == pytest.approx(1 / 0.62, rel=1e-6)
    low, high = law.parameters["sigma"][1:]
    assert low < 0.24 < high
    assert fits.verdict(law, times, False).startswith("The next doubling does not pay: 4 workers would do 1.4")
    good = {1: [1.0], 2: [0.51]}
    assert "pays" in fits.verdict(fits.fit_laws(good, False)[-1], good, False)


def test_without_one_worker_nothing_is_fitted() -> None:
    assert fits.fit_laws({2: [1.0], 4: [0.6]}, False) == []


def told(node: str = "a", alone: float = 1.0, **more: Any) -> Told:
    """A worker whose steps take 1.5 s, of which 0.1 s is waiting for data."""
    return Told(
        node, [1.5, 1.5, 9.0], [0.1, 0.1, 0.1], [alone], [more.pop("busy", 1.0)], [9.0, 0.2], [9.0, 0.5], **more
    )


def test_a_step_is_the_sum_of_its_parts() -> None:
    point = measured([told(alone=1.0), told(alone=1.2)], Config(task="x"))
    assert (point.step, point.computing, point.bubble, point.data) == pytest.approx((1.5, 1.2, 0.0, 0.1))
    assert point.communication == pytest.approx(0.2), "beyond what the slowest computes, and the data"
    assert (point.stall, point.save) == (0.2, 0.5), "the first checkpoint makes what the others find"
    assert point.balance == pytest.approx(1.1 / 1.2) and point.why
    one = measured([Told("a", [1.5], [0.1], stalls=[0.1], saves=[0.2])], Config(task="x"))
    assert (one.computing, one.communication, one.why) == (pytest.approx(1.4), 0.0, "")
    point = measured([dataclasses.replace(told(), alone=[]) for _ in range(2)], Config(task="x"))
    assert (point.computing, point.communication) == (pytest.approx(1.4), None), "unknown is not nothing"


def test_a_pipelines_waiting_is_bubble_as_far_as_its_schedule_is_to_blame() -> None:
    """Two stages, two micro-batches, gpipe: forward 1, backward 2, and 0.5 until anything arrives."""

    def spans(stage: int, ops: list[tuple[str, int, float]]) -> list[tuple[Any, ...]]:
        length = {"F": 1.0, "B": 2.0, "REDUCE": 0.25}
        return [(stage, kind, micro, 0, at, at + length[kind]) for kind, micro, at in ops]

    first = spans(0, [("F", 0, 0), ("F", 1, 1), ("B", 0, 6.0), ("B", 1, 8.0), ("REDUCE", -1, 10.0)])
    second = spans(1, [("F", 0, 1.5), ("F", 1, 2.5), ("B", 0, 3.5), ("B", 1, 5.5), ("REDUCE", -1, 7.5)])
    config = Config(task="x", parallel=ParallelConfig(schedule="gpipe"))
    kept = {"steps": [10.5], "data": [0.0], "stalls": [0.1], "saves": [0.1]}
    point = measured([Told("a", spans=[first], **kept), Told("a", spans=[second], **kept)], config)
    assert point.bubble == pytest.approx(10 * (1 / 3), rel=1e-6), "(p-1) / (m+p-1) of the step"
    assert point.bubble + point.communication == pytest.approx(4.0 + 0.25), "idle 4 of 10 s, and the reduction"
    assert point.workers_computing == [6.0, 6.0] and point.computing == pytest.approx(10.5 - 4.25)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([told(), told(alone=1.03)], ""),
        ([told(items=32), told(alone=1.4, items=48)], "1.20 times the samples"),
        ([told(), told(alone=1.4, busy=0.6)], "60% of a core where another got 100%"),
        ([told(), told("b", alone=1.4), told("b", alone=1.3)], "the machines differ"),
        ([told(), told(alone=1.4)], "its device is slower"),
    ],
)
def test_why_one_worker_does_the_work_of_others(workers: list[Told], said: str) -> None:
    why = measured(workers, Config(task="x")).why
    assert said in why if said else not why
    assert not said or why.startswith("worker 1 ")


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("1", "one point"),
        ("1,x", "write numbers with commas"),
        ("1,3", "cannot share evenly"),
        ("0,1", "greater than 0"),
        ("1,2 --repeats 0", "not in the range x>=1"),
        ("1,2 --price -1", "must not be negative"),
        ("1,2 --strategy dpd", "'dpd' is not known"),
    ],
)
def test_bad_input(tmp_path: Path, workers: str, said: str) -> None:
    arguments = [*POINTS, "train.steps=10", "run.name=x", f"run.storage={tmp_path}", "--workers", *workers.split()]
    ended = CliRunner().invoke(group, ["scale", *arguments])
    assert ended.exit_code == 2 and said in ended.output


class OneForAll:
    """A store where everybody is there at once."""

    def __init__(self, everybody: int) -> None:
        self.everybody = everybody

    def add(self, key: str, amount: int) -> int:
        return self.everybody

    def set(self, key: str, value: str) -> None:
        return

    def wait(self, keys: list[str]) -> None:
        return


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_the_loops_steps_run_with_nothing_sent(tmp_path: Path, strategy: str) -> None:
    """The second of two workers, by itself."""
    more = [f"strategy={strategy}", "workers=2", "train.steps=20", "train.deterministic=false"]
    config = load_config([], [*POINTS, *more])
    layout = prepare(config, read_task(config), 2, devices_per_node=None).layout
    plan, make_group, resume = (2, 3), dist.new_group, Persistence.resume
    job = Job(config, layout, str(tmp_path), "a", "scale", steps_of(plan), os.getcwd())
    bench = Bench(job, Place(1, 2, 1, torch.device("cpu")), OneForAll(2), plan, Told("here"))
    bench.alone()
    assert not bench.told.unknown and len(bench.told.alone) == 2 and min(bench.told.alone) > 0
    assert bench.told.items == 8.0, "its own half of the batch"
    assert dist.new_group is make_group and Persistence.resume is resume and not dist.is_initialized()


def test_what_a_study_says_of_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the measuring: two workers take 0.55 of the time of one, an eleventh of it sending."""
    asked: list[int] = []

    def points(job: Job, workers: int, per_worker: Any, plan: Any) -> list[Told]:
        asked.append(workers)
        step = 1.0 if workers == 1 else 0.55
        busy = {"steps": [step], "data": [0.0], "stalls": [0.1], "saves": [0.2], "memory": 2**20}
        return [Told("a", alone=[0.5] if workers > 1 else [], busy=[1.0], **busy) for _ in range(workers)]

    cluster = SimpleNamespace(gpus=0, started_here=True)
    monkeypatch.setattr("cluster.connect.connect", lambda _: cluster)
    monkeypatch.setattr("cluster.files.connected", lambda **_: None)
    monkeypatch.setattr("cluster.pending.check_feasible", lambda *_: None)
    monkeypatch.setattr("experiments.scale.point.run", points)
    more = ["train.steps=100", "run.name=p", f"run.storage={tmp_path}", "tracking.enabled=false"]
    plan = Plan((1, 2), ("ddp",), False, 2, 1, 1, price=3.6)
    outcome = run.scale(load_config([], [*POINTS, *more]), plan, Console(quiet=True))
    assert asked == [1, 2, 2, 1], "in turns, so that drift cancels"
    two = [p for p in outcome.points if p["workers"] == 2]
    assert all((p["computing"], p["communication"]) == pytest.approx((0.5, 0.05)) for p in two)
    assert outcome.verdicts["ddp"].startswith("The next doubling pays: 4 workers would do 1.69 times")
    text = Path(outcome.page).read_text()
    assert "exposed communication" in text and "planned" in text and "the whole run" in text
    ahead = outcome.laws["ddp"]["forecast"]
    assert [f["workers"] for f in ahead] == [2, 4, 8, 32] and ahead[0]["run_seconds"] == pytest.approx(55.0)
    assert ">0:55<" in text and ">0.11<" in text, "55 s on two workers at 3.6 an hour"
    again = run.scale(load_config([], [*POINTS, *more]), plan, Console(quiet=True))
    assert len(asked) == 4 and again.points == outcome.points, "what was measured is not measured again"


@pytest.mark.slow
def test_a_study(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    quick = ["--workers", "1,2", "--repeats", "2", "--blocks", "2", "--steps", "3"]
    arguments = ["scale", *POINTS, "train.steps=10", "run.name=p", f"run.storage={tmp_path}", *quick, "--json"]
    first = trireme(*arguments, env=ray_environment)
    assert first.code == 0, first.err
    points = first.json["points"]
    assert sorted((p["workers"], p["repeat"]) for p in points) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(p["step"] > 0 and p["batch"] == 16 for p in points)
    for p in points:
        assert p["step"] == pytest.approx(p["computing"] + p["bubble"] + p["communication"] + p["data"])
        assert len(p["workers_computing"]) == p["workers"] and p["predicted"] > 0 and 0 < p["stall"] <= p["save"]
        assert p["workers"] == 2 or p["communication"] == 0
    assert any(p["communication"] > 0 for p in points), "two workers wait for each other"
    assert not list(tmp_path.glob("*/.point-*")), "nothing that was trained is kept"
    assert "The next doubling" in first.json["verdicts"]["ddp"]
    page = Path(first.json["page"]).read_text()
    assert "universal scalability" in page and "<svg" in page and "src=" not in page
    kept = mlflow_run(tmp_path, "p-strong-scaling")
    assert kept.info.status == "FINISHED" and "trireme.verdict.ddp" in kept.data.tags
    again = trireme(*arguments, env=ray_environment)
    assert again.code == 0 and again.json["points"] == points, "what was measured is not measured again"
    assert len(json.loads((tmp_path / "p-strong-scaling" / "study.json").read_text())["points"]) == 4
