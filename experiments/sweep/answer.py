"""The answer of a sweep: what was best, which rule the learning rate follows, and what to run next."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.config import Config
from app.config_io import to_dict, to_yaml, with_values
from app.console import duration
from app.masking import mask_tree
from experiments.sweep import science
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.science import BATCH, RATE, SEED, WORKERS
from experiments.sweep.spec import Sweep

NEXT = "next.yaml"
"""In a sweep's folder: the experiment that it recommends."""


@dataclass
class Answer:
    """Everything that was worked out; `answer.json` holds it."""

    target: float | None
    target_given: bool
    best: dict[str, Any]
    rates: list[science.BestRate]
    rule: science.ScalingRule | None
    steps: dict[int, float]
    critical: science.CriticalBatch | None
    noise: float | None
    time: science.StepTime | None
    recommended: dict[str, Any] | None
    spent: dict[str, float] = field(default_factory=dict)
    goodput: list[dict[str, Any]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """The numbers among it, for MLflow."""
        found: dict[str, float] = {}
        if self.rule:
            found["answer/lr_exponent"] = self.rule.exponent
        if self.critical:
            found["answer/critical_batch"] = self.critical.batch
        if self.noise:
            found["answer/noise_scale"] = self.noise
        if self.recommended and self.recommended.get("seconds"):
            found["answer/seconds_to_target"] = self.recommended["seconds"]
        found |= {"cost/worker_hours": self.spent["worker_seconds"] / 3600} if self.spent else {}
        if "dollars" in self.spent:
            found["cost/dollars"] = self.spent["dollars"]
        return found


def spent(sweep: Sweep, ledger: Ledger) -> dict[str, float]:
    """What all trials took: worker-seconds of training, and dollars where a price is known: as each run has counted
    them in its cost.json (from the asking for workers to their end), else by price_per_worker_hour."""
    trained = sum(t.last.get("seconds", 0.0) * (t.last.get("workers") or 1) for t in ledger.trials.values())
    found, counted = {"worker_seconds": trained}, list[float]()
    for trial in ledger.trials.values():
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            counted.append(float(json.loads(ledger.storage.join(trial.name).read_bytes("cost.json"))["total"]))
    if counted:
        found["dollars"] = sum(counted)
    elif sweep.price_per_worker_hour is not None:
        found["dollars"] = trained / 3600 * sweep.price_per_worker_hour
    return found


def work_out(sweep: Sweep, ledger: Ledger) -> Answer:
    """The answer from what the trials reported."""
    trials = [trial for trial in ledger.trials.values() if trial.reports]
    whole = [trial for trial in trials if trial.status != "failed"]
    target = sweep.target if sweep.target is not None else science.fair_target(whole, sweep.metric, sweep.mode)
    rates = science.best_rates(trials, sweep.metric, sweep.mode)
    fastest = science.fastest_by_batch(whole, sweep.metric, target, sweep.mode) if target is not None else {}
    steps = {batch: found[0] for batch, found in fastest.items()}
    answer = Answer(
        target,
        sweep.target is not None,
        _best(sweep, whole),
        rates,
        science.scaling_rule(rates),
        steps,
        science.critical_batch(steps),
        science.noise_scale(whole),
        science.step_time(whole),
        None,
        spent(sweep, ledger),
    )
    if target is not None:
        answer.recommended = recommend(sweep, whole, answer)
    answer.goodput = goodput(answer)
    answer.sentences = _sentences(sweep, ledger, answer)
    return answer


def _best(sweep: Sweep, trials: list[Trial]) -> dict[str, Any]:
    scored = [(value, t) for t in trials if (value := science.value_of(t, sweep.metric, sweep.mode)) is not None]
    sign = 1 if sweep.mode == "min" else -1
    value, trial = min(scored, key=lambda pair: sign * pair[0])
    return {"trial": trial.name, "values": trial.values, "value": value}


def goodput(answer: Answer) -> list[dict[str, Any]]:
    """Per batch size on one worker: samples per second, what a sample is worth against the smallest batch (measured
    from the steps to the target, and as the noise scale has it), and their product."""
    if not answer.steps or answer.time is None:
        return []
    least = min(answer.steps)
    rows = []
    for batch, steps in answer.steps.items():
        rate = batch / answer.time.seconds(batch, 1) if answer.time.seconds(batch, 1) > 0 else 0.0
        worth = answer.steps[least] * least / (steps * batch)
        expected = science.efficiency(answer.noise, batch, least) if answer.noise else None
        rows.append(
            {"batch": batch, "rate": rate, "efficiency": worth, "by_noise_scale": expected, "goodput": rate * worth}
        )
    return rows


def recommend(sweep: Sweep, trials: list[Trial], answer: Answer) -> dict[str, Any] | None:
    """The soonest way to the target among the trials, and, where both fits exist, what they predict between them.

    Goodput is throughput × statistical efficiency: here samples per second × (least samples / samples needed).
    """
    assert answer.target is not None
    ways = []
    for trial in trials:
        seconds = science.steps_to(trial, sweep.metric, answer.target, sweep.mode, "seconds")
        if seconds is None:
            continue
        workers = int(trial.last.get("workers") or 1)
        values = {key: value for key, value in trial.values.items() if key != SEED} | {WORKERS: workers}
        ways.append(_way(sweep, values, seconds, workers, trial.name))
    if not ways:
        return None
    if answer.critical and answer.time and answer.rule and sweep.space.keys() <= {BATCH, RATE, WORKERS, SEED}:
        counts = sorted({way["values"][WORKERS] for way in ways})
        for batch in _between(list(answer.steps)):
            for workers in counts:
                if batch % workers == 0:
                    seconds = answer.critical.steps(batch) * answer.time.seconds(batch, workers)
                    values = {BATCH: batch, RATE: float(f"{answer.rule.rate(batch):.3g}"), WORKERS: workers}
                    ways.append(_way(sweep, values, seconds, workers, None))
    soonest = min(ways, key=lambda way: way["seconds"])
    cheapest = min(ways, key=lambda way: way["worker_seconds"])
    return {**soonest, "cheapest": cheapest}


def _way(sweep: Sweep, values: dict[str, Any], seconds: float, workers: int, trial: str | None) -> dict[str, Any]:
    price = sweep.price_per_worker_hour
    return {
        "values": values,
        "seconds": seconds,
        "worker_seconds": seconds * workers,
        "cost": None if price is None else seconds * workers / 3600 * price,
        "measured": trial,  # None: predicted by the fits
    }


def _between(batches: list[int]) -> list[int]:
    """Batch sizes a factor √2 apart over the range that was tried, rounded to multiples of 4."""
    low, high = min(batches), max(batches)
    count = round(2 * math.log2(high / low)) if high > low else 0
    return sorted({max(1, round(low * 2 ** (i / 2) / 4) * 4) for i in range(count + 1)})


def _sentences(sweep: Sweep, ledger: Ledger, answer: Answer) -> list[str]:
    counts: dict[str, int] = {}
    for trial in ledger.trials.values():
        counts[trial.status] = counts.get(trial.status, 0) + 1
    words = {"finished": "finished", "reached": "reached the target", "pruned": "stopped early", "failed": "failed"}
    ended = ", ".join(f"{counts[status]} {word}" for status, word in words.items() if status in counts)
    best = answer.best
    lines = [f"trials    {ended}"]
    lines.append(f"best      {sweep.metric} {best['value']:.4g}: {_values(best['values'])} ({best['trial']})")
    if answer.target_given and not answer.steps and not answer.recommended:
        lines.append(
            f"target    {sweep.metric} {answer.target:g} was not reached; the nearest is {best['value']:.4g}, off by "
            f"{abs(best['value'] - (answer.target or 0)):.3g}: {_learnt(sweep, ledger, answer)}"
        )
    if answer.rule:
        lines.append(f"rule      {rule_sentence(answer)}")
    if answer.critical:
        c = answer.critical
        lines.append(
            f"batch     critical batch size {c.batch:.0f} (95 %: {c.low:.0f} to {c.high:.0f}), from steps to "
            f"{sweep.metric} {answer.target:.4g}"
            + (f"; gradient noise scale {answer.noise:.0f}" if answer.noise else "")
        )
    elif answer.noise:
        lines.append(f"batch     gradient noise scale {answer.noise:.0f} samples")
    if answer.spent["worker_seconds"]:
        dollars = f", cost {answer.spent['dollars']:.3g}" if "dollars" in answer.spent else ""
        lines.append(f"spent     {answer.spent['worker_seconds']:,.0f} worker-seconds of training{dollars}")
    if answer.recommended:
        lines += _advice(answer.recommended, sweep.metric, answer.target or 0.0)
    return lines


def _learnt(sweep: Sweep, ledger: Ledger, answer: Answer) -> str:
    """What to do where no trial reached the target: the nearest was still getting better, or had stopped to."""
    trial = next(t for t in ledger.trials.values() if t.name == answer.best["trial"])
    values = [value for _, value in trial.curve(sweep.metric) if math.isfinite(value)]
    if len(values) < 3:
        return "train for longer, or look around the best point"
    best = min if sweep.mode == "min" else max
    late = values[-max(1, len(values) // 4) :]
    gained, missing = abs(best(late) - best(values[: -len(late)])), abs(answer.best["value"] - (answer.target or 0.0))
    if not sweep.better(best(late), best(values[: -len(late)])) or gained < 0.02 * missing:  # fifty quarters more
        return (
            "it got no nearer in the last quarter of its training, so longer training would not reach it: look around "
            "the best point, at other keys, or at a larger model"
        )
    longer = 1 + missing / gained / 4  # at that pace, which mostly falls
    return (
        f"it came {gained:.3g} nearer in the last quarter of its training, so it would take {longer:.2g} times as long "
        "at least: train for longer"
    )


def rule_sentence(answer: Answer) -> str:
    """The scaling rule in words."""
    rule = answer.rule
    assert rule is not None
    interval = f" (95 %: {rule.low:.2f} to {rule.high:.2f})" if math.isfinite(rule.high) else ""
    names = {"measured exponent": "neither linear nor square root", "undecided": "too few points to name a rule"}
    name = names.get(rule.name, f"the {rule.name} rule")
    edges = sum(rate.edge for rate in answer.rates)
    note = f"; {edges} of {len(answer.rates)} best rates are the last that were tried" if edges else ""
    return f"best learning rate ∝ batch^{rule.exponent:.2f}{interval}: {name}{note}"


def _advice(way: dict[str, Any], metric: str, target: float) -> list[str]:
    def text(w: dict[str, Any]) -> str:
        cost = f", cost {w['cost']:.3g}" if w["cost"] is not None else ""
        origin = f"measured, {w['measured']}" if w["measured"] else "predicted"
        return (
            f"{_values(w['values'])}: {w['seconds']:.3g} s, {w['worker_seconds']:.3g} worker-seconds{cost} ({origin})"
        )

    lines = [f"soonest   to {metric} {target:.4g}: {text(way)}"]
    if way["cheapest"]["values"] != way["values"]:
        lines.append(f"cheapest  {text(way['cheapest'])}")
    return lines


def _values(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{k.rsplit('.', 1)[-1]} {v:.3g}" if isinstance(v, float) else f"{k.rsplit('.', 1)[-1]} {v}"
        for k, v in values.items()
    )


def next_run(sweep: Sweep, ledger: Ledger, answer: Answer) -> Config:
    """What to train next: the recommended values, else those of the best trial, in a run of its own."""
    way = answer.recommended or {"values": {}, "measured": None}
    named = way["measured"] or answer.best["trial"]
    trial = next(t for t in ledger.trials.values() if t.name == named)
    config = sweep.config({**trial.values, **way["values"]}, f"{sweep.name}-next", sweep.base.run.storage)
    return with_values(config, {"tracking.log_model": sweep.base.tracking.log_model})


def write(sweep: Sweep, ledger: Ledger, answer: Answer, folder: Path) -> Path:
    """Writes answer.json, next.yaml, the plots and the page; the page's path."""
    from experiments.report import build
    from experiments.sweep import plots

    body = {**asdict(answer), "figures": answer.figures}
    (folder / "answer.json").write_text(json.dumps(body, indent=1, default=str))
    (folder / NEXT).write_text(to_yaml(mask_tree(to_dict(next_run(sweep, ledger, answer)))))
    return build.write(folder, page_content(sweep, ledger, answer, plots.write(sweep, ledger, answer, folder)))


def page_content(sweep: Sweep, ledger: Ledger, answer: Answer, plots: list[tuple[str, str]]) -> dict[str, Any]:
    """What is on the sweep's page; experiments/report/page.py says how."""
    about, best, trials = ledger.head["about"], answer.best, list(ledger.trials.values())
    facts = [(f"best {sweep.metric}", f"{best['value']:.4g}", best["trial"])]
    facts += [("training time", duration(answer.spent["worker_seconds"]), f"worker-time, {len(trials)} trials")]
    if answer.rule:
        facts.append(("learning rate ∝", f"batch^{answer.rule.exponent:.2f}", answer.rule.name))
    if answer.critical:
        interval = f"95 %: {answer.critical.low:.0f} to {answer.critical.high:.0f}"
        facts.append(("critical batch size", f"{answer.critical.batch:.0f}", interval))
    if answer.noise:
        facts.append(("gradient noise scale", f"{answer.noise:.0f}", "samples, measured in training"))
    scored = [(science.value_of(trial, sweep.metric, sweep.mode), trial) for trial in trials]
    sign = 1 if sweep.mode == "min" else -1
    scored.sort(key=lambda pair: math.inf if pair[0] is None else sign * pair[0])
    rows = [
        {"trial": t.name, **{key.rsplit(".", 1)[-1]: value for key, value in t.values.items()}}
        | {sweep.metric: "–" if value is None else value, "steps": t.last.get("step", 0)}
        | {"seconds": round(t.last.get("seconds", 0.0), 1), "end": t.message or t.status}
        for value, t in scored
    ]
    goodput_rows = [{_COLUMNS[key]: "–" if n is None else n for key, n in row.items()} for row in answer.goodput]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(ledger.head["created"]))
    how = f"sweep of {', '.join(about['space'])} by {about['searcher']}, scheduler {about['scheduler']}"
    return {
        "title": ledger.head["name"],
        "about": f"{how}; begun {began}; {ledger.storage.url}",
        "facts": facts,
        "sections": [
            {"title": "What was learnt", "sentences": [": ".join(line.split(maxsplit=1)) for line in answer.sentences]},
            {"title": "Pictures", "plots": plots},
            {"title": "Goodput", "tables": [{"rows": goodput_rows}], "note": _GOODPUT},
            {
                "title": "Trials",
                "tables": [{"rows": rows, "best": [row["trial"] for row in rows].index(best["trial"])}],
            },
            {"title": "Failures", "sentences": [f"{t.name}: {t.message}" for t in trials if t.status == "failed"]},
            {"title": "The sweep", "folded": {"search and experiment": json.dumps(about, indent=1)}},
        ],
    }


_COLUMNS = {"batch": "batch size", "rate": "samples/s", "efficiency": "worth of a sample, measured"}
_COLUMNS |= {"by_noise_scale": "by the noise scale", "goodput": "goodput"}
_GOODPUT = "Throughput times statistical efficiency (Pollux, OSDI 2021), on one worker, relative to the smallest batch."
