"""Kill anything, run the same command again: the curve continues in the same MLflow run, to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import (
    POINTS,
    committed,
    curve,
    end_tree,
    finish,
    mlflow_run,
    mlflow_status,
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


def command(storage: Path, name: str, *more: str) -> list[str]:
    return ["train", *SLOW, f"run.name={name}", f"run.storage={storage}", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Weights and curve of runs that nobody stopped, by number of workers."""
    storage = tmp_path_factory.mktemp("undisturbed")
    fast = "task_args.step_seconds=0"
    one = trireme(*command(storage, "one", "launcher=local", fast))
    two = torchrun(*command(storage, "two", fast))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    return {
        n: (weights(storage / name), curve(storage, name), curve(storage, name, "eval/loss"))
        for n, name in ((1, "one"), (2, "two"))
    }


def assert_unbroken(storage: Path, name: str, truth: Any, *, status: str = "FINISHED") -> None:
    expected_weights, losses, evaluation = truth
    assert same_bits(weights(storage / name), expected_weights)
    assert curve(storage, name) == losses
    assert curve(storage, name, "eval/loss") == evaluation
    assert mlflow_run(storage, name).info.status == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_process_saves_and_continues(tmp_path: Path, undisturbed: dict[int, Any], number: int) -> None:
    arguments = command(tmp_path, "run", "launcher=local")
    process = start(arguments)
    wait_until(lambda: committed(tmp_path / "run"))
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == 130, stopped.err
    assert "run the same command again" in stopped.err
    at = committed(tmp_path / "run")[-1]
    assert at % 10 or at < STEPS, "it saved where it was asked to stop"
    assert mlflow_run(tmp_path, "run").info.status == "KILLED"
    again = trireme(*arguments)
    assert again.code == 0, again.err
    assert f"continuing after step {at}" in again.out
    assert_unbroken(tmp_path, "run", undisturbed[1])


def test_a_killed_process_continues(tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    arguments = command(tmp_path, "run", "launcher=local")
    process = start(arguments)
    wait_until(lambda: len(committed(tmp_path / "run")) >= 2)
    process.kill()
    finish(process)
    wait_until(lambda: mlflow_status(tmp_path, "run") == "KILLED")
    again = trireme(*arguments)
    assert again.code == 0, again.err
    assert_unbroken(tmp_path, "run", undisturbed[1])


def test_a_killed_ray_worker_is_replaced_without_the_command_being_run_again(
    tmp_path: Path, undisturbed: dict[int, Any], ray_environment: dict[str, str]
) -> None:
    process = start(command(tmp_path, "run", "workers=2"), env=ray_environment)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    victims = [p for p in psutil.process_iter(["cmdline"]) if _is_training(p, tmp_path)]
    assert len(victims) == 2
    victims[1].kill()
    ended = finish(process)
    assert ended.code == 0, ended.err
    assert "died" in ended.out
    assert_unbroken(tmp_path, "run", undisturbed[2])


@pytest.mark.slow
def test_a_killed_driver_continues_in_ray(
    tmp_path: Path, undisturbed: dict[int, Any], ray_environment: dict[str, str]
) -> None:
    arguments = command(tmp_path, "run", "workers=2")
    process = start(arguments, env=ray_environment)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    process.kill()
    finish(process)
    again = trireme(*arguments, env=ray_environment)
    assert again.code == 0, again.err
    assert_unbroken(tmp_path, "run", undisturbed[2])


def test_all_of_ray_killed_with_its_driver(tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    """The driver started Ray itself; every process of both is killed at once."""
    arguments = command(tmp_path, "run", "workers=2", "resources_per_worker.CPU=0.5")
    process = start(arguments)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    end_tree(process.pid)
    finish(process)
    with ray_head() as address:
        from tests.running import environment

        again = trireme(*arguments, env=environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled"))
    assert again.code == 0, again.err
    assert_unbroken(tmp_path, "run", undisturbed[2])


def test_ctrl_c_in_ray(tmp_path: Path, undisturbed: dict[int, Any], ray_environment: dict[str, str]) -> None:
    arguments = command(tmp_path, "run", "workers=2")
    process = start(arguments, env=ray_environment)
    wait_until(lambda: committed(tmp_path / "run"), 90)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    again = trireme(*arguments, env=ray_environment)
    assert again.code == 0, again.err
    assert_unbroken(tmp_path, "run", undisturbed[2])


def test_a_finished_run_says_so_and_can_be_trained_further(tmp_path: Path) -> None:
    arguments = command(tmp_path, "run", "launcher=local", "task_args.step_seconds=0")
    assert trireme(*arguments).code == 0
    second = trireme(*arguments)
    assert second.code == 0
    assert "has finished already" in second.out
    further = trireme(*arguments, "train.steps=70")
    assert further.code == 0
    assert max(curve(tmp_path, "run")) == 70
    anew = trireme(*arguments, "train.steps=70", "--again", "--json")
    assert anew.json["run"] == "run-2"


def test_two_drivers_cannot_train_one_run(tmp_path: Path) -> None:
    arguments = command(tmp_path, "run", "launcher=local", "task_args.step_seconds=0.2")  # longer than a start takes
    process = start(arguments)
    wait_until(lambda: committed(tmp_path / "run"))
    second = trireme(*arguments)
    assert second.code == 2
    assert f"process {process.pid}" in second.err
    assert finish(process).code == 0


def _is_training(process: psutil.Process, storage: Path) -> bool:
    """Whether a Ray worker has this run's log open."""
    try:
        if "ray::" not in " ".join(process.info["cmdline"] or []):
            return False
        logs = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)]
    except (psutil.Error, OSError):
        return False
    return any(log.startswith(str(storage)) for log in logs)
