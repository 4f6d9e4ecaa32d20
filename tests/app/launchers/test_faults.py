"""Faults as runs meet them: ranks killed and stopped under torchrun and Ray Train, nodes that go and come back."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import (
    LONG,
    POINTS,
    Lines,
    close,
    committed,
    curve,
    disturb,
    environment,
    finish,
    free_port,
    memory_group,
    mlflow_run,
    mlflow_text,
    start,
    trireme,
    wait_until,
    weights,
    writes,
)
from tests.running import torchrun_program as torchrun

pytestmark = pytest.mark.slow

SLOW = [
    "task=tests.tasks:Plain",
    *POINTS[1:],
    "train.steps=60",
    "task_args.step_seconds=0.05",
    "checkpoint.every_steps=5",
    "train.log_every=1",
]
HANG = "fault.hang_seconds=1.5"


def assert_one_curve(storage: Path, *more: str) -> None:
    """No step is lost and none is there twice: the curve is that of one worker that was not disturbed."""
    undisturbed = ["launcher=local", "task_args.step_seconds=0", "run.name=one", f"run.storage={storage}"]
    one = trireme("train", *SLOW, *undisturbed, *more)
    assert one.code == 0, one.err
    assert close(curve(storage, "run"), curve(storage, "one"), 1e-4)


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)])
def test_torchrun_starts_again_by_itself(tmp_path: Path, rank: int, number: int) -> None:
    arguments = ["train", *SLOW, HANG, "run.name=run", f"run.storage={tmp_path}"]
    process = start(arguments, program=torchrun("--max-restarts=2"))
    lines, folder = Lines(process), tmp_path / "run"
    wait_until(lambda: max(committed(folder), default=0) >= 10)
    if rank:
        disturb(folder, rank, number)
    else:
        children = [child for child in psutil.Process(process.pid).children() if "app" in child.cmdline()]
        min(children, key=lambda child: int(child.environ()["RANK"])).send_signal(number)
    assert process.wait(LONG) == 0, lines.text
    assert "continuing after step" in lines.text
    assert_one_curve(tmp_path)
    run = mlflow_run(tmp_path, "run")
    assert run.info.status == "FINISHED"
    if (rank, number) == (1, signal.SIGSTOP):
        assert "worker 1" in lines.text and "does not answer" in lines.text
        (stacks,) = mlflow_text(tmp_path, run.info.run_id, "hangs")
        assert "does not answer" in stacks and "loop.py" in stacks, "where the other one stood"
        (record,) = mlflow_text(tmp_path, run.info.run_id, "hangs", ".json")
        assert json.loads(record)["entries"], "and what it did last"


MIXTURE = [
    "task=language_modelling",
    "task_args={data: python, sequence_length: 32, d_model: 32, n_layers: 2, n_heads: 2, mixture: {n_experts: 4}}",
    *("train.global_batch_size=8", "train.steps=60", "train.log_every=1", "checkpoint.every_steps=5"),
    *("task_args.eval_samples=0", "tracking.log_model=false"),
]


def test_a_killed_rank_of_split_experts_is_replaced_and_its_experts_are_read_back(tmp_path: Path) -> None:
    arguments = ["train", *MIXTURE, "strategy=fsdp", "parallel.ep=2", HANG, "run.name=run", f"run.storage={tmp_path}"]
    process = start(arguments, program=torchrun("--max-restarts=2"))
    lines, folder = Lines(process), tmp_path / "run"
    wait_until(lambda: max(committed(folder), default=0) >= 10)
    disturb(folder, 1, signal.SIGKILL)
    assert process.wait(LONG) == 0, lines.text
    assert "continuing after step" in lines.text
    one = trireme("train", *MIXTURE, "launcher=local", "workers=1", "run.name=one", f"run.storage={tmp_path}")
    assert one.code == 0, one.err
    assert close(curve(tmp_path, "run"), curve(tmp_path, "one"), 1e-4)
    metrics = mlflow_run(tmp_path, "run").data.metrics
    assert metrics["experts/dropped_tokens"] == 0 and 0 < metrics["experts/router_entropy"] <= 1
    assert sum(metrics[f"experts/load_{expert}"] for expert in range(4)) == pytest.approx(4)


def test_a_stopped_worker_of_ray_train_is_found_and_replaced(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    arguments = ["train", *SLOW, HANG, "launcher=ray", "workers=2", "run.name=run", f"run.storage={tmp_path}"]
    process = start(arguments, env=ray_environment)
    lines, folder = Lines(process), tmp_path / "run"
    wait_until(lambda: max(committed(folder), default=0) >= 10)
    stopped = disturb(folder, 1, signal.SIGSTOP)
    assert lines.when("does not answer") - stopped >= 1.5
    assert process.wait(LONG) == 0, lines.text
    assert "worker 1, process" in lines.text and "starting again from the last checkpoint" in lines.text
    assert_one_curve(tmp_path)
    run = mlflow_run(tmp_path, "run")
    (stacks,) = mlflow_text(tmp_path, run.info.run_id, "hangs")
    assert "does not answer" in stacks and "loop.py" in stacks
    (record,) = mlflow_text(tmp_path, run.info.run_id, "hangs", ".json")
    last = json.loads(record)["entries"][-1]
    assert last["profiling_name"].startswith("gloo:"), "the collective that rank 0 waits in; rank 1 cannot answer"
    assert "worker 1" in run.data.tags["trireme.last_failure"] and run.data.metrics["fault/recovery_seconds"] > 0


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray cluster of a head without CPUs and four nodes with one each, on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def has_driver(node: Any) -> bool:
    """Whether the driver is connected to this node's raylet: its event queue is a child of it."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children()
    return any(_title(child).startswith("ray::EventQueue") for child in children)


@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_four_three_two_four_workers(tmp_path: Path, nodes: Any, launcher: str) -> None:
    def add() -> Any:
        return nodes.add_node(num_cpus=1, num_gpus=0)

    living = [add() for _ in range(4)]
    own = ["train.steps=3000", "train.global_batch_size=12", "train.micro_batch_size=2", "checkpoint.every_steps=20"]
    arguments = ["train", *SLOW, *own, f"launcher={launcher}", "workers=4", "strategy=ddp", "fault.elastic_seconds=2"]
    arguments += ["run.name=run", f"run.storage={tmp_path}", "fault.max_restarts=9"]
    env = environment(RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled", TRIREME_FAST_START="0")
    process = start([word for word in arguments if not word.startswith("task_args.step")], env=env)
    lines, folder = Lines(process), tmp_path / "run"

    def further() -> None:
        now = max(committed(folder), default=0)
        wait_until(lambda: max(committed(folder), default=0) >= now + 20)

    further()
    away = [node for node in living if not has_driver(node)]  # all raylets have one address: Ray may choose any for it
    for left in (3, 2):
        nodes.remove_node(away.pop(), allow_graceful=False)
        lines.when(f"continuing with {left} of 4 workers")
        further()
    add(), add()
    lines.when("there is room for 4 workers again; continuing with 4 of 4")
    assert process.wait(LONG) == 0, lines.text
    assert_one_curve(tmp_path, *own)
    assert weights(folder).keys() == weights(tmp_path / "one").keys()
    workers = list(curve(tmp_path, "run", "fault/workers").values())
    assert workers[:2] == [3.0, 2.0] and workers[-1] == 4.0, "the two nodes that come may be taken one by one"


@pytest.mark.parametrize("launcher", ["ray", "actors"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_is_stopped_or_dies_while_it_starts(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str, number: int
) -> None:
    arguments = ["train", *SLOW, "fault.start_seconds=15", f"launcher={launcher}", "workers=2", "strategy=ddp"]
    arguments += ["run.name=run", f"run.storage={tmp_path}"]
    before = set(workers_of_ray())
    process = start(arguments, env=ray_environment)
    lines = Lines(process)
    (victim, *_) = wait_until(lambda: set(workers_of_ray()) - before)
    victim.send_signal(number)
    try:
        assert process.wait(LONG) == 0, lines.text
    finally:
        if victim.is_running():
            victim.kill()
    assert_one_curve(tmp_path)


def workers_of_ray() -> list[psutil.Process]:
    """The processes of workers: Ray names them so when their actor begins."""
    named = ("ray::WorkerActor", "ray::RayTrainWorker")
    return [found for found in psutil.process_iter() if _title(found).startswith(named)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def slurm(arguments: list[str], rank: int, port: int) -> Any:
    """One of two processes as srun would start it: no agent watches them."""
    own = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NTASKS_PER_NODE": "2"}
    return start(arguments, env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **own))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_under_slurm_ends_all_and_the_same_command_goes_on(tmp_path: Path, rank: int) -> None:
    arguments = ["train", *SLOW, HANG, "launcher=torchrun", "run.name=run", f"run.storage={tmp_path}"]
    port = free_port()
    both = [slurm(arguments, number, port) for number in (0, 1)]
    lines, folder = [Lines(process) for process in both], tmp_path / "run"
    try:
        wait_until(lambda: max(committed(folder), default=0) >= 10)
        both[rank].send_signal(signal.SIGSTOP)
        codes = [process.wait(LONG) for process in both]
    finally:
        for process in both:
            process.kill()
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, "Slurm sees a failed step, which it may run again"
    text = lines[1 - rank].text
    assert (f"process {both[1].pid} on" if rank else "worker 0 is stopped or cannot be reached") in text
    assert not rank or "does not answer" in text
    port = free_port()
    again = [slurm(arguments, number, port) for number in (0, 1)]
    said = [finish(process) for process in again]
    assert [ended.code for ended in said] == [0, 0], said[0].err + said[1].err
    assert "continuing after step" in said[0].out
    assert_one_curve(tmp_path)


@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_a_rank_that_the_kernel_kills_for_memory(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str
) -> None:
    arguments = ["train", *SLOW, "task=tests.tasks:Hungry", f"task_args.hungry={tmp_path / 'hungry'}", "workers=2"]
    arguments += [f"launcher={launcher}", "strategy=ddp", "run.name=run", f"run.storage={tmp_path}"]
    with memory_group(64 << 20) as group:
        process = start(arguments, env=ray_environment)
        lines, folder = Lines(process), tmp_path / "run"
        wait_until(lambda: max(committed(folder), default=0) >= 10)
        log = str(folder / "logs" / "rank-1.log")
        (victim,) = [found for found in psutil.process_iter() if writes(found, log)]
        (group / "cgroup.procs").write_text(str(victim.pid))
        (tmp_path / "hungry").touch()
        assert process.wait(LONG) == 0, lines.text
    assert f"worker 1, process {victim.pid} on" in lines.text
    run = mlflow_run(tmp_path, "run")
    assert run.data.tags["trireme.last_failure"].endswith("killed by the kernel for memory"), lines.text
    assert run.info.status == "FINISHED" and run.data.tags["trireme.restarts"] == "1"
    assert_one_curve(tmp_path)


@pytest.mark.parametrize("victim", ["/raylet", "/gcs_server", "ray::EventQueue"])
def test_a_ray_of_the_commands_own_that_breaks_is_started_again(tmp_path: Path, victim: str) -> None:
    """By the same command, in the same process; nothing of it stays behind."""
    sockets, ray_folder = Path(f"/tmp/trireme-{os.getuid()}"), Path(tempfile.mkdtemp(dir="/tmp"))  # short: for sockets
    arguments = ["train", *SLOW, "workers=2", "strategy=ddp", "run.name=run", f"run.storage={tmp_path}"]
    process = start(arguments, env=environment(RAY_TMPDIR=str(ray_folder)))
    lines, folder = Lines(process), tmp_path / "run"
    wait_until(lambda: max(committed(folder), default=0) >= 10, 90)
    processes = psutil.Process(process.pid).children(recursive=True)
    next(child for child in processes if victim in _title(child).partition(" --")[0]).kill()
    assert process.wait(120) == 0, lines.text
    assert ("is gone: starting Ray and the run again" in lines.text) == victim.startswith("/"), lines.text
    assert "continuing after step" in lines.text
    assert_one_curve(tmp_path)
    wait_until(lambda: not any(child.is_running() for child in processes), 10)
    wait_until(lambda: not [*ray_folder.iterdir(), *sockets.glob(f"*-{process.pid}.socket")], 10)
    ray_folder.rmdir()
