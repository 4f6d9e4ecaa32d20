"""`scale-uploads`: whether MLflow on SQLite keeps up with a run that logs a hundred steps a second.

The steps go through a run's tracker into its spool, and its writer, a process of its own, delivers
them. Then every point is asked for, and must be there once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import click
from mlflow.tracking import MlflowClient

from app.tracking.settings import Settings
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from experiments.benchmarks.harness import show

WAIT_SECONDS = 300.0
"""How long a writer that makes no progress is waited for at the end."""
WATCH_SECONDS = 0.2
TICKS = os.sysconf("SC_CLK_TCK")


def steps_waiting(folder: Path) -> int:
    """Events in a spool that are not delivered yet."""
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(State.load(folder).offset)
        return file.read().count(b"\n")


def cpu_seconds(pid: int | None) -> float:
    """What a process has taken of a processor; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


class WriterWatch:
    """Watches what a spool's writers take of a processor, and how far they are.

    Args:
        folder: The spool.

    Attributes:
        most_waiting: The most events that were not delivered yet, five times a second.
    """

    def __init__(self, folder: Path) -> None:
        self.most_waiting = 0
        self._folder = folder
        self._cpu_seconds: dict[int | None, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            writer = State.load(self._folder).writer
            self._cpu_seconds[writer] = max(cpu_seconds(writer), self._cpu_seconds.get(writer, 0.0))
            self.most_waiting = max(self.most_waiting, steps_waiting(self._folder))

    def stop(self) -> float:
        """The CPU seconds of all writers."""
        self._stop.set()
        self._thread.join()
        return sum(self._cpu_seconds.values())


@click.command(help=__doc__)
@click.option("--seconds", type=int, default=30, show_default=True)
@click.option("--rate", type=int, default=100, show_default=True, help="Steps a second.")
@click.option("--values", type=int, default=5, show_default=True, help="Values of a step.")
@click.option("--json", "as_json", is_flag=True)
def main(seconds: int, rate: int, values: int, as_json: bool) -> None:
    names = [f"train/value_{number}" for number in range(values)]
    steps = seconds * rate
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        settings = Settings(uri, "uploads", f"file://{folder}/artifacts")
        spool = Path(folder) / "uploads" / "tracking"
        tracker = Tracker(spool, settings, run_name="uploads", run_uid="uploads")
        tracker.start()
        watch = WriterWatch(spool)
        start = time.monotonic()
        start_cpu = time.thread_time()
        for step in range(1, steps + 1):
            time.sleep(max(0.0, start + step / rate - time.monotonic()))
            tracker.metrics(step, dict.fromkeys(names, 1.0 / step))
        logging_cpu = time.thread_time() - start_cpu
        logged = time.monotonic()
        left = steps_waiting(spool)
        delivery = tracker.finish("FINISHED", timeout=WAIT_SECONDS)
        waited = time.monotonic() - logged
        writer_seconds = watch.stop()
        if not delivery.complete or delivery.run_id is None:
            raise click.ClickException(f"MLflow has not got everything: {delivery.problem}")
        client = MlflowClient(uri)
        for name in names:
            history = client.get_metric_history(delivery.run_id, name)
            if sorted(metric.step for metric in history) != list(range(1, steps + 1)):
                raise click.ClickException(f"MLflow has {len(history)} points of {name}")
    results = {
        "points": steps * values,
        "seconds of logging": logged - start,
        "CPU seconds of logging": logging_cpu,
        "steps that waited, at most": watch.most_waiting,
        "steps that waited at the end": left,
        "seconds from the last step until all were delivered": waited,
        "CPU seconds of the writer, from its start to its end": writer_seconds,
    }
    rows = [{"what": what, "found": f"{value:,.4g}"} for what, value in results.items()]
    show("scale-uploads", results, rows, as_json=as_json)


if __name__ == "__main__":
    main()
