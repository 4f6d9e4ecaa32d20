"""`trireme sweep`."""

from __future__ import annotations

import dataclasses
import json

import click

from app.cli.common import sentences, split
from app.console import Console


@click.command("sweep")
@click.argument("arguments", nargs=-1, metavar="SWEEP.yaml [key=value]…")
@click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")
@click.option("--verbose", is_flag=True, help="Leave the output of Ray and others on the terminal.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(arguments: tuple[str, ...], as_json: bool, verbose: bool, traceback: bool) -> None:
    """Search batch size, learning rate and anything else of an experiment; every trial is a full run.

    \b
    trireme sweep experiments/sweep_mnist.yaml
    trireme sweep experiments/sweep_gpt.yaml searcher=optuna trials=32 scheduler=asha

    Run it again to go on after a crash or Ctrl-C: trials that have ended are not run again, others continue.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import UserError

        files, overrides = split(arguments)
        if len(files) != 1:
            raise UserError("give one sweep file: write for instance trireme sweep experiments/sweep_mnist.yaml")
        from experiments.sweep import run, spec

        outcome = run.sweep(spec.read_sweep(files[0], overrides), console, verbose=verbose)
    if as_json:
        console.result(json.dumps(dataclasses.asdict(outcome), default=str))
