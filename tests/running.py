"""Runs `trireme` as a person would: a process of its own, its output and exit code looked at."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch

from app.launchers import PRELOAD

try:
    from cluster.fast_start import client
except ImportError:  # it can be deleted
    client = None  # type: ignore[assignment]

ROOT = Path(__file__).parents[1]
POINTS = ["task=tests.tasks:Points", "train.global_batch_size=16", "tracking.log_model=false"]


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.strip().splitlines()[-1])


def environment(**more: str) -> dict[str, str]:
    """This environment without what would send a test's metrics, or its Ray, elsewhere."""
    drop = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_TMPDIR": _ray_folder()} | more


@functools.cache
def _ray_folder() -> str:
    """Where Ray notes which cluster runs on this machine: a test must not find another program's."""
    folder = tempfile.mkdtemp(prefix="tests-", dir="/tmp")  # short: sockets lie in it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def start(arguments: list[str], *, env: dict[str, str] | None = None, program: list[str] | None = None) -> Any:
    command = [*(program or [sys.executable, "-m", "app"]), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_ctrl_c,
    )


def _heed_ctrl_c() -> None:
    """Also where the tests were started in the background, whose processes ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def trireme(*arguments: str, env: dict[str, str] | None = None, timeout: float = 120.0) -> Ended:
    """Runs the command to its end: in a fork of a process that has imported everything, which saves it seconds, unless
    its environment is one that counts when libraries are loaded. `start` is the plain way."""
    whole = env or environment()
    if client is None or client.key(PRELOAD, whole) != client.key(PRELOAD, environment()):
        return finish(start(list(arguments), env=whole), timeout)
    server = client.ensure(PRELOAD, os.getpid(), environment())  # it ends with this process
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        more = client.inherited() | {"cwd": str(ROOT), "env": whole, "wait": True}
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        with client.ask(server, {"argv": ["-m", "app", *arguments], **more}, streams) as connection:
            begun, ended = client.answer(connection, timeout), client.answer(connection, timeout)
            if ended is None and begun is not None:
                end_tree(begun["pid"])
        said = [_all_of(file) for file in (out, err)]
    assert begun is not None, "the code has changed while the tests ran"
    assert ended is not None, f"did not end within {timeout} s:\n" + "\n".join(said)
    return Ended(ended["exit"], said[0], said[1])


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def torchrun(*arguments: str, workers: int = 2, timeout: float = 120.0) -> Ended:
    return finish(start(list(arguments), program=torchrun_program(workers=workers)), timeout)


def torchrun_program(*more: str, workers: int = 2) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone"]
    return [*program, *more, "-m", "app"]


def finish(process: Any, timeout: float = 120.0) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout} s: {condition}")


def committed(folder: Path) -> list[int]:
    """Steps of the committed checkpoints of a run, ascending."""
    return sorted(int(p.parent.name.split("-")[1]) for p in folder.glob("checkpoints/step-*/COMMIT.json"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mlflow_run(storage: Path, name: str) -> Any:
    """The one MLflow run of that name in the embedded store."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    experiment = client.get_experiment_by_name("trireme")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    assert len(found) == 1, [run.info.run_id for run in found]
    return found[0]


def mlflow_status(storage: Path, name: str) -> str | None:
    """The run's status; None while its writer has not made it. Read past MLflow, which would begin to make the
    database itself where the writer is about to."""
    if not (storage / "mlflow.db").exists():
        return None
    with contextlib.closing(sqlite3.connect(f"file:{storage}/mlflow.db?mode=ro", uri=True)) as database:
        try:
            found = database.execute("SELECT status FROM runs WHERE name = ?", (name,)).fetchall()
        except sqlite3.OperationalError:
            return None
    return found[0][0] if found else None


def curve(storage: Path, name: str, metric: str = "train/loss") -> dict[int, float]:
    """A metric by step; fails if a step was logged twice."""
    from mlflow.tracking import MlflowClient

    run = mlflow_run(storage, name)
    history = MlflowClient(f"sqlite:///{storage}/mlflow.db").get_metric_history(run.info.run_id, metric)
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps)), f"{metric} was logged twice at a step: {steps}"
    return {point.step: point.value for point in history}


@contextlib.contextmanager
def ray_head(cpus: int = 4) -> Iterator[str]:
    """A Ray head of our own, ended by its own process; yields its address."""
    with _head(cpus, ["--include-dashboard=false"]) as address:
        yield address


@contextlib.contextmanager
def ray_head_with_jobs(cpus: int = 4) -> Iterator[tuple[str, str]]:
    """The same with Ray's job server; yields both addresses."""
    port = free_port()
    own = [f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}"]
    with _head(cpus, ["--include-dashboard=true", *own]) as address:
        wait_until(lambda: _answers(port), 60)
        yield address, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _head(cpus: int, flags: list[str]) -> Iterator[str]:
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="trireme-ray-", dir="/tmp"))
    program = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    flags += [f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=100000000", f"--temp-dir={folder}"]
    process = subprocess.Popen(
        [*program, *flags, "--node-ip-address=127.0.0.1"],
        env=environment(RAY_AUTH_MODE="disabled"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: _answers(port), 60)
        yield f"127.0.0.1:{port}"
    finally:
        end_tree(process.pid)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group of the kernel whose processes may take `limit` bytes more than they have; either version."""
    first = Path("/sys/fs/cgroup/memory")
    group = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"trireme-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), 30)
        group.rmdir()
