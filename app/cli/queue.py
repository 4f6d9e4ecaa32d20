"""`trireme queue`: the runs that wait for a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from app.cli.common import (
    GroupWithDefault,
    Invocation,
    experiment_arguments,
    read_experiment,
    verb,
)
from app.cli.document import plain
from app.cli.runs import server_options

if TYPE_CHECKING:
    from app.submit.client import Server


@click.group("queue", cls=GroupWithDefault, default="list")
def queue() -> None:
    """Show the queue of a cluster, and set quotas.

    \b
    trireme submit experiments/gpt.yaml workers=8 --queue --priority 5
    trireme queue --cluster my-cluster.yaml
    trireme queue quota ada 16

    Runs start in the order of priority and age, each when its whole group fits. A run of higher
    priority has those of lower ones save a checkpoint and wait again. `trireme submit stop JOB`
    takes one out.
    """


def storage_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --storage to a command."""
    text = "The folder of the runs. Default: that of the cluster's file, else runs."
    return click.option("--storage", default="", metavar="FOLDER", help=text)(function)


@verb("list", group=queue)
@storage_option
@server_options
def list_(cli: Invocation, storage: str, server: Server) -> None:
    """Show what trains, the line, and when each run is expected to start."""
    from app.submit import queue_job
    from app.submit.queue import QueueStore, expected_starts

    if _ran_on_cluster(cli, server, storage, words=["list"]):
        return
    store = QueueStore(storage or "runs")
    rows = queue_job.read_rows(store, queue_job.job_client())
    seconds_to_start = expected_starts(rows, store.free())
    values = [
        {
            **plain(row),
            "starts_in_seconds": seconds_to_start.get(row.entry.id),
        }
        for row in rows
    ]
    cli.answer({"runs": values}, "\n".join(queue_job.table(rows, store)))


@verb("resume", group=queue)
@storage_option
@server_options
def resume(cli: Invocation, storage: str, server: Server) -> None:
    """Send runs again whose jobs are gone with the cluster's head. They keep their places."""
    from app.submit import queue_job
    from app.submit.queue import QueueStore

    if _ran_on_cluster(cli, server, storage, words=["resume"]):
        return
    store = QueueStore(storage or "runs")
    jobs = queue_job.job_client()
    rows = queue_job.read_rows(store, jobs)
    count = queue_job.send_again(store, jobs, rows=rows, say=cli.console.say)
    cli.answer({"sent": count}, f"{count} sent again")


@verb("quota", group=queue)
@click.argument("user", metavar="USER")
@click.argument("workers", metavar="[WORKERS]", type=click.IntRange(0), required=False)
@storage_option
@server_options
def quota(cli: Invocation, user: str, workers: int | None, storage: str, server: Server) -> None:
    """Set how many WORKERS a user may have at once; without a number, any. A USER of * stands for
    all others."""
    from app.submit.queue import QueueStore

    words = ["quota", user]
    if workers is not None:
        words.append(str(workers))
    if _ran_on_cluster(cli, server, storage, words=words):
        return
    store = QueueStore(storage or "runs")
    store.set_quota(user, workers)
    quotas = store.quotas()
    lines = [f"{name}: {limit} workers" for name, limit in quotas.items()]
    cli.answer({"workers_by_user": quotas}, "\n".join(lines))


def _ran_on_cluster(cli: Invocation, server: Server, storage: str, *, words: list[str]) -> bool:
    """Run a command of `trireme queue` as a job on the cluster, unless this is that job.

    Args:
        cli: The invocation of the command here.
        server: The cluster's job server.
        storage: The folder of the runs; "" means the default.
        words: The command and its arguments.

    Returns:
        Whether the command has been run there, so that nothing is left to do here.

    Raises:
        Exit: The job has failed.
    """
    from app.submit.submission import run_on_cluster, storage_of_cluster

    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if is_job and not server.cluster:
        return False
    command, *parameters = words
    options = ["--storage", storage or storage_of_cluster(server.cluster) or "runs"]
    if cli.as_json:
        options.append("--json")
    code, printed = run_on_cluster(
        server,
        f"queue {command}",
        arguments=(),
        options=[*parameters, *options],
        say=lambda text: None,
    )
    if cli.as_json:
        cli.answer_of_job(printed)
    else:
        cli.console.result(printed.rstrip("\n"))
    if code:
        raise click.exceptions.Exit(code)
    return True


@verb("enter", group=queue)
@experiment_arguments
@click.option("--id", required=True, metavar="ID", help="The run's in the queue.")
@click.option("--user", required=True, metavar="USER", help="Whose it is.")
@click.option("--priority", default=0, metavar="N", help="The highest first.")
def enter(cli: Invocation, arguments: tuple[str, ...], id: str, user: str, priority: int) -> None:
    """Wait in the queue, then train. It is what a queued run's job does on the cluster."""
    from app.submit.queue_job import enter as wait_for_turn

    environment = dict(os.environ)  # connecting to Ray changes os.environ
    wait_for_turn(
        read_experiment(arguments),
        words=arguments,
        id=id,
        user=user,
        priority=priority,
        say=cli.console.say,
    )
    python = [sys.executable, "-P"] if sys.flags.safe_path else [sys.executable]
    options = ["--json"] if cli.as_json else []
    os.execve(python[0], [*python, "-m", "app", "train", *arguments, *options], environment)
