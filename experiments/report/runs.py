"""`trireme report`: reads what runs left in their folders and in MLflow, and writes their page."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.io import flatten, from_dict, to_yaml
from app.console.terminal import duration, quantity, size
from app.errors import UserError
from app.tracking.settings import resolve_tracking
from app.tracking.spool import State, last_start
from cluster.document import load_yaml
from experiments.report import figures
from experiments.report.page import (
    MISSING,
    PAGE,
    PageContent,
    Section,
    format_number,
    render,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MAX_POINTS = 600
"""Points of one curve on a page: no screen shows more."""
MAX_UTILIZATIONS = 4
"""Plots of utilizations on a page."""
COMPARISON_PAGE = "comparison.html"
LOSSES = ("train/loss", "eval/loss")
ON_LOG_SCALE = ("loss", "grad_norm")
"""Last parts of the names of metrics that are drawn on a logarithmic scale."""
NOT_DRAWN = ("system/", "plan/", "checkpoint/", "cost/", "pipeline/")
"""Beginnings of the names of metrics that are not drawn over steps."""
Curve = list[tuple[float, float]]
"""(step, value) of each point."""


def report(folders: list[str], out: str | None) -> tuple[Path, str]:
    """Writes the page of runs and stores it in MLflow; a sweep or a study has a page already.

    Args:
        folders: The folders of runs, or that of a sweep or a scaling study.
        out: Where the page is written as well; None for no other place.

    Returns:
        The path of the page, and what was not possible, or "".

    Raises:
        UserError: A folder holds nothing to report on, or the page cannot be written.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not path.is_dir():
            advice = "that `trireme train`, sweep or scale named"
            if path.exists():
                raise UserError(f"{path} is a file: write the folder {advice}")
            raise UserError(f"there is no folder {path}: write one {advice}")
        if len(paths) > 1 and _is_study(path):
            problem = f"{path} is a sweep or a study, which has a page of its own"
            raise UserError(f"{problem}: report on it alone")
    note = ""
    if _is_study(paths[0]):
        page = _page_of_study(paths[0])
    else:
        try:
            page, note = _write_page_of_runs(paths, out)
        except OSError as error:
            problem = f"the page cannot be written into {paths[0]} ({error.strerror})"
            raise UserError(f"{problem}: write --out FILE.html in another folder") from error
    if not out or page == Path(out).expanduser():
        return page, note
    target = Path(out).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.read_text())
    except OSError as error:
        problem = f"--out {out} cannot be written ({error.strerror})"
        raise UserError(f"{problem}; the page is {page}") from error
    return target, note


def _is_study(folder: Path) -> bool:
    """Whether a folder is that of a sweep or a scaling study."""
    return any((folder / name).exists() for name in ("sweep.json", "study.json"))


def _page_of_study(folder: Path) -> Path:
    page = folder / PAGE
    if not page.exists():
        advice = "run `trireme sweep` or `trireme scale` to its end"
        raise UserError(f"{folder} has no answer yet: {advice}")
    return page


def _write_page_of_runs(folders: Sequence[Path], out: str | None) -> tuple[Path, str]:
    """Writes the page of runs into the folder of the first one, and stores it in MLflow.

    Args:
        folders: Of the runs.
        out: Where the page is written instead if that folder cannot be written, as that of somebody
            else; None for nowhere.

    Raises:
        OSError: It cannot be written.

    Returns:
        The path of the page, and what was not possible, or "".
    """
    records = [read_run(folder) for folder in folders]
    if len({record.name for record in records}) < len(records):
        names = distinct_names(folders)
        records = [replace(record, name=name) for record, name in zip(records, names, strict=True)]
    page = folders[0] / (PAGE if len(folders) == 1 else COMPARISON_PAGE)
    text = render(content(records))
    try:
        page.write_text(text)
    except OSError:
        if not out:
            raise
        page = Path(out).expanduser()
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    return page, _store(folders[0], page)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of those above it as tell it from the others.

    Args:
        folders: The folders; one may occur several times.
    """
    different = {folder.resolve() for folder in folders}
    names = []
    for folder in folders:
        parts = folder.resolve().parts
        for count in range(1, len(parts) + 1):
            name = parts[-count:]
            if sum(other.parts[-count:] == name for other in different) == 1:
                break
        names.append("/".join(name))
    return names


# --- what a run left behind -----------------------------------------------------------------------


@dataclass(kw_only=True)
class RunRecord:
    """A run as a page shows it.

    Attributes:
        name: Its name.
        folder: Its folder.
        manifest: What run.json holds.
        config: What config.yaml holds.
        curves: Its metrics in MLflow by name.
        tags: Its tags in MLflow.
        params: Its parameters in MLflow.
        status: MLflow's, or that of the manifest if MLflow does not have the run.
        problem: Why there are no curves; "" if there are.
    """

    name: str
    folder: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, Curve] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    status: str = ""
    problem: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        """What the run's last start has summed up; empty before its end."""
        return self.manifest.get("summary") or {}

    @property
    def last_values(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: points[-1][1] for name, points in self.curves.items() if points}


def read_run(folder: Path) -> RunRecord:
    """Reads a run's folder, and its metrics from MLflow.

    Raises:
        UserError: The folder holds no run.
    """
    try:
        manifest = json.loads((folder / "run.json").read_text())
        config = load_yaml((folder / "config.yaml").read_text())
    except FileNotFoundError:
        advice = "write one that `trireme train`, sweep or scale named"
        problem = f"{folder} is not the folder of a run, sweep or study"
        raise UserError(f"{problem}: {advice}") from None
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    record = RunRecord(
        name=manifest["name"],
        folder=folder,
        manifest=manifest,
        config=config,
        status=manifest["status"],
    )
    try:
        _read_mlflow(record)
    except Exception as error:  # a page without curves is better than none
        problem = f"the metrics of {record.name} could not be read from MLflow"
        record.problem = f"{problem} ({_first_line(error)})"
    return record


def _read_mlflow(record: RunRecord) -> None:
    """Adds a run's status, tags, parameters and metrics from MLflow."""
    run_id = record.manifest.get("mlflow_run_id")
    if not run_id:
        # A trial's run ends before the sweep's writer has made it in MLflow.
        run_id = State.load(record.folder / "tracking").run_id
    if not run_id:
        record.problem = f"{record.name} was not tracked"
        return
    tracking = from_dict(record.config).tracking
    uri = tracking.uri or resolve_tracking(tracking, str(record.folder.parent)).uri
    client = _client(record.folder, default_uri=uri)
    run = client.get_run(run_id)
    record.status = run.info.status
    record.tags = dict(run.data.tags)
    record.params = dict(run.data.params)
    for name in run.data.metrics:
        history = client.get_metric_history(run_id, name)
        points = sorted((point.step, point.value) for point in history)
        record.curves[name] = _thinned_out(points)


def _thinned_out(points: Sequence[tuple[float, float]]) -> Curve:
    """Evenly many points of a curve, the last one included, so that a page stays small."""
    every = max(1, len(points) // MAX_POINTS)
    kept = list(points[::every])
    has_last = (len(points) - 1) % every == 0
    return kept if has_last else [*kept, points[-1]]


def _client(folder: Path, *, default_uri: str = "") -> "MlflowClient":
    """MLflow's client for the server that has the run of a folder.

    The URI is that of the environment; otherwise that of the run's spool, since a trial's database
    is beside its sweep; otherwise the default.
    """
    from mlflow.tracking import MlflowClient

    spool = folder / "tracking"
    spool_uri = last_start(spool).get("uri") if spool.is_dir() else None
    return MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or spool_uri or default_uri)


def _store(folder: Path, file: Path) -> str:
    """Stores a file with the artifacts of a folder's MLflow run.

    Returns:
        Why that was not possible, or "".
    """
    spool = folder / "tracking"
    run_id = State.load(spool).run_id if spool.is_dir() else None
    if not run_id:
        return f"{file.name} is not in MLflow, since this was not tracked"
    try:
        _client(folder).log_artifact(run_id, str(file))
    except Exception as error:  # the file is there; MLflow may not be
        return f"{file.name} is not in MLflow ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


# --- the page of runs -----------------------------------------------------------------------------


def content(records: Sequence[RunRecord]) -> PageContent:
    """What is on the page of one run, or of several beside each other."""
    first = records[0]
    are_several = len(records) > 1
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(first.manifest["created"]))
    configurations = {record.name: to_yaml(record.config) for record in records}
    sections: list[Section] = [
        {"title": "Not known", "sentences": [r.problem for r in records if r.problem]},
        {"title": "Curves", "plots": _plots(records)},
        {
            "title": "Stages of the pipeline",
            "tables": [{"rows": _table_of_prefix(records, "pipeline/")}],
        },
        {
            "title": "Plan and measurement",
            "tables": [{"rows": _table_of_prefix(records, "plan/")}],
        },
        {"title": "Failures and restarts", "sentences": _failures(records)},
        {"title": "Cost", "tables": [{"rows": _table_of_prefix(records, "cost/")}]},
        {"title": "Configuration", "folded": configurations},
    ]
    if are_several:
        sections.insert(0, {"title": "Runs", "tables": [{"rows": _runs_table(records)}]})
        differing: Section = {
            "title": "Where they differ",
            "tables": [{"rows": differences(records)}],
        }
        sections.insert(5, differing)
    return {
        "title": " · ".join(record.name for record in records[:4]),
        "about": f"{first.config['task']}, begun {begun}; {first.folder}",
        "facts": [] if are_several else _facts(first),
        "sections": sections,
    }


def _facts(record: RunRecord) -> list[tuple[str, str, str]]:
    """Label, value and remark of the most important facts of a run."""
    summary = record.summary
    metrics = {**summary.get("metrics", {}), **record.last_values}
    facts = []
    for name, value in metrics.items():
        if name.startswith("eval/"):
            label = name.removeprefix("eval/")
            facts.append((label, format_number(float(value)), "on held-out data, the newest"))
    if not facts and "train/loss" in metrics:
        facts.append(("loss", format_number(float(metrics["train/loss"])), "in training"))
    all_steps = f"of {record.manifest['steps']:,}; {record.status.lower()}"
    facts.append(("steps", f"{summary.get('step', 0):,}", all_steps))
    speed = _mean_speed(record, metrics)
    if speed:
        rate, unit = speed
        facts.append(("mean speed", quantity(rate), f"{unit}/s in training"))
    if summary.get("seconds"):
        workers = f"workers: {record.config['workers']}"
        facts.append(("training time", duration(summary["seconds"]), workers))
    if summary.get("parameters"):
        memory = f"{size(summary.get('memory_bytes', 0))} per worker"
        trained = summary.get("trained_parameters", summary["parameters"])
        if trained != summary["parameters"]:
            memory = f"{trained:,} of them are trained; {memory}"
        facts.append(("parameters", f"{summary['parameters']:,}", memory))
    return facts


def _mean_speed(record: RunRecord, metrics: Mapping[str, float]) -> tuple[float, str] | None:
    """The speed that the terminal and `trireme runs` show too, and its unit.

    It is that of `Speed` in app/training/loop.py.
    """
    summary = record.summary
    if summary.get("rate"):
        return summary["rate"], summary["unit"]
    for name, value in metrics.items():  # a run that has not ended has no summary
        unit = name.removeprefix("train/mean_").removesuffix("_per_second")
        if name == f"train/mean_{unit}_per_second":
            return value, unit
    return None


def _runs_table(records: Sequence[RunRecord]) -> list[dict[str, object]]:
    """A row for each run: its state and its results."""
    rows = []
    for record in records:
        row: dict[str, object] = {
            "run": record.name,
            "status": record.status.lower(),
            "steps": record.summary.get("step", 0),
        }
        for name, value in record.last_values.items():
            if name.startswith("eval/"):
                row[name] = value
        row["seconds of training"] = record.summary.get("seconds", MISSING)
        rows.append(row)
    return rows


def _plots(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """SVG and caption of each plot: metrics over steps, and utilizations of the machines."""
    names: set[str] = set()
    for record in records:
        for name, points in record.curves.items():
            if len(points) > 1 and not name.startswith(NOT_DRAWN):
                names.add(name)
    numbers = {record.name: number for number, record in enumerate(records)}
    plots = []
    if len(records) == 1 and names.issuperset(LOSSES):
        losses = {name: records[0].curves[name] for name in LOSSES}
        plots.append((_draw(losses, "loss"), "Loss in training and on held-out data."))
        names -= set(LOSSES)
    for name in sorted(names, key=_importance):
        drawn = _draw(_series(records, name), name, numbers)
        plots.append((drawn, f"{name} over the steps."))
    for name in _utilizations(records)[:MAX_UTILIZATIONS]:
        series = _series(records, name)
        figure = figures.line_plot(series, x="seconds", y=name, numbers=numbers)
        plots.append((figures.to_svg(figure), f"{name} during the run."))
    return plots


def _importance(name: str) -> tuple[bool, bool, str]:
    """A key by which metrics are sorted: evaluations first, then the loss."""
    return not name.startswith("eval/"), name != "train/loss", name


def _utilizations(records: Sequence[RunRecord]) -> list[str]:
    """The names of the machines' utilizations."""
    names: set[str] = set()
    for record in records:
        for name in record.curves:
            if name.startswith("system/") and "utilization" in name:
                names.add(name)
    return sorted(names)


def _series(records: Sequence[RunRecord], name: str) -> dict[str, Curve]:
    """A metric's curves by the names of the runs that have it."""
    return {record.name: record.curves[name] for record in records if name in record.curves}


def _draw(series: Mapping[str, Curve], name: str, numbers: Mapping[str, int] | None = None) -> str:
    """SVG of a metric over steps.

    Args:
        series: Its curves, by the name of a run or a metric.
        name: The metric.
        numbers: The number of each run on the page; None where curves are not of runs.
    """
    is_positive = all(value > 0 for points in series.values() for _, value in points)
    log_y = is_positive and name.rsplit("/", 1)[-1] in ON_LOG_SCALE
    figure = figures.line_plot(series, x="step", y=name, log_y=log_y, numbers=numbers)
    return figures.to_svg(figure)


def _table_of_prefix(records: Sequence[RunRecord], prefix: str) -> list[dict[str, str]]:
    """What runs have under names with a prefix: last values of metrics, parameters and tags.

    Returns:
        A row for each name, with a column for each run.
    """
    values_of_runs = {}
    for record in records:
        metrics = {name: format_number(value) for name, value in record.last_values.items()}
        values_of_runs[record.name] = record.params | record.tags | metrics
    names = {name for values in values_of_runs.values() for name in values}
    rows = []
    for name in sorted(names):
        if name.startswith(prefix):
            row = {"": name}
            for run, values in values_of_runs.items():
                row[run] = values.get(name, MISSING)
            rows.append(row)
    return rows


def _failures(records: Sequence[RunRecord]) -> list[str]:
    """Restarts, further starts, and why a run ended early."""
    lines = []
    for record in records:
        name = record.name
        restarts = record.tags.get("trireme.restarts")
        if restarts:
            last_failure = record.tags.get("trireme.last_failure", "")
            lines.append(f"{name}: {restarts} restarts; the last: {last_failure}")
        if record.manifest["starts"] > 1:
            lines.append(f"{name} was started {record.manifest['starts']} times")
        if record.manifest["status"] in ("failed", "stopped"):
            message = record.tags.get("trireme.message", "no reason known")
            lines.append(f"{name} {record.manifest['status']}: {message}")
    return lines


def differences(records: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Configuration keys in which runs differ: a row for each key, with a column for each run."""
    configs = {record.name: flatten(record.config) for record in records}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    rows = []
    for key in keys:
        values = {run: _as_written(config.get(key, MISSING)) for run, config in configs.items()}
        if not key.startswith("run.") and len(set(values.values())) > 1:
            rows.append({"key": key, **values})
    return rows


def _as_written(value: object) -> str:
    """A value as it is in a configuration's file."""
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else str(value)
