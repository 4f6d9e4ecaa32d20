"""Ray heads of our own, for as long as tests need them."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.remote import free_port, is_open
from tests.running import end_tree, environment, wait_until


@contextlib.contextmanager
def ray_head(*flags: str) -> Iterator[str]:
    """A Ray head of our own with four CPUs, ended by its own process; yields its address. On a machine with much other
    work `ray start` gives up after 30 s, maybe with its port open already; then it is tried again."""
    with tempfile.TemporaryDirectory(prefix="trireme-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        said = Path(folder, "said")
        for _ in range(5):
            port = free_port()
            process = _start_head(port, folder, flags or ("--include-dashboard=false",), said)
            try:
                if process.poll() is None:
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                end_tree(process.pid)
                process.wait()
        raise AssertionError(f"Ray does not start:\n{said.read_text()}")


def _start_head(port: int, folder: str, flags: tuple[str, ...], said: Path) -> subprocess.Popen[bytes]:
    """The process of a head that runs, or that has given up."""
    program = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", *flags]
    program += ["--num-cpus=4", "--num-gpus=0", "--object-store-memory=100000000", f"--temp-dir={folder}"]
    program += ["--node-ip-address=127.0.0.1"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # a job's `python` is the head's
    env = environment(RAY_AUTH_MODE="disabled", PATH=path)
    with said.open("w") as file:
        process = subprocess.Popen(program, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: process.poll() is not None or "Ray runtime started" in said.read_text())
    return process


@contextlib.contextmanager
def ray_head_with_jobs() -> Iterator[tuple[str, str]]:
    """The same with Ray's job server; yields both addresses."""
    port = free_port()
    own = [f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}"]
    with ray_head("--include-dashboard=true", *own) as address:
        wait_until(lambda: is_open("127.0.0.1", port))
        yield address, f"http://127.0.0.1:{port}"
