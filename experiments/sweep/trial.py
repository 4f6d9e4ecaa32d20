"""One trial: a whole Trireme run, in the process in which Ray Tune keeps it.

With one worker that process is the worker. With more it drives actors in the trial's own placement group, which Tune
has made for all of it at once. Training goes on in a thread; `step` waits for its next report.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from app.config import Config
from app.config.io import with_values
from app.console.terminal import Console
from app.data.loader import length
from app.errors import Interrupted, NonFiniteError, RunFailed, UserError
from app.launchers.actors import ActorWorkers
from app.launchers.local import LocalWorkers
from app.launchers.recovery import device_failure
from app.launchers.room import ray_nodes
from app.launchers.supervisor import Supervisor
from app.run.abort import abort
from app.run.cost import Meter, meter_for
from app.run.driver import Driver
from app.run.endings import USER_ERRORS
from app.run.lifecycle import train_run
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from app.storage.lease import read_lease
from app.tracking.settings import Settings
from app.tracking.tracker import Delivery, Tracker
from app.training.events import MetricsLogged, TrainingStarted
from cluster.connect import describe
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import Trial

Resources = dict[str, float]
Result = dict[str, Any]
"""What Tune is given: the metric, "step", "samples", "report" (of a `Trial`); the last one also "done", "status" and
"message"."""
REACHED = "target reached"
"""Why a trial is stopped that has done what it was for: its run counts as finished."""
STOP_FILE = "stop"
"""In the sweep's folder: running trials are to save and stop."""
LEASE_SECONDS = 90.0
"""For an earlier start of the same trial to end: Ray takes a moment to end the processes of a killed sweep."""
WORST = 1e30
"""Stands for a value that is not finite: schedulers compare numbers."""


@dataclass(frozen=True)
class Setting:
    """What all trials of a sweep share."""

    sweep: Sweep
    folder: Path  # the sweep's
    settings: Settings  # of tracking; its URI without a password, since only the sweep's own writer speaks with MLflow
    gpus: bool
    cwd: str
    command: tuple[str, ...]  # the sweep's, which a trial's MLflow run names as its own


class WrongMetric(UserError):
    """Trials do not report the metric that the sweep compares."""


def resources(config: Config, gpus: bool) -> list[Resources]:
    """A trial's bundles: of one worker its process's; else nothing for the driver, and one for each worker."""
    each = dict(config.resources_per_worker) or ({"GPU": 1.0} if gpus else {"CPU": 1.0})
    for stage in config.parallel.stage_resources or ():  # any bundle may be any stage's
        each |= {name: max(amount, each.get(name, 0.0)) for name, amount in stage.items()}
    return [each] if _in_process(config) else [{}, *[each] * int(config.workers)]


def _in_process(config: Config) -> bool:
    return config.launcher == "local" or int(config.workers) == 1


class TrialTracker(Tracker):
    """Ends a run whose target is reached as finished, and says why others were stopped."""

    why = ""

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        if self.why and status == "KILLED":
            status, message = "FINISHED" if self.why == REACHED else status, f"{self.why}: {message}"
        return super().finish(status, message=message, timeout=timeout)


class LogConsole(Console):
    """What a trial's driver says goes to its run's log."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out = self._err = log.open("a", buffering=1)


class TrialDriver(Driver):
    """The driver of a run whose evaluations are a trial's reports; the sweep's writer delivers what it tracks."""

    def __init__(self, run: Run, config: Config, trial: TrialRun, *, meter: Meter | None) -> None:
        self.trial = trial
        self.loop_began = 0.0
        self.latest: dict[str, float] = {}
        self.trial_tracker = TrialTracker(
            run.local_folder / "tracking",
            trial.setting.settings,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=config.tracking.enabled,
            tags={**config.tracking.tags, "trireme.sweep": trial.sweep.name},
            parent=trial.setting.folder / "tracking",
            warn=self.note,
        )
        super().__init__(
            run,
            config,
            trial.console,
            trial.setting.settings,
            meter=meter,
            tracker=self.trial_tracker,
        )

    def stop_requested(self) -> bool:
        if not self.trial.stopping and (self.trial.setting.folder / STOP_FILE).exists():
            self.trial.stopping = "the sweep was stopped"
        if self.trial.stopping:
            self.trial_tracker.why = self.trial.stopping
            self.stopping = True
        return super().stop_requested()

    def signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # they are the sweep's: this is not the main thread

    def training_started(self, event: TrainingStarted) -> None:
        super().training_started(event)
        self.loop_began = event.time

    def metrics_logged(self, event: MetricsLogged) -> None:
        super().metrics_logged(event)
        values = event.values
        self.latest |= values
        if self.trial.sweep.metric in values or any(name.startswith("eval/") for name in values):
            # A checkpoint brings events of the start before, whose seconds are counted already.
            is_of_this_start = 0.0 < self.loop_began <= event.time
            seconds = event.training_seconds if is_of_this_start else 0.0
            self.trial.report(event.step, seconds, self.latest)


class TrialRun:
    """One start of one trial.

    known: what the sweep remembers of it. Its reports are repeated first, so that Tune's scheduler and searcher know
    what they knew; of a trial that has ended, that is all.
    """

    def __init__(self, setting: Setting, name: str, values: dict[str, Any], known: Trial | None) -> None:
        self.setting, self.sweep, self.name, self.folder = setting, setting.sweep, name, setting.folder / name
        self.config = setting.sweep.config(values, name, str(setting.folder))
        self.last: dict[str, Any] = known.last if known else {}  # report
        self.seconds_before: float = self.last.get("seconds", 0.0)
        self.repeated: deque[Result] = deque(self._result(report) for report in known.reports) if known else deque()
        if known and known.ended:
            self.repeated.append(self._end(known.status, known.message))
        self.results: queue.Queue[Result] = queue.Queue()
        self.console = LogConsole(self.folder / "logs" / "driver.log")
        self.steps = 0
        self.stopping = ""  # why, once something has asked for it
        self.judged = self.last  # the last one that Tune has, by which it stops a trial; training continues meanwhile
        self.thread: threading.Thread | None = None

    def next(self) -> Result:
        """The next result; training begins when it is needed."""
        if self.repeated:
            return self.repeated.popleft()
        if self.thread is None:
            if (self.setting.folder / STOP_FILE).exists():
                return self._end("stopped", "the sweep was stopped")
            self.thread = threading.Thread(target=self._run, daemon=True, name=self.name)
            self.thread.start()
        result = self.results.get()
        self.judged = result["report"]
        return result

    def stop(self, why: str) -> None:
        """Saves and stops; returns when the workers are gone."""
        self.stopping = self.stopping or why
        if self.thread is not None:
            self.thread.join()

    def report(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """An evaluation after `seconds` of training. Raises WrongMetric."""
        if step <= self.last.get("step", 0):
            return  # a checkpoint brings those that were made before it
        metric, samples = self.sweep.metric, step * self.config.train.global_batch_size
        if metric not in metrics:
            raise WrongMetric(f"metric is {metric!r}, which trials do not report; they report {', '.join(metrics)}")
        self.last = {"step": step, "samples": samples, "seconds": self.seconds_before + seconds}
        self.last |= {"metrics": dict(metrics), "steps": self.steps, "workers": int(self.config.workers)}
        self.results.put(self._result(self.last))

    def _result(self, report: dict[str, Any]) -> Result:
        value = report["metrics"].get(self.sweep.metric, math.nan) if report else math.nan
        value = value if math.isfinite(value) else self.sweep.sign * WORST
        return {self.sweep.metric: value, **{key: report.get(key, 0) for key in ("step", "samples")}, "report": report}

    def _end(self, status: str, message: str) -> Result:
        return {**self._result(self.last), "done": True, "status": status, "message": message}

    def _run(self) -> None:
        try:
            self._train()
            status, message = "finished", ""
        except Interrupted as error:
            status, message = "stopped", self.stopping or str(error)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            known = isinstance(error, (*USER_ERRORS, RunFailed))
            message = first if known else f"{type(error).__name__}: {first}"
            kinds = {WrongMetric: "wrong metric", NonFiniteError: "diverged"}
            status = next((name for kind, name in kinds.items() if isinstance(error, kind)), "failed")
            self.console.say(traceback.format_exc())
            if _in_process(self.config) and device_failure(error):
                # Tune would give it the next trial; it starts this one again in another process, once.
                why = "the device of this process can compute no more: ending it"
                abort(1, why, say=self.console.say)
        self.results.put(self._end(status, message))

    def _train(self) -> None:
        workers = int(self.config.workers)
        task = read_task(self.config)
        self.steps = self.config.train.steps_for(length(task.train_data()))
        config = self.config
        if self.sweep.reports:
            every = max(1, math.ceil(self.steps / self.sweep.reports))
            config = with_values(config, {"train.eval_every": every})
        prepared = prepare(config, task, workers, devices_per_node=None)
        config = prepared.config
        run = Run(config)
        _wait_for_lease(run)
        each = resources(config, self.setting.gpus)[-1]
        meter = meter_for(config, run.storage, workers, each) if ray.is_initialized() else None
        driver = TrialDriver(run, config, self, meter=meter)
        with _workers(config, each) as made:
            train = Supervisor(made, driver, nodes=ray_nodes()).run
            outcome = train_run(driver, prepared, "Ray Tune", train)
        if outcome.status == "already_finished":  # it was killed after that
            summary, self.seconds_before = outcome.summary, 0.0
            self.report(summary["step"], summary["seconds"], summary["metrics"])
        if not self.last:
            raise WrongMetric(f"metric is {self.sweep.metric!r}, but trials report nothing: the task evaluates nothing")


@contextlib.contextmanager
def _workers(config: Config, each: Resources) -> Iterator[Any]:
    if _in_process(config):
        yield LocalWorkers()
        return
    workers = ActorWorkers(each, describe(), ray.util.get_current_placement_group())
    try:
        yield workers
    finally:
        workers.close()


def _wait_for_lease(run: Run) -> None:
    """Raises UserError: an earlier start of this trial still runs."""
    until = time.monotonic() + LEASE_SECONDS
    while read_lease(run.storage) is not None:
        try:
            run.lease.refuse_if_held()
            return
        except UserError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)
