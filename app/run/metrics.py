"""Prometheus metrics of a run, for the cluster's operators.

Ray's agent on the driver's node exports them beside Ray's own (`ray metrics launch-prometheus`; on
Kubernetes a PodMonitor). cluster/grafana.json shows them.

Only the driver sets them, in memory and without waiting; training does not know of them. Without
Ray there are none.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

    from app.training.events import CheckpointSaved, StepsDone

REFRESH_SECONDS = 1.0
PREFIX = "trireme_"
"""Of every metric's name. Ray puts ray_ before it."""
METRICS = {
    "step": "Newest optimizer step",
    "steps": "Optimizer steps that the run is to reach",
    "loss": "Training loss of the newest step that was logged",
    "items_per_second": (
        "Tokens, samples or what else the task counts, a second, over all workers: mean of this "
        "start"
    ),
    "mfu": "Model FLOP utilization, 0 to 1, where the peak of the GPUs is known",
    "memory_bytes": "Peak memory of a worker",
    "restarts": "Restarts from a checkpoint since this start of the run",
    "goodput": (
        "Share of the time since this start that went into steps which were not lost, 0 to 1"
    ),
    "checkpoint_timestamp_seconds": (
        "Unix time of the newest checkpoint; its age is time() less this"
    ),
    "checkpoint_step": "Step of the newest checkpoint",
    "checkpoint_stall_seconds": "Seconds for which training waited for the newest checkpoint",
    "checkpoint_seconds": "Seconds from the beginning of the checkpoint before to its commit",
    "hang_suspicions": "Workers that were ended because they held up the others, since this start",
    "dollars": "US dollars that the run has cost, over all its starts",
    "dollars_per_hour": "US dollars an hour of what the run holds now",
}
"""Descriptions of the metrics by name without `PREFIX`.

All are gauges with the label `run`; items_per_second also has the label `unit`.
"""


class RunMetrics:
    """The gauges of one start of a run.

    Args:
        run: The run's name.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.unit = ""
        self.start_clock = time.monotonic()
        self.kept_seconds = 0.0
        """Seconds of the steps that were taken for the first time."""
        self.highest_step = 0
        """The highest step that was taken so far; steps up to it are replays."""
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[str, float] = {}
        self._refresh_clock = 0.0
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            from ray.util.metrics import Gauge

            for name, description in METRICS.items():
                labels = ("run", "unit") if name == "items_per_second" else ("run",)
                self._gauges[name] = Gauge(PREFIX + name, description, labels)
            self.set(restarts=0, hang_suspicions=0)

    def set(self, **values: float | None) -> None:
        """Sets metrics by name; None, and what is not finite, leaves a metric as it is."""
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._values[name] = value

    def refresh(self) -> None:
        """Hands all values to Ray, at most every second; cheap enough to be called often.

        Ray's agent forgets a gauge once it was scraped, until the driver's next report (10 s).
        Therefore the dashboard uses last_over_time.
        """
        now = time.monotonic()
        if not self._gauges or now - self._refresh_clock < REFRESH_SECONDS:
            return
        self._refresh_clock = now
        if self.highest_step:
            self.set(goodput=min(1.0, self.kept_seconds / (now - self.start_clock)))
        for name, value in self._values.items():
            labels = {"run": self.run}
            if name == "items_per_second":
                labels["unit"] = self.unit
            self._gauges[name].set(value, labels)

    def resumed(self, step: int) -> None:
        """Notes that training continues after this step."""
        self.highest_step = max(self.highest_step, step)

    def steps_done(self, event: StepsDone) -> None:
        """Notes how far the workers are, and how fast."""
        self.unit = event.unit
        new_steps = max(0, event.step - self.highest_step)
        self.highest_step += new_steps
        self.kept_seconds += new_steps * event.seconds_per_step
        self.set(
            step=event.step,
            steps=event.steps,
            loss=event.loss,
            mfu=event.mfu,
            memory_bytes=event.memory_bytes,
            items_per_second=event.rate,
        )

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Notes the newest checkpoint, and how long it took."""
        self.set(
            checkpoint_timestamp_seconds=time.time(),
            checkpoint_step=event.step,
            checkpoint_stall_seconds=event.stall_seconds,
            checkpoint_seconds=event.previous_seconds or None,  # 0: there was none before
        )
