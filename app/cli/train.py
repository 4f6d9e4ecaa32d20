"""`trireme train`."""

from __future__ import annotations

import os

import click

from app.cli.common import Invocation, experiment_arguments, read, verb


@verb("train", verbose=True)
@experiment_arguments
@click.option("--again", is_flag=True, help="If the run has finished, train it once more under a new name.")
def command(cli: Invocation, arguments: tuple[str, ...], again: bool) -> None:
    """Train an experiment, or continue one that was stopped: it is the same command.

    \b
    trireme train experiments/mnist.yaml
    trireme train experiments/gpt.yaml workers=4 strategy=fsdp train.steps=1000

    Ctrl-C saves a checkpoint and stops. `trireme config` lists the keys.
    """
    first = os.environ.get("RANK", "0") == "0"  # of several that torchrun started
    cli.console.quiet = cli.console.quiet or not first
    from app.train import train

    outcome = train(read(arguments), cli.console, again=again, verbose=cli.verbose)
    if first:
        cli.answer(outcome)
