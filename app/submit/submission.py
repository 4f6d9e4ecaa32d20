"""Sends an experiment to a cluster as a Ray job, follows its log, and stops it with a checkpoint."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Config
from app.errors import UserError
from app.submit import secrets, versions
from app.submit.client import Server, Target, TokenRefused
from app.submit.package import MAX_BYTES, Package, check_size, look

STOP_SECONDS = 300  # from SIGTERM to SIGKILL: time to save a checkpoint
AWAY_SECONDS = 600.0  # how long a lost connection is tried again
Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """A job that is to be sent: everything that is known before it is."""

    entrypoint: str
    package: Package
    plain: dict[str, str]
    secret: dict[str, str]
    metadata: dict[str, str]

    def lines(self) -> list[str]:
        """What goes along, for a person; of variables only the names."""
        names = ", ".join(sorted([*self.plain, *(f"{name} (secret)" for name in self.secret)])) or "none"
        return [f"ships       {self.package.sentence()}", f"environment {names}", f"runs        {self.entrypoint}"]


def prepare(
    config: Config,
    arguments: tuple[str, ...],
    *,
    folder: Path,
    excludes: tuple[str, ...] = (),
    env: tuple[str, ...] = (),
    max_bytes: int = MAX_BYTES,
    cluster: str = "",
) -> Submission:
    """Everything about a job that can be known, and be wrong, before the cluster is asked.

    Raises:
        UserError, ClusterError: a file is not in the folder, it is too large, a variable is not set, the run could
            never fit; nothing was sent.
    """
    secrets.refuse_written(config)
    folder = folder.expanduser().resolve()
    shipped = [inside(argument, folder) for argument in arguments]
    if cluster:
        from cluster.pending import check_ever
        from cluster.shape import read_cluster

        check_ever(read_cluster(cluster), config.workers, dict(config.resources_per_worker))
        shipped += _storage(config, cluster)
    package = look(folder, excludes)
    check_size(package, max_bytes)
    missing = {a for a in shipped if "=" not in a} - {name for name, _ in package.files}
    if missing:
        raise UserError(f"{sorted(missing)[0]} is left out of what is shipped: look at .gitignore and --exclude")
    plain, secret = secrets.chosen(env)
    metadata = {"trireme_run": config.run.name, "trireme_experiment": " ".join(shipped)[:500]}
    entrypoint = shlex.join(["python", "-m", "app.submit", "train", *shipped])
    return Submission(entrypoint, package, plain, secret, metadata)


def inside(argument: str, folder: Path) -> str:
    """An experiment file's path as the job will see it."""
    if "=" in argument:
        return argument
    path = Path(argument).expanduser().resolve()
    if not path.is_relative_to(folder):
        raise UserError(f"{argument} is not in {folder}, which is shipped: write --working-dir FOLDER")
    return str(path.relative_to(folder))


def _storage(config: Config, cluster: str) -> list[str]:
    """Where the cluster's file says that every machine can write, unless the experiment says something itself."""
    from cluster.launch import load
    from cluster.ray_file import own_metadata

    storage = own_metadata(load(cluster)[0]).get("storage")
    if not storage or config.run.storage != "runs":
        return []
    return [f"run.storage={str(storage).rstrip('/')}/runs"]


def submit(server: Server, target: Target, job: Submission, say: Say) -> str:
    """Sends the job; returns its id.

    Raises:
        UserError: the cluster's versions do not fit, or it refuses.
    """
    mine = versions.here()
    versions.check_before(mine, server.versions())
    for line in job.lines():
        say(line)
    variables = job.plain | {
        versions.VARIABLE: json.dumps(mine),
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        "PYTHONUNBUFFERED": "1",
    }
    if job.secret and target.cluster:
        variables["TRIREME_SECRETS"] = secrets.leave(target.cluster, job.secret)
    elif job.secret:
        raise UserError(
            f"{sorted(job.secret)[0]} is a secret, and Ray shows a job's environment to whoever may ask: name the "
            "cluster with --cluster FILE, so that it goes over SSH, or set it on the cluster itself"
        )
    environment = {
        "working_dir": str(job.package.folder),
        "excludes": list(job.package.excludes),
        "env_vars": variables,
    }
    deadline = time.monotonic() + 60
    while True:
        try:
            return server.said(
                lambda: server.client.submit_job(
                    entrypoint=job.entrypoint, runtime_env=environment, metadata=job.metadata
                )
            )
        except RuntimeError as error:  # the head's job agent comes up some seconds after its server
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
                raise UserError(f"the cluster refuses the job: {first[:300]}") from error
            time.sleep(1.0)


def follow(server: Server, job_id: str, write: Callable[[str], None], say: Say) -> int:
    """Writes the job's log as it grows until the job ends; a dropped connection is taken up where it broke off.

    Returns the job's own exit status.
    Raises:
        UserError: there is no such job, or nobody has answered for `AWAY_SECONDS`.
    """
    _status(server, job_id)
    written, away = 0, 0.0
    while True:
        try:
            written = asyncio.run(_tail(server, job_id, written, write))
            if server.client.get_job_status(job_id).is_terminal():
                info = server.client.get_job_info(job_id)
                if not written or (info.driver_exit_code is None and exit_status(info) == 1):
                    say(f"Ray says: {info.message}")  # it never came to a log
                return exit_status(info)
            away = 0.0
        except Dropped as dropped:
            written = dropped.written
            now = time.monotonic()
            if not away:
                away = now
                say(f"the connection is gone; the job goes on, and so does this when it is back ({dropped})")
            elif now - away > AWAY_SECONDS:
                raise UserError(
                    f"the cluster has not answered for {AWAY_SECONDS:.0f} s; the job may be running: "
                    f"`trireme submit logs {job_id}` follows it again"
                ) from dropped
        except RuntimeError as error:
            if "does not exist" in str(error):  # the server is back, but another one
                raise UserError(f"there is no job {job_id} at {server.target.words}") from error
            away = away or time.monotonic()
        time.sleep(0.5)
        if away:
            away = away if not _back(server) else 0.0


def _back(server: Server) -> bool:
    try:
        server.reconnect()
        return True
    except TokenRefused:
        raise
    except Exception:
        return False


class Dropped(Exception):
    """The log's connection broke; `written`: characters that had come."""

    def __init__(self, written: int, reason: str) -> None:
        super().__init__(reason)
        self.written = written


async def _tail(server: Server, job_id: str, written: int, write: Callable[[str], None]) -> int:
    """Writes what comes after the first `written` characters of the log; returns how many there have been."""
    seen = 0
    try:
        async for text in server.client.tail_job_logs(job_id):
            fresh = text[max(0, written - seen) :]
            seen += len(text)
            if fresh:
                write(fresh)
                written = max(written, seen)
    except Exception as error:
        if "does not exist" in str(error):
            raise
        raise Dropped(max(written, seen), type(error).__name__) from error
    return max(written, seen)


def exit_status(info: Any) -> int:
    """The job's own exit status; 130 if it was stopped, 1 if it failed before it had one."""
    status = str(getattr(info.status, "value", info.status))
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return 130
    return info.driver_exit_code or 1


def stop(server: Server, job_id: str, say: Say, *, timeout: float = STOP_SECONDS) -> str:
    """Asks the job to save a checkpoint and stop, and waits until it has. Returns how it ended.

    Raises:
        UserError: there is no such job, or it has ended already.
    """
    status = _status(server, job_id)
    if status.is_terminal():
        raise UserError(f"the job {job_id} has ended already: {status.value.lower()}")
    server.said(lambda: server.client.stop_job(job_id))
    say("asked to save a checkpoint and stop")
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        status = _status(server, job_id)
        if status.is_terminal():
            return str(status.value).lower()
        time.sleep(0.3)
    raise UserError(f"the job {job_id} did not stop within {timeout:.0f} s: Ray ends it, or `ray job delete` does")


def _status(server: Server, job_id: str) -> Any:
    try:
        return server.said(lambda: server.client.get_job_status(job_id))
    except RuntimeError as error:
        raise UserError(f"there is no job {job_id} at {server.target.words}") from error
