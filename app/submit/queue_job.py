"""What a queued run's job does on the cluster until it is let in: it waits in the line, makes room, and trains.

The first in the line looks whether its whole group fits, stops runs of lower priority where that makes room (as
`trireme submit stop` does: they save a checkpoint), and sends runs again whose job is gone.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from app import names
from app.config import Config
from app.console.terminal import duration
from app.errors import RunFailed, UserError
from app.storage.lease import exclusive
from app.submit.queue import FREE, Book, Entry, Row, State, expected, first, is_over_quota, line, state_of, victims
from app.submit.submission import command

LOOK_SECONDS = 2.0
Say = Callable[[str], None]


def enter(config: Config, words: tuple[str, ...], about: dict[str, Any], say: Say) -> None:
    """Waits until this run is let in; then its command may train.

    about: `id`, `user` and `priority` of its entry.
    Raises:
        UserError, ClusterError: it can never be let in.
    """
    from app.launchers.ray_launch import resources_to_ask_for
    from app.launchers.room import why_pending
    from cluster.connect import connect, disconnect
    from cluster.shape import living_nodes

    book, jobs, variables = Book(config.run.storage), client(), _variables()
    workers, each = resources_to_ask_for(config, connect(worker_setup=names.worker_setup()))
    entry, said = book.read(about["id"]), ""
    if entry is None:
        known: Any = {"run": config.run.name, "words": words, "workers": workers, "each": each, "env": variables}
        entry = Entry(**about, **known, since=time.time(), job=about["id"])
        _keep_folder(book, entry.id)
        book.write(entry)
    while True:
        with exclusive(book.storage):
            now_there = rows(book, jobs)
            chosen, waiting = first(now_there, book.quotas()), line(now_there)
            if entry.id not in [row.entry.id for row in waiting]:
                raise RunFailed(f"the run {entry.run!r} was taken out of the queue")
            if next(row for row in waiting if row.state is State.WAITING).entry.id == entry.id:
                send_again(book, jobs, waiting, say)
            sentence = place(entry, now_there, book)
            if chosen and chosen.entry.id == entry.id:
                nodes = living_nodes(config.cluster.exclude_nodes)
                free = {name: sum(node.available.get(name, 0.0) for node in nodes) for name in each}
                book.put(FREE, free)
                why = why_pending([each] * workers, None, config.cluster.exclude_nodes)
                if why is None:
                    break
                if not why.ever:
                    book.remove(entry.id)
                    raise UserError(f"the run {entry.run!r} never fits on this cluster: {why.sentence}")
                sentence = f"first in the queue, until its whole group fits: {why.sentence}"
                for row in victims(chosen, now_there, free):
                    say(f"stopping {row.entry.run} of {row.entry.user} at a checkpoint: its priority is lower")
                    book.write(row.entry, stopped_for=entry.id)
                    jobs.stop_job(row.entry.job)
        if sentence != said:
            say(f"waiting: {sentence}")
        said = sentence
        time.sleep(LOOK_SECONDS)
    book.write(entry, started=time.time())
    disconnect()


def client() -> Any:
    """Ray's for jobs, from within a job or on the head. Raises RunFailed."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient()
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunFailed(f"Ray's job server does not answer here: {first_line}") from error


def rows(book: Book, jobs: Any) -> list[Row]:
    """The queue as it is; what is over is taken out. jobs: Ray's client."""
    from app.run.look import look

    known = {job.submission_id: str(job.status.value) for job in jobs.list_jobs()}
    found = []
    for entry in book.entries():
        left, steps = None, False
        if entry.started and book.runs.exists(f"{entry.run}/run.json"):
            run = look(book.runs.join(entry.run))
            steps = bool(run.progress) and (run.updated or 0.0) > entry.started
            left = run.progress.get("seconds_left") if steps else None
        state = state_of(entry, known.get(entry.job), steps, time.time())
        if state is State.OVER:
            book.remove(entry.id)
        else:
            found.append(Row(entry, state, left))
    return found


def send_again(book: Book, jobs: Any, rows: list[Row], say: Say) -> int:
    """Sends those whose job is gone; they keep their age. Returns how many."""
    lost = [row.entry for row in rows if row.state is State.LOST]
    for entry in lost:
        head, _, number = entry.job.partition("+")
        job = f"{head}+{int(number or 0) + 1}"
        words = [*entry.words, "--id", entry.id, "--user", entry.user, "--priority", str(entry.priority)]
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, f"{entry.id}.zip")
            package.write_bytes(book.storage.read_bytes(package.name))
            environment: Any = {"working_dir": str(package), "env_vars": entry.env}
            jobs.submit_job(
                entrypoint=command("queue enter", words, ZipFile(package).namelist()),
                submission_id=job,
                metadata={"trireme_run": entry.run},
                runtime_env=environment,
            )
        book.write(entry, job=job, started=0.0, stopped_for="")
        say(f"{entry.run} of {entry.user} waits again, as the job {job}")
    return len(lost)


def place(entry: Entry, rows: list[Row], book: Book) -> str:
    """Where in the line an entry is, for a person."""
    order = line(rows)
    number = next(number for number, row in enumerate(order, start=1) if row.entry.id == entry.id)
    at = f"place {number} of {len(order)} in the queue"
    over = is_over_quota(order[number - 1], rows, book.quotas())
    return f"{at}; {entry.user} has as many workers as the quota allows" if over else at


def table(rows: list[Row], book: Book) -> list[str]:
    """The queue for a person: what trains, then the line with the time at which each is expected to start."""
    when = expected(rows, book.free())
    lines = [f"{'place':>5}  {'run':<20} {'user':<12} {'priority':>8} {'workers':>7}  {'state':<20} job"]
    trains = [row for row in rows if row.entry.id not in when]
    for number, row in enumerate([*trains, *line(rows)], start=1 - len(trains)):
        entry, state = row.entry, row.state.value
        if entry.id in when:
            seconds = when[entry.id]
            state += ", starts " + ("at a time not known" if seconds is None else f"in {duration(seconds)}")
        elif row.seconds_left is not None:
            state += f", {duration(row.seconds_left)} left"
        at = str(number) if number > 0 else ""
        lines.append(
            f"{at:>5}  {entry.run:<20} {entry.user:<12} {entry.priority:>8} {entry.workers:>7}  {state:<20} {entry.job}"
        )
    return lines if rows else ["the queue is empty"]


def _variables() -> dict[str, str]:
    """The environment variables that this job was submitted with; no secrets, which a queued run may not have."""
    given = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    return dict(given.get("env_vars") or {})


def _keep_folder(book: Book, id: str) -> None:
    """Ray forgets with its head what was shipped."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.make_archive(f"{folder}/{id}", "zip", os.getcwd()))
        book.storage.write_bytes(package.name, package.read_bytes())
