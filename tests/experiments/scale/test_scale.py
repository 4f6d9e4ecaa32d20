"""The scaling law against made-up machines that follow it, what a study refuses, and one study as a person runs it."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Config, ParallelConfig
from app.config.io import load_config
from app.console.terminal import Console
from app.training.job import Job
from experiments.scale import answer, laws, run
from experiments.scale.point import WorkerTimes, combine
from experiments.scale.run import StudyPlan
from strategies.pipeline.simulate import Span
from tests.running import POINTS, invoke, mlflow_run, trireme


def repeated(costs: dict[int, float], noise: float = 0.01, repeats: int = 5) -> dict[int, list[float]]:
    """Speeds of a made-up machine on which a sample costs so much on n workers."""
    draw = random.Random(0)
    return {n: [100 * n / cost * (1 + draw.gauss(0, noise)) for _ in range(repeats)] for n, cost in costs.items()}


@pytest.mark.parametrize("base", [1, 2, 8, 48])
def test_each_law_finds_its_constants_from_the_smallest_number_that_was_measured(base: int) -> None:
    counts = [base * 2**i for i in range(5)]
    usual = {n: 1 + 0.05 * (n / base - 1) + 0.002 * n / base * (n / base - 1) for n in counts}
    law = laws.fit_law("universal", repeated(usual))
    assert law is not None and law.base == base and law.largest == 16 * base
    assert law.values["sigma"] == pytest.approx(0.05, rel=0.3) and law.values["kappa"] == pytest.approx(0.002, rel=0.3)
    assert law.speedup(64 * base) < law.speedup(32 * base), "past the peak more is slower"
    assert "does not pay" in answer.verdict(law)
    weak = laws.choose_law(repeated({n: 1 + 0.04 * math.log2(n / base) for n in counts}), is_weak=True)
    assert weak is not None and weak.name == "logarithm" and weak.values["a"] == pytest.approx(0.04, rel=0.3)
    assert "doubling pays" in answer.verdict(weak) and weak.cost(64 * base) == pytest.approx(1.24, abs=0.06)
    curve = {n: 70 * n / (1 + 0.3 * n / base) for n in (*counts, 32 * base, 64 * base, 256 * base)}
    planned = laws.choose_law(
        {n: [speed / 0.7] * 2 for n, speed in curve.items() if n in counts}, is_weak=False, curve=curve
    )
    assert planned is not None and planned.name == "plan"
    assert planned.speedup(64 * base) == pytest.approx(curve[64 * base] / curve[base]), "the plan was right but slow"
    faster = laws.fit_law("logarithm", repeated({base: 1.0, 2 * base: 0.9}))
    assert faster is not None and faster.values["a"] == 0, "more workers never make a sample cheaper further out"


def test_nothing_is_concluded_from_two_numbers_of_workers_or_from_one_repeat() -> None:
    for speeds in (
        {1: [1.0, 1.02, 0.98], 2: [1.6, 1.61, 1.59]},
        {1: [1.0], 2: [1.9], 4: [3.5], 8: [7.0]},
        {4: [1], 8: [2]},
    ):
        for is_weak in (True, False):
            law = laws.choose_law(speeds, is_weak=is_weak)
            assert law is not None and law.spread(2 * law.largest) is None
            said = answer.verdict(law)
            assert "doubling" not in said and "A verdict needs 3 numbers of workers, each measured 2 times" in said
    two = laws.choose_law({1: [1.0], 2: [1 / 0.62]}, is_weak=False)
    assert two is not None and two.values["kappa"] == 0 and two.speedup(2) == pytest.approx(1 / 0.62, rel=1e-6)
    assert laws.choose_law({4: [1.0, 1.0]}, is_weak=True) is None and laws.choose_law({}, is_weak=False) is None


def test_an_interval_widens_with_distance_and_with_noise_and_a_verdict_respects_it() -> None:
    quiet, loud = (
        laws.choose_law(repeated({1: 1.0, 2: 1.02, 4: 1.05}, noise), is_weak=True) for noise in (0.001, 0.05)
    )
    assert quiet is not None and loud is not None
    near, far = quiet.spread(8), quiet.spread(64)
    assert near is not None and far is not None and near < far and near < (loud.spread(8) or 0)
    edge = laws.fit_law("universal", repeated({1: 1.0, 2: 1.059, 4: 1.176, 8: 1.412}, 0.002))
    assert edge is not None and "cannot be told" in answer.verdict(edge)
    assert laws.Law.from_json(json.loads(json.dumps(quiet.to_json()))) == quiet, "study.json holds it"


def test_a_recommendation_says_where_a_number_of_workers_was_measured_once() -> None:
    once = {1: [100.0, 99.0], 2: [165.0]}
    assert "measured once only" in answer.recommend({"ddp": once})
    assert "measured once only" not in answer.recommend({"ddp": {n: rates * 2 for n, rates in once.items()}})


def test_the_recommendation_is_the_fastest_as_far_as_doubling_pays() -> None:
    ddp = {1: [100.0] * 2, 2: [190.0] * 2, 4: [200.0] * 2}
    speeds = {"ddp": ddp, "fsdp": {1: [100.0] * 2, 2: [150.0] * 2, 4: [340.0] * 2, 8: [400.0] * 2}}
    said = answer.recommend(speeds)
    assert said == "Use fsdp on 4 workers: 340 samples/s, 3.40 times the throughput of 1, at 85% efficiency."
    assert answer.recommend({"ddp": {1: [100.0] * 2, 2: [120.0] * 2}}) == "Use 1 worker: 100 samples/s."
    assert "on 4 workers" in answer.recommend({"ddp": {1: [100.0], 4: [260.0]}}), "two doublings are asked for 1.5 ** 2"


def test_a_step_is_the_sum_of_its_parts() -> None:
    def worker(node: str, computing: float, exposed: float) -> WorkerTimes:
        """A worker whose steps take 1.5 s, of which 0.1 s is waiting for data; in a profile 2 s."""
        shares = {"step_seconds": 2.0, "computing_seconds": computing, "exposed_communication_seconds": exposed}
        return WorkerTimes(node=node, steps=[1.5, 1.5, 9.0], data=[0.1, 0.1, 0.1], shares=shares)

    point = combine([worker("a", 1.0, 0.5), worker("b", 1.2, 0.25)], Config(task="x"))
    assert (point.step, point.computing, point.bubble, point.data) == pytest.approx((1.5, 1.225, 0.0, 0.1))
    assert point.communication == pytest.approx(1.4 / 8), "what the worker waits that waits least"
    assert point.balance == pytest.approx(1.1 / 1.2)
    assert point.notes[0].startswith("worker 1 on b computes 1.09 times as long as the mean")
    one = combine([WorkerTimes(node="a", steps=[1.5], data=[0.1])], Config(task="x"))
    assert (one.computing, one.communication, one.notes) == (pytest.approx(1.4), 0.0, [])


def test_a_pipelines_waiting_is_bubble_as_far_as_its_schedule_is_to_blame() -> None:
    """Two stages, two micro-batches, gpipe: forward 1, backward 2, and 0.5 until anything arrives."""
    ops = [("F", 0, 1.0), ("F", 1, 1.0), ("B", 0, 2.0), ("B", 1, 2.0), ("REDUCE", -1, 0.25)]
    begin = [[0, 1, 6.0, 8.0, 10.0], [1.5, 2.5, 3.5, 5.5, 7.5]]
    spans = [
        [
            asdict(Span(stage=stage, kind=kind, micro_batch=micro_batch, chunk=0, start=start, end=start + seconds))
            for (kind, micro_batch, seconds), start in zip(ops, begin[stage])
        ]
        for stage in (0, 1)
    ]
    config = Config(task="x", parallel=ParallelConfig(schedule="gpipe"))
    point = combine([WorkerTimes(node="a", spans=[own], steps=[10.5], data=[0.0]) for own in spans], config)
    assert point.bubble == pytest.approx(10 * (1 / 3), rel=1e-6), "(p-1) / (m+p-1) of the step"
    assert point.computing == pytest.approx(6.0) and point.communication == pytest.approx(10.5 - 6.0 - 10 / 3)


BAD = [("1", "one point"), ("1,x", "write numbers with commas"), ("1,3", "cannot share evenly")]
BAD += [("0,1", "greater than 0"), ("1,2 --strategy dpd", "'dpd' is not known")]


@pytest.mark.parametrize(("workers", "said"), BAD)
def test_bad_input(tmp_path: Path, workers: str, said: str) -> None:
    arguments = [*POINTS, "train.steps=10", "run.name=x", f"run.storage={tmp_path}", "--workers", *workers.split()]
    assert said in invoke("scale", *arguments, code=2).output


def test_what_a_study_says_of_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the measuring: two workers take 0.55 of the time of one, an eleventh of it sending."""
    asked: list[int] = []

    def points(job: Job, workers: int, *_: Any, **__: Any) -> list[WorkerTimes]:
        asked.append(workers)
        shares = {"step_seconds": 11.0, "exposed_communication_seconds": 1.0, "computing_seconds": 1.0}
        seconds = 1.0 if workers == 1 else 0.55
        times = WorkerTimes(node="a", steps=[seconds], data=[0.0], shares=shares, memory=2**20)
        return [times] * workers

    monkeypatch.setattr(run, "connect", lambda *_, **__: SimpleNamespace(gpus=0, shape=None))
    monkeypatch.setattr(run, "check_feasible", lambda *_: None)
    monkeypatch.setattr(run, "rate_here", lambda *_: 3.6)
    monkeypatch.setattr("experiments.scale.point.measure_point", points)
    more = ["train.steps=100", "run.name=p", f"run.storage={tmp_path}", "tracking.enabled=false"]
    plan = StudyPlan(workers=(1, 2), strategies=("ddp",), weak=False, repeats=3, blocks=1, steps=1)
    outcome = run.scale(load_config([], [*POINTS, *more]), plan, Console(quiet=True))
    assert asked == [1, 2, 2, 1, 1, 2], "in turns, so that drift cancels"
    two = [p for p in outcome.points if p["workers"] == 2]
    assert all((p["computing"], p["communication"]) == pytest.approx((0.5, 0.05)) for p in two)
    assert "4 workers would do" in outcome.verdicts["ddp"] and "A verdict needs 3" in outcome.verdicts["ddp"]
    assert outcome.recommended.startswith("Use ddp on 2 workers: 29 samples/s, 1.82 times")
    text = Path(outcome.page).read_text()
    assert "exposed communication" in text and "the whole run" in text
    assert ">0:55<" in text and ">0.11<" in text, "55 s on two workers at 3.6 an hour"
    again = run.scale(load_config([], [*POINTS, *more]), plan, Console(quiet=True))
    assert len(asked) == 6 and again.points == outcome.points, "what was measured is not measured again"


@pytest.mark.slow
def test_a_study(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    quick = ["--workers", "1,2", "--repeats", "3", "--blocks", "2", "--steps", "3"]
    arguments = ["scale", *POINTS, "train.steps=10", "run.name=p", f"run.storage={tmp_path}", *quick, "--json"]
    first = trireme(*arguments, env=ray_environment).expect()
    points = first.json["points"]
    assert sorted((p["workers"], p["repeat"]) for p in points) == [(n, repeat) for n in (1, 2) for repeat in range(3)]
    for p in points:
        assert p["step"] > 0 and p["batch"] == 16
        assert p["step"] == pytest.approx(p["computing"] + p["bubble"] + p["communication"] + p["data"])
        assert p["workers"] == 2 or p["communication"] == 0
    assert any(p["communication"] > 0 for p in points), "two workers wait for each other"
    assert "A verdict needs" in first.json["verdicts"]["ddp"] and first.json["recommended"].startswith("Use ")
    kept = mlflow_run(tmp_path, "p-strong-scaling")
    assert kept.info.status == "FINISHED" and "trireme.verdict.ddp" in kept.data.tags
