"""What operators see of a run: what it costs, its share of the nodes, its budget; and Prometheus's metrics under the
names that the dashboard asks for, from a real Ray."""

import contextlib
import json
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.errors import UserError
from app.run import metrics
from app.run.cost import Meter, check_budget, must_stop, rate_of
from app.run.metrics import METRICS, RunMetrics
from app.storage.storage import Storage
from app.training.events import CheckpointSaved, StepsDone
from cluster.remote import free_port
from tests.cluster.test_pending import HEAD_NODE, SHAPE, node
from tests.ray_heads import ray_head
from tests.running import POINTS, ROOT, Lines, committed, environment, mlflow_run, start, trireme, wait_until


def test_the_rate_is_the_share_of_the_nodes() -> None:
    nodes = [HEAD_NODE, node("", "big", {"CPU": 96.0, "GPU": 8.0}), node("", "small", {"GPU": 1.0})]
    assert rate_of(4, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(4 * 55 / 8)
    assert rate_of(9, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(56.0)
    listed = rate_of(8, {"GPU": 1.0}, [node("", "big", {"GPU": 8.0, "accelerator_type:H100": 1.0})], None)
    assert listed and 10 < listed < 200, "the list price"
    assert rate_of(8, {"GPU": 1.0}, nodes[1:2], None) is None, "the price is not known"
    with pytest.raises(UserError, match=r"cluster\.file"):
        check_budget(5.0, None)


def test_a_budget_is_stopped_before_it_is_overspent() -> None:
    assert not must_stop(9.0, 60.0, None)
    assert not must_stop(8.9, 60.0, 10.0) and must_stop(9.1, 60.0, 10.0), "a minute at $60 an hour is kept for the end"
    assert must_stop(0.0095, 60.0, 0.01) and not must_stop(0.0, 60.0, 0.01), "but never more than a tenth"


def test_the_meter_goes_on_over_starts_and_knows_what_was_wasted(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("app.run.cost.time.time", lambda: now[0])

    def meter() -> Meter:
        return Meter(1800.0, 100.0, Storage(str(tmp_path)), lambda workers: 900.0 * workers)

    first = meter()
    first.resize(4)  # a dollar a second
    for seconds, stepping in ((10, False), (20, True), (5, False)):
        now[0] += seconds
        assert not first.count(stepping=stepping)
    assert (first.spent.total, first.spent.wasted) == (35.0, 15.0)
    first.save()
    later = meter()
    now[0] += 100
    assert later.spent.total == 35.0 and not later.count(stepping=True), "half a dollar a second"
    now[0] += 12
    assert later.count(stepping=True)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "starting"), [("actors", False), ("actors", True), ("ray", True)])
def test_a_run_stops_when_its_budget_is_spent_with_a_checkpoint_if_it_has_begun(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str, starting: bool
) -> None:
    """Two of the four CPUs cost a quarter of a dollar a second."""
    file, text = tmp_path / "cluster.yaml", (ROOT / "cluster" / "laptop.yaml").read_text()
    file.write_text(text.replace("price_per_hour: 0", "price_per_hour: 1800"))
    budget, slow, folder = 8 if starting else 25, tmp_path / "slow", tmp_path / "dear"
    own = ["train", *POINTS, f"run.storage={tmp_path}", "strategy=ddp", f"launcher={launcher}"]
    run = [*own, "train.steps=1000000", "run.name=dear", "workers=2", f"cluster.file={file}", f"budget={budget}"]
    run += ["task_args.step_seconds=300", f"task_args.slow_while={slow}"]
    process = start(run, env=ray_environment)
    lines = Lines(process)
    wait_until((folder / "run.json").exists)  # the driver has tried a step by then
    if starting:
        slow.touch()
    assert process.wait() == 130, lines.text
    slow.unlink(missing_ok=True)
    how = "stopping before training begins" if starting else "saving a checkpoint and stopping"
    lines.when(f"of a budget of ${budget}.00: {how}")
    assert ("stopped before training began" in lines.text) == starting and bool(committed(folder)) != starting
    metrics = mlflow_run(tmp_path, "dear").data.metrics
    assert 0.87 * budget < metrics["cost/dollars"] <= budget and metrics["cost/wasted_dollars"] > 0
    assert (metrics["cost/wasted_dollars"] == metrics["cost/dollars"]) == starting
    again = trireme(*run, env=ray_environment)
    assert again.code == 2 and "budget is spent" in again.err, again.err
    trireme(*own, "train.steps=2", "run.name=next", "workers=4", env=ray_environment).expect()  # all four CPUs are free


# --- Prometheus -------------------------------------------------------------------------------------------------------

PROGRESS = StepsDone(
    step=0,
    steps=100,
    loss=0.5,
    loss_step=0,
    rate=8.0,
    unit="samples",
    gpus=0,
    mfu=None,
    seconds_left=10.0,
    seconds_per_step=1.0,
    memory_bytes=1_000_000,
)


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((ROOT / "cluster" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    series = rf'last_over_time\(ray_{metrics.PREFIX}(\w+)\{{run=~"\$run"\}}\[1m\]\)'
    assert {name for expression in asked for name in re.findall(series, expression)} == METRICS.keys()
    forms = {"value", "value / value", "value - value", "time() - value", "sum(value)"}
    assert {re.sub(series, "value", expression) for expression in asked} == forms
    assert board["templating"]["list"][1]["query"] == f"label_values(ray_{metrics.PREFIX}step, run)"


def test_goodput_counts_only_steps_that_were_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    run = RunMetrics("a")
    run._gauges = {name: Mock() for name in METRICS}

    def goodput(seconds: float, number: int | None = None) -> float:
        now[0] += seconds
        if number is not None:
            run.steps_done(replace(PROGRESS, step=number))
        run.refresh()
        return run._gauges["goodput"].set.call_args.args[0]

    assert goodput(20, 10) == 0.5 and not run._gauges["mfu"].set.called
    run._gauges["items_per_second"].set.assert_called_with(8.0, {"run": "a", "unit": "samples"})
    assert goodput(10, 5) == pytest.approx(10 / 30), "rewound: steps 1 to 5 are taken again"
    assert goodput(10, 15) == pytest.approx(15 / 40)
    assert goodput(20) == pytest.approx(15 / 60), "it falls while nothing moves"
    run.set(loss=float("nan"))
    run.checkpoint_saved(CheckpointSaved(step=15, stall_seconds=0.25, previous_seconds=0.0, interval_seconds=None))
    goodput(metrics.REFRESH_SECONDS)
    run._gauges["loss"].set.assert_called_with(0.5, {"run": "a"})
    run._gauges["checkpoint_stall_seconds"].set.assert_called_with(0.25, {"run": "a"})
    assert not run._gauges["checkpoint_seconds"].set.called, "there was none before"


@pytest.mark.slow
def test_ray_exports_them_while_a_run_trains(tmp_path: Path) -> None:
    port, run = free_port(), ["train", *POINTS, "train.steps=1000000", "run.name=seen", f"run.storage={tmp_path}"]

    def exported() -> set[str]:
        with contextlib.suppress(OSError):  # the agent is still starting
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            found = set(re.findall(rf'^ray_{metrics.PREFIX}(\w+){{.*run="seen"', text, re.MULTILINE))
            return found if "checkpoint_seconds" in found else set()
        return set()

    with ray_head("--include-dashboard=false", f"--metrics-export-port={port}") as address:
        env = environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        process = start([*run, "workers=2", "checkpoint.every_seconds=1", "run.log_format=json"], env=env)
        try:
            assert wait_until(exported) >= METRICS.keys() - {"mfu", "dollars", "dollars_per_hour"}
        finally:
            process.terminate()
            process.wait(60)
    for name, rank in (("driver", "driver"), ("rank-1", 1)):
        lines = (tmp_path / "seen" / "logs" / f"{name}.log").read_text().splitlines()
        kept = [json.loads(line) for line in lines if line.startswith("{")]
        assert name != "driver" or any("training seen on" in line["text"] for line in kept)
        assert all({"time", "attempt", "host"} <= line.keys() for line in kept)
        assert {(line["run"], line["rank"]) for line in kept} <= {("seen", rank)}
