"""Kill or stop anything: the run goes on, by itself or with the same command, and the curve continues in the same
MLflow run, to the last bit. Under torchrun, Slurm and Ray, and in one process; what is left behind: tests/faults."""

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
from tests.running import LONG, Lines, assert_unbroken, committed, curve, mlflow_run, start, trireme, wait_until

STEPS = 60
OFTEN = [f"train.steps={STEPS}", "train.log_every=1", "checkpoint.every_steps=5", "tracking.log_model=false"]
POINTS = ["task=tests.tasks:Points", "train.global_batch_size=16", *OFTEN, "task_args.step_seconds=0.1"]
LOCAL = [*POINTS, "launcher=local", "train.precision=fp16"]
TWO = [*POINTS, "strategy=ddp", "train.micro_batch_size=5", "train.noise_scale_every=2"]  # uneven micro-batches
RAY, ACTORS = ([*TWO, "workers=2", f"launcher={name}"] for name in ("ray", "actors"))
OWN_RAY = [*TWO, "workers=2", "resources_per_worker.CPU=0.5"]  # the driver starts it: this machine may have two cores
SLOW = pytest.mark.slow


def command(storage: Path, *more: str, name: str = "run") -> list[str]:
    return ["train", *more, f"run.name={name}", f"run.storage={storage}"]


def reached(folder: Path, step: int) -> None:
    wait_until(lambda: max(committed(folder), default=0) >= step)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, running.Ended]:
    """Of two workers under torchrun."""
    storage = tmp_path_factory.mktemp("two")
    return storage / "run", running.torchrun(*command(storage, *TWO, "task_args.slow_while=/no"))


def test_one_process_is_killed_and_goes_on_in_mlflow(tmp_path: Path, ray_environment: Any, monkeypatch: Any) -> None:
    """In half precision; to the last bit as a training in this process that nothing disturbs."""
    import mlflow

    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a model puts its code first there: an older `app`
    slow, folder = tmp_path / "slow", tmp_path / "run"
    arguments = command(tmp_path, *LOCAL, f"task_args.slow_while={slow}", "tracking.log_model=true")
    slow.touch()
    process = start(arguments, env=ray_environment)
    wait_until(lambda: committed(folder))
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    slow.unlink()
    outcome = trireme(*arguments, "--json", env=ray_environment).expect().json
    assert outcome["status"] == "finished" and outcome["mlflow"]["complete"] and outcome["summary"]["resumed_from"] > 0
    truth, events = training_of(load_config([], arguments[1:]), tmp_path / "truth")
    truth.run()
    assert running.same_bits(running.weights(folder), truth.parallel.full_model_state())
    for metric in ("train/loss", "eval/loss"):
        alone = {event.step: event.values[metric] for event in logged(events, metric)}
        assert STEPS in alone and curve(tmp_path, "run", metric) == alone
    run, losses = mlflow_run(tmp_path, "run"), curve(tmp_path, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert losses[STEPS] < losses[1]
    assert run.data.params["train.steps"] == str(STEPS) and run.data.params["train.global_batch_size"] == "16"
    assert {"train/grad_norm", "train/lr", "train/samples_per_second", "eval/accuracy"} <= set(run.data.metrics)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert running.same_bits(loaded.state_dict(), running.weights(folder))
    running.invoke("profile", folder, code=2)  # it has none


@pytest.mark.parametrize(
    ("more", "kill_worker", "number"),
    [
        (RAY, True, signal.SIGINT),
        pytest.param(RAY, False, signal.SIGKILL, marks=SLOW),
        pytest.param(ACTORS, True, signal.SIGINT, marks=SLOW),
        pytest.param(OWN_RAY, False, signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_worker_is_killed_then_the_command_and_run_again(
    tmp_path: Path, two: Any, ray_environment: dict[str, str], more: list[str], kill_worker: bool, number: int
) -> None:
    """To the last bit as the undisturbed run of another launcher. A Ray of the driver's own is killed with it, every
    process at once, and the run goes on in another."""
    slow, folder = tmp_path / "slow", tmp_path / "run"
    arguments = command(tmp_path, *more, f"task_args.slow_while={slow}")
    slow.touch()
    process = start(arguments, env=None if more is OWN_RAY else ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(folder))
    if kill_worker:
        running.disturb(folder, 1, signal.SIGKILL)
        lines.when("starting again from the last checkpoint")
        reached(folder, committed(folder)[-1] + 1)
    running.end_tree(process.pid) if more is OWN_RAY else process.send_signal(number)
    code, at = process.wait(LONG), committed(folder)[-1]
    if number != signal.SIGKILL:
        assert code == 130 and at < STEPS and "died after step" in lines.text, lines.text
        lines.when(f"stopped after step {at}: run the same command again")
        assert mlflow_run(tmp_path, "run").info.status == "KILLED"
    slow.unlink()
    again = trireme(*arguments, env=ray_environment)
    said = "continuing after step" if number == signal.SIGKILL else f"continuing after step {at}"
    assert again.code == 0 and said in again.out, again.out + again.err
    assert_unbroken(tmp_path, *two)
    inputs = mlflow_run(tmp_path, "run").inputs.dataset_inputs
    assert sorted(each.tags[0].value for each in inputs) == ["evaluation", "training"]
    assert min(curve(tmp_path, "run", "train/noise_scale").values()) > 0


def test_a_run_is_trained_by_one_command_and_once_finished_trained_further(tmp_path: Path) -> None:
    quick = [*LOCAL, "train.steps=6", "task_args.step_seconds=0", "tracking.enabled=false"]

    def train(*more: str, code: int = 0) -> Any:
        return running.invoke(*command(tmp_path, *quick, *more), "--json", code=code)

    run = Run(load_config([], command(tmp_path, *quick)[1:]))
    run.open(run.config, 6)
    assert f"process {os.getpid()}" in train(code=2).stderr
    run.end("stopped")
    outcomes = [json.loads(train(*more).stdout) for more in ([], [], ["train.steps=8"], ["train.steps=5", "--again"])]
    assert [each["status"] for each in outcomes] == ["finished", "already_finished", "finished", "finished"]
    assert outcomes[2]["summary"]["resumed_from"] == 6 and outcomes[2]["summary"]["step"] == 8
    assert [each["run"] for each in outcomes[2:]] == ["run", "run-2"]


# --- ranks, stages and what is between them, killed and stopped -------------------------------------------------------

FAULT = [*OFTEN, "fault.hang_seconds=1.5", "fault.max_restarts=9"]
PLAIN = ["task=tests.tasks:Plain", "train.global_batch_size=16", *FAULT, "task_args.step_seconds=0.05"]
TINY = "data: python, sequence_length: 32, d_model: 32, n_layers: 2, n_heads: 2, eval_samples: 0"
LANGUAGE = ["task=language_modelling", "train.global_batch_size=8", *FAULT]
EXPERTS = [*LANGUAGE, f"task_args={{{TINY}, mixture: {{n_experts: 4}}}}", "strategy=fsdp", "parallel.ep=2"]
SEQUENCE = [*LANGUAGE, f"task_args={{{TINY}}}", "strategy=context", "parallel.cp=2"]
SHARDED = [*SEQUENCE, "strategy=fsdp"]
CHAIN = ["task=tests.chain:Chain", *PLAIN[1:], "train.micro_batch_size=4", "strategy=pipeline", "parallel.pp=2"]
IN_RAY = [*PLAIN, "launcher=ray", "workers=2", "strategy=ddp"]
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


def assert_stacks(storage: Path, hangs: int = 1) -> str:
    """What the ranks did when one of them was found to hang; all of it."""
    run = mlflow_run(storage, "run")
    stacks = running.mlflow_text(storage, run.info.run_id, "hangs")
    assert len(stacks) == hangs and "does not answer" in stacks[0], "where rank 1 stood, nobody knows"
    assert "loop.py" in stacks[0] or "runtime.py" in stacks[0], "where the other one stood"
    last = json.loads(running.mlflow_text(storage, run.info.run_id, "hangs", ".json")[0])["entries"][-1]
    assert last["profiling_name"].startswith("gloo:"), "the collective that rank 0 waits in; rank 1 cannot answer"
    return "".join(stacks)


@SLOW
@pytest.mark.parametrize(
    ("more", "rank", "number"), [(PLAIN, 1, STOP), (EXPERTS, 1, KILL), (SEQUENCE, 1, KILL), (SHARDED, 3, KILL)]
)
def test_torchrun_starts_again_by_itself(tmp_path: Path, more: list[str], rank: int, number: int) -> None:
    """Also with experts, and with sequences, of which each rank has half; and four ranks, two of them a sequence's."""
    ranks = f"--nproc-per-node={4 if more is SHARDED else 2}"
    process = start(command(tmp_path, *more), program=running.torchrun_program(ranks, "--max-restarts=2"))
    lines, folder = Lines(process), tmp_path / "run"
    reached(folder, 10)
    running.disturb(folder, rank, number)
    assert process.wait(LONG) == 0 and "continuing after step" in lines.text, lines.text
    if number == STOP:
        assert "worker 1" in lines.text and "does not answer" in lines.text
        assert_stacks(tmp_path)
    truth = start(command(tmp_path, *more, name="truth"), program=running.torchrun_program(ranks))
    assert_unbroken(tmp_path, tmp_path / "truth", running.finish(truth))
    if more is EXPERTS:
        metrics = mlflow_run(tmp_path, "run").data.metrics
        assert metrics["experts/dropped_tokens"] == 0 and 0 < metrics["experts/router_entropy"] <= 1
        assert sum(metrics[f"experts/load_{expert}"] for expert in range(4)) == pytest.approx(4)


@SLOW
@pytest.mark.parametrize(("more", "first"), [(IN_RAY, STOP), (IN_RAY, KILL), (CHAIN, STOP), (CHAIN, KILL)])
def test_one_after_another_the_processes_of_a_run_in_ray_are_stopped_and_killed(
    tmp_path: Path, ray_environment: dict[str, str], more: list[str], first: int
) -> None:
    """A worker while it starts (`first`), one while it trains, a stage that answers but sleeps for ever, and what is
    between the driver and its workers."""
    workers, queue, stages = ("ray::WorkerActor", "ray::RayTrainWorker"), "ray::EventQueue", more is CHAIN
    address = ray_environment["RAY_ADDRESS"]
    before = of_ray(address, *workers, queue)
    own = ["fault.start_seconds=15", *([f"task_args.hang={tmp_path / 'sleep'}"] if stages else [])]
    process = start(command(tmp_path, *more, *own), env=ray_environment)
    lines, folder = Lines(process), tmp_path / "run"
    victim = wait_until(lambda: of_ray(address, *workers) - before).pop()
    victim.send_signal(first)
    try:
        reached(folder, 10)
        stopped = running.disturb(folder, 1, STOP)
        assert lines.when("does not answer") - stopped >= 1.5
        assert "worker 1" in lines.text and "starting again from the last checkpoint" in lines.text
        reached(folder, 25)
        if stages:
            (tmp_path / "sleep").touch()
            assert lines.when("without progress"), "a block that sleeps for ever, and answers"
            reached(folder, 40)
        (of_ray(address, queue) - before).pop().kill()
        assert process.wait(LONG) == 0, lines.text
    finally:
        if victim.is_running():
            victim.kill()
    stacks = assert_stacks(tmp_path, 1 + stages)
    assert not stages or ("time.sleep(3600)" in stacks and "worker 0 (stage 0 of 2)" in stacks), "it says who"
    run = mlflow_run(tmp_path, "run")
    assert "the process between the driver and its workers" in run.data.tags["trireme.last_failure"]
    restarts = int(run.data.tags["trireme.restarts"])  # Ray Train itself replaces a worker that dies while it starts
    assert restarts == (2 if more is IN_RAY and first == KILL else 3 + stages)
    assert len(curve(tmp_path, "run", "fault/recovery_seconds")) == restarts
    truth = trireme(*command(tmp_path, *more, name="truth"), env=ray_environment)
    assert_unbroken(tmp_path, tmp_path / "truth", truth)


def of_ray(address: str, *titles: str) -> set[psutil.Process]:
    """Processes of the Ray at this address, which names those of workers so when their actor begins."""
    port, every = int(address.rpartition(":")[2]), psutil.process_iter(["cmdline"])
    named = [process for process in every if " ".join(process.info["cmdline"] or ()).startswith(titles)]
    return {p for p in named if any(c.raddr and c.raddr.port == port for c in p.net_connections())}


def slurm(arguments: list[str]) -> list[Any]:
    """Two processes as srun would start them: no agent watches them."""
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    own["SLURM_STEP_NUM_TASKS"] = "2"
    ranks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1))
    return [start(arguments, env=running.environment(**own, SLURM_NTASKS_PER_NODE="2", **rank)) for rank in ranks]


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_slurm_ends_all_and_the_same_command_goes_on(tmp_path: Path, rank: int) -> None:
    arguments = command(tmp_path, *PLAIN)
    both = slurm(arguments)
    lines = [Lines(process) for process in both]
    try:
        reached(tmp_path / "run", 10)
        both[rank].send_signal(STOP)
        codes = [process.wait(LONG) for process in both]
    finally:
        for process in both:
            process.kill()
    assert codes[rank] == -KILL and codes[1 - rank] == 1, "Slurm sees a failed step, which it may run again"
    text = lines[1 - rank].text
    assert (f"process {both[1].pid} on" if rank else "worker 0 is stopped or cannot be reached") in text
    assert not rank or "does not answer" in text
    said = [running.finish(process) for process in slurm(arguments)]
    assert [ended.code for ended in said] == [0, 0], said[0].err + said[1].err
    assert "continuing after step" in said[0].out
    assert_unbroken(tmp_path, tmp_path / "truth", running.torchrun(*command(tmp_path, *PLAIN, name="truth")))
