"""CPU threads of workers with GPUs, and the environment of every worker; no GPU is needed to see either."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from app import train
from app.launchers import ray_workers, threads
from cluster import connect
from cluster.environment import set_defaults, shared
from tests.chain import config
from tests.running import ROOT, environment


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def takes(take: Callable[[], None], own: dict[str, str], starter: dict[str, str]) -> tuple[str | None, int]:
    """What OMP_NUM_THREADS and torch's threads are after `take`, in an environment of one's own, started by a process
    with another."""
    process = subprocess.Popen(["sleep", "60"], env=starter | {"IS": "up"})
    while b"IS=up" not in Path(f"/proc/{process.pid}/environ").read_bytes():
        time.sleep(0.01)  # Popen returns a moment before Linux shows it
    with pytest.MonkeyPatch.context() as patch, process:
        patch.setattr(os, "getppid", lambda: process.pid)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        for name, value in (own | {"RAY_RAYLET_PID": str(process.pid)}).items():
            patch.setenv(name, value)
        torch.set_num_threads(1)
        take()
        process.kill()
        return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def test_a_share_of_the_cores() -> None:
    given = [(96, 8, 2), (96, 8, 0.5), (4, 8, 1), (7, 2, 1), (8, 1, 2)]
    assert [threads.share(*each) for each in given] == [24, 6, 1, 3, 8]


SET, THREE, ELASTIC = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3"}, {"TORCHELASTIC_RUN_ID": "x"}


def test_a_worker_in_ray_takes_its_share_unless_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": name, "Resources": {"GPU": own}} for name, own in (("a", 1.0), ("b", 4.0))]
    here: Any = SimpleNamespace(get_node_id=lambda: "b")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_workers, "usable_cores", lambda: 8)
    for resources, asked, raylet, taken in (
        ({"GPU": 1.0}, {}, {}, 2),
        ({"GPU": 2.0}, {}, {}, 4),
        ({}, {}, {}, 1),  # it has the threads of its CPUs
        ({"GPU": 1.0}, THREE, {}, 3),
        ({"GPU": 1.0}, {}, SET, 1),  # where Ray was started
    ):
        here.get_assigned_resources, here.runtime_env = resources.copy, {"env_vars": asked}
        assert takes(lambda: ray_workers.work_in("/nowhere"), SET | asked, raylet) == (str(taken), taken)


def test_a_process_of_torchrun_or_slurm_takes_its_share_or_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    for own, agent, taken in (
        (SET | ELASTIC, {}, 3),  # torchrun gives every process one thread
        (SET | ELASTIC, SET, 1),
        (SET, {}, 1),  # under Slurm it is the user's
        ({"SLURM_CPUS_PER_TASK": "4"}, {}, 4),
    ):
        assert takes(lambda: threads.take_share_of_node(2), own, agent) == (str(taken), taken)


# --- the environment; of workers of a cluster that runs: test_ray_launch.py -------------------------------------------


def test_what_is_set_where_the_user_has_set_nothing() -> None:
    environ = {"HOME": "/"}
    set_defaults(environ)
    assert environ.pop("HOME") == "/" and environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    own["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "15000"
    set_defaults(environ := dict(own))
    assert environ == own | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert shared(environ | SET | {"HOME": "/"}) == environ | SET
    assert shared(SET | {"RAY_RAYLET_PID": "7"}) == {}, "Ray has set it for the job's own process, which has no CPUs"


def test_every_launcher_sets_it_before_its_first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()
    for function in ("_under_torchrun", "_in_a_run"):
        monkeypatch.setattr(train, function, lambda *_: seen.append(os.environ.get(name)))
    for launcher in ("torchrun", "local", "ray"):
        monkeypatch.delenv(name, raising=False)
        train.train(config(f"launcher={launcher}", "run.name=x"), SimpleNamespace())  # type: ignore[arg-type]
    assert seen == ["2"] * 3
    monkeypatch.delenv(name)
    assert connect._share_environment()[name] == "2"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_takes_it_also_once_torch_is_imported() -> None:
    code = "import torch; from cluster.environment import set_defaults; set_defaults(); torch.zeros(1, device='cuda');"
    code += "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env) == b"[True]\n"
