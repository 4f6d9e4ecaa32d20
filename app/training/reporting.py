"""What the loop reports: metrics, the speed and how far training is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from app.config.batch_schedule import BatchSchedule
from app.training.events import MetricsLogged, StepsDone
from app.training.flops import Utilization
from app.training.job import Channel, Place, memory_bytes
from app.training.persistence import Progress
from app.training.step_sync import Agreement, LoggedStep
from strategies.activation_offloading import Moved

SAMPLES_SEEN = "train/samples_seen"
"""The metric that says where in the data a step is; only runs whose batch changes log it."""


@dataclass
class Speed:
    """How fast a start of a run trains, as the terminal, `trireme runs` and the report show it.

    It is the mean over all steps of the start: their items divided by their seconds. Waiting for
    data counts; evaluation, checkpoints and waiting for the storage or for workers do not.
    """

    seconds: float = 0.0
    items: float = 0.0
    samples: float = 0.0

    def add(self, seconds: float, items: float, samples: float) -> None:
        """Add steps.

        Args:
            seconds: How long they took.
            items: What the task counts in them, over all workers.
            samples: Their samples, over all workers.
        """
        self.seconds += seconds
        self.items += items
        self.samples += samples

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class Reporter:
    """Sends metrics and progress to the driver, and remembers the metrics for the next checkpoint.

    Args:
        channel: To the driver; on ranks other than the first it sends no metrics.
        place: This rank's place.
        progress: Keeps the newest metrics.
        steps: Optimizer steps of the whole run.
        batches: Samples of a step on all workers.
        unit: What the task's items are, such as tokens.
        utilization: Of the GPUs; None if their peak is not known.
        moved: What activation offloading has moved on this rank; None without it.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        place: Place,
        progress: Progress,
        steps: int,
        batches: BatchSchedule,
        unit: str,
        utilization: Utilization | None,
        moved: Moved | None = None,
    ) -> None:
        self.speed = Speed()
        self._channel = channel
        self._place = place
        self._progress = progress
        self._steps = steps
        self._batches = batches
        self._samples_reported = progress.samples_seen
        """The samples seen at the last agreement."""
        self._unit = unit
        self._utilization = utilization
        self._moved = moved
        self._moved_bytes_reported = 0
        self._steps_since_moved = 0
        """Steps since `_moved_bytes_reported` was written."""
        self._last_logged_step = 0
        self._logs_batch = not batches.is_constant

    def follow(self, batches: BatchSchedule, steps: int) -> None:
        """Take what a run that decides on its batch has decided.

        Args:
            batches: Samples of a step on all workers, from now on too.
            steps: Optimizer steps of the whole run.
        """
        self._batches = batches
        self._steps = steps
        self._logs_batch = True

    def log(self, step: int, values: Mapping[str, float], when: float | None = None) -> None:
        """Log metrics of a step.

        Args:
            step: The step.
            values: The metrics by name.
            when: Unix seconds; None means now.
        """
        event = MetricsLogged(
            step=step,
            time=when or time.time(),
            training_seconds=self.speed.seconds,
            values=values,
        )
        self._progress.remember(event, self._place.rank)
        self._channel.emit(event)

    def report_steps(self, agreed: Agreement, loss_scale: float | None) -> None:
        """Log the metrics of the steps since the last agreement, and say how far training is.

        Args:
            agreed: What the ranks agreed on.
            loss_scale: Of fp16; None in other precisions.
        """
        samples = self._progress.samples_seen - self._samples_reported
        items = samples if self._unit == "samples" else agreed.items
        self.speed.add(agreed.seconds, items, samples)
        self._steps_since_moved += agreed.steps
        steps_before = agreed.step - agreed.steps
        for entry in agreed.logged:
            values = _metrics_of(entry)
            if self._logs_batch:
                before = self._samples_before(entry.step, steps_before=steps_before)
                batch = self._batches.batch_at(before)
                values["train/global_batch_size"] = float(batch)
                values[SAMPLES_SEEN] = float(before + batch)
            if loss_scale is not None:
                values["train/loss_scale"] = loss_scale
            if entry is agreed.logged[-1]:  # the steps since the last agreement have one throughput
                values |= self._throughput(items / agreed.seconds, samples / agreed.seconds)
                values |= self._moved_bytes()
            self.log(entry.step, values, entry.time)
            self._last_logged_step = entry.step
        batch = self._batches.batch_at(self._samples_before(agreed.step, steps_before=steps_before))
        self._samples_reported += samples
        self._channel.emit(self._steps_done(agreed, samples, batch))

    def _samples_before(self, step: int, *, steps_before: int) -> int:
        """The samples seen before a step.

        Args:
            step: The step.
            steps_before: The steps that had been taken at the last agreement.
        """
        return self._batches.samples_after(step - 1 - steps_before, start=self._samples_reported)

    def _throughput(self, items_per_second: float, samples_per_second: float) -> dict[str, float]:
        unit = self._unit
        values = {
            "train/samples_per_second": samples_per_second,
            f"train/{unit}_per_second": items_per_second,
            f"train/mean_{unit}_per_second": self.speed.items_per_second,
        }
        if self._utilization is not None:
            gpus = self._utilization.gpus
            values["train/mfu"] = self._utilization.mfu(samples_per_second)
            values[f"train/{unit}_per_second_per_gpu"] = items_per_second / gpus
        return values

    def _moved_bytes(self) -> dict[str, float]:
        """The mean bytes per step that this rank has moved to its host since the last report."""
        if self._moved is None:
            return {}
        moved_bytes = self._moved.bytes - self._moved_bytes_reported
        steps = self._steps_since_moved
        self._moved_bytes_reported = self._moved.bytes
        self._steps_since_moved = 0
        return {"train/activation_bytes_to_host": moved_bytes / steps}

    def _steps_done(self, agreed: Agreement, samples: int, batch: int) -> StepsDone:
        utilization = self._utilization
        loss = None
        if self._last_logged_step:  # before that, the newest loss is that of an earlier start
            loss = self._progress.latest.get("train/loss")
        mfu = None
        if utilization is not None:
            mfu = utilization.mfu(self.speed.samples_per_second)
        samples_seen = self._progress.samples_seen
        samples_at_end = self._batches.samples_after(self._steps - agreed.step, start=samples_seen)
        samples_left = samples_at_end - samples_seen
        return StepsDone(
            step=agreed.step,
            steps=self._steps,
            loss=loss,
            loss_step=self._last_logged_step,
            rate=self.speed.items_per_second,
            unit=self._unit,
            gpus=utilization.gpus if utilization is not None else 0,
            mfu=mfu,
            seconds_left=samples_left * agreed.seconds / samples,
            seconds_per_step=agreed.seconds_per_step,
            memory_bytes=memory_bytes(self._place.device),
            global_batch_size=batch,
            samples_seen=samples_seen,
        )


def _metrics_of(entry: LoggedStep) -> dict[str, float]:
    values = {f"train/{name}": rate for name, rate in entry.learning_rates.items()}
    if entry.items > 0:  # a batch without a counted item has no loss
        values["train/loss"] = entry.loss
        values |= {f"train/{name}": loss for name, loss in entry.losses.items()}
    if entry.grad_norm is not None:
        values["train/grad_norm"] = entry.grad_norm
    return values
