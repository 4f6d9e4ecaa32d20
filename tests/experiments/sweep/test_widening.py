"""A branch sweep whose best rate is the grid's last one looks beyond it, inside its budget."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.errors import UserError
from experiments.sweep.branches import Edge, edges_of, losses_of
from experiments.sweep.search import Search, read_space
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trials import BATCH, RATE, SEED, Trial
from experiments.sweep.widening import cells_beyond, plan_beyond

pytestmark = pytest.mark.pure
BEST_RATE = 0.032
SPACE = {BATCH: [16, 32], RATE: [0.002, 0.004, 0.008], SEED: [0, 1]}
"""All of its rates are below the best one."""


def read(folder: Path, **keys: Any) -> Sweep:
    """A sweep of branches of 96 samples each, of a checkpoint that nobody has trained."""
    experiment = {"task": "tests.tasks:Points", "train": {"steps": 40, "global_batch_size": 16}}
    file = folder / "branch.yaml"
    file.write_text(json.dumps({"experiment": experiment, "space": SPACE, **keys}))
    sweep = read_sweep(str(file), [f"run.storage={folder}"])
    return replace(sweep, fork="runs/base", samples=96, origin_step=4, origin_samples=64)


def loss_at(values: dict[str, Any]) -> float:
    """Lowest at BEST_RATE, and by far at a batch of 32, with a little noise."""
    valley = math.log(values[RATE] / BEST_RATE) ** 2
    return float(1 + valley + 16 / values[BATCH] + 0.001 * values.get(SEED, 0) * values[RATE])


def end(trials: list[Trial]) -> list[Trial]:
    """The trials with the losses that they end with."""
    for trial in trials:
        trial.status = "finished"
        metrics = {"eval/loss": loss_at(trial.values)}
        trial.reports = [{"step": 6, "steps": 6, "samples": 96, "metrics": metrics, "workers": 1}]
    return trials


def grid_of(sweep: Sweep) -> list[Trial]:
    points = sweep.points or []
    return end([Trial(index, f"t{index}", values) for index, values in enumerate(points)])


def rates_of(trials: list[Trial]) -> list[tuple[int, float, Any]]:
    return [(each.values[BATCH], each.values[RATE], each.values.get(SEED)) for each in trials]


def test_the_next_rate_is_as_far_as_the_neighbour_and_first_where_it_may_be_chosen() -> None:
    losses = {(16, rate): [loss, loss + 0.001] for rate, loss in ((0.1, 2.0), (0.2, 1.0))}
    assert edges_of(losses) == [Edge(batch=16, rate=0.2, beyond=0.4, is_worse=False)]
    falling = {(16, rate): [loss, loss + 0.001] for rate, loss in ((0.1, 1.0), (0.4, 2.0))}
    assert edges_of(falling) == [Edge(batch=16, rate=0.1, beyond=0.025, is_worse=False)]
    inner = losses | {(16, 0.4): [3.0, 3.0]}
    assert edges_of(inner) == []
    diverged = losses | {(16, 0.4): [math.nan, math.nan]}
    assert edges_of(diverged) == [], "beyond the best rate training diverges, so it is the last"
    worse = losses | {(64, rate): [9.0, 9.001] for rate in (0.1, 0.2, 0.4)}
    worse |= {(64, 0.8): [8.0, 8.001]}
    assert [(edge.batch, edge.is_worse) for edge in edges_of(worse)] == [(16, False), (64, True)]
    assert cells_beyond(worse, {}, most=2) == [(16, 0.4)], "first what may be chosen"
    assert cells_beyond(worse, {16: 2}, most=2) == [(64, 1.6)]
    assert edges_of({(16, 0.1): [1.0, 1.1]}) == [], "one rate has no neighbour"
    assert edges_of({}) == []
    assert cells_beyond(losses, {16: 1}, most=2) == [(16, 0.4)]
    assert cells_beyond(losses, {16: 2}, most=2) == []


def test_a_sweep_goes_on_beyond_its_grid_until_the_best_rate_is_inside(tmp_path: Path) -> None:
    sweep = replace(read(tmp_path), more_rates=5)
    trials = grid_of(sweep)
    added = []
    while planned := plan_beyond(sweep, trials):
        assert plan_beyond(sweep, [*trials, *planned]) == [], "one round after another"
        assert len({trial.name for trial in [*trials, *planned]}) == len(trials) + len(planned)
        trials += end(planned)
        added += rates_of(planned)
    # 16 is worse than 32 from the first, so what may be chosen comes first.
    rates = (0.016, 0.032, 0.064)
    assert added == [(batch, rate, seed) for batch in (32, 16) for rate in rates for seed in (0, 1)]
    assert sweep.trying(planned or trials[-2:]).count == 2


def test_no_more_rates_than_the_file_allows(tmp_path: Path) -> None:
    for count, expected in ((None, 2), (1, 1), (0, 0)):
        sweep = replace(read(tmp_path), more_rates=count)
        trials = grid_of(sweep)
        added = []
        while planned := plan_beyond(sweep, trials):
            trials += end(planned)
            added += planned
        assert len({trial.values[RATE] for trial in added}) == expected
    with pytest.raises(UserError, match="more_rates is -1, but it must be a whole number"):
        read(tmp_path, more_rates=-1)
    drawn = read(tmp_path, searcher="random", trials=4)
    assert drawn.rates_beyond == 0, "points that are drawn have no edge"
    with pytest.raises(UserError, match="more_rates is for a fork and a grid of two or more"):
        read(tmp_path, more_rates=2)  # the file names no fork


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (191, 0),
        pytest.param(192, 1, marks=pytest.mark.slow),
        pytest.param(383, 1, marks=pytest.mark.slow),
        (384, 2),
    ],
)
def test_rates_beyond_the_grid_stay_within_its_samples(
    spare: int, expected: int, tmp_path: Path
) -> None:
    sweep = read(tmp_path)
    grid_samples = sweep.all_samples()
    assert grid_samples == 12 * 96
    assert sweep.samples_beyond() == 2 * 2 * 2 * 96, "two rates at two batches with two seeds"
    budget = replace(sweep.budget, samples=grid_samples + spare)
    limited = replace(sweep, budget=budget)
    trials = grid_of(limited)
    added: list[Trial] = []
    while planned := plan_beyond(limited, trials):
        trials += end(planned)
        added += planned
    assert len(added) == 2 * expected
    seen = sum(limited.samples_of_branch(trial.values) for trial in trials)
    assert seen <= grid_samples + limited.samples_beyond() <= grid_samples + spare


def test_without_seeds_in_the_space_each_rate_is_one_trial(tmp_path: Path) -> None:
    space = {key: values for key, values in SPACE.items() if key != SEED}
    sweep = read(tmp_path, space=space)
    planned = plan_beyond(sweep, grid_of(sweep))
    # One seed shows no noise, so no batch is shown to be worse.
    assert rates_of(planned) == [(32, 0.016, None), (16, 0.016, None)]
    assert all(list(trial.values) == list(space) for trial in planned)


def test_a_cell_that_is_still_trained_is_no_edge_and_hides_none() -> None:
    values = [{BATCH: 32, RATE: rate, SEED: seed} for rate in (0.1, 0.2, 0.4) for seed in (0, 1)]
    trials = end([Trial(index, f"t{index}", point) for index, point in enumerate(values)])
    trials[-1].status = "running"
    losses = losses_of(trials, Search(space={}), {})
    assert (32, 0.4) not in losses


def test_rates_without_a_point_are_numbers() -> None:
    """YAML reads 1e-5 as a text, whose neighbour beyond a grid nobody could compute."""
    space = read_space({RATE: ["1e-5", 2e-05, "3E-05"], "strategy": ["ddp", "1d"]})
    assert space[RATE].values == (1e-5, 2e-5, 3e-5)
    assert space["strategy"].values == ("ddp", "1d")
