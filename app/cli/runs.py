"""`trireme train`, `submit`, `config`, `export`, `sync`: a run, from its configuration to its weights, here or on a
cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from app.cli.common import Invocation, WithDefault, experiment_arguments, read, verb
from app.errors import RunFailed, UserError
from cluster.environment import user_name

if TYPE_CHECKING:
    from app.submit.client import Server


@verb("train", verbose=True)
@experiment_arguments
@click.option("--again", is_flag=True, help="If the run has finished, train it once more under a new name.")
@click.option("--take-over", is_flag=True, help="If another start trains the run now, end it there and continue here.")
def train(cli: Invocation, arguments: tuple[str, ...], again: bool, take_over: bool) -> None:
    """Train an experiment. The same command continues a run that was stopped.

    \b
    trireme train experiments/mnist.yaml
    trireme train experiments/gpt.yaml workers=4 strategy=fsdp train.steps=1000

    Ctrl-C saves a checkpoint and stops. `trireme config` lists the keys.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several that torchrun started
    cli.console.quiet = cli.console.quiet or not first
    from app.launchers.train import train as start

    program = click.get_current_context().obj  # the words of this process, where it is a program of its own
    restart = functools.partial(os.execv, program[0], program) if program else None
    options: dict[str, bool] = {"again": again, "take_over": take_over, "verbose": cli.verbose}
    outcome = start(read(arguments), cli.console, **options, restart=restart)
    if first:
        cli.answer(outcome)


@verb("config")
@experiment_arguments
def config(cli: Invocation, arguments: tuple[str, ...]) -> None:
    """Show every key of an experiment, its value and what it means. The output is itself an experiment file.

    \b
    trireme config
    trireme config experiments/mnist.yaml train.steps=100
    """
    from app.config.io import explain, to_dict

    found = read(arguments, needs_file=False)
    cli.answer(to_dict(found), "\n\n".join([explain(found).rstrip(), *_arguments(found.task)]))


def _arguments(task: str) -> list[str]:
    """What the task takes as task_args, in comments."""
    import inspect

    from app.tasks import find_task

    if not task:
        return []
    kind = find_task(task)
    takes = inspect.signature(kind).parameters.values()
    known = [f"task_args of {task}:", *(f"    {each}" for each in takes), "", *(kind.__doc__ or "").splitlines()]
    return ["\n".join(f"# {line}".rstrip() for line in known).rstrip("#\n ")]


@verb("export")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--to", default="", metavar="FORMAT", help="safetensors, huggingface, peft or torch.")
@click.option("--out", metavar="FOLDER", help="The folder to write. Default: export/FORMAT-step-N in the run's folder.")
@click.option("--step", type=int, metavar="N", help="The checkpoint of this step. Default: the newest intact one.")
def export(cli: Invocation, run_folder: str, to: str, out: str | None, step: int | None) -> None:
    """Write a run's trained weights as files that other programs read.

    \b
    trireme export runs/llama --to huggingface     a folder for AutoModelForCausalLM.from_pretrained
    trireme export runs/gpt --to safetensors       model.safetensors, or shards with an index
    trireme export runs/gpt --to torch --step 300  model.pt, for torch.load

    Safetensors are written file by file (5 GB at most), so the model need not fit in memory.
    """
    from app.console.terminal import size
    from app.results.export import export_run

    cli.console.status("reading the checkpoint")
    done = export_run(run_folder, to=to, out=out, step=step, warn=cli.console.say)
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    text = f"step {done.step} of {run_folder} is in {done.folder}: {files}, {size(done.size)}"
    cli.answer({"status": "complete", **dataclasses.asdict(done)}, text)


@verb("sync")
@click.argument("run_folder", metavar="RUN_FOLDER")
def sync(cli: Invocation, run_folder: str) -> None:
    """Send MLflow what a run could not deliver while the tracking server was down."""
    from app.tracking.tracker import sync as deliver

    folder = Path(run_folder)
    spool = folder if folder.name == "tracking" else folder / "tracking"
    if not spool.is_dir():
        raise UserError(f"{folder} is not a run's folder: write the one that `trireme train` named, such as runs/mnist")
    delivery = deliver(spool)
    if not delivery.complete:
        raise RunFailed(f"some metrics have not reached MLflow and wait in {spool}: {delivery.problem}")
    done = {"status": "complete", "run_id": delivery.run_id, "url": delivery.url}
    but = f", but no model ({delivery.left_out})" if delivery.left_out else ""
    cli.answer(done, f"MLflow has everything of {run_folder}{but}: {delivery.url}")


# --- submit


@click.group("submit", cls=WithDefault, default="run")
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
@click.option("--env", multiple=True, metavar="NAME", help="Send this environment variable along, by its name.")
@click.option("--detach", is_flag=True, help="Print the job's id and end, without following its log.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@click.option("--queue", "queued", is_flag=True, help="Let it wait for its turn: see `trireme queue`.")
@click.option("--priority", default=0, metavar="N", help="In the queue, the highest goes first.")
@to_a_server
def run(
    cli: Invocation,
    arguments: tuple[str, ...],
    server: Server,
    detach: bool,
    dry_run: bool,
    queued: bool,
    priority: int,
    **shipped: Any,
) -> None:
    """Send an experiment to a cluster and follow it. The word `run` may be left out. The exit code is the job's own.

    With --queue it waits in the cluster's queue and starts when its whole group fits. With a RayJob's manifest as
    --cluster, --queue prints that manifest for Kueue: `| kubectl create -f -` hands it over.

    What .gitignore names is not shipped. MLflow's variables go along where they are set; the values of secret ones
    (TOKEN, PASSWORD, …) go over SSH, not through Ray.
    """
    from app.submit import submission

    config = read(arguments)
    submission.refuse_secrets(config)
    if queued and server.cluster and (manifest := _manifest(server.cluster)):
        from app.submit.queue import kueue_manifest

        return cli.console.result(
            yaml.safe_dump(kueue_manifest(manifest, arguments, config.run.name, priority), sort_keys=False)
        )
    options = submission.cluster_options(config, server.cluster) if server.cluster else []
    job = submission.prepare("train", arguments, options, run=config.run.name, **shipped)
    if queued:
        job = submission.queued(job, user_name(), priority)
    if dry_run:
        return cli.answer({"status": "dry run", "runs": job.entrypoint}, "\n".join(job.lines()))
    with server:
        job_id = submission.submit(server, job, cli.console.say)
        cli.console.say(f"job         {job_id}")
        if detach:
            return cli.answer({"status": "submitted", "job": job_id}, job_id)
        _follow(cli, server, job_id)


def _manifest(file: str) -> dict[str, Any] | None:
    """The Ray object of a Kubernetes file; None for another kind of cluster file."""
    from cluster.document import read_documents
    from cluster.kuberay import is_ray

    return next((document.data for document in read_documents(file) if is_ray(document)), None)


def _follow(cli: Invocation, server: Server, job_id: str) -> None:
    """Shows the job's log, and ends with its exit code."""
    from app.submit.submission import follow

    try:
        code = follow(server, job_id, lambda text: None if cli.as_json else click.echo(text, nl=False), cli.console.say)
    except KeyboardInterrupt:
        then = f"`trireme submit logs {job_id}` follows it again, `trireme submit stop {job_id}` stops it"
        cli.console.say(f"\nthe job continues: {then}")
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
