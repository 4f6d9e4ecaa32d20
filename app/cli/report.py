"""`trireme report`."""

from __future__ import annotations

import click

from app.cli.common import Invocation, verb


@verb("report")
@click.argument("folders", nargs=-1, metavar="FOLDER…", required=True)
@click.option("--out", metavar="FILE.html", help="Where to; default: report.html in the first folder.")
def command(cli: Invocation, folders: tuple[str, ...], out: str | None) -> None:
    """Write one self-contained page about runs, a sweep or a scaling study.

    \b
    trireme report runs/mnist                 one run
    trireme report runs/mnist runs/mnist-2    several, and where they differ
    trireme report runs/sweep_mnist           a sweep, or a study

    The page reads offline, on a phone and on paper, and is stored with the run in MLflow.
    """
    from experiments.report import build

    cli.console.status("reading what was logged")
    page, note = build.report(list(folders), out)
    if note:
        cli.console.say(f"note: {note}")
    cli.answer({"status": "complete", "page": str(page)}, str(page))
