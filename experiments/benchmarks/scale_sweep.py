"""`scale-sweep`: what a sweep of a thousand trials costs its driver; the trials train nothing.

Searcher, scheduler, Ray Tune, the sweep's records, its answer and its page are those of `trireme
sweep`. A trial reports a made-up loss ten times. Seconds are of the CPU of the driver's process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
from ray import tune

from app import names
from app.console.terminal import Console
from cluster.connect import connect, disconnect
from experiments.benchmarks.harness import show
from experiments.report.page import write_page
from experiments.sweep.answer import work_out
from experiments.sweep.page import content
from experiments.sweep.spec import read_sweep
from experiments.sweep.trials import TrialStore

REPORTS = 10
SWEEP = """
experiment: {{task: tabular, train: {{steps: {reports}, global_batch_size: 16, eval_every: 1}},
  tracking: {{enabled: false}}, resources_per_worker: {{CPU: 0.25}}}}
space: {{optimizer.lr: {{loguniform: [0.0001, 1.0]}}}}
metric: eval/loss
mode: min
searcher: {searcher}
scheduler: asha
trials: {trials}
"""


class StubTrial(tune.Trainable):
    """Reports what a trial would."""

    def setup(self, config: dict[str, Any], context: object = None) -> None:
        self.rate = config["optimizer.lr"]
        self.steps = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        self.steps += 1
        loss = abs(self.rate - 0.03) + 1.0 / self.steps
        report = {
            "step": self.steps,
            "samples": 16 * self.steps,
            "seconds": 0.1 * self.steps,
            "metrics": {"eval/loss": loss, "eval/accuracy": 1.0 - loss},
            "steps": REPORTS,
            "workers": 1,
        }
        result = {"eval/loss": loss, "step": self.steps, "samples": 16 * self.steps}
        ending = {"done": True, "status": "finished", "message": ""}
        return {**result, "report": report, **(ending if self.steps == REPORTS else {})}


@click.command(help=__doc__)
@click.option("--trials", type=int, default=1000, show_default=True)
@click.option("--searcher", default="random", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(trials: int, searcher: str, as_json: bool) -> None:
    from experiments.sweep.tuning import prepare, run_trials

    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "many.yaml"
        file.write_text(SWEEP.format(reports=REPORTS, trials=trials, searcher=searcher))
        sweep = read_sweep(str(file), [])
        store = TrialStore(Path(folder) / "many", sweep.name, sweep.identity())
        cluster = connect(worker_setup=names.worker_setup())
        try:
            tuning = prepare(sweep, store.searched, cluster, longest=REPORTS)
            start = time.monotonic()
            start_cpu = time.process_time()
            console = Console(quiet=True)
            run_trials(sweep, store, console, tuning=tuning, trainable=StubTrial)
            costs["a trial, seconds of the driver"] = (time.process_time() - start_cpu) / trials
            costs["a trial, seconds that pass"] = (time.monotonic() - start) / trials
        finally:
            disconnect()
        start_cpu = time.process_time()
        answer = work_out(sweep, store)
        costs["the answer, seconds"] = time.process_time() - start_cpu
        start_cpu = time.process_time()
        page = write_page(store.folder, content(sweep, store, answer))
        costs["the page, seconds"] = time.process_time() - start_cpu
        costs["the page, megabytes"] = page.stat().st_size / 1e6
        start_cpu = time.process_time()
        again = TrialStore(store.folder, sweep.name, sweep.identity())
        costs["read again, seconds"] = time.process_time() - start_cpu
        assert len(again.ended) == trials
    rows = [{"what": name, "cost": f"{cost:.3f}"} for name, cost in costs.items()]
    show("scale-sweep", costs, rows, as_json=as_json)


if __name__ == "__main__":
    main()
