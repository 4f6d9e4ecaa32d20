"""`trireme parity`."""

from __future__ import annotations

from typing import Any

import click

from app.cli.common import Invocation, experiment_arguments, read, verb


@verb("parity")
@experiment_arguments
@click.option("--steps", default=20, show_default=True, help="Training steps of each row.")
@click.option("--rows", "names", help="Only these strategies, comma-separated. Default: all.")
@click.option("--workers", help="Only rows of these numbers of workers, comma-separated. Default: all.")
@click.option("--checkpoints", is_flag=True, help="Also continue every row's checkpoint under every row.")
@click.option("--certify", is_flag=True, help="Store it with the experiment's run: its folder, its MLflow artifacts.")
def command(
    cli: Invocation,
    arguments: tuple[str, ...],
    steps: int,
    names: str | None,
    workers: str | None,
    checkpoints: bool,
    certify: bool,
) -> None:
    """Train an experiment's model under every strategy, and compare each loss curve with one device's.

    \b
    trireme parity experiments/gpt.yaml
    trireme parity experiments/mnist.yaml --rows ddp,fsdp --workers 2
    trireme parity experiments/gpt.yaml train.precision=bf16

    Processes are started on this machine, on its GPUs where there are enough for all rows. The columns are the largest
    relative differences: of a step's loss, of its gradient norm, and of a weight tensor at the end. In bf16 the bound
    is how far one device is from itself with the samples of a batch in another order. A row that the model does not
    fit is REFUSED, with the reason. A model with dropout differs under every row: set it to 0. Exit code 1 if a row
    differs or fails.
    """
    from experiments.parity import experiment

    config = read(arguments)
    rows = experiment.chosen(names, workers)
    run = experiment.run_of(config) if certify else None
    cli.console.status(f"training {len(rows)} rows")
    results = experiment.measure(config, steps=steps, rows=rows, checkpoints=checkpoints)
    text = experiment.table(results)
    cli.answer(experiment.as_dicts(results), text)
    if run:
        cli.console.say(f"stored as {experiment.certify(run, results, text)}")
    _judge(results)


def _judge(results: list[Any]) -> None:
    """Raises RunFailed if a row differs or failed, or if nothing was measured."""
    from app.errors import RunFailed

    for verdict, what in (("FAILED", "failed"), ("DIFFERS", "differ from one device")):
        found = [result for result in results if result.verdict == verdict]
        if found:
            raise RunFailed(f"{len(found)} of {len(results)} rows {what}, the first {found[0].row}")
    if all(result.verdict == "REFUSED" for result in results):
        raise RunFailed(f"every row was refused, the first because {results[0].refused}")
