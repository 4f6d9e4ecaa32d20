"""Doctor on a cluster that this machine is not part of: sent there as a job, its report brought back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from app.submit.client import Server, allow_token
from app.submit.submission import follow, prepare, submit


def server_of(cluster: str | None) -> Server | None:
    """The job server to ask; None where the cluster can be asked from here.

    That is an http RAY_ADDRESS; or the head of a cluster file that is another machine, unless this one is of a running
    cluster, or RAY_ADDRESS says which one is meant.
    """
    from cluster.connect import running_here
    from cluster.files import read_ray_file
    from cluster.ray_file import is_this_machine

    allow_token()  # before anything imports Ray
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        return Server(address)
    if not cluster or address or running_here() or is_this_machine(read_ray_file(cluster)[0]):
        return None
    return Server(cluster=cluster)


def ask(server: Server, arguments: tuple[str, ...], options: list[str], say: Callable[[str], None]) -> tuple[int, str]:
    """Doctor's exit code and what it printed there.

    Raises:
        UserError, ClusterError: no server answers, it refuses the job, or a file is not in this folder.
    """
    job = prepare("doctor", arguments, options, run="doctor", folder=Path.cwd())
    job = dataclasses.replace(job, plain={}, secret={})  # nothing of MLflow's is needed
    printed: list[str] = []
    with server:
        code = follow(server, submit(server, job, say), printed.append, say)
    return code, "".join(printed)


def result(printed: str, *, only: str = "") -> str:
    """Doctor's own words in a job's log. only: the beginning of the one line that is wanted."""
    lines = [line for line in printed.splitlines() if not line.startswith("note: ")]
    return next((line for line in reversed(lines) if line.startswith(only)), "") if only else "\n".join(lines)
