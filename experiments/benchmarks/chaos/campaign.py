"""Run after run with its kills, until there are enough: results.jsonl, summary.json and index.html in one folder."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from experiments.benchmarks.chaos import page
from experiments.benchmarks.chaos.kills import TURNS, Operations, draw
from experiments.benchmarks.chaos.session import Session, until, write_line
from experiments.benchmarks.chaos.trial import Trial, Truth


def go(kills: int, seed: int, minutes: float, each: int, victims: list[str], out: str, only: int | None = None) -> None:
    """Goes on where an earlier call with the same folder stopped. only: this run's number, and then the end."""
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    done = read(results)
    number = max((row["number"] for row in done), default=-1) + 1 if only is None else only
    deadline = time.monotonic() + 60 * minutes
    work = folder / f"session-{int(time.time())}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what was started would be left behind
    session = Session(work)
    try:
        until(session.server_answers, 90, pause=0.2)
        lessons = Lessons(session, folder)
        while len(done) < kills and time.monotonic() < deadline:
            began = time.monotonic()
            rows = one(session, lessons, seed, number, each, victims)
            seconds = time.monotonic() - began
            for row in rows:
                row["seconds"] = round(seconds / len(rows), 2)
                write_line(results, row)
            done += rows
            problems = rows[0]["problems"] if rows else []
            verdict = "as undisturbed" if not problems else "WRONG: " + "; ".join(problems)
            say(f"{len(done)}/{kills} kills; run {number}: {len(rows)} in {seconds:.0f} s, {verdict}")
            if problems:
                say(f"  again: {again(seed, number, each, victims)}")
            write(folder, done, seed)
            if only is not None:
                break
            number += 1
        if not any(row["problems"] for row in done):
            shutil.rmtree(work, ignore_errors=True)  # else it is there to be looked at
    finally:
        session.close()
    summary = write(folder, done, seed)
    click.echo(json.dumps(summary, indent=1))
    sys.exit(1 if summary["wrong"] else 0)


def again(seed: int, number: int, each: int, victims: list[str]) -> str:
    """The command that does the same kills once more, in a folder of its own."""
    own = f" --victims {','.join(victims)}" if victims else ""
    return f"python -m experiments.benchmarks chaos --seed {seed} --run {number} --each {each}{own}"


def say(line: str) -> None:
    click.echo(line, err=True)


class Lessons:
    """What each layout does undisturbed, found out when it is first asked for; kept in `folder` for the next call."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.folder = session, folder

    def of(self, layout: str) -> tuple[Truth, Operations]:
        name = f"calm-{layout.replace(' ', '-')}"
        kept = self.folder / f"{name}.pt"
        if not kept.exists():
            truth, operations = Trial(self.session, name, layout).calm()
            torch.save({"weights": truth.weights, "curve": truth.curve, "operations": operations}, kept)
        found = torch.load(kept, weights_only=True)
        return Truth(found["weights"], found["curve"]), {layout: found["operations"]}


def one(
    session: Session, lessons: Lessons, seed: int, number: int, each: int, victims: list[str]
) -> list[dict[str, Any]]:
    """One run with its kills."""
    layout = TURNS[number % len(TURNS)]
    truth, operations = lessons.of(layout)
    kills = draw(seed, number, operations, each, victims)
    say(f"run {number} ({layout})")
    rows = Trial(session, f"run-{number}", layout, tell=_tell).disturb(kills, truth)
    return [row | {"seed": seed, "number": number, "again": again(seed, number, each, victims)} for row in rows]


def _tell(found: dict[str, Any]) -> None:
    say(f"    {found['words']}: on from step {found['resumed_from']}, {found['recovered_seconds']} s")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def write(folder: Path, rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The summary and the page."""
    summary = page.summary(rows, seed)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary
