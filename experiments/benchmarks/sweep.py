"""`python -m experiments.benchmarks.sweep bookkeeping warm asha noise`: what sweeping costs, and what ASHA saves.

bookkeeping   200 trials of one second on two slots, through our searcher, scheduler and ledger; the ideal is 100 s
warm          from a trial's start to its first step, on two warm workers, beside workers that Ray Train starts anew
asha          64 random trials of digits trained in full, and ASHA over the curves they left (trainings are
              deterministic, so replaying a curve gives what training again would); per seed the loss and the compute
noise         what measuring the gradient noise scale costs a step
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(["bookkeeping", "warm", "asha", "noise"]))
@click.option("--trials", default=200, show_default=True, help="Of bookkeeping.")
@click.option("--seeds", default=5, show_default=True, help="Of asha.")
@click.option("--random", "drawn", default=64, show_default=True, help="Random trials per seed of asha.")
def main(names: tuple[str, ...], trials: int, seeds: int, drawn: int) -> None:
    """What sweeping costs, and what ASHA saves; prints JSON."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {}
    if "bookkeeping" in names:
        found["bookkeeping"] = bookkeeping(trials)
    if "warm" in names:
        found["warm"] = {"warm": first_steps(True), "cold": first_steps(False)}
    if "asha" in names:
        found["asha"] = asha(seeds, drawn)
    if "noise" in names:
        found["noise"] = noise()
    click.echo(json.dumps(found, indent=1))


def bookkeeping(trials: int) -> dict[str, float]:
    """Seconds for so many one-second trials on two slots, the start of Ray left out."""
    sweep = _sweep(f"optimizer.lr: {{linspace: [0.001, 1.0, {trials}]}}", ["concurrent=2"])
    with tempfile.TemporaryDirectory() as folder:
        ledger, seconds = _replay(sweep, Path(folder), lambda index: [(1.0, _report(1, 1.0))])
    assert len(ledger.ended) == trials
    return {"seconds": seconds, "ideal": trials / 2, "over": seconds / (trials / 2) - 1}


def first_steps(warm: bool) -> dict[str, Any]:
    """Seconds from a trial's start to its first step: the first trial of a sweep, and the median of the others."""
    from app.console import Console
    from experiments.sweep.run import sweep as run

    overrides = ["workers=2", "strategy=ddp", "train.steps=30", f"warm={str(warm).lower()}"]
    with tempfile.TemporaryDirectory() as folder:
        space = f"optimizer.lr: [{', '.join(str(0.001 * (i + 1)) for i in range(6 if warm else 3))}]"
        sweep = _sweep(space, [*overrides, f"run.storage={folder}", "reports=2"])
        outcome = run(sweep, Console(quiet=True))
        lines = (Path(outcome.folder) / "ledger.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    first: dict[int, float] = {}
    for event in events:
        if event["event"] == "report":
            first.setdefault(event["index"], event["report"]["first_step"])
    times = list(first.values())
    return {"first_trial": times[0], "median_of_others": statistics.median(times[1:]), "all": times}


def asha(seeds: int, drawn: int) -> dict[str, Any]:
    """Per seed: the best loss of all random trials, ASHA's, and the share of their compute that ASHA spent."""
    rows = []
    for seed in range(seeds):
        space = "optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}\n  train.global_batch_size: [16, 32, 64, 128]"
        more = ["searcher=random", f"trials={drawn}", f"seed={seed}", "train.epochs=8", "reports=16", "time=samples"]
        rows.append(_asha_once(space, more, seed))
    return {
        "seeds": rows,
        "median_loss_over_best": statistics.median(row["asha"] / row["best"] - 1 for row in rows),
        "median_compute": statistics.median(row["compute"] for row in rows),
    }


def _asha_once(space: str, more: list[str], seed: int) -> dict[str, Any]:
    from app.console import Console
    from experiments.sweep.ledger import Ledger
    from experiments.sweep.run import sweep as run

    with tempfile.TemporaryDirectory() as folder:
        full = _sweep(space, [*more, f"run.storage={folder}", f"train.seed={seed}"])
        outcome = run(full, Console(quiet=True))
        curves = {t.index: t.reports for t in Ledger(outcome.folder, full.name, full.about()).trials.values()}
        halving = _sweep(space, [*more, f"train.seed={seed}", "scheduler={name: asha, reduction_factor: 4}"])
        halving.concurrent = 2
        length = max(reports[-1]["samples"] for reports in curves.values() if reports)

        def recorded(index: int) -> list[tuple[float, dict[str, Any]]]:
            return [(0.0, report) for report in curves.get(index, [])]

        ledger, _ = _replay(halving, Path(folder) / "asha", recorded, length)
    metric = full.metric

    def best(reports: list[list[dict[str, Any]]]) -> float:
        values = [r["metrics"][metric] for one in reports for r in one if math.isfinite(r["metrics"][metric])]
        return min(values)

    spent = sum(trial.last["samples"] for trial in ledger.trials.values() if trial.reports)
    total = sum(reports[-1]["samples"] for reports in curves.values() if reports)
    found = best([trial.reports for trial in ledger.trials.values()])
    return {"seed": seed, "best": best(list(curves.values())), "asha": found, "compute": spent / total}


def noise(blocks: int = 30, each: int = 20, every: int = 50) -> dict[str, float]:
    """What a measured step takes over an ordinary one, in the same process, block by block in turns; and what that is
    of the whole time where every 50th step is measured."""
    import torch

    from app.config_file import load_config
    from app.job import Job, Place
    from app.launchers.torchrun import Silence
    from app.prepare import prepare, read_task
    from app.worker import Training

    torch.set_num_threads(1)
    trainings, times = {}, {"with": list[float](), "without": list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        for name, measured in (("with", "1"), ("without", "null")):
            steps = each * (blocks + 2)
            more = [f"train.steps={steps}", f"train.noise_scale_every={measured}", "workers=1", f"run.storage={folder}"]
            config = load_config(["experiments/digits.yaml"], [*more, "train.eval_every=null", "strategy=single"])
            layout = prepare(config, read_task(config), 1, devices_per_node=None).layout
            job = Job(config, layout, f"{folder}/{name}", "b", "b", steps, os.getcwd())
            training = Training(job, Place(0, 1, 0, torch.device("cpu")), Silence())
            trainings[name] = (training, training.batches())
        for number in range(-1, blocks):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                training, batches = trainings[name]
                began = time.perf_counter()
                for _ in range(each):
                    training.step(next(batches))
                if number >= 0:
                    times[name].append(time.perf_counter() - began)
        for _, batches in trainings.values():
            getattr(batches, "close", lambda: None)()
    over = statistics.median(a / b for a, b in zip(times["with"], times["without"])) - 1
    step = 1e3 * statistics.median(times["without"]) / each
    return {"of_a_measured_step": over, f"of_all_at_{every}": over / every, "step_ms": step}


# --- a sweep whose trials only say what they are told to ------------------------------------------------------------


def _sweep(space: str, overrides: list[str]) -> Any:
    from experiments.sweep.spec import read_sweep

    text = f"experiment: {Path('experiments/digits.yaml').resolve()}\nset: {{tracking.enabled: false, workers: 1}}\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "benchmark.yaml"
        file.write_text(f"{text}space:\n  {space}\n")
        return read_sweep(str(file), overrides)


def _report(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "samples": step, "seconds": 0.0, "metrics": {"eval/loss": loss}, "steps": step, "workers": 1}


def _replay(
    sweep: Any, folder: Path, reports: Callable[[int], list[tuple[float, dict[str, Any]]]], length: int = 1
) -> tuple[Any, float]:
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
            seconds, report = self.left.pop(0)
            time.sleep(seconds)
            ended = {"ended": not self.left, "status": "finished", "message": "", "start": self.began}
            return {REPORT: json.dumps({**report, **ended})}

    os.environ.update({**ENVIRONMENT, "TUNE_MAX_PENDING_TRIALS_PG": "2"})
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
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


if __name__ == "__main__":
    main()
