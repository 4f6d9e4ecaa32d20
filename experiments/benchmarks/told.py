"""A sweep whose trials only say what they are told to: what Tune, the searcher, the scheduler and the ledger cost."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Said = list[tuple[float, dict[str, Any]]]
"""Of one trial: seconds to wait, and then a report."""


def sweep_of(space: str, overrides: list[str]) -> Any:
    """A sweep of digits, one worker per trial, not tracked."""
    from experiments.sweep.spec import read_sweep

    text = f"experiment: {Path('experiments/digits.yaml').resolve()}\nset: {{tracking.enabled: false, workers: 1}}\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "benchmark.yaml"
        file.write_text(f"{text}space:\n  {space}\n")
        return read_sweep(str(file), overrides)


def report(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "samples": step, "seconds": 0.0, "metrics": {"eval/loss": loss}, "steps": step, "workers": 1}


def replay(sweep: Any, folder: Path, reports: Callable[[int], Said], length: int = 1) -> tuple[Any, float]:
    """Runs a sweep whose trials wait and report as `reports(index)` says; its ledger, and the seconds it took."""
    import ray
    from ray import tune

    from experiments.sweep import oversee, search, slots
    from experiments.sweep.ledger import Ledger
    from experiments.sweep.ready import ENVIRONMENT
    from experiments.sweep.trial import INDEX, REPORT

    class Told(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.reset_config(config)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.left, self.began = list(reports(new_config[INDEX])), time.time()
            return True

        def step(self) -> dict[str, Any]:
            if not self.left:
                end = {"ended": True, "status": "finished", "message": "", "step": 0, "start": self.began}
                return {REPORT: json.dumps(end)}
            seconds, said = self.left.pop(0)
            time.sleep(seconds)
            ended = {"ended": not self.left, "status": "finished", "message": "", "start": self.began}
            return {REPORT: json.dumps({**said, **ended})}

    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the files that our trials do not write
    os.environ.update({**ENVIRONMENT, "TUNE_MAX_PENDING_TRIALS_PG": "2"})
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        ledger = Ledger(str(folder / "ledger"), "told", {})
        scheduler = oversee.scheduler_of(sweep, length, max(1, length // (sweep.reports or 1)))
        overseer = oversee.Overseer(sweep, ledger, scheduler, lambda trial, what: None)
        asks = search.Next(sweep, ledger, None, lambda values: slots.Need.of(1, {"CPU": 1.0}), slots.nodes_now, {})
        began = time.monotonic()
        tune.Tuner(
            tune.with_resources(Told, tune.PlacementGroupFactory([{"CPU": 1.0}])),
            tune_config=tune.TuneConfig(search_alg=asks, scheduler=overseer, num_samples=-1, reuse_actors=True),
            run_config=tune.RunConfig(
                name="told",
                storage_path=str(folder / "tune"),
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()
        return ledger, time.monotonic() - began
    finally:
        ray.shutdown()
