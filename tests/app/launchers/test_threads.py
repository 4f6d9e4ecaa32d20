"""CPU threads of workers with GPUs, and the environment of every worker; no GPU is needed to see either."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from app.launchers import ray_workers, threads
from app.launchers.actors import placement
from app.launchers.ray_launch import resources_to_ask_for
from cluster import connect
from cluster.environment import set_defaults, shared
from cluster.shape import NodeState, of_gpus
from strategies.layout import ParallelDims
from tests.chain import config
from tests.running import ROOT, environment


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "gpus", "own", "expected"),
    [(16, 1, 1, 16), (96, 8, 1, 12), (96, 8, 2, 24), (96, 8, 0.5, 6), (4, 8, 1, 1), (7, 2, 1, 3), (8, 1, 2, 8)],
)
def test_a_share_of_the_cores(cores: int, gpus: float, own: float, expected: int) -> None:
    assert threads.share(cores, gpus, own) == expected


def test_a_gpu_is_asked_for_without_cpus_so_that_it_is_placed_where_none_are_free() -> None:
    found: Any = SimpleNamespace(gpus=8, gpus_of_largest=4, shape=of_gpus(8, "h100-80gb", 4))
    workers, each = resources_to_ask_for(config("strategy=ddp"), found)
    assert (workers, each) == (8, {"GPU": 1.0})
    taken = [NodeState(name, "", {"CPU": 64.0, "GPU": 4.0}, {"CPU": 0.0, "GPU": 4.0}) for name in "ab"]
    assert placement(ParallelDims(dp_replicate=workers), [each], taken).bundles == [each] * 8


def test_a_worker_in_ray_takes_its_share_unless_the_user_has_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(gpus: float, asked: dict[str, str], raylet: dict[str, str]) -> tuple[str | None, int]:
        here = SimpleNamespace(
            get_assigned_resources=lambda: {"GPU": gpus} if gpus else {},
            get_node_id=lambda: "b",
            runtime_env={"env_vars": asked},
        )
        nodes = [{"NodeID": "a", "Resources": {"GPU": 1.0}}, {"NodeID": "b", "Resources": {"GPU": 4.0}}]
        monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        with subprocess.Popen(["sleep", "60"], env=raylet | {"STARTED": "yes"}) as starter:
            while b"STARTED" not in Path(f"/proc/{starter.pid}/environ").read_bytes():
                time.sleep(0.01)  # Popen returns a moment before Linux shows it
            monkeypatch.setenv("RAY_RAYLET_PID", str(starter.pid))
            monkeypatch.setenv("OMP_NUM_THREADS", asked.get("OMP_NUM_THREADS", "1"))  # as Ray sets it
            torch.set_num_threads(1)
            ray_workers.work_in(str(tmp_path / "none"))
            starter.kill()
        return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()

    monkeypatch.setattr(ray_workers, "usable_cores", lambda: 8)
    assert work(1.0, {}, {}) == ("2", 2) and work(2.0, {}, {}) == ("4", 4)
    assert work(0.0, {}, {}) == ("1", 1), "a worker without a GPU has the threads of its CPUs"
    assert work(1.0, {"OMP_NUM_THREADS": "3"}, {}) == ("3", 3)
    assert work(1.0, {}, {"OMP_NUM_THREADS": "1"}) == ("1", 1), "set where Ray was started"


SHARE = "from app.launchers import threads; threads.usable_cores = lambda: 6; threads.take_share_of_node(2);"
SHARE += "import os, torch; print(os.environ.get('OMP_NUM_THREADS'), torch.get_num_threads())"


@pytest.mark.slow
def test_a_process_of_torchrun_takes_its_share_and_not_the_one_thread_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "share.py").write_text(SHARE)
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "share.py"]
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "3 3\n3 3\n"


@pytest.mark.parametrize(("name", "given", "taken"), [("OMP_NUM_THREADS", "1", 1), ("SLURM_CPUS_PER_TASK", "4", 4)])
def test_a_process_of_slurm_takes_what_it_is_given(
    name: str, given: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, given)
    torch.set_num_threads(1)
    threads.take_share_of_node(2)
    assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == (given, taken)


# --- the environment --------------------------------------------------------------------------------------------------


def test_what_is_set_where_the_user_has_set_nothing() -> None:
    environ = {"HOME": "/"}
    set_defaults(environ)
    assert environ.pop("HOME") == "/" and environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    set_defaults(environ := dict(own))
    assert environ == own | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert shared(environ | {"OMP_NUM_THREADS": "3", "HOME": "/"}) == environ | {"OMP_NUM_THREADS": "3"}
    job = {"OMP_NUM_THREADS": "1", "RAY_RAYLET_PID": "7"}
    assert shared(job) == {}, "Ray has set it for the job's own process, which has no CPUs"


def test_workers_of_a_cluster_that_runs_have_it(connected: None) -> None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_ALLOC_CONF")
    asked = ray.remote(lambda: [os.environ.get(name) for name in names])
    assert ray.get(asked.remote()) == ["2", "expandable_segments:True"]


def test_every_launcher_sets_it_before_its_first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from app import train

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    seen = list[str | None]()
    look: Any = lambda *_: seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))  # noqa: E731
    for name in ("_under_torchrun", "_in_a_run"):
        monkeypatch.setattr(train, name, look)
    for launcher in ("torchrun", "local", "ray"):
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        train.train(config(f"launcher={launcher}", "run.name=x"), SimpleNamespace())  # type: ignore[arg-type]
    assert seen == ["2"] * 3
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert connect._share_environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


EXPANDS = "import torch; from cluster.environment import set_defaults; set_defaults(); torch.zeros(1, device='cuda');"
EXPANDS += "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_takes_it_also_once_torch_is_imported() -> None:
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDS], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[True]\n"
