"""`sweep-truth`: how far from the best setting ways to search end, on a grid that is known.

First every cell of a grid of batch sizes and learning rates is trained with several seeds, by the
training loop in this process, one after the other. Then ways to search are replayed on the recorded
curves: each draws its cells and a seed, some stop trials early, and each names a setting. Its
regret is the mean loss of that setting, over the seeds that it did not see, above that of the
grid's best cell.

All ways are given the same samples. What stops early and what confirms is the code of `trireme
sweep` and Ray Tune's own scheduler.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from app.config import Config
from app.data.loader import length
from app.errors import NonFiniteError
from app.run.prepare import read_task
from app.tasks.base import Task
from app.training.events import Event, MetricsLogged
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from app.training.persistence import Persistence, Progress
from experiments.benchmarks.harness import show
from experiments.sweep import analysis
from experiments.sweep.confirmation import confirmation_of, plan_confirmation
from experiments.sweep.search import Values, make_scheduler
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trials import BATCH, RATE, SEED, Report, Trial
from strategies.layout import choose

SEEDS = 8
SEEN_SEEDS = 4
"""One of them searches and up to three confirm; the others are the truth."""
GRIDS = {
    "digits": """
experiment: experiments/digits.yaml
set: {{workers: 1, train.steps: null, train.epochs: 6, train.eval_every: null, {shared}}}
space:
  train.global_batch_size: [16, 32, 64, 128, 256]
  optimizer.lr: {{logspace: [1.0e-4, 3.0e-2, 7]}}
  train.seed: {seeds}
reports: 10
time: samples
""",
    "mnist": """
experiment: experiments/mnist.yaml
set:
  workers: 1
  task_args.model: mlp
  task_args.model_args: {{hidden: [64]}}
  task_args.augment_shift: 0
  train.steps: null
  train.epochs: 1
  train.eval_every: null
  schedule.warmup_steps: 0
  tracking.enabled: false
  checkpoint.every_steps: null
space:
  train.global_batch_size: [16, 32, 64, 128, 256]
  optimizer.lr: {{logspace: [1.0e-4, 3.0e-2, 7]}}
  train.seed: {seeds}
reports: 10
time: samples
""",
}
"""The sweeps that train every cell; their truth is known to the noise of the seeds left."""
SHARED = "schedule.warmup_steps: 0, tracking.enabled: false, checkpoint.every_steps: null"
BUDGET = 21
"""Whole trainings that each way may take: a grid of 15 cells, and 3 settings with 2 other seeds."""
REPEATS = 400
CONCURRENT = 2
"""Trials that run at once, which matters to a scheduler that does not wait."""


@dataclass(frozen=True)
class Truth:
    """A grid that is known.

    Attributes:
        sweep: The sweep that trained it.
        trials: For each cell (batch size, learning rate) its trials by seed.
    """

    sweep: Sweep
    trials: dict[tuple[int, float], dict[int, Trial]]

    def loss(self, cell: tuple[int, float], seed: int) -> float:
        """The best loss of a cell with a seed, infinite if it diverged."""
        value = analysis.best_value(self.trials[cell][seed], self.sweep)
        return float("inf") if value is None else self.sweep.sign * value

    def mean(self, cell: tuple[int, float], seeds: Sequence[int]) -> float:
        return statistics.fmean(self.loss(cell, seed) for seed in seeds)

    def noise(self, count: int = 5) -> float:
        """The standard deviation between seeds, of the best cells."""
        cells = sorted(self.trials, key=lambda cell: self.mean(cell, range(SEEDS)))[:count]
        variances = [
            statistics.variance(self.loss(cell, seed) for seed in range(SEEDS)) for cell in cells
        ]
        return statistics.fmean(variances) ** 0.5


@dataclass
class Replay:
    """One search, replayed.

    Attributes:
        truth: The grid.
        seeds: All seeds in the order of this replay: the first one searches.
        random: Draws cells.
        budget: Samples that are left.
        trials: What has been tried.
    """

    truth: Truth
    seeds: list[int]
    random: random.Random
    budget: float
    trials: list[Trial]

    def train(self, cell: tuple[int, float], seed: int, *, confirms: str = "") -> Trial:
        """Trains a cell to its end, and pays for it."""
        trial = self.start(cell, seed, confirms=confirms)
        recorded = self.truth.trials[cell][seed]
        trial.reports = list(recorded.reports)
        trial.status = recorded.status
        self.budget -= trial.last.get("samples", 0)
        return trial

    def start(self, cell: tuple[int, float], seed: int, *, confirms: str = "") -> Trial:
        """A trial of a cell that has not trained yet."""
        values: Values = {BATCH: cell[0], RATE: cell[1]}
        if confirms:
            values[SEED] = seed
        index = len(self.trials)
        trial = Trial(index, f"t{index}", values, confirms=confirms)
        self.trials.append(trial)
        return trial

    def cells(self) -> list[tuple[int, float]]:
        """The grid's cells in random order."""
        cells = list(self.truth.trials)
        self.random.shuffle(cells)
        return cells

    def best(self) -> tuple[int, float]:
        """The cell with the best value of one trial."""
        _, trial = analysis.rank_trials(self.trials, self.truth.sweep)[0]
        return cell_of(trial.values)


def cell_of(values: Values) -> tuple[int, float]:
    """The cell of a point."""
    return int(values[BATCH]), float(values[RATE])


# --- ways to search -------------------------------------------------------------------------------


def random_search(replay: Replay) -> tuple[int, float]:
    """Random cells, each trained to its end; the best value counts."""
    longest = _whole(replay.truth)
    for cell in replay.cells():
        if replay.budget < longest:
            break
        replay.train(cell, replay.seeds[0])
    return replay.best()


def grid_search(replay: Replay) -> tuple[int, float]:
    """An even grid of 3 batch sizes and 7 rates; the best value counts."""
    for cell in _even_cells(replay.truth, batches=3, rates=BUDGET // 3):
        replay.train(cell, replay.seeds[0])
    return replay.best()


def grid_confirmed(replay: Replay) -> tuple[int, float]:
    """An even grid of 3 batch sizes and 5 rates, confirmed: `trireme sweep` with a grid."""
    for cell in _even_cells(replay.truth, batches=3, rates=5):
        replay.train(cell, replay.seeds[0])
    return _confirmed(replay, settings=3, seeds=2)


def halving(replay: Replay) -> tuple[int, float]:
    """Ray Tune's ASHA over random cells as far as the budget goes; the best value counts."""
    _halve(replay, budget=replay.budget)
    return replay.best()


def halving_confirmed(replay: Replay) -> tuple[int, float]:
    """The same with what 3 × 2 trainings leave of the budget, then confirmed."""
    _halve(replay, budget=replay.budget - 6 * _whole(replay.truth))
    return _confirmed(replay, settings=3, seeds=2)


def halving_confirmed_twice(replay: Replay) -> tuple[int, float]:
    """The same with 2 settings and 3 seeds."""
    _halve(replay, budget=replay.budget - 6 * _whole(replay.truth))
    return _confirmed(replay, settings=2, seeds=3)


WAYS: dict[str, Callable[[Replay], tuple[int, float]]] = {
    "random search": random_search,
    "grid": grid_search,
    "Ray Tune's ASHA": halving,
    "trireme, grid": grid_confirmed,
    "trireme, random": halving_confirmed,
    "  with 2 × 3": halving_confirmed_twice,
}


def _whole(truth: Truth) -> int:
    """The samples of a training to its end."""
    return max(
        trial.last.get("samples", 0) for seeds in truth.trials.values() for trial in seeds.values()
    )


def _even_cells(truth: Truth, *, batches: int, rates: int) -> list[tuple[int, float]]:
    """Cells that are spread evenly over the grid."""
    all_batches = sorted({batch for batch, _ in truth.trials})
    all_rates = sorted({rate for _, rate in truth.trials})
    chosen_batches = [
        all_batches[round(place)] for place in np.linspace(0, len(all_batches) - 1, batches)
    ]
    chosen_rates = [
        all_rates[round(place)]
        for place in np.linspace(0, len(all_rates) - 1, min(rates, len(all_rates)))
    ]
    return [(batch, rate) for batch in chosen_batches for rate in chosen_rates]


def _confirmed(replay: Replay, *, settings: int, seeds: int) -> tuple[int, float]:
    """Trains the best settings with other seeds, and returns the best by them."""
    sweep = replace(replay.truth.sweep, confirm=settings, confirm_seeds=seeds)
    sweep = replace(sweep, space={key: sweep.space[key] for key in sweep.space if key != SEED})
    for planned in plan_confirmation(sweep, replay.trials):
        number = int(planned.values[SEED]) - sweep.experiment.train.seed
        seed = replay.seeds[number]
        replay.train(cell_of(planned.values), seed, confirms=planned.confirms)
    confirmation = confirmation_of(sweep, replay.trials)
    if confirmation is None:
        return replay.best()
    return cell_of(confirmation.best.values)


def _halve(replay: Replay, *, budget: float) -> None:
    """Ray Tune's ASHA as a sweep has it, over random cells, until the samples are spent."""
    from ray.tune.schedulers import TrialScheduler

    truth = replay.truth
    longest = _whole(truth)
    sweep = replace(truth.sweep, scheduler="asha", time="samples")
    scheduler = make_scheduler(sweep, longest=longest, report_every=longest // 10)
    controller: Any = None  # the scheduler asks nothing of it
    waiting = replay.cells()
    running: list[tuple[Any, Trial, list[Any]]] = []
    spent = 0.0
    while waiting or running:
        while waiting and len(running) < CONCURRENT and spent < budget:
            cell = waiting.pop()
            recorded = truth.trials[cell][replay.seeds[0]]
            trial = replay.start(cell, replay.seeds[0])
            tune_trial: Any = _TuneTrial(trial.name)
            scheduler.on_trial_add(controller, tune_trial)
            running.append((tune_trial, trial, list(recorded.reports)))
        if not running:
            break
        tune_trial, trial, reports = running.pop(0)
        if not reports:
            recorded = truth.trials[cell_of(trial.values)][replay.seeds[0]]
            trial.status = recorded.status
            continue
        report = reports.pop(0)
        spent += report["samples"] - trial.last.get("samples", 0)
        trial.reports.append(report)
        value = report["metrics"].get(sweep.metric, 1e30)
        result = {sweep.metric: value, "samples": report["samples"], "training_iteration": 1}
        decision = scheduler.on_trial_result(controller, tune_trial, result)
        is_last = not reports
        if decision == TrialScheduler.STOP and not is_last:
            trial.status = "pruned"
            continue
        running.append((tune_trial, trial, reports))
    replay.budget -= spent


class _TuneTrial:
    """What a scheduler of Tune asks of a trial."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


# --- the table ------------------------------------------------------------------------------------


def regrets(truth: Truth, search: Callable[[Replay], tuple[int, float]]) -> list[float]:
    """The regret of a way to search, in standard deviations between seeds.

    Args:
        truth: The grid.
        search: The way.
    """
    noise = truth.noise()
    best = min(truth.trials, key=lambda cell: truth.mean(cell, range(SEEDS)))
    all_regrets = []
    for number in range(REPEATS):
        generator = random.Random(number)
        seeds = list(range(SEEDS))
        generator.shuffle(seeds)
        replay = Replay(truth, seeds, generator, BUDGET * _whole(truth), [])
        cell = search(replay)
        unseen = seeds[SEEN_SEEDS:]
        all_regrets.append((truth.mean(cell, unseen) - truth.mean(best, unseen)) / noise)
    return all_regrets


class _Evaluations(SilentChannel):
    """Keeps the evaluations of a training.

    Args:
        config: Says how many samples a step has.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.batch = config.train.global_batch_size
        self.reports: list[Report] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, MetricsLogged) and "eval/loss" in event.values:
            self.reports.append(
                {
                    "step": event.step,
                    "samples": event.step * self.batch,
                    "seconds": event.training_seconds,
                    "metrics": dict(event.values),
                }
            )


class _SavesNothing(Persistence):
    """Stands for checkpoints, which a cell of a few seconds does not need."""

    def save(self, progress: Progress) -> None: ...

    def finish(self, progress: Progress) -> None: ...

    def keep_weights(self) -> None: ...


def train_cell(sweep: Sweep, values: Values, task: Task) -> tuple[str, list[Report]]:
    """Trains a cell of the grid with a seed.

    Args:
        sweep: Names the experiment.
        values: The cell and the seed.
        task: The experiment's.

    Returns:
        (finished or diverged, the evaluations)
    """
    batch, _ = cell_of(values)
    samples = length(task.train_data()) or 0
    steps = math.ceil((sweep.experiment.train.epochs or 1) * samples / batch)
    every = math.ceil(steps / (sweep.reports or 1))
    with tempfile.TemporaryDirectory() as folder:
        config = sweep.config({**values, "train.eval_every": every}, name="cell", storage=folder)
        channel = _Evaluations(config)
        job = Job(
            config=config,
            layout=choose(config.strategy, 1),
            folder=folder,
            attempt="truth",
            run_uid="",
            steps=steps,
            cwd=folder,
        )
        place = Place(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
        training = Training(job, place, channel, persistence_class=_SavesNothing)
        try:
            training.run()
        except NonFiniteError:
            return "diverged", channel.reports
        finally:
            training.close()
    return "finished", channel.reports


def measure(name: str, folder: Path) -> Truth:
    """Trains every cell of a grid, or what an earlier start has left of it.

    Args:
        name: Of `GRIDS`.
        folder: Keeps a line for each cell and seed.
    """
    file = folder / f"{name}-truth.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = GRIDS[name].format(seeds=list(range(SEEDS)), shared=SHARED)
    root = Path(__file__).parents[2]
    file.write_text(text.replace("experiments/", f"{root}/experiments/"))
    sweep = read_sweep(str(file), [f"run.storage={folder}"])
    lines = folder / f"{name}-truth.jsonl"
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    points = sweep.points or []
    with lines.open("a") as file_of_lines:
        task = read_task(sweep.experiment)
        for values in points[len(known) :]:
            status, reports = train_cell(sweep, values, task)
            record = {"values": values, "status": status, "reports": reports}
            known.append(record)
            file_of_lines.write(json.dumps(record) + "\n")
            file_of_lines.flush()
    trials: dict[tuple[int, float], dict[int, Trial]] = {}
    for index, record in enumerate(known):
        trial = Trial(index, f"t{index}", record["values"], record["status"])
        trial.reports = record["reports"]
        trials.setdefault(cell_of(trial.values), {})[int(trial.values[SEED])] = trial
    return Truth(sweep, trials)


@click.command(help=__doc__)
@click.option("--task", type=click.Choice(list(GRIDS)), default="digits", show_default=True)
@click.option("--folder", type=Path, help="Keeps what is trained. Default: a temporary one.")
@click.option("--json", "as_json", is_flag=True)
def main(task: str, folder: Path | None, as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        truth = measure(task, folder or Path(temporary))
    results: dict[str, dict[str, float]] = {}
    for name, search in WAYS.items():
        values = sorted(regrets(truth, search))
        results[name.strip()] = {
            "mean": statistics.fmean(values),
            "median": statistics.median(values),
            "90th percentile": values[int(0.9 * len(values))],
            "within noise": sum(value <= 1 for value in values) / len(values),
        }
    rows = []
    for name, result in results.items():
        row = {"regret, in deviations between seeds": name}
        for key, value in result.items():
            row[key] = f"{value:.0%}" if key == "within noise" else f"{value:.2f}"
        rows.append(row)
    summary = {"task": task, "noise": truth.noise(), "ways": results}
    show("sweep-truth", summary, rows, as_json=as_json)
