"""The page of one run, or of several beside each other."""

from __future__ import annotations

import time

import yaml

from app.console import duration, quantity, size
from experiments.report import figures, page
from experiments.report.runs import RunRecord, differences

_LOSSES = ("train/loss", "eval/loss")
_LOG = ("loss", "grad_norm")


def page_of(records: list[RunRecord]) -> str:
    """The whole document."""
    first = records[0]
    title = first.name if len(records) == 1 else " · ".join(record.name for record in records[:4])
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first.manifest["created"]))
    about = f"{first.config['task']}, begun {began}; {first.folder}"
    parts = [
        page.facts(_facts(first)) if len(records) == 1 else page.section("Runs", _table(records)),
        *(page.paragraph(record.problem) for record in records if record.problem),
        page.section("Curves", page.plots(_plots(records))),
        *_stages(records),
        page.section("Plan against measurement", _planned(records)),
        page.section("Where they differ", page.table(*differences(records))) if len(records) > 1 else "",
        page.section("Failures and restarts", page.sentences(_failures(records))),
        page.section("Cost", _cost(records)),
        page.section("Configuration", *(_config(record) for record in records)),
    ]
    return page.page(title, about, parts)


def _facts(record: RunRecord) -> list[tuple[str, str, str]]:
    summary, found = record.manifest.get("summary") or {}, []
    metrics = {**summary.get("metrics", {}), **{k: c[-1][1] for k, c in record.curves.items() if c}}
    for name, value in metrics.items():
        if name.startswith("eval/"):
            found.append((name.removeprefix("eval/"), page.number(float(value)), "on held-out data"))
    if not found and "train/loss" in metrics:
        found.append(("loss", page.number(float(metrics["train/loss"])), "in training"))
    found.append(("steps", f"{summary.get('step', 0):,}", f"of {record.manifest['steps']:,}; {record.status.lower()}"))
    rate = metrics.get("train/tokens_per_second") or metrics.get("train/samples_per_second")
    if rate:
        unit = "tokens/s" if "train/tokens_per_second" in metrics else "samples/s"
        found.append(("speed", f"{quantity(rate)}", unit))
    if summary.get("seconds"):
        found.append(("training time", duration(summary["seconds"]), f"workers: {record.config['workers']}"))
    if summary.get("parameters"):
        found.append(("parameters", f"{summary['parameters']:,}", size(summary.get("memory_bytes", 0)) + " per worker"))
    return found


def _table(records: list[RunRecord]) -> str:
    names = list(dict.fromkeys(n for r in records for n in r.curves if n.startswith("eval/")))
    rows: list[list[object]] = []
    for record in records:
        summary = record.manifest.get("summary") or {}
        values = [record.last(name) if record.last(name) is not None else "–" for name in names]
        rows.append([record.name, record.status.lower(), summary.get("step", 0), *values, summary.get("seconds", "–")])
    return page.table(["run", "status", "steps", *names, "seconds"], rows)


def _plots(records: list[RunRecord]) -> list[tuple[str, str]]:
    names = list(dict.fromkeys(name for record in records for name in record.curves))
    found = []
    if len(records) == 1 and all(name in names for name in _LOSSES):
        both = {name: records[0].curves[name] for name in _LOSSES}
        found.append((_draw(both, "loss"), "Loss in training and on held-out data."))
        names = [name for name in names if name not in _LOSSES]
    for name in sorted(names, key=_order):
        if (
            name.startswith(("system/", "plan/", "checkpoint/", "cost/"))
            or max(len(r.curves.get(name, ())) for r in records) < 2
        ):
            continue
        series = {record.name: record.curves[name] for record in records if name in record.curves}
        found.append((_draw(series, name), f"{name} over the steps."))
    system = sorted(name for name in names if name.startswith("system/") and "utilization" in name)[:4]
    for name in system:
        series = {record.name: record.curves[name] for record in records if name in record.curves}
        found.append((figures.svg(figures.lines(series, x="seconds", y=name)), f"{name} while it ran."))
    return found


def _order(name: str) -> tuple[int, str]:
    return (0 if name.startswith("eval/") else 1 if name == "train/loss" else 2, name)


def _draw(series: dict[str, list[tuple[float, float]]], name: str) -> str:
    positive = all(value > 0 for points in series.values() for _, value in points)
    log = positive and name.rsplit("/", 1)[-1] in _LOG
    return figures.svg(figures.lines(series, x="step", y=name, log_y=log))


def _planned(records: list[RunRecord]) -> str:
    """Parameters and metrics that the planner left, as it predicted them, and what was measured."""
    rows: list[list[object]] = []
    for record in records:
        found = {k: v for k, v in {**record.params, **record.tags}.items() if k.startswith("plan/") or ".plan" in k}
        found |= {k: page.number(c[-1][1]) for k, c in record.curves.items() if k.startswith("plan/") and c}
        rows += [[record.name, key.removeprefix("plan/"), str(value)] for key, value in sorted(found.items())]
    return page.table(["run", "what", "value"], rows)


_SPENT = ("compute", "wait", "handover", "reduce")
_BUBBLES = {"bubble": "measured", "bubble_by_formula": "formula", "bubble_by_simulation": "simulated"}


def _stages(records: list[RunRecord]) -> list[str]:
    """What the stages of pipelines did with the last step that was profiled; nothing where there are none."""
    spent: list[list[object]] = []
    idle: list[list[object]] = []
    for record in records:
        stages = 0
        while f"pipeline/stage_{stages}/compute_seconds" in record.curves:
            values = (record.last(f"pipeline/stage_{stages}/{what}_seconds") for what in _SPENT)
            spent.append([record.name, stages, *(f"{1e3 * (value or 0.0):,.2f}" for value in values)])
            stages += 1
        if stages:
            shares = (record.last(f"pipeline/{name}") for name in _BUBBLES)
            idle.append([record.name, *("–" if share is None else f"{share:.1%}" for share in shares)])
    if not spent:
        return []
    about = "Milliseconds of the last step that was profiled; what is handed over travels while the stage computes on."
    head = ["run", "stage", *("handing over" if what == "handover" else what for what in _SPENT)]
    parts = (page.paragraph(about), page.table(head, spent), page.table(["bubble of", *_BUBBLES.values()], idle))
    return [page.section("Stages", *parts)]


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


_DOLLARS = {
    "total": "dollars",
    "start": "before the first step",
    "restarts": "after failures",
    "idle": "idle beside it",
}


def _cost(records: list[RunRecord]) -> str:
    """Worker-hours of training; dollars, from the asking for workers to their end, where prices are known."""
    priced = any(record.cost for record in records)
    rows: list[list[object]] = []
    for record in records:
        seconds, workers = (record.manifest.get("summary") or {}).get("seconds"), str(record.config["workers"])
        hours = seconds * int(workers) / 3600 if seconds and workers.isdigit() else "–"
        dollars = [float(record.cost[key]) if key in record.cost else "–" for key in _DOLLARS]
        rows.append([record.name, hours, *(dollars if priced else [])])
    known = [row for row in rows if row[1:].count("–") < len(row) - 1]
    return page.table(["run", "worker-hours of training", *(_DOLLARS.values() if priced else [])], known)


def _config(record: RunRecord) -> str:
    return page.folded(record.name, yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True))
