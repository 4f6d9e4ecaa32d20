"""`fork-truth`: what branches of a checkpoint answer, beside grids of branches that are known.

--measure trains a run of each task, and from three of its checkpoints every cell of a grid of batch
sizes, learning rates and seeds; a seed is another order of the next samples. One process does so,
with the configuration, loop, data and checkpoints of a sweep's trials. fork_truth.csv.gz has the
losses. Without --measure sweeps as a person would write them, which train less than a fifth of the
grid, are replayed on the table: what they name is compared with what the whole grid says.

--real runs one of these sweeps by `trireme sweep` and compares each loss with the table's.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import click
import torch
import yaml

from app.checkpoint import commits
from app.config import Config
from app.config.io import load_config, with_values
from app.console.terminal import Console
from app.errors import NonFiniteError
from app.launchers.train import train
from app.run.prepare import Prepared, prepare, read_task
from app.training.events import Event, MetricsLogged
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from app.training.persistence import Persistence, Progress
from experiments.benchmarks.harness import show
from experiments.sweep.branches import (
    BranchBatch,
    Interval,
    answer_of,
    best_cell,
    edges_of,
    losses_of,
)
from experiments.sweep.search import Search, Values
from experiments.sweep.spec import DEFAULT_MORE_RATES, Sweep, read_sweep
from experiments.sweep.trials import BATCH, RATE, SEED, Report, Trial, load_trial
from experiments.sweep.widening import cells_beyond

HERE = Path(__file__).parent
TABLE = HERE / "fork_truth.csv.gz"
"""Task, step, batch, rate, seed and the loss after all samples of each branch."""
Row = tuple[str, int, int, float, int, float]
"""A line of it."""
SEEDS = 3
SAME = 1e-4
"""Losses that differ by less are those of the same branch, which the table has rounded."""
METRIC = "eval/loss"
REPORTS = 2
Cell = tuple[int, float]
"""A batch size and a learning rate."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run and the grid of its branches.

    Attributes:
        experiment: The file of the run, in experiments/.
        keys: key=value beside it.
        steps: Of its checkpoints.
        samples: That each branch sees.
        batches: The batch sizes, rising.
        rates: The learning rates, rising.
        centre: The rate in the middle of sweeps: the highest that is not above the run's own.
    """

    experiment: str
    keys: tuple[str, ...]
    steps: tuple[int, ...]
    samples: int
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    centre: float


def _doubling(lowest: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{lowest * 2**number:.6g}") for number in range(count))


TASKS = {
    "digits": Task(
        experiment="digits.yaml",
        keys=("workers=1", "train.eval_batch_size=359"),
        steps=(50, 150, 300),
        samples=2048,
        batches=(16, 32, 64, 128, 256, 512),
        rates=_doubling(3.125e-5, 13),
        centre=0.002,
    ),
    "mnist": Task(
        experiment="mnist.yaml",
        keys=(
            "workers=1",
            "train.steps=300",
            "task_args={model_args: {widths: [8, 16]}, eval_samples: 500}",
            "train.eval_batch_size=250",
        ),
        steps=(40, 100, 200),
        samples=1024,
        batches=(16, 32, 64, 128, 256),
        rates=_doubling(3.125e-5, 10),
        centre=0.002,
    ),
    "gpt": Task(
        experiment="gpt.yaml",
        keys=(
            "workers=1",
            "train.steps=300",
            "task_args={d_model: 32, n_layers: 2, n_heads: 2, sequence_length: 32}",
            "train.eval_batch_size=128",
        ),
        steps=(40, 100, 200),
        samples=256,
        batches=(4, 8, 16, 32, 64),
        rates=_doubling(6.25e-5, 10),
        centre=0.004,
    ),
}


# --- training the truth ---------------------------------------------------------------------------


class LoadOnly(Persistence):
    """Loads the checkpoint that is forked, and saves none."""

    def save(self, progress: Progress) -> None: ...

    def finish(self, progress: Progress) -> None: ...

    def keep_weights(self) -> None: ...


class Evaluations(SilentChannel):
    """Keeps what a worker evaluates.

    Attributes:
        losses: In the order of their steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, MetricsLogged) and METRIC in event.values:
            self.losses.append(event.values[METRIC])


def train_base(name: str, folder: Path) -> Path:
    """Trains a task's run with its checkpoints, or takes the one that is there.

    Args:
        name: Of `TASKS`.
        folder: Where the run's folder is.

    Returns:
        The run's folder.
    """
    task = TASKS[name]
    run = folder / name
    steps = {commit.step for commit in commits(str(run / "checkpoints"))} if run.exists() else set()
    if steps >= set(task.steps):
        return run
    every = _common_step(task)
    keys = [
        *task.keys,
        "strategy=single",
        "launcher=local",
        "tracking.enabled=false",
        "checkpoint.weights=false",
        f"checkpoint.every_steps={every}",
        "checkpoint.keep_last=100",
        f"run.storage={folder}",
        f"run.name={name}",
    ]
    train(load_config([HERE.parent / task.experiment], keys), Console())
    return run


def _common_step(task: Task) -> int:
    """The most steps of which all steps of a task are multiples."""
    return math.gcd(*task.steps)


def sweep_file(
    name: str,
    step: int,
    folder: Path,
    *,
    batches: Sequence[int],
    rates: Sequence[float],
    seeds: Sequence[int],
    most: int | None = None,
) -> Path:
    """The file of a sweep of branches, as a person would write it.

    Args:
        name: Of `TASKS`.
        step: Of the checkpoint.
        folder: Has the task's run; gets the file.
        batches: Of the grid.
        rates: Of the grid.
        seeds: Other orders of the samples.
        most: Branches that its budget allows.
    """
    file = folder / f"{name}-{step}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "fork": f"{folder / name}@{step}",
                "samples": TASKS[name].samples,
                "space": {BATCH: list(batches), RATE: list(rates), SEED: list(seeds)},
                "set": {"launcher": "auto", "tracking.system_metrics_every": 0},
                "reports": REPORTS,
                "time": "samples",
                **({} if most is None else {"budget": {"samples": most * TASKS[name].samples}}),
            }
        )
    )
    return file


def measure(name: str, folder: Path) -> None:
    """Trains every cell of a task's grids that the table does not have yet, and adds it there.

    Args:
        name: Of `TASKS`.
        folder: Keeps the task's run.
    """
    task = TASKS[name]
    train_base(name, folder)
    kept = folder / f"{name}.csv"
    known = {row[:5]: row for file in (TABLE, kept) if file.exists() for row in read_rows(file)}
    prepared: dict[int, Prepared] = {}
    for step in task.steps:
        file = sweep_file(
            name, step, folder, batches=task.batches, rates=task.rates, seeds=range(SEEDS)
        )
        sweep = read_sweep(str(file), [f"run.storage={folder}"])
        is_checked = False
        for values in sweep.points or ():
            batch = int(values[BATCH])
            branch = (name, step, batch, float(values[RATE]), int(values[SEED]))
            # The cheapest known branch is trained again: what is added must be of the same run.
            is_check = branch in known and batch == task.batches[-1] and not is_checked
            if branch in known and not is_check:
                continue
            if batch not in prepared:
                config = trial_config(sweep, values)
                prepared[batch] = prepare(config, read_task(config), 1, devices_per_node=None)
            loss = losses_of_branch(sweep, values, prepared[batch], folder)[-1]
            if is_check:
                if not math.isclose(loss, known[branch][5], rel_tol=SAME):
                    problem = f"{name}@{step}, {branch[2:]} gave {known[branch][5]}, now {loss:.5g}"
                    raise click.ClickException(f"{problem}: remove {TABLE.name} to measure it anew")
                is_checked = True
                continue
            known[branch] = (*branch, float(f"{loss:.5g}"))
            with kept.open("a", newline="") as opened:
                csv.writer(opened).writerow(known[branch])
    write_rows(sorted(known.values()))


def trial_config(sweep: Sweep, values: Values) -> Config:
    """The configuration of a trial, which evaluates as often as the sweep says."""
    config = sweep.config(values, name="branch", storage=sweep.experiment.run.storage)
    steps = (config.train.steps or 0) - sweep.origin_step
    every = max(1, -(-steps // (sweep.reports or 1)))
    return with_values(config, {"train.eval_every": every})


def losses_of_branch(sweep: Sweep, values: Values, prepared: Prepared, folder: Path) -> list[float]:
    """The losses that a trial reports, in the order of its steps.

    Args:
        sweep: Says what is forked.
        values: The point of its space.
        prepared: The preparation of a trial with the same batch, perhaps of another checkpoint.
        folder: Gets nothing.
    """
    config = trial_config(sweep, values)
    keys = {
        RATE: values[RATE],
        SEED: values.get(SEED, prepared.config.train.seed),
        "checkpoint.fork": config.checkpoint.fork,
        "train.steps": config.train.steps,
        "train.eval_every": config.train.eval_every,
        "schedule.steps": config.schedule.steps,
        "schedule.batch_size": config.schedule.batch_size,
    }
    job = Job(
        config=with_values(prepared.config, keys),
        layout=prepared.layout,
        folder=str(folder / "branch"),
        attempt="",
        run_uid="",
        steps=config.train.steps or prepared.steps,
        cwd=os.getcwd(),
        sources=prepared.sources,
        fork=sweep.fork,
        widths=prepared.widths,
    )
    place = Place(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    channel = Evaluations()
    training = Training(job, place, channel, persistence_class=LoadOnly)
    try:
        training.run()
    except NonFiniteError:
        channel.losses.append(math.nan)
    finally:
        training.close()
    return channel.losses


def read_rows(file: Path) -> list[Row]:
    """The lines of a table.

    Args:
        file: Its path; one that ends with .gz is compressed.
    """
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return [
        (name, int(step), int(batch), float(rate), int(seed), float(loss))
        for name, step, batch, rate, seed, loss in csv.reader(text.decode().splitlines())
    ]


def write_rows(rows: Sequence[Row]) -> None:
    """Writes the table; the same lines give the same bytes."""
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    TABLE.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_table() -> dict[tuple[str, int], dict[Cell, dict[int, float]]]:
    """The table: by task and step, by cell and seed, the loss after all samples."""
    table: dict[tuple[str, int], dict[Cell, dict[int, float]]] = {}
    for name, step, batch, rate, seed, loss in read_rows(TABLE):
        table.setdefault((name, step), {}).setdefault((batch, rate), {})[seed] = loss
    return table


# --- what sweeps answer ---------------------------------------------------------------------------

Grid = Mapping[Cell, Mapping[int, float]]
"""By cell and seed the loss of a branch."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A sweep as a person would write it: some of the batches, rates and seeds of a grid.

    Attributes:
        batches: Positions in the grid's batches, the smallest and the largest among them.
        rates: Positions in the grid's rates.
        seeds: The seeds.
    """

    batches: tuple[int, ...]
    rates: tuple[int, ...]
    seeds: tuple[int, ...]


def designs(task: Task) -> list[Design]:
    """Three batches, two seeds, three or four rates around the run's own, far apart or close."""
    batches = len(task.batches)
    centre = task.rates.index(task.centre)
    last = batches - 1
    middles = sorted({last // 2, (last + 1) // 2})
    widest = (-3, -1, 1, 3) if batches > 5 else (-3, 0, 3)
    return [
        Design(
            batches=(0, middle, last), rates=tuple(centre + each for each in places), seeds=seeds
        )
        for middle in middles
        for places in (widest, (-2, 0, 2), (-1, 0, 1))
        for seeds in combinations(range(SEEDS), 2)
    ]


def trials_of(task: Task, grid: Grid, design: Design | None = None) -> list[Trial]:
    """The trials that a sweep would have had: those of a design, or all of the grid."""
    trials: list[Trial] = []
    for (batch, rate), by_seed in grid.items():
        for seed, loss in by_seed.items():
            if design is not None and not (
                task.batches.index(batch) in design.batches
                and task.rates.index(rate) in design.rates
                and seed in design.seeds
            ):
                continue
            steps = -(-task.samples // batch)
            report: Report = {
                "step": steps,
                "samples": steps * batch,
                "metrics": {METRIC: loss},
                "steps": steps,
                "workers": 1,
            }
            trial = Trial(len(trials), f"t{len(trials)}", {BATCH: batch, RATE: rate, SEED: seed})
            trial.reports = [report]
            trial.status = "finished" if math.isfinite(loss) else "diverged"
            trials.append(trial)
    return trials


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one sweep answers beside the truth.

    Attributes:
        is_inside: Whether the true critical batch is inside its 80 % interval; None if it is not
            known.
        factor: The interval's upper end over its lower one.
        regret: The loss of the batch and rate that it names above that of those which the whole
            grid would name by the same two seeds, both by the third seed, which chose neither; in
            standard deviations, over seeds, of the difference between two such branches.
        above_lowest: Its loss over all seeds above the lowest of the grid, which in part is the
            luckiest, likewise.
        share: Of the grid's samples.
        is_decided: Whether it names a critical batch, instead of asking for more seeds.
        is_at_edge: Whether it says that a better rate may lie beyond that of the cell it names.
    """

    is_inside: bool | None
    factor: float
    regret: float
    above_lowest: float
    share: float
    is_decided: bool
    is_at_edge: bool


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the whole grid says.

    Attributes:
        critical: The critical batch; None if a better rate of a batch may lie beyond the grid.
        best: The cell with the lowest mean.
        noise: The standard deviation, over seeds, of the difference between two branches.
        means: The mean loss of each cell.
    """

    critical: float | None
    best: Cell
    noise: float
    means: Mapping[Cell, float]


SEARCH = Search(space={}, metric=METRIC)


def truth_of(task: Task, grid: Grid) -> Truth:
    """What the whole grid of a checkpoint says."""
    losses = losses_of(trials_of(task, grid), SEARCH, {})
    answer = answer_of(losses)
    assert answer is not None and answer.critical is not None and answer.noise is not None
    means = {cell: statistics.fmean(values) for cell, values in losses.items()}
    edges = [each for each in answer.batches if each.batch in answer.edge_batches]
    is_known = all(_is_flat_at_lowest_rate(task, means, edge, answer.noise) for edge in edges)
    return Truth(
        critical=answer.critical.value if is_known else None,
        best=best_cell(losses),
        noise=answer.noise,
        means=means,
    )


def _is_flat_at_lowest_rate(
    task: Task, means: Mapping[Cell, float], edge: BranchBatch, noise: float
) -> bool:
    """Whether a batch's best rate is the grid's lowest, and rates below it change nothing.

    A small rate changes the loss in proportion, and a rate of 0 leaves the checkpoint as it is. So
    the loss there is about as far below that of the lowest rate as this is below that of twice the
    rate.
    """
    lowest, second = task.rates[:2]
    is_lowest_best = math.isclose(edge.best_rate, lowest)
    return is_lowest_best and means[edge.batch, second] - means[edge.batch, lowest] < noise


def replay(task: Task, grid: Grid, design: Design) -> list[Trial]:
    """The trials of a sweep: those of a design, and those beyond its rates.

    It goes beyond them as `trireme sweep` does, within a fifth of the grid's samples. Cells that
    the table does not have are not tried.
    """
    trials = trials_of(task, grid, design)
    most = branches_allowed(grid)
    added: dict[int, int] = {}
    while True:
        losses = losses_of(trials, SEARCH, {})
        cells = [
            cell for cell in cells_beyond(losses, added, most=DEFAULT_MORE_RATES) if cell in grid
        ]
        cells = cells[: (most - len(trials)) // len(design.seeds)]
        if not cells:
            return trials
        for batch, rate in cells:
            added[batch] = added.get(batch, 0) + 1
            by_seed = {seed: grid[batch, rate][seed] for seed in design.seeds}
            trials += trials_of(task, {(batch, rate): by_seed})


def branches_allowed(grid: Grid) -> int:
    """A fifth of a grid's branches."""
    return len(grid) * SEEDS // 5


def case_of(task: Task, grid: Grid, truth: Truth, design: Design) -> Case:
    """What a sweep answers, by the code that answers for `trireme sweep`."""
    trials = replay(task, grid, design)
    losses = losses_of(trials, SEARCH, {})
    named_cell = best_cell(losses)
    answer = answer_of(losses)
    assert answer is not None and answer.critical is not None
    (judge,) = set(range(SEEDS)) - set(design.seeds)
    by_same_seeds = {
        cell: [by_seed[seed] for seed in design.seeds] for cell, by_seed in grid.items()
    }
    named_by_grid = best_cell(by_same_seeds)
    regret = grid[named_cell][judge] - grid[named_by_grid][judge]
    above_lowest = truth.means[named_cell] - truth.means[truth.best]
    critical = answer.critical
    is_inside = None
    if truth.critical is not None:
        is_inside = critical.low <= truth.critical <= critical.high
    return Case(
        is_inside=is_inside,
        factor=critical.high / critical.low,
        regret=regret / noise_between(grid, named_cell, named_by_grid),
        above_lowest=above_lowest / noise_between(grid, named_cell, truth.best),
        share=len(trials) / (len(grid) * SEEDS),
        is_decided=answer.is_decided,
        is_at_edge=named_cell in [(edge.batch, edge.rate) for edge in edges_of(losses)],
    )


def noise_between(grid: Grid, first: Cell, second: Cell) -> float:
    """The standard deviation, over seeds, of the difference between two branches of a grid.

    At a low rate branches hardly depend on the seed, and at a high one much. So it is that of these
    two cells, and not one for the whole grid. Losses of the table are rounded to `SAME`.
    """
    variances = [statistics.variance(grid[cell].values()) for cell in (first, second)]
    rounding = SAME * grid[first][0]
    return math.sqrt(sum(variances) + rounding**2)


def cases() -> Iterator[tuple[str, int, Truth, list[Case]]]:
    """For each checkpoint whose grid is whole: task, step, the truth and what sweeps answer."""
    for (name, step), grid in read_table().items():
        task = TASKS[name]
        is_whole = len(grid) == len(task.batches) * len(task.rates)
        if not is_whole or any(len(by_seed) < SEEDS for by_seed in grid.values()):
            continue
        truth = truth_of(task, grid)
        answers = [case_of(task, grid, truth, each) for each in designs(task)]
        yield name, step, truth, answers


def rows() -> list[dict[str, str]]:
    """A line for each checkpoint, and one for each task."""
    lines = []
    by_task: dict[str, list[Case]] = {}
    for name, step, truth, answers in cases():
        by_task.setdefault(name, []).extend(answers)
        critical = "unknown" if truth.critical is None else f"{truth.critical:.0f}"
        lines.append(
            {
                "checkpoint": f"{name}@{step}",
                "critical batch": critical,
                "best cell": f"{truth.best[0]}, {truth.best[1]:.3g}",
                "noise": f"{truth.noise:.3g}",
                **_summary(answers),
            }
        )
    for name, answers in by_task.items():
        of_grid = {"checkpoint": name, "critical batch": "", "best cell": "", "noise": ""}
        lines.append({**of_grid, **_summary(answers)})
    return lines


def _summary(answers: Sequence[Case]) -> dict[str, str]:
    known = [case for case in answers if case.is_inside is not None]
    inside = sum(case.is_inside is True for case in known)
    wrong = sum(case.is_decided for case in known if not case.is_inside)
    regrets = [case.regret for case in answers]
    above = [case.above_lowest for case in answers]
    return {
        "inside": f"{inside} of {len(known)}",
        "factor": f"{statistics.median(case.factor for case in answers):.1f}",
        "decided (wrong)": f"{sum(case.is_decided for case in answers)} ({wrong})",
        "at an edge": f"{sum(case.is_at_edge for case in answers)}",
        "regret, mean (worst)": f"{statistics.fmean(regrets):.2f} ({max(regrets):.2f})",
        "above the lowest": f"{statistics.fmean(above):.2f} ({max(above):.2f})",
        "share": f"{max(case.share for case in answers):.0%}",
    }


# --- a real sweep ---------------------------------------------------------------------------------


def compare_with_sweep(name: str, folder: Path) -> list[dict[str, str]]:
    """Runs the last design from a task's second checkpoint by `trireme sweep`.

    Args:
        name: Of `TASKS`.
        folder: Keeps the task's run, and the sweep.

    Returns:
        How many branches ended with the table's loss, and both answers.
    """
    task = TASKS[name]
    train_base(name, folder)
    step = task.steps[1]
    grid = read_table()[name, step]
    design = designs(task)[-1]  # whose rates have others beyond them in the table
    file = sweep_file(
        name,
        step,
        folder,
        batches=[task.batches[position] for position in design.batches],
        rates=[task.rates[position] for position in design.rates],
        seeds=design.seeds,
        most=branches_allowed(grid),
    )
    command = [sys.executable, "-m", "app", "sweep", str(file), f"run.storage={folder}", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise click.ClickException(ended.stderr[-2000:])
    outcome = json.loads(ended.stdout.strip().splitlines()[-1])
    records = [load_trial(each.parent) for each in Path(outcome["folder"]).glob("*/trial.json")]
    trials = [record for record in records if record is not None]
    finished = [trial for trial in trials if trial.status == "finished"]
    differences = []
    for trial in finished:
        loss = grid[int(trial.values[BATCH]), float(trial.values[RATE])][trial.values[SEED]]
        differences.append(abs(trial.last["metrics"][METRIC] / loss - 1))
    answer = json.loads((Path(outcome["folder"]) / "answer.json").read_text())
    critical = answer["branches"]["critical"]
    replayed = answer_of(losses_of(replay(task, grid, design), SEARCH, {}))
    assert replayed is not None and replayed.critical is not None
    return [
        {
            "sweep": f"{name}@{step}",
            "branches": f"{len(trials)}",
            "stopped early": f"{len(trials) - len(finished)}",
            "with the table's loss": f"{sum(each < SAME for each in differences)}",
            "largest difference": f"{max(differences):.1e}",
            "its critical batch": _words(Interval(**critical)),
            "replayed": _words(replayed.critical),
        }
    ]


def _words(interval: Interval) -> str:
    return f"{interval.value:.0f} ({interval.low:.0f}–{interval.high:.0f})"


@click.command(help=__doc__)
@click.option("--measure", "measured", multiple=True, type=click.Choice(list(TASKS)))
@click.option("--real", multiple=True, type=click.Choice(list(TASKS)))
@click.option("--folder", type=Path, help="Keeps the runs. Default: a temporary one.")
@click.option("--json", "as_json", is_flag=True)
def main(
    measured: tuple[str, ...], real: tuple[str, ...], folder: Path | None, as_json: bool
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for name in measured:
            cpu = time.process_time()
            measure(name, folder or Path(temporary))
            print(f"{name}: {time.process_time() - cpu:,.0f} CPU seconds", file=sys.stderr)
        if real:
            lines = [
                line
                for name in real
                for line in compare_with_sweep(name, folder or Path(temporary))
            ]
            show("fork-truth", {"sweeps": lines}, lines, as_json=as_json)
    if not measured and not real:
        lines = rows()
        show("fork-truth", {"checkpoints": lines}, lines, as_json=as_json)
