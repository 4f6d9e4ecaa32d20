"""`trireme sync`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from app.cli.common import sentences
from app.console import Console


@click.command("sync")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(run_folder: str, as_json: bool, traceback: bool) -> None:
    """Deliver to MLflow what a run could not deliver while the tracking server was away."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import RunFailed, UserError
        from app.tracking.tracker import sync

        folder = Path(run_folder)
        spool = folder if folder.name == "tracking" else folder / "tracking"
        if not spool.is_dir():
            raise UserError(f"{folder} holds no run: write the folder that `trireme train` named, such as runs/mnist")
        delivery = sync(spool)
        if not delivery.complete:
            raise RunFailed(f"{delivery.left} entries still wait in {delivery.spool}: {delivery.problem}")
    done = {"status": "complete", "run_id": delivery.run_id, "url": delivery.url}
    console.result(json.dumps(done) if as_json else f"MLflow has everything of {run_folder}: {delivery.url}")
