"""What Tune asks and what the ledger answers, with Tune's own schedulers and searchers but without its processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from app.errors import UserError
from experiments.sweep import oversee, search
from experiments.sweep.ledger import Ledger
from experiments.sweep.slots import Need
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trial import INDEX, NAME, REPORT

TEXT = """
experiment: {task: "tests.tasks:Points", train: {steps: 64, global_batch_size: 16}}
space: {optimizer.lr: {loguniform: [1.0e-3, 1.0]}}
searcher: random
trials: 27
scheduler: {name: asha, grace: 4, reduction_factor: 3}
"""
STEPS = 64


def sweep_of(tmp_path: Path, *overrides: str) -> Sweep:
    file = tmp_path / "s.yaml"
    file.write_text(TEXT)
    return read_sweep(str(file), list(overrides))


class Stub(SimpleNamespace):
    """Of a trial of Tune's, what schedulers look at."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Tune:
    """As much of Tune's controller as is asked for: two trials at once, one report at a time, in a seeded order."""

    def __init__(self, sweep: Sweep, folder: Path, slots: int = 2) -> None:
        self.ledger = Ledger(str(folder), sweep.name, sweep.about())
        self.ledger.save_head()
        scheduler = oversee.scheduler_of(sweep, STEPS, 4)
        self.overseer = oversee.Overseer(sweep, self.ledger, scheduler, lambda trial, what: None)
        nodes = [{"CPU": float(slots)}]
        inner = search.searcher_of(sweep)
        need = Need.of(1, {"CPU": 1.0})
        self.next = search.Next(sweep, self.ledger, inner, lambda values: need, lambda: nodes, {})
        self.live: list[Any] = []
        self.stopping = False
        self.begun = 0

    def request_stop_experiment(self) -> None:
        self.stopping = True

    def get_live_trials(self) -> list[Any]:
        return self.live

    def get_trials(self) -> list[Any]:
        return self.live

    def fill(self) -> None:
        while True:
            trial_id = f"{id(self)}-{self.begun}"
            config = self.next.suggest(trial_id)
            if config is None or config == Searcher.FINISHED:
                return
            self.begun += 1
            own = self.ledger.trials[config[INDEX]]
            trial = Stub(trial_id=trial_id, config=config, placement_group_factory=None, last_result={})
            trial.at, trial.began = own.last.get("step", 0), self.begun
            trial.status, kept = "RUNNING", SimpleNamespace(num_to_keep=None)
            trial.experiment_tag = ""
            trial.run_metadata = SimpleNamespace(checkpoint_manager=SimpleNamespace(checkpoint_config=kept))
            self.overseer.on_trial_add(self, trial)
            self.live.append(trial)

    def run(self, reports: int = 10**9, seed: int = 0) -> None:
        """So many reports, then the power goes."""
        draw = random.Random(seed)
        self.fill()
        while self.live and reports and not self.stopping:
            reports -= 1
            trial = self.live[draw.randrange(len(self.live))]
            result = told(trial)
            decision = self.overseer.on_trial_result(self, trial, result)
            self.next.on_trial_result(trial.trial_id, result)
            if decision == TrialScheduler.STOP:
                self.live.remove(trial)
                self.overseer.on_trial_complete(self, trial, result)
                self.next.on_trial_complete(trial.trial_id, result)
                self.fill()


def told(trial: Any) -> dict[str, Any]:
    """The next report of a trial whose loss falls the faster the nearer its rate is to 0.03."""
    trial.at += 4
    rate = trial.config["optimizer.lr"]
    loss = abs(rate / 0.03 - 1) + 1 / trial.at
    common = {"start": trial.began, "ended": trial.at > STEPS, "status": "finished", "message": ""}
    if trial.at > STEPS:
        return {REPORT: json.dumps({**common, "step": STEPS, "metrics": {}}), "training_iteration": trial.at}
    values = {"step": trial.at, "samples": trial.at * 16, "seconds": 0.1 * trial.at, "metrics": {"eval/loss": loss}}
    return {REPORT: json.dumps({**common, **values, "steps": STEPS, "workers": 1}), "training_iteration": trial.at}


def steps_spent(ledger: Ledger) -> int:
    return sum(trial.last["step"] for trial in ledger.trials.values())


def test_asha_spends_little_and_keeps_the_best(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    tune = Tune(sweep, tmp_path / "one")
    tune.run()
    trials = tune.ledger.trials
    assert len(trials) == 27 and all(trial.ended for trial in trials.values())
    assert steps_spent(tune.ledger) < 0.5 * 27 * STEPS
    best = min(trials.values(), key=lambda trial: abs(trial.values["optimizer.lr"] - 0.03))
    assert best.status == "finished" and best.last["step"] == STEPS
    assert {trial.status for trial in trials.values()} == {"finished", "pruned"}
    pruned = next(trial for trial in trials.values() if trial.status == "pruned")
    assert pruned.message.startswith("stopped early by asha after step")


@pytest.mark.parametrize("kill_after", [1, 17, 60])
def test_killed_and_run_again(tmp_path: Path, kill_after: int) -> None:
    sweep = sweep_of(tmp_path)
    whole = Tune(sweep, tmp_path / "whole")
    whole.run()
    Tune(sweep, tmp_path / "cut").run(kill_after)
    before = {i: len(t.reports) for i, t in Ledger(str(tmp_path / "cut"), sweep.name, sweep.about()).trials.items()}
    ended = {i for i, t in Ledger(str(tmp_path / "cut"), sweep.name, sweep.about()).trials.items() if t.ended}
    second = Tune(sweep, tmp_path / "cut")
    second.run(seed=1)
    trials = second.ledger.trials
    assert len(trials) == 27 and all(trial.ended for trial in trials.values())
    assert all(trial.starts == (1 if i in ended or i not in before else 2) for i, trial in trials.items())
    for trial in trials.values():
        steps = [report["step"] for report in trial.reports]
        assert steps == sorted(set(steps)) and steps[0] == 4, "continued, nothing lost or told twice"
    assert [trials[i].values for i in sorted(trials)] == [whole.ledger.trials[i].values for i in range(27)]
    # The scheduler knew what had been: it does not begin to compare anew.
    assert steps_spent(second.ledger) < 1.35 * steps_spent(whole.ledger)
    rungs = second.overseer.inner._brackets[0]._rungs  # type: ignore[attr-defined]
    assert sum(len(recorded) for _, recorded in rungs) >= 27


def test_the_median_rule_and_a_kill(tmp_path: Path) -> None:
    """It cannot read an end without a value, and asserts that a trial which it stopped says no more: one that was under
    way when it was too early to tell is such a trial, now that it is told its past after that of all others."""
    sweep = sweep_of(tmp_path, "scheduler={name: median, grace: 8}", "trials=12")
    first = Tune(sweep, tmp_path / "t", slots=5)
    first.fill()
    worst = max(first.live, key=lambda trial: trial.config["optimizer.lr"])
    for trial in [worst, *(trial for trial in first.live if trial is not worst)]:
        for _ in range(2 if trial is worst else STEPS // 4 + 1):
            decision = first.overseer.on_trial_result(first, trial, result := told(trial))
            if decision == TrialScheduler.STOP:
                first.overseer.on_trial_complete(first, trial, result)
                break
    assert [trial.index for trial in first.ledger.under_way] == [worst.config[INDEX]]
    again = Tune(sweep, tmp_path / "t", slots=5)
    again.run()
    trials = again.ledger.trials
    assert len(trials) == 12 and all(trial.ended for trial in trials.values())
    assert trials[worst.config[INDEX]].status == "pruned" and len(trials[worst.config[INDEX]].reports) == 3
    assert min(trials.values(), key=lambda trial: abs(trial.values["optimizer.lr"] - 0.03)).status == "finished"


def test_a_target_stops_a_trial_that_has_done_what_it_was_for(tmp_path: Path) -> None:
    tune = Tune(sweep_of(tmp_path, "target=0.5", "scheduler=none"), tmp_path / "t")
    tune.run()
    reached = [trial for trial in tune.ledger.trials.values() if trial.status == "reached"]
    assert reached
    for trial in reached:
        losses = [value for _, value in trial.curve("eval/loss")]
        assert losses[-1] <= 0.5 and all(loss > 0.5 for loss in losses[:-1])


def test_a_metric_nobody_reports_ends_the_sweep_and_names_the_others(tmp_path: Path) -> None:
    tune = Tune(sweep_of(tmp_path, "metric=eval/acuracy", "mode=max"), tmp_path / "t")
    tune.run()
    assert isinstance(tune.overseer.problem, UserError)
    assert "'eval/acuracy'" in str(tune.overseer.problem) and "they report eval/loss" in str(tune.overseer.problem)
    assert len(tune.ledger.order) == 1


def test_trials_never_take_more_than_there_is(tmp_path: Path) -> None:
    tune = Tune(sweep_of(tmp_path), tmp_path / "t", slots=3)
    tune.fill()
    assert len(tune.live) == 3
    tune.run(5)
    assert len(tune.live) <= 3
    limited = Tune(sweep_of(tmp_path, "concurrent=1"), tmp_path / "u", slots=3)
    limited.fill()
    assert len(limited.live) == 1


def test_a_dead_or_diverged_trial_is_its_own_result(tmp_path: Path) -> None:
    tune = Tune(sweep_of(tmp_path), tmp_path / "t")
    tune.fill()
    first, second = tune.live
    tune.overseer.on_trial_error(tune, first)
    said = {"start": 1, "ended": True, "status": "failed", "message": "the loss was not finite at step 3", "step": 3}
    decision = tune.overseer.on_trial_result(tune, second, {REPORT: json.dumps({**said, "metrics": {}})})
    assert decision == TrialScheduler.STOP and tune.overseer.problem is None
    trials = tune.ledger.trials
    assert trials[0].status == trials[1].status == "failed"
    assert "its process died" in trials[0].message and "not finite" in trials[1].message


def test_optuna_suggests_learns_and_is_told_the_past(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "searcher=optuna", "scheduler=none", "trials=20")
    Tune(sweep, tmp_path / "t").run(100)
    again = Tune(sweep, tmp_path / "t")
    known = again.next.inner._ot_study.trials  # type: ignore[union-attr]
    assert len(known) == len(again.ledger.ended) > 0
    again.run()
    assert len(again.ledger.trials) == 20 and all(trial.ended for trial in again.ledger.trials.values())


def test_unlike_searchers_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pip install hyperopt"):
        search.searcher_of(sweep_of(tmp_path, "searcher=hyperopt"))
    with pytest.raises(UserError, match="does not take these arguments"):
        oversee.scheduler_of(sweep_of(tmp_path, "scheduler={name: asha, reduction: 3}"), 64, 4)
    for wrong, said in {
        "{name: asha, reduction_factor: 0}": "does not take these arguments: Reduction Factor not valid",
        "{name: asha, grace: soon}": "grace is 'soon', but it must be a number of steps",
        "{name: pbt, quantile_fraction: 3}": "does not take these arguments: You must set `quantile_fraction`",
    }.items():
        with pytest.raises(UserError, match=said):
            oversee.scheduler_of(sweep_of(tmp_path, f"scheduler={wrong}"), 64, 4)
    with pytest.raises(UserError, match="does not take these arguments"):
        search.searcher_of(sweep_of(tmp_path, "searcher={name: optuna, colour: red}"))
    fixed = sweep_of(tmp_path, "scheduler=pbt")
    fixed.space = {"workers": fixed.space["optimizer.lr"]}
    with pytest.raises(UserError, match="workers cannot be changed then"):
        oversee.scheduler_of(fixed, 64, 4)


def test_population_based_training_changes_values_and_not_identities(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "scheduler={name: pbt, interval: 4}", "trials=4")
    tune = Tune(sweep, tmp_path / "t", slots=4)
    tune.fill()
    donor, other = tune.live[0], tune.live[1]
    own = dict(other.config)
    tune.overseer._keep_identities(tune)
    other.config = {**donor.config, "optimizer.lr": 0.5}  # what Tune does when it copies a trial
    tune.overseer._keep_identities(tune)
    assert (other.config[INDEX], other.config[NAME]) == (own[INDEX], own[NAME])
    assert tune.ledger.trials[own[INDEX]].values == {"optimizer.lr": 0.5}
