"""What operators see of a run: its costs and budget, and its metrics in Prometheus.

The metrics have the names that the dashboard asks for, also from a real Ray.
"""

import contextlib
import json
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.config.io import load_config
from app.errors import UserError
from app.run import cost, metrics
from app.run.cost import Meter, check_budget, must_stop, rate_of
from app.run.metrics import METRICS, RunMetrics
from app.storage.storage import Storage
from app.training.events import CheckpointSaved, StepsDone
from cluster.remote import free_port
from tests.cluster.test_pending import HEAD_NODE, SHAPE, node
from tests.ray_heads import ray_head
from tests.running import (
    POINTS,
    ROOT,
    Lines,
    committed,
    environment,
    mlflow_run,
    start,
    trireme,
    wait_until,
)


def test_the_rate_of_a_run_is_its_share_of_the_nodes_price() -> None:
    nodes = [HEAD_NODE, node("", "big", {"CPU": 96.0, "GPU": 8.0}), node("", "small", {"GPU": 1.0})]
    assert rate_of(4, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(4 * 55 / 8)
    assert rate_of(9, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(56.0)
    h100s = node("", "big", {"GPU": 8.0, "accelerator_type:H100": 1.0})
    listed = rate_of(8, {"GPU": 1.0}, [h100s], None)
    assert listed and 10 < listed < 200, "the list price"
    assert rate_of(8, {"GPU": 1.0}, nodes[1:2], None) is None, "the price is not known"
    with pytest.raises(UserError, match=r"cluster\.file"):
        check_budget(5.0, None)


def test_a_worker_that_evaluates_pays_for_the_same_kind_of_device(monkeypatch: Any) -> None:
    """CPUs of a node are paid with its GPUs where these are counted."""
    nodes = [HEAD_NODE, node("", "big", {"CPU": 96.0, "GPU": 8.0})]
    monkeypatch.setattr(cost, "living_nodes", lambda: nodes)
    monkeypatch.setattr(cost, "cluster_file", lambda file: "cluster.yaml")
    monkeypatch.setattr(cost, "read_cluster", lambda file: SHAPE)
    config = load_config([], [])
    for resources, workers in (({"GPU": 1.0}, 5), ({"GPU": 0.5}, 4.5), ({"CPU": 4.0}, 4), ({}, 4)):
        rate = cost.rate_here(config, 4, {"GPU": 1.0}, for_evaluation=resources)
        assert rate == pytest.approx(workers * 55 / 8)


def test_a_budget_is_stopped_before_it_is_overspent() -> None:
    assert not must_stop(9.0, 60.0, None)
    assert not must_stop(8.9, 60.0, 10.0)
    assert must_stop(9.1, 60.0, 10.0), "a minute at $60 an hour is reserved for the end"
    assert must_stop(0.0095, 60.0, 0.01)
    assert not must_stop(0.0, 60.0, 0.01), "but never more than a tenth of the budget"


def test_the_meter_adds_up_all_starts_and_counts_wasted_time(
    tmp_path: Path, monkeypatch: Any
) -> None:
    clock = [0.0]
    monkeypatch.setattr("app.run.cost.time.time", lambda: clock[0])

    def meter() -> Meter:
        return Meter(1800.0, 100.0, Storage(str(tmp_path)), lambda workers: 900.0 * workers)

    first_meter = meter()
    first_meter.resize(4)  # a dollar a second
    for seconds, stepping in ((10, False), (20, True), (5, False)):
        clock[0] += seconds
        assert not first_meter.count(stepping=stepping)
    assert (first_meter.spent.total, first_meter.spent.wasted) == (35.0, 15.0)
    first_meter.save()
    resumed_meter = meter()
    clock[0] += 100
    assert resumed_meter.spent.total == 35.0
    assert not resumed_meter.count(stepping=True), "half a dollar a second"
    clock[0] += 12
    assert resumed_meter.count(stepping=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "starting"), [("actors", False), ("actors", True), ("ray", True)]
)
def test_a_run_stops_with_a_checkpoint_when_its_budget_is_spent(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str, starting: bool
) -> None:
    """Two of the four CPUs cost a quarter of a dollar a second."""
    file = tmp_path / "cluster.yaml"
    text = (ROOT / "cluster" / "laptop.yaml").read_text()
    file.write_text(text.replace("price_per_hour: 0", "price_per_hour: 1800"))
    budget = 8 if starting else 25
    slow = tmp_path / "slow"
    folder = tmp_path / "dear"
    common = ["train", *POINTS, f"run.storage={tmp_path}", "strategy=ddp", f"launcher={launcher}"]
    arguments = [
        *common,
        "train.steps=1000000",
        "run.name=dear",
        "workers=2",
        f"cluster.file={file}",
        f"budget={budget}",
        "task_args.step_seconds=300",
        f"task_args.slow_while={slow}",
    ]
    process = start(arguments, env=ray_environment)
    lines = Lines(process)
    wait_until((folder / "run.json").exists)  # by then the driver has rehearsed a step
    if starting:
        slow.touch()
    assert process.wait() == 130, lines.text
    slow.unlink(missing_ok=True)
    ending = "stopping before training begins" if starting else "saving a checkpoint and stopping"
    lines.when(f"of a budget of ${budget}.00: {ending}")
    assert ("stopped before training began" in lines.text) == starting
    assert bool(committed(folder)) != starting
    metrics = mlflow_run(tmp_path, "dear").data.metrics
    assert 0.87 * budget < metrics["cost/dollars"] <= budget and metrics["cost/wasted_dollars"] > 0
    assert (metrics["cost/wasted_dollars"] == metrics["cost/dollars"]) == starting
    repeated = trireme(*arguments, env=ray_environment)
    assert repeated.code == 2 and "budget is spent" in repeated.err, repeated.err
    all_cpus = ("train.steps=2", "run.name=next", "workers=4")
    trireme(*common, *all_cpus, env=ray_environment).expect()


# --- Prometheus -----------------------------------------------------------------------------------

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


def test_the_dashboard_asks_for_every_metric_that_is_exported() -> None:
    board = json.loads((ROOT / "cluster" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    series = rf'last_over_time\(ray_{metrics.PREFIX}(\w+)\{{run=~"\$run"\}}\[1m\]\)'
    names = {name for expression in expressions for name in re.findall(series, expression)}
    assert names == METRICS.keys()
    forms = {"value", "value / value", "value - value", "time() - value", "sum(value)"}
    assert {re.sub(series, "value", expression) for expression in expressions} == forms
    assert board["templating"]["list"][1]["query"] == f"label_values(ray_{metrics.PREFIX}step, run)"


def test_goodput_counts_only_steps_that_were_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    run = RunMetrics("a")
    run._gauges = {name: Mock() for name in METRICS}

    def goodput(seconds: float, number: int | None = None) -> float:
        clock[0] += seconds
        if number is not None:
            run.steps_done(replace(PROGRESS, step=number))
        run.refresh()
        return run._gauges["goodput"].set.call_args.args[0]

    assert goodput(20, 10) == 0.5 and not run._gauges["mfu"].set.called
    run._gauges["items_per_second"].set.assert_called_with(8.0, {"run": "a", "unit": "samples"})
    assert goodput(10, 5) == pytest.approx(10 / 30), "rewound: steps 1 to 5 are taken again"
    assert goodput(10, 15) == pytest.approx(15 / 40)
    assert goodput(20) == pytest.approx(15 / 60), "it falls while no step is taken"
    run.set(loss=float("nan"))
    saved = CheckpointSaved(
        step=15, stall_seconds=0.25, previous_seconds=0.0, interval_seconds=None
    )
    run.checkpoint_saved(saved)
    goodput(metrics.REFRESH_SECONDS)
    run._gauges["loss"].set.assert_called_with(0.5, {"run": "a"})
    run._gauges["checkpoint_stall_seconds"].set.assert_called_with(0.25, {"run": "a"})
    assert not run._gauges["checkpoint_seconds"].set.called, "there is no earlier checkpoint"


@pytest.mark.slow
def test_ray_exports_the_metrics_while_a_run_trains(tmp_path: Path) -> None:
    port = free_port()
    arguments = [
        "train",
        *POINTS,
        "train.steps=1000000",
        "run.name=seen",
        f"run.storage={tmp_path}",
    ]

    def exported() -> set[str]:
        with contextlib.suppress(OSError):  # the agent is still starting
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            series = rf'^ray_{metrics.PREFIX}(\w+){{.*run="seen"'
            names = set(re.findall(series, text, re.MULTILINE))
            return names if "checkpoint_seconds" in names else set()
        return set()

    with ray_head("--include-dashboard=false", f"--metrics-export-port={port}") as address:
        env = environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        arguments += ["workers=2", "checkpoint.every_seconds=1", "run.log_format=json"]
        process = start(arguments, env=env)
        try:
            assert wait_until(exported) >= METRICS.keys() - {"mfu", "dollars", "dollars_per_hour"}
        finally:
            process.terminate()
            process.wait(60)
    for name, rank in (("driver", "driver"), ("rank-1", 1)):
        lines = (tmp_path / "seen" / "logs" / f"{name}.log").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        if name == "driver":
            assert any("training seen on" in line["text"] for line in records)
        assert all({"time", "attempt", "host"} <= line.keys() for line in records)
        assert {(line["run"], line["rank"]) for line in records} <= {("seen", rank)}
