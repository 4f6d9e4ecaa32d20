"""What is on the page of one run, or of several beside each other."""

from __future__ import annotations

import time
from typing import Any

import yaml

from app.console import duration, quantity, size
from experiments.report import figures
from experiments.report.page import number
from experiments.report.runs import RunRecord, differences

_LOSSES = ("train/loss", "eval/loss")
_ON_LOG_SCALE = ("loss", "grad_norm")
_NOT_DRAWN = ("system/", "plan/", "checkpoint/", "cost/", "pipeline/")


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
        {"title": "Configuration", "folded": {record.name: _yaml(record.config) for record in records}},
    ]
    return {
        "title": " · ".join(record.name for record in records[:4]),
        "about": f"{first.config['task']}, begun {began}; {first.folder}",
        "facts": [] if several else _facts(first),
        "sections": sections,
    }


def _yaml(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _facts(record: RunRecord) -> list[tuple[str, str, str]]:
    summary, found = record.summary, []
    metrics = {**summary.get("metrics", {}), **{k: c[-1][1] for k, c in record.curves.items() if c}}
    for name, value in metrics.items():
        if name.startswith("eval/"):
            found.append((name.removeprefix("eval/"), number(float(value)), "on held-out data"))
    if not found and "train/loss" in metrics:
        found.append(("loss", number(float(metrics["train/loss"])), "in training"))
    found.append(("steps", f"{summary.get('step', 0):,}", f"of {record.manifest['steps']:,}; {record.status.lower()}"))
    for unit in ("tokens", "samples"):
        if rate := metrics.get(f"train/{unit}_per_second"):
            found.append(("speed", quantity(rate), f"{unit}/s"))
            break
    if summary.get("seconds"):
        found.append(("training time", duration(summary["seconds"]), f"workers: {record.config['workers']}"))
    if summary.get("parameters"):
        found.append(("parameters", f"{summary['parameters']:,}", size(summary.get("memory_bytes", 0)) + " per worker"))
    return found


def _beside(records: list[RunRecord]) -> list[dict[str, Any]]:
    rows = []
    for r in records:
        values = {name: r.last(name) for name in r.curves if name.startswith("eval/")}
        step, seconds = r.summary.get("step", 0), r.summary.get("seconds", "–")
        rows.append({"run": r.name, "status": r.status.lower(), "steps": step, **values, "seconds": seconds})
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
