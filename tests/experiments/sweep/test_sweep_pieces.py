"""The parts of a sweep that need no processes: its file, its space, its store, and what it concludes."""

import json
import math
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.errors import UserError
from experiments.sweep import analysis
from experiments.sweep.page import content
from experiments.sweep.run import next_run, work_out
from experiments.sweep.search import Search, scheduler_of, searcher_of
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trials import BATCH, RATE, Trial, TrialStore

BASE = """
experiment: {task: "tests.tasks:Points", train: {steps: 40, global_batch_size: 16}}
space: {train.global_batch_size: [8, 16], optimizer.lr: [0.01, 0.1, 1.0]}
"""


def sweep_of(tmp_path: Path, text: str = BASE, *overrides: str) -> Sweep:
    file = tmp_path / "trial-sweep.yaml"
    file.write_text(text)
    return read_sweep(str(file), list(overrides))


def test_overrides_and_a_grid_of_every_combination(tmp_path: Path) -> None:
    other = sweep_of(tmp_path, BASE, "searcher=random", "trials=5", "train.steps=7", "scheduler=asha", "target=0.5")
    assert (other.searcher, other.count, other.scheduler, other.target) == ("random", 5, "asha", 0.5)
    assert other.experiment.train.steps == 7 and other.longest() == 7
    assert scheduler_of(sweep_of(tmp_path, BASE, "scheduler={name: asha, grace_period: 500}"), 64, 4), "64 is enough"
    sweep = sweep_of(tmp_path)
    assert sweep.name == "trial-sweep" and sweep.count == 6 and sweep.points is not None
    assert sweep.points[:3] == [{BATCH: b, RATE: r} for b, r in ((8, 0.01), (16, 0.01), (8, 0.1))]
    config = sweep.config(sweep.points[4], "t", "here")
    assert (config.train.global_batch_size, config.optimizer.lr) == (8, 1.0)
    assert (config.run.name, config.run.storage, config.workers) == ("t", "here", "1")
    assert not config.tracking.log_model


def test_shipped_sweeps_are_valid() -> None:
    assert all(read_sweep(f"experiments/sweep_{name}.yaml", []).count >= 12 for name in ("mnist", "gpt", "digits"))


BAD = {
    "an empty space": ("space: {}", "the search space is empty"),
    "an empty list": ("space: {optimizer.lr: []}", "nothing to try"),
    "a single value": ("space: {optimizer.lr: 0.1}", "put it under `set`"),
    "an empty range": ("space: {optimizer.lr: {uniform: [1, 1]}}", "which is empty"),
    "a logarithm of zero": ("space: {optimizer.lr: {loguniform: [0, 1]}}", "begins above 0"),
    "too few numbers": ("space: {optimizer.lr: {uniform: [1]}}", "uniform takes "),
    "one value of a range": ("space: {optimizer.lr: {linspace: [1, 2, 1]}}", "has 1 values: write at least 2"),
    "a name that is none": ("name: a/b", "use letters, digits"),
    "set is no mapping": ("set: [1]", "it must be a mapping"),
    "an unknown distribution": ("space: {optimizer.lr: {logunifrom: [1, 2]}}", "did you mean 'loguniform'"),
    "a grid over a distribution": ("space: {optimizer.lr: {uniform: [1, 2]}}", "cannot try all of"),
    "an unknown key": ("space: {optimizer.lrr: [1, 2]}", "optimizer.lr"),
    "a wrong type": ("space: {train.global_batch_size: [a, b]}", "could not be converted to Integer"),
    "an unknown searcher": ("searcher: optna", "did you mean 'optuna'"),
    "a contradiction": ("trials: 5", "the grid has 6 points"),
    "an odd metric": ("metric: loss", "must be eval/NAME"),
    "a sweep key misspelt": ("metrik: eval/loss", "did you mean 'metric'"),
    "no experiment": ("experiment: null", "names no experiment"),
    "a target": ("target: low", "must be a number"),
    "steps and epochs": ("space: {train.steps: [1, 2], train.epochs: [1, 2]}", "contradict each other"),
    "a trial's own name": ("space: {run.name: [a, b]}", "which the sweep sets itself"),
    "an argument that asha lacks": ("scheduler: {name: asha, reduction: 3}", "does not take these arguments"),
    "an argument too small": ("scheduler: {name: asha, reduction_factor: 0}", "arguments: Reduction Factor not valid"),
    "an argument of no number": ("scheduler: {name: asha, grace_period: soon}", "does not take these arguments"),
    "an argument that optuna lacks": ("searcher: {name: optuna, colour: red}", "does not take these arguments"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    key = text.split(":")[0]
    kept = [line for line in BASE.strip().splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(UserError) as error:
        sweep = sweep_of(tmp_path, "\n".join([*kept, text]))
        searcher_of(sweep, [])
        scheduler_of(sweep, 64, 4)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_searcher_begins_with_what_is_known_and_goes_on_elsewhere(tmp_path: Path) -> None:
    known = [{BATCH: 8, RATE: 0.5}, {BATCH: 8, RATE: 0.25}]
    sweep = sweep_of(tmp_path, BASE.replace("[0.01, 0.1, 1.0]", "{loguniform: [1.0e-3, 1.0]}"), "searcher=optuna")
    searcher = searcher_of(sweep, known)
    searcher.set_search_properties("eval/loss", "min", {key: domain.for_tune() for key, domain in sweep.space.items()})
    found = [searcher.suggest(str(i)) for i in range(4)]
    assert found[:2] == known and len({point[RATE] for point in found}) == 4


def report(step: int, loss: float, **more: object) -> dict[str, object]:
    base = {"step": step, "samples": step * 16, "seconds": step * 0.1, "metrics": {"eval/loss": loss}}
    return base | {"steps": 40, "workers": 1} | more


LOSS = Search(space={})
NOISE, LEAST = 96.0, 150.0


def world(exponent: float = 0.5) -> list[Trial]:
    """Trials of a made-up problem: steps to the target follow S(B), and a learning rate off its best costs more."""
    draw, trials = random.Random(0), []
    for batch in (16, 32, 64, 128, 256):
        best = 0.002 * batch**exponent
        for k in range(-3, 4):
            rate = best * 2 ** (k * 0.75 + 0.2)
            off = 1 + 0.12 * math.log2(rate / best) ** 2
            steps = LEAST * (1 + NOISE / batch) * off * math.exp(draw.gauss(0, 0.01))
            trial = Trial(len(trials), f"t{len(trials)}", {BATCH: batch, RATE: rate}, "finished")
            for at in range(40, 2401, 40):
                loss = max(2.0 * 0.1 ** (at / steps), 0.01 * off)  # 0.2 after `steps`
                trial.reports.append(report(at, loss, samples=at * batch, seconds=at * (0.01 + batch * 1e-4)))
            trials.append(trial)
    return trials


@pytest.mark.parametrize("exponent", [0.5, 1.0, 0.75])
def test_the_scaling_rule_and_an_unswept_batch_size(exponent: float) -> None:
    rates = analysis.best_rates(world(exponent), LOSS)
    assert len(rates) == 5 and not any(rate.edge for rate in rates)
    rule = analysis.scaling_rule(rates)
    assert rule is not None and abs(rule.exponent - exponent) < 0.1 and rule.low < rule.exponent < rule.high
    assert rule.name == {0.5: "square root", 1.0: "linear", 0.75: "measured exponent"}[exponent]
    assert 2**-0.5 < rule.rate(90) / (0.002 * 90**exponent) < 2**0.5, "within one √2 step of the optimum, unswept"
    two = analysis.scaling_rule(rates[:2])
    assert two is not None and two.name == "undecided", "a line through two points is no evidence"


def test_the_critical_batch_size_is_found() -> None:
    found = analysis.critical_batch(analysis.fewest_steps(world(), LOSS, 0.2))
    assert found is not None
    assert abs(found.batch / NOISE - 1) < 0.15 and found.low < NOISE < found.high
    assert abs(found.least_steps / LEAST - 1) < 0.15
    assert found.interval.startswith("95 %: ")
    few = analysis.critical_batch({16: 100.0, 32: 52.0, 64: 45.0})
    assert few is not None and few.interval == "too few points for an interval"
    assert analysis.critical_batch({16: 100.0, 32: 50.0}) is None
    assert analysis.critical_batch({16: 100.0, 32: 200.0, 64: 400.0}) is None, "steps that grow know no such thing"


def test_steps_to_a_target_are_interpolated_and_may_be_never() -> None:
    trial = Trial(0, "t", {}, reports=[report(10, 1.0), report(20, 0.5), report(30, 0.4)])
    assert analysis.steps_to(trial, LOSS, 0.75) == pytest.approx(15)
    assert analysis.steps_to(trial, LOSS, 0.75, "seconds") == pytest.approx(1.5)
    assert analysis.steps_to(trial, LOSS, 0.3) is None
    assert analysis.steps_to(trial, Search(space={}, mode="max"), 0.9) == 10


def test_what_to_use_by_workers(tmp_path: Path) -> None:
    """The batch size that is soonest at the target grows with the workers, and its learning rate with it."""
    sweep, store = sweep_of(tmp_path, BASE, "target=0.2"), TrialStore(tmp_path / "s", "s", {})
    store.trials = {trial.name: trial for trial in world()}
    for trial, dollars in zip(store.trials.values(), (1.5, 2.0)):
        (tmp_path / "s" / trial.name).mkdir(parents=True)
        (tmp_path / "s" / trial.name / "cost.json").write_text(json.dumps({"total": dollars}))
    answer = work_out(sweep, store)
    assert answer.figures["cost/dollars"] == 3.5, "what its runs have counted"
    assert answer.time is not None and answer.time.fixed == pytest.approx(0.01, rel=1e-3)
    rows = {row["workers"]: row for row in answer.by_workers}
    assert list(rows) == [1, 2, 4, 8]
    for n, row in rows.items():
        true = {b: LEAST * (1 + NOISE / b) * (0.01 + b / n * 1e-4) for b in (16, 24, 32, 44, 64, 92, 128, 180, 256)}
        assert true[row["batch size"]] < 1.05 * min(true.values()) and row["batch size"] % n == 0
        assert row["seconds to the target"] == pytest.approx(true[row["batch size"]], rel=0.1)
        assert row["learning rate"] == pytest.approx(0.002 * row["batch size"] ** 0.5, rel=0.2)
    assert 1 < rows[2]["times faster"] < rows[8]["times faster"] < 8
    assert any(line.startswith("on 8 ") and "predicted" in line for line in answer.sentences)
    way, times = answer.soonest, {b: LEAST * (1 + NOISE / b) * (0.01 + b * 1e-4) for b in (16, 32, 64, 128, 256)}
    assert way is not None and times[way["values"][BATCH]] <= 1.1 * min(times.values())
    then = next_run(sweep, store, answer)
    assert (then.train.global_batch_size, then.optimizer.lr) == (way["values"][BATCH], way["values"][RATE])
    assert then.run.name == f"{sweep.name}-next" and then.tracking.log_model == sweep.experiment.tracking.log_model
    missed = work_out(sweep_of(tmp_path, BASE, "target=0.001"), store)
    assert "was not reached; the nearest is 0.01" in " ".join(missed.sentences)
    sections = {section["title"]: section for section in content(sweep, store, answer)["sections"]}
    assert len(sections["What to use, by workers"]["tables"][0]["rows"]) == 4
    drawings, captions = zip(*sections["Plots"]["plots"])
    assert all(map(ElementTree.fromstring, drawings)), "they are XML"
    assert all(any(w in c for c in captions) for w in ("best learning rate", "critical batch", "Samples per second"))


def test_seeds_are_averaged_before_rates_are_compared() -> None:
    """One lucky seed at a bad rate does not make it the best."""

    def trial(index: int, rate: float, seed: int, loss: float) -> Trial:
        values = {BATCH: 32, RATE: rate, "train.seed": seed}
        return Trial(index, f"t{index}", values, "finished", "", [report(10, loss)])

    losses = {(0.01, 0): 0.5, (0.01, 1): 0.5, (0.1, 0): 0.4, (0.1, 1): 0.42, (1.0, 0): 0.1, (1.0, 1): 9.0}
    found = analysis.best_rates([trial(i, *k, v) for i, (k, v) in enumerate(losses.items())], LOSS)
    assert found[0].value == pytest.approx(0.41) and not found[0].edge
