"""`trireme export`."""

from __future__ import annotations

import dataclasses
import json

import click

from app.cli.common import sentences
from app.console import Console, size


@click.command("export")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--to", default="", metavar="FORMAT", help="safetensors, huggingface or torch.")
@click.option("--out", metavar="FOLDER", help="Where to; default: export/FORMAT-step-N in the run's folder.")
@click.option("--step", type=int, metavar="N", help="The checkpoint of this step; default: the newest good one.")
@click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(run_folder: str, to: str, out: str | None, step: int | None, as_json: bool, traceback: bool) -> None:
    """Write a run's trained weights as files that others read.

    \b
    trireme export runs/llama --to huggingface     a folder for AutoModelForCausalLM.from_pretrained
    trireme export runs/gpt --to safetensors       model.safetensors, or shards with an index
    trireme export runs/gpt --to torch --step 300  model.pt, for torch.load

    Tensors stream out of the checkpoint one by one, so the model need not fit in memory.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.export import export_run

        console.status("looking at the checkpoint")
        done = export_run(run_folder, to=to, out=out, step=step, warn=console.say)
    if as_json:
        console.result(json.dumps({"status": "complete", **dataclasses.asdict(done)}, default=str))
    else:
        count = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
        console.result(f"step {done.step} of {run_folder} is in {done.folder}: {count}, {size(done.size)}")
