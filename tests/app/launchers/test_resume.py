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
from tests.app.launchers.conftest import LOCAL, STEPS, TWO, command, of_experts
from tests.running import (
    LONG,
    Ended,
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

RAY, ACTORS = ([*TWO, "workers=2", f"launcher={name}"] for name in ("ray", "actors"))
OWN_RAY = [*TWO, "workers=2", "resources_per_worker.CPU=0.5"]  # the driver starts it: this machine may have two cores
EXPERTS = [[*RAY, *of_experts(name)] for name in ("ddp", "fsdp")]
SLOW = pytest.mark.slow


def assert_unbroken(storage: Path, truth: tuple[Path, Ended]) -> None:
    assert truth[1].code == 0, truth[1].err
    assert same_bits(weights(storage / "run"), weights(truth[0] / "run"))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth[0], "run", metric)
    found = mlflow_run(storage, "run")
    assert found.info.status == "FINISHED"
    assert sorted(each.tags[0].value for each in found.inputs.dataset_inputs) == ["evaluation", "training"]


@pytest.mark.parametrize(
    ("more", "kill_worker", "number"),
    [
        (LOCAL, False, signal.SIGKILL),
        (RAY, True, signal.SIGINT),
        pytest.param(LOCAL, False, signal.SIGTERM, marks=SLOW),
        pytest.param(RAY, False, signal.SIGKILL, marks=SLOW),
        pytest.param(ACTORS, True, signal.SIGINT, marks=SLOW),
        pytest.param(OWN_RAY, False, signal.SIGKILL, marks=SLOW),
        *(pytest.param(more, True, signal.SIGINT, marks=SLOW) for more in EXPERTS),
    ],
)
def test_a_worker_is_killed_then_the_command_and_run_again(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    ray_environment: dict[str, str],
    more: list[str],
    kill_worker: bool,
    number: int,
) -> None:
    """To the last bit as the undisturbed run, which for two workers is one of another launcher. A Ray of the driver's
    own is killed with it, every process at once, and the run goes on in another."""
    arguments, folder = command(tmp_path, *more), tmp_path / "run"
    (tmp_path / "slow").touch()
    process = start(arguments) if more is OWN_RAY else start_soon(arguments, env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(folder))
    if kill_worker:
        disturb(folder, 1, signal.SIGKILL)
        lines.when("starting again from the last checkpoint")
        before = committed(folder)[-1]
        wait_until(lambda: committed(folder)[-1] > before)
    end_tree(process.pid) if more is OWN_RAY else process.send_signal(number)
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
    if more in EXPERTS:
        truth = tmp_path / "undisturbed"
        assert_unbroken(tmp_path, (truth, torchrun(*command(truth, *TWO, *more[len(RAY) :]))))
        return
    assert_unbroken(tmp_path, request.getfixturevalue("one" if more is LOCAL else "two"))
    assert more is LOCAL or min(curve(tmp_path, "run", "train/noise_scale").values()) > 0


def test_a_run_is_trained_by_one_command_and_once_finished_trained_further(tmp_path: Path) -> None:
    quick = [*LOCAL, "train.steps=6", "tracking.enabled=false"]

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


@SLOW
def test_starts_that_are_taken_over_end_and_say_so(tmp_path: Path, one: tuple[Path, Ended]) -> None:
    """The first one while it trains, the second one while it is stopped."""
    arguments = command(tmp_path, *LOCAL, "task_args.step_seconds=0.5")
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
    assert_unbroken(tmp_path, one)
