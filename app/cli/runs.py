"""`trireme train`, `config`, `export`, `sync`: a run, from its configuration to its weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from app.cli.common import Invocation, experiment_arguments, read, verb
from app.errors import RunFailed, UserError


@verb("train", verbose=True)
@experiment_arguments
@click.option("--again", is_flag=True, help="If the run has finished, train it once more under a new name.")
def train(cli: Invocation, arguments: tuple[str, ...], again: bool) -> None:
    """Train an experiment. The same command continues a run that was stopped.

    \b
    trireme train experiments/mnist.yaml
    trireme train experiments/gpt.yaml workers=4 strategy=fsdp train.steps=1000

    Ctrl-C saves a checkpoint and stops. `trireme config` lists the keys.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several that torchrun started
    cli.console.quiet = cli.console.quiet or not first
    from app.train import train as start

    outcome = start(read(arguments), cli.console, again=again, verbose=cli.verbose)
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
    from app.config_io import explain, to_dict

    found = read(arguments, needs_file=False)
    cli.answer(to_dict(found), explain(found).rstrip())


@verb("export")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--to", default="", metavar="FORMAT", help="safetensors, huggingface or torch.")
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
    from app.console import size
    from app.export import export_run

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
    cli.answer(done, f"MLflow has everything of {run_folder}: {delivery.url}")
