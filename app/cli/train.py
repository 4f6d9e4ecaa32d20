"""`trireme train`."""

from __future__ import annotations

import dataclasses
import json
import os

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


@click.command("train")
@experiment_arguments
@click.option("--again", is_flag=True, help="If the run has finished, train it once more under a new name.")
@click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")
@click.option("--verbose", is_flag=True, help="Leave the output of Ray and others on the terminal.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(arguments: tuple[str, ...], again: bool, as_json: bool, verbose: bool, traceback: bool) -> None:
    """Train an experiment, or continue one that was stopped: it is the same command.

    \b
    trireme train experiments/mnist.yaml
    trireme train experiments/gpt.yaml workers=4 strategy=fsdp train.steps=1000

    Ctrl-C saves a checkpoint and stops. `trireme config` lists the keys.
    """
    console = Console(quiet=as_json or os.environ.get("RANK", "0") != "0")
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.train import train

        outcome = train(read(arguments), console, again=again, verbose=verbose)
    if as_json and os.environ.get("RANK", "0") == "0":
        console.result(json.dumps(dataclasses.asdict(outcome), default=str))
