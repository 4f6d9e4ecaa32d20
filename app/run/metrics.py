"""What a run tells the cluster's operators: Prometheus metrics, which Ray's agent on the driver's node exports beside
Ray's own (`ray metrics launch-prometheus`; on Kubernetes a PodMonitor). cluster/grafana.json shows them.

Only the driver sets them, in memory and without waiting: training does not know of them. Without Ray there are none.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.training.events import CheckpointSaved, StepsDone

REFRESH_SECONDS = 1.0
PREFIX = "trireme_"  # and Ray puts ray_ before it
METRICS = {
    "step": "Newest optimizer step",
    "steps": "Optimizer steps that the run is to reach",
    "loss": "Training loss of the newest step that was logged",
    "items_per_second": "Tokens, samples or what else the task counts, a second, over all workers: mean of this start",
    "mfu": "Model FLOP utilization, 0 to 1, where the peak of the GPUs is known",
    "memory_bytes": "Peak memory of a worker",
    "restarts": "Restarts from a checkpoint since this start of the run",
    "goodput": "Share of the time since this start that went into steps which were not lost, 0 to 1",
    "checkpoint_timestamp_seconds": "Unix time of the newest checkpoint; its age is time() less this",
    "checkpoint_step": "Step of the newest checkpoint",
    "checkpoint_stall_seconds": "Seconds for which training waited for the newest checkpoint",
    "checkpoint_seconds": "Seconds from the beginning of the checkpoint before to its commit",
    "hang_suspicions": "Workers that were ended because they held up the others, since this start",
    "dollars": "US dollars that the run has cost, over all its starts",
    "dollars_per_hour": "US dollars an hour of what the run holds now",
}
"""Name, without `PREFIX`, and what it is. All are gauges with the label `run`; items_per_second also has `unit`."""


class RunMetrics:
    """The gauges of one start of a run."""

    def __init__(self, run: str) -> None:
        self.run, self.unit, self.began = run, "", time.monotonic()
        self.kept_seconds, self.furthest = 0.0, 0  # of steps taken for the first time; the highest of them
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._refreshed = 0.0
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            from ray.util.metrics import Gauge

            for name, text in METRICS.items():
                unit = ("unit",) if name == "items_per_second" else ()
                self._gauges[name] = Gauge(PREFIX + name, text, ("run", *unit))
            self.set(restarts=0, hang_suspicions=0)

    def set(self, **values: float | None) -> None:
        """Of these metrics the value from now on; None leaves one as it is."""
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._values[name] = value

    def refresh(self) -> None:
        """Called often: hands all values to Ray every second. Ray's agent forgets a gauge once it was scraped, until it
        hears of it again from the driver's next report (10 s): hence the dashboard's last_over_time."""
        if self._gauges and time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            now = self._refreshed = time.monotonic()
            if self.furthest:
                self.set(goodput=min(1.0, self.kept_seconds / (now - self.began)))
            for name, value in self._values.items():
                unit = {"unit": self.unit} if name == "items_per_second" else {}
                self._gauges[name].set(value, {"run": self.run} | unit)

    def resumed(self, step: int) -> None:
        """Training continues after this step; what comes after it was not counted before."""
        self.furthest = max(self.furthest, step)

    def steps_done(self, event: StepsDone) -> None:
        """How far the workers are, and how fast."""
        self.unit = event.unit
        new = max(0, event.step - self.furthest)
        self.furthest += new
        self.kept_seconds += new * event.seconds_per_step
        self.set(
            step=event.step,
            steps=event.steps,
            loss=event.loss,
            mfu=event.mfu,
            memory_bytes=event.memory_bytes,
            items_per_second=event.rate,
        )

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Which checkpoint is the newest, and what it took."""
        self.set(
            checkpoint_timestamp_seconds=time.time(),
            checkpoint_step=event.step,
            checkpoint_stall_seconds=event.stall_seconds,
            checkpoint_seconds=event.previous_seconds or None,  # 0: there was none before
        )
