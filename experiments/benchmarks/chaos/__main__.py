"""`python -m experiments.benchmarks chaos`: seeded kills of anything, at any moment; nothing may be lost.

`chaos useful`, `chaos elastic`, `chaos peers` and `chaos fuzz` are the other measures: see --help of each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import click

from experiments.benchmarks.chaos import campaign


@click.group(invoke_without_command=True)
@click.option(
    "--kills", default=40, type=click.IntRange(1), show_default=True, help="In all calls with the same --out."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", default=50.0, show_default=True, help="Stop after this long; call again to go on.")
@click.option("--each", default=10, show_default=True, help="Kills of one run.")
@click.option("--victims", default="", help="Only these, such as boundary,driver.")
@click.option("--run", "number", type=int, help="Only this run of the seed's, once more: what a WRONG line says.")
@click.option("--out", default="", help="Folder of the results; default: runs/chaos-SEED, with --run another one.")
@click.pass_context
def main(
    context: click.Context,
    kills: int,
    seed: int,
    minutes: float,
    each: int,
    victims: str,
    number: int | None,
    out: str,
) -> None:
    """Kills worker, stage, raylet, driver, tracking server and its writer; at random and at every file operation."""
    if context.invoked_subcommand is None:
        only = [word for word in victims.split(",") if word]
        name = f"chaos-{seed}" if number is None else f"chaos-{seed}-run-{number}-{int(time.time())}"
        campaign.go(kills, seed, minutes, each, only, out or f"runs/{name}", number)


@main.command("fuzz")
@click.option("--examples", default=20000, show_default=True, help="Mutated inputs in all, shared by the targets.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", default="", help="Only targets whose names hold this.")
@click.option("--out", default="", help="Keep the inputs that go wrong in this folder.")
def fuzz(examples: int, seed: int, only: str, out: str) -> None:
    """Mutated configurations, cluster files, data files, checkpoints and run folders."""
    from experiments.benchmarks.chaos.fuzz import Result, report
    from experiments.benchmarks.chaos.fuzz import fuzz as go
    from experiments.benchmarks.chaos.targets import targets

    result = Result()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # tokenised texts
        wanted = [target for target in targets(Path(folder)) if only in target.name]
        for target in wanted:
            go(target, Path(folder, target.name.replace(" ", "-")), examples // len(wanted), seed, result)
            click.echo(f"{target.name}: {result.examples[target.name]:,}", err=True)
    click.echo(report(result, Path(out) if out else None))
    sys.exit(1 if result.found else 0)


@main.command("useful")
@click.option("--layout", default="ddp", show_default=True)
@click.option("--kills", default=5, type=click.IntRange(1), show_default=True, help="Over which it is measured.")
@click.option("--every", default=60.0, show_default=True, help="Seconds from one to the next.")
@click.option("--step-seconds", default=0.1, show_default=True, help="What a step takes longer.")
@click.option("--seed", default=0, show_default=True)
def useful(layout: str, kills: int, every: float, step_seconds: float, seed: int) -> None:
    """The share of time in which training gets on, with a kill every minute, beside what arithmetic says."""
    from experiments.benchmarks.chaos.useful import measure, table

    with tempfile.TemporaryDirectory(prefix="useful-") as folder:
        click.echo(table(measure(Path(folder), layout, kills, every, seed, step_seconds), layout))


@main.command("elastic")
@click.option("--launcher", default="ray", show_default=True, type=click.Choice(["ray", "actors"]))
@click.option("--out", default="", help="Folder of run, MLflow database and results; default: runs/elastic-LAUNCHER.")
@click.option("--draw", "drawn", is_flag=True, help="Only draw the picture again, from results that are there.")
def elastic(launcher: str, out: str, drawn: bool) -> None:
    """4, 3, 2, then 4 workers in a lab of four hosts: one is cut off, one loses power, both come back (needs root)."""
    from experiments.benchmarks.chaos.elastic import Ride, cluster, draw, ride, table
    from tests.lab import unavailable

    folder = Path(out or f"runs/elastic-{launcher}").resolve()
    results = folder / "elastic.json"
    if not drawn:
        if why := unavailable():
            raise click.ClickException(why)
        if folder.exists():
            raise click.ClickException(f"{folder} is there already: name another folder with --out")
        with cluster() as lab:
            ride(lab, launcher, folder).save(results)
    elif not results.exists():
        raise click.ClickException(f"there is no {results}: leave --draw out first")
    found = Ride.load(results)
    draw(found, folder / "elastic.png")
    click.echo(table(found))
    click.echo(f"{folder}/elastic.png; the run in MLflow: mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db")


if __name__ == "__main__":
    main()
