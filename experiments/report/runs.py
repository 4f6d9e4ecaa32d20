"""Runs as a page shows them: what they left behind, in their folders and in MLflow, and the page of one or several."""

import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.config.io import flatten, from_dict, to_yaml
from app.console.terminal import duration, quantity, size
from app.errors import UserError
from app.tracking.settings import resolve_tracking
from app.tracking.spool import State, last_start
from cluster.document import load_yaml
from experiments.report import figures
from experiments.report.page import PAGE, number, render

MOST_POINTS = 600
"""Of one curve on a page: no screen shows more."""
_LOSSES = ("train/loss", "eval/loss")
_ON_LOG_SCALE = ("loss", "grad_norm")
_NOT_DRAWN = ("system/", "plan/", "checkpoint/", "cost/", "pipeline/")


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


def _of_runs(folders: list[Path]) -> tuple[Path, str]:
    """The page in the run's folder, of several comparison.html in the first's."""
    records = [read_run(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):
        records = [replace(record, name=str(record.folder)) for record in records]
    out = folders[0] / (PAGE if len(folders) == 1 else "comparison.html")
    out.write_text(render(content(records)))
    return out, _store(folders[0], out)


# --- what a run left behind ---------------------------------------------------------------------------------------


@dataclass
class RunRecord:
    """A run as a page shows it. problem: why there are no curves."""

    name: str
    folder: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    status: str = ""
    problem: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        return self.manifest.get("summary") or {}

    def last(self, metric: str) -> float | None:
        return self.curves[metric][-1][1] if self.curves.get(metric) else None


def read_run(folder: Path) -> RunRecord:
    """Raises UserError if the folder holds no run."""
    try:
        manifest = json.loads((folder / "run.json").read_text())
        config = load_yaml((folder / "config.yaml").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not the folder of a run, sweep or study: write one that `trireme train`, sweep or scale named"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    record = RunRecord(manifest["name"], folder, manifest, config, status=manifest["status"])
    try:
        _from_mlflow(record)
    except Exception as error:  # a page without curves is better than none
        record.problem = f"the metrics of {record.name} could not be read from MLflow ({_first_line(error)})"
    return record


def _from_mlflow(record: RunRecord) -> None:
    # A trial's run ends before the sweep's writer has made it in MLflow.
    run_id = record.manifest.get("mlflow_run_id") or State.load(record.folder / "tracking").run_id
    if not run_id:
        record.problem = f"{record.name} was not tracked"
        return
    tracking = from_dict(record.config).tracking
    client = _client(record.folder, tracking.uri or resolve_tracking(tracking, str(record.folder.parent)).uri)
    run = client.get_run(run_id)
    record.status, record.tags, record.params = run.info.status, dict(run.data.tags), dict(run.data.params)
    for name in run.data.metrics:
        points = sorted((p.step, p.value) for p in client.get_metric_history(run_id, name))
        every = max(1, len(points) // MOST_POINTS)
        record.curves[name] = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])


def _client(folder: Path, otherwise: str = "") -> Any:
    """MLflow's client for the server that a folder's run was tracked by: as the environment says, else as its spool
    does (a trial's database is beside its sweep), else `otherwise`."""
    from mlflow.tracking import MlflowClient

    spool = folder / "tracking"
    told = last_start(spool).get("uri") if spool.is_dir() else None
    return MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or told or otherwise)


def _store(folder: Path, file: Path) -> str:
    """Puts a file among the artifacts of the run that `folder` was tracked as; a note where that was not possible."""
    spool = folder / "tracking"
    run_id = State.load(spool).run_id if spool.is_dir() else None
    if not run_id:
        return f"{file.name} is not in MLflow, since this was not tracked"
    try:
        _client(folder).log_artifact(run_id, str(file))
    except Exception as error:  # the file is there; MLflow may be away
        return f"{file.name} is not in MLflow ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- its page ------------------------------------------------------------------------------------------------------


def content(records: list[RunRecord]) -> dict[str, Any]:
    """See page.py."""
    first, several = records[0], len(records) > 1
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first.manifest["created"]))
    problems = [record.problem for record in records if record.problem]
    sections: list[dict[str, Any]] = [
        {"title": "Runs", "tables": [{"rows": _beside(records)}] if several else []},
        {"title": "Not known", "sentences": problems},
        {"title": "Curves", "plots": _plots(records)},
        {"title": "Stages of the pipeline", "tables": [{"rows": _values(records, "pipeline/")}]},
        {"title": "Plan and measurement", "tables": [{"rows": _values(records, "plan/")}]},
        {"title": "Where they differ", "tables": [{"rows": differences(records)}] if several else []},
        {"title": "Failures and restarts", "sentences": _failures(records)},
        {"title": "Cost", "tables": [{"rows": _values(records, "cost/")}]},
        {"title": "Configuration", "folded": {record.name: to_yaml(record.config) for record in records}},
    ]
    return {
        "title": " · ".join(record.name for record in records[:4]),
        "about": f"{first.config['task']}, begun {began}; {first.folder}",
        "facts": [] if several else _facts(first),
        "sections": sections,
    }


def _facts(record: RunRecord) -> list[tuple[str, str, str]]:
    summary, found = record.summary, []
    metrics = {**summary.get("metrics", {}), **{k: c[-1][1] for k, c in record.curves.items() if c}}
    for name, value in metrics.items():
        if name.startswith("eval/"):
            found.append((name.removeprefix("eval/"), number(float(value)), "on held-out data, the newest"))
    if not found and "train/loss" in metrics:
        found.append(("loss", number(float(metrics["train/loss"])), "in training"))
    found.append(("steps", f"{summary.get('step', 0):,}", f"of {record.manifest['steps']:,}; {record.status.lower()}"))
    if speed := _mean_speed(record, metrics):
        found.append(("mean speed", quantity(speed[0]), f"{speed[1]}/s in training"))
    if summary.get("seconds"):
        found.append(("training time", duration(summary["seconds"]), f"workers: {record.config['workers']}"))
    if summary.get("parameters"):
        found.append(("parameters", f"{summary['parameters']:,}", size(summary.get("memory_bytes", 0)) + " per worker"))
    return found


def _mean_speed(record: RunRecord, metrics: dict[str, float]) -> tuple[float, str] | None:
    """The speed that the terminal and `trireme runs` show, too: Speed of app/training/reporting.py; and of what."""
    summary = record.summary
    if summary.get("rate"):
        return summary["rate"], summary["unit"]
    for name, value in metrics.items():  # of a run that has not ended
        unit = name.removeprefix("train/mean_").removesuffix("_per_second")
        if name == f"train/mean_{unit}_per_second":
            return value, unit
    return None


def _beside(records: list[RunRecord]) -> list[dict[str, Any]]:
    rows = []
    for r in records:
        values = {name: r.last(name) for name in r.curves if name.startswith("eval/")}
        step, seconds = r.summary.get("step", 0), r.summary.get("seconds", "–")
        row = {"run": r.name, "status": r.status.lower(), "steps": step, **values}
        rows.append(row | {"seconds of training": seconds})
    return rows


def _plots(records: list[RunRecord]) -> list[tuple[str, str]]:
    drawn = {n for r in records for n in r.curves if len(r.curves[n]) > 1 and not n.startswith(_NOT_DRAWN)}
    found = []
    if len(records) == 1 and drawn.issuperset(_LOSSES):
        both = {name: records[0].curves[name] for name in _LOSSES}
        found.append((_draw(both, "loss"), "Loss in training and on held-out data."))
        drawn -= set(_LOSSES)
    for name in sorted(drawn, key=lambda name: (not name.startswith("eval/"), name != "train/loss", name)):
        found.append((_draw(_series(records, name), name), f"{name} over the steps."))
    used = {n for r in records for n in r.curves if n.startswith("system/") and "utilization" in n}
    for name in sorted(used)[:4]:
        drawing = figures.lines(_series(records, name), x="seconds", y=name)
        found.append((figures.svg(drawing), f"{name} during the run."))
    return found


def _series(records: list[RunRecord], name: str) -> dict[str, list[tuple[float, float]]]:
    return {record.name: record.curves[name] for record in records if name in record.curves}


def _draw(series: dict[str, list[tuple[float, float]]], name: str) -> str:
    positive = all(value > 0 for points in series.values() for _, value in points)
    log = positive and name.rsplit("/", 1)[-1] in _ON_LOG_SCALE
    return figures.svg(figures.lines(series, x="step", y=name, log_y=log))


def _values(records: list[RunRecord], prefix: str) -> list[dict[str, Any]]:
    """What runs have under names with that prefix: the metrics' last values, parameters and tags."""
    known = [r.params | r.tags | {name: number(points[-1][1]) for name, points in r.curves.items()} for r in records]
    names = sorted({name for values in known for name in values if name.startswith(prefix)})
    columns = [record.name for record in records]
    return [{"": n} | {c: values.get(n, "–") for c, values in zip(columns, known, strict=True)} for n in names]


def _failures(records: list[RunRecord]) -> list[str]:
    lines = []
    for record in records:
        restarts = record.tags.get("trireme.restarts")
        if restarts:
            lines.append(f"{record.name}: {restarts} restarts; the last: {record.tags.get('trireme.last_failure', '')}")
        if record.manifest["starts"] > 1:
            lines.append(f"{record.name} was started {record.manifest['starts']} times")
        if record.manifest["status"] in ("failed", "stopped"):
            message = record.tags.get("trireme.message", "no reason known")
            lines.append(f"{record.name} {record.manifest['status']}: {message}")
    return lines


def differences(records: list[RunRecord]) -> list[dict[str, str]]:
    """Configuration keys in which the runs differ, and the value of each."""
    flat = {record.name: flatten(record.config) for record in records}
    keys = dict.fromkeys(key for config in flat.values() for key in config if not key.startswith("run."))
    rows = [{"key": key, **{name: str(config.get(key, "–")) for name, config in flat.items()}} for key in keys]
    return [row for row in rows if len({value for name, value in row.items() if name != "key"}) > 1]
