"""Kill anything, run the same command again: the curve continues in the same MLflow run, to the last bit. What an
undisturbed run leaves in MLflow."""

import json
import os
import signal
import sys
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

STEPS = 60
SLOW = [*POINTS, f"train.steps={STEPS}", "task_args.step_seconds=0.1", "checkpoint.every_steps=5", "train.log_every=1"]
LOCAL = ["launcher=local", "train.precision=fp16"]
TWO = ["strategy=ddp", "train.micro_batch_size=5", "train.noise_scale_every=2"]  # uneven micro-batches
RAY, ACTORS = ([*TWO, "workers=2", f"launcher={name}"] for name in ("ray", "actors"))
OWN_RAY = [*TWO, "workers=2", "resources_per_worker.CPU=0.5"]  # the driver starts it: this machine may have two cores


def command(storage: Path, *more: str) -> list[str]:
    """A run whose steps are slow as long as there is a file `slow` in its storage."""
    pace = f"task_args.slow_while={storage}/slow"
    return ["train", *SLOW, pace, "run.name=run", f"run.storage={storage}", *more]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, ray_environment: dict[str, str]) -> tuple[Path, Ended]:
    """The storage, and what was said, of one worker in half precision that nothing disturbs."""
    storage = tmp_path_factory.mktemp("one")
    return storage, trireme(*command(storage, *LOCAL, "tracking.log_model=true", "--json"), env=ray_environment)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Of two workers under torchrun."""
    storage = tmp_path_factory.mktemp("two")
    return storage, torchrun(*command(storage, *TWO))


def assert_unbroken(storage: Path, truth: tuple[Path, Ended]) -> None:
    assert truth[1].code == 0, truth[1].err
    assert same_bits(weights(storage / "run"), weights(truth[0] / "run"))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth[0], "run", metric)
    found = mlflow_run(storage, "run")
    assert found.info.status == "FINISHED"
    assert sorted(each.tags[0].value for each in found.inputs.dataset_inputs) == ["evaluation", "training"]


def test_half_precision_learns_and_what_mlflow_gets(one: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a model puts its code first there: an older `app`
    storage, ended = one
    assert ended.code == 0, ended.err
    outcome = ended.json
    assert outcome["status"] == "finished" and outcome["mlflow"]["complete"]
    run = mlflow_run(storage, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert run.data.params["train.steps"] == str(STEPS) and run.data.params["train.global_batch_size"] == "16"
    assert {"train/loss", "train/grad_norm", "train/lr", "train/samples_per_second"} <= set(run.data.metrics)
    assert {"eval/loss", "eval/accuracy"} <= set(run.data.metrics)
    losses = curve(storage, "run")
    assert losses[STEPS] < losses[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{storage}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert same_bits(loaded.state_dict(), weights(storage / "run"))


@pytest.mark.parametrize(
    ("more", "kill_worker", "number"),
    [
        (LOCAL, False, signal.SIGKILL),
        (RAY, True, signal.SIGINT),
        pytest.param(RAY, False, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(ACTORS, True, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(OWN_RAY, False, signal.SIGKILL, marks=pytest.mark.slow),
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
        assert code == 130 and at < STEPS and "died after step" in lines.text, lines.text
        lines.when(f"stopped after step {at}: run the same command again")
        assert mlflow_run(tmp_path, "run").info.status == "KILLED"
    (tmp_path / "slow").unlink()
    again = trireme(*arguments, env=ray_environment)
    said = "continuing after step" if number == signal.SIGKILL else f"continuing after step {at}"
    assert again.code == 0 and said in again.out, again.out + again.err
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
