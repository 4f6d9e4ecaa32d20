"""Between a sweep and Ray Tune: what it is given, what it keeps and what it reports. Imported once Ray is connected."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from typing import Any

from ray import tune

from app.console.masking import mask_uri
from app.console.terminal import Console, duration
from app.errors import Interrupted, RunFailed, UserError
from app.launchers.ray_workers import work_in
from app.run.cost import check_budget, rate_here
from app.run.stopping import stop_signals
from app.tracking.settings import resolve_tracking
from cluster.connect import Cluster
from cluster.pending import check_feasible
from experiments.sweep.search import scheduler_of, searcher_of
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import REACHED, STOP_FILE, Result, Setting, TrialRun, resources
from experiments.sweep.trials import Trial, TrialStore, load_trial, trial_name

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the trials' folders and MLflow have what they would write
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "16",  # by default 200 placement groups wait, also for what others use
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the folder that the sweep was started in, in every trial
}
"""Settings of Tune (docs.ray.io, tune/api/env.html)."""


def prepare(found: Sweep, store: TrialStore, cluster: Cluster, longest: int) -> tuple[Any, Any, bool]:
    """Searcher, scheduler, and whether trials use GPUs. longest: as `Sweep.longest`.

    Raises:
        UserError, ClusterError: they cannot be had, or trials do not fit on the cluster.
    """
    os.environ.update(ENVIRONMENT)
    experiment = found.experiment
    every = max(1, longest // found.reports) if found.reports else experiment.train.eval_every or longest
    known = [trial.values for trial in store.trials.values()]  # first those of earlier starts, in their order
    searcher = searcher_of(found, known + [values for values in found.points or () if values not in known])
    gpus, shape = cluster.gpus > 0, cluster.shape
    for config in found.configs:
        each = resources(config, gpus)[-1]
        check_feasible(shape, int(config.workers), each)
    check_budget(experiment.budget, rate_here(experiment, int(config.workers), each))
    return searcher, scheduler_of(found, longest, every), gpus


def run_trials(found: Sweep, store: TrialStore, console: Console, searcher: Any, scheduler: Any, gpus: bool) -> None:
    """Runs trials to their ends.

    Raises:
        UserError: no trial reports what the sweep compares.
        Interrupted: a person stopped it, and running trials have saved.
    """
    folder, done = store.folder, len(store.ended)
    console.say(f"sweeping {found.name}: {found.count} trials{f', of which {done} have ended' if done else ''}")
    observer = Observer(found, store, console)
    settings = resolve_tracking(found.experiment.tracking, str(folder.parent))
    shown = replace(settings, uri=mask_uri(settings.uri))
    setting = Setting(found, folder, shown, gpus, os.getcwd(), tuple(sys.argv))

    def bundles(values: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(resources(found.config(values, "trial", "runs"), gpus))

    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(TrialActor, setting=setting), bundles),
        param_space={key: domain.for_tune() for key, domain in found.space.items()},
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=found.count,
            reuse_actors=True,
            trial_name_creator=observer.name,
            trial_dirname_creator=str,
        ),
        run_config=tune.RunConfig(
            name=".tune",
            storage_path=str(folder),
            verbose=0,
            stop=observer,
            callbacks=[observer],
            failure_config=tune.FailureConfig(max_failures=min(1, found.experiment.fault.max_restarts)),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )

    def ask() -> None:
        observer.ending = set(observer.running)
        console.say("stopping: running trials save a checkpoint first (once more to stop at once)")
        (folder / STOP_FILE).touch()  # trials look for it

    (folder / STOP_FILE).unlink(missing_ok=True)
    with stop_signals(ask):
        try:
            tuner.fit()
        except tune.TuneError as error:
            if observer.problem is None and not observer.stopping:
                raise RunFailed(f"Ray Tune gave up: {str(error).strip().splitlines()[-1]}") from error
    shutil.rmtree(folder / ".tune", ignore_errors=True)  # trial.json and each run's folder are what is kept
    if observer.problem is not None:
        raise observer.problem
    if observer.stopping:
        raise Interrupted(f"stopped with {len(store.ended)} of {found.count} trials ended")


class Observer(tune.Callback, tune.Stopper):
    """Tune's callback, which keeps what trials report; its stopper, once a person has stopped the sweep or no trial
    reports what it compares; and the trials' names."""

    def __init__(self, sweep: Sweep, store: TrialStore, console: Console) -> None:
        self.sweep, self.store, self.console = sweep, store, console
        self.began = time.monotonic()
        self.known = list(store.trials.values())  # of earlier starts, which Tune is given first
        self.named = 0
        self.running: set[str] = set()  # Tune's ids
        self.ending: set[str] | None = None  # those that ran when a person stopped the sweep, and still save
        self.problem: UserError | None = None  # why the whole sweep ends

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy for Tuner.restore, which nothing here uses: the store remembers

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return self  # wherever Tune asks, it asks this one

    # --- what Tune asks -------------------------------------------------------------------------------------------

    def name(self, trial: Any) -> str:
        """A new trial's name; called once for each, in order."""
        self.named += 1
        if self.named <= len(self.known):
            return self.known[self.named - 1].name
        index = self.named - 1 + (self.known[-1].index + 1 - len(self.known) if self.known else 0)
        return trial_name(index, trial.config)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.sweep.ends_at(result["report"])

    def stop_all(self) -> bool:
        return self.problem is not None or (self.ending is not None and not self.ending & self.running)

    @property
    def stopping(self) -> bool:
        return self.ending is not None

    # --- what Tune tells ------------------------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.add(trial.trial_id)
        if str(trial) not in self.store.trials:
            self.store.save(Trial(int(str(trial)[1:].split("-")[0]), str(trial), dict(trial.config)))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        record, report = self.store.trials[str(trial)], result["report"]
        if record.ended or not report or report["step"] <= record.last.get("step", 0):
            return  # what an earlier start has reported
        record.reports.append(report)
        self.store.save(record)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        record, result = self.store.trials[str(trial)], trial.last_result or {}
        self.running.discard(trial.trial_id)
        status, message = result.get("status", ""), result.get("message", "")
        if status == "wrong metric":
            self.problem = UserError(message)
        elif not record.ended and status != "stopped" and not (self.stopping and not status):
            self._end(record, *(status, message) if status else self._stopped(record))

    def _stopped(self, record: Trial) -> tuple[str, str]:
        """How a trial ended that the scheduler stopped."""
        last = record.last
        if self.sweep.ends_at(last):
            return "reached", ""
        if last["step"] >= last["steps"]:
            return "finished", ""
        return "pruned", f"stopped early by {self.sweep.scheduler} after step {last['step']:,}"

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """The trial's process died, and again when it was started once more."""
        record = self.store.trials[str(trial)]
        self.running.discard(trial.trial_id)
        if not record.ended and not self.stopping:
            self._end(record, "failed", "its process died: logs/sweep.log of the sweep's folder has its last output")

    def _end(self, record: Trial, status: str, message: str) -> None:
        record.status, record.message = status, message
        self.store.save(record)
        value = record.last.get("metrics", {}).get(self.sweep.metric)
        shown = f"{self.sweep.metric} {value:.4g}" if value is not None else "no report"
        how = "" if status == "finished" else f" ({message or status})"
        counted = f"{len(self.store.ended)}/{self.sweep.count}"
        self.console.say(f"{counted}  {record.name}: {shown}{how}  {duration(time.monotonic() - self.began)}")


class TrialActor(tune.Trainable):
    """What Tune keeps: it is given one trial after another."""

    def setup(self, config: dict[str, Any], setting: Setting | None = None) -> None:
        assert setting is not None
        self.setting = setting
        sys.argv = list(setting.command)
        work_in(setting.cwd)
        self._take(config)

    def _take(self, values: dict[str, Any]) -> None:
        known = load_trial(self.setting.folder / self.trial_name)
        self.current = TrialRun(self.setting, self.trial_name, values, known)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial."""
        self.cleanup()
        self._take(new_config)
        return True

    def step(self) -> Result:
        return self.current.next()

    def cleanup(self) -> None:
        sweep = self.setting.sweep
        self.current.stop(REACHED if sweep.ends_at(self.current.judged) else f"stopped early by {sweep.scheduler}")
