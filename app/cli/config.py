"""`trireme config`."""

from __future__ import annotations

import json

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


@click.command("config")
@experiment_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the resolved values as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(arguments: tuple[str, ...], as_json: bool, traceback: bool) -> None:
    """Show every key, its resolved value, and what it means. What it prints is an experiment file itself.

    \b
    trireme config
    trireme config experiments/mnist.yaml train.steps=100
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.config_io import explain, to_dict

        config = read(arguments, needs_file=False)
        text = json.dumps(to_dict(config)) if as_json else explain(config).rstrip()
    console.result(text)
