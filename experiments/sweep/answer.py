"""A sweep's answer, worked out from what its trials have reported, and the same in words."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from app.console.terminal import duration
from experiments.sweep import analysis
from experiments.sweep.analysis import BestRate, CriticalBatch, ScalingRule, StepTime
from experiments.sweep.branches import (
    Branches,
    Edge,
    Gain,
    Interval,
    answer_of,
    best_cell,
    edges_of,
    gains,
    is_of_cell,
    losses_of,
)
from experiments.sweep.confirmation import Confirmation, confirmation_of
from experiments.sweep.planned import plan_steps
from experiments.sweep.prior import Prior
from experiments.sweep.spec import SOONEST, Sweep
from experiments.sweep.trials import (
    BATCH,
    ENDED,
    FAILURES,
    RATE,
    SEED,
    WORKERS,
    Trial,
    TrialStore,
)

COUNTS = (1, 2, 4, 8)
"""Numbers of workers for which the answer says what to use, besides those that trials had."""


class BestTrial(TypedDict):
    """The trial of the best setting: by several seeds if they have judged it, else by its value.

    Attributes:
        trial: Its name.
        values: Its point of the search space.
        value: The best value of its evaluations.
        step: The step of that evaluation.
        evaluations: The number of its evaluations.
        last: The value of the last one.
        mean: The mean over the seeds that have judged its setting; the value if none has.
        seeds: How many seeds have; 0 if none has.
    """

    trial: str
    values: dict[str, Any]
    value: float
    step: int
    evaluations: int
    last: float
    mean: float
    seeds: int


class SoonestTrial(TypedDict):
    """The trial that reached the target first.

    Attributes:
        trial: Its name.
        values: Its point of the search space without the seed, and its number of workers.
        seconds: Its seconds of training until then.
    """

    trial: str
    values: dict[str, Any]
    seconds: float


WorkersRow = TypedDict(
    "WorkersRow",
    {
        "workers": int,
        "batch size": int,
        "learning rate": float | None,
        "steps": float,
        "seconds to the target": float,
        "worker-seconds": float,
        "times faster": float,
    },
)
"""What to use on a number of workers, predicted; a row of the page's table."""


@dataclass(kw_only=True)
class Answer:
    """Everything that a sweep has found out; answer.json holds it.

    Attributes:
        best: The trial of the best setting.
        target: The value that is to be reached; None if there is none.
        rates: The best learning rate at each batch size.
        rule: The power law through them.
        steps: Steps to the target by batch size.
        critical: The critical batch size.
        noise: The gradient noise scale, in samples.
        prior: What a law says of language models; None for others.
        noise_at_least: What it is at least, if no batch was large enough to bound it from above.
        time: The time of a step.
        spent: "worker_seconds" of training, and "dollars" if prices are known.
        soonest: The trial that reached the target first.
        by_workers: What to use on numbers of workers.
        confirmation: What several seeds say about the best settings; None with one seed.
        branches: What the branches of a sweep of forks say; None for other sweeps.
        edges: Batch sizes of branches whose best rate may lie beyond those that were tried.
        gains: The quickest batch of branches on numbers of workers.
        sentences: The answer in words.
    """

    best: BestTrial
    target: float | None
    rates: list[BestRate]
    rule: ScalingRule | None
    steps: dict[int, float]
    critical: CriticalBatch | None
    noise: float | None
    time: StepTime | None
    spent: dict[str, float]
    soonest: SoonestTrial | None
    by_workers: list[WorkersRow] = field(default_factory=list)
    noise_at_least: float | None = None
    prior: Prior | None = None
    confirmation: Confirmation | None = None
    branches: Branches | None = None
    edges: list[Edge] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of the answer, for MLflow."""
        figures = {
            "answer/lr_exponent": self.rule.exponent if self.rule else None,
            "answer/critical_batch": self.critical.batch if self.critical else None,
            "answer/noise_scale": self.noise,
            "answer/seconds_to_target": self.soonest["seconds"] if self.soonest else None,
            "cost/worker_hours": self.spent["worker_seconds"] / 3600,
            "cost/dollars": self.spent.get("dollars"),
        }
        branches = self.branches
        if branches is not None and branches.critical is not None:
            figures |= {
                "answer/critical_batch": branches.critical.value,
                "answer/critical_batch_low": branches.critical.low,
                "answer/critical_batch_high": branches.critical.high,
                "answer/noise": branches.noise,
            }
        if branches is not None and branches.exponent is not None:
            figures["answer/lr_exponent"] = branches.exponent.value
        return {name: value for name, value in figures.items() if value is not None}


def work_out(sweep: Sweep, store: TrialStore) -> Answer:
    """Works out the answer from the reports of trials, of which at least one has a value."""
    all_trials = [trial for trial in store.trials.values() if trial.reports]
    trials = [trial for trial in all_trials if not trial.confirms]
    sound_trials = [trial for trial in trials if trial.status not in FAILURES]
    confirmation = confirmation_of(sweep, store.trials.values())
    target = sweep.target
    if target is None:
        target = analysis.fair_target(trials, sweep)
    steps = {}
    if target is not None:
        steps = analysis.fewest_steps(sound_trials, sweep, target)
    rates = analysis.best_rates(all_trials, sweep)
    answer = Answer(
        best=_best_trial(trials, confirmation, sweep),
        target=target,
        rates=rates,
        rule=analysis.scaling_rule(rates),
        steps=steps,
        critical=analysis.critical_batch(steps),
        noise=analysis.noise_scale(sound_trials),
        time=analysis.step_time(sound_trials),
        spent=_spent(store),
        soonest=_soonest(sound_trials, sweep, target),
        noise_at_least=analysis.least_noise_scale(sound_trials),
        confirmation=confirmation,
        prior=sweep.prior,
    )
    if sweep.fork:
        has_ended = sum(trial.ended for trial in store.searched) >= sweep.count
        _add_branches(answer, sweep, trials, is_whole=has_ended)
    if answer.branches is None:
        answer.by_workers = _by_workers(answer, sound_trials)
    answer.sentences = _sentences(sweep, store, answer)
    return answer


def _best_trial(
    trials: Iterable[Trial],
    confirmation: Confirmation | None,
    sweep: Sweep,
) -> BestTrial:
    """The trial of the best setting.

    Args:
        trials: Those of the search, of which at least one has a value.
        confirmation: What several seeds say; None with one seed.
        sweep: The sweep.
    """
    ranked = analysis.rank_trials(trials, sweep)
    value, trial = ranked[0]
    mean = value
    seeds = 0
    if confirmation is not None and sweep.next != SOONEST:
        best = confirmation.best
        trial = next(each for _, each in ranked if each.name == best.trial)
        mean = best.mean
        seeds = confirmation.seeds
    return _as_best_trial(trial, sweep, mean=mean, seeds=seeds)


def _as_best_trial(trial: Trial, sweep: Sweep, *, mean: float, seeds: int) -> BestTrial:
    report = analysis.best_report(trial, sweep)
    assert report is not None, "a ranked trial has a value"
    curve = trial.curve(sweep.metric)
    return {
        "trial": trial.name,
        "values": trial.values,
        "value": report[1],
        "step": report[0],
        "evaluations": len(curve),
        "last": curve[-1][1],
        "mean": mean,
        "seeds": seeds,
    }


def _add_branches(answer: Answer, sweep: Sweep, trials: Sequence[Trial], *, is_whole: bool) -> None:
    """Adds what branches say about the batch, and what that would bring.

    Args:
        answer: Gets it.
        sweep: The sweep.
        trials: The branches.
        is_whole: Whether all of the search have ended; before that its rates have no edge.
    """
    varied = (BATCH, RATE, SEED)
    others = {key: value for key, value in answer.best["values"].items() if key not in varied}
    losses = losses_of(trials, sweep, others)
    branches = answer_of(losses)
    if branches is None:
        return
    answer.branches = branches
    if RATE in sweep.space and is_whole:
        answer.edges = edges_of(losses)
    best = best_cell(losses)
    first = min(
        (trial for trial in trials if is_of_cell(trial, best, others)),
        key=lambda trial: trial.index,
    )
    answer.best = _as_best_trial(
        first,
        sweep,
        mean=sweep.sign * branches.loss_of(best[0]),
        seeds=branches.seeds if branches.seeds > 1 else 0,
    )
    # What compares trials by their best evaluation, or by steps to a target, is for other sweeps.
    answer.confirmation = None
    answer.steps = {}
    answer.critical = None
    answer.rates = [
        BestRate(batch=each.batch, rate=each.rate.value, value=each.loss, edge=each.edge)
        for each in branches.batches
        if each.rate is not None
    ]
    answer.rule = analysis.scaling_rule(answer.rates)
    if sweep.target is None:
        answer.soonest = None
    present_batch = sweep.experiment.train.global_batch_size
    planned = plan_steps(
        sweep,
        trials,
        batches=sorted({present_batch, *(each.batch for each in branches.batches)}),
        counts=sorted({*COUNTS, *(trial.last["workers"] for trial in trials)}),
    )
    answer.gains = gains(
        branches.usable(),
        planned.seconds,
        samples=planned.samples,
        present_batch=present_batch,
        price=planned.price,
    )


def _by_workers(answer: Answer, trials: Iterable[Trial]) -> list[WorkersRow]:
    """For numbers of workers, the batch size that reaches the target soonest, and its rate.

    Soonest: by the steps that are needed (`CriticalBatch`) times seconds per step (`StepTime`),
    within the range of batch sizes that were tried.

    Returns:
        [] if the steps or the seconds are not known.
    """
    law = answer.critical or _law_of_noise_scale(answer)
    time = answer.time
    if law is None or time is None:
        return []
    rows: list[WorkersRow] = []
    batches = sorted({*answer.steps, *_batches_between(min(answer.steps), max(answer.steps))})
    for workers in sorted({*COUNTS, *(trial.last["workers"] for trial in trials)}):
        seconds = {}
        for batch in batches:
            if batch % workers == 0:
                seconds[batch] = law.steps(batch) * time.seconds(batch, workers)
        if not seconds:
            continue
        best = min(seconds, key=seconds.__getitem__)
        rate = answer.rule.rate(best) if answer.rule else answer.best["values"].get(RATE)
        seconds_of_first_row = rows[0]["seconds to the target"] if rows else seconds[best]
        rows.append(
            {
                "workers": workers,
                "batch size": best,
                "learning rate": rate,
                "steps": law.steps(best),
                "seconds to the target": seconds[best],
                "worker-seconds": seconds[best] * workers,
                "times faster": seconds_of_first_row / seconds[best],
            }
        )
    return rows


def _law_of_noise_scale(answer: Answer) -> CriticalBatch | None:
    """Steps to the target with the gradient noise scale as the critical batch size.

    Returns:
        None if the noise scale was not measured, or no trial has reached the target.
    """
    if not answer.noise or not answer.steps:
        return None
    least_steps = sorted(
        steps / (1 + answer.noise / batch) for batch, steps in answer.steps.items()
    )
    return CriticalBatch(
        batch=answer.noise,
        low=math.nan,
        high=math.nan,
        least_steps=least_steps[len(least_steps) // 2],
    )


def _batches_between(low: int, high: int) -> list[int]:
    """Batch sizes from `low` to `high`, each √2 times the one before, and multiples of 4."""
    count = round(2 * math.log2(high / low)) + 1
    return [max(1, round(low * 2 ** (i / 2) / 4) * 4) for i in range(count)]


def _spent(store: TrialStore) -> dict[str, float]:
    """What all trials took.

    Returns:
        "worker_seconds" of training; "dollars" if prices are known, as each run has counted them in
        its cost.json, from the request for workers to their end.
    """
    seconds = 0.0
    dollars = []
    for trial in store.trials.values():
        if trial.last:
            seconds += trial.last["seconds"] * trial.last["workers"]
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            cost = json.loads((store.folder / trial.name / "cost.json").read_text())
            dollars.append(float(cost["total"]))
    spent = {"worker_seconds": seconds}
    if dollars:
        spent["dollars"] = sum(dollars)
    return spent


def _soonest(trials: Iterable[Trial], sweep: Sweep, target: float | None) -> SoonestTrial | None:
    """The trial that reached the target first; None if none did, or there is no target."""
    if target is None:
        return None
    reached = []
    for trial in trials:
        seconds = analysis.reached_at(trial, sweep, target, "seconds")
        if seconds is not None:
            reached.append((seconds, trial))
    if not reached:
        return None
    seconds, trial = min(reached, key=lambda pair: pair[0])
    values = {key: value for key, value in trial.values.items() if key != SEED}
    values[WORKERS] = trial.last["workers"]
    return {"trial": trial.name, "values": values, "seconds": seconds}


# --- in words -------------------------------------------------------------------------------------


def _sentences(sweep: Sweep, store: TrialStore, answer: Answer) -> list[str]:
    """The answer in words; each line begins with its subject, and then is one sentence."""
    target = f"{sweep.metric} {answer.target:.4g}" if answer.target is not None else ""
    best = answer.best
    lines = [f"trials    {_endings(store)}", f"best      {_best_in_words(sweep, answer)}"]
    if answer.confirmation is not None:
        lines += _confirmation_in_words(answer.confirmation, sweep)
    if sweep.target is not None and not answer.soonest:
        gap = abs(best["value"] - sweep.target)
        lines.append(
            f"target    {target} was not reached; the nearest is {best['value']:.4g}, off by "
            f"{gap:.3g}: train for longer, or look around the best point, at other keys, or at a "
            "larger model"
        )
    if answer.branches is not None:
        lines += _branches_in_words(answer.branches, sweep, answer)
    elif answer.rule:
        lines.append(f"rule      {_rule_in_words(answer.rule, answer.rates)}")
    if answer.prior is not None:
        lines.append(f"prior     {answer.prior.sentence}")
    estimates = []
    if answer.critical and answer.branches is None:
        critical = f"{answer.critical.batch:.0f} ({answer.critical.interval})"
        estimates.append(f"critical batch size {critical}, from steps to {target}")
    if answer.noise:
        estimates.append(f"gradient noise scale {answer.noise:.0f} samples")
    elif answer.noise_at_least:
        bound = f"at least {answer.noise_at_least:.0f} samples"
        estimates.append(f"gradient noise scale {bound}: larger batches would measure it")
    if estimates:
        lines.append(f"batch     {'; '.join(estimates)}")
    lines += _workers_in_words(answer.by_workers, target)
    if answer.by_workers:
        lines.append(f"basis     {_basis_in_words(answer)}")
    spent = f"{answer.spent['worker_seconds']:,.0f} worker-seconds of training"
    if "dollars" in answer.spent:
        spent += f", cost {answer.spent['dollars']:.3g}"
    lines.append(f"spent     {spent}")
    if answer.soonest:
        soonest = answer.soonest
        way = f"{_in_words(soonest['values'])}: {soonest['seconds']:.3g} s ({soonest['trial']})"
        lines.append(f"soonest   to {target}: {way}")
    return lines


def _best_in_words(sweep: Sweep, answer: Answer) -> str:
    best = answer.best
    confirmation = answer.confirmation
    evaluations = (
        f"best of its {best['evaluations']} evaluations, at step {best['step']:,}; the last gave "
        f"{best['last']:.4g}"
    )
    if answer.branches is not None and answer.branches.seeds > 1:
        values = {key: value for key, value in best["values"].items() if key != SEED}
        mean = f"{best['mean']:.4g}, mean of {best['seeds']} seeds after the same samples"
        return f"{sweep.metric} {mean}: {_in_words(values)}"
    if not best["seeds"] or confirmation is None:
        one_seed = "" if sweep.settings_to_confirm or SEED in best["values"] else "; one seed"
        setting = _in_words(best["values"])
        remark = f"{best['trial']}, {evaluations}{one_seed}"
        return f"{sweep.metric} {best['value']:.4g}: {setting} ({remark})"
    confirmed = confirmation.best
    interval = ""
    if confirmed.low is not None and confirmed.high is not None:
        interval = f" (80 %: {confirmed.low:.4g} to {confirmed.high:.4g})"
    other = "" if SEED in sweep.space else "other "
    mean = f"{confirmed.mean:.4g}{interval}, mean of {confirmation.seeds} {other}seeds"
    remark = f"{best['trial']} gave {best['value']:.4g}, {evaluations}"
    return f"{sweep.metric} {mean}: {_in_words(confirmed.values)} ({remark})"


def _confirmation_in_words(confirmation: Confirmation, sweep: Sweep) -> list[str]:
    """How the other settings compare with the best one by several seeds; the nearest three."""
    lines = []
    unit = " s to the target" if sweep.next == SOONEST else ""
    for setting in confirmation.settings[1:3]:
        remark = ""
        if setting.verdict == "alike":
            remark = " (not told apart)"
        shown = f"{setting.mean:.4g}{unit}" if math.isfinite(setting.mean) else "not with each seed"
        lines.append(f"{setting.verdict:<10}{shown}: {_in_words(setting.values)}{remark}")
    if confirmation.more_seeds and sweep.settings_to_confirm:
        count = confirmation.seeds + confirmation.more_seeds
        lines.append(
            f"undecided {confirmation.more_seeds} more seeds would tell the first two apart, if "
            f"they differ as much as here: run it again with confirm_seeds={count}"
        )
    return lines


def _endings(store: TrialStore) -> str:
    """How many trials ended in which way."""
    counts = Counter(trial.status for trial in store.trials.values())
    words = {"reached": "reached the target", "pruned": "stopped early"}
    endings = []
    for status in ENDED:
        if counts[status]:
            endings.append(f"{counts[status]} {words.get(status, status)}")
    saved = sum(trial.samples_left for trial in store.trials.values() if trial.status == "pruned")
    remark = f"; {saved:,} samples were saved" if saved else ""
    return ", ".join(endings) + remark


def _rule_in_words(rule: ScalingRule, rates: Sequence[BestRate]) -> str:
    interval = ""
    if math.isfinite(rule.high):
        interval = f" (95 %: {rule.low:.2f} to {rule.high:.2f})"
    names = {
        "measured exponent": "neither linear nor square root",
        "undecided": "too few points to name a rule",
    }
    name = names.get(rule.name, f"the {rule.name} rule")
    edges = sum(rate.edge for rate in rates)
    note = ""
    if edges:
        note = f"; {edges} of {len(rates)} best rates are the last that were tried"
    return f"best learning rate ∝ batch^{rule.exponent:.2f}{interval}: {name}{note}"


def _workers_in_words(rows: Sequence[WorkersRow], target: str) -> list[str]:
    lines = []
    for row in rows:
        rate = f", learning rate {row['learning rate']:.3g}" if row["learning rate"] else ""
        settings = f"batch size {row['batch size']}{rate}"
        seconds = f"{row['seconds to the target']:.3g} s to {target}, predicted"
        gain = ""
        if row is not rows[0]:
            gain = f", {row['times faster']:.2f} times as fast as {rows[0]['workers']}"
        lines.append(f"on {row['workers']:<7}{settings}: {seconds}{gain}")
    return lines


def _basis_in_words(answer: Answer) -> str:
    """What the predictions for numbers of workers rest on."""
    law = "steps by the gradient noise scale"
    if answer.critical is not None:
        law = f"steps of {len(answer.steps)} batch sizes"
    rate = "the rate of the best trial"
    if answer.rule is not None:
        rate = f"best rates at {len(answer.rates)} of them"
        if answer.rule.name == "undecided":
            rate += " (whose rule is undecided)"
    most = max(answer.steps)
    return (
        f"{law}, {rate}, and seconds of a step by samples of a worker; batch sizes up to {most}, "
        "no communication (trireme scale measures it)"
    )


def _branches_in_words(branches: Branches, sweep: Sweep, answer: Answer) -> list[str]:
    lines = []
    if branches.noise is not None:
        lines.append(
            f"noise     {branches.noise:.3g} between two branches (standard deviation over "
            f"{branches.seeds} seeds of their difference in {sweep.metric})"
        )
    lines.append(f"critical  {_critical_in_words(branches)}")
    rates = [
        f"{_interval_in_words(each.rate, '.3g')} at {each.batch}"
        for each in branches.batches
        if each.rate is not None
    ]
    if rates:
        lines.append(f"rates     best {'; '.join(rates)}")
    lines += [f"edge      {_edge_in_words(edge, sweep, branches)}" for edge in answer.edges]
    if branches.exponent is not None:
        exponent = _interval_in_words(branches.exponent, ".2f")
        lines.append(f"rule      best learning rate ∝ batch^γ, γ = {exponent}")
    present_batch = sweep.experiment.train.global_batch_size
    for gain in answer.gains:
        rate = f", learning rate {gain.rate:.3g}" if RATE in sweep.space else ""
        cost = "" if gain.dollars is None else f", {gain.dollars:.3g} dollars"
        faster = ""
        if gain.times_faster is not None and gain.batch != present_batch:
            faster = f", {gain.times_faster:.2f} times as fast as a batch of {present_batch}"
        lines.append(
            f"on {gain.workers:<7}batch size {gain.batch}{rate}: {gain.steps:,} steps, "
            f"{duration(3600 * gain.hours)} of training{cost}, predicted{faster}"
        )
    return lines


def _critical_in_words(branches: Branches) -> str:
    if branches.seeds == 1:
        return (
            "undecided: one seed shows no noise; write train.seed: [0, 1, 2] in the space "
            f"({branches.more_seeds} more seeds)"
        )
    if branches.critical is None:
        return "undecided: one batch size was tried; write two or more in the space"
    interval = _interval_in_words(branches.critical, ".0f")
    beyond = ", or more than was tried" if branches.is_open else ""
    if branches.is_decided:
        return f"batch size {interval}{beyond}"
    ways = []
    if branches.edge_batches:
        batches = ", ".join(map(str, branches.edge_batches))
        ways.append(f"rates beyond those at batch size {batches}")
    if branches.more_seeds is None:
        ways.append("more samples for each branch")
    elif branches.more_seeds:
        ways.append(f"about {branches.more_seeds} more seeds")
    return f"undecided: batch size {interval}{beyond}; {' and '.join(ways)} would decide"


def _edge_in_words(edge: Edge, sweep: Sweep, branches: Branches) -> str:
    """Which trials would decide where the best rate at a batch size is."""
    last = "highest" if edge.beyond > edge.rate else "lowest"
    trials = f"{branches.seeds} more trial{'s' if branches.seeds > 1 else ''}"
    way = ""
    if sweep.rates_beyond:
        way = f" (more_rates={sweep.rates_beyond + 1}"
        way += ", or a larger budget.samples)" if sweep.budget.samples is not None else ")"
    return (
        f"undecided: the best rate at batch size {edge.batch} is the {last} that was tried, "
        f"{edge.rate:.3g}; {trials} at {edge.beyond:.3g} would decide{way}"
    )


def _interval_in_words(interval: Interval, form: str) -> str:
    low, high = format(interval.low, form), format(interval.high, form)
    return f"{format(interval.value, form)} (80 %: {low} to {high})"


def _in_words(values: Mapping[str, Any]) -> str:
    """A point of the search space, such as "lr 0.01, global_batch_size 64"."""
    words = []
    for key, value in values.items():
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        words.append(f"{key.rsplit('.', 1)[-1]} {text}")
    return ", ".join(words)
