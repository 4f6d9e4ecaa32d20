"""Killed or stopped processes: the run continues, by itself or with the same command.

Its curve continues in the same MLflow run, to the last bit, under torchrun, Slurm and Ray and in
one process. What an ended run leaves behind: tests/faults.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.config.io import load_config
from app.run.manifest import Run
from cluster.remote import free_port
from tests import running
from tests.app.kit import logged, training_of
from tests.running import (
    LONG,
    Lines,
    assert_unbroken,
    committed,
    curve,
    mlflow_run,
    start,
    trireme,
    wait_until,
)

STEPS = 60
OFTEN = [
    f"train.steps={STEPS}",
    "train.log_every=1",
    "checkpoint.every_steps=5",
    "tracking.log_model=false",
]
POINTS = [
    "task=tests.tasks:Points",
    "train.global_batch_size=16",
    *OFTEN,
    "task_args.step_seconds=0.1",
]
LOCAL = [*POINTS, "launcher=local", "train.precision=fp16"]
TWO = [
    *POINTS,
    "strategy=ddp",
    "train.micro_batch_size=5",  # micro-batches of 5 and 3
    "train.noise_scale_every=2",
]
RAY = [*TWO, "workers=2", "launcher=ray"]
ACTORS = [*TWO, "workers=2", "launcher=actors"]
PRIVATE_RAY = [*TWO, "workers=2", "resources_per_worker.CPU=0.5"]
"""The driver starts Ray itself; the machine may have only two cores."""
SLOW = pytest.mark.slow


def command(storage: Path, *arguments: str, name: str = "run") -> list[str]:
    """Arguments that train a run of this name in that storage."""
    return ["train", *arguments, f"run.name={name}", f"run.storage={storage}"]


def wait_for_step(folder: Path, step: int, *, process: Any = None) -> None:
    """Waits until a checkpoint of this step or a later one is committed.

    Args:
        folder: Of the run.
        step: The step.
        process: What trains, at whose end nothing is waited for any more.
    """

    def is_over() -> bool:
        has_ended = process is not None and process.poll() is not None
        return has_ended or max(committed(folder), default=0) >= step

    wait_until(is_over)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, running.Ended]:
    """An uninterrupted run of two workers under torchrun: its folder and its output.

    They have torchrun's variables and no agent of it, so that they are forks that have imported
    torch (tests/warm.py). The agent itself starts runs again in the slow tests below.
    """
    storage = tmp_path_factory.mktemp("two")
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    arguments = command(storage, *TWO, "task_args.slow_while=/no")
    ranks = [
        start(arguments, env=running.environment(**variables, RANK=rank, LOCAL_RANK=rank))
        for rank in ("0", "1")
    ]
    first, second = map(running.finish, ranks)
    second.expect()
    return storage / "run", first


def test_a_killed_single_process_continues_in_the_same_mlflow_run(
    tmp_path: Path, ray_environment: Any, monkeypatch: Any
) -> None:
    """In half precision, and equal to the last bit to an uninterrupted run in this process."""
    import mlflow

    # Loading a model puts its code first in sys.path, which is another copy of `app`.
    monkeypatch.setattr(sys, "path", [*sys.path])
    slow = tmp_path / "slow"
    folder = tmp_path / "run"
    arguments = command(tmp_path, *LOCAL, f"task_args.slow_while={slow}", "tracking.log_model=true")
    slow.touch()
    process = start(arguments, env=ray_environment)
    wait_until(lambda: committed(folder))
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    slow.unlink()
    ended = trireme(*arguments, "--json", env=ray_environment).expect()
    outcome = json.loads(ended.out)  # nothing else is on stdout
    assert outcome["status"] == "finished"
    assert outcome["mlflow"]["complete"]
    assert outcome["summary"]["resumed_from"] > 0
    uninterrupted, events = training_of(load_config([], arguments[1:]), tmp_path / "truth")
    uninterrupted.run()
    assert running.same_bits(running.weights(folder), uninterrupted.parallel.full_model_state())
    for metric in ("train/loss", "eval/loss"):
        expected = {event.step: event.values[metric] for event in logged(events, metric)}
        assert STEPS in expected and curve(tmp_path, "run", metric) == expected
    run = mlflow_run(tmp_path, "run")
    losses = curve(tmp_path, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert losses[STEPS] < losses[1]
    assert run.data.params["train.steps"] == str(STEPS)
    assert run.data.params["train.global_batch_size"] == "16"
    metrics = {"train/grad_norm", "train/lr", "train/samples_per_second", "eval/accuracy"}
    assert metrics <= set(run.data.metrics)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert running.same_bits(loaded.state_dict(), running.weights(folder))
    running.invoke("profile", folder, code=2)  # the run has no profile


@pytest.mark.parametrize(
    ("overrides", "kill_worker", "signal_number"),
    [
        pytest.param(ACTORS, True, None, id="actors"),
        pytest.param(RAY, True, None, marks=SLOW, id="train"),  # tests/versions.py runs it
        pytest.param(RAY, True, signal.SIGINT, marks=SLOW),
        pytest.param(RAY, False, signal.SIGKILL, marks=SLOW),
        pytest.param(ACTORS, True, signal.SIGINT, marks=SLOW),
        pytest.param(PRIVATE_RAY, False, signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_worker_is_killed_then_the_command_and_run_again(
    tmp_path: Path,
    two: Any,
    ray_environment: dict[str, str],
    overrides: list[str],
    kill_worker: bool,
    signal_number: int | None,
) -> None:
    """The run equals to the last bit the uninterrupted one of another launcher.

    Without a signal the command goes on by itself. A Ray that the driver has started is killed with
    the driver, all processes at once, and the run continues in another Ray.
    """
    slow = tmp_path / "slow"
    folder = tmp_path / "run"
    arguments = command(tmp_path, *overrides, f"task_args.slow_while={slow}")
    slow.touch()
    process = start(arguments, env=None if overrides is PRIVATE_RAY else ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(folder))
    if kill_worker:
        running.disturb(folder, 1, signal.SIGKILL)
        lines.when("starting again from the last checkpoint")
    if signal_number is None:
        slow.unlink()
        assert process.wait(LONG) == 0 and "died after step" in lines.text, lines.text
        assert "continuing after step" in lines.text
    else:
        if kill_worker:
            wait_for_step(folder, committed(folder)[-1] + 1)
        if overrides is PRIVATE_RAY:
            running.end_tree(process.pid)
        else:
            process.send_signal(signal_number)
        code = process.wait(LONG)
        last_step = committed(folder)[-1]
        expected = "continuing after step"
        if signal_number != signal.SIGKILL:
            assert code == 130 and last_step < STEPS and "died after step" in lines.text, lines.text
            lines.when(f"stopped after step {last_step}: run the same command again")
            assert mlflow_run(tmp_path, "run").info.status == "KILLED"
            expected = f"continuing after step {last_step}"
        slow.unlink()
        resumed = trireme(*arguments, env=ray_environment)
        assert resumed.code == 0 and expected in resumed.out, resumed.out + resumed.err
    assert_unbroken(tmp_path, *two)
    inputs = mlflow_run(tmp_path, "run").inputs.dataset_inputs
    assert sorted(dataset.tags[0].value for dataset in inputs) == ["evaluation", "training"]
    assert min(curve(tmp_path, "run", "train/noise_scale").values()) > 0


def test_a_worker_of_ray_train_trains_as_this_process_does(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    """To the last bit. Each of the processes that Ray Train adds takes as long as this training."""
    quick = ["train.steps=10", "task_args.step_seconds=0", "tracking.enabled=false", "workers=1"]
    arguments = command(tmp_path, *POINTS, *quick, "launcher=ray")
    trireme(*arguments, env=ray_environment).expect()
    training, _ = training_of(load_config([], arguments[1:]), tmp_path / "truth")
    training.run()
    expected = training.parallel.full_model_state()
    assert running.same_bits(running.weights(tmp_path / "run"), expected)


def test_one_command_at_a_time_trains_a_run_and_a_finished_run_may_go_on(tmp_path: Path) -> None:
    quick = [*LOCAL, "train.steps=6", "task_args.step_seconds=0", "tracking.enabled=false"]

    def train(*overrides: str, code: int = 0) -> Any:
        return running.invoke(*command(tmp_path, *quick, *overrides), "--json", code=code)

    run = Run(load_config([], command(tmp_path, *quick)[1:]))
    run.open(run.config, 6)
    assert f"process {os.getpid()}" in train(code=2).stderr
    run.end("stopped")
    finished = json.loads(train().stdout)
    repeated = json.loads(train().stdout)
    extended = json.loads(train("train.steps=8").stdout)
    again = json.loads(train("train.steps=5", "--again").stdout)
    assert finished["status"] == "finished"
    assert repeated["status"] == "already_finished"
    assert (extended["status"], extended["run"]) == ("finished", "run")
    assert extended["summary"]["resumed_from"] == 6 and extended["summary"]["step"] == 8
    assert (again["status"], again["run"]) == ("finished", "run-2")


# --- ranks, stages and the event queue, killed and stopped ----------------------------------------

FAULT = [*OFTEN, "fault.hang_seconds=1.5", "fault.max_restarts=9"]
PLAIN = [
    "task=tests.tasks:Plain",
    "train.global_batch_size=16",
    *FAULT,
    "task_args.step_seconds=0.05",
]
TINY = "data: python, sequence_length: 32, d_model: 32, n_layers: 2, n_heads: 2, eval_samples: 0"
LANGUAGE = ["task=language_modelling", "train.global_batch_size=8", *FAULT]
EXPERTS = [
    *LANGUAGE,
    f"task_args={{{TINY}, mixture: {{n_experts: 4}}}}",
    "strategy=fsdp",
    "parallel.ep=2",
]
SEQUENCE = [*LANGUAGE, f"task_args={{{TINY}}}", "strategy=context", "parallel.cp=2"]
SHARDED = [*SEQUENCE, "strategy=fsdp"]
CHAIN = [
    "task=tests.chain:Chain",
    *PLAIN[1:],
    "train.micro_batch_size=4",
    "strategy=pipeline",
    "parallel.pp=2",
]
IN_RAY = [*PLAIN, "launcher=ray", "workers=2", "strategy=ddp"]
STOP = signal.SIGSTOP
KILL = signal.SIGKILL


def assert_stacks(storage: Path, hangs: int = 1) -> str:
    """Checks the stacks that MLflow has of a hang of rank 1, and returns their text."""
    run = mlflow_run(storage, "run")
    stacks = running.mlflow_text(storage, run.info.run_id, "hangs")
    assert len(stacks) == hangs
    assert "does not answer" in stacks[0], "rank 1 cannot tell its stack"
    assert "loop.py" in stacks[0] or "runtime.py" in stacks[0], "the stack of the other rank"
    records = running.mlflow_text(storage, run.info.run_id, "hangs", ".json")
    last_collective = json.loads(records[0])["entries"][-1]
    assert last_collective["profiling_name"].startswith("gloo:"), "rank 0 waits in a collective"
    return "".join(stacks)


@SLOW
@pytest.mark.parametrize(
    ("overrides", "rank", "signal_number"),
    [(PLAIN, 1, STOP), (EXPERTS, 1, KILL), (SEQUENCE, 1, KILL), (SHARDED, 3, KILL)],
    ids=["hangs", "experts", "sequence", "sharded"],
)
def test_torchrun_starts_again_by_itself(
    tmp_path: Path, overrides: list[str], rank: int, signal_number: int
) -> None:
    """Also with experts, with sequences split over two ranks, and with those over four ranks."""
    ranks = f"--nproc-per-node={4 if overrides is SHARDED else 2}"
    process = start(
        command(tmp_path, *overrides), program=running.torchrun_program(ranks, "--max-restarts=2")
    )
    lines = Lines(process)
    folder = tmp_path / "run"
    wait_for_step(folder, 10, process=process)
    assert process.poll() is None, lines.text
    running.disturb(folder, rank, signal_number)
    assert process.wait(LONG) == 0 and "continuing after step" in lines.text, lines.text
    if signal_number == STOP:
        assert "worker 1" in lines.text and "does not answer" in lines.text
        assert_stacks(tmp_path)
    uninterrupted = start(
        command(tmp_path, *overrides, name="truth"), program=running.torchrun_program(ranks)
    )
    assert_unbroken(tmp_path, tmp_path / "truth", running.finish(uninterrupted))
    if overrides is EXPERTS:
        metrics = mlflow_run(tmp_path, "run").data.metrics
        assert metrics["experts/dropped_tokens"] == 0 and 0 < metrics["experts/router_entropy"] <= 1
        assert sum(metrics[f"experts/load_{expert}"] for expert in range(4)) == pytest.approx(4)


@SLOW
@pytest.mark.parametrize(
    ("overrides", "first_signal"), [(IN_RAY, STOP), (IN_RAY, KILL), (CHAIN, STOP), (CHAIN, KILL)]
)
def test_a_run_in_ray_survives_its_processes_one_after_another(
    tmp_path: Path, ray_environment: dict[str, str], overrides: list[str], first_signal: int
) -> None:
    """Several processes of one run are stopped or killed in turn.

    They are a worker while it starts (by `first_signal`), one while it trains, a stage that
    answers but sleeps for ever, and the event queue between the driver and its workers.
    """
    workers = ("ray::WorkerActor", "ray::RayTrainWorker")
    queue = "ray::EventQueue"
    has_stages = overrides is CHAIN
    address = ray_environment["RAY_ADDRESS"]
    earlier_processes = of_ray(address, *workers, queue)
    extra = ["fault.start_seconds=60"]
    if has_stages:
        extra.append(f"task_args.hang={tmp_path / 'sleep'}")
    process = start(command(tmp_path, *overrides, *extra), env=ray_environment)
    lines = Lines(process)
    folder = tmp_path / "run"
    victim = wait_until(lambda: of_ray(address, *workers) - earlier_processes).pop()
    victim.send_signal(first_signal)
    try:
        wait_for_step(folder, 10)
        stopped = running.disturb(folder, 1, STOP)
        assert lines.when("does not answer") - stopped >= 1.5
        assert "worker 1" in lines.text and "starting again from the last checkpoint" in lines.text
        wait_for_step(folder, 25)
        if has_stages:
            (tmp_path / "sleep").touch()
            assert lines.when("without progress"), "a block that sleeps for ever, and answers"
            wait_for_step(folder, 40)
        (of_ray(address, queue) - earlier_processes).pop().kill()
        assert process.wait(LONG) == 0, lines.text
    finally:
        if victim.is_running():
            victim.kill()
    stacks = assert_stacks(tmp_path, 1 + has_stages)
    if has_stages:
        assert "time.sleep(3600)" in stacks and "worker 0 (stage 0 of 2)" in stacks
    run = mlflow_run(tmp_path, "run")
    assert "the process between the driver and its workers" in run.data.tags["trireme.last_failure"]
    restarts = int(run.data.tags["trireme.restarts"])
    # Ray Train itself replaces a worker that dies while it starts.
    expected = 2 if overrides is IN_RAY and first_signal == KILL else 3 + has_stages
    assert restarts == expected
    assert len(curve(tmp_path, "run", "fault/recovery_seconds")) == restarts
    uninterrupted = trireme(*command(tmp_path, *overrides, name="truth"), env=ray_environment)
    assert_unbroken(tmp_path, tmp_path / "truth", uninterrupted)


def of_ray(address: str, *titles: str) -> set[psutil.Process]:
    """Processes of the Ray at this address whose title starts with one of these.

    Ray gives a worker's process the title of its actor once the actor starts.
    """
    port = int(address.rpartition(":")[2])
    processes = psutil.process_iter(["cmdline"])
    titled = [
        process
        for process in processes
        if " ".join(process.info["cmdline"] or ()).startswith(titles)
    ]

    def is_connected(process: psutil.Process) -> bool:
        connections = process.net_connections()
        return any(each.raddr and each.raddr.port == port for each in connections)

    return {process for process in titled if is_connected(process)}


def slurm(arguments: list[str]) -> list[Any]:
    """Starts two processes as srun does, without an agent that watches them."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    processes = []
    for rank in ("0", "1"):
        env = running.environment(**variables, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        processes.append(start(arguments, env=env))
    return processes


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_slurm_ends_all_and_the_same_command_resumes(
    tmp_path: Path, rank: int
) -> None:
    arguments = command(tmp_path, *PLAIN)
    processes = slurm(arguments)
    lines = [Lines(process) for process in processes]
    try:
        wait_for_step(tmp_path / "run", 10)
        processes[rank].send_signal(STOP)
        codes = [process.wait(LONG) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes[rank] == -KILL
    assert codes[1 - rank] == 1, "the step has failed, so that Slurm may run it again"
    text = lines[1 - rank].text
    if rank == 0:
        assert "worker 0 is stopped or cannot be reached" in text
    else:
        assert f"process {processes[1].pid} on" in text
        assert "does not answer" in text
    resumed = [running.finish(process) for process in slurm(arguments)]
    assert [ended.code for ended in resumed] == [0, 0], resumed[0].err + resumed[1].err
    assert "continuing after step" in resumed[0].out
    uninterrupted = running.torchrun(*command(tmp_path, *PLAIN, name="truth"))
    assert_unbroken(tmp_path, tmp_path / "truth", uninterrupted)
