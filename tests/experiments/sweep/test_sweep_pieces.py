"""The parts of a sweep that need no processes: its file, its space, its ledger, its slots, and what it concludes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from app.errors import UserError
from experiments.sweep import science
from experiments.sweep.answer import next_run, spent, work_out
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.science import BATCH, RATE
from experiments.sweep.slots import Need, at_once, place, refuse_what_never_fits
from experiments.sweep.space import points, read_space
from experiments.sweep.spec import Sweep, read_sweep

BASE = """
experiment: {task: "tests.tasks:Points", train: {steps: 40, global_batch_size: 16}}
space: {train.global_batch_size: [8, 16], optimizer.lr: [0.01, 0.1, 1.0]}
"""


def sweep_of(tmp_path: Path, text: str = BASE, *overrides: str) -> Sweep:
    file = tmp_path / "trial-sweep.yaml"
    file.write_text(text)
    return read_sweep(str(file), list(overrides))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    assert sweep.name == "trial-sweep" and sweep.count == 6
    assert sweep.points is not None
    assert sweep.points[:3] == [{BATCH: b, RATE: r} for b, r in ((8, 0.01), (16, 0.01), (8, 0.1))]
    config = sweep.config(sweep.points[4], "t", "here")
    assert (config.train.global_batch_size, config.optimizer.lr) == (8, 1.0)
    assert (config.run.name, config.run.storage, config.workers) == ("t", "here", "1")
    assert not config.tracking.log_model


def test_overrides_reach_sweep_and_experiment(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, BASE, "searcher=random", "trials=5", "train.steps=7", "scheduler=asha", "target=0.5")
    assert (sweep.searcher, sweep.count, sweep.scheduler, sweep.target) == ("random", 5, "asha", 0.5)
    assert sweep.base.train.steps == 7


@pytest.mark.parametrize("name", ["sweep_mnist", "sweep_gpt", "sweep_digits"])
def test_shipped_sweeps_are_valid(name: str) -> None:
    assert read_sweep(f"experiments/{name}.yaml", []).count >= 12


def test_random_points_are_those_of_the_seed_and_within_bounds() -> None:
    space = read_space(
        {
            "a": {"loguniform": ["1e-4", 1e-1]},
            "b": {"quniform": [0, 10, 5]},
            "c": ["x", "y"],
            "d": {"randint": [1, 4]},
            "e": {"uniform": [2, 3]},
        }
    )
    first, again = points(space, "random", 200, 7), points(space, "random", 200, 7)
    assert first == again != points(space, "random", 200, 8)
    assert all(1e-4 <= p["a"] <= 1e-1 and p["b"] in (0, 5, 10) and p["c"] in "xy" for p in first)
    assert {p["d"] for p in first} == {1, 2, 3} and all(2 <= p["e"] <= 3 for p in first)
    assert 0.35 < sum(p["a"] < 10**-2.5 for p in first) / 200 < 0.65, "even over the logarithm"


BAD = {
    "an empty space": ("space: {}", "the search space is empty"),
    "an empty list": ("space: {optimizer.lr: []}", "nothing to try"),
    "a single value": ("space: {optimizer.lr: 0.1}", "put it under `set`"),
    "an empty range": ("space: {optimizer.lr: {uniform: [1, 1]}}", "which is empty"),
    "a logarithm of zero": ("space: {optimizer.lr: {loguniform: [0, 1]}}", "begins above 0"),
    "an unknown distribution": ("space: {optimizer.lr: {logunifrom: [1, 2]}}", "did you mean 'loguniform'"),
    "a grid over a distribution": ("space: {optimizer.lr: {uniform: [1, 2]}}", "cannot try all of"),
    "an unknown key": ("space: {optimizer.lrr: [1, 2]}", "optimizer.lr"),
    "a wrong type": ("space: {train.global_batch_size: [a, b]}", "must be a whole number"),
    "an unknown searcher": ("searcher: optna", "did you mean optuna"),
    "an unknown scheduler": ("scheduler: ahsa", "did you mean asha"),
    "a contradiction": ("trials: 5", "the grid has 6 points"),
    "a batch below the workers": ("set: {workers: 16}", "below workers=16"),
    "pbt with a searcher": ("searcher: optuna\nscheduler: pbt", "scheduler pbt changes the values itself"),
    "an odd metric": ("metric: loss", "eval/loss"),
    "a sweep key misspelt": ("metrik: eval/loss", "did you mean metric"),
    "no experiment": ("experiment: null", "names no experiment"),
    "a mode": ("mode: lowest", "min or max"),
    "a switch": ("warm: maybe", "must be true or false"),
    "a target": ("target: low", "must be a number"),
    "a seed": ("seed: x", "must be a whole number"),
    "a price": ("price_per_worker_hour: -1", "must not be negative"),
    "steps and epochs": ("space: {train.steps: [1, 2], train.epochs: [1, 2]}", "contradict each other"),
    "a trial's own name": ("space: {run.name: [a, b]}", "which the sweep sets itself"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(tmp_path: Path, case: str) -> None:
    text, said = BAD[case]
    key = text.split(":")[0]
    kept = [line for line in BASE.strip().splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(UserError) as error:
        sweep_of(tmp_path, "\n".join([*kept, text]))
    assert said in str(error.value) and "\n" not in str(error.value)


# --- slots ------------------------------------------------------------------------------------------------------------


def test_trials_are_placed_worker_by_worker() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0}]
    three = Need.of(1, {"CPU": 3.0})
    assert at_once(nodes, three) == 2, "3 + 3 CPUs on 2 nodes of 4; a third would need what is left of both"
    assert at_once(nodes, Need.of(2, {"CPU": 2.0})) == 2
    assert place(nodes, [Need.of(1, {"CPU": 1.0})] * 2 + [three] * 2), "large ones are placed first"
    assert not place([{"CPU": 4.0, "GPU": 1.0}], [Need.of(2, {"GPU": 1.0})])


def test_what_never_fits_is_refused_unless_the_cluster_grows() -> None:
    need = Need.of(3, {"GPU": 1.0})
    with pytest.raises(UserError, match=r"3 workers of 1 GPU each, and the cluster has 2 GPU on 2 nodes"):
        refuse_what_never_fits([{"GPU": 1.0}, {"GPU": 1.0}], {}, [need])
    refuse_what_never_fits([{"GPU": 1.0}], {"GPU": 8.0}, [need])


# --- the ledger -------------------------------------------------------------------------------------------------------


def report(step: int, loss: float, **more: object) -> dict[str, object]:
    base = {"step": step, "samples": step * 16, "seconds": step * 0.1, "metrics": {"eval/loss": loss}}
    return base | {"steps": 40, "workers": 1} | more


def test_the_ledger_remembers_past_a_torn_line(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "s", {"metric": "eval/loss"})
    ledger.save_head()
    ledger.begin(0, "t000", {RATE: 0.1})
    ledger.report(0, report(10, 1.0))
    ledger.begin(1, "t001", {RATE: 0.2})
    ledger.end(0, "finished")
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "report", "ind')  # the driver was killed here
    again = Ledger(str(tmp_path), "s", {"metric": "eval/loss"})
    assert [t.index for t in again.ended] == [0] and [t.index for t in again.under_way] == [1]
    again.report(1, report(20, float("nan")))
    third = Ledger(str(tmp_path), "s", {"metric": "eval/loss"})
    assert math.isnan(third.trials[1].last["metrics"]["eval/loss"]), "what came after the torn line is whole"
    assert third.head["uid"] == ledger.head["uid"]


def test_another_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Ledger(str(tmp_path), "s", {"space": {"a": [1]}, "metric": "eval/loss"}).save_head()
    with pytest.raises(UserError, match=r"begun with another space\.a"):
        Ledger(str(tmp_path), "s", {"space": {"a": [2]}, "metric": "eval/loss"})


# --- science ----------------------------------------------------------------------------------------------------------

NOISE, LEAST = 96.0, 150.0


def world(exponent: float = 0.5, seed: int = 0) -> list[Trial]:
    """Trials of a made-up problem: steps to the target follow S(B), and a learning rate off its best costs more."""
    draw, trials = random.Random(seed), []
    for batch in (16, 32, 64, 128, 256):
        best = 0.002 * batch**exponent
        for k in range(-3, 4):
            rate = best * 2 ** (k * 0.75 + 0.2)
            off = 1 + 0.12 * math.log2(rate / best) ** 2
            steps = LEAST * (1 + NOISE / batch) * off * math.exp(draw.gauss(0, 0.01))
            trial = Trial(len(trials), f"t{len(trials)}", {BATCH: batch, RATE: rate}, "finished")
            for i in range(1, 61):
                at = i * 40
                loss = 2.0 * 0.1 ** (at / steps)  # 0.2 after `steps`
                trial.reports.append(
                    report(at, max(loss, 0.01 * off), samples=at * batch, seconds=at * (0.01 + batch * 1e-4))
                )
            trials.append(trial)
    return trials


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Of a sweep of that problem."""
    found = Ledger(str(tmp_path / "s"), "s", {})
    found.trials = {trial.index: trial for trial in world()}
    return found


@pytest.mark.parametrize("exponent", [0.5, 1.0, 0.75])
def test_the_scaling_rule_and_an_unswept_batch_size(exponent: float) -> None:
    rates = science.best_rates(world(exponent), "eval/loss", "min")
    assert len(rates) == 5 and not any(rate.edge for rate in rates)
    rule = science.scaling_rule(rates)
    assert rule is not None and abs(rule.exponent - exponent) < 0.1 and rule.low < rule.exponent < rule.high
    assert rule.name == {0.5: "square root", 1.0: "linear", 0.75: "measured exponent"}[exponent]
    two = science.scaling_rule(rates[:2])
    assert two is not None and two.name == "undecided", "a line through two points is no evidence"
    unswept = 0.002 * 90**exponent
    assert 2**-0.5 < rule.rate(90) / unswept < 2**0.5, "within one √2 step of the optimum"


def test_the_critical_batch_size_is_found() -> None:
    fastest = science.fastest_by_batch(world(), "eval/loss", 0.2, "min")
    found = science.critical_batch({batch: steps for batch, (steps, _) in fastest.items()})
    assert found is not None
    assert abs(found.batch / NOISE - 1) < 0.15 and found.low < NOISE < found.high
    assert abs(found.least_steps / LEAST - 1) < 0.15
    assert science.critical_batch({16: 100.0, 32: 50.0}) is None
    assert science.critical_batch({16: 100.0, 32: 200.0, 64: 400.0}) is None, "steps that grow know no such thing"


def test_steps_to_a_target_are_interpolated_and_may_be_never() -> None:
    trial = Trial(0, "t", {}, reports=[report(10, 1.0), report(20, 0.5), report(30, 0.4)])
    assert science.steps_to(trial, "eval/loss", 0.75, "min") == pytest.approx(15)
    assert science.steps_to(trial, "eval/loss", 0.75, "min", "seconds") == pytest.approx(1.5)
    assert science.steps_to(trial, "eval/loss", 0.3, "min") is None
    assert science.steps_to(trial, "eval/loss", 0.9, "max") == 10


def test_step_time_and_efficiency() -> None:
    time = science.step_time(world())
    assert time is not None and time.fixed == pytest.approx(0.01, rel=1e-3)
    assert time.seconds(64, 2) == pytest.approx(0.01 + 32e-4, rel=1e-3)
    assert science.efficiency(100.0, 100.0, 0.0) == 0.5, "at the noise scale half of the samples are wasted"


def test_the_recommendation_is_the_soonest_way(tmp_path: Path, ledger: Ledger) -> None:
    sweep = sweep_of(tmp_path, BASE, "target=0.2")
    answer = work_out(sweep, ledger)
    way = answer.recommended
    assert way is not None
    times = {b: LEAST * (1 + NOISE / b) * (0.01 + b * 1e-4) for b in (16, 24, 32, 44, 64, 92, 128, 180, 256)}
    assert times[way["values"][BATCH]] <= 1.1 * min(times.values())
    goods = {row["batch"]: row["goodput"] for row in answer.goodput}
    measured = {b: 1 / (1 + NOISE / b) / (0.01 + b * 1e-4) for b in goods}  # steps saved times steps per second
    assert max(goods, key=lambda b: goods[b]) == max(measured, key=lambda b: measured[b])
    assert any("critical batch size" in line for line in answer.sentences)
    assert json.dumps(answer.recommended), "it can be stored"
    then = next_run(sweep, ledger, answer)
    assert (then.train.global_batch_size, then.optimizer.lr) == (way["values"][BATCH], way["values"][RATE])
    assert then.run.name == f"{sweep.name}-next" and then.tracking.log_model == sweep.base.tracking.log_model


def test_a_recommendation_names_all_that_was_searched(tmp_path: Path, ledger: Ledger) -> None:
    """And nothing is predicted between trials that differ in more than the fits know of."""
    sweep = sweep_of(tmp_path, BASE + "\n", "target=0.2", "space.strategy=[ddp, fsdp]")
    for trial in ledger.trials.values():
        trial.values["strategy"] = "ddp"
    way = work_out(sweep, ledger).recommended
    assert way is not None and way["measured"] and way["values"]["strategy"] == "ddp"
    assert way["values"].keys() == {BATCH, RATE, "strategy", "workers"}


def test_a_target_that_is_never_reached_says_how_near(tmp_path: Path, ledger: Ledger) -> None:
    sweep = sweep_of(tmp_path, BASE, "target=0.001")
    said = " ".join(work_out(sweep, ledger).sentences)
    assert "was not reached; the nearest is 0.01" in said
    assert "it got no nearer" in said or "it came" in said
    assert "worker-seconds of training" in said and "cost" not in said


def test_what_a_sweep_cost_is_what_its_runs_have_counted(tmp_path: Path, ledger: Ledger) -> None:
    sweep = sweep_of(tmp_path, BASE, "price_per_worker_hour=3.6")
    by_price = spent(sweep, ledger)
    assert by_price["dollars"] == pytest.approx(by_price["worker_seconds"] / 1000)
    for trial, dollars in zip(world(), (1.5, 2.0)):
        (tmp_path / "s" / trial.name).mkdir(parents=True)
        (tmp_path / "s" / trial.name / "cost.json").write_text(json.dumps({"total": dollars}))
    assert work_out(sweep, ledger).figures["cost/dollars"] == 3.5


def test_a_sweep_of_an_older_version_is_the_same_sweep(tmp_path: Path) -> None:
    """Configuration keys that have come since stand at their defaults."""
    sweep = sweep_of(tmp_path, BASE)
    Ledger(str(tmp_path / "s"), "s", sweep.about()).save_head()
    head = json.loads((tmp_path / "s" / "sweep.json").read_text())
    del head["about"]["experiment"]["checkpoint"]["keep_last"]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(head))
    Ledger(str(tmp_path / "s"), "s", sweep.about())
    Ledger(str(tmp_path / "s"), "s", head["about"])  # as a report opens it
    head["about"]["experiment"]["checkpoint"]["keep_last"] = 77
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(head))
    with pytest.raises(UserError, match="another checkpoint"):
        Ledger(str(tmp_path / "s"), "s", sweep.about())


def test_seeds_are_averaged_before_rates_are_compared() -> None:
    """One lucky seed at a bad rate does not make it the best."""

    def trial(index: int, rate: float, seed: int, loss: float) -> Trial:
        report = {"step": 10, "samples": 320, "seconds": 1.0, "metrics": {"eval/loss": loss}}
        return Trial(index, f"t{index}", {BATCH: 32, RATE: rate, "train.seed": seed}, "finished", "", [report])

    losses = {(0.01, 0): 0.5, (0.01, 1): 0.5, (0.1, 0): 0.4, (0.1, 1): 0.42, (1.0, 0): 0.1, (1.0, 1): 9.0}
    found = science.best_rates([trial(i, *k, v) for i, (k, v) in enumerate(losses.items())], "eval/loss", "min")
    assert found[0].value == pytest.approx(0.41) and not found[0].edge
