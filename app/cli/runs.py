"""`trireme train`, `submit`, `config`, `export` and `sync`: one run, here or on a cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from app.cli.common import (
    GroupWithDefault,
    Invocation,
    experiment_arguments,
    read_experiment,
    verb,
)
from app.cli.document import plain
from app.errors import EXIT_STOPPED, RunFailed, UserError
from cluster.environment import user_name

if TYPE_CHECKING:
    from app.submit.client import Server


@verb("train", verbose=True)
@experiment_arguments
@click.option(
    "--again", is_flag=True, help="If the run has finished, train it once more under a new name."
)
@click.option(
    "--take-over",
    is_flag=True,
    help="If another start trains the run now, end it there and continue here.",
)
def train(cli: Invocation, arguments: tuple[str, ...], again: bool, take_over: bool) -> None:
    """Train an experiment. The same command continues a run that was stopped.

    \b
    trireme train experiments/mnist.yaml
    trireme train experiments/gpt.yaml workers=4 strategy=fsdp train.steps=1000

    Ctrl-C saves a checkpoint and stops. `trireme config` lists the keys.
    """
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if not is_first_rank:  # one of several processes that torchrun started
        cli.console.quiet = True
    from app.launchers.train import train as start_training

    program: list[str] | None = click.get_current_context().obj  # None if Python code called us
    restart = functools.partial(os.execv, program[0], program) if program else None
    outcome = start_training(
        read_experiment(arguments),
        cli.console,
        again=again,
        take_over=take_over,
        verbose=cli.verbose,
        restart=restart,
    )
    if is_first_rank:
        cli.answer(outcome)


@verb("config")
@experiment_arguments
def config(cli: Invocation, arguments: tuple[str, ...]) -> None:
    """Show every key of an experiment, its value and what it means. The output is itself an
    experiment file.

    \b
    trireme config
    trireme config experiments/mnist.yaml train.steps=100
    """
    from app.config.io import explain, to_dict

    experiment = read_experiment(arguments, needs_file=False)
    text = explain(experiment).rstrip()
    if experiment.task:
        text = f"{text}\n\n{_explain_task_args(experiment.task)}"
    cli.answer(to_dict(experiment), text)


def _explain_task_args(task_name: str) -> str:
    """The arguments that a task takes, and its documentation, as YAML comments."""
    import inspect

    from app.tasks import find_task

    task_class = find_task(task_name)
    parameters = inspect.signature(task_class).parameters.values()
    lines = [
        f"task_args of {task_name}:",
        *(f"    {parameter}" for parameter in parameters),
        "",
        *(task_class.__doc__ or "").splitlines(),
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines).rstrip("#\n ")


@verb("export")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option(
    "--to",
    default="safetensors",
    show_default=True,
    metavar="FORMAT",
    help="safetensors, huggingface, peft or torch.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    help="The folder to write. Default: export/FORMAT-step-N in the run's folder.",
)
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="The checkpoint of this step. Default: the newest intact one.",
)
def export(cli: Invocation, run_folder: str, to: str, out: str | None, step: int | None) -> None:
    """Write a run's trained weights as files that other programs read.

    \b
    trireme export runs/llama --to huggingface     a folder for AutoModelForCausalLM.from_pretrained
    trireme export runs/gpt --to safetensors       model.safetensors, or shards with an index
    trireme export runs/gpt --to torch --step 300  model.pt, for torch.load

    Safetensors are written file by file (5 GB at most), so the model need not fit in memory.
    """
    from app.console.terminal import size
    from app.run.look import open_run

    open_run(run_folder)  # reports a wrong folder before torch is imported
    from app.results.export import export_run

    cli.console.status("reading the checkpoint")
    exported = export_run(run_folder, to=to, out=out, step=step, warn=cli.console.say)
    files = exported.files[0] if len(exported.files) == 1 else f"{len(exported.files)} files"
    text = (
        f"step {exported.step} of {run_folder} is in {exported.folder}: "
        f"{files}, {size(exported.size)}"
    )
    cli.answer({"status": "complete", **plain(exported)}, text)


@verb("sync")
@click.argument("run_folder", metavar="RUN_FOLDER")
def sync(cli: Invocation, run_folder: str) -> None:
    """Send MLflow what a run could not deliver while the tracking server was down."""
    from app.tracking.tracker import sync as deliver_spool

    folder = Path(run_folder)
    spool = folder if folder.name == "tracking" else folder / "tracking"
    if not spool.is_dir():
        raise UserError(
            f"{folder} is not a run's folder: "
            "write the one that `trireme train` named, such as runs/mnist"
        )
    delivery = deliver_spool(spool)
    if not delivery.complete:
        raise RunFailed(
            f"some metrics have not reached MLflow and wait in {spool}: {delivery.problem}"
        )
    for sentence in delivery.trackers:
        cli.console.say(f"note: {sentence}")
    exception = f", but no model ({delivery.left_out})" if delivery.left_out else ""
    cli.answer(
        {"status": "complete", "run_id": delivery.run_id, "url": delivery.url},
        f"MLflow has everything of {run_folder}{exception}: {delivery.url}",
    )


# --- submit ---


@click.group("submit", cls=GroupWithDefault, default="run")
def submit() -> None:
    """Send an experiment to a cluster, follow it, stop it.

    \b
    trireme submit experiments/gpt.yaml --cluster my-cluster.yaml workers=8
    trireme submit experiments/gpt.yaml --detach
    trireme submit logs raysubmit_…
    trireme submit stop raysubmit_…

    `trireme submit run --help` lists its options.
    """


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --address and --cluster to a command, which gets the job server as `server`."""

    @click.option("--address", metavar="URL", help="The job server, such as http://127.0.0.1:8265.")
    @click.option(
        "--cluster", metavar="FILE", help="The cluster's file: its head is reached over SSH."
    )
    @functools.wraps(function)
    def call(*args: Any, address: str | None, cluster: str | None, **parameters: Any) -> None:
        from app.submit.client import Server

        function(*args, server=Server(address, cluster), **parameters)

    return call


@verb("run", group=submit)
@experiment_arguments
@click.option(
    "--working-dir",
    "folder",
    default=".",
    show_default=True,
    metavar="FOLDER",
    help="The folder to ship.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME",
    help="Send this environment variable along, by its name.",
)
@click.option(
    "--detach", is_flag=True, help="Print the job's id and end, without following its log."
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@click.option(
    "--queue", "queued", is_flag=True, help="Let it wait for its turn: see `trireme queue`."
)
@click.option("--priority", default=0, metavar="N", help="In the queue, the highest goes first.")
@server_options
def run(
    cli: Invocation,
    arguments: tuple[str, ...],
    server: Server,
    folder: str,
    env: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    queued: bool,
    priority: int,
) -> None:
    """Send an experiment to a cluster and follow it. The word `run` may be left out. The exit code
    is the job's own.

    With --queue it waits in the cluster's queue and starts when its whole group fits. With a
    RayJob's manifest as --cluster, --queue prints that manifest for Kueue: `| kubectl create -f -`
    hands it over.

    What .gitignore names is not shipped. MLflow's variables go along where they are set; the values
    of secret ones (TOKEN, PASSWORD, …) go over SSH, not through Ray.
    """
    from app.submit import submission

    config = read_experiment(arguments)
    submission.refuse_secrets(config)
    manifest = _manifest(server.cluster) if queued and server.cluster else None
    if manifest:
        from app.submit.queue import kueue_manifest

        queued_manifest = kueue_manifest(
            manifest, words=arguments, run=config.run.name, priority=priority
        )
        cli.answer(
            {"status": "manifest", "manifest": queued_manifest},
            yaml.safe_dump(queued_manifest, sort_keys=False),
        )
        return
    options = submission.cluster_options(config, server.cluster) if server.cluster else []
    job = submission.prepare(
        "train", arguments, options, run=config.run.name, folder=folder, env=env
    )
    if queued:
        job = submission.queued(job, user_name(), priority)
    if dry_run:
        cli.answer({"status": "dry run", "command": job.entrypoint}, "\n".join(job.lines()))
        return
    with server:
        job_id = submission.submit(server, job, cli.console.say)
        cli.console.say(f"job         {job_id}")
        if detach:
            cli.answer({"status": "submitted", "job": job_id}, job_id)
        else:
            _follow(cli, server, job_id)


def _manifest(file: str) -> dict[str, Any] | None:
    """The Ray object in a Kubernetes file; None for another kind of cluster file."""
    from cluster.document import read_documents
    from cluster.kuberay import is_ray

    for document in read_documents(file):
        if is_ray(document):
            return document.data
    return None


def _follow(cli: Invocation, server: Server, job_id: str) -> None:
    """Show the job's log, and end this command with the job's exit code."""
    from app.submit.submission import follow

    def write_log(text: str) -> None:
        click.echo(text, nl=False, err=cli.as_json)

    try:
        code = follow(server, job_id, write=write_log, say=cli.console.say)
    except KeyboardInterrupt:
        cli.console.say(
            f"\nthe job continues: `trireme submit logs {job_id}` follows it again, "
            f"`trireme submit stop {job_id}` stops it"
        )
        code = EXIT_STOPPED
    answer: dict[str, Any] = {"status": "ended", "job": job_id}
    if code:
        answer["error"] = f"the job {job_id} ended with exit code {code}"
    cli.answer(answer)
    raise click.exceptions.Exit(code)


@verb("logs", group=submit)
@click.argument("job_id", metavar="JOB")
@server_options
def logs(cli: Invocation, job_id: str, server: Server) -> None:
    """Follow a job's log from its beginning. The exit code is the job's own."""
    with server:
        _follow(cli, server, job_id)


@verb("stop", group=submit)
@click.argument("job_id", metavar="JOB")
@server_options
def stop(cli: Invocation, job_id: str, server: Server) -> None:
    """Let a job save a checkpoint, then end it. The same submit continues it."""
    from app.submit.submission import stop as stop_job

    with server:
        status = stop_job(server, job_id, cli.console.say)
    outcome = status.replace("succeeded", "finished")
    cli.answer({"status": status, "job": job_id}, f"{job_id} has {outcome}")
