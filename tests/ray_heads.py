"""Starts and ends Ray heads for tests."""

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
    """Starts a Ray head with four CPUs, yields its address, and ends it by its process ID.

    On a busy machine `ray start` gives up after 30 s, even if its port is open; it is then tried
    again.
    """
    with tempfile.TemporaryDirectory(
        prefix="trireme-ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        log = Path(folder, "said")
        for _ in range(5):
            port = free_port()
            process = _start_head(port, folder, flags or ("--include-dashboard=false",), log)
            try:
                if process.poll() is None:
                    yield f"127.0.0.1:{port}"
                    return
            finally:
                end_tree(process.pid)
                process.wait()
        raise AssertionError(f"Ray does not start:\n{log.read_text()}")


def _start_head(
    port: int, folder: str, flags: tuple[str, ...], log: Path
) -> subprocess.Popen[bytes]:
    """Starts a head, and returns its process once it runs or has given up."""
    program = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--include-log-monitor=false",  # no driver of ours is shown its workers' logs
        *flags,
        "--num-cpus=4",
        "--num-gpus=0",
        "--object-store-memory=100000000",
        f"--temp-dir={folder}",
        "--node-ip-address=127.0.0.1",
    ]
    # A job uses the `python` that is first in the head's PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(
        RAY_AUTH_MODE="disabled",
        PATH=path,
        # Ray starts workers ahead, which no run uses, since its own have another environment.
        RAY_prestart_worker_first_driver="0",
    )
    with log.open("w") as file:
        process = subprocess.Popen(
            program, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    wait_until(lambda: process.poll() is not None or "Ray runtime started" in log.read_text())
    return process


@contextlib.contextmanager
def ray_head_with_jobs() -> Iterator[tuple[str, str]]:
    """Starts a Ray head with a job server, and yields the addresses of both."""
    port = free_port()
    flags = [f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}"]
    with ray_head("--include-dashboard=true", *flags) as address:
        wait_until(lambda: is_open("127.0.0.1", port))
        yield address, f"http://127.0.0.1:{port}"
