"""`trireme config`."""

from __future__ import annotations

from app.cli.common import Invocation, experiment_arguments, read, verb


@verb("config")
@experiment_arguments
def command(cli: Invocation, arguments: tuple[str, ...]) -> None:
    """Show every key, its resolved value, and what it means. What it prints is itself an experiment file.

    \b
    trireme config
    trireme config experiments/mnist.yaml train.steps=100
    """
    from app.config_io import explain, to_dict

    config = read(arguments, needs_file=False)
    cli.answer(to_dict(config), explain(config).rstrip())
