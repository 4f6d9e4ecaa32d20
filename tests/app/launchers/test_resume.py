"""Kill anything, run the same command again: the curve continues in the same MLflow run, to the last bit."""

from __future__ import annotations

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
    POINTS,
    Lines,
    committed,
    curve,
    disturb,
    end_tree,
    environment,
    finish,
    mlflow_run,
    ray_head,
    same_bits,
    start,
    torchrun,
    trireme,
    wait_until,
    weights,
)

pytestmark = pytest.mark.alone

STEPS = 60
SLOW = [*POINTS, f"train.steps={STEPS}", "task_args.step_seconds=0.05"]
SLOW += ["checkpoint.every_steps=10", "train.log_every=1"]


def command(storage: Path, *more: str) -> list[str]:
    return ["train", *SLOW, "run.name=run", f"run.storage={storage}", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The storages of runs that were not stopped: of one worker, and of two."""
    storages = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    one = trireme(*command(storages["one"], "launcher=local", "task_args.step_seconds=0"))
    two = torchrun(*command(storages["two"], "task_args.step_seconds=0"))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    return storages


def assert_unbroken(storage: Path, truth: Path) -> None:
    assert same_bits(weights(storage / "run"), weights(truth / "run"))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth, "run", metric)
    assert mlflow_run(storage, "run").info.status == "FINISHED"


IN_RAY = ["workers=2", "strategy=ddp"]


@pytest.mark.parametrize(
    ("more", "number"),
    [
        (["launcher=local"], signal.SIGTERM),
        (["launcher=local"], signal.SIGKILL),
        ([*IN_RAY, "launcher=ray"], signal.SIGINT),
        pytest.param([*IN_RAY, "launcher=ray"], signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param([*IN_RAY, "launcher=actors"], signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_the_command_stopped_or_killed_and_run_again(
    tmp_path: Path, undisturbed: dict[str, Path], ray_environment: dict[str, str], more: list[str], number: int
) -> None:
    arguments = command(tmp_path, *more)
    process = start(arguments, env=ray_environment)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    process.send_signal(number)
    stopped = finish(process)
    at = committed(tmp_path / "run")[-1]
    if number != signal.SIGKILL:
        assert stopped.code == 130 and "run the same command again" in stopped.err, stopped.err
        assert at < STEPS and f"stopped after step {at}" in stopped.err, "it saved where it was asked to stop"
        assert mlflow_run(tmp_path, "run").info.status == "KILLED"
    again = trireme(*arguments, env=ray_environment)
    said = "continuing after step" if number == signal.SIGKILL else f"continuing after step {at}"
    assert again.code == 0 and said in again.out, again.out + again.err
    assert_unbroken(tmp_path, undisturbed["one" if "launcher=local" in more else "two"])


def test_a_killed_ray_worker_is_replaced_without_the_command_being_run_again(
    tmp_path: Path, undisturbed: dict[str, Path], ray_environment: dict[str, str]
) -> None:
    process = start(command(tmp_path, *IN_RAY), env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    disturb(tmp_path / "run", 1, signal.SIGKILL)
    assert process.wait(120) == 0 and "died" in lines.text, lines.text
    assert_unbroken(tmp_path, undisturbed["two"])


@pytest.mark.slow
def test_all_of_ray_killed_with_its_driver(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """The driver started Ray itself; every process of both is killed at once."""
    arguments = command(tmp_path, *IN_RAY, "resources_per_worker.CPU=0.5")
    process = start(arguments)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    end_tree(process.pid)
    finish(process)
    with ray_head() as address:
        again = trireme(*arguments, env=environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled"))
    assert again.code == 0, again.err
    assert_unbroken(tmp_path, undisturbed["two"])


def test_a_run_is_trained_by_one_command_and_once_finished_trained_further(tmp_path: Path) -> None:
    quick = ["launcher=local", "task_args.step_seconds=0", "train.steps=6", "tracking.enabled=false"]

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
