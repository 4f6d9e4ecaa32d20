"""Scaling laws against made-up machines that follow them, what a study refuses, and one study as a person runs it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments.scale import fits
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
    assert [f.workers for f in ahead] == [32, 64, 256]
    assert ahead[2].speedup < ahead[1].speedup, "past the peak more is slower"
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


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("1", "one point"),
        ("1,x", "write numbers with commas"),
        ("1,3", "cannot share evenly"),
        ("0,1", "greater than 0"),
    ],
)
def test_bad_input(tmp_path: Path, workers: str, said: str) -> None:
    arguments = ["scale", *POINTS, "train.steps=10", "run.name=x", f"run.storage={tmp_path}", "--workers", workers]
    ended = trireme(*arguments)
    assert ended.code == 2 and said in ended.err


@pytest.mark.slow
def test_a_study(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    quick = ["--workers", "1,2", "--repeats", "2", "--blocks", "2", "--steps", "3"]
    arguments = ["scale", *POINTS, "train.steps=10", "run.name=p", f"run.storage={tmp_path}", *quick, "--json"]
    first = trireme(*arguments, env=ray_environment)
    assert first.code == 0, first.err
    points = first.json["points"]
    assert sorted((p["workers"], p["repeat"]) for p in points) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(p["step"] > 0 and p["batch"] == 16 for p in points)
    assert all((len(p["local"]) == 2) if p["workers"] == 2 else p["local"] is None for p in points)
    assert "The next doubling" in first.json["verdicts"]["ddp"]
    page = Path(first.json["page"]).read_text()
    assert "universal scalability" in page and "<svg" in page and "src=" not in page
    run = mlflow_run(tmp_path, "p-strong-scaling")
    assert run.info.status == "FINISHED" and "trireme.verdict.ddp" in run.data.tags
    again = trireme(*arguments, env=ray_environment)
    assert again.code == 0 and again.json["points"] == points, "what was measured is not measured again"
    assert len(json.loads((tmp_path / "p-strong-scaling" / "study.json").read_text())["points"]) == 4
