"""The truth about branches is trained as branches are, and sweeps on it are judged correctly."""

import math
from pathlib import Path

import numpy as np
import pytest

from app.config.io import load_config
from app.run.prepare import prepare, read_task
from experiments.benchmarks import fork_truth
from experiments.benchmarks.fork_truth import SEEDS, Task, case_of, designs, truth_of
from experiments.sweep.spec import read_sweep
from experiments.sweep.trials import BATCH, RATE, SEED
from tests.app.run.test_fork import train_base
from tests.experiments.sweep.test_branches import write_sweep
from tests.running import curve, invoke

TASK = Task(
    experiment="digits.yaml",
    keys=(),
    steps=(10,),
    samples=4096,
    batches=(16, 32, 64, 128, 256, 512),
    rates=fork_truth._doubling(0.0005, 9),
    centre=0.008,
)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_cell_of_the_truth_is_a_real_fork_to_the_bit(tmp_path: Path) -> None:
    base = train_base(tmp_path, "schedule.name=cosine", "train.steps=12", "checkpoint.keep_last=9")
    space = {BATCH: [32], RATE: [0.01], SEED: [1]}
    file = write_sweep(tmp_path, fork=f"{base}@4", space=space, reports=3)
    sweep = read_sweep(str(file), [f"run.storage={tmp_path}"])
    values = (sweep.points or [])[0]
    config = fork_truth.trial_config(sweep, values)
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    losses = fork_truth.losses_of_branch(sweep, values, prepared, tmp_path)
    assert (config.schedule.steps, config.schedule.batch_size) == (12, 16)
    invoke(
        "fork",
        base,
        "--at",
        "4",
        "run.name=real",
        "train.global_batch_size=32",
        "optimizer.lr=0.01",
        "train.seed=1",
        "train.steps=7",
        "train.eval_every=1",
        "schedule.steps=12",
        "schedule.batch_size=16",
    )
    real = curve(tmp_path, "real", "eval/loss")
    assert list(real) == [5, 6, 7]
    assert losses == list(real.values())
    assert not (tmp_path / "branch" / "checkpoints").exists(), "nothing is saved"


def grid_of(
    *, critical: float, noise: float, best_rate: float = 0.008
) -> dict[tuple[int, float], dict[int, float]]:
    """Losses that rise by the noise at the critical batch, lowest at a rate."""
    random = np.random.default_rng(1)
    grid: dict[tuple[int, float], dict[int, float]] = {}
    for batch in TASK.batches:
        for rate in TASK.rates:
            loss = 1 + noise * batch / critical + 0.02 * math.log(rate / best_rate) ** 2
            drawn = loss + noise / math.sqrt(2) * random.normal(size=SEEDS)
            grid[batch, rate] = {seed: float(value) for seed, value in enumerate(drawn)}
    return grid


@pytest.mark.slow
def test_sweeps_on_a_grid_are_judged_by_the_whole_of_it() -> None:
    grid = grid_of(critical=100, noise=0.01)
    truth = truth_of(TASK, grid)
    assert truth.best[1] in (0.004, 0.008, 0.016)
    assert truth.critical is not None and 50 < truth.critical < 300
    cases = [case_of(TASK, grid, truth, design) for design in designs(TASK)]
    assert len(cases) == 18
    assert not any(case.is_at_edge for case in cases)
    assert all(case.share <= 0.2 for case in cases), "at most a fifth of the grid"
    assert sum(case.is_inside is True for case in cases) >= 14
    assert all(case.above_lowest >= 0 for case in cases)
    # The seed that judges has chosen neither cell, so a regret may be below zero by chance.
    assert abs(sum(case.regret for case in cases)) / len(cases) < 1


@pytest.mark.slow
def test_the_luckiest_cell_of_a_grid_is_no_better_by_a_seed_that_did_not_choose_it() -> None:
    random = np.random.default_rng(5)
    regrets = []
    above = []
    for _ in range(10):
        alike = {
            (batch, rate): dict(enumerate(1.0 + 0.01 * random.normal(size=SEEDS)))
            for batch in TASK.batches
            for rate in TASK.rates
        }
        truth = truth_of(TASK, alike)
        cases = [case_of(TASK, alike, truth, design) for design in designs(TASK)]
        regrets += [case.regret for case in cases]
        above += [case.above_lowest for case in cases]
    assert abs(sum(regrets)) / len(regrets) < 0.2
    assert sum(above) / len(above) > 0.3, "which is what choosing among many cells brings"


def test_a_critical_batch_whose_rates_end_at_the_grids_edge_is_not_known() -> None:
    inside = truth_of(TASK, grid_of(critical=100, noise=0.01))
    assert inside.critical is not None
    beyond = grid_of(critical=100, noise=0.01, best_rate=0.256)
    truth = truth_of(TASK, beyond)
    assert truth.critical is None
    case = case_of(TASK, beyond, truth, designs(TASK)[0])
    assert case.is_inside is None
    below = truth_of(TASK, grid_of(critical=100, noise=0.01, best_rate=0.00025))
    assert below.critical is None, "the loss still falls as the rate does"
    random = np.random.default_rng(1)
    flat = {
        (batch, rate): dict(enumerate(1 + batch / 1000 + rate + 0.01 * random.normal(size=SEEDS)))
        for batch in TASK.batches
        for rate in TASK.rates
    }
    assert truth_of(TASK, flat).critical is not None, "at no rate there is nothing to find"


@pytest.mark.parametrize("name", list(fork_truth.TASKS))
def test_sweeps_are_designed_around_the_rate_of_the_run(name: str) -> None:
    task = fork_truth.TASKS[name]
    config = load_config([Path("experiments") / task.experiment], list(task.keys))
    assert task.centre == max(rate for rate in task.rates if rate <= config.optimizer.lr)


@pytest.mark.slow
@pytest.mark.parametrize(("best_rate", "is_at_edge"), [(0.032, False), (0.128, True)])
def test_sweeps_on_a_grid_go_beyond_their_rates_for_at_most_a_fifth_of_it(
    best_rate: float, is_at_edge: bool
) -> None:
    grid = grid_of(critical=100, noise=0.001, best_rate=best_rate)
    truth = truth_of(TASK, grid)
    for design in designs(TASK):
        trials = fork_truth.replay(TASK, grid, design)
        assert len(trials) <= len(grid) * SEEDS / 5
        if design.rates != (3, 4, 5):
            continue  # the table does not have all that is beyond
        assert max(trial.values[RATE] for trial in trials) > TASK.rates[design.rates[-1]]
        case = case_of(TASK, grid, truth, design)
        assert case.share == len(trials) / (len(grid) * SEEDS)
        assert case.is_at_edge == is_at_edge, "the table and more_rates end"


def test_the_table_has_the_cells_of_its_tasks() -> None:
    rows = fork_truth.read_rows(fork_truth.TABLE)
    assert len({row[:5] for row in rows}) == len(rows), "each branch is there once"
    for (name, step), grid in fork_truth.read_table().items():
        task = fork_truth.TASKS[name]
        assert step in task.steps
        for (batch, rate), by_seed in grid.items():
            assert batch in task.batches and rate in task.rates
            assert by_seed.keys() <= set(range(SEEDS))
    for name, step, _, cases in fork_truth.cases():
        assert max(case.share for case in cases) <= 0.2, (name, step)
