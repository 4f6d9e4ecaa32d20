"""`trireme queue`: the runs that wait for a cluster."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from app.cli.common import Invocation, WithDefault, experiment_arguments, read, verb
from app.cli.runs import to_a_server

if TYPE_CHECKING:
    from app.submit.client import Server


@click.group("queue", cls=WithDefault, default="list")
def queue() -> None:
    """Show the queue of a cluster, and set quotas.

    \b
    trireme submit experiments/gpt.yaml workers=8 --queue --priority 5
    trireme queue --cluster my-cluster.yaml
    trireme queue quota ada 16

    Runs start in the order of priority and age, each when its whole group fits. A run of higher priority has those of
    lower ones save a checkpoint and wait again. `trireme submit stop JOB` takes one out.
    """


def runs_folder(function: Any) -> Any:
    text = "The folder of the runs. Default: that of the cluster's file, else runs."
    return click.option("--storage", default="", metavar="FOLDER", help=text)(function)


@verb("list", group=queue)
@runs_folder
@to_a_server
def list_(cli: Invocation, storage: str, server: Server) -> None:
    """Show what trains, the line, and when each run is expected to start."""
    from app.submit import queue_job
    from app.submit.queue import QueueStore, expected_starts

    if _there(cli, server, storage, "list"):
        return
    book = QueueStore(storage or "runs")
    found = queue_job.read_rows(book, queue_job.job_client())
    when = expected_starts(found, book.free())
    plain = [
        {**dataclasses.asdict(row), "state": row.state.value, "starts_in": when.get(row.entry.id)} for row in found
    ]
    cli.answer(plain, "\n".join(queue_job.table(found, book)))


@verb("resume", group=queue)
@runs_folder
@to_a_server
def resume(cli: Invocation, storage: str, server: Server) -> None:
    """Send runs again whose jobs are gone with the cluster's head. They keep their places."""
    from app.submit import queue_job
    from app.submit.queue import QueueStore

    if _there(cli, server, storage, "resume"):
        return
    book, jobs = QueueStore(storage or "runs"), queue_job.job_client()
    count = queue_job.send_again(book, jobs, queue_job.read_rows(book, jobs), cli.console.say)
    cli.answer({"sent": count}, f"{count} sent again")


@verb("quota", group=queue)
@click.argument("user", metavar="USER")
@click.argument("workers", metavar="[WORKERS]", type=click.IntRange(0), required=False)
@runs_folder
@to_a_server
def quota(cli: Invocation, user: str, workers: int | None, storage: str, server: Server) -> None:
    """Set how many WORKERS a user may have at once; without a number, any. A USER of * stands for all others."""
    from app.submit.queue import QueueStore

    if _there(cli, server, storage, "quota", user, *([] if workers is None else [str(workers)])):
        return
    book = QueueStore(storage or "runs")
    book.set_quota(user, workers)
    cli.answer(book.quotas(), "\n".join(f"{name}: {most} workers" for name, most in book.quotas().items()))


def _there(cli: Invocation, server: Server, storage: str, *words: str) -> bool:
    """Does it on the cluster that is named, as a job; whether one is."""
    from app.submit.submission import run_on_cluster, storage_of_cluster

    if not server.cluster and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return False
    kept = storage or storage_of_cluster(server.cluster) or "runs"
    options = ["--storage", kept, *(["--json"] if cli.as_json else [])]
    code, printed = run_on_cluster(server, f"queue {words[0]}", (), [*words[1:], *options], say=lambda text: None)
    cli.console.result(printed.rstrip("\n"))
    if code:
        raise click.exceptions.Exit(code)
    return True


@verb("enter", group=queue)
@experiment_arguments
@click.option("--id", required=True, metavar="ID", help="The run's in the queue.")
@click.option("--user", required=True, metavar="USER", help="Whose it is.")
@click.option("--priority", default=0, metavar="N", help="The highest first.")
def enter(cli: Invocation, arguments: tuple[str, ...], **about: Any) -> None:
    """Wait in the queue, then train. It is what a queued run's job does on the cluster."""
    from app.submit.queue_job import enter as wait

    environment = dict(os.environ)  # connecting changes it
    wait(read(arguments), arguments, **about, say=cli.console.say)
    own = ["-P"] if sys.flags.safe_path else []
    os.execve(sys.executable, [sys.executable, *own, "-m", "app", "train", *arguments], environment)
