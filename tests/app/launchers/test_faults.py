"""Faults as runs meet them: ranks killed and stopped under torchrun, Slurm and Ray.

More of them, nodes that go and come back, and that nothing is left behind: tests/faults."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import (
    LONG,
    Ended,
    Lines,
    committed,
    curve,
    disturb,
    environment,
    finish,
    free_port,
    mlflow_run,
    mlflow_text,
    same_bits,
    start,
    torchrun,
    torchrun_program,
    trireme,
    wait_until,
    weights,
)

pytestmark = pytest.mark.slow

OFTEN = ["train.steps=60", "train.log_every=1", "checkpoint.every_steps=5", "fault.hang_seconds=1.5"]
OFTEN += ["tracking.log_model=false", "fault.max_restarts=9"]
SLOW = ["task=tests.tasks:Plain", "train.global_batch_size=16", *OFTEN, "task_args.step_seconds=0.05"]
TINY = "data: python, sequence_length: 32, d_model: 32, n_layers: 2, n_heads: 2, eval_samples: 0"
LANGUAGE = ["task=language_modelling", "train.global_batch_size=8", *OFTEN]
EXPERTS = [*LANGUAGE, f"task_args={{{TINY}, mixture: {{n_experts: 4}}}}", "strategy=fsdp", "parallel.ep=2"]
SEQUENCE = [*LANGUAGE, f"task_args={{{TINY}}}", "strategy=context", "parallel.cp=2"]
SHARDED = [*SEQUENCE, "strategy=fsdp"]
CHAIN = ["task=tests.chain:Chain", *SLOW[1:], "train.micro_batch_size=4", "strategy=pipeline", "parallel.pp=2"]
IN_RAY = [*SLOW, "launcher=ray", "workers=2", "strategy=ddp"]
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


def command(storage: Path, *more: str, name: str = "run") -> list[str]:
    return ["train", *more, f"run.name={name}", f"run.storage={storage}"]


def reached(folder: Path, step: int) -> None:
    wait_until(lambda: max(committed(folder), default=0) >= step)


def assert_undisturbed(storage: Path, truth: Ended) -> None:
    """No step is lost and none is there twice: to the last bit as `truth`, which nothing has disturbed."""
    assert truth.code == 0, truth.err
    assert same_bits(weights(storage / "run"), weights(storage / "truth"))
    assert curve(storage, "run") == curve(storage, "truth")
    assert mlflow_run(storage, "run").info.status == "FINISHED"


def assert_stacks(storage: Path, hangs: int = 1) -> str:
    """What the ranks did when one of them was found to hang; all of it."""
    run = mlflow_run(storage, "run")
    stacks = mlflow_text(storage, run.info.run_id, "hangs")
    assert len(stacks) == hangs and "does not answer" in stacks[0], "where rank 1 stood, nobody knows"
    assert "loop.py" in stacks[0] or "runtime.py" in stacks[0], "where the other one stood"
    last = json.loads(mlflow_text(storage, run.info.run_id, "hangs", ".json")[0])["entries"][-1]
    assert last["profiling_name"].startswith("gloo:"), "the collective that rank 0 waits in; rank 1 cannot answer"
    return "".join(stacks)


@pytest.mark.parametrize(
    ("more", "rank", "number"),
    [(SLOW, 1, STOP), (EXPERTS, 1, KILL), (SEQUENCE, 1, KILL), (SHARDED, 3, KILL)],
)
def test_torchrun_starts_again_by_itself(tmp_path: Path, more: list[str], rank: int, number: int) -> None:
    """Also with experts, and with sequences, of which each rank has half; and four ranks, two of them a sequence's."""
    ranks = f"--nproc-per-node={4 if more is SHARDED else 2}"
    process = start(command(tmp_path, *more), program=torchrun_program(ranks, "--max-restarts=2"))
    lines, folder = Lines(process), tmp_path / "run"
    reached(folder, 10)
    disturb(folder, rank, number)
    assert process.wait(LONG) == 0 and "continuing after step" in lines.text, lines.text
    if number == STOP:
        assert "worker 1" in lines.text and "does not answer" in lines.text
        assert_stacks(tmp_path)
    truth = start(command(tmp_path, *more, name="truth"), program=torchrun_program(ranks))
    assert_undisturbed(tmp_path, finish(truth))
    if more is EXPERTS:
        metrics = mlflow_run(tmp_path, "run").data.metrics
        assert metrics["experts/dropped_tokens"] == 0 and 0 < metrics["experts/router_entropy"] <= 1
        assert sum(metrics[f"experts/load_{expert}"] for expert in range(4)) == pytest.approx(4)


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
        stopped = disturb(folder, 1, STOP)
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
    assert_undisturbed(tmp_path, trireme(*command(tmp_path, *more, name="truth"), env=ray_environment))


def of_ray(address: str, *titles: str) -> set[psutil.Process]:
    """Processes of the Ray at this address, which names those of workers so when their actor begins."""
    port, every = int(address.rpartition(":")[2]), psutil.process_iter(["cmdline"])
    named = [process for process in every if " ".join(process.info["cmdline"] or ()).startswith(titles)]
    return {p for p in named if any(c.raddr and c.raddr.port == port for c in p.net_connections())}


def slurm(arguments: list[str]) -> list[Any]:
    """Two processes as srun would start them: no agent watches them."""
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    ranks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1))
    return [start(arguments, env=environment(**own, SLURM_NTASKS_PER_NODE="2", **rank)) for rank in ranks]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_slurm_ends_all_and_the_same_command_goes_on(tmp_path: Path, rank: int) -> None:
    arguments = command(tmp_path, *SLOW, "launcher=torchrun")
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
    said = [finish(process) for process in slurm(arguments)]
    assert [ended.code for ended in said] == [0, 0], said[0].err + said[1].err
    assert "continuing after step" in said[0].out
    assert_undisturbed(tmp_path, torchrun(*command(tmp_path, *SLOW, name="truth")))
