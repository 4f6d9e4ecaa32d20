"""One trial: a whole Trireme run, in the process in which Ray Tune keeps it.

With one worker that process is the worker. With more it drives actors in the trial's own placement
group, which Tune has made for the whole trial at once. Training runs in a thread; `TrialActor.step`
waits for its next report.
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
from app.errors import EXIT_STOPPED, Interrupted, NonFiniteError, RunFailed, UserError
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
from cluster.connect import describe_own
from experiments.sweep.paired import PIECES
from experiments.sweep.search import PAIRED, Values
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import Report, Trial

Resources = dict[str, float]
TuneResult = dict[str, Any]
"""What Tune is given for a report.

It has the metric, "report" (a `Report`), and of this "step", "samples", "steps" and "losses", since
schedulers receive it flattened. That of a trial's end also has
"done", "status" and "message".
"""
REACHED = "target reached"
"""Why a trial is stopped that has reached the target: its run counts as finished."""
STOP_FILE = "stop"
"""In the sweep's folder: running trials are to save and stop. It may have the seconds for it."""
LOOK_SECONDS = 0.5
"""How often a trial looks how long it may still take."""
SWEEP_STOPPED = "the sweep was stopped"
LEASE_SECONDS = 90.0
"""How long an earlier start of the trial may take to end.

Ray takes a while to end the processes of a killed sweep.
"""
TRAIN_LOSS = "train/loss"
WORST = 1e30
"""Stands for a value that is not finite, since schedulers compare numbers."""


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """What all trials of a sweep share.

    Attributes:
        sweep: The sweep.
        folder: The sweep's folder.
        tracking: Where to track; the URI is without a password, since only the sweep's own writer
            connects to MLflow.
        uses_gpus: Whether trials use GPUs.
        cwd: The folder in which the sweep was started.
        command: The sweep's command line, which a trial's MLflow run shows as its own.
    """

    sweep: Sweep
    folder: Path
    tracking: Settings
    uses_gpus: bool
    cwd: str
    command: tuple[str, ...]


class WrongMetric(UserError):
    """Trials do not report the metric that the sweep compares."""


def trial_bundles(config: Config, *, uses_gpus: bool) -> list[Resources]:
    """The bundles of a trial's placement group.

    Args:
        config: The trial's configuration.
        uses_gpus: Whether a worker takes a GPU by default.

    Returns:
        One for the process of a trial with one worker. Otherwise an empty one for the driver, and
        one for each worker.
    """
    per_worker: Resources = dict(config.resources_per_worker)
    if not per_worker:
        per_worker = {"GPU": 1.0} if uses_gpus else {"CPU": 1.0}
    # Any bundle may become that of any stage, so each has the most that a stage needs.
    for stage in config.parallel.stage_resources or ():
        for name, amount in stage.items():
            per_worker[name] = max(amount, per_worker.get(name, 0.0))
    if _trains_in_process(config):
        return [per_worker]
    return [{}, *[per_worker] * int(config.workers)]


def _trains_in_process(config: Config) -> bool:
    """Whether Tune's process is the worker itself."""
    return config.launcher == "local" or int(config.workers) == 1


class TrialTracker(Tracker):
    """Marks a run that reached the target as finished, and says why others were stopped.

    Attributes:
        stop_reason: Why the trial was stopped; "" if it was not.
    """

    stop_reason = ""

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        if self.stop_reason and status == "KILLED":
            message = f"{self.stop_reason}: {message}"
            if self.stop_reason == REACHED:
                status = "FINISHED"
        return super().finish(status, message=message, timeout=timeout)


class LogConsole(Console):
    """Writes what a trial's driver says into the run's log.

    Args:
        log: The log.
    """

    def __init__(self, log: Path) -> None:
        super().__init__()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out = self._err = log.open("a", buffering=1)


class TrialDriver(Driver):
    """The driver of a trial's run: its evaluations are the trial's reports.

    The sweep's writer delivers what it tracks.
    """

    def __init__(self, run: Run, config: Config, trial: TrialRun, *, meter: Meter | None) -> None:
        self.trial = trial
        self.loop_started = 0.0
        self.latest: dict[str, float] = {}
        context = trial.context
        self.trial_tracker = TrialTracker(
            run.spool,
            context.tracking,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=config.tracking.enabled,
            tags={**config.tracking.tags, "trireme.sweep": context.sweep.name},
            parent=context.folder / "tracking",
            warn=self.note,
        )
        super().__init__(
            run,
            config,
            trial.console,
            context.tracking,
            meter=meter,
            tracker=self.trial_tracker,
        )

    def stop_requested(self) -> bool:
        trial = self.trial
        if not trial.stop_reason and trial.is_sweep_stopped():
            trial.stop_reason = SWEEP_STOPPED
        if trial.stop_reason:
            self.trial_tracker.stop_reason = trial.stop_reason
            self.stopping = True
        return super().stop_requested()

    def signals(self) -> contextlib.AbstractContextManager[None]:
        # Signals are the sweep's business: this is not the main thread.
        return contextlib.nullcontext()

    def training_started(self, event: TrainingStarted) -> None:
        super().training_started(event)
        self.loop_started = event.time

    def metrics_logged(self, event: MetricsLogged) -> None:
        super().metrics_logged(event)
        values = event.values
        self.latest |= values
        if TRAIN_LOSS in values:
            self.trial.add_loss(event.step, values[TRAIN_LOSS])
        is_evaluation = any(name.startswith("eval/") for name in values)
        if is_evaluation or self.trial.sweep.metric in values:
            # A checkpoint brings events of earlier starts, whose seconds are counted already.
            is_of_this_start = 0.0 < self.loop_started <= event.time
            seconds = event.training_seconds if is_of_this_start else 0.0
            self.trial.report(event.step, seconds, self.latest)


class TrialRun:
    """One start of one trial.

    The reports of earlier starts are repeated first, so that Tune's scheduler and searcher learn
    again what they had learnt; of a trial that has ended nothing else follows.

    Args:
        context: What all trials of the sweep share.
        name: The trial's name.
        values: Its point of the search space.
        record: What the sweep remembers of it; None at its first start.

    Attributes:
        last: The last report.
        last_taken: The last report that Tune has, by which it stops a trial; training may be
            further.
        steps: The steps of the whole trial.
        stop_reason: Why the trial is to stop; "" until then.
    """

    def __init__(
        self,
        context: TrialContext,
        name: str,
        *,
        values: Values,
        record: Trial | None,
    ) -> None:
        self.context = context
        self.sweep = context.sweep
        self.name = name
        self.folder = context.folder / name
        self.config = self.sweep.config(values, name=name, storage=str(context.folder))
        self.last: Report = record.last if record else {}
        self.last_taken = self.last
        self.seconds_before: float = self.last.get("seconds", 0.0)
        self.repeated: deque[TuneResult] = deque()
        if record:
            self.repeated.extend(self._result(report) for report in record.reports)
            if record.ended:
                self.repeated.append(self._final_result(record.status, record.message))
        self.results: queue.Queue[TuneResult] = queue.Queue()
        self.console = LogConsole(self.folder / "logs" / "driver.log")
        self.steps = 0
        self.losses: dict[int, float] = {}
        self.stop_reason = ""
        self.thread: threading.Thread | None = None
        self.has_ended = threading.Event()

    def is_sweep_stopped(self) -> bool:
        """Whether the sweep was stopped, by a person or for its budget."""
        return (self.context.folder / STOP_FILE).exists()

    def seconds_to_save(self) -> float | None:
        """How long a stopped sweep lets its trials save; None without a limit."""
        try:
            text = (self.context.folder / STOP_FILE).read_text()
        except FileNotFoundError:
            return None
        return float(text) if text else None

    def _end_in_time(self) -> None:
        """Ends this process if the trial has not ended when the time to save is over.

        The sweep ends it too, but its process may be late, and with a cluster is on another node.
        """
        while not self.has_ended.wait(LOOK_SECONDS):
            seconds = self.seconds_to_save()
            if seconds is None:
                continue
            if not self.has_ended.wait(seconds):
                message = f"not saved within {seconds:.3g} s, and the sweep's budget ends"
                abort(EXIT_STOPPED, message, say=self.console.say)
            return

    def next_result(self) -> TuneResult:
        """Waits for the next result; starts the training when it is needed."""
        if self.repeated:
            return self.repeated.popleft()
        if self.thread is None:
            if self.is_sweep_stopped():
                return self._final_result("stopped", SWEEP_STOPPED)
            self.thread = threading.Thread(target=self._run, daemon=True, name=self.name)
            self.thread.start()
            threading.Thread(target=self._end_in_time, daemon=True, name="deadline").start()
        result = self.results.get()
        self.last_taken = result["report"]
        return result

    def stop(self, reason: str) -> None:
        """Saves and stops; returns when the workers are gone.

        Args:
            reason: Why.
        """
        self.stop_reason = self.stop_reason or reason
        if self.thread is not None:
            self.thread.join()

    def add_loss(self, step: int, loss: float) -> None:
        """Keeps a training loss for the next report, if trials are compared by them.

        Args:
            step: The optimizer step; of a fork, with those of the run that it continues.
            loss: The loss.
        """
        if self.sweep.scheduler == PAIRED:
            self.losses[step - self.sweep.origin_step] = loss

    def report(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """Reports an evaluation.

        Args:
            step: The optimizer steps so far; of a fork, with those of the run that it continues.
            seconds: The seconds of training of this start.
            metrics: The newest value of each metric.

        Raises:
            WrongMetric: The metric that the sweep compares is not among them.
        """
        step -= self.sweep.origin_step
        if step <= self.last.get("step", 0):
            return  # a checkpoint brings evaluations that were made before it
        metric = self.sweep.metric
        if metric not in metrics:
            problem = f"metric is {metric!r}, which trials do not report"
            raise WrongMetric(f"{problem}; they report {', '.join(metrics)}")
        self.last = {
            "step": step,
            "samples": self.sweep.samples_of(self.config, step),
            "seconds": self.seconds_before + seconds,
            "metrics": dict(metrics),
            "steps": self.steps,
            "workers": int(self.config.workers),
        }
        if self.losses:
            self.last["losses"] = sorted(self.losses.items())
            self.losses = {}
        self.results.put(self._result(self.last))

    def _result(self, report: Report) -> TuneResult:
        """What Tune is given for a report."""
        metric = self.sweep.metric
        value = report.get("metrics", {}).get(metric, math.nan)
        if not math.isfinite(value):
            value = self.sweep.sign * WORST
        return {
            metric: value,
            "step": report.get("step", 0),
            "samples": report.get("samples", 0),
            "steps": report.get("steps", 0),
            "losses": report.get("losses", []),
            "report": report,
        }

    def _final_result(self, status: str, message: str) -> TuneResult:
        """What Tune is given at the trial's end."""
        return {**self._result(self.last), "done": True, "status": status, "message": message}

    def _run(self) -> None:
        """Trains, and reports how that ended."""
        status = "finished"
        message = ""
        try:
            self._train()
        except Interrupted as error:
            status = "stopped"
            message = self.stop_reason or str(error)
        except Exception as error:
            status = _status_of(error)
            message = _message_of(error)
            self.console.say(traceback.format_exc())
            if _trains_in_process(self.config) and device_failure(error):
                # Tune would give this process the next trial. When it ends, Tune starts this trial
                # again in another process, once.
                problem = "the device of this process can compute no more"
                abort(1, f"{problem}: ending it", say=self.console.say)
        self.has_ended.set()
        self.results.put(self._final_result(status, message))

    def _train(self) -> None:
        workers = int(self.config.workers)
        task = read_task(self.config)
        all_steps = self.config.train.steps_for(length(task.train_data()))
        self.steps = all_steps - self.sweep.origin_step
        config = self.config
        if self.sweep.reports:
            every = max(1, math.ceil(self.steps / self.sweep.reports))
            config = with_values(config, {"train.eval_every": every})
        if self.sweep.scheduler == PAIRED:
            looks = math.ceil(self.steps / (config.train.eval_every or self.steps))
            log_every = max(1, self.steps // (looks * PIECES))
            config = with_values(config, {"train.log_every": log_every})
        prepared = prepare(config, task, workers, devices_per_node=None)
        config = prepared.config
        run = Run(config)
        _wait_for_lease(run)
        per_worker = trial_bundles(config, uses_gpus=self.context.uses_gpus)[-1]
        meter = None
        if ray.is_initialized():
            meter = meter_for(config, run.storage, workers, per_worker)
        driver = TrialDriver(run, config, self, meter=meter)
        with _make_workers(config, per_worker) as trial_workers:
            supervisor = Supervisor(trial_workers, driver, nodes=ray_nodes())
            outcome = train_run(driver, prepared, "Ray Tune", supervisor.run)
        if outcome.status == "already_finished":
            # The sweep was killed after the run had finished, and before it was reported.
            summary = outcome.summary
            self.seconds_before = 0.0
            self.report(summary["step"], summary["seconds"], summary["metrics"])
        if not self.last:
            problem = f"metric is {self.sweep.metric!r}, but trials report nothing"
            raise WrongMetric(f"{problem}: the task evaluates nothing")


def _status_of(error: Exception) -> str:
    """How a trial has ended that raised an error."""
    match error:
        case WrongMetric():
            return "wrong metric"
        case NonFiniteError():
            return "diverged"
        case _:
            return "failed"


def _message_of(error: Exception) -> str:
    """The first line of an error's message, with the error's type unless it is one of ours."""
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else ""
    if isinstance(error, (*USER_ERRORS, RunFailed)):
        return first_line
    return f"{type(error).__name__}: {first_line}"


@contextlib.contextmanager
def _make_workers(
    config: Config,
    per_worker: Resources,
) -> Iterator[LocalWorkers | ActorWorkers]:
    """The trial's workers: this process, or actors in the trial's placement group."""
    if _trains_in_process(config):
        yield LocalWorkers()
        return
    workers = ActorWorkers(per_worker, describe_own(), ray.util.get_current_placement_group())
    try:
        yield workers
    finally:
        workers.close()


def _wait_for_lease(run: Run) -> None:
    """Waits until an earlier start of this trial has ended.

    Raises:
        UserError: It still runs.
    """
    deadline = time.monotonic() + LEASE_SECONDS
    while read_lease(run.storage) is not None:
        try:
            run.lease.refuse_if_held()
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
