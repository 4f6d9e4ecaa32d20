"""Evaluation beside training, from the command line: whatever is killed, each step has one result.

They are those of an undisturbed run that evaluates in training, to the last bit.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from app.config.io import load_config
from tests import running
from tests.app.kit import logged, training_of
from tests.running import LONG, Lines, committed, curve, start, trireme, wait_until

STEPS = 60
COMMON = [
    "task=tests.tasks:Points",
    f"train.steps={STEPS}",
    "train.global_batch_size=16",
    "train.eval_every=10",
    "train.ema_decay=0.9",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=1",
    "checkpoint.metric=ema_loss",
    "tracking.log_model=false",
    "workers=1",
]
SEPARATE = [*COMMON, "train.eval_separate=true", "launcher=actors"]


def results(folder: Path) -> dict[int, float]:
    """The averaged loss of each evaluation so far, by step."""
    file = folder / "checkpoints" / "evaluations.json"
    if not file.exists():
        return {}
    entries = json.loads(file.read_text())["results"]
    return {entry["step"]: entry["metrics"]["ema_loss"] for entry in entries}


def evaluator(folder: Path) -> list[psutil.Process]:
    """The process that evaluates at this moment."""
    log = str(folder / "logs" / "evaluation.log")
    return [process for process in psutil.process_iter() if running.writes(process, log)]


@pytest.mark.slow
@pytest.mark.parametrize("kills_trainer", [False, True])
def test_evaluations_survive_kills_and_each_step_has_one_result(
    tmp_path: Path, ray_environment: dict[str, str], kills_trainer: bool
) -> None:
    """The worker that evaluates is killed, perhaps the one that trains, and then the driver."""
    slow = tmp_path / "slow"
    hold = tmp_path / "hold"
    folder = tmp_path / "run"
    arguments = ["train", *SEPARATE, "run.name=run", f"run.storage={tmp_path}"]
    arguments += ["task=tests.tasks:Held", f"task_args={{slow_while: {slow}, hold: {hold}}}"]
    arguments += ["task_args.step_seconds=0.1"]
    slow.touch()
    hold.touch()
    process = start(arguments, env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: evaluator(folder))[0].send_signal(signal.SIGKILL)
    lines.when(f"step 10 died (see {folder}/logs/evaluation.log); evaluating it again")
    wait_until(lambda: committed(folder) and max(committed(folder)) >= 20)
    if kills_trainer:
        running.disturb(folder, 0, signal.SIGKILL)
        lines.when("starting again from the last checkpoint")
    assert not results(folder) and {10, 20} <= {*committed(folder)}, "both wait"
    hold.unlink()
    wait_until(lambda: results(folder))
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    slow.unlink()
    outcome = trireme(*arguments, "--json", env=ray_environment).expect().json

    config = load_config([], [*COMMON, "run.name=truth"])
    undisturbed, events = training_of(config, tmp_path / "truth")
    undisturbed.run()
    assert undisturbed.average is not None
    with undisturbed.average.in_place():
        weights = undisturbed.parallel.full_model_state()
    assert running.same_bits(running.weights(folder), weights)
    for metric in ("eval/loss", "eval/ema_loss", "eval/ema_accuracy"):
        expected = {event.step: event.values[metric] for event in logged(events, metric)}
        assert sorted(expected) == [10, 20, 30, 40, 50, 60]
        assert curve(tmp_path, "run", metric) == expected
        assert outcome["summary"]["metrics"][metric] == expected[STEPS]
    by_loss = results(folder)
    best = min(by_loss, key=lambda step: by_loss[step])
    assert committed(folder) == sorted({best, STEPS})


@pytest.mark.slow
def test_patience_ends_training_by_late_results(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    arguments = ["train", *SEPARATE, "run.name=run", f"run.storage={tmp_path}", "train.steps=5000"]
    arguments += ["optimizer.lr=0.0", "train.patience=2", "task_args.step_seconds=0.05"]
    ended = trireme(*arguments, "--json", env=ray_environment).expect()
    last = ended.json["summary"]["step"]
    assert 30 <= last < 5000
    assert f"training ends early, after step {last:,}" in ended.err
    assert list(results(tmp_path / "run")) == sorted({*range(10, last, 10), last})
    assert (tmp_path / "run" / "model" / "weights.pt").exists()


@pytest.mark.slow
def test_a_failing_evaluation_names_the_persons_line_and_ends_the_run(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    arguments = ["train", *SEPARATE, "run.name=run", f"run.storage={tmp_path}", "train.steps=5000"]
    arguments += ["task=tests.tasks:Held", "task_args={fails: true, step_seconds: 0.05}"]
    ended = trireme(*arguments, env=ray_environment).expect(1)
    assert 'the checkpoint of step 10 failed: KeyError: "a bug of the user\'s"' in ended.err
    assert "tests/tasks.py" in ended.err and "raise KeyError" in ended.err
    assert "Traceback" not in ended.err
    folder = tmp_path / "run"
    assert 10 in committed(folder) and not results(folder), "it waits for the next start"
