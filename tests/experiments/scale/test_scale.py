"""Scaling laws fitted to simulated machines, refusals of a study, and one study as users run it."""

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
from experiments.scale.run import StudyPlan, study_name
from strategies.pipeline.simulate import Span
from tests.running import POINTS, invoke, mlflow_run, trireme


def repeated(
    costs: dict[int, float], noise: float = 0.01, repeats: int = 5
) -> dict[int, list[float]]:
    """Repeated speeds by numbers of workers, from the cost of a sample and Gaussian noise."""
    generator = random.Random(0)
    return {
        workers: [100 * workers / cost * (1 + generator.gauss(0, noise)) for _ in range(repeats)]
        for workers, cost in costs.items()
    }


@pytest.mark.parametrize("base", [1, 2, 8, 48])
def test_each_law_is_fitted_relative_to_the_smallest_measured_number(base: int) -> None:
    counts = [base * 2**i for i in range(5)]
    universal_costs = {
        workers: 1 + 0.05 * (workers / base - 1) + 0.002 * workers / base * (workers / base - 1)
        for workers in counts
    }
    law = laws.fit_law("universal", repeated(universal_costs))
    assert law is not None and law.base == base and law.largest == 16 * base
    assert law.values["sigma"] == pytest.approx(0.05, rel=0.3)
    assert law.values["kappa"] == pytest.approx(0.002, rel=0.3)
    assert law.speedup(64 * base) < law.speedup(32 * base), "past the peak more is slower"
    assert "does not pay" in answer.verdict(law)
    logarithmic_costs = {workers: 1 + 0.04 * math.log2(workers / base) for workers in counts}
    weak = laws.choose_law(repeated(logarithmic_costs), is_weak=True)
    assert weak is not None
    assert weak.name == "logarithm"
    assert weak.values["a"] == pytest.approx(0.04, rel=0.3)
    assert "doubling pays" in answer.verdict(weak)
    assert weak.cost(64 * base) == pytest.approx(1.24, abs=0.06)
    curve = {
        workers: 70 * workers / (1 + 0.3 * workers / base)
        for workers in (*counts, 32 * base, 64 * base, 256 * base)
    }
    measured = {workers: [curve[workers] / 0.7] * 2 for workers in counts}
    by_plan = laws.choose_law(measured, is_weak=False, curve=curve)
    assert by_plan is not None and by_plan.name == "plan"
    # The planned speeds are wrong by a constant factor only.
    assert by_plan.speedup(64 * base) == pytest.approx(curve[64 * base] / curve[base])
    faster = laws.fit_law("logarithm", repeated({base: 1.0, 2 * base: 0.9}))
    assert faster is not None
    assert faster.values["a"] == 0, "no law says that more workers make a sample cheaper"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["task=unet:Denoise", "run.name=mine"], "mine-strong-scaling"),
        (["task=unet:Denoise"], "denoise-strong-scaling"),
        (["task=image_classification"], "image_classification-strong-scaling"),
    ],
)
def test_a_study_without_a_runs_name_has_its_tasks(words: list[str], name: str) -> None:
    assert study_name(load_config([], words), weak=False) == name


def test_two_numbers_of_workers_or_one_repeat_allow_no_verdict() -> None:
    for speeds in (
        {1: [1.0, 1.02, 0.98], 2: [1.6, 1.61, 1.59]},
        {1: [1.0], 2: [1.9], 4: [3.5], 8: [7.0]},
        {4: [1], 8: [2]},
    ):
        for is_weak in (True, False):
            law = laws.choose_law(speeds, is_weak=is_weak)
            assert law is not None and law.spread(2 * law.largest) is None
            verdict = answer.verdict(law)
            assert "doubling" not in verdict
            assert "A verdict needs 3 numbers of workers, each measured 2 times" in verdict
    two = laws.choose_law({1: [1.0], 2: [1 / 0.62]}, is_weak=False)
    assert two is not None
    assert two.values["kappa"] == 0
    assert two.speedup(2) == pytest.approx(1 / 0.62, rel=1e-6)
    assert laws.choose_law({4: [1.0, 1.0]}, is_weak=True) is None
    assert laws.choose_law({}, is_weak=False) is None


def test_an_interval_widens_with_distance_and_noise_and_verdicts_respect_it() -> None:
    costs = {1: 1.0, 2: 1.02, 4: 1.05}
    quiet = laws.choose_law(repeated(costs, 0.001), is_weak=True)
    loud = laws.choose_law(repeated(costs, 0.05), is_weak=True)
    assert quiet is not None and loud is not None
    near = quiet.spread(8)
    far = quiet.spread(64)
    assert near is not None and far is not None and near < far and near < (loud.spread(8) or 0)
    with_one = repeated(costs, 0.001) | {4: [380.0]}
    once = laws.choose_law(with_one, is_weak=True)
    assert once is not None and once.spread(8) is None, "a point was measured once"
    assert "A verdict needs" in answer.verdict(once)
    edge = laws.fit_law("universal", repeated({1: 1.0, 2: 1.059, 4: 1.176, 8: 1.412}, 0.002))
    assert edge is not None and "cannot be told" in answer.verdict(edge)
    # study.json keeps the law.
    assert laws.Law.from_json(json.loads(json.dumps(quiet.to_json()))) == quiet


def test_a_recommendation_tells_which_numbers_were_measured_only_once() -> None:
    once = {1: [100.0, 99.0], 2: [165.0]}
    assert "measured once only" in answer.recommend({"ddp": once})
    twice = {workers: rates * 2 for workers, rates in once.items()}
    assert "measured once only" not in answer.recommend({"ddp": twice})


def test_the_recommendation_is_the_fastest_as_far_as_doubling_pays() -> None:
    ddp = {1: [100.0] * 2, 2: [190.0] * 2, 4: [200.0] * 2}
    speeds = {"ddp": ddp, "fsdp": {1: [100.0] * 2, 2: [150.0] * 2, 4: [340.0] * 2, 8: [400.0] * 2}}
    recommendation = answer.recommend(speeds)
    throughput = "340 samples/s, 3.40 times the throughput of 1, at 85% efficiency."
    assert recommendation == f"Use fsdp on 4 workers: {throughput}"
    slow = {1: [100.0] * 2, 2: [120.0] * 2}
    assert answer.recommend({"ddp": slow}) == "Use 1 worker: 100 samples/s."
    # Two doublings must bring at least 1.5 ** 2.
    assert "on 4 workers" in answer.recommend({"ddp": {1: [100.0], 4: [260.0]}})


def test_a_step_is_the_sum_of_its_parts() -> None:
    def worker(node: str, computing: float, exposed: float) -> WorkerTimes:
        """A worker whose steps take 1.5 s, 0.1 s of it for data, and 2 s in a profile."""
        shares = {
            "step_seconds": 2.0,
            "computing_seconds": computing,
            "exposed_communication_seconds": exposed,
        }
        return WorkerTimes(node=node, steps=[1.5, 1.5, 9.0], data=[0.1, 0.1, 0.1], shares=shares)

    point = combine([worker("a", 1.0, 0.5), worker("b", 1.2, 0.25)], Config(task="x"))
    assert (point.step, point.computing, point.bubble, point.data) == pytest.approx(
        (1.5, 1.225, 0.0, 0.1)
    )
    assert point.communication == pytest.approx(1.4 / 8), "the shortest wait of any worker"
    assert point.balance == pytest.approx(1.1 / 1.2)
    assert point.notes[0].startswith("worker 1 on b computes 1.09 times as long as the mean")
    single = combine([WorkerTimes(node="a", steps=[1.5], data=[0.1])], Config(task="x"))
    assert (single.computing, single.communication, single.notes) == (pytest.approx(1.4), 0.0, [])


def test_a_pipelines_wait_is_bubble_as_far_as_its_schedule_causes_it() -> None:
    """Two stages and micro-batches under gpipe: forward 1 s, backward 2 s, transfer 0.5 s."""
    ops = [("F", 0, 1.0), ("F", 1, 1.0), ("B", 0, 2.0), ("B", 1, 2.0), ("REDUCE", -1, 0.25)]
    begin = [[0, 1, 6.0, 8.0, 10.0], [1.5, 2.5, 3.5, 5.5, 7.5]]
    spans: list[list[dict[str, Any]]] = [[], []]
    for stage in (0, 1):
        for (kind, micro_batch, seconds), start in zip(ops, begin[stage]):
            span = Span(
                stage=stage,
                kind=kind,
                micro_batch=micro_batch,
                chunk=0,
                start=start,
                end=start + seconds,
            )
            spans[stage].append(asdict(span))
    config = Config(task="x", parallel=ParallelConfig(schedule="gpipe"))
    workers = [
        WorkerTimes(node="a", spans=[stage_spans], steps=[10.5], data=[0.0])
        for stage_spans in spans
    ]
    point = combine(workers, config)
    assert point.bubble == pytest.approx(10 * (1 / 3), rel=1e-6), "(p-1) / (m+p-1) of the step"
    assert point.computing == pytest.approx(6.0)
    assert point.communication == pytest.approx(10.5 - 6.0 - 10 / 3)


BAD = [
    ("1", "one point"),
    ("1,x", "write numbers with commas"),
    ("1,3", "cannot share evenly"),
    ("0,1", "greater than 0"),
    ("1,2 --strategy dpd", "'dpd' is not known"),
]


@pytest.mark.parametrize(("workers", "message"), BAD)
def test_wrong_numbers_of_workers_are_refused(tmp_path: Path, workers: str, message: str) -> None:
    arguments = [*POINTS, "train.steps=10", "run.name=x", f"run.storage={tmp_path}"]
    arguments += ["--workers", *workers.split()]
    assert message in invoke("scale", *arguments, code=2).output


def test_a_study_reports_on_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given: two workers need 0.55 of one's time, an eleventh of it to communicate."""
    workers_measured: list[int] = []

    def points(job: Job, workers: int, *_: Any, **__: Any) -> list[WorkerTimes]:
        workers_measured.append(workers)
        shares = {
            "step_seconds": 11.0,
            "exposed_communication_seconds": 1.0,
            "computing_seconds": 1.0,
        }
        seconds = 1.0 if workers == 1 else 0.55
        times = WorkerTimes(node="a", steps=[seconds], data=[0.0], shares=shares, memory=2**20)
        return [times] * workers

    monkeypatch.setattr(run, "connect", lambda *_, **__: SimpleNamespace(gpus=0, shape=None))
    monkeypatch.setattr(run, "check_feasible", lambda *_: None)
    monkeypatch.setattr(run, "rate_here", lambda *_: 3.6)
    monkeypatch.setattr("experiments.scale.point.measure_point", points)
    overrides = [
        "train.steps=100",
        "run.name=p",
        f"run.storage={tmp_path}",
        "tracking.enabled=false",
    ]
    plan = StudyPlan(workers=(1, 2), strategies=("ddp",), weak=False, repeats=3, blocks=1, steps=1)
    outcome = run.scale(load_config([], [*POINTS, *overrides]), plan, Console(quiet=True))
    assert workers_measured == [1, 2, 2, 1, 1, 2], "in an order in which drift cancels"
    two_workers = [point for point in outcome.points if point["workers"] == 2]
    assert all(
        (point["computing"], point["communication"]) == pytest.approx((0.5, 0.05))
        for point in two_workers
    )
    assert "4 workers would do" in outcome.verdicts["ddp"]
    assert "A verdict needs 3" in outcome.verdicts["ddp"]
    assert outcome.recommended.startswith("Use ddp on 2 workers: 29 samples/s, 1.82 times")
    text = Path(outcome.page).read_text()
    assert "exposed communication" in text and "the whole run" in text
    assert ">0:55<" in text and ">0.11<" in text, "55 s on two workers at 3.6 an hour"
    repeated_study = run.scale(load_config([], [*POINTS, *overrides]), plan, Console(quiet=True))
    assert len(workers_measured) == 6
    assert repeated_study.points == outcome.points, "no point is measured again"


@pytest.mark.slow
def test_a_study_measures_and_recommends(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    quick = ["--workers", "1,2", "--repeats", "3", "--blocks", "2", "--steps", "3"]
    arguments = ["scale", *POINTS, "train.steps=10", "run.name=p", f"run.storage={tmp_path}"]
    arguments += [*quick, "--json"]
    first = trireme(*arguments, env=ray_environment).expect()
    points = first.json["points"]
    expected = [(workers, repeat) for workers in (1, 2) for repeat in range(3)]
    assert sorted((point["workers"], point["repeat"]) for point in points) == expected
    for point in points:
        assert point["step_seconds"] > 0 and point["batch"] == 16
        names = ("computing", "bubble", "communication", "data")
        parts = sum(point[f"{name}_seconds"] for name in names)
        assert point["step_seconds"] == pytest.approx(parts)
        assert point["workers"] == 2 or point["communication_seconds"] == 0
    assert any(point["communication_seconds"] > 0 for point in points), (
        "two workers wait for each other"
    )
    assert "A verdict needs" in first.json["verdicts"]["ddp"]
    assert first.json["recommended"].startswith("Use ")
    logged_run = mlflow_run(tmp_path, "p-strong-scaling")
    assert logged_run.info.status == "FINISHED" and "trireme.verdict.ddp" in logged_run.data.tags
