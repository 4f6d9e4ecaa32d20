"""Sends an experiment to a cluster as a Ray job, follows its log, and stops it with a checkpoint.

Ray keeps a job's runtime environment, values and all, and shows it to all who may ask for it. So secret environment
variables go over SSH into a file on the head that only its owner reads, and the job removes it when it has read it.
"""

import asyncio
import json
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config import Config
from app.errors import UserError
from app.submit.client import Server
from app.submit.queue import PREFIX

EXCLUDES = (".git", ".venv", "venv", "__pycache__", "*.pyc", ".*_cache", ".hypothesis")
"""Never wanted on a cluster, as .gitignore would write it."""
STOP_SECONDS = 300  # from SIGTERM to SIGKILL: time to save a checkpoint
RECONNECT_SECONDS = 600.0  # how long a lost connection is tried again
MLFLOW = ("EXPERIMENT_NAME", "TRACKING_URI", "TRACKING_USERNAME", "TRACKING_TOKEN", "TRACKING_PASSWORD")
AGENT_SECONDS = 60.0  # the head's job agent comes up some seconds after its server
Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """A job that is to be sent: everything that is known before it is."""

    entrypoint: str
    folder: Path  # is shipped, without what .gitignore names
    plain: dict[str, str]  # environment variables
    secret: dict[str, str]
    run: str  # its name
    id: str = ""  # of the job; "": Ray draws one

    def lines(self) -> list[str]:
        """What goes along, for a person; of variables only the names."""
        names = ", ".join(sorted([*self.plain, *(f"{name} (secret)" for name in self.secret)])) or "none"
        return [f"ships       {self.folder}", f"environment {names}", f"runs        {self.entrypoint}"]


def prepare(
    verb: str,
    arguments: tuple[str, ...],
    options: list[str],
    *,
    run: str,
    folder: str | Path,
    env: tuple[str, ...] = (),
) -> Submission:
    """The job `trireme VERB ARGUMENTS OPTIONS`; arguments: experiment files and key=value.

    Raises:
        UserError: a file is not in the folder that is shipped, or a variable is not set.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} to ship: write --working-dir FOLDER")
    words = [word if "=" in word else _inside(word, folder) for word in arguments]
    names = [str(path.relative_to(folder)) for pattern in ("app.py", "app/**/*.py") for path in folder.glob(pattern)]
    return Submission(command(verb, [*words, *options], names), folder, *_variables(env), run)


def queued(job: Submission, user: str, priority: int) -> Submission:
    """A training's job that waits for its turn first.

    Raises:
        UserError: a secret would have to wait with it.
    """
    if job.secret:
        raise UserError(
            f"{sorted(job.secret)[0]} is a secret, and a queued run's are kept with it until it is sent again: set it "
            "on the cluster itself, and unset it here"
        )
    id = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    words = ["--id", id, "--user", user, "--priority", str(priority)]
    entrypoint = job.entrypoint.replace("app.submit train", f"app.submit queue enter {shlex.join(words)}", 1)
    return replace(job, entrypoint=entrypoint, id=id)


def command(verb: str, words: Sequence[str], names: Iterable[str]) -> str:
    """What a job runs for `trireme VERB WORDS`. names: the files of the folder that it runs in; of which a person's own
    `app` must not come before Trireme's."""
    apps = {name for name in names if name == "app.py" or name.startswith("app/")}
    hidden = bool(apps) and "app/submit/__main__.py" not in apps
    return f"python {'-P ' if hidden else ''}-m app.submit {verb} {shlex.join(words)}"


def _inside(file: str, folder: Path) -> str:
    """An experiment file's path as the job will see it."""
    path = Path(file).expanduser().resolve()
    if not path.is_relative_to(folder):
        raise UserError(f"{file} is not in {folder}, which is shipped: write --working-dir FOLDER")
    return str(path.relative_to(folder))


def _variables(names: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Plain and secret variables of this process that are to go along: those named, and MLflow's where they are set.

    Raises:
        UserError: a variable is asked for by value, or is not set here.
    """
    from app.console.masking import is_secret, mask_tree

    for name in names:
        if "=" in name:
            raise UserError(f"--env takes a variable's name, not its value: set {name.partition('=')[0]} and name it")
        if name not in os.environ:
            raise UserError(f"the environment variable {name}, which --env names, is not set here")
    known = (*names, *(f"MLFLOW_{name}" for name in MLFLOW))
    found = {name: os.environ[name] for name in known if name in os.environ}
    secret = {
        name: value
        for name, value in found.items()
        if is_secret(name) or "KEY" in name.upper().split("_") or mask_tree({"x": value})["x"] != value
    }
    return {name: value for name, value in found.items() if name not in secret}, secret


def refuse_written(config: Config) -> None:
    """Raises UserError if the configuration holds a secret: it would be shipped, and shown by Ray."""
    from app.config.io import flatten, to_dict
    from app.console.masking import mask_tree

    for key, value in flatten(to_dict(config)).items():
        if isinstance(value, str) and mask_tree({key: value})[key] != value:
            raise UserError(
                f"{key} holds a secret, which would be shipped with the job and shown by Ray: put it into an "
                "environment variable (MLflow's goes along by itself, others with --env NAME)"
            )


def _leave_secrets(cluster: str, secret: Mapping[str, str]) -> str:
    """Puts secrets into a file on the head of `cluster`, for the job alone; returns its path there.

    Raises:
        UserError: it could not be written.
    """
    from cluster.files import read_ray_file
    from cluster.launch import run_on_head

    name = f".trireme/secrets/{uuid.uuid4().hex}"
    command = f"umask 077; mkdir -p ~/.trireme/secrets; cat > ~/{name}; echo ~/{name}"
    answer = run_on_head(*read_ray_file(cluster), command, stdin=json.dumps(dict(secret)))
    if answer.problem or answer.exit_code:
        raise UserError(f"the secrets cannot be put on the head: {answer.problem or answer.stderr.strip()[-200:]}")
    return answer.stdout.strip().splitlines()[-1]


def cluster_options(config: Config, cluster: str) -> list[str]:
    """Keys that a training gets from its cluster's file: the storage that every machine can write to, unless the
    experiment names one. Raises ClusterError if the run could never fit on the cluster."""
    from cluster.files import read_cluster
    from cluster.pending import check_feasible

    check_feasible(read_cluster(cluster), config.workers, dict(config.resources_per_worker))
    storage = own_storage(cluster)
    return [f"run.storage={storage}"] if storage and config.run.storage == "runs" else []


def own_storage(cluster: str) -> str:
    """Where a cluster's file has runs kept; "" where it does not say, or there is no file."""
    from cluster.files import read_ray_file
    from cluster.ray_file import own_metadata

    storage = own_metadata(read_ray_file(cluster)[0]).get("storage") if cluster else None
    return f"{str(storage).rstrip('/')}/runs" if storage else ""


def submit(server: Server, job: Submission, say: Say) -> str:
    """Sends the job; returns its id.

    Raises:
        UserError: the cluster refuses it, or a secret would be shown.
    """
    for line in job.lines():
        say(line)
    asked: Any = {"entrypoint": job.entrypoint, "metadata": {"trireme_run": job.run}, "submission_id": job.id or None}
    variables = job.plain | {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), "PYTHONUNBUFFERED": "1"}
    if job.secret and server.cluster:
        variables["TRIREME_SECRETS"] = _leave_secrets(server.cluster, job.secret)
    elif job.secret:
        raise UserError(
            f"{sorted(job.secret)[0]} is a secret, and Ray shows a job's environment to everyone who may ask: name the "
            "cluster with --cluster FILE, so that it goes over SSH, or set it on the cluster itself"
        )
    environment = {"working_dir": str(job.folder), "excludes": list(EXCLUDES), "env_vars": variables}
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            return server.client.submit_job(**asked, runtime_env=environment)
        except (RuntimeError, ValueError) as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
                hint = ": leave files out with .gitignore" if "size" in first.lower() else ""
                raise UserError(f"the cluster refuses the job: {first[:300]}{hint}") from error
            time.sleep(1.0)


def ask(
    server: Server, verb: str, arguments: tuple[str, ...], options: list[str], say: Say, *, folder: str | Path = "."
) -> tuple[int, str]:
    """Runs `trireme VERB …` there; its exit code and what it printed. Nothing of MLflow's goes along.

    Raises:
        UserError, ClusterError: no server answers, it refuses the job, or a file is not in this folder.
    """
    job = replace(prepare(verb, arguments, options, run=verb, folder=folder), plain={}, secret={})
    printed: list[str] = []
    with server:
        code = follow(server, submit(server, job, say), printed.append, say)
    return code, "".join(printed)


def follow(server: Server, job_id: str, write: Callable[[str], None], say: Say) -> int:
    """Writes the job's log as it grows until the job ends; after a dropped connection it continues where it was.

    Returns the job's own exit status.
    Raises:
        UserError: there is no such job, or the cluster has not answered for `RECONNECT_SECONDS`, or refuses us.
    """
    from ray.exceptions import AuthenticationError

    _status(server, job_id)
    written, lost_at = 0, 0.0  # characters of the log

    async def tail() -> None:
        """Writes what is new until the job ends. Every connection sends the log from its beginning."""
        nonlocal written
        seen = 0
        async for text in server.client.tail_job_logs(job_id):
            write(text[max(0, written - seen) :])
            seen += len(text)
            written = max(written, seen)

    while True:
        try:
            asyncio.run(tail())
            info = server.client.get_job_info(job_id)
            if info.status.is_terminal():
                if not written or (str(info.status) == "FAILED" and info.driver_exit_code is None):
                    say(f"Ray says: {info.message}")  # the job did not get as far as a log
                return {"SUCCEEDED": 0, "STOPPED": 130}.get(str(info.status), info.driver_exit_code or 1)
            lost_at = 0.0
        except Exception as error:
            if "does not exist" in str(error):  # the server is back, but another one
                raise UserError(f"there is no job {job_id} at {server}") from error
            if not lost_at:
                lost_at = time.monotonic()
                say(f"the connection is lost; the job continues, and its log once it is back ({type(error).__name__})")
            elif time.monotonic() - lost_at > RECONNECT_SECONDS:
                raise UserError(
                    f"the cluster has not answered for {RECONNECT_SECONDS:.0f} s; the job may be running: "
                    f"`trireme submit logs {job_id}` follows it again"
                ) from error
            try:
                server.connect()
            except Exception as refusal:  # tried again at the next turn
                if isinstance(refusal.__cause__, AuthenticationError):
                    raise
        time.sleep(0.5)


def stop(server: Server, job_id: str, say: Say) -> str:
    """Asks the job to save a checkpoint and stop, and waits until it has. Returns how it ended.

    Raises:
        UserError: there is no such job, or it has ended already.
    """
    status = _status(server, job_id)
    if status.is_terminal():
        raise UserError(f"the job {job_id} has ended already: {status.value.lower()}")
    server.client.stop_job(job_id)
    say("asked to save a checkpoint and stop")
    deadline = time.monotonic() + STOP_SECONDS
    while not (status := _status(server, job_id)).is_terminal():
        if time.monotonic() > deadline:
            raise UserError(f"the job {job_id} did not stop within {STOP_SECONDS} s: Ray ends it now")
        time.sleep(0.3)
    return str(status.value).lower()


def _status(server: Server, job_id: str) -> Any:
    try:
        return server.client.get_job_status(job_id)
    except RuntimeError as error:
        raise UserError(f"the job {job_id} cannot be found at {server}: {str(error).strip()[:200]}") from error
