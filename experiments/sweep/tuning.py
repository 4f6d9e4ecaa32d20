"""Between a sweep and Ray Tune: runs the trials and keeps their reports.

This file imports Ray, and is itself imported once Ray is connected.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import SearchAlgorithm, Searcher

from app.console.masking import mask_uri
from app.console.terminal import Console, duration
from app.errors import Interrupted, RunFailed, UserError
from app.launchers.ray_workers import work_in
from app.run.cost import check_budget, rate_here
from app.run.stopping import stop_signals
from app.storage.storage import Storage
from app.tracking.settings import resolve_tracking
from cluster.connect import Cluster, disconnect
from cluster.pending import check_feasible
from cluster.shape import NodeState
from experiments.sweep.budget import BudgetSpent, Ledger, watched
from experiments.sweep.prior import nearest_point
from experiments.sweep.search import make_scheduler, make_searcher
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import (
    REACHED,
    STOP_FILE,
    Resources,
    TrialContext,
    TrialRun,
    TuneResult,
    trial_bundles,
)
from experiments.sweep.trials import Trial, TrialStore, load_trial, trial_name

ENVIRONMENT = {
    # The trials' folders and MLflow have what Tune's loggers would write.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # By default 200 placement groups wait, also for resources that others use.
    "TUNE_MAX_PENDING_TRIALS_PG": "16",
    "RAY_AIR_NEW_OUTPUT": "0",
    # In every trial relative paths mean the folder in which the sweep was started.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Settings of Tune (https://docs.ray.io/en/latest/tune/api/env.html)."""
TUNE_FOLDER = ".tune"
"""Where Tune keeps its own files while it runs, in the sweep's folder."""


@dataclass(frozen=True)
class Tuning:
    """What Tune is given.

    Attributes:
        searcher: Suggests points.
        scheduler: Stops trials early.
        uses_gpus: Whether trials use GPUs.
        earlier_trials: Those whose points are tried first, in this order.
        dollars_per_hour: Of a trial, by its number of workers; {} if a price is not known.
        room: How many trials what is free on the cluster has room for, at most.
    """

    searcher: Searcher | SearchAlgorithm
    scheduler: TrialScheduler
    uses_gpus: bool
    earlier_trials: list[Trial]
    dollars_per_hour: dict[int, float]
    room: int = 0


def prepare(
    sweep: Sweep,
    earlier_trials: Sequence[Trial],
    cluster: Cluster,
    *,
    longest: int,
) -> Tuning:
    """Makes searcher and scheduler, and checks that trials fit on the cluster and in the budget.

    Args:
        sweep: The sweep.
        earlier_trials: Those whose points are tried first: of earlier starts, or planned.
        cluster: The cluster that this process is connected to.
        longest: The length of the longest trial (`Sweep.longest`).

    Raises:
        UserError: Searcher or scheduler do not take their arguments, or there is a budget in
            dollars and no price.
        ClusterError: Trials do not fit on the cluster.
    """
    os.environ.update(ENVIRONMENT)
    experiment = sweep.experiment
    report_every = _report_every(sweep, longest)
    # The trials of earlier starts come first, in their order.
    points = [trial.values for trial in earlier_trials]
    points += [values for values in sweep.points or () if values not in points]
    if not points and sweep.prior is not None:
        nearest = nearest_point(sweep.prior, sweep.space)
        points += [nearest] if nearest is not None else []
    searcher = make_searcher(sweep, points)
    scheduler = make_scheduler(sweep, longest=longest, report_every=report_every)
    uses_gpus = cluster.gpus > 0
    dollars_per_hour: dict[int, float] = {}
    for config in sweep.configs:
        workers = int(config.workers)
        per_worker = trial_bundles(config, uses_gpus=uses_gpus)[-1]
        check_feasible(cluster.shape, workers, per_worker)
        if workers not in dollars_per_hour:
            rate = rate_here(experiment, workers, per_worker)
            check_budget(experiment.budget, rate)
            check_budget(sweep.budget.dollars, rate)
            dollars_per_hour |= {} if rate is None else {workers: rate}
    needs = [trial_bundles(config, uses_gpus=uses_gpus) for config in sweep.configs]
    return Tuning(
        searcher,
        scheduler,
        uses_gpus,
        list(earlier_trials),
        dollars_per_hour,
        room=max(_room(bundles, cluster.nodes) for bundles in needs),
    )


def _report_every(sweep: Sweep, longest: int) -> int:
    """Steps, or samples as `time` says, between two reports of the trial that reports most often.

    Args:
        sweep: The sweep.
        longest: The length of the longest trial (`Sweep.longest`).
    """
    if sweep.reports:
        return max(1, longest // sweep.reports)
    steps = sweep.experiment.train.eval_every
    if not steps:
        return longest
    if sweep.time == "step":
        return steps
    return steps * min(config.train.global_batch_size for config in sweep.configs)


def _room(bundles: Sequence[Resources], nodes: Sequence[NodeState]) -> int:
    """How many trials with these bundles the free resources of nodes are enough for, at most."""
    counts = []
    for name in {name for bundle in bundles for name in bundle}:
        needed = sum(bundle.get(name, 0.0) for bundle in bundles)
        free = sum(node.available.get(name, 0.0) for node in nodes)
        if needed:
            counts.append(int(free // needed))
    return min(counts, default=0)


def run_trials(
    sweep: Sweep,
    store: TrialStore,
    console: Console,
    *,
    tuning: Tuning,
    trainable: type[tune.Trainable] | None = None,
) -> None:
    """Runs trials until all have ended.

    Args:
        sweep: What is tried.
        store: Keeps what trials report.
        console: Writes to the terminal.
        tuning: What Tune is given.
        trainable: Runs one trial after another; None trains (`TrialActor`).

    Raises:
        UserError: No trial reports what the sweep compares.
        RunFailed: Tune gave up.
        Interrupted: A person stopped the sweep, and running trials have saved.
        BudgetSpent: The sweep's budget is spent.
    """
    observer = Observer(sweep, store, console, tuning=tuning)
    ledger = Ledger(sweep.budget, Storage(store.folder))
    if ledger.is_ending(max(tuning.dollars_per_hour.values(), default=0.0)):
        raise BudgetSpent(f"the budget is spent, {ledger.sentence()}: raise it to continue")
    tuner = _make_tuner(sweep, store, observer, tuning=tuning, trainable=trainable or TrialActor)
    stop = StopFile(store.folder / STOP_FILE, observer, ledger, console)
    stop.remove()
    with stop_signals(stop.for_person) as signals:
        # If the block does not end, its connection to Ray does, and trials with it.
        end = partial(signals.end, last_resort=disconnect)
        try:
            with watched(ledger, observer.rate, ask=stop.within_budget, end=end):
                tuner.fit()
        except tune.TuneError as error:
            if observer.problem is None and not observer.is_stopping:
                reason = str(error).strip().splitlines()[-1]
                raise RunFailed(f"Ray Tune gave up: {reason}") from error
        except KeyboardInterrupt:
            if not observer.is_over_budget:
                raise
        except Exception:
            is_disconnected = not ray.is_initialized()
            if not (observer.is_over_budget and is_disconnected):
                raise
    # trial.json and the folders of the runs are what is kept.
    shutil.rmtree(store.folder / TUNE_FOLDER, ignore_errors=True)
    if observer.problem is not None:
        raise observer.problem
    if observer.is_over_budget and observer.has_trials_left:
        problem = f"the budget is spent, {ledger.sentence()}, with {observer.progress} trials ended"
        raise BudgetSpent(f"{problem}: raise it to continue")
    if observer.is_stopping and not observer.is_over_budget:
        raise Interrupted(f"stopped with {observer.progress} trials ended")


@dataclass(frozen=True)
class StopFile:
    """The file in the sweep's folder that asks running trials to save and stop.

    Args:
        path: The file.
        observer: Knows which trials run, and is told that they are to end.
        ledger: Counts what they take.
        console: Where a person sees that they are asked.
    """

    path: Path
    observer: Observer
    ledger: Ledger
    console: Console

    def remove(self) -> None:
        """Removes what an earlier start has left."""
        self.path.unlink(missing_ok=True)

    def for_person(self) -> None:
        """Asks the trials because a person stops the sweep; they may take any time to save."""
        if self.observer.is_over_budget:
            return
        advice = "running trials save a checkpoint first (once more to stop at once)"
        self.console.say(f"stopping: {advice}")
        self._write("")

    def within_budget(self) -> None:
        """Asks the trials because the budget is nearly spent, of which the file has the rest."""
        self.observer.is_over_budget = True
        sentence = self.ledger.sentence()
        self.console.say(f"the budget is nearly spent, {sentence}: running trials save")
        seconds = self.ledger.seconds_to_save(self.observer.rate())
        self._write(f"{seconds:.3f}")

    def _write(self, text: str) -> None:
        if self.observer.ending is None:
            self.observer.ending = set(self.observer.running)
        # Written under another name, so that a trial sees all of it or nothing.
        new_path = self.path.with_suffix(".new")
        new_path.write_text(text)
        new_path.replace(self.path)


def _make_tuner(
    sweep: Sweep,
    store: TrialStore,
    observer: Observer,
    *,
    tuning: Tuning,
    trainable: type[tune.Trainable],
) -> tune.Tuner:
    """Tune's Tuner, whose trials are Trireme runs."""
    experiment = sweep.experiment
    tracking = resolve_tracking(experiment.tracking, str(store.folder.parent))
    context = TrialContext(
        sweep=sweep,
        folder=store.folder,
        tracking=replace(tracking, uri=mask_uri(tracking.uri)),
        uses_gpus=tuning.uses_gpus,
        cwd=os.getcwd(),
        command=tuple(sys.argv),
    )

    def placement_group(values: dict[str, Any]) -> tune.PlacementGroupFactory:
        config = sweep.config(values, name="trial", storage="runs")
        return tune.PlacementGroupFactory(trial_bundles(config, uses_gpus=tuning.uses_gpus))

    with_context = tune.with_parameters(trainable, context=context)
    # A trial whose process died starts once more, unless the experiment allows no restart.
    max_failures = min(1, experiment.fault.max_restarts)
    return tune.Tuner(
        tune.with_resources(with_context, placement_group),
        param_space={key: domain.for_tune() for key, domain in sweep.space.items()},
        tune_config=tune.TuneConfig(
            search_alg=tuning.searcher,
            scheduler=tuning.scheduler,
            num_samples=sweep.count,
            reuse_actors=True,
            trial_name_creator=observer.name,
            trial_dirname_creator=str,
        ),
        run_config=tune.RunConfig(
            name=TUNE_FOLDER,
            storage_path=str(store.folder),
            verbose=0,
            stop=observer,
            callbacks=[observer],
            failure_config=tune.FailureConfig(max_failures=max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


class Observer(tune.Callback, tune.Stopper):
    """Names Tune's trials, keeps their reports, and ends trials and the whole sweep.

    As Tune's callback it stores what trials report. As its stopper it ends a trial at the target,
    and the sweep when a person has stopped it or no trial reports what the sweep compares.

    Args:
        sweep: The sweep.
        store: Keeps what trials report.
        console: Writes to the terminal.
        tuning: What Tune is given.

    Attributes:
        running: Tune's ids of the running trials, and how many workers each has.
        starting: The workers of each of the first trials, which have resources and no process yet.
        slots_to_start: How many trials at once Tune has resources for and has not started yet;
            later ones are given the process of an earlier one.
        ending: Those that ran when a person stopped the sweep, and still save; None until then.
        is_over_budget: Whether running trials save because the budget is nearly spent.
        problem: Why the whole sweep ends.
    """

    def __init__(
        self,
        sweep: Sweep,
        store: TrialStore,
        console: Console,
        *,
        tuning: Tuning,
    ) -> None:
        self.sweep = sweep
        self.store = store
        self.console = console
        self.started = time.monotonic()
        self.earlier_trials = tuning.earlier_trials
        self.dollars_per_hour = tuning.dollars_per_hour
        self.other_names = store.trials.keys() - {trial.name for trial in self.earlier_trials}
        self.named = 0
        self.running: dict[str, int] = {}
        self.starting: list[int] = []
        self.slots_to_start = min(tuning.room, sweep.concurrent or tuning.room)
        self.ending: set[str] | None = None
        self.is_over_budget = False
        self.problem: UserError | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy for Tuner.restore, which is not used: the store remembers

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return self  # Tune copies its callbacks, and all must be this one

    @property
    def progress(self) -> str:
        """How many of the trials have ended."""
        ended = [trial for trial in self.store.ended if trial.name not in self.other_names]
        return f"{len(ended)} of {self.sweep.count}"

    @property
    def is_stopping(self) -> bool:
        """Whether the sweep was stopped, by a person or for its budget."""
        return self.ending is not None

    @property
    def has_trials_left(self) -> bool:
        ended = [trial for trial in self.store.ended if trial.name not in self.other_names]
        return len(ended) < self.sweep.count

    def rate(self) -> float:
        """Dollars per hour of the trials that run or start; 0 if a price is not known."""
        trials = [*list(self.running.values()), *self.starting]  # another thread asks
        return sum(self.dollars_per_hour.get(workers, 0.0) for workers in trials)

    # --- what Tune asks ---------------------------------------------------------------------------

    def name(self, trial: TuneTrial) -> str:
        """The name of a new trial; Tune calls this once for each, in order."""
        number = self.named
        self.named += 1
        if number < len(self.earlier_trials):  # Tune is given their points first
            return self.earlier_trials[number].name
        index = number
        if self.earlier_trials:
            new_trials = number - len(self.earlier_trials)
            index = self.earlier_trials[-1].index + 1 + new_trials
        return trial_name(index, trial.config)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether a trial ends with this result (`tune.Stopper`)."""
        return self.sweep.is_reached(result["report"])

    def stop_all(self) -> bool:
        """Whether the whole sweep ends (`tune.Stopper`)."""
        if self.problem is not None:
            return True
        return self.ending is not None and not self.ending & self.running.keys()

    # --- what Tune reports (`tune.Callback`) ------------------------------------------------------

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        if not self.slots_to_start and not self.starting:
            return
        waiting = (trial for trial in trials if trial.status == TuneTrial.PENDING)
        first = itertools.islice(waiting, self.slots_to_start)
        self.starting = [self.sweep.workers_of(trial.config) for trial in first]

    def on_trial_start(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        **info: Any,
    ) -> None:
        self.running[trial.trial_id] = self.sweep.workers_of(trial.config)
        self.slots_to_start = max(0, self.slots_to_start - 1)
        self.starting = self.starting[: self.slots_to_start]
        name = str(trial)
        if name not in self.store.trials:
            index = int(name[1:].split("-")[0])
            self.store.save(Trial(index, name, dict(trial.config)))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        record = self.store.trials[str(trial)]
        report = result["report"]
        if record.ended or not report:
            return
        if report["step"] <= record.last.get("step", 0):
            return  # a repeated report of an earlier start
        self.store.add_report(record, report)

    def on_trial_complete(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        **info: Any,
    ) -> None:
        self.running.pop(trial.trial_id, None)
        record = self.store.trials[str(trial)]
        result = trial.last_result or {}
        status = result.get("status", "")
        message = result.get("message", "")
        if status == "wrong metric":
            self.problem = UserError(message)
            return
        if record.ended or status == "stopped":
            return
        if status:
            self._end(record, status, message)
        elif not self.is_stopping:
            self._end(record, *self._stopped(record))

    def on_trial_error(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        **info: Any,
    ) -> None:
        """The trial's process has died, and again when it was started once more."""
        record = self.store.trials[str(trial)]
        self.running.pop(trial.trial_id, None)
        if not record.ended and not self.is_stopping:
            log = "logs/sweep.log of the sweep's folder has its last output"
            self._end(record, "failed", f"its process died: {log}")

    def _stopped(self, record: Trial) -> tuple[str, str]:
        """Status and message of a trial that Tune has stopped."""
        last = record.last
        if self.sweep.is_reached(last):
            return "reached", ""
        if last["step"] >= last["steps"]:
            return "finished", ""
        return "pruned", f"{self.sweep.stop_reason} after step {last['step']:,}"

    def _end(self, record: Trial, status: str, message: str) -> None:
        """Stores how a trial has ended, and says so."""
        record.status = status
        record.message = message
        self.store.save(record)
        value = record.last.get("metrics", {}).get(self.sweep.metric)
        shown = f"{self.sweep.metric} {value:.4g}" if value is not None else "no report"
        ending = "" if status == "finished" else f" ({message or status})"
        elapsed = duration(time.monotonic() - self.started)
        self.console.say(f"{self.progress}  {record.name}: {shown}{ending}  {elapsed}")


class TrialActor(tune.Trainable):
    """A process of Tune, which runs one trial after another.

    https://docs.ray.io/en/latest/tune/api/trainable.html
    """

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:
        assert context is not None
        self.context = context
        sys.argv = list(context.command)
        work_in(context.cwd)
        self._begin_trial(config)

    def _begin_trial(self, values: dict[str, Any]) -> None:
        record = load_trial(self.context.folder / self.trial_name)
        self.current = TrialRun(self.context, self.trial_name, values=values, record=record)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begins the next trial."""
        self.cleanup()
        self._begin_trial(new_config)
        return True

    def step(self) -> TuneResult:
        """Waits for the trial's next report."""
        return self.current.next_result()

    def cleanup(self) -> None:
        """Ends the trial, which Tune may have stopped."""
        sweep = self.context.sweep
        reason = sweep.stop_reason
        if sweep.is_reached(self.current.last_taken):
            reason = REACHED
        self.current.stop(reason)
