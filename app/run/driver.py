"""The driver's side of a run: hears the workers' events, shows and tracks them, and knows when to stop."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config_io import flatten, to_dict, to_yaml
from app.console import Console
from app.errors import Interrupted
from app.heartbeat import Beat
from app.launchers.failure_policy import between_failures
from app.launchers.whereabouts import Whereabouts
from app.run.cost import Meter
from app.run.manifest import Run
from app.run.remarks import UtilizationMonitor
from app.tracking.provenance import environment_text, provenance_tags
from app.tracking.settings import Settings
from app.tracking.tracker import Tracker

if TYPE_CHECKING:
    from app.job import Job


class Driver:
    """One object for one start of a run. It is a worker's Channel too, where worker and driver are one process."""

    def __init__(self, run: Run, console: Console, settings: Settings) -> None:
        self.run, self.console, self.settings = run, console, settings
        self.started, self.began = time.time(), time.monotonic()
        self.first_step_at: float | None = None
        self.step = 0
        self.seconds_per_step: float | None = None  # as the last progress had it
        self.progressed = False  # whether the present start of the workers took a step
        self.failures = 0
        self.rewinds: list[str] = []  # "812→800": the step that had been taken, and the one gone on after
        self.summary: dict[str, Any] = {}
        self.cut: tuple[int, ...] | None = None  # of a pipeline, once it is another than at the start
        self.next_cut: tuple[int, ...] | None = None  # the same, before the first step with it
        self.lost_at: float | None = None  # when workers were found dead or stuck that are not yet replaced
        self.whereabouts = Whereabouts()
        self.more: int | None = None  # workers that there is room for, once it is more than there are: they pause
        self.resized = False  # whether another number of workers has been gone on with
        self.utilization = UtilizationMonitor()
        self.meter: Meter | None = None  # counts what the run costs, where prices are known
        self.stopping = 0  # how often somebody asked to stop: once is "save and stop", twice is "now"
        self.tracker = Tracker(
            run.local_folder / "tracking",
            uri=settings.uri,
            experiment=settings.experiment,
            artifact_location=settings.artifact_location,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=run.config.tracking.enabled,
            tags=run.config.tracking.tags,
        )
        self.tracker.say = lambda text: console.say(f"note: {text}")

    # --- Channel ------------------------------------------------------------------------------------------------

    def emit(self, event: dict[str, Any]) -> None:
        getattr(self, f"_on_{event['type']}")(event)

    def stop_requested(self) -> bool:
        if self.meter and self._count():
            how = "stopping before training begins" if self.starting else "saving a checkpoint and stopping"
            self.console.say(f"{self.meter.sentence()}: {how}")
            self.stopping = max(1, self.stopping)
        return self.stopping > 0

    @property
    def starting(self) -> bool:
        """Whether the workers have yet to take a step, since the run or since they were lost: nothing would be lost."""
        return not self.progressed or self.lost_at is not None

    def check_start(self) -> None:
        """Raises Interrupted if the workers are still starting and are to stop: they cannot hear of it themselves."""
        if self.starting and self.stop_requested():
            again = "" if self.first_step_at is None else " again"
            raise Interrupted(f"stopped before training began{again}")

    def _count(self) -> bool:
        """Counts what was spent since the last look; True, once, when the budget is."""
        going, started = not self.starting, self.first_step_at is not None
        return self.meter is not None and self.meter.look(stepping=going, started=started)

    def settle(self) -> None:
        """Counts what was spent until now, and notes it."""
        if self.meter is None:
            return
        self._count()
        self.meter.save()
        self.summary["dollars"] = self.meter.spent.total
        self._log_cost()

    def _log_cost(self) -> None:
        if self.meter:
            samples = self.step * self.run.config.train.global_batch_size
            self.tracker.metrics(self.step, self.meter.metrics(samples))

    def follow(self, beat: Beat) -> None:
        """Nobody watches: worker and driver are one process."""

    # --- what workers say ---------------------------------------------------------------------------------------

    def _on_start(self, event: dict[str, Any]) -> None:
        self.progressed = False
        self.tracker.tags({"trireme.device": event["device"], "trireme.parameters": str(event["parameters"])})
        if event["resumed_from"] is not None:
            self.console.say(f"continuing after step {event['resumed_from']:,} of {event['steps']:,}")
            self.tracker.tags({"trireme.resumed_from": str(event["resumed_from"])})
        self._mark_rewind(event["resumed_from"] or 0)

    def _mark_rewind(self, step: int) -> None:
        """Marks in MLflow that steps are taken again; what they log again is dropped there, so curves stay unbroken."""
        if step < self.step:
            self.rewinds.append(f"{self.step}→{step}")
            self.tracker.metrics(self.step, {"fault/rewind_steps": float(self.step - step)})
            self.tracker.tags({"trireme.rewinds": ", ".join(self.rewinds[-50:])})

    def _on_here(self, event: dict[str, Any]) -> None:
        self.whereabouts.ranks[event["where"].rank] = event["where"]

    def _on_notice(self, event: dict[str, Any]) -> None:
        if "rank" in event:
            self.whereabouts.told[event["rank"]] = event["why"]
        else:
            self.whereabouts.announced[event["node"]] = event["why"]
        self.console.say(f"note: {event['text']}")

    def _on_progress(self, event: dict[str, Any]) -> None:
        if self.first_step_at is None:
            self.first_step_at = time.time()
        self.step, self.progressed = event["step"], True
        self.seconds_per_step = event["seconds_per_step"]
        if self.next_cut is not None:
            self._keep_cut(self.next_cut)
        if self.lost_at is not None:
            self.tracker.metrics(self.step, {"fault/recovery_seconds": time.monotonic() - self.lost_at})
            self.lost_at = None
        self._log_cost()
        self.console.progress(event)

    def _on_metrics(self, event: dict[str, Any]) -> None:
        self.tracker.metrics(event["step"], event["values"], event["time"])

    def _on_system(self, event: dict[str, Any]) -> None:
        self.tracker.emit(event["event"])
        for sentence in self.utilization.observe(event["event"].get("values", {})) if self.progressed else ():
            self.console.say(f"note: {sentence}")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        values = {"checkpoint/stall_seconds": event["stall"]}
        if "interval" in event:
            values["checkpoint/interval_seconds"] = event["interval"]
        self.tracker.metrics(event["step"], values)

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.console.say(f"note: {event['text']}")

    def _on_recut(self, event: dict[str, Any]) -> None:
        from app.rebalance import sentence

        found = event["found"]
        self.next_cut = found.sizes
        self.console.say(sentence(found, event["step"]))
        self.tracker.tags({"trireme.stages": "+".join(map(str, found.sizes))})
        self.tracker.metrics(event["step"], {"pipeline/recut_gain": found.gain})

    def _keep_cut(self, cut: tuple[int, ...]) -> None:
        """A step has been taken with it, so it works: the next start begins with it."""
        self.cut, self.next_cut = cut, None
        self.run.manifest.stages = list(cut)
        self.run.save()

    def as_it_stands(self, job: Job) -> Job:
        """The job for the workers' next start: with the cut they came to, and without another try of one that failed
        before its first step, and how often it fails."""
        nodes = len({where.node for where in self.whereabouts.ranks.values()})
        mean = between_failures(self.failures, time.monotonic() - self.began, nodes)
        return replace(
            job,
            stages=None if self.resized else self.cut or job.stages,
            may_recut=job.may_recut and self.next_cut is None,
            between_failures=mean,
        )

    def _on_spans(self, event: dict[str, Any]) -> None:
        """One step of a pipeline, to look at: as a Chrome trace and as a picture."""
        from app.pipeline_profile import chrome_trace
        from app.schedule_picture import draw

        folder = self.run.local_folder / "pipeline"
        folder.mkdir(parents=True, exist_ok=True)
        trace, picture = folder / f"step-{event['step']}.json", folder / f"step-{event['step']}.png"
        trace.write_text(json.dumps(chrome_trace(event["spans"])))
        draw(event["spans"], picture, f"{self.run.config.parallel.schedule}, step {event['step']:,} as measured")
        self.tracker.artifact(trace, "pipeline")
        self.tracker.artifact(picture, "pipeline")

    def _on_done(self, event: dict[str, Any]) -> None:
        self.summary = event["summary"]

    def lost(self) -> float:
        """Notes that training does not go on, until it does again; since when (Unix time) it has not."""
        self.lost_at = self.lost_at or time.monotonic()
        return time.time() - (time.monotonic() - self.lost_at)

    # --- the run as a whole -------------------------------------------------------------------------------------

    def begin_tracking(self) -> None:
        """Starts the tracking writer, so that it loads MLflow while Ray starts."""
        config = self.run.config
        self.tracker.start()
        self.tracker.tags(provenance_tags())
        self.tracker.params(flatten(to_dict(config)))
        self.tracker.text(to_yaml(config), "config.yaml")
        self.tracker.text(environment_text(), "packages.txt")

    def remember_mlflow_run(self) -> None:
        run_id = self.tracker.run_id
        if run_id and self.run.manifest.mlflow_run_id != run_id:
            self.run.manifest.mlflow_run_id = run_id
            self.run.save()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask the run to save and stop; a second one ends it at once."""

        def ask(number: int, frame: object) -> None:
            self.stopping += 1
            if self.stopping == 1:
                how = "training has not begun" if self.starting else "saving a checkpoint first"
                self.console.say(f"stopping: {how} (once more to stop at once)")
            else:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
