"""`trireme report`."""

from __future__ import annotations

import json

import click

from app.cli.common import sentences
from app.console import Console


@click.command("report")
@click.argument("folders", nargs=-1, metavar="FOLDER…", required=True)
@click.option("--out", metavar="FILE.html", help="Where to; default: report.html in the first folder.")
@click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(folders: tuple[str, ...], out: str | None, as_json: bool, traceback: bool) -> None:
    """Write one self-contained page about runs, a sweep or a scaling study.

    \b
    trireme report runs/mnist                 one run
    trireme report runs/mnist runs/mnist-2    several, and where they differ
    trireme report runs/sweep_mnist           a sweep, or a study

    The page reads offline, on a phone and on paper, and is stored with the run in MLflow.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from experiments.report import build

        console.status("reading what was logged")
        page, note = build.report(list(folders), out)
        if note:
            console.say(f"note: {note}")
    console.result(json.dumps({"status": "complete", "page": str(page)}) if as_json else str(page))
