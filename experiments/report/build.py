"""Which page belongs to a folder: that of a run or of several, or what a sweep or a study keeps as page.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.errors import UserError
from experiments.report import page, run_page
from experiments.report.runs import read_run, store_artifacts

CONTENT = "page.json"
"""In the folder of a sweep or a study: what is on its page (page.py)."""


def report(folders: list[str], out: str | None) -> tuple[Path, str]:
    """Writes the page that belongs to these folders, and stores it in MLflow; the page, and what was not possible.

    Raises:
        UserError: a folder holds nothing to report on.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: write one that `trireme train`, sweep or scale named")
        if len(paths) > 1 and _is_answer(path):
            raise UserError(f"{path} is a sweep or a study, which has a page of its own: report on it alone")
    written = write_again(paths[0]) if _is_answer(paths[0]) else write_runs(paths)
    note = store_artifacts(paths[0], written)
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


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Keeps what is on a sweep's or a study's page, and writes its report.html."""
    (folder / CONTENT).write_text(json.dumps(content, indent=1, default=str))
    return write_again(folder)


def write_again(folder: Path) -> Path:
    """Writes report.html from page.json.

    Raises:
        UserError: the sweep or study has not come to its end, or the file is damaged.
    """
    out = folder / "report.html"
    try:
        out.write_text(page.render(json.loads((folder / CONTENT).read_text()), folder))
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no answer yet: run `trireme sweep` or `trireme scale` to its end") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / CONTENT} is damaged ({error}): run the same command again to write it") from error
    return out


def write_runs(folders: list[Path]) -> Path:
    """Writes report.html into the run's folder, of several comparison.html into the first's."""
    records = [read_run(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):
        records = [replace(record, name=str(record.folder)) for record in records]
    out = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    out.write_text(page.render(run_page.content(records), folders[0]))
    return out
