"""Measured tables say which commit they are of, and a test says which are older than their code."""

from __future__ import annotations

import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.benchmarks import figures
from experiments.benchmarks.__main__ import BENCHMARKS

FIGURE = figures.Figure(name="b", commands=("laws",), measures=("code",), minutes=1.0)
RESULTS = (
    "<!-- a at 1111aaaa -->\none\n\n<!-- end -->\ntext\n<!-- b at 2222bbbb -->\ntwo\n<!-- end -->\n"
)


class OlderThanItsCode(UserWarning):
    """A table was measured before the code changed that it measures."""


def test_a_table_that_is_older_than_its_code_is_named() -> None:
    measured_at = figures.commits(figures.RESULTS.read_text())
    known = {figure.name: figure for figure in figures.figures()}
    assert measured_at.keys() <= known.keys(), "figures.yaml has what gives each table again"
    for name, commit in measured_at.items():
        age = figures.age(known[name], commit)
        if age.startswith("OLDER"):
            warnings.warn(f"{name}: {age}", OlderThanItsCode, stacklevel=1)


def test_figures_are_given_by_benchmarks_and_measure_files_that_exist() -> None:
    for figure in figures.figures():
        for command in figure.commands:
            names = [name for name in BENCHMARKS if f"{command} ".startswith(f"{name} ")]
            assert names, command
        for path in figure.measures:
            assert (figures.ROOT / path).exists(), path


def test_what_is_measured_without_a_name_fits_into_an_hour() -> None:
    known = figures.figures()
    chosen, left_out = figures.in_an_hour(known)
    assert sum(figure.minutes for figure in chosen) <= 60
    assert sorted(figure.name for figure in (*chosen, *left_out)) == sorted(
        figure.name for figure in known
    )
    assert all(figure.gpu for figure in left_out)
    long = replace(FIGURE, name="long", minutes=59.5)
    on_gpu = replace(FIGURE, name="gpu", gpu="an H100")
    assert figures.in_an_hour([FIGURE, on_gpu, long, FIGURE]) == ([FIGURE, FIGURE], [on_gpu, long])


def test_a_new_table_replaces_the_old_one() -> None:
    new = figures.with_table(RESULTS, FIGURE, commit="3333cccc", table="| new |\n")
    assert figures.commits(new) == {"a": "1111aaaa", "b": "3333cccc"}
    assert "two" not in new and "one" in new and "| new |" in new
    with pytest.raises(ValueError, match="has no table 'b'"):
        figures.with_table("nothing", FIGURE, commit="3333cccc", table="")


def test_a_change_of_what_is_measured_makes_a_table_old(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return answer.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "code").mkdir()
    for name in ("code/loop.py", "code/README.md", "other"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    commit = git("rev-parse", "HEAD")
    for name in ("code/README.md", "other"):
        (tmp_path / name).write_text("2")
    assert figures.changed_files(commit, FIGURE.measures, tmp_path) == []
    (tmp_path / "code" / "loop.py").write_text("2")
    assert figures.changed_files(commit, FIGURE.measures, tmp_path) == ["code/loop.py"]
    assert figures.changed_files("0" * 40, FIGURE.measures, tmp_path) is None
