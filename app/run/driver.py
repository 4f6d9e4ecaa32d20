"""The driver's side of a run: shows and tracks the workers' events, and decides when to stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from app.config import Config
from app.config.io import flatten, to_dict, to_yaml
from app.console.masking import mask_tree
from app.console.terminal import Console
from app.errors import Interrupted, RunFailed
from app.run.cost import Meter
from app.run.fork import tags_of
from app.run.manifest import Run
from app.run.metrics import RunMetrics
from app.run.progress import ProgressFile
from app.run.stopping import stop_signals
from app.tracking.environment import environment_text
from app.tracking.settings import Settings
from app.tracking.system import SystemMetrics
from app.tracking.tracker import Tracker, WriterProcess
from app.training.events import (
    CheckpointSaved,
    DriverEvent,
    FilesWritten,
    MetricsLogged,
    PipelineTraced,
    ProfileTaken,
    StepPartsMeasured,
    StepsDone,
    SystemSampled,
    TrainingDone,
    TrainingStarted,
    WarningIssued,
)

if TYPE_CHECKING:
    from app.planner.estimate import Estimate


class Driver:
    """One start of a run. Others read its attributes, and change them through its methods only.

    Args:
        run: The run that it drives.
        config: The resolved configuration.
        console: Where a person sees what happens.
        settings: Where the run is tracked.
        meter: Counts what the run costs; None if prices are not known.
        restart: Executes this command anew in place of this process; None if that is not possible.
        tracker: Where metrics and artifacts go; None makes the run's own tracker.
        prediction: What the planner expects, if it has chosen the layout.
        writer: Of the run's own tracker, if it imports already.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        console: Console,
        settings: Settings,
        *,
        meter: Meter | None = None,
        restart: Callable[[], object] | None = None,
        tracker: Tracker | None = None,
        prediction: Estimate | None = None,
        writer: WriterProcess | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.prediction = prediction
        self.console = console
        self.settings = settings
        self.meter = meter
        self.restart = restart
        self.start_clock = time.monotonic()
        """Seconds of the monotonic clock when this start of the run began."""
        self.first_step_clock: float | None = None
        """The monotonic clock after the first step of this start."""
        self.last_step_clock: float | None = None
        """The monotonic clock after the newest step."""
        self.step = 0
        """The newest optimizer step."""
        self.fault_step = 0
        """The highest step at which a fault was logged."""
        self.seconds_per_step: float | None = None
        """As the newest StepsDone says."""
        self.progressed = False
        """Whether the present attempt has taken a step."""
        self.summary: dict[str, Any] = {}
        """What the workers say of the training at its end, and what is known of the whole run."""
        self.interrupted_clock: float | None = None
        """The monotonic clock when workers were lost that are not yet replaced."""
        self.resized = False
        """Whether the run has continued with another number of workers."""
        self.plan_parts: dict[str, float] = {}
        """Metrics of the plan by part, of the present layout; empty if it was not measured."""
        self.evaluated: dict[str, float] = {}
        """The newest metrics on held-out data."""
        self.progress = ProgressFile(run.storage, run.attempt)
        self.failed = ""
        """Why the run cannot continue, as another thread has found; "" if it can."""
        self.stopping = False
        """Whether the run is to save and stop."""
        self.ending = False
        """Whether no worker trains any more."""
        self.system = SystemMetrics(config.tracking.system_metrics_every)
        """Chooses what MLflow gets of the nodes' metrics."""
        self.metrics = RunMetrics(run.manifest.name)
        """Prometheus metrics for the cluster's operators."""
        self.tracker = tracker or Tracker(
            run.spool,
            settings,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=config.tracking.enabled,
            tags=config.tracking.tags,
            warn=self.note,
            writer=writer,
        )

    def note(self, text: str) -> None:
        """Prints a remark for the person."""
        self.console.say(f"note: {text}")

    # --- stopping ---------------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Whether the workers are to save and stop. The supervisor asks before every poll."""
        self.metrics.refresh()
        budget_is_spent = self._count_cost()
        if budget_is_spent and self.meter is not None and not self.stopping:
            if self.starting:
                consequence = "stopping before training begins"
            else:
                consequence = "saving a checkpoint and stopping"
            self.console.say(f"{self.meter.sentence()}: {consequence}")
            self.stopping = True
        return self.stopping

    @property
    def starting(self) -> bool:
        """Whether the present workers have taken no step yet, so that ending them loses nothing."""
        return not self.progressed or self.interrupted_clock is not None

    def check(self) -> None:
        """Checks whether the run may continue.

        Raises:
            Interrupted: The run is to stop, but the workers still start and cannot be asked.
            RunFailed: Another start has taken the run over, or Ray is gone.
        """
        if self.run.lease.successor is not None:
            raise RunFailed(self.run.lease.superseded_message())
        if self.failed:
            raise RunFailed(self.failed)
        if self.starting and self.stop_requested():
            again = "" if self.first_step_clock is None else " again"
            raise Interrupted(f"stopped before training began{again}")

    def signals(self) -> AbstractContextManager[object]:
        """In this context, Ctrl-C, SIGTERM and SIGHUP ask the run to save and stop."""
        return stop_signals(self._ask_to_stop)

    def _ask_to_stop(self) -> None:
        self.stopping = True
        if self.ending or self.summary:
            what_is_first = "delivering the last metrics and files first"
        elif self.starting:
            what_is_first = "training has not begun"
        else:
            what_is_first = "saving a checkpoint first"
        self.console.say(f"stopping: {what_is_first} (once more to stop at once)")

    def fail(self, reason: str) -> None:
        """Ends the run at the next `check`; for threads other than the supervisor's."""
        self.failed = reason

    # --- attempts ---------------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Notes that workers are about to be started, for the first time or again."""
        self.summary = {}
        self.progressed = False

    def begin_end(self) -> None:
        """Notes that no worker trains any more, and that only the end is to be written down."""
        self.ending = True

    def workers_lost(self) -> None:
        """Notes that training is interrupted until the next step."""
        if self.interrupted_clock is None:
            self.interrupted_clock = time.monotonic()
        self.console.waits_for("the workers to start again")

    def count_restarts(self, count: int, last_failure: str) -> None:
        """Shows how often the workers were started again, and why the last time."""
        self.tracker.tags({"trireme.restarts": str(count), "trireme.last_failure": last_failure})
        self.metrics.set(restarts=count)

    def count_hangs(self, count: int) -> None:
        """Shows how many workers were ended because they held up the others."""
        self.metrics.set(hang_suspicions=count)

    def lay_out_again(self, config: Config, prediction: Estimate | None) -> None:
        """Notes that the run continues with another layout, because the first took too much memory.

        Args:
            config: The configuration, resolved again.
            prediction: What the planner expects of the new layout.
        """
        self.fault("layout_too_large", 1.0)
        self._take_layout(config, prediction)

    def plan_compared(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the parts of a step as they were planned and measured."""
        self.tracker.metrics(step, metrics)
        self.plan_parts = metrics

    def move_decided(self, step: int, moves: Sequence[str]) -> None:
        """Shows the moves of the run to other layouts of its plan, each as a sentence.

        Args:
            step: The newest step.
            moves: Of all starts.
        """
        self.tracker.tags({"trireme.moves": "; ".join(moves)})
        self.tracker.metrics(step, {"plan/moves": float(len(moves))})

    def move(self, config: Config, prediction: Estimate | None) -> None:
        """Notes that the run continues with another layout of its plan.

        Args:
            config: The configuration, resolved again.
            prediction: What the planner expects of the new layout.
        """
        self.plan_parts = {}
        self._take_layout(config, prediction)

    def _take_layout(self, config: Config, prediction: Estimate | None) -> None:
        """Keeps and logs the configuration with which the run continues, and its prediction."""
        self.config = config
        self.prediction = prediction
        self.run.save_config(config)
        self._log_config()

    def resize(self, workers: int, excluded_nodes: str) -> None:
        """Notes that the run continues with another number of workers, or on other nodes.

        Args:
            workers: How many there are from now on.
            excluded_nodes: Ids of the nodes that get no workers, separated by commas.
        """
        self.fault("workers", workers)
        self.tracker.tags(
            {"trireme.workers": str(workers), "trireme.excluded_nodes": excluded_nodes}
        )
        self.resized = True
        if self.meter is not None:
            self._count_cost()  # at the rate until now
            self.meter.resize(workers)

    def fault(self, name: str, value: float) -> None:
        """Logs the metric `fault/NAME` of a fault.

        Its step is above those of earlier faults: otherwise it would be a replay, and not sent.
        """
        self.fault_step = max(self.step, self.fault_step + 1)
        self.tracker.metrics(self.fault_step, {f"fault/{name}": float(value)})

    # --- cost -------------------------------------------------------------------------------------

    def _count_cost(self) -> bool:
        """Counts the cost since the last call; returns whether the budget is spent."""
        return self.meter is not None and self.meter.count(stepping=not self.starting)

    def settle_cost(self) -> None:
        """Counts the cost until now, and keeps it."""
        if self.meter is None:
            return
        self._count_cost()
        self.meter.save()
        self.summary["dollars"] = self.meter.spent.total
        self._log_cost()

    def _log_cost(self) -> None:
        if self.meter is not None:
            self.tracker.metrics(self.step, self.meter.metrics())
            self.metrics.set(dollars=self.meter.spent.total, dollars_per_hour=self.meter.rate)

    # --- events of the workers --------------------------------------------------------------------

    def handle(self, event: DriverEvent) -> None:
        """Shows and tracks an event of a worker."""
        if self.run.lease.successor is not None:
            return  # the MLflow run belongs to the later start
        match event:
            case TrainingStarted():
                self.training_started(event)
            case StepsDone():
                self._steps_done(event)
            case MetricsLogged():
                self.metrics_logged(event)
            case SystemSampled(time=unix_time, values=values):
                logged = self.system.add(unix_time, values)
                if logged:
                    self.tracker.system_metrics(logged, unix_time)
            case CheckpointSaved():
                self._checkpoint_saved(event)
            case FilesWritten(folder=folder):
                self._keep_files(folder)
            case ProfileTaken():
                self._profile_taken(event)
            case PipelineTraced():
                self._pipeline_traced(event)
            case StepPartsMeasured():
                pass  # the supervisor compares it with the plan
            case WarningIssued(message=message):
                self.note(message)
            case TrainingDone(summary=summary):
                self.summary = summary
            case _:
                assert_never(event)

    def training_started(self, event: TrainingStarted) -> None:
        """The workers are about to take their first step."""
        self.console.waits_for("the workers' first step")
        self.progressed = False
        last_step = event.resumed_from or 0
        self.metrics.resumed(last_step)
        self.tracker.tags(
            {"trireme.device": event.device, "trireme.parameters": str(event.parameters)}
        )
        trained = event.trained_parameters
        if trained is not None and trained < event.parameters:
            self.tracker.tags({"trireme.trained_parameters": str(trained)})
            if event.resumed_from is None:
                self.console.say(f"{trained:,} of {event.parameters:,} parameters are trained")
        if event.resumed_from is not None:
            self.console.say(f"continuing after step {last_step:,} of {event.steps:,}")
            self.tracker.tags({"trireme.resumed_from": str(last_step)})
        rewind_steps = self.step - last_step
        if rewind_steps > 0:
            # These steps are taken again. What they log again is not sent, so that curves stay
            # unbroken.
            self.fault("rewind_steps", rewind_steps)

    def _steps_done(self, event: StepsDone) -> None:
        self.last_step_clock = time.monotonic()
        if self.first_step_clock is None:
            self.first_step_clock = self.last_step_clock
        if not self.progressed:
            self.console.waits_for("")
        self.step = event.step
        self.progressed = True
        self.run.lease.step = event.step
        self.run.lease.steps = event.steps  # fewer once a run has decided on a larger batch
        self.seconds_per_step = event.seconds_per_step
        if self.interrupted_clock is not None:
            self.fault("recovery_seconds", time.monotonic() - self.interrupted_clock)
            self.interrupted_clock = None
        self._log_cost()
        self.progress.note(event.to_record())
        self.metrics.steps_done(event)
        self.console.progress(event, self.evaluated)

    def metrics_logged(self, event: MetricsLogged) -> None:
        """A worker has logged metrics of a step."""
        evaluated = {
            name.removeprefix("eval/"): value
            for name, value in event.values.items()
            if name.startswith("eval/")
        }
        if evaluated:
            self.evaluated = evaluated
            self.progress.note({"evaluated": evaluated})
        self.tracker.metrics(event.step, event.values, event.time)

    def _checkpoint_saved(self, event: CheckpointSaved) -> None:
        values = {"checkpoint/stall_seconds": event.stall_seconds}
        if event.interval_seconds is not None:
            values["checkpoint/interval_seconds"] = event.interval_seconds
        self.tracker.metrics(event.step, values)
        self.metrics.checkpoint_saved(event)

    def _pipeline_traced(self, event: PipelineTraced) -> None:
        """Keeps one step of a pipeline as a Chrome trace."""
        from strategies.pipeline.simulate import chrome_trace

        folder = self.run.local_folder / "pipeline"
        folder.mkdir(parents=True, exist_ok=True)
        trace_path = folder / f"step-{event.step}.json"
        trace_path.write_text(json.dumps(chrome_trace(event.spans)))
        self.tracker.artifact(trace_path, "pipeline")

    def _profile_taken(self, event: ProfileTaken) -> None:
        """Keeps the traces and tables that workers have written into the run's folder."""
        from app.training.profiler import table

        self._keep_files(event.folder)
        self.tracker.text(table(event.profile), f"{event.folder}/profile.txt")
        first_rank = event.profile["ranks"][0]
        seconds = {
            f"profile/{name}": value
            for name, value in first_rank.items()
            if name.endswith("_seconds")
        }
        self.tracker.metrics(event.step, seconds)
        self.note(
            f"steps are profiled: `trireme profile {self.run.folder}` shows where their time went"
        )

    def _keep_files(self, folder: str) -> None:
        """Makes artifacts of the files that a worker has written into a folder of the run's."""
        local_folder = self.run.local_folder / folder
        stored_folder = self.run.storage.join(folder)
        if not stored_folder.is_local:
            for name in stored_folder.list():
                local_folder.mkdir(parents=True, exist_ok=True)
                (local_folder / name).write_bytes(stored_folder.read_bytes(name))
        self.tracker.artifact(local_folder, folder.rpartition("/")[0])

    # --- the run as a whole -----------------------------------------------------------------------

    def add_to_summary(self, **values: object) -> None:
        """Adds what is known of the whole run to the summary that the workers have sent."""
        self.summary |= values

    def begin_tracking(self) -> None:
        """Starts the MLflow run, and logs the configuration and the installed packages."""
        self.tracker.start()
        self.tracker.tags(tags_of(self.run.manifest.fork, is_child=self.tracker.is_child))
        self._log_config()
        self.tracker.text(environment_text(), "packages.txt")

    def _log_config(self) -> None:
        values = to_dict(self.config)
        self.tracker.params(flatten(values))
        self.tracker.text(to_yaml(mask_tree(values)), "config.yaml")

    def weights(self) -> Path | None:
        """The trained weights as a file on this machine; None if the run keeps none."""
        model_folder = self.run.storage.join("model")
        if not model_folder.exists("weights.pt"):
            return None
        if model_folder.is_local:
            return model_folder.local_path / "weights.pt"
        copy = self.run.local_folder / "model" / "weights.pt"
        model_folder.download("weights.pt", copy)
        return copy
