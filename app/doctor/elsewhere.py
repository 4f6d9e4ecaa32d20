"""Doctor on a cluster that this machine is not part of: sent there as a job, its report brought back."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from app.submit.client import Server, Target, allow_token, target
from app.submit.submission import Submission, follow, inside, submit


def where(cluster: str | None) -> Target | None:
    """The job server to ask; None where the cluster can be asked from here.

    That is an http RAY_ADDRESS; or the head of a cluster file that is another machine, unless this one is of a running
    cluster, or RAY_ADDRESS says which one is meant.
    """
    from cluster.connect import running_here
    from cluster.launch import load
    from cluster.ray_file import is_this_machine

    allow_token()  # before anything imports Ray
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        return target(address, None)
    if not cluster or address or running_here():
        return None
    return None if is_this_machine(load(cluster)[0]) else target(None, cluster)


def ask(there: Target, arguments: tuple[str, ...], options: list[str], say: Callable[[str], None]) -> tuple[int, str]:
    """Doctor's exit status and what it printed there.

    Raises:
        UserError, ClusterError: nobody answers, its versions do not fit, or a file is not in this folder.
    """
    from app.submit import secrets
    from app.submit.package import check_size, look

    folder = Path.cwd()
    package = look(folder)
    check_size(package)
    shipped = [inside(argument, folder) for argument in arguments]
    entrypoint = shlex.join(["python", "-m", "app.submit", "doctor", *shipped, *options])
    plain, secret = secrets.chosen(())
    job = Submission(entrypoint, package, plain, secret if there.cluster else {}, {"trireme_run": "doctor"})
    printed: list[str] = []
    with Server(there) as server:
        job_id = submit(server, there, job, say)
        code = follow(server, job_id, printed.append, say)
    return code, "".join(printed)


def result(printed: str, *, only: str = "") -> str:
    """Doctor's own words in a job's log. only: the beginning of the one line that is wanted."""
    lines = [line for line in printed.splitlines() if not line.startswith("note: ")]
    return next((line for line in reversed(lines) if line.startswith(only)), "") if only else "\n".join(lines)
