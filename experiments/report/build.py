"""Which page belongs to a folder: that of a run or of several, or the one that a sweep or a study wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from app.errors import UserError
from experiments.report import page, run_page
from experiments.report.runs import read_run, store_artifacts

PAGE = "report.html"


def report(folders: list[str], out: str | None) -> tuple[Path, str]:
    """The page of a sweep or a study; or writes that of runs and stores it in MLflow, and what was not possible.

    Raises:
        UserError: a folder holds nothing to report on.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: write one that `trireme train`, sweep or scale named")
        if len(paths) > 1 and _is_answer(path):
            raise UserError(f"{path} is a sweep or a study, which has a page of its own: report on it alone")
    written, note = (_answer(paths[0]), "") if _is_answer(paths[0]) else _of_runs(paths)
    if out:
        target = Path(out).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(written.read_text())
        except OSError as error:
            raise UserError(f"--out {out} cannot be written ({error.strerror}); the page is {written}") from error
        written = target
    return written, note


def _is_answer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("sweep.json", "study.json"))


def _answer(folder: Path) -> Path:
    if not (folder / PAGE).exists():
        raise UserError(f"{folder} has no answer yet: run `trireme sweep` or `trireme scale` to its end")
    return folder / PAGE


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The page of a sweep or a study. content: see page.py."""
    (folder / PAGE).write_text(page.render(content, folder))
    return folder / PAGE


def _of_runs(folders: list[Path]) -> tuple[Path, str]:
    """The page in the run's folder, of several comparison.html in the first's."""
    records = [read_run(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):
        records = [replace(record, name=str(record.folder)) for record in records]
    out = folders[0] / (PAGE if len(folders) == 1 else "comparison.html")
    out.write_text(page.render(run_page.content(records), folders[0]))
    return out, store_artifacts(folders[0], out)
