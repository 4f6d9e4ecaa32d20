"""Parts of a sweep in this process: its file, space, store and conclusions, and single trials."""

import json
import math
import os
import queue
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from app.errors import EXIT_STOPPED, UserError
from app.tracking.settings import Settings
from experiments.sweep import analysis
from experiments.sweep.answer import _basis_in_words, work_out
from experiments.sweep.page import content
from experiments.sweep.run import next_run
from experiments.sweep.search import Search, make_scheduler, make_searcher
from experiments.sweep.spec import Sweep, read_sweep
from experiments.sweep.trial import REACHED, STOP_FILE, TrialContext, TrialRun
from experiments.sweep.trials import BATCH, RATE, REPORTS, Trial, TrialStore
from tests.running import committed

pytestmark = pytest.mark.pure

BASE = """
experiment: {task: "tests.tasks:Points", train: {steps: 40, global_batch_size: 16}}
space: {train.global_batch_size: [8], optimizer.lr: [0.01, 1.0]}
"""


def sweep_of(tmp_path: Path, text: str = BASE, *overrides: str) -> Sweep:
    """The sweep of a file with this text."""
    file = tmp_path / "trial-sweep.yaml"
    file.write_text(text)
    return read_sweep(str(file), list(overrides))


COUPLED = """
task: tests.app.training.test_batch_gather:Coupled
task_args: {kind: info_nce}
train: {steps: 3}
"""


def test_batches_of_a_loss_that_gathers_are_compared_at_one_evaluation_batch(
    tmp_path: Path,
) -> None:
    (tmp_path / "coupled.yaml").write_text(COUPLED)
    text = "experiment: coupled.yaml\nset: {workers: 1}\nspace: {train.global_batch_size: [4, 8]}\n"
    message = r"evaluated in batches of 4 to 8 samples.*write train.eval_batch_size under `set`"
    with pytest.raises(UserError, match=message):
        sweep_of(tmp_path, text).longest()
    assert sweep_of(tmp_path, text, "metric=train/loss").longest()
    assert sweep_of(tmp_path, text, "train.eval_batch_size=8").longest()
    other = text.replace("train.global_batch_size: [4, 8]", "optimizer.lr: [1.0e-3, 2.0e-3]")
    assert sweep_of(tmp_path, other).longest()


def test_overrides_and_a_grid_of_every_combination(tmp_path: Path) -> None:
    overrides = ["searcher=random", "trials=5", "train.steps=7", "scheduler=asha", "target=0.5"]
    overridden = sweep_of(tmp_path, BASE, *overrides)
    assert (overridden.searcher, overridden.count) == ("random", 5)
    assert (overridden.scheduler, overridden.target) == ("asha", 0.5)
    assert overridden.experiment.train.steps == 7 and overridden.longest() == 7
    long_grace = sweep_of(tmp_path, BASE, "scheduler={name: asha, grace_period: 500}")
    assert make_scheduler(long_grace, longest=64, report_every=4), "limited to the longest trial"
    sweep = sweep_of(tmp_path, BASE, "space.train.global_batch_size=[8, 16]")
    grid = [(8, 0.01), (16, 0.01), (8, 1.0), (16, 1.0)]
    assert sweep.points == [{BATCH: batch, RATE: rate} for batch, rate in grid]
    config = sweep.config(sweep.points[2], name="t", storage="here")
    assert (config.train.global_batch_size, config.optimizer.lr) == (8, 1.0)
    assert (config.run.name, config.run.storage, config.workers) == ("t", "here", "1")
    assert (sweep.name, sweep.count, config.tracking.log_model) == ("trial-sweep", 4, False)


def test_shipped_sweeps_are_valid() -> None:
    for name in ("mnist", "gpt", "digits"):
        assert read_sweep(f"experiments/sweep_{name}.yaml", []).count >= 12


BAD = [
    ("space: {}", "the search space is empty"),
    ("space: {optimizer.lr: []}", "nothing to try"),
    ("space: {optimizer.lr: 0.1}", "put it under `set`"),
    ("space: {optimizer.lr: {uniform: [1, 1]}}", "which is empty"),
    ("space: {optimizer.lr: {loguniform: [0, 1]}}", "begins above 0"),
    ("space: {optimizer.lr: {uniform: [1]}}", "uniform takes "),
    ("space: {optimizer.lr: {linspace: [1, 2, 1]}}", "has 1 values: write at least 2"),
    ("name: a/b", "use letters, digits"),
    ("set: [1]", "it must be a mapping"),
    ("set: {train.eval_separate: true}", "leave train.eval_separate out"),
    ("space: {optimizer.lr: {logunifrom: [1, 2]}}", "did you mean 'loguniform'"),
    ("space: {optimizer.lr: {uniform: [1, 2]}}", "cannot try all of"),
    ("space: {optimizer.lrr: [1, 2]}", "optimizer.lr"),
    ("space: {train.global_batch_size: [a, b]}", "but it must be a whole number"),
    ("searcher: optna", "did you mean 'optuna'"),
    ("trials: 5", "the grid has 2 points"),
    ("seed: -1", "0 or greater"),
    ("metric: loss", "must be eval/NAME"),
    ("metrik: eval/loss", "did you mean 'metric'"),
    ("experiment: null", "names no experiment"),
    ("target: low", "must be a number"),
    ("space: {train.steps: [1, 2], train.epochs: [1, 2]}", "contradict each other"),
    ("space: {run.name: [a, b]}", "which the sweep sets itself"),
    ("scheduler: {name: asha, reduction: 3}", "does not take these arguments"),
    ("scheduler: {name: asha, reduction_factor: 0}", "arguments: Reduction Factor not valid"),
    ("scheduler: {name: asha, grace_period: soon}", "does not take these arguments"),
    ("searcher: {name: optuna, colour: red}", "does not take these arguments"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_mistake_in_a_sweep_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    key = text.split(":")[0]
    lines = [line for line in BASE.strip().splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(UserError) as error:
        sweep = sweep_of(tmp_path, "\n".join([*lines, text]))
        make_searcher(sweep, [])
        make_scheduler(sweep, longest=64, report_every=4)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_searcher_begins_with_known_points_and_then_suggests_others(tmp_path: Path) -> None:
    known_points = [{BATCH: 8, RATE: 0.5}, {BATCH: 8, RATE: 0.25}]
    text = BASE.replace("[0.01, 1.0]", "{loguniform: [1.0e-3, 1.0]}")
    sweep = sweep_of(tmp_path, text, "searcher=optuna")
    searcher = make_searcher(sweep, known_points)
    space = {key: domain.for_tune() for key, domain in sweep.space.items()}

    def suggestions(searcher: Any) -> list[dict[str, Any]]:
        searcher.set_search_properties("eval/loss", "min", space)
        return [searcher.suggest(str(i)) for i in range(4)]

    points = suggestions(searcher)
    assert points[:2] == known_points and len({point[RATE] for point in points}) == 4
    other_sweep = sweep_of(tmp_path, text, "searcher=optuna", "seed=2")
    other_rates = {point[RATE] for point in suggestions(make_searcher(other_sweep, []))}
    assert other_rates.isdisjoint(point[RATE] for point in points[2:]), "another sweep draws others"


def report(step: int, loss: float, batch: int = 16, seconds: float = 0.1) -> dict[str, object]:
    """What a trial reports after a step."""
    return {
        "step": step,
        "samples": step * batch,
        "seconds": step * seconds,
        "metrics": {"eval/loss": loss},
        "steps": 40,
        "workers": 1,
    }


def test_a_report_does_not_wait_for_the_disk_and_none_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = mock.Mock(side_effect=os.fsync)
    monkeypatch.setattr(os, "fsync", synced)
    store = TrialStore(tmp_path / "s", "s", {})
    trial = Trial(0, "t0", {RATE: 0.5})
    store.save(trial)
    begun = synced.call_count
    assert begun > 0, "a trial that has begun is on the disk"
    for step in (1, 2, 3):
        store.add_report(trial, report(step, 1.0 / step))
    assert synced.call_count == begun

    def reports() -> list[dict[str, object]]:
        return TrialStore(tmp_path / "s", "s", {}).trials["t0"].reports  # type: ignore[return-value]

    assert reports() == [report(step, 1.0 / step) for step in (1, 2, 3)]
    lines = tmp_path / "s" / "t0" / REPORTS
    for length in range(lines.stat().st_size):  # a machine that fails may keep any part of it
        uncut = lines.read_bytes()
        lines.write_bytes(uncut[:length] + b"\0\0")
        left = reports()
        assert left == [report(step, 1.0 / step) for step in (1, 2, 3)][: len(left)]
        store.add_report(trial, report(9, 0.1))
        assert reports() == [*left, report(9, 0.1)], "the next report is whole"
        trial.reports.pop()
        lines.write_bytes(uncut)
    trial.status = "finished"
    before_the_end = lines.read_bytes()
    store.save(trial)
    assert synced.call_count > begun and not lines.exists()
    lines.write_bytes(before_the_end)  # the driver was killed between the two
    assert reports() == [report(step, 1.0 / step) for step in (1, 2, 3)]


LOSS = Search(space={})
NOISE = 96.0
LEAST = 150.0


def world(exponent: float = 0.5) -> list[Trial]:
    """Trials of a simulated problem whose best learning rate grows with the batch size.

    The steps to the target follow S(B), and grow when the learning rate is off its best value.
    """
    generator = random.Random(0)
    trials = []
    for batch in (16, 32, 64, 128, 256):
        best = 0.002 * batch**exponent
        for k in range(-3, 4):
            rate = best * 2 ** (k * 0.75 + 0.2)
            offset_factor = 1 + 0.12 * math.log2(rate / best) ** 2
            steps = LEAST * (1 + NOISE / batch) * offset_factor * math.exp(generator.gauss(0, 0.01))
            trial = Trial(len(trials), f"t{len(trials)}", {BATCH: batch, RATE: rate}, "finished")
            for step in range(40, 2401, 40):
                loss = max(2.0 * 0.1 ** (step / steps), 0.01 * offset_factor)  # 0.2 after `steps`
                trial.reports.append(report(step, loss, batch, 0.01 + batch * 1e-4))
            trials.append(trial)
    return trials


@pytest.mark.parametrize("exponent", [0.5, 1.0, 0.75])
def test_the_scaling_rule_also_holds_for_a_batch_size_that_was_not_tried(exponent: float) -> None:
    rates = analysis.best_rates(world(exponent), LOSS)
    assert len(rates) == 5 and not any(rate.edge for rate in rates)
    rule = analysis.scaling_rule(rates)
    assert rule is not None
    assert abs(rule.exponent - exponent) < 0.1
    assert rule.low < rule.exponent < rule.high
    assert rule.name == {0.5: "square root", 1.0: "linear", 0.75: "measured exponent"}[exponent]
    # Within a factor of √2 of the optimum, at a batch size that was not tried.
    assert 2**-0.5 < rule.rate(90) / (0.002 * 90**exponent) < 2**0.5
    two = analysis.scaling_rule(rates[:2])
    assert two is not None and two.name == "undecided", "two points are no evidence for a line"


def test_the_critical_batch_size_is_found() -> None:
    critical = analysis.critical_batch(analysis.fewest_steps(world(), LOSS, 0.2))
    assert critical is not None
    assert abs(critical.batch / NOISE - 1) < 0.15
    assert critical.low < NOISE < critical.high
    assert abs(critical.least_steps / LEAST - 1) < 0.15 and critical.interval.startswith("95 %: ")
    few = analysis.critical_batch({16: 100.0, 32: 52.0, 64: 45.0})
    assert few is not None and few.interval == "too few points for an interval"
    assert analysis.critical_batch({16: 100.0, 32: 50.0}) is None
    # Steps that grow with the batch size have no critical batch size.
    assert analysis.critical_batch({16: 100.0, 32: 200.0, 64: 400.0}) is None


@pytest.mark.parametrize("least", [0.0, 20.0, 40.0])
@pytest.mark.filterwarnings("error")
def test_steps_without_noise_print_no_warning_of_a_library(least: float) -> None:
    """With 0 they halve as the batch size doubles, with 40 they stay."""
    steps = {batch: least + (40.0 - least) * 8 / batch for batch in (8, 16, 32)}
    critical = analysis.critical_batch(steps)
    assert (critical is None) == (least != 20.0)


def test_steps_to_a_target_are_interpolated_and_may_be_never() -> None:
    trial = Trial(0, "t", {}, reports=[report(10, 1.0), report(20, 0.5), report(30, 0.4)])
    assert analysis.reached_at(trial, LOSS, 0.75) == pytest.approx(15)
    assert analysis.reached_at(trial, LOSS, 0.75, "seconds") == pytest.approx(1.5)
    assert analysis.reached_at(trial, LOSS, 0.3) is None
    assert analysis.reached_at(trial, Search(space={}, mode="max"), 0.9) == 10


def test_batch_size_and_learning_rate_are_recommended_by_workers(tmp_path: Path) -> None:
    """With more workers the fastest batch size grows, and its learning rate with it."""
    sweep = sweep_of(tmp_path, BASE, "target=0.2")
    store = TrialStore(tmp_path / "s", "s", {})
    store.trials = {trial.name: trial for trial in world()}
    for trial, dollars in zip(store.trials.values(), (1.5, 2.0)):
        (tmp_path / "s" / trial.name).mkdir(parents=True)
        (tmp_path / "s" / trial.name / "cost.json").write_text(json.dumps({"total": dollars}))
    answer = work_out(sweep, store)
    assert answer.figures["cost/dollars"] == 3.5, "what its runs have counted"
    assert answer.time is not None and answer.time.fixed == pytest.approx(0.01, rel=1e-3)
    rows = {row["workers"]: row for row in answer.by_workers}
    assert list(rows) == [1, 2, 4, 8]
    for workers, row in rows.items():
        seconds_to_target = {
            batch: LEAST * (1 + NOISE / batch) * (0.01 + batch / workers * 1e-4)
            for batch in (16, 24, 32, 44, 64, 92, 128, 180, 256)
        }
        assert seconds_to_target[row["batch size"]] < 1.05 * min(seconds_to_target.values())
        assert row["batch size"] % workers == 0
        assert row["seconds to the target"] == pytest.approx(
            seconds_to_target[row["batch size"]], rel=0.1
        )
        assert row["learning rate"] == pytest.approx(0.002 * row["batch size"] ** 0.5, rel=0.2)
    assert 1 < rows[2]["times faster"] < rows[8]["times faster"] < 8
    assert any(line.startswith("on 8 ") and "predicted" in line for line in answer.sentences)
    assert answer.rule is not None and answer.rule.name != "undecided"
    undecided = replace(answer, rule=replace(answer.rule, low=-math.inf, high=math.inf))
    assert "undecided" in _basis_in_words(undecided)
    assert "undecided" not in _basis_in_words(answer)
    soonest = answer.soonest
    times = {
        batch: LEAST * (1 + NOISE / batch) * (0.01 + batch * 1e-4)
        for batch in (16, 32, 64, 128, 256)
    }
    assert soonest is not None and times[soonest["values"][BATCH]] <= 1.1 * min(times.values())
    next_config = next_run(sweep, store, answer)
    assert next_config.train.global_batch_size == soonest["values"][BATCH]
    assert next_config.optimizer.lr == soonest["values"][RATE]
    assert next_config.run.name == f"{sweep.name}-next"
    assert next_config.tracking.log_model == sweep.experiment.tracking.log_model
    missed = work_out(sweep_of(tmp_path, BASE, "target=0.001"), store)
    assert "was not reached; the nearest is 0.01" in " ".join(missed.sentences)
    sections = {section["title"]: section for section in content(sweep, store, answer)["sections"]}
    assert len(sections["What to use, by workers"]["tables"][0]["rows"]) == 4
    drawings, captions = zip(*sections["Plots"]["plots"])
    assert all(map(ElementTree.fromstring, drawings)), "they are valid XML"
    for words in ("best learning rate", "critical batch", "Samples per second"):
        assert any(words in caption for caption in captions)


def branch_trials(seeds: int) -> list[Trial]:
    """Branches of which those with a batch of 32 are worse; the best rate is 0.02."""
    noise = random.Random(3)
    trials = []
    for batch in (8, 16, 32):
        for rate in (0.01, 0.02, 0.04):
            for seed in range(seeds):
                loss = 1 + 0.05 * (batch == 32) + 0.1 * math.log(rate / 0.02) ** 2
                loss += 0.002 * noise.gauss(0, 1)
                values = {BATCH: batch, RATE: rate, "train.seed": seed}
                last = {
                    "step": 640 // batch,
                    "samples": 640,
                    "seconds": 2.0,
                    "metrics": {"eval/loss": loss},
                    "workers": 1,
                    "steps": 640 // batch,
                }
                name = f"t{len(trials):03d}"
                trials.append(Trial(len(trials), name, values, "finished", reports=[last]))
    return trials


def sweep_of_forks(folder: Path) -> Sweep:
    return replace(
        sweep_of(folder, BASE.replace("[8]", "[8, 16, 32]")),
        fork=f"{folder}/base/checkpoints/step-00000004-abc",
        samples=640,
        origin_step=4,
        origin_samples=64,
    )


@pytest.mark.parametrize("seeds", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_sweep_of_forks_answers_which_batch_is_best_now(tmp_path: Path, seeds: int) -> None:
    sweep = sweep_of_forks(tmp_path)
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    store.trials = {trial.name: trial for trial in branch_trials(seeds)}
    answer = work_out(sweep, store)
    words = "\n".join(answer.sentences)
    sections = {section["title"]: section for section in content(sweep, store, answer)["sections"]}
    assert [row["batch size"] for row in sections["The batch now"]["tables"][0]["rows"]] == [
        8,
        16,
        32,
    ]
    assert [gain.workers for gain in answer.gains] == [1, 2, 4, 8]
    assert "on 1      batch size" in words and "of training, predicted" in words
    if seeds == 1:
        assert "critical  undecided: one seed shows no noise; write train.seed: [0, 1, 2]" in words
        return
    assert answer.branches is not None and answer.branches.critical is not None
    assert answer.branches.is_decided
    assert 16 <= answer.branches.critical.value < 20
    assert re.search(r"^critical  batch size \d+ \(80 %: \d+ to \d+\)$", words, re.MULTILINE)
    assert "rates     best 0.0" in words and "best learning rate ∝ batch^γ" in words
    assert answer.figures["answer/critical_batch"] == answer.branches.critical.value
    on_one = answer.gains[0]
    # The run has 40 steps of 16, of which 4 are taken.
    assert on_one.steps == (40 * 16 - 64) // on_one.batch
    assert on_one.batch in (8, 16)


@pytest.mark.slow
def test_a_sweep_of_forks_says_which_rates_leave_its_critical_batch_open(tmp_path: Path) -> None:
    sweep = sweep_of_forks(tmp_path)
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    below_the_best = [trial for trial in branch_trials(3) if trial.values[RATE] < 0.04]
    store.trials = {trial.name: trial for trial in below_the_best}
    words = "\n".join(work_out(sweep, store).sentences)
    assert re.search(
        r"^critical  undecided: batch size \d+ \(80 %: 8 to 32\), or more than was tried; "
        r"rates beyond those at batch size 8, 16, 32 would decide$",
        words,
        re.MULTILINE,
    ), words


def test_terminal_and_page_show_the_best_and_the_last_value(tmp_path: Path) -> None:
    """One trial overfits and one still learns, so that each is best at another step."""
    sweep = sweep_of(tmp_path, BASE)
    store = TrialStore(tmp_path / "s", sweep.name, sweep.identity())
    for index, losses in enumerate(([0.9, 0.3, 0.7], [0.9, 0.6, 0.5])):
        reports = [
            {
                "step": 10 * number,
                "samples": 160 * number,
                "seconds": number,
                "metrics": {"eval/loss": loss},
                "workers": 1,
                "steps": 30,
            }
            for number, loss in enumerate(losses, 1)
        ]
        values = {BATCH: 16, RATE: 0.01 * (index + 1)}
        store.trials[f"t{index}"] = Trial(index, f"t{index}", values, "finished", reports=reports)
    answer = work_out(sweep, store)
    (line,) = [line for line in answer.sentences if line.startswith("best ")]
    assert "loss 0.3: " in line
    assert line.endswith("(t0, best of its 3 evaluations, at step 20; the last gave 0.7)")
    page = content(sweep, store, answer)
    assert page["facts"][0] == ("best eval/loss", "0.3", "t0, at step 20")
    (section,) = [section for section in page["sections"] if section["title"] == "Trials"]
    names = ("trial", "best eval/loss", "at step", "last eval/loss", "steps")
    columns = [tuple(row[name] for name in names) for row in section["tables"][0]["rows"]]
    assert columns == [("t0", 0.3, 20, 0.7, 30), ("t1", 0.5, 30, 0.5, 30)]


def test_seeds_are_averaged_before_rates_are_compared() -> None:
    """One lucky seed at a bad rate does not make it the best."""
    losses_by_rate = {0.01: (0.5, 0.5), 0.1: (0.4, 0.42), 1.0: (0.1, 9.0)}
    trials = []
    for rate, losses in losses_by_rate.items():
        for seed, loss in enumerate(losses):
            index = len(trials)
            values = {BATCH: 32, RATE: rate, "train.seed": seed}
            reports = [report(10, loss)]
            trials.append(Trial(index, f"t{index}", values, "finished", reports=reports))
    best = analysis.best_rates(trials, LOSS)
    assert best[0].value == pytest.approx(0.41) and not best[0].edge


# --- one trial ------------------------------------------------------------------------------------

TEXT = """
experiment:
  task: "tests.tasks:Points"
  train: {steps: 40, global_batch_size: 16}
  launcher: local
  strategy: single
set: {tracking.system_metrics_every: 0}
space: {optimizer.lr: [0.01]}
reports: 4
"""


def context(tmp_path: Path, *overrides: str) -> TrialContext:
    """What the trials of a sweep share."""
    return TrialContext(
        sweep=sweep_of(tmp_path, TEXT, *overrides),
        folder=tmp_path,
        tracking=Settings(f"sqlite:///{tmp_path}/mlflow.db", "trireme", None),
        uses_gpus=False,
        cwd=os.getcwd(),
        command=("trireme", "sweep"),
    )


def trial(shared: TrialContext, index: int, record: Trial | None = None, **values: Any) -> TrialRun:
    """A trial's run with a learning rate of 0.01, but for these values."""
    return TrialRun(shared, f"t{index:03d}", values={"optimizer.lr": 0.01, **values}, record=record)


def results(trial: TrialRun, until: int = 10**9) -> list[dict[str, Any]]:
    """The results of a trial up to its end, or to a step."""
    taken = [trial.next_result()]
    while not taken[-1].get("done") and taken[-1]["step"] < until:
        taken.append(trial.next_result())
    return taken


def test_a_trial_reports_every_evaluation_and_ends(tmp_path: Path) -> None:
    shared = context(tmp_path)
    trial_results = results(trial(shared, 0))
    assert [result["step"] for result in trial_results] == [10, 20, 30, 40, 40]
    assert trial_results[-1]["status"] == "finished"
    reports = [result["report"] for result in trial_results]
    for report in reports:
        assert {"eval/loss", "eval/accuracy", "train/loss"} <= set(report["metrics"])
    seconds = [report["seconds"] for report in reports]
    assert seconds == sorted(seconds) and reports[0]["samples"] == 160
    spool = tmp_path / "t000" / "tracking"
    assert (spool / "start.json").exists()
    assert not (spool / "writer.log").exists(), "the sweep's writer delivers it"
    states = [(result["step"], result.get("status")) for result in results(trial(shared, 0))]
    assert states == [(40, None), (40, "finished")], "it is not trained again"
    record = Trial(0, "t000", {}, "finished", reports=reports[:4])
    recorded = results(trial(shared, 0, record))
    expected = [(result["step"], result["eval/loss"]) for result in trial_results]
    assert [(result["step"], result["eval/loss"]) for result in recorded] == expected


def test_a_stopped_trial_says_why_and_continues(tmp_path: Path) -> None:
    shared = context(tmp_path, "task_args.step_seconds=0.02", "train.steps=50", "reports=10")
    first = trial(shared, 0)
    last_result = results(first, until=20)[-1]
    first.stop(REACHED)
    assert first.last_taken == last_result["report"]
    assert first.last["step"] >= 20, "not before the last result that Tune has taken"
    end = json.loads((tmp_path / "t000" / "tracking" / "events.jsonl").read_text().split("\n")[-2])
    assert end["type"] == "finish"
    assert end["status"] == "FINISHED"
    assert end["message"].startswith(REACHED)
    stopped = committed(tmp_path / "t000")[-1]
    assert 20 <= stopped < 50
    (tmp_path / STOP_FILE).touch()
    # No trial starts while the sweep is being stopped.
    assert results(trial(shared, 0))[-1]["status"] == "stopped"
    (tmp_path / STOP_FILE).unlink()
    assert results(trial(shared, 0))[-1]["status"] == "finished"
    log = (tmp_path / "t000" / "logs" / "driver.log").read_text()
    assert f"continuing after step {stopped}" in log


def test_a_trial_that_does_not_save_in_time_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = queue.Queue[int]()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr("experiments.sweep.trial.LOOK_SECONDS", 0.01)
    trains = threading.Event()
    may_end = threading.Event()

    def train(_: TrialRun) -> None:
        trains.set()
        may_end.wait(60)

    monkeypatch.setattr(TrialRun, "_train", train)
    shared = context(tmp_path)
    hanging = trial(shared, 0)
    waiting = threading.Thread(target=results, args=(hanging,), daemon=True)
    waiting.start()
    # A trial that sees the file before it trains would end at once.
    assert trains.wait(60)
    (tmp_path / STOP_FILE).touch()  # of a person, who sets no limit
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    (tmp_path / STOP_FILE).write_text("0.050")
    assert ended.get(timeout=30) == EXIT_STOPPED
    may_end.set()
    waiting.join()
    (tmp_path / STOP_FILE).unlink()
    saving = trial(shared, 0)
    assert results(saving)[-1]["status"] == "finished"
    (tmp_path / STOP_FILE).write_text("0.000")
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)


def test_a_process_whose_device_has_failed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune reuses a trial's process for the next one (`reuse_actors`), unless it has ended."""
    ended = queue.Queue[int]()
    monkeypatch.setattr(os, "_exit", ended.put)
    shared = context(tmp_path)
    for message, codes in (
        ("CUDA error: device-side assert triggered", [1]),
        ("CUDA out of memory.", []),
    ):
        monkeypatch.setattr(TrialRun, "_train", mock.Mock(side_effect=RuntimeError(message)))
        assert results(trial(shared, 0))[-1]["status"] == "failed"
        assert [ended.get() for _ in codes] == codes and ended.empty()


def test_a_trial_that_fails_is_a_result(tmp_path: Path) -> None:
    last = results(trial(context(tmp_path), 0, task="tests.tasks:Raises"))[-1]
    assert last["status"] == "failed"
    assert "a bug of the user's" in last["message"]
    assert last["eval/loss"] == 1e30
    log = (tmp_path / "t000" / "logs" / "driver.log").read_text()
    assert "in loss" in log, "the log has the traceback"
    misspelt = context(tmp_path, "metric=eval/los", "task_args.step_seconds=0.02")
    last = results(trial(misspelt, 1))[-1]
    assert last["status"] == "wrong metric" and "eval/loss" in last["message"]
    threads = [thread.name for thread in threading.enumerate()]
    assert "training" not in threads, "no thread is left that trains beside the next trial"
