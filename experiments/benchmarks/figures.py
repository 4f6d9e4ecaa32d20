"""`figures`: the tables of RESULTS.md, how old they are, and all that fit into an hour anew.

figures.yaml says which commands give a table, and which code it measures. RESULTS.md has the table
as the commands printed it, under the commit at which they did. A table is older than its code if
files that it measures have changed since.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "RESULTS.md"
FIGURES = HERE / "figures.yaml"
TIMEOUT = 3600.0
HOUR = 60.0
"""Minutes that measuring takes without names."""
BLOCK = re.compile(r"<!-- (?P<name>\S+) at (?P<commit>\w+) -->\n(?P<body>.*?)<!-- end -->", re.S)
"""A measured table in RESULTS.md."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A table, and what gives it again.

    Attributes:
        name: In figures.yaml and RESULTS.md.
        commands: Names and options of benchmarks.
        measures: Files and folders whose speed it measures.
        minutes: How long the commands take on two quiet cores.
        gpu: What it needs, in words; "": no GPU.
    """

    name: str
    commands: tuple[str, ...]
    measures: tuple[str, ...]
    minutes: float
    gpu: str = ""


def figures() -> list[Figure]:
    """The figures of figures.yaml."""
    return [
        Figure(
            name=name,
            commands=tuple(entry["commands"]),
            measures=tuple(entry["measures"]),
            minutes=entry["minutes"],
            gpu=entry.get("gpu", ""),
        )
        for name, entry in yaml.safe_load(FIGURES.read_text()).items()
    ]


def commits(results: str) -> dict[str, str]:
    """The commit at which each figure was measured.

    Args:
        results: The text of RESULTS.md.
    """
    return {block["name"]: block["commit"] for block in BLOCK.finditer(results)}


def changed_files(commit: str, measures: Sequence[str], root: Path = ROOT) -> list[str] | None:
    """The files that have changed since a commit; None if it is not in this copy's history.

    Documents beside the code do not count.

    Args:
        commit: The commit, or the beginning of its hash.
        measures: The files and folders to look at.
        root: A checkout.
    """
    command = ["git", "diff", "--name-only", commit, "--", *measures, ":(exclude)*.md"]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return answer.stdout.splitlines() if answer.returncode == 0 else None


def with_table(results: str, figure: Figure, *, commit: str, table: str) -> str:
    """RESULTS.md with a new table of a figure.

    Args:
        results: The text of RESULTS.md.
        figure: The figure.
        commit: Where it was measured.
        table: What its commands have printed.

    Raises:
        ValueError: RESULTS.md has no place for it.
    """
    block = f"<!-- {figure.name} at {commit} -->\n{table.strip()}\n\n<!-- end -->"
    for old in BLOCK.finditer(results):
        if old["name"] == figure.name:
            return results[: old.start()] + block + results[old.end() :]
    raise ValueError(f"RESULTS.md has no table {figure.name!r}: write {block.splitlines()[0]}")


def measure(figure: Figure) -> str:
    """Runs a figure's commands, and returns what they print, with the date.

    Raises:
        click.ClickException: A command failed.
    """
    outputs = [time.strftime("On %Y-%m-%d:")]
    for command in figure.commands:
        words = [sys.executable, "-m", "experiments.benchmarks", *shlex.split(command)]
        answer = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        if answer.returncode:
            raise click.ClickException(f"{command} failed:\n{answer.stderr[-2000:]}")
        outputs.append(answer.stdout.strip())
    return "\n\n".join(outputs)


def age(figure: Figure, commit: str | None) -> str:
    """How old a figure is, for a person."""
    if commit is None:
        return "not measured yet"
    changed = changed_files(commit, figure.measures)
    if changed is None:
        return f"measured at {commit}, which this copy's history does not have"
    if not changed:
        return f"measured at {commit}, and its code is the same"
    return f"OLDER THAN ITS CODE: {len(changed)} files have changed since {commit}"


def in_an_hour(known: Sequence[Figure]) -> tuple[list[Figure], list[Figure]]:
    """The figures that can be measured in an hour without a GPU, and the others.

    Args:
        known: All figures; the first come first.
    """
    chosen: list[Figure] = []
    left_out: list[Figure] = []
    minutes = 0.0
    for figure in known:
        if figure.gpu or minutes + figure.minutes > HOUR:
            left_out.append(figure)
        else:
            chosen.append(figure)
            minutes += figure.minutes
    return chosen, left_out


def _commit_here() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@click.command()
@click.option("--measure", "measures", is_flag=True, help="Measure them and write RESULTS.md.")
@click.argument("names", nargs=-1)
def main(measures: bool, names: tuple[str, ...]) -> None:
    """Lists the measured tables of RESULTS.md with their ages, or measures them anew.

    Without NAMES, those that need no GPU are measured, in the order of figures.yaml, as far as they
    fit into an hour.
    """
    known = {figure.name: figure for figure in figures()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.ClickException(f"{unknown[0]} is no figure: write one of {', '.join(known)}")
    chosen = [known[name] for name in names]
    if not names and measures:
        chosen, left_out = in_an_hour(list(known.values()))
        for figure in left_out:
            reason = f"needs {figure.gpu}" if figure.gpu else f"takes {figure.minutes:g} minutes"
            print(f"{figure.name} {reason}, and is left out", file=sys.stderr)
    elif not names:
        chosen = list(known.values())
    if not measures:
        measured_at = commits(RESULTS.read_text())
        for figure in chosen:
            needs = f", needs {figure.gpu}" if figure.gpu else ""
            state = age(figure, measured_at.get(figure.name))
            print(f"{figure.name:<12}{figure.minutes:g} min{needs}: {state}")
        return
    commit = _commit_here()
    for figure in chosen:
        if figure.gpu:
            print(f"{figure.name} needs {figure.gpu}: measure it by hand", file=sys.stderr)
            continue
        print(f"{figure.name}: {figure.minutes:g} minutes on two quiet cores", file=sys.stderr)
        table = measure(figure)
        RESULTS.write_text(with_table(RESULTS.read_text(), figure, commit=commit, table=table))
