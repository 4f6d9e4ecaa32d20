"""`trireme submit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from app.cli.common import Invocation, experiment_arguments, read, verb

if TYPE_CHECKING:
    from app.submit.client import Server


class Submit(click.Group):
    """`submit EXPERIMENT.yaml …` sends; `submit logs` and `submit stop` are commands of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("submit", cls=Submit)
def submit() -> None:
    """Send an experiment to a cluster, follow it, stop it.

    \b
    trireme submit experiments/gpt.yaml --cluster my-cluster.yaml workers=8
    trireme submit experiments/gpt.yaml --detach
    trireme submit logs raysubmit_…
    trireme submit stop raysubmit_…

    `trireme submit run --help` lists its options.
    """


def to_a_server(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --address and --cluster, and gives the function the `server` that they mean."""

    @click.option("--address", metavar="URL", help="The job server, such as http://127.0.0.1:8265.")
    @click.option("--cluster", metavar="FILE", help="The cluster's file: its head is reached over SSH.")
    @functools.wraps(function)
    def call(*args: Any, address: str | None, cluster: str | None, **given: Any) -> None:
        from app.submit.client import Server

        function(*args, server=Server(address, cluster), **given)

    return call


@verb("run", group=submit)
@experiment_arguments
@click.option("--working-dir", "folder", default=".", show_default=True, metavar="FOLDER", help="The folder to ship.")
@click.option("--exclude", "excludes", multiple=True, metavar="PATTERN", help="Do not ship these; as in .gitignore.")
@click.option("--env", multiple=True, metavar="NAME", help="Send this environment variable along, by its name.")
@click.option("--detach", is_flag=True, help="Print the job's id and end, without following its log.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@to_a_server
def run(
    cli: Invocation, arguments: tuple[str, ...], server: Server, detach: bool, dry_run: bool, **shipped: Any
) -> None:
    """Send an experiment to a cluster and follow it. The word `run` may be left out. The exit code is the job's own.

    What .gitignore names is not shipped. MLflow's variables go along where they are set; the values of secret ones
    (TOKEN, PASSWORD, …) go over SSH, not through Ray.
    """
    from app.submit import submission

    config = read(arguments)
    submission.refuse_written(config)
    options = submission.cluster_options(config, server.cluster) if server.cluster else []
    job = submission.prepare("train", arguments, options, run=config.run.name, **shipped)
    if dry_run:
        return cli.answer({"status": "dry run", "runs": job.entrypoint}, "\n".join(job.lines()))
    with server:
        job_id = submission.submit(server, job, cli.console.say)
        cli.console.say(f"job         {job_id}")
        if detach:
            return cli.answer({"status": "submitted", "job": job_id}, job_id)
        _follow(cli, server, job_id)


def _follow(cli: Invocation, server: Server, job_id: str) -> None:
    """Shows the job's log, and ends with its exit code."""
    from app.submit.submission import follow

    try:
        code = follow(server, job_id, lambda text: None if cli.as_json else click.echo(text, nl=False), cli.console.say)
    except KeyboardInterrupt:
        then = f"`trireme submit logs {job_id}` follows it again, `trireme submit stop {job_id}` stops it"
        cli.console.say(f"\nthe job goes on: {then}")
        code = 130
    cli.answer({"status": "ended", "job": job_id, "exit_code": code})
    raise click.exceptions.Exit(code)


@verb("logs", group=submit)
@click.argument("job_id", metavar="JOB")
@to_a_server
def logs(cli: Invocation, job_id: str, server: Server) -> None:
    """Follow a job's log from its beginning. The exit code is the job's own."""
    with server:
        _follow(cli, server, job_id)


@verb("stop", group=submit)
@click.argument("job_id", metavar="JOB")
@to_a_server
def stop(cli: Invocation, job_id: str, server: Server) -> None:
    """Let a job save a checkpoint, then end it. The same submit continues it."""
    from app.submit.submission import stop as end

    with server:
        status = end(server, job_id, cli.console.say)
    cli.answer({"status": status, "job": job_id}, f"{job_id} has {status.replace('succeeded', 'finished')}")
