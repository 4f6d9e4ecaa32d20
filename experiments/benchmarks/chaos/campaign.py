"""`chaos`: kills of worker, stage, raylet, driver and tracking writer; nothing may be lost.

One run after another, layouts in turn, is disturbed several times and in the end compared with an undisturbed one.
Every kill is a line of OUT/results.jsonl.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.chaos.cluster import Cluster
from experiments.benchmarks.chaos.trial import LAYOUTS, Hung, Kill, Left, Trial, draw, summary, unlike
from experiments.benchmarks.harness import show


class Campaign:
    """steps, step_seconds: of each run."""

    def __init__(self, cluster: Cluster, steps: int, step_seconds: float) -> None:
        self.cluster, self.steps, self.step_seconds = cluster, steps, step_seconds
        self.calm: dict[str, Left] = {}

    def undisturbed(self, layout: str) -> Left:
        if layout not in self.calm:
            trial = Trial(self.cluster, f"calm-{len(self.calm)}", layout, self.steps, self.step_seconds)
            try:
                self.calm[layout] = trial.finish()
            finally:
                trial.give_up()
            if problems := self.calm[layout].problems:
                raise click.ClickException(f"undisturbed, {layout} goes wrong: {problems}; see {trial.log}")
        return self.calm[layout]

    def disturbed(self, number: int, layout: str, kills: list[Kill]) -> list[dict[str, Any]]:
        """A row per kill that was done; of a run that did not survive, at least one."""
        calm, name, useful = self.undisturbed(layout), f"run-{number}", 0.0
        trial = Trial(self.cluster, name, layout, self.steps, self.step_seconds)
        done = kills[:1]  # if it does not even begin
        try:
            done = trial.disturb(kills)
            left = trial.finish()
            problems, useful = unlike(left, calm, done), calm.seconds / left.seconds
        except Hung as error:
            problems = [str(error)]
            done = [kill for kill in kills if kill.time] or done
        finally:
            trial.give_up()
            self.cluster.mend()
        about = {"run": name, "layout": layout, "problems": problems, "useful": round(useful, 3)}
        return [{**asdict(kill), "words": str(kill), **about} for kill in done]


@click.command()
@click.option("--kills", default=40, type=click.IntRange(1), show_default=True, help="In all.")
@click.option("--seed", default=0, show_default=True)
@click.option("--each", default=10, type=click.IntRange(1), show_default=True, help="Kills of one run.")
@click.option("--victims", default="", help="Only these, such as driver,raylet.")
@click.option("--layouts", default="", help=f"Only those that hold one of these words; all: {', '.join(LAYOUTS)}.")
@click.option("--pause", default=1.2, show_default=True, help="Most seconds from going on to the next kill.")
@click.option("--steps", default=480, show_default=True, help="Of a run.")
@click.option("--step-seconds", default=0.01, show_default=True, help="Added to every step.")
@click.option("--run", "only", type=int, help="Only this run of the seed's, once more: what a WRONG line says.")
@click.option("--out", default="", help="Folder of the results; default: runs/chaos-SEED-TIME.")
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, seed: int, each: int, only: int | None, as_json: bool, **options: Any) -> None:
    """Kills worker, stage, raylet, driver and tracking writer, and looks whether anything was lost.

    The share of useful time, with a kill of a worker about every half minute:
    chaos --layouts "ddp actors" --victims worker --pause 50 --each 5 --kills 5 --steps 1500 --step-seconds 0.1
    """
    layouts = [layout for layout in LAYOUTS if any(word in layout for word in options["layouts"].split(","))]
    victims = [word for word in options["victims"].split(",") if word]
    folder = Path(options["out"] or f"runs/chaos-{seed}-{int(time.time())}").absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what was started would be left behind
    rows: list[dict[str, Any]] = []
    cluster = Cluster(folder / "session")
    try:
        campaign = Campaign(cluster, options["steps"], options["step_seconds"])
        for number in itertools.count() if only is None else [only]:
            layout = layouts[number % len(layouts)]
            mine = ["worker"] if "torchrun" in layout else victims  # its own agent is the driver, and there is no Ray
            found = campaign.disturbed(number, layout, draw(seed, number, each, mine, options["pause"]))
            with (folder / "results.jsonl").open("a") as results:
                results.writelines(json.dumps(row) + "\n" for row in found)
            rows += found
            _say(found, number, layout, len(rows))
            if len(rows) >= kills:
                break
    finally:
        cluster.close()
    wrong = any(row["problems"] for row in rows)
    if not wrong:
        shutil.rmtree(cluster.folder, ignore_errors=True)  # else it is there to be looked at
    show("chaos", rows, summary(rows), as_json)
    sys.exit(1 if wrong else 0)


def _say(rows: list[dict[str, Any]], number: int, layout: str, kills: int) -> None:
    for row in rows:
        click.echo(f"    {row['words']}: on from step {row['resumed_from']}, {row['seconds']} s", err=True)
    problems, useful = (rows[0]["problems"], rows[0]["useful"]) if rows else ([], 1.0)
    verdict = "WRONG: " + "; ".join(problems) if problems else "as undisturbed"
    click.echo(f"{kills} kills; run {number} ({layout}): useful time {useful:.1%}, {verdict}", err=True)
