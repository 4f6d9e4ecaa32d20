"""What operators see of a run: the right numbers, under the names that the dashboard asks for, from a real Ray."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.run import metrics
from app.run.metrics import METRICS, RunMetrics
from cluster.remote import free_port
from tests.running import POINTS, ROOT, environment, ray_head, start, wait_until

NOT_ON_CPUS = ("MFU", "Dollars", "Dollars an hour")  # where no peak and no price is known
PROGRESS = {"steps": 100, "loss": 0.5, "rate": 8.0, "unit": "samples", "mfu": None, "memory_bytes": 1e6}


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((ROOT / "cluster" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    series = rf'last_over_time\(ray_{metrics.PREFIX}(\w+)\{{run=~"\$run"\}}\[1m\]\)'
    assert {name for expression in asked for name in re.findall(series, expression)} == METRICS.keys()
    forms = {"value", "value / value", "value - value", "time() - value", "sum(value)"}
    assert {re.sub(series, "value", expression) for expression in asked} == forms
    assert board["templating"]["list"][1]["query"] == f"label_values(ray_{metrics.PREFIX}step, run)"


def test_goodput_counts_only_steps_that_were_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [100.0], dict[str, float]()
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    run = RunMetrics("a")
    for name in METRICS:

        def set(value: float, tags: dict[str, str], name: str = name) -> None:
            assert tags == {"run": "a"} | ({"unit": "samples"} if name == "items_per_second" else {})
            given[name] = value

        run._gauges[name] = SimpleNamespace(set=set)

    def goodput(seconds: float, number: int | None = None) -> float:
        now[0] += seconds
        if number is not None:
            run.progress(PROGRESS | {"step": number, "seconds_per_step": 1.0})
        run.refresh()
        return given["goodput"]

    assert goodput(20, 10) == 0.5 and given["items_per_second"] == 8.0 and "mfu" not in given
    assert goodput(10, 5) == pytest.approx(10 / 30), "rewound: steps 1 to 5 are taken again"
    assert goodput(10, 15) == pytest.approx(15 / 40)
    assert goodput(20) == pytest.approx(15 / 60), "it falls while nothing moves"
    run.set(loss=float("nan"))
    run.checkpoint({"step": 15, "stall": 0.25, "seconds": 0.0})
    goodput(metrics.REFRESH_SECONDS)
    assert given["loss"] == 0.5 and given["checkpoint_stall_seconds"] == 0.25 and "checkpoint_seconds" not in given


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
            shown = shown_by_prometheus(tmp_path / "prometheus", port) if shutil.which("prometheus") else None
        finally:
            process.terminate()
            process.wait(60)
    assert shown is None or not [title for title, series in shown.items() if bool(series) == (title in NOT_ON_CPUS)]
    for name, rank in (("driver", "driver"), ("rank-1", 1)):
        lines = (tmp_path / "seen" / "logs" / f"{name}.log").read_text().splitlines()
        kept = [json.loads(line) for line in lines if line.startswith("{")]
        assert name != "driver" or any("training seen on" in line["text"] for line in kept)
        assert all({"time", "attempt", "host"} <= line.keys() for line in kept)
        assert {(line["run"], line["rank"]) for line in kept} <= {("seen", rank)}


def shown_by_prometheus(folder: Path, port: int) -> dict[str, list[Any]]:
    """What a Prometheus that scrapes this port answers to each panel's queries, by the panel's title."""
    folder.mkdir()
    own, jobs = free_port(), [{"job_name": "ray", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
    (folder / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    words += [f"--web.listen-address=127.0.0.1:{own}"]
    board = json.loads((ROOT / "cluster" / "grafana.json").read_text())
    with subprocess.Popen(["prometheus", *words], stderr=subprocess.DEVNULL) as process:

        def ask(expression: str) -> list[Any]:
            query = urllib.parse.urlencode({"query": expression.replace("$run", "seen")})
            with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?{query}") as answer:
                return json.load(answer)["data"]["result"]

        def scraped() -> list[Any]:
            with contextlib.suppress(OSError):
                return ask("last_over_time(ray_trireme_checkpoint_seconds[1m]) and ray_trireme_goodput")
            return []

        try:
            wait_until(scraped)
            return {p["title"]: [row for t in p["targets"] for row in ask(t["expr"])] for p in board["panels"]}
        finally:
            process.kill()
