"""What a queued run's job does on the cluster until it is let in.

It waits in the line. The first in the line checks whether its whole group fits, stops runs of lower
priority if that makes room (as `trireme submit stop` does: they save a checkpoint), and submits
again the runs whose job is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from app import names
from app.config import Config
from app.console.terminal import duration
from app.errors import RunFailed, UserError
from app.storage.lease import exclusive
from app.submit.queue import (
    FREE,
    Entry,
    QueueStore,
    Row,
    State,
    expected_starts,
    is_over_quota,
    next_to_start,
    runs_to_stop,
    state_of,
    waiting_line,
)
from app.submit.submission import job_command

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

LOOK_SECONDS = 2.0
"""Seconds between two looks at the queue."""
Say = Callable[[str], None]


def enter(
    config: Config, words: tuple[str, ...], *, id: str, user: str, priority: int, say: Say
) -> None:
    """Waits until this run is let in; then its command may train.

    Args:
        config: The run's configuration.
        words: The arguments of `trireme train`.
        id: Of the run's entry, and of its job.
        user: Who has submitted the run.
        priority: The highest comes first.
        say: Tells a person where in the line the run is.

    Raises:
        UserError: The run never fits on this cluster.
        ClusterError: The cluster cannot be reached.
        RunFailed: The run was taken out of the queue, or Ray's job server does not answer.
    """
    from app.launchers.ray_launch import resources_to_ask_for
    from cluster.connect import connect, disconnect

    store = QueueStore(config.run.storage)
    jobs = job_client()
    variables = _submitted_variables()  # connecting changes the environment
    cluster = connect(worker_setup=names.worker_setup())
    workers, per_worker = resources_to_ask_for(config, cluster)
    entry = store.read(id)
    if entry is None:
        entry = Entry(
            id=id,
            user=user,
            run=config.run.name,
            priority=priority,
            words=words,
            workers=workers,
            each=per_worker,
            since=time.time(),
            job=id,
            env=variables,
        )
        _keep_folder(store, id)
        store.write(entry)
    waiting = _WaitingRun(
        config=config, store=store, jobs=jobs, entry=entry, per_worker=per_worker, say=say
    )
    last_sentence = ""
    while True:
        with exclusive(store.storage):
            sentence = waiting.look()
        if not sentence:
            break
        if sentence != last_sentence:
            say(f"waiting: {sentence}")
        last_sentence = sentence
        time.sleep(LOOK_SECONDS)
    store.write(entry, started=time.time())
    disconnect()


@dataclass(frozen=True, kw_only=True)
class _WaitingRun:
    """A run in the line.

    Args:
        config: The run's configuration.
        store: The queue.
        jobs: Ray's client.
        entry: Of the run.
        per_worker: Ray resources of one worker.
        say: Tells a person what is done.
    """

    config: Config
    store: QueueStore
    jobs: JobSubmissionClient
    entry: Entry
    per_worker: dict[str, float]
    say: Say

    def look(self) -> str:
        """Looks at the queue, and does what the first in the line has to do.

        Returns:
            Why the run waits, for a person; "" if it is let in.

        Raises:
            UserError: The run never fits on this cluster.
            RunFailed: The run was taken out of the queue.
        """
        entry = self.entry
        rows = read_rows(self.store, self.jobs)
        line = waiting_line(rows)
        if entry.id not in [row.entry.id for row in line]:
            raise RunFailed(f"the run {entry.run!r} was taken out of the queue")
        first_job = next(row for row in line if row.state is State.WAITING)
        if first_job.entry.id == entry.id:
            send_again(self.store, self.jobs, line, self.say)
        next_row = next_to_start(rows, self.store.quotas())
        if next_row is None or next_row.entry.id != entry.id:
            return describe_place(entry, rows, self.store)
        return self._make_room(next_row, rows)

    def _make_room(self, own_row: Row, rows: list[Row]) -> str:
        """Checks whether the whole group fits, and stops other runs if that makes room.

        Returns:
            See `look`.

        Raises:
            UserError: The run never fits on this cluster.
        """
        from app.launchers.room import why_pending
        from cluster.shape import living_nodes

        entry = self.entry
        excluded = self.config.cluster.exclude_nodes
        nodes = living_nodes(excluded)
        free = {
            name: sum(node.available.get(name, 0.0) for node in nodes) for name in self.per_worker
        }
        self.store.put(FREE, free)
        diagnosis = why_pending([self.per_worker] * entry.workers, None, excluded)
        if diagnosis is None:
            return ""
        if not diagnosis.ever:
            self.store.remove(entry.id)
            raise UserError(
                f"the run {entry.run!r} never fits on this cluster: {diagnosis.sentence}"
            )
        for row in runs_to_stop(own_row, rows, free):
            other = row.entry
            self.say(f"stopping {other.run} of {other.user} at a checkpoint: its priority is lower")
            self.store.write(other, stopped_for=entry.id)
            self.jobs.stop_job(other.job)
        return f"first in the queue, until its whole group fits: {diagnosis.sentence}"


def job_client() -> JobSubmissionClient:
    """Ray's client for jobs, from within a job or on the head.

    Raises:
        RunFailed: Ray's job server does not answer.
    """
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunFailed(f"Ray's job server does not answer here: {lines[0]}") from error


def read_rows(store: QueueStore, jobs: JobSubmissionClient) -> list[Row]:
    """The queue as it is now; entries whose job is over are removed.

    Args:
        store: The queue.
        jobs: Ray's client.
    """
    from app.run.look import look

    status_of_job = {job.submission_id: str(job.status.value) for job in jobs.list_jobs()}
    rows = []
    for entry in store.entries():
        seconds_left: float | None = None
        has_stepped = False
        if entry.started and store.runs.exists(f"{entry.run}/run.json"):
            run = look(store.runs.join(entry.run))
            has_stepped = bool(run.progress) and (run.updated or 0.0) > entry.started
            if has_stepped:
                seconds_left = run.progress.get("seconds_left")
        state = state_of(entry, status_of_job.get(entry.job), has_stepped, now=time.time())
        if state is State.OVER:
            store.remove(entry.id)
        else:
            rows.append(Row(entry, state, seconds_left))
    return rows


def send_again(store: QueueStore, jobs: JobSubmissionClient, rows: list[Row], say: Say) -> int:
    """Sends runs again whose job is gone; they keep their age.

    Args:
        store: The queue.
        jobs: Ray's client.
        rows: Among these.
        say: Tells a person which runs wait again.

    Returns:
        How many were sent.
    """
    lost = [row.entry for row in rows if row.state is State.LOST]
    for entry in lost:
        # Ray takes every id once, so the job gets a number: ID, ID+1, ID+2, …
        base_id, _, number = entry.job.partition("+")
        job = f"{base_id}+{int(number or 0) + 1}"
        options = ["--id", entry.id, "--user", entry.user, "--priority", str(entry.priority)]
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, f"{entry.id}.zip")
            package.write_bytes(store.storage.read_bytes(package.name))
            files = ZipFile(package).namelist()
            jobs.submit_job(
                entrypoint=job_command("queue enter", [*entry.words, *options], files),
                submission_id=job,
                metadata={"trireme_run": entry.run},
                runtime_env={"working_dir": str(package), "env_vars": entry.env},
            )
        store.write(entry, job=job, started=0.0, stopped_for="")
        say(f"{entry.run} of {entry.user} waits again, as the job {job}")
    return len(lost)


def describe_place(entry: Entry, rows: list[Row], store: QueueStore) -> str:
    """Where in the line an entry is, for a person."""
    line = waiting_line(rows)
    number = [row.entry.id for row in line].index(entry.id)
    place = f"place {number + 1} of {len(line)} in the queue"
    if is_over_quota(line[number], rows, store.quotas()):
        return f"{place}; {entry.user} has as many workers as the quota allows"
    return place


def table(rows: list[Row], store: QueueStore) -> list[str]:
    """The queue as lines for a person.

    First come the runs that train, then the line with the time at which each is expected to start.
    """
    if not rows:
        return ["the queue is empty"]
    starts = expected_starts(rows, store.free())
    training = [row for row in rows if row.entry.id not in starts]
    lines = [
        f"{'place':>5}  {'run':<20} {'user':<12} {'priority':>8} {'workers':>7}  {'state':<20} job"
    ]
    for row in training:
        state = row.state.value
        if row.seconds_left is not None:
            state += f", {duration(row.seconds_left)} left"
        lines.append(_table_line("", row.entry, state))
    for place, row in enumerate(waiting_line(rows), start=1):
        seconds = starts[row.entry.id]
        start = "at a time not known" if seconds is None else f"in {duration(seconds)}"
        lines.append(_table_line(str(place), row.entry, f"{row.state.value}, starts {start}"))
    return lines


def _table_line(place: str, entry: Entry, state: str) -> str:
    return (
        f"{place:>5}  {entry.run:<20} {entry.user:<12} {entry.priority:>8} {entry.workers:>7}  "
        f"{state:<20} {entry.job}"
    )


def _submitted_variables() -> dict[str, str]:
    """The environment variables that this job was submitted with.

    There are no secrets among them, because a queued run may not have any.
    """
    job_config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    runtime_env = job_config.get("runtime_env") or {}
    return dict(runtime_env.get("env_vars") or {})


def _keep_folder(store: QueueStore, id: str) -> None:
    """Stores the folder that was shipped, because Ray forgets it with its head."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.make_archive(f"{folder}/{id}", "zip", os.getcwd()))
        store.storage.write_bytes(package.name, package.read_bytes())
