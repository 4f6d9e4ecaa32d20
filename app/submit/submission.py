"""Sends an experiment to a cluster as a Ray job, follows its log, and stops it with a checkpoint.

Ray keeps a job's runtime environment, with all values, and shows it to everyone who may ask for it.
So secret environment variables go over SSH into a file on the head that only its owner can read,
and the job removes the file when it has read it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import Config
from app.errors import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UserError
from app.submit.client import Server
from app.submit.queue import PREFIX

if TYPE_CHECKING:
    from ray.job_submission import JobStatus

EXCLUDES = (".git", ".venv", "venv", "__pycache__", "*.pyc", ".*_cache", ".hypothesis")
"""Never wanted on a cluster; in the syntax of .gitignore."""
STOP_SECONDS = 300
"""From SIGTERM to SIGKILL: time to save a checkpoint."""
RECONNECT_SECONDS = 600.0
"""How long a lost connection is tried again."""
MLFLOW_VARIABLES = (
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
)
"""Environment variables that go along if they are set."""
AGENT_SECONDS = 60.0
"""The head's job agent starts some seconds after its server."""
ENDINGS = {"SUCCEEDED": EXIT_DONE, "STOPPED": EXIT_STOPPED}
"""Exit codes by Ray's job status; a failed job has one of its own."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job before it is sent.

    Args:
        entrypoint: The command that the job runs.
        folder: Is shipped, without what .gitignore names.
        plain: Environment variables that Ray may show.
        secret: Environment variables that Ray must not see.
        run: The run's name.
        id: Of the job; "" lets Ray choose one.
    """

    entrypoint: str
    folder: Path
    plain: dict[str, str]
    secret: dict[str, str]
    run: str
    id: str = ""

    def lines(self) -> list[str]:
        """What is sent, for a person; of variables only the names."""
        names = sorted([*self.plain, *(f"{name} (secret)" for name in self.secret)])
        return [
            f"ships       {self.folder}",
            f"environment {', '.join(names) or 'none'}",
            f"runs        {self.entrypoint}",
        ]


def prepare(
    verb: str,
    arguments: tuple[str, ...],
    options: list[str],
    *,
    run: str,
    folder: str | Path,
    env: tuple[str, ...] = (),
) -> Submission:
    """The job `trireme VERB ARGUMENTS OPTIONS`.

    Args:
        verb: One or two words.
        arguments: Experiment files and key=value.
        options: Further words, which are not changed.
        run: The run's name.
        folder: Is shipped.
        env: Names of environment variables to send with the job.

    Raises:
        UserError: A file is not in the folder that is shipped, or a variable is not set.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} to ship: write --working-dir FOLDER")
    words = [word if "=" in word else _path_in(folder, word) for word in arguments]
    app_files = [*folder.glob("app.py"), *folder.glob("app/**/*.py")]
    names = [str(path.relative_to(folder)) for path in app_files]
    plain, secret = _variables(env)
    return Submission(
        entrypoint=job_command(verb, [*words, *options], names),
        folder=folder,
        plain=plain,
        secret=secret,
        run=run,
    )


def queued(job: Submission, user: str, priority: int) -> Submission:
    """The same training as a job that first waits in the queue.

    Raises:
        UserError: A secret would have to wait with it.
    """
    if job.secret:
        raise UserError(
            f"{sorted(job.secret)[0]} is a secret, and a queued run's are kept with it until it is "
            "sent again: set it on the cluster itself, and unset it here"
        )
    id = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    options = shlex.join(["--id", id, "--user", user, "--priority", str(priority)])
    entrypoint = job.entrypoint.replace("app.submit train", f"app.submit queue enter {options}", 1)
    return replace(job, entrypoint=entrypoint, id=id)


def job_command(verb: str, words: Sequence[str], files: Iterable[str]) -> str:
    """The command of a job that runs `trireme VERB WORDS`.

    Args:
        verb: One or two words.
        words: Arguments and options.
        files: Files of the folder that the job runs in. If a user's own `app` is among them, it
            must not come before Trireme's.
    """
    app_files = {name for name in files if name == "app.py" or name.startswith("app/")}
    has_other_app = bool(app_files) and "app/submit/__main__.py" not in app_files
    python = "python -P" if has_other_app else "python"
    return f"{python} -m app.submit {verb} {shlex.join(words)}"


def _path_in(folder: Path, file: str) -> str:
    """An experiment file's path as the job will see it.

    Raises:
        UserError: The file is not in the folder.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_relative_to(folder):
        raise UserError(f"{file} is not in {folder}, which is shipped: write --working-dir FOLDER")
    return str(path.relative_to(folder))


def _variables(names: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of this process that are sent with the job: those named, and MLflow's if set.

    Returns:
        Plain variables, and secret ones.

    Raises:
        UserError: A variable is given with its value, or is not set here.
    """
    for name in names:
        if "=" in name:
            variable = name.partition("=")[0]
            raise UserError(
                f"--env takes a variable's name, not its value: set {variable} and name it"
            )
        if name not in os.environ:
            raise UserError(f"the environment variable {name}, which --env names, is not set here")
    plain: dict[str, str] = {}
    secret: dict[str, str] = {}
    for name in (*names, *MLFLOW_VARIABLES):
        if name in os.environ:
            value = os.environ[name]
            variables = secret if _is_secret_variable(name, value) else plain
            variables[name] = value
    return plain, secret


def _is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable's name or value looks like a secret."""
    from app.console.masking import is_secret, mask_tree

    if is_secret(name) or "KEY" in name.upper().split("_"):
        return True
    return bool(mask_tree({"x": value})["x"] != value)


def refuse_secrets(config: Config) -> None:
    """Checks that a configuration holds no secret, which would be shipped, and shown by Ray.

    Raises:
        UserError: It holds one.
    """
    from app.config.io import flatten, to_dict
    from app.console.masking import mask_tree

    for key, value in flatten(to_dict(config)).items():
        if isinstance(value, str) and mask_tree({key: value})[key] != value:
            raise UserError(
                f"{key} holds a secret, which would be shipped with the job and shown by Ray: put "
                "it into an environment variable (MLflow's goes along by itself, others with --env "
                "NAME)"
            )


def _leave_secrets(cluster: str, secret: Mapping[str, str]) -> str:
    """Writes secrets into a file on a cluster's head, for the job alone.

    Args:
        cluster: The cluster's file.
        secret: Values by name.

    Returns:
        The file's path on the head.

    Raises:
        UserError: It cannot be written.
    """
    from cluster.files import read_ray_file
    from cluster.launch import run_on_head

    name = f".trireme/secrets/{uuid.uuid4().hex}"
    command = f"umask 077; mkdir -p ~/.trireme/secrets; cat > ~/{name}; echo ~/{name}"
    data, file = read_ray_file(cluster)
    answer = run_on_head(data, file, command, stdin=json.dumps(dict(secret)))
    if answer.problem or answer.exit_code:
        reason = answer.problem or answer.stderr.strip()[-200:]
        raise UserError(f"the secrets cannot be put on the head: {reason}")
    return answer.stdout.strip().splitlines()[-1]


def cluster_options(config: Config, cluster: str) -> list[str]:
    """Configuration keys that a training gets from its cluster's file.

    That is the storage that every machine can write to, unless the experiment names one.

    Args:
        config: The configuration.
        cluster: The cluster's file.

    Raises:
        ClusterError: The run can never fit on the cluster.
    """
    from cluster.files import read_cluster
    from cluster.pending import check_feasible

    check_feasible(read_cluster(cluster), config.workers, dict(config.resources_per_worker))
    storage = storage_of_cluster(cluster)
    if storage and config.run.storage == "runs":
        return [f"run.storage={storage}"]
    return []


def storage_of_cluster(cluster: str) -> str:
    """The folder of runs that a cluster's file names.

    Args:
        cluster: The cluster's file; "" without one.

    Returns:
        "" if there is no file, or it names none.
    """
    from cluster.files import read_ray_file
    from cluster.ray_file import own_metadata

    if not cluster:
        return ""
    data, _ = read_ray_file(cluster)
    storage = own_metadata(data).get("storage")
    return f"{str(storage).rstrip('/')}/runs" if storage else ""


def submit(server: Server, job: Submission, say: Say) -> str:
    """Sends a job.

    Args:
        server: The job server, connected.
        job: What is sent.
        say: Tells a person what is sent.

    Returns:
        The job's id.

    Raises:
        UserError: The cluster refuses the job, or a secret would be shown.
    """
    for line in job.lines():
        say(line)
    variables = {
        **job.plain,
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        "PYTHONUNBUFFERED": "1",
    }
    if job.secret:
        if not server.cluster:
            raise UserError(
                f"{sorted(job.secret)[0]} is a secret, and Ray shows a job's environment to "
                "everyone who may ask: name the cluster with --cluster FILE, so that it goes over "
                "SSH, or set it on the cluster itself"
            )
        variables["TRIREME_SECRETS"] = _leave_secrets(server.cluster, job.secret)
    runtime_env = {
        "working_dir": str(job.folder),
        "excludes": list(EXCLUDES),
        "env_vars": variables,
    }
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            job_id: str = server.client.submit_job(
                entrypoint=job.entrypoint,
                metadata={"trireme_run": job.run},
                submission_id=job.id or None,
                runtime_env=runtime_env,
            )
            return job_id
        except (RuntimeError, ValueError) as error:
            may_come = "No available agent" in str(error)
            if not may_come or time.monotonic() > deadline:
                lines = [line for line in str(error).splitlines() if line.strip()]
                reason = lines[0] if lines else "no reason given"
                advice = ": leave files out with .gitignore" if "size" in reason.lower() else ""
                raise UserError(f"the cluster refuses the job: {reason[:300]}{advice}") from error
            time.sleep(1.0)


def run_on_cluster(
    server: Server,
    verb: str,
    arguments: tuple[str, ...],
    options: list[str],
    *,
    say: Say,
    folder: str | Path = ".",
) -> tuple[int, str]:
    """Runs `trireme VERB ARGUMENTS OPTIONS` as a job, without any environment variables.

    Args:
        server: The job server.
        verb: See `prepare`.
        arguments: See `prepare`.
        options: See `prepare`.
        say: Tells a person what happens.
        folder: Is shipped.

    Returns:
        The exit code, and what was printed.

    Raises:
        UserError: No server answers, it refuses the job, or a file is not in the folder.
        ClusterError: See UserError.
    """
    job = prepare(verb, arguments, options, run=verb, folder=folder)
    job = replace(job, plain={}, secret={})
    printed: list[str] = []
    with server:
        job_id = submit(server, job, say)
        code = follow(server, job_id, printed.append, say)
    return code, "".join(printed)


def follow(server: Server, job_id: str, write: Callable[[str], None], say: Say) -> int:
    """Writes a job's log as it grows until the job ends, also across dropped connections.

    Args:
        server: The job server, connected.
        job_id: Of the job.
        write: Takes pieces of the log.
        say: Tells a person what happens.

    Returns:
        The job's own exit code.

    Raises:
        UserError: There is no such job, or the cluster has not answered for `RECONNECT_SECONDS`, or
            it refuses this process.
    """
    from ray.exceptions import AuthenticationError

    _status(server, job_id)
    written = 0
    """Characters of the log."""
    lost_clock: float | None = None
    """Since when the connection is lost, in seconds of the monotonic clock."""

    async def tail() -> None:
        """Writes what is new until the job ends.

        Every connection sends the log from its beginning.
        """
        nonlocal written
        received = 0
        async for text in server.client.tail_job_logs(job_id):
            write(text[max(0, written - received) :])
            received += len(text)
            written = max(written, received)

    while True:
        try:
            asyncio.run(tail())
            info = server.client.get_job_info(job_id)
            if info.status.is_terminal():
                status = str(info.status)
                failed_early = status == "FAILED" and info.driver_exit_code is None
                if not written or failed_early:
                    say(f"Ray says: {info.message}")  # the job did not get as far as a log
                code = ENDINGS.get(status, info.driver_exit_code or EXIT_FAILED)
                return code if code in EXIT_CODES else EXIT_FAILED  # the driver was killed
            lost_clock = None
        except Exception as error:
            if "does not exist" in str(error):  # the server is back, but it is another one
                raise UserError(f"there is no job {job_id} at {server}") from error
            if lost_clock is None:
                lost_clock = time.monotonic()
                say(
                    "the connection is lost; the job continues, and its log once it is back "
                    f"({type(error).__name__})"
                )
            elif time.monotonic() - lost_clock > RECONNECT_SECONDS:
                raise UserError(
                    f"the cluster has not answered for {RECONNECT_SECONDS:.0f} s; the job may be "
                    f"running: `trireme submit logs {job_id}` follows it again"
                ) from error
            try:
                server.connect()
            except Exception as refusal:  # tried again at the next turn
                if isinstance(refusal.__cause__, AuthenticationError):
                    raise
        time.sleep(0.5)


def stop(server: Server, job_id: str, say: Say) -> str:
    """Asks a job to save a checkpoint and stop, and waits until it has ended.

    Args:
        server: The job server, connected.
        job_id: Of the job.
        say: Tells a person what happens.

    Returns:
        The job's last status, in lower case.

    Raises:
        UserError: There is no such job, it has ended already, or it did not stop in time.
    """
    status = _status(server, job_id)
    if status.is_terminal():
        raise UserError(f"the job {job_id} has ended already: {status.value.lower()}")
    server.client.stop_job(job_id)
    say("asked to save a checkpoint and stop")
    deadline = time.monotonic() + STOP_SECONDS
    while not status.is_terminal():
        if time.monotonic() > deadline:
            raise UserError(
                f"the job {job_id} did not stop within {STOP_SECONDS} s: Ray ends it now"
            )
        time.sleep(0.3)
        status = _status(server, job_id)
    return str(status.value).lower()


def _status(server: Server, job_id: str) -> JobStatus:
    """The status of a job.

    Raises:
        UserError: There is no such job.
    """
    try:
        status: JobStatus = server.client.get_job_status(job_id)
    except RuntimeError as error:
        reason = str(error).strip()[:200]
        raise UserError(f"the job {job_id} cannot be found at {server}: {reason}") from error
    return status
