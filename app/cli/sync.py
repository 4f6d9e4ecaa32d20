"""`trireme sync`."""

from __future__ import annotations

from pathlib import Path

import click

from app.cli.common import Invocation, verb


@verb("sync")
@click.argument("run_folder", metavar="RUN_FOLDER")
def command(cli: Invocation, run_folder: str) -> None:
    """Send MLflow what a run could not deliver while the tracking server was down."""
    from app.errors import RunFailed, UserError
    from app.tracking.tracker import sync

    folder = Path(run_folder)
    spool = folder if folder.name == "tracking" else folder / "tracking"
    if not spool.is_dir():
        raise UserError(f"{folder} is not a run's folder: write the one that `trireme train` named, such as runs/mnist")
    delivery = sync(spool)
    if not delivery.complete:
        raise RunFailed(f"some metrics still wait in {spool}: {delivery.problem}")
    done = {"status": "complete", "run_id": delivery.run_id, "url": delivery.url}
    cli.answer(done, f"MLflow has everything of {run_folder}: {delivery.url}")
