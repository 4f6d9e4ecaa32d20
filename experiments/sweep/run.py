"""`trireme sweep`: from a sweep file to its trials, its answer and its page; run again, it goes on."""

import contextlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import names
from app.config import Config
from app.config.io import flatten, to_dict, to_yaml, with_values
from app.console.masking import mask_tree
from app.console.terminal import Console
from app.errors import RunFailed
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from cluster.connect import connect, disconnect
from experiments.report.page import write
from experiments.study import own_folder, save_head, tracked
from experiments.sweep import analysis
from experiments.sweep.analysis import Answer, Way
from experiments.sweep.page import content
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import ENDED, FAILURES, RATE, SEED, WORKERS, Trial, TrialStore


@dataclass
class Outcome:
    """What became of `trireme sweep`; `--json` prints it."""

    status: str  # finished, or incomplete: some trials failed
    sweep: str
    folder: str
    best: dict[str, Any]  # trial, values, value (the best of its evaluations), step, evaluations, last
    trials: dict[str, int]  # how many ended in which way
    recommendation: dict[str, Any] | None
    page: str
    mlflow_run_id: str | None
    message: str = ""  # how many failed, the first of them, and what to do


def sweep(found: Sweep, console: Console, *, verbose: bool = False) -> Outcome:
    """Runs what is left of a sweep, and says what was learnt.

    Raises:
        UserError, LayoutError, ClusterError: nothing was started, or the sweep cannot go on with what it was given.
        RunFailed: no trial succeeded.
        Interrupted: stopped by Ctrl-C or SIGTERM; running trials have saved.
    """
    with own_folder(found.experiment, found.name, "sweep", console, verbose=verbose) as folder:
        store = TrialStore(folder, found.name, found.identity())
        store.retry_failed()
        left, tuning = len(store.ended) < found.count, None
        try:
            if left:
                console.status("reading the data and starting Ray")
                longest, cluster = found.longest(), connect(worker_setup=names.worker_setup())
                from experiments.sweep.tuning import prepare, run_trials  # imports Ray, which is to be connected first

                tuning = prepare(found, store, cluster, longest)
            save_head(folder, "sweep", store.head)
            with tracked(found.experiment, folder, store.head, "sweep", console) as tracker:
                about = {key: value for key, value in store.head["about"].items() if key != "experiment"}
                tracker.params(flatten({"sweep": about}))
                if tuning:
                    run_trials(found, store, console, *tuning)
                answer, page = _conclude(found, store, console, tracker)
        finally:
            if left:
                disconnect()
    ended = Counter(trial.status for trial in store.trials.values())
    counts = {status: ended[status] for status in ENDED}
    run_id = State.load(folder / "tracking").run_id
    failed = [trial for trial in store.trials.values() if trial.status == "failed"]
    message = ""
    if failed:
        why = f"{len(failed)} of {found.count} trials failed, the first {failed[0].name}: {failed[0].message}"
        message = f"{why}; run the same command again to try them again"
    status = "incomplete" if failed else "finished"
    return Outcome(status, found.name, str(folder), answer.best, counts, answer.soonest, str(page), run_id, message)


def _conclude(found: Sweep, store: TrialStore, console: Console, tracker: Tracker) -> tuple[Answer, Path]:
    """Works out the answer, and writes answer.json, next.yaml and the page. Raises RunFailed: no trial succeeded."""
    if not analysis.ranked(store.trials.values(), found):
        first = next((trial.message for trial in store.ended if trial.message), "no reason known")
        raise RunFailed(f"no trial of {found.name} gave a finite {found.metric}; the first said: {first}")
    folder, answer = store.folder, work_out(found, store)
    (folder / "answer.json").write_text(json.dumps(asdict(answer), indent=1, default=str))
    (folder / "next.yaml").write_text(to_yaml(mask_tree(to_dict(next_run(found, store, answer)))))
    page, best = write(folder, content(found, store, answer)), answer.best
    tags = {f"best.{key}": str(value) for key, value in best["values"].items()}
    tracker.tags({"trireme.best_trial": best["trial"], **tags})
    tracker.metrics(len(store.ended), {f"best/{found.metric}": best["value"], **answer.figures})
    for file in (page, folder / "answer.json", folder / "next.yaml"):
        tracker.artifact(file)
    for line in [*answer.sentences, f"next      trireme train {folder / 'next.yaml'}"]:
        console.say(f"  {line}")
    return answer, page


# --- the answer -------------------------------------------------------------------------------------------------------


def work_out(sweep: Sweep, store: TrialStore) -> Answer:
    """The answer from what the trials reported; at least one has a value."""
    trials = [trial for trial in store.trials.values() if trial.reports]
    whole = [trial for trial in trials if trial.status not in FAILURES]
    value, best = analysis.ranked(trials, sweep)[0]
    target = sweep.target if sweep.target is not None else analysis.fair_target(trials, sweep)
    rates = analysis.best_rates(trials, sweep)
    steps = analysis.fewest_steps(whole, sweep, target) if target is not None else {}
    answer = Answer(
        {"trial": best.name, "values": best.values, "value": value, **_evaluations(best, sweep)},
        target,
        rates,
        analysis.scaling_rule(rates),
        steps,
        analysis.critical_batch(steps),
        analysis.noise_scale(whole),
        analysis.step_time(whole),
        _spent(store),
        _soonest(sweep, whole, target),
    )
    answer.by_workers = _by_workers(answer, whole)
    answer.sentences = _sentences(sweep, store, answer)
    return answer


def _evaluations(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    """When a trial was at its best, of how many evaluations, and what the last of them gave."""
    best, curve = analysis.best_report(trial, sweep), trial.curve(sweep.metric)
    assert best is not None, "a ranked trial has a value"
    return {"step": best[0], "evaluations": len(curve), "last": curve[-1][1]}


def _by_workers(answer: Answer, trials: list[Trial]) -> list[dict[str, Any]]:
    """On 1, 2, 4, 8 workers, and as many as trials had, the batch size that is soonest at the target by steps needed
    (`CriticalBatch`) times seconds per step (`StepTime`), within the range that was tried, and its learning rate."""
    law, time = answer.critical, answer.time
    if law is None and answer.noise and answer.steps:  # as the noise scale has it
        least = [steps / (1 + answer.noise / batch) for batch, steps in answer.steps.items()]
        law = analysis.CriticalBatch(answer.noise, math.nan, math.nan, sorted(least)[len(least) // 2])
    if law is None or time is None:
        return []
    low, high, rows = min(answer.steps), max(answer.steps), list[dict[str, Any]]()
    between = {max(1, round(low * 2 ** (i / 2) / 4) * 4) for i in range(round(2 * math.log2(high / low)) + 1)}
    for workers in sorted({1, 2, 4, 8} | {trial.last["workers"] for trial in trials}):
        seconds = {b: law.steps(b) * time.seconds(b, workers) for b in {*answer.steps, *between} if b % workers == 0}
        if seconds:
            batch = min(seconds, key=seconds.__getitem__)
            rate = answer.rule.rate(batch) if answer.rule else answer.best["values"].get(RATE)
            row = {"workers": workers, "batch size": batch, "learning rate": rate, "steps": law.steps(batch)}
            rows.append(row | {"seconds to the target": seconds[batch], "worker-seconds": seconds[batch] * workers})
            rows[-1]["times faster"] = rows[0]["seconds to the target"] / seconds[batch]
    return rows


def _spent(store: TrialStore) -> dict[str, float]:
    """What all trials took: worker-seconds of training, and dollars where prices are known: as each run has counted
    them in its cost.json, from the asking for workers to their end."""
    trials, counted = store.trials.values(), list[float]()
    for trial in trials:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            counted.append(float(json.loads((store.folder / trial.name / "cost.json").read_text())["total"]))
    seconds = sum(trial.last["seconds"] * trial.last["workers"] for trial in trials if trial.last)
    return {"worker_seconds": seconds} | ({"dollars": sum(counted)} if counted else {})


def _soonest(sweep: Sweep, trials: list[Trial], target: float | None) -> Way | None:
    """The trial that reached the target first."""
    times = {t.name: analysis.steps_to(t, sweep, target, "seconds") for t in trials} if target is not None else {}
    reached = [(seconds, trial) for trial in trials if (seconds := times.get(trial.name)) is not None]
    if not reached:
        return None
    seconds, trial = min(reached, key=lambda pair: pair[0])
    values = {key: value for key, value in trial.values.items() if key != SEED} | {WORKERS: trial.last["workers"]}
    return {"trial": trial.name, "values": values, "seconds": seconds}


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentences(sweep: Sweep, store: TrialStore, answer: Answer) -> list[str]:
    counts = Counter(trial.status for trial in store.trials.values())
    words = {"reached": "reached the target", "pruned": "stopped early"}
    ended = ", ".join(f"{counts[status]} {words.get(status, status)}" for status in ENDED if counts[status])
    best, target = answer.best, f"{sweep.metric} {answer.target:.4g}" if answer.target is not None else ""
    lines = [f"trials    {ended}"]
    lines.append(
        f"best      {sweep.metric} {best['value']:.4g}: {_words(best['values'])} ({best['trial']}, best of its "
        f"{best['evaluations']} evaluations, at step {best['step']:,}; the last gave {best['last']:.4g})"
    )
    if sweep.target is not None and not answer.soonest:
        missing = abs(best["value"] - sweep.target)
        lines.append(
            f"target    {target} was not reached; the nearest is {best['value']:.4g}, off by {missing:.3g}: train for "
            "longer, or look around the best point, at other keys, or at a larger model"
        )
    if answer.rule:
        lines.append(f"rule      {_rule(answer.rule, answer.rates)}")
    noise = f"gradient noise scale {answer.noise:.0f} samples" if answer.noise else ""
    if c := answer.critical:
        found = f"critical batch size {c.batch:.0f} ({c.interval}), from steps to {target}"
        lines.append(f"batch     {found}{f'; {noise}' if noise else ''}")
    elif noise:
        lines.append(f"batch     {noise}")
    for row in answer.by_workers:
        rate = f", learning rate {row['learning rate']:.3g}" if row["learning rate"] else ""
        gain = f", {row['times faster']:.2f} times as fast as {answer.by_workers[0]['workers']}"
        use = f"batch size {row['batch size']}{rate}: {row['seconds to the target']:.3g} s to {target}, predicted"
        lines.append(f"on {row['workers']:<7}{use}{gain if row is not answer.by_workers[0] else ''}")
    dollars = f", cost {answer.spent['dollars']:.3g}" if "dollars" in answer.spent else ""
    lines.append(f"spent     {answer.spent['worker_seconds']:,.0f} worker-seconds of training{dollars}")
    if way := answer.soonest:
        lines.append(f"soonest   to {target}: {_words(way['values'])}: {way['seconds']:.3g} s ({way['trial']})")
    return lines


def _rule(rule: analysis.ScalingRule, rates: list[analysis.BestRate]) -> str:
    interval = f" (95 %: {rule.low:.2f} to {rule.high:.2f})" if math.isfinite(rule.high) else ""
    names = {"measured exponent": "neither linear nor square root", "undecided": "too few points to name a rule"}
    edges = sum(rate.edge for rate in rates)
    note = f"; {edges} of {len(rates)} best rates are the last that were tried" if edges else ""
    name = names.get(rule.name, f"the {rule.name} rule")
    return f"best learning rate ∝ batch^{rule.exponent:.2f}{interval}: {name}{note}"


def _words(values: dict[str, Any]) -> str:
    shown = {key.rsplit(".", 1)[-1]: f"{v:.3g}" if isinstance(v, float) else v for key, v in values.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def next_run(sweep: Sweep, store: TrialStore, answer: Answer) -> Config:
    """What to train next, in a run of its own: the way that is soonest at the target, else the best trial."""
    values = store.trials[(answer.soonest or answer.best)["trial"]].values
    config = sweep.config(values, f"{sweep.name}-next", sweep.experiment.run.storage)
    return with_values(config, {"tracking.log_model": sweep.experiment.tracking.log_model})
