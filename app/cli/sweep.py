"""`trireme sweep`."""

from __future__ import annotations

import click

from app.cli.common import Invocation, split, verb


@verb("sweep", verbose=True)
@click.argument("arguments", nargs=-1, metavar="SWEEP.yaml [key=value]…")
def command(cli: Invocation, arguments: tuple[str, ...]) -> None:
    """Search batch size, learning rate and other keys of an experiment; every trial is a full run.

    \b
    trireme sweep experiments/sweep_mnist.yaml
    trireme sweep experiments/sweep_gpt.yaml searcher=optuna trials=32 scheduler=asha

    Run it again to continue after a crash or Ctrl-C: trials that have ended are kept, the others continue.
    """
    from app.errors import UserError

    files, overrides = split(arguments)
    if len(files) != 1:
        raise UserError("give one sweep file: write for instance trireme sweep experiments/sweep_mnist.yaml")
    from experiments.sweep import run, spec

    cli.answer(run.sweep(spec.read_sweep(files[0], overrides), cli.console, verbose=cli.verbose))
