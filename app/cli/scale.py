"""`trireme scale`."""

from __future__ import annotations

import click

from app.cli.common import Invocation, experiment_arguments, read, verb


@verb("scale", verbose=True)
@experiment_arguments
@click.option("--workers", required=True, metavar="1,2,4", help="Numbers of workers to measure.")
@click.option("--strategy", metavar="ddp,fsdp", help="Strategies to measure. Default: the experiment's, or ddp.")
@click.option("--strong/--weak", default=True, help="Strong: the same batch on more workers. Weak: it grows with them.")
@click.option("--repeats", default=3, show_default=True, help="Times every point is measured, in turns.")
@click.option("--steps", default=10, show_default=True, help="Steps in a block.")
@click.option("--blocks", default=5, show_default=True, help="Blocks per point.")
@click.option("--price", type=float, help="Price of one worker for an hour.")
def command(
    cli: Invocation,
    arguments: tuple[str, ...],
    workers: str,
    strategy: str | None,
    strong: bool,
    repeats: int,
    steps: int,
    blocks: int,
    price: float | None,
) -> None:
    """Measure an experiment on several numbers of workers; say what more of them would bring, and whether it pays.

    \b
    trireme scale experiments/gpt.yaml --workers 1,2,4,8 --strategy ddp,fsdp
    trireme scale experiments/mnist.yaml --workers 1,2 --weak

    Every point runs alone, in a placement group of its own. Nothing that is trained is kept. Run it again to continue.
    """
    from app.errors import UserError

    config = read(arguments)
    try:
        counts = tuple(int(n) for n in workers.split(","))
    except ValueError:
        raise UserError(f"--workers is {workers!r}: write numbers with commas, such as 1,2,4") from None
    if min(repeats, steps, blocks) < 1:
        raise UserError("--repeats, --steps and --blocks must be greater than 0")
    names = strategy.split(",") if strategy else [config.strategy.replace("auto", "ddp")]
    from experiments.scale import run

    plan = run.Plan(counts, tuple(name.strip() for name in names), not strong, repeats, blocks, steps, price)
    cli.answer(run.scale(config, plan, cli.console, verbose=cli.verbose))
