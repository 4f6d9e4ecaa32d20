"""`trireme export`."""

from __future__ import annotations

import dataclasses

import click

from app.cli.common import Invocation, verb
from app.console import size


@verb("export")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--to", default="", metavar="FORMAT", help="safetensors, huggingface or torch.")
@click.option("--out", metavar="FOLDER", help="Where to; default: export/FORMAT-step-N in the run's folder.")
@click.option("--step", type=int, metavar="N", help="The checkpoint of this step; default: the newest good one.")
def command(cli: Invocation, run_folder: str, to: str, out: str | None, step: int | None) -> None:
    """Write a run's trained weights as files that other programs read.

    \b
    trireme export runs/llama --to huggingface     a folder for AutoModelForCausalLM.from_pretrained
    trireme export runs/gpt --to safetensors       model.safetensors, or shards with an index
    trireme export runs/gpt --to torch --step 300  model.pt, for torch.load

    Tensors stream out of the checkpoint one by one, so the model need not fit in memory.
    """
    from app.export import export_run

    cli.console.status("reading the checkpoint")
    done = export_run(run_folder, to=to, out=out, step=step, warn=cli.console.say)
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    text = f"step {done.step} of {run_folder} is in {done.folder}: {files}, {size(done.size)}"
    cli.answer({"status": "complete", **dataclasses.asdict(done)}, text)
