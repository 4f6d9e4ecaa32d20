"""Which page belongs to a folder, and the pages themselves."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from app.console import duration
from app.errors import UserError
from experiments.report import page


def sweep_page(folder: Path) -> Path:
    """Writes report.html into a sweep's folder, from its ledger, its answer and its plots."""
    from experiments.sweep.ledger import Ledger
    from experiments.sweep.plots import CAPTIONS

    head = _read(folder / "sweep.json", "name", "created", "about")
    ledger, answer = (
        Ledger(str(folder), head["name"], head["about"]),
        _read(folder / "answer.json", "best", "sentences"),
    )
    metric, about = head["about"]["metric"], head["about"]
    trials = list(ledger.trials.values())
    best = answer["best"]
    seconds = sum(trial.last.get("seconds", 0.0) * int(trial.last.get("workers") or 1) for trial in trials)
    facts = [
        (f"best {metric}", page.number(best["value"]), best["trial"]),
        ("trials", str(len(trials)), _counts(trials)),
        ("training time", duration(seconds), "worker-time, all trials together"),
    ]
    if answer["rule"]:
        facts.append(("learning rate ∝", f"batch^{answer['rule']['exponent']:.2f}", _interval(answer["rule"])))
    if answer["critical"]:
        low, high = (answer["critical"][k] for k in ("low", "high"))
        facts.append(("critical batch size", f"{answer['critical']['batch']:.0f}", f"95 %: {low:.0f} to {high:.0f}"))
    if answer["noise"]:
        facts.append(("gradient noise scale", f"{answer['noise']:.0f}", "samples, measured in training"))
    plots = [
        (file.read_text(), CAPTIONS[file.stem])
        for file in sorted((folder / "plots").glob("*.svg"))
        if file.stem in CAPTIONS
    ]
    parts = [
        page.facts(facts),
        page.section("What was learnt", page.sentences([_labelled(line) for line in answer["sentences"]])),
        page.section("Pictures", page.plots(plots)),
        page.section("Goodput", _goodput(answer)),
        page.section("Trials", _trials(trials, metric, about["mode"], best["trial"])),
        page.section("Failures", page.sentences([f"{t.name}: {t.message}" for t in trials if t.status == "failed"])),
        page.section("The sweep", page.folded("search and experiment", json.dumps(about, indent=1))),
    ]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(head["created"]))
    how = f"{about['searcher']}, scheduler {about['scheduler']}"
    text = f"sweep of {', '.join(about['space'])} by {how}; begun {began}; {folder}"
    out = folder / "report.html"
    out.write_text(page.page(head["name"], text, parts))
    return out


def _read(file: Path, *keys: str) -> dict[str, Any]:
    """What a sweep or a study keeps there.

    Raises:
        UserError: it is no such file, or a damaged one.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    missing = next((key for key in keys if key not in found), None) if isinstance(found, dict) else keys[0]
    if missing is not None:
        raise UserError(f"{file} is damaged: it says nothing of {missing}")
    return dict(found)


def _goodput(answer: dict[str, Any]) -> str:
    rows = [
        [
            row["batch"],
            float(row["rate"]),
            f"{row['efficiency']:.0%}",
            "–" if row["by_noise_scale"] is None else f"{row['by_noise_scale']:.0%}",
            float(row["goodput"]),
        ]
        for row in answer.get("goodput", [])
    ]
    best = max(range(len(rows)), key=lambda i: rows[i][-1]) if rows else None
    head = ["batch size", "samples/s", "worth of a sample, measured", "by the noise scale", "goodput"]
    note = "Throughput times statistical efficiency (Pollux, OSDI 2021), on one worker, against the smallest batch."
    return page.table(head, rows, best=best) + (page.paragraph(note) if rows else "")


def _labelled(line: str) -> str:
    """The console's columns as a sentence."""
    label, _, rest = line.partition(" ")
    return f"{label}: {rest.strip()}"


def _counts(trials: list[Any]) -> str:
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _interval(rule: dict[str, Any]) -> str:
    return f"95 %: {rule['low']:.2f} to {rule['high']:.2f}" if math.isfinite(rule["low"]) else "two batch sizes"


def _trials(trials: list[Any], metric: str, mode: str, best: str) -> str:
    from experiments.sweep.science import value_of

    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    rows: list[list[Any]] = []
    for trial in trials:
        value = value_of(trial, metric, mode)
        last = trial.last
        values = [trial.values.get(key, "–") for key in keys]
        spent = [last.get("step", 0), round(last.get("seconds", 0.0), 1)]
        rows.append([trial.name, *values, "–" if value is None else value, *spent, trial.message or trial.status])
    sign = 1 if mode == "min" else -1
    place = len(keys) + 1
    rows.sort(key=lambda row: sign * row[place] if isinstance(row[place], float) else math.inf)
    at = next((i for i, row in enumerate(rows) if row[0] == best), None)
    head = ["trial", *(key.rsplit(".", 1)[-1] for key in keys), metric, "steps", "seconds", "end"]
    return page.table(head, rows, best=at)


# --- scaling studies ----------------------------------------------------------------------------------------------


def study_page(folder: Path) -> Path:
    """Writes report.html into a study's folder, from what was measured and fitted."""
    from experiments.report import study

    head = _read(folder / "study.json", "name", "created", "about", "points")
    if not head["points"]:
        raise UserError(f"the study in {folder} has measured nothing yet: run `trireme scale` to its end")
    out = folder / "report.html"
    out.write_text(study.page_of(head, folder))
    return out


# --- any of them --------------------------------------------------------------------------------------------------


def report(folders: list[str], out: str | None) -> tuple[Path, str]:
    """Writes the page that belongs to these folders, and stores it in MLflow; the page, and what was not possible.

    Raises:
        UserError: a folder holds nothing to report on.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: write one that `trireme train`, sweep or scale named")
    kinds = [_kind(path) for path in paths]
    if len(paths) > 1 and any(kind != "run" for kind in kinds):
        odd = next(path for path, kind in zip(paths, kinds) if kind != "run")
        raise UserError(f"{odd} is a sweep or a study, which has a page of its own: report on it alone")
    if kinds[0] == "sweep":
        page_file = _sweep_again(paths[0])
    elif kinds[0] == "study":
        page_file = study_page(paths[0])
    else:
        page_file = runs_page(paths)
    note = _store(paths[0], page_file)
    if out:
        target = Path(out).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page_file.read_text())
        except OSError as error:
            raise UserError(f"--out {out} cannot be written ({error.strerror}); the page is {page_file}") from error
        page_file = target
    return page_file, note


def _kind(folder: Path) -> str:
    return "sweep" if (folder / "sweep.json").exists() else "study" if (folder / "study.json").exists() else "run"


def _sweep_again(folder: Path) -> Path:
    if not (folder / "answer.json").exists():
        raise UserError(f"the sweep in {folder} has no answer yet: run `trireme sweep` to its end")
    return sweep_page(folder)


def runs_page(folders: list[Path]) -> Path:
    """Writes report.html into the run's folder, of several comparison.html into the first's."""
    from experiments.report import run_page
    from experiments.report.runs import read_run

    records = [read_run(folder) for folder in folders]
    out = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    out.write_text(run_page.page_of(records))
    return out


def _store(folder: Path, page_file: Path) -> str:
    """Puts the page among the run's artifacts; a note where that was not possible."""
    from app.tracking.delivery import last_start
    from app.tracking.state import Delivered

    spool = folder / "tracking"
    start, known = (last_start(spool), Delivered.load(spool)) if spool.is_dir() else ({}, None)
    if not start or known is None or not known.run_id:
        return "the page is not in MLflow, since this was not tracked"
    try:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or start["uri"])
        client.log_artifact(known.run_id, str(page_file))
    except Exception as error:
        return f"the page is not in MLflow ({(str(error).splitlines() or ['no reason'])[0]})"
    return ""
