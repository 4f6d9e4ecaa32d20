"""`trireme submit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


class Submit(click.Group):
    """`submit EXPERIMENT.yaml …` sends; `submit logs` and `submit stop` are commands of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("submit", cls=Submit)
def command() -> None:
    """Send an experiment to a cluster, follow it, stop it.

    \b
    trireme submit experiments/gpt.yaml --cluster my-cluster.yaml workers=8
    trireme submit experiments/gpt.yaml --detach
    trireme submit logs raysubmit_…
    trireme submit stop raysubmit_…

    `trireme submit run --help` lists the options of sending.
    """


def _where(function: Any) -> Any:
    for option in (
        click.option("--address", metavar="URL", help="The job server, such as http://127.0.0.1:8265."),
        click.option(
            "--cluster", metavar="FILE", help="The cluster's file; its head is reached through an SSH tunnel."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON."),
        click.option("--traceback", is_flag=True, help="Show Python's traceback of an error."),
    ):
        function = option(function)
    return function


@command.command("run")
@experiment_arguments
@click.option("--working-dir", default=".", show_default=True, metavar="FOLDER", help="What is shipped.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these out, as .gitignore writes it.")
@click.option("--max-size", default=100.0, show_default=True, metavar="MB", help="Refuse to ship more.")
@click.option("--env", multiple=True, metavar="NAME", help="Send this environment variable along, by its name.")
@click.option("--detach", is_flag=True, help="Do not follow the log: print the job's id and end.")
@click.option("--dry-run", is_flag=True, help="Say what would be shipped, and send nothing.")
@_where
def run(
    arguments: tuple[str, ...],
    working_dir: str,
    exclude: tuple[str, ...],
    max_size: float,
    env: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    address: str | None,
    cluster: str | None,
    as_json: bool,
    traceback: bool,
) -> None:
    """Send an experiment to a cluster and follow it; `run` may be left out. Ends with the job's own exit status.

    What .gitignore names is not shipped. MLflow's variables go along where they are set; the values of secret ones
    (TOKEN, PASSWORD, …) go over SSH, past Ray.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.submit.client import Server, target
        from app.submit.submission import follow, prepare, submit

        where = target(address, cluster)
        config = read(arguments)
        job = prepare(
            config,
            arguments,
            folder=Path(working_dir),
            excludes=exclude,
            env=env,
            max_bytes=round(max_size * 1e6),
            cluster=where.cluster,
        )
        if dry_run:
            said = {"status": "dry run", "files": len(job.package.files), "bytes": job.package.bytes}
            console.result(json.dumps(said) if as_json else "\n".join(job.lines()))
            return
        with Server(where) as server:
            job_id = submit(server, where, job, console.say)
            console.say(f"job         {job_id}")
            code = 0 if detach else _follow(follow, server, job_id, console)
    if as_json:
        console.result(json.dumps({"status": "submitted" if detach else "ended", "job": job_id, "exit_code": code}))
    elif detach:
        console.result(job_id)
    if code:
        raise click.exceptions.Exit(code)


def _follow(follow: Any, server: Any, job_id: str, console: Console) -> int:
    def write(text: str) -> None:
        if not console.quiet:
            click.echo(text, nl=False)

    try:
        return follow(server, job_id, write, console.say)
    except KeyboardInterrupt:
        console.say(
            f"\nthe job goes on: `trireme submit logs {job_id}` follows it, `trireme submit stop {job_id}` ends it"
        )
        return 130


@command.command("logs")
@click.argument("job_id", metavar="JOB")
@_where
def logs(job_id: str, address: str | None, cluster: str | None, as_json: bool, traceback: bool) -> None:
    """Follow a job's log from its beginning; ends with the job's own exit status."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.submit.client import Server, target
        from app.submit.submission import follow

        with Server(target(address, cluster)) as server:
            code = _follow(follow, server, job_id, console)
    if as_json:
        console.result(json.dumps({"status": "ended", "job": job_id, "exit_code": code}))
    if code:
        raise click.exceptions.Exit(code)


@command.command("stop")
@click.argument("job_id", metavar="JOB")
@_where
def stop(job_id: str, address: str | None, cluster: str | None, as_json: bool, traceback: bool) -> None:
    """Let a job save a checkpoint, then end it. The same submit continues it."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.submit.client import Server, target
        from app.submit.submission import stop as end

        with Server(target(address, cluster)) as server:
            status = end(server, job_id, console.say)
    console.result(json.dumps({"status": status, "job": job_id}) if as_json else f"{job_id} has {_ended(status)}")


def _ended(status: str) -> str:
    return {"stopped": "stopped", "succeeded": "finished", "failed": "failed"}.get(status, status)
