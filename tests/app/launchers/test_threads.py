"""CPU threads of workers with GPUs, and the environment of every worker; no GPU is needed to see either."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
import torch

from app import train
from app.launchers import ray_workers, threads
from cluster.environment import set_defaults, shared
from tests.chain import config
from tests.running import ROOT, environment, wait_until

SET, THREE, TORCHRUN = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3"}, {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("gpus", "own", "starter", "taken"),
    [
        # in Ray, started by its raylet
        (1.0, {}, {}, 2),
        (2.0, {}, {}, 4),
        (0.1, {}, {}, 1),
        (0.0, {}, {}, 1),  # it has the threads of its CPUs
        (1.0, THREE, {}, 3),
        (1.0, {}, SET, 1),  # where Ray was started
        # one of four processes on a node: torchrun gives each one thread, under Slurm it is the user's
        (None, SET | TORCHRUN, {}, 2),
        (None, SET | TORCHRUN, SET, 1),
        (None, SET, {}, 1),
        (None, {"SLURM_CPUS_PER_TASK": "4"}, {}, 4),
    ],
)
def test_a_worker_takes_its_share_unless_the_user_has_said(
    monkeypatch: pytest.MonkeyPatch, gpus: float | None, own: dict[str, str], starter: dict[str, str], taken: int
) -> None:
    """On a node of 8 cores and 4 GPUs. gpus: that a worker has in Ray. own, starter: the environment that is asked for,
    and that of the process which starts it."""
    for module in (ray_workers, threads):
        monkeypatch.setattr(module, "usable_cores", lambda: 8)
    has = {"get_node_id.return_value": "b", "get_assigned_resources.return_value": {"GPU": gpus} if gpus else {}}
    monkeypatch.setattr(ray, "get_runtime_context", Mock(return_value=Mock(runtime_env={"env_vars": own}, **has)))
    nodes = [{"NodeID": name, "Resources": {"GPU": gpus}} for name, gpus in (("a", 1.0), ("b", 4.0))]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    before, process = torch.get_num_threads(), subprocess.Popen(["sleep", "60"], env=starter | {"IS": "up"})
    environ = Path(f"/proc/{process.pid}/environ")
    wait_until(lambda: b"IS=up" in environ.read_bytes())  # Popen returns a moment before Linux shows it
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in ((SET if gpus is not None else {}) | own | {"RAY_RAYLET_PID": str(process.pid)}).items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    try:
        threads.take_share_of_node(4) if gpus is None else ray_workers.work_in("/nowhere")
        assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == (str(taken), taken)
    finally:
        torch.set_num_threads(before)
        process.kill()
        process.wait()


def test_what_is_set_where_the_user_has_set_nothing() -> None:
    environ = {"HOME": "/"}
    set_defaults(environ)
    assert environ == {
        "HOME": "/",
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
    """Workers of a cluster that runs have it too: test_launchers.py."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()
    for function in ("_under_torchrun", "_in_a_run"):
        monkeypatch.setattr(train, function, lambda *_: seen.append(os.environ.pop(name)))
    for launcher in ("torchrun", "local", "ray"):
        train.train(config(f"launcher={launcher}", "run.name=x"), Mock())
    assert seen == ["2"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_takes_it_also_once_torch_is_imported() -> None:
    code = "import torch; from cluster.environment import set_defaults; set_defaults(); torch.zeros(1, device='cuda');"
    code += "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env) == b"[True]\n"
