"""The best settings again with other seeds: which are trained, and what they decide."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from app.errors import UserError
from experiments.sweep.answer import work_out
from experiments.sweep.confirmation import Confirmation, confirmation_of, plan_confirmation
from experiments.sweep.page import content
from experiments.sweep.run import next_run
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trials import BATCH, RATE, SEED, Report, Trial, TrialStore

pytestmark = pytest.mark.pure

BASE = """
experiment: {task: "tests.tasks:Points", train: {steps: 40, global_batch_size: 16, seed: 7}}
space: {train.global_batch_size: [8, 16], optimizer.lr: [0.01, 0.1]}
"""


def sweep_of(tmp_path: Path, *overrides: str) -> Sweep:
    """The sweep of a file with the text above."""
    file = tmp_path / "confirmed.yaml"
    file.write_text(BASE)
    return read_sweep(str(file), list(overrides))


def ended(
    index: int,
    loss: float,
    *,
    values: dict[str, object],
    status: str = "finished",
    confirms: str = "",
) -> Trial:
    """A trial with one report."""
    report: Report = {
        "step": 40,
        "samples": 640,
        "seconds": 4.0,
        "metrics": {"eval/loss": loss},
        "steps": 40,
        "workers": 1,
    }
    name = f"t{index:03d}"
    return Trial(index, name, values, status, reports=[report], confirms=confirms)


def searched(losses: dict[tuple[int, float], float]) -> list[Trial]:
    """The trials of a search, by batch size and learning rate."""
    trials = []
    for (batch, rate), loss in losses.items():
        trials.append(ended(len(trials), loss, values={BATCH: batch, RATE: rate}))
    return trials


LOSSES = {(8, 0.01): 0.5, (8, 0.1): 0.1, (16, 0.01): 0.2, (16, 0.1): 0.3}


def confirm(sweep: Sweep, trials: list[Trial], losses: dict[str, tuple[float, ...]]) -> list[Trial]:
    """All trials, after those that confirm have ended with these losses, by what they confirm."""
    planned = plan_confirmation(sweep, trials)
    remaining = {name: list(values) for name, values in losses.items()}
    for trial in planned:
        loss = remaining[trial.confirms].pop(0)
        trials.append(ended(trial.index, loss, values=trial.values, confirms=trial.confirms))
    assert not any(remaining.values())
    return trials


def test_the_best_settings_are_planned_with_the_same_new_seeds(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    trials = searched(LOSSES)
    planned = plan_confirmation(sweep, trials)
    settings = [(trial.confirms, trial.values[SEED]) for trial in planned]
    assert settings == [
        ("t001", 8),
        ("t001", 9),
        ("t002", 8),
        ("t002", 9),
        ("t003", 8),
        ("t003", 9),
    ]
    assert planned[0].name == "t004-b8-lr0.1-seed8"
    assert plan_confirmation(sweep, [*trials, *planned]) == [], "nothing is planned twice"
    more = plan_confirmation(sweep_of(tmp_path, "confirm_seeds=3"), [*trials, *planned])
    assert [(trial.index, trial.values[SEED]) for trial in more] == [(10, 10), (11, 10), (12, 10)]


def test_only_settings_that_ended_well_are_trained_again(tmp_path: Path) -> None:
    trials = searched(LOSSES)
    trials[1].status = "pruned"
    trials[2].status = "diverged"
    trials[3].reports[0]["metrics"]["eval/loss"] = math.nan
    planned = plan_confirmation(sweep_of(tmp_path), trials)
    assert {trial.confirms for trial in planned} == {"t000"}
    assert not plan_confirmation(sweep_of(tmp_path, "confirm=0"), trials)
    own_seeds = sweep_of(tmp_path, "space.train.seed=[0, 1]")
    assert not plan_confirmation(own_seeds, searched(LOSSES))


def test_a_lucky_seed_does_not_make_a_setting_the_best(tmp_path: Path) -> None:
    """The best of the search is worse with other seeds, and the next run is another setting."""
    sweep = sweep_of(tmp_path)
    losses = {"t001": (0.31, 0.29), "t002": (0.21, 0.19), "t003": (0.4, 0.38)}
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    store.trials = {trial.name: trial for trial in confirm(sweep, searched(LOSSES), losses)}
    answer = work_out(sweep, store)
    assert answer.best["trial"] == "t002"
    assert (answer.best["value"], answer.best["mean"]) == (0.2, pytest.approx(0.2))
    assert answer.best["seeds"] == 2
    following = next_run(sweep, store, answer)
    assert (following.train.global_batch_size, following.optimizer.lr) == (16, 0.01)
    assert following.train.seed == 7
    confirmation = answer.confirmation
    assert confirmation is not None and confirmation.more_seeds == 0
    verdicts = [(setting.trial, setting.verdict) for setting in confirmation.settings]
    assert verdicts == [("t002", "best"), ("t001", "worse"), ("t003", "worse")]
    words = "\n".join(answer.sentences)
    assert "best      eval/loss 0.2 (80 %: 0.18" in words and "mean of 2 other seeds" in words
    titles = [section["title"] for section in content(sweep, store, answer)["sections"]]
    assert "The best settings with several seeds" in titles


def test_settings_that_are_not_told_apart_say_how_many_seeds_would(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "confirm=2")
    trials = confirm(sweep, searched(LOSSES), {"t001": (0.20, 0.28), "t002": (0.29, 0.31)})
    confirmation = confirmation_of(sweep, trials)
    assert confirmation is not None
    assert [setting.verdict for setting in confirmation.settings] == ["best", "alike"]
    assert confirmation.more_seeds is not None and confirmation.more_seeds > 0
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    store.trials = {trial.name: trial for trial in trials}
    count = 2 + confirmation.more_seeds
    assert f"confirm_seeds={count}" in "\n".join(work_out(sweep, store).sentences)


def test_a_setting_that_another_seed_breaks_is_the_last(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "confirm=2")
    trials = confirm(sweep, searched(LOSSES), {"t001": (0.01, 0.01), "t002": (0.2, 0.2)})
    trials[-3].status = "diverged"
    confirmation = confirmation_of(sweep, trials)
    assert confirmation is not None
    assert [setting.trial for setting in confirmation.settings] == ["t002", "t001"]
    assert confirmation.settings[1].verdict == "worse"
    assert confirmation.settings[1].low is None


def test_seeds_of_the_space_judge_their_settings(tmp_path: Path) -> None:
    """The best single trial is a lucky one; the best setting has the best mean."""
    sweep = sweep_of(tmp_path, "space.train.seed=[0, 1]")
    trials = []
    for (batch, rate), losses in {(8, 0.01): (0.1, 0.9), (16, 0.1): (0.3, 0.32)}.items():
        for seed, loss in enumerate(losses):
            values = {BATCH: batch, RATE: rate, SEED: seed}
            trials.append(ended(len(trials), loss, values=values))
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    store.trials = {trial.name: trial for trial in trials}
    answer = work_out(sweep, store)
    assert answer.best["trial"] == "t002" and answer.best["mean"] == pytest.approx(0.31)


def test_the_soonest_setting_is_judged_by_seconds(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "target=0.35", "confirm=2")
    assert sweep.next == "soonest"
    trials = searched(LOSSES)
    for trial, seconds in zip(trials, (9.0, 3.0, 1.0, 2.0), strict=True):
        trial.reports[0]["seconds"] = seconds
    planned = plan_confirmation(sweep, trials)
    assert [trial.confirms for trial in planned] == ["t002", "t002", "t003", "t003"]
    ends = {"t002": (0.3, 0.3), "t003": (0.3, 0.3)}
    trials = confirm(sweep, trials, ends)
    for trial, seconds in zip(trials[4:], (8.0, 8.2, 2.0, 2.1), strict=True):
        trial.reports[0]["seconds"] = seconds
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    store.trials = {trial.name: trial for trial in trials}
    answer = work_out(sweep, store)
    assert answer.confirmation is not None and answer.confirmation.best.trial == "t003"
    assert next_run(sweep, store, answer).optimizer.lr == 0.1


def without_a_difference(sweep: Sweep, random_number: random.Random) -> Confirmation:
    """What a sweep of settings says whose losses are drawn alike."""
    trials = searched({cell: random_number.gauss(1, 0.1) for cell in LOSSES})
    for trial in plan_confirmation(sweep, trials):
        loss = random_number.gauss(1, 0.1)
        trials.append(ended(trial.index, loss, values=trial.values, confirms=trial.confirms))
    confirmation = confirmation_of(sweep, trials)
    assert confirmation is not None
    return confirmation


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
def test_settings_that_do_not_differ_are_rarely_called_worse(tmp_path: Path, mode: str) -> None:
    """In at most 5 % of 1,000 sweeps of settings that are alike is one of them worse."""
    sweep = sweep_of(tmp_path, f"mode={mode}", "confirm_seeds=3")
    random_number = random.Random(5)
    mistakes = 0
    for _ in range(1000):
        confirmation = without_a_difference(sweep, random_number)
        mistakes += any(setting.verdict == "worse" for setting in confirmation.settings)
    assert mistakes <= 50


@pytest.mark.slow
def test_intervals_contain_the_true_mean_as_often_as_they_say(tmp_path: Path) -> None:
    """Means of settings that the search chose for their luck are not biased."""
    sweep = sweep_of(tmp_path)
    random_number = random.Random(6)
    inside = []
    for _ in range(500):
        confirmation = without_a_difference(sweep, random_number)
        for setting in confirmation.settings:
            assert setting.low is not None and setting.high is not None
            inside.append(setting.low <= 1 <= setting.high)
    assert 0.75 < np.mean(inside) < 0.85


MISTAKES = [
    ("confirm=-1", "confirm is -1, but it must be a whole number, or 0 for none"),
    ("confirm_seeds=0", "confirm_seeds is 0, but it must be a whole number greater than 0"),
    ("next=quickest", "next is 'quickest', but it must be best or soonest"),
    ("next=soonest", "no target says when a trial is done: write target: 0.1"),
]


@pytest.mark.parametrize(("override", "sentence"), MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        sweep_of(tmp_path, override)
    assert sentence in str(error.value)
