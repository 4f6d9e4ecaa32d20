"""`scale-points`: MLflow's answers for a run of a million points, from a server on SQLite.

The points are logged as a run logs them, in batches of a thousand, and asked for as MLflow's page
asks: the run, then a sample of each metric's history; and the whole history of one metric.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import click
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from cluster.remote import free_port
from experiments.benchmarks.harness import show

METRICS = 10
BATCH = 1000
START_SECONDS = 180.0
"""How long the server may take to start."""


def log_points(client: MlflowClient, run_id: str, points: int) -> float:
    """Logs so many points, of `METRICS` metrics; returns the CPU seconds that it took."""
    start = time.process_time()
    steps_of_batch = BATCH // METRICS
    for first in range(0, points // METRICS, steps_of_batch):
        batch = [
            Metric(f"train/metric_{number}", 1.0 / (step + 1), 1_700_000_000_000 + step, step)
            for step in range(first, first + steps_of_batch)
            for number in range(METRICS)
        ]
        client.log_batch(run_id, metrics=batch, synchronous=True)
    return time.process_time() - start


def get(address: str, **arguments: str) -> int:
    """Asks the server; returns the bytes of its answer."""
    query = urllib.parse.urlencode(arguments)
    with urllib.request.urlopen(f"{address}?{query}", timeout=300) as answer:
        return len(answer.read())


def timed(what: Callable[[], int]) -> tuple[float, int]:
    """The seconds of the second of two calls, and the bytes of its answer."""
    what()
    start = time.monotonic()
    size = what()
    return time.monotonic() - start, size


def wait_for(address: str) -> None:
    """Waits until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            get(f"{address}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(f"MLflow's server has not started within {START_SECONDS:g} s")


@click.command(help=__doc__)
@click.option("--points", type=int, default=1_000_000, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(points: int, as_json: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="trireme-points-"))
    uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("points", artifact_location=f"file://{folder}/artifacts")
    run_id = client.create_run(experiment).info.run_id
    logging_seconds = log_points(client, run_id, points)
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--workers", "1"],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address)
        api = f"{address}/ajax-api/2.0/mlflow"
        metric = "train/metric_3"
        questions: dict[str, Callable[[], int]] = {
            "the run": lambda: get(f"{api}/runs/get", run_id=run_id),
            "a chart: a sample of one metric": lambda: get(
                f"{api}/metrics/get-history-bulk-interval",
                run_ids=run_id,
                metric_key=metric,
                max_results="320",
            ),
            "a metric's history, the first 25,000 points": lambda: get(
                f"{api}/metrics/get-history", run_id=run_id, metric_key=metric, max_results="25000"
            ),
        }
        answers = {name: timed(question) for name, question in questions.items()}
    finally:
        server.terminate()
        server.wait()
        database_bytes = (folder / "mlflow.db").stat().st_size
        shutil.rmtree(folder, ignore_errors=True)
    rows = [
        {"what": name, "seconds": f"{seconds:.2f}", "bytes": f"{size:,}"}
        for name, (seconds, size) in answers.items()
    ]
    per_second = f"{points / logging_seconds:,.0f} a second of CPU"
    rows.append({"what": "logging", "seconds": per_second, "bytes": f"{database_bytes:,}"})
    show(
        "scale-points",
        {name: list(answer) for name, answer in answers.items()},
        rows,
        as_json=as_json,
    )


if __name__ == "__main__":
    main()
