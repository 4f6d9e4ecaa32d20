"""`trireme parity`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


@click.command("parity")
@experiment_arguments
@click.option("--steps", default=20, show_default=True, help="Training steps of each row.")
@click.option("--rows", "names", help="Only these strategies, comma-separated. Default: all.")
@click.option("--workers", help="Only rows of these numbers of workers, comma-separated. Default: all.")
@click.option("--checkpoints", is_flag=True, help="Also continue every row's checkpoint under every row.")
@click.option("--certify", "run_folder", help="Store the matrix with this run: its folder and its MLflow artifacts.")
@click.option("--json", "as_json", is_flag=True, help="Print the matrix as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(
    arguments: tuple[str, ...],
    steps: int,
    names: str | None,
    workers: str | None,
    checkpoints: bool,
    run_folder: str | None,
    as_json: bool,
    traceback: bool,
) -> None:
    """Train an experiment's model under every strategy, and hold each loss curve against one device's.

    \b
    trireme parity experiments/gpt.yaml
    trireme parity experiments/mnist.yaml --rows ddp,fsdp --workers 2

    Processes are started on this machine, on its GPUs where there are enough. The columns are the largest relative
    differences: of a step's loss, of its gradient norm, and of a weight at the end. Exit code 1 if a row differs.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import RunFailed
        from app.parity import as_dicts, certify, chosen, measure
        from strategies.matrix import table

        config = read(arguments)
        rows = chosen(names, workers)
        console.status(f"training {len(rows)} rows")
        results = measure(config, steps=steps, rows=rows, checkpoints=checkpoints)
        text = table(results)
        console.result(json.dumps(as_dicts(results)) if as_json else text)
        if run_folder:
            console.say(f"stored as {certify(Path(run_folder), config, results, text)}")
        differing = [r for r in results if r.found is not None and not r.passed]
        if differing:
            raise RunFailed(
                f"{len(differing)} of {len(results)} rows differ from one device, the first {differing[0].row}"
            )
