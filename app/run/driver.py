"""The driver's side of a run: shows and tracks the workers' events, and knows when the run is to stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, assert_never

from app.config import Config
from app.config.io import flatten, to_dict, to_yaml
from app.console.masking import mask_tree
from app.console.terminal import Console
from app.errors import Interrupted, RunFailed
from app.run.cost import Meter
from app.run.manifest import Run
from app.run.metrics import RunMetrics
from app.run.progress import ProgressFile
from app.run.stopping import stop_signals
from app.tracking.environment import environment_text
from app.tracking.settings import Settings
from app.tracking.tracker import Tracker
from app.training.events import (
    CheckpointSaved,
    DriverEvent,
    FilesWritten,
    MetricsLogged,
    PipelineTraced,
    ProfileTaken,
    StepsDone,
    SystemSampled,
    TrainingDone,
    TrainingStarted,
    WarningIssued,
)


class Driver:
    """One object for one start of a run. Others read its attributes, and change them by its methods alone.

    Args:
        run: What it drives.
        config: The resolved configuration.
        console: Where it tells a person what happens.
        settings: Of tracking.
        meter: Counts what the run costs; None where prices are not known.
        restart: Begins this command anew in place of this process; None where that is not possible.
        tracker: Where metrics and artifacts go; None makes the run's own.
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
    ) -> None:
        self.run = run
        self.config = config
        self.console = console
        self.settings = settings
        self.meter = meter
        self.restart = restart
        self.started, self.began = time.time(), time.monotonic()
        self.first_step_at: float | None = None
        self.step, self.fault_step = 0, 0  # the newest; the highest of a fault's metrics
        self.seconds_per_step: float | None = None  # as of the newest progress event
        self.progressed = False  # whether the present attempt has taken a step
        self.summary: dict[str, Any] = {}
        self.lost_at: float | None = None  # when workers were lost that are not yet replaced
        self.resized = False  # whether the run has continued with another number of workers
        self.evaluated: dict[str, float] = {}  # the newest figures on held-out data
        self.progress = ProgressFile(run.storage, run.attempt)
        self.failed = ""  # why the run cannot go on, as another thread has found
        self.stopping = False  # whether it is to save and stop
        self.metrics = RunMetrics(run.manifest.name)  # for the cluster's operators
        self.tracker = tracker or Tracker(
            run.local_folder / "tracking",
            settings,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=config.tracking.enabled,
            tags=config.tracking.tags,
            warn=self.note,
        )

    def note(self, text: str) -> None:
        self.console.say(f"note: {text}")

    # --- stopping -----------------------------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Asked at every look at the workers."""
        self.metrics.refresh()
        if self._budget_is_spent() and self.meter and not self.stopping:
            how = "stopping before training begins" if self.starting else "saving a checkpoint and stopping"
            self.console.say(f"{self.meter.sentence()}: {how}")
            self.stopping = True
        return self.stopping

    @property
    def starting(self) -> bool:
        """Whether the present workers have yet to take a step: nothing would be lost."""
        return not self.progressed or self.lost_at is not None

    def check(self) -> None:
        """Raises Interrupted if the workers are to stop and still start: they cannot be told yet; and RunFailed if
        another start has taken the run over, or Ray is gone."""
        if self.run.lease.successor is not None:
            raise RunFailed(self.run.lease.superseded_message())
        if self.failed:
            raise RunFailed(self.failed)
        if self.starting and self.stop_requested():
            again = "" if self.first_step_at is None else " again"
            raise Interrupted(f"stopped before training began{again}")

    def signals(self) -> AbstractContextManager[None]:
        """While they last, Ctrl-C, SIGTERM and SIGHUP ask the run to save and stop."""
        return stop_signals(self._ask_to_stop)

    def _ask_to_stop(self) -> None:
        self.stopping = True
        how = "training has not begun" if self.starting else "saving a checkpoint first"
        self.console.say(f"stopping: {how} (once more to stop at once)")

    def fail(self, reason: str) -> None:
        """Ends the run at the next `check`. For other threads than the one that supervises."""
        self.failed = reason

    # --- attempts -----------------------------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """The workers are about to be started, for the first time or again."""
        self.summary = {}
        self.progressed = False

    def lost(self) -> None:
        """Notes that training is interrupted until the next step."""
        self.lost_at = self.lost_at or time.monotonic()
        self.console.waits_for("the workers to start again")

    def count_restarts(self, count: int, last_failure: str) -> None:
        """Shows how often the workers were started again, and why the last time."""
        self.tracker.tags({"trireme.restarts": str(count), "trireme.last_failure": last_failure})
        self.metrics.set(restarts=count)

    def count_hangs(self, count: int) -> None:
        """Shows how many workers were ended because they held up the others."""
        self.metrics.set(hang_suspicions=count)

    def resize(self, workers: int, excluded_nodes: str) -> None:
        """The run continues with this many workers, on other nodes than these."""
        self.fault("workers", workers)
        self.tracker.tags({"trireme.workers": str(workers), "trireme.excluded_nodes": excluded_nodes})
        self.resized = True
        if self.meter is not None:
            self._budget_is_spent()  # counts the cost at the rate until now
            self.meter.resize(workers)

    def fault(self, name: str, value: float) -> None:
        """Logs what a fault did, above the steps of earlier faults: below them it would be a replay, and not sent."""
        self.fault_step = max(self.step, self.fault_step + 1)
        self.tracker.metrics(self.fault_step, {f"fault/{name}": float(value)})

    # --- cost ---------------------------------------------------------------------------------------------------

    def _budget_is_spent(self) -> bool:
        """Counts the cost since the last look."""
        return self.meter is not None and self.meter.look(stepping=not self.starting)

    def settle_cost(self) -> None:
        """Counts the cost until now, and keeps it."""
        if self.meter is None:
            return
        self._budget_is_spent()
        self.meter.save()
        self.summary["dollars"] = self.meter.spent.total
        self._log_cost()

    def _log_cost(self) -> None:
        if self.meter:
            self.tracker.metrics(self.step, self.meter.metrics())
            self.metrics.set(dollars=self.meter.spent.total, dollars_per_hour=self.meter.rate)

    # --- events of the workers ----------------------------------------------------------------------------------

    def handle(self, event: DriverEvent) -> None:
        if self.run.lease.successor is not None:
            return  # the MLflow run is the later start's
        match event:
            case TrainingStarted():
                self.training_started(event)
            case StepsDone():
                self._steps_done(event)
            case MetricsLogged():
                self.metrics_logged(event)
            case SystemSampled(time=moment, values=values):
                self.tracker.system_metrics(values, moment)
            case CheckpointSaved():
                self._checkpoint_saved(event)
            case FilesWritten(folder=folder):
                self._keep_files(folder)
            case ProfileTaken():
                self._profile_taken(event)
            case PipelineTraced():
                self._pipeline_traced(event)
            case WarningIssued(message=message):
                self.note(message)
            case TrainingDone(summary=summary):
                self.summary = summary
            case _:
                assert_never(event)

    def training_started(self, event: TrainingStarted) -> None:
        self.console.waits_for("the workers' first step")
        self.progressed = False
        self.metrics.resumed(event.resumed_from or 0)
        self.tracker.tags({"trireme.device": event.device, "trireme.parameters": str(event.parameters)})
        if event.resumed_from is not None:
            self.console.say(f"continuing after step {event.resumed_from:,} of {event.steps:,}")
            self.tracker.tags({"trireme.resumed_from": str(event.resumed_from)})
        rewind = self.step - (event.resumed_from or 0)
        if rewind > 0:  # steps are taken again; what they log again is not sent, so curves stay unbroken
            self.fault("rewind_steps", rewind)

    def _steps_done(self, event: StepsDone) -> None:
        if self.first_step_at is None:
            self.first_step_at = time.time()
        if not self.progressed:
            self.console.waits_for("")
        self.step = event.step
        self.progressed = True
        self.run.lease.step = event.step
        self.seconds_per_step = event.seconds_per_step
        if self.lost_at is not None:
            self.fault("recovery_seconds", time.monotonic() - self.lost_at)
            self.lost_at = None
        self._log_cost()
        self.progress.note(event.to_record())
        self.metrics.steps_done(event)
        self.console.progress(event, self.evaluated)

    def metrics_logged(self, event: MetricsLogged) -> None:
        evaluated = {
            name.removeprefix("eval/"): value for name, value in event.values.items() if name.startswith("eval/")
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
        """One step of a pipeline to look at: as a Chrome trace."""
        from strategies.pipeline.simulate import chrome_trace

        folder = self.run.local_folder / "pipeline"
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"step-{event.step}.json"
        trace.write_text(json.dumps(chrome_trace(event.spans)))
        self.tracker.artifact(trace, "pipeline")

    def _profile_taken(self, event: ProfileTaken) -> None:
        """Traces and tables that workers have written into the run's folder."""
        from app.training.profiler import table

        self._keep_files(event.folder)
        self.tracker.text(table(event.profile), f"{event.folder}/profile.txt")
        first = event.profile["ranks"][0]
        seconds = {f"profile/{name}": value for name, value in first.items() if name.endswith("_seconds")}
        self.tracker.metrics(event.step, seconds)
        self.note(f"steps are profiled: `trireme profile {self.run.folder}` shows where their time went")

    def _keep_files(self, folder: str) -> None:
        """What a worker has written into a folder of the run's."""
        here = self.run.local_folder / folder
        kept = self.run.storage.join(folder)
        for name in [] if kept.is_local else kept.list():
            here.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(kept.read_bytes(name))
        self.tracker.artifact(here, folder.rpartition("/")[0])

    # --- the run as a whole -------------------------------------------------------------------------------------

    def add_to_summary(self, **values: Any) -> None:
        """Adds what is known of the whole run to the summary that the workers have given."""
        self.summary |= values

    def begin_tracking(self) -> None:
        self.tracker.start()
        self.tracker.params(flatten(to_dict(self.config)))
        self.tracker.text(to_yaml(mask_tree(to_dict(self.config))), "config.yaml")
        self.tracker.text(environment_text(), "packages.txt")

    def weights(self) -> Path | None:
        """The trained weights as a file on this machine; None if the run keeps none."""
        kept = self.run.storage.join("model")
        if not kept.exists("weights.pt"):
            return None
        if kept.is_local:
            return kept.local_path / "weights.pt"
        copy = self.run.local_folder / "model" / "weights.pt"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(kept.read_bytes("weights.pt"))
        return copy
