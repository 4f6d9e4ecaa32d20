"""Kill anything, run the same command again: the curve continues in the same MLflow run, to the last bit."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.cli import group
from app.config_io import load_config
from app.run.manifest import Run
from tests.running import (
    LONG,
    POINTS,
    Lines,
    committed,
    curve,
    disturb,
    end_tree,
    mlflow_run,
    same_bits,
    start,
    start_soon,
    torchrun,
    trireme,
    wait_until,
    weights,
)

STEPS = 60
SLOW = [*POINTS, f"train.steps={STEPS}", "task_args.step_seconds=0.1", "checkpoint.every_steps=5", "train.log_every=1"]
IN_RAY = ["workers=2", "strategy=ddp"]
OWN_RAY = "resources_per_worker.CPU=0.5"  # which the driver starts: this machine may have two cores


def command(storage: Path, *more: str) -> list[str]:
    """A run whose steps are slow as long as there is a file `slow` in its storage."""
    pace = f"task_args.slow_while={storage}/slow"
    return ["train", *SLOW, pace, "run.name=run", f"run.storage={storage}", *more]


@pytest.fixture(scope="session")  # other modules' tests come between those of this one
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The storages of runs that were not stopped: of one worker, and of two under torchrun."""
    storages = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    one = trireme(*command(storages["one"], "launcher=local"))
    two = torchrun(*command(storages["two"]))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    return storages


def assert_unbroken(storage: Path, truth: Path) -> None:
    assert same_bits(weights(storage / "run"), weights(truth / "run"))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth, "run", metric)
    found = mlflow_run(storage, "run")
    assert found.info.status == "FINISHED"
    assert sorted(each.tags[0].value for each in found.inputs.dataset_inputs) == ["evaluation", "training"]


@pytest.mark.parametrize(
    ("more", "kill_worker", "number"),
    [
        (["launcher=local"], False, signal.SIGKILL),
        ([*IN_RAY, "launcher=ray"], True, signal.SIGINT),
        pytest.param(["launcher=local"], False, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param([*IN_RAY, "launcher=ray"], False, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param([*IN_RAY, "launcher=actors"], True, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param([*IN_RAY, OWN_RAY], False, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_killed_then_the_command_and_run_again(
    tmp_path: Path,
    undisturbed: dict[str, Path],
    ray_environment: dict[str, str],
    more: list[str],
    kill_worker: bool,
    number: int,
) -> None:
    """To the last bit as the undisturbed run, which for two workers is one of another launcher. A Ray of the driver's
    own is killed with it, every process at once, and the run goes on in another."""
    arguments, folder = command(tmp_path, *more), tmp_path / "run"
    (tmp_path / "slow").touch()
    process = start(arguments) if OWN_RAY in more else start_soon(arguments, env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(folder))
    if kill_worker:
        disturb(folder, 1, signal.SIGKILL)
        lines.when("starting again from the last checkpoint")
        before = committed(folder)[-1]
        wait_until(lambda: committed(folder)[-1] > before)
    end_tree(process.pid) if OWN_RAY in more else process.send_signal(number)
    code, at = process.wait(LONG), committed(folder)[-1]
    if number != signal.SIGKILL:
        assert code == 130 and at < STEPS, lines.text
        lines.when(f"stopped after step {at}: run the same command again")
        assert mlflow_run(tmp_path, "run").info.status == "KILLED"
    assert not kill_worker or "died after step" in lines.text, lines.text
    (tmp_path / "slow").unlink()
    again = trireme(*arguments, env=ray_environment)
    said = "continuing after step" if number == signal.SIGKILL else f"continuing after step {at}"
    assert again.code == 0 and said in again.out, again.out + again.err
    assert_unbroken(tmp_path, undisturbed["one" if "launcher=local" in more else "two"])


def test_a_run_is_trained_by_one_command_and_once_finished_trained_further(tmp_path: Path) -> None:
    quick = ["launcher=local", "train.steps=6", "tracking.enabled=false"]

    def train(*more: str) -> Any:
        return CliRunner().invoke(group, [*command(tmp_path, *quick, *more), "--json"])

    run = Run(load_config([], command(tmp_path, *quick)[1:]))
    run.open(run.config, 6)
    second = train()
    assert second.exit_code == 2 and f"process {os.getpid()}" in second.stderr
    run.end("stopped")
    outcomes = [json.loads(train(*more).stdout) for more in ([], [], ["train.steps=8"], ["train.steps=5", "--again"])]
    assert [each["status"] for each in outcomes] == ["finished", "already_finished", "finished", "finished"]
    assert outcomes[2]["summary"]["resumed_from"] == 6 and outcomes[2]["summary"]["step"] == 8
    assert [each["run"] for each in outcomes[2:]] == ["run", "run-2"]


@pytest.mark.slow
def test_starts_that_are_taken_over_end_and_say_so(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """The first one while it trains, the second one while it is stopped."""
    arguments = command(tmp_path, "launcher=local", "task_args.step_seconds=0.5")
    (tmp_path / "slow").touch()
    before = start_soon(arguments)
    lines = Lines(before)
    wait_until(lambda: committed(tmp_path / "run"))
    for stopped in (False, True):
        if stopped:
            before.send_signal(signal.SIGSTOP)
        after = start_soon([*arguments, "--take-over"])
        later = Lines(after)
        later.when(f"taking the run over from process {before.pid} on ")
        later.when("continuing after step")
        if stopped:
            before.send_signal(signal.SIGCONT)
        assert before.wait(LONG) == 1 and f"was taken over by process {after.pid} on " in lines.text, lines.text
        before, lines = after, later
    (tmp_path / "slow").unlink()
    assert before.wait(LONG) == 0, lines.text
    assert_unbroken(tmp_path, undisturbed["one"])


@pytest.mark.slow
def test_a_killed_worker_of_a_split_sequence_is_replaced(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """To the last bit as the undisturbed run: each of the two workers has half of every sequence."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
    text = f"data: {tmp_path}/text.txt, sequence_length: 256, d_model: 64, n_layers: 2, n_heads: 2"
    given = ["task=language_modelling", f"task_args={{{text}}}", "train.steps=200", "train.global_batch_size=4"]
    given += ["checkpoint.every_steps=20", "strategy=context", "parallel.cp=2", "workers=2", f"run.storage={tmp_path}"]
    truth = trireme("train", *given, "run.name=truth", "launcher=actors", env=ray_environment)
    assert truth.code == 0, truth.out + truth.err
    process = start(["train", *given, "run.name=run", "launcher=actors"], env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(tmp_path / "run"))
    disturb(tmp_path / "run", 1, signal.SIGKILL)
    lines.when("starting again from the last checkpoint")
    assert process.wait(LONG) == 0, lines.text
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "truth"))
