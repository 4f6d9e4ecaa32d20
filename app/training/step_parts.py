"""Where the time of a step goes, measured once, early in a training.

The first `WARM_UP` steps of a start are not typical. In the steps after them, up to `LAST`, each
step and its wait for data are timed. Exposed communication is measured in the last `PROFILED` of
these steps, by torch's profiler. In a pipeline the timelines of the stages show it instead, and
also how long stages wait for one another and how long each block computes. The rest of the time is
computing: kernels, the optimizer, and whatever else holds up a step.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from app.checkpoint.ranks import Ranks
from app.training.events import StepParts, StepPartsMeasured
from app.training.job import Channel, Job, Place
from app.training.pipeline_monitor import PipelineMonitor
from app.training.profiler import Profiler, seconds_by_kind
from strategies.pipeline.simulate import BlockSeconds

WARM_UP = 5
LAST = 20
"""The last step of a start that is measured."""
PROFILED = 2


class StepMeter:
    """Measures the steps of a start. Every rank has one, and calls each method alike.

    Args:
        place: This rank's place.
        channel: To the driver.
        first: The first step that is timed.
        last: The last one, of which a pipeline's timelines are taken.
        monitor: Of a pipeline; None for other layouts.
    """

    def __init__(
        self,
        place: Place,
        channel: Channel,
        *,
        first: int,
        last: int,
        monitor: PipelineMonitor | None,
    ) -> None:
        self.place = place
        self.channel = channel
        self.first = first
        self.last = last
        self.monitor = monitor
        if monitor is not None:
            monitor.measured_step = last
        self.profiles = monitor is None and place.world_size > 1
        self._profile: profile | None = None
        self._step_seconds: list[float] = []
        self._reading_seconds: list[float] = []
        self._reading = 0.0
        """Of the present step."""

    @classmethod
    def of(
        cls,
        job: Job,
        place: Place,
        channel: Channel,
        *,
        steps_done: int,
        monitor: PipelineMonitor | None,
        profiler: Profiler | None,
    ) -> "StepMeter | None":
        """The meter of a training; None if no parts are wanted, or too few steps are left.

        Args:
            job: What is trained.
            place: This rank's place.
            channel: To the driver.
            steps_done: Steps before this start.
            monitor: Of a pipeline; None for other layouts.
            profiler: Of the steps that the configuration profiles, which are not measured.
        """
        first = steps_done + WARM_UP + 1
        last = steps_done + LAST
        if profiler is not None and profiler.first <= last + 1 and profiler.last >= first - 1:
            first = profiler.last + 2
            last = first + LAST - WARM_UP - 1
        if not job.measures_parts or last > job.steps:
            return None
        return cls(place, channel, first=first, last=last, monitor=monitor)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context around one step, with its wait for data."""
        if not self.first - 1 <= step <= self.last:
            yield
            return
        if self.profiles and step == self.last - PROFILED:
            self._start_profile()
        start = time.perf_counter()
        yield
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        is_typical = step >= self.first and (step <= self.last - PROFILED - 1)
        if is_typical:
            self._step_seconds.append(time.perf_counter() - start)
            self._reading_seconds.append(self._reading)
        if self._profile is not None:
            self._profile.step()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context around the wait for a step's data."""
        start = time.perf_counter()
        yield
        self._reading = time.perf_counter() - start

    def is_last(self, step: int) -> bool:
        """Whether the step was the last to be measured, so that `finish` is due."""
        return step == self.last

    def finish(self) -> None:
        """Send what was measured to the driver. A collective call."""
        step = statistics.median(self._step_seconds)
        data = min(statistics.median(self._reading_seconds), step)
        communication = min(self._exposed_seconds(), step - data)
        means = torch.tensor([step, data, communication], dtype=torch.float64)
        if Ranks().distributed:
            dist.all_reduce(means)
        step, data, communication = (means / self.place.world_size).tolist()
        bubble = 0.0
        blocks: BlockSeconds | None = None
        if self.monitor is not None and self.monitor.measured is not None:
            measured = self.monitor.measured
            idle = min(measured.idle_seconds, step - data)
            communication = min(measured.communication_seconds, idle)
            bubble = idle - communication
            blocks = measured.blocks
        if self.place.rank == 0:
            parts = StepParts(
                computing=step - data - communication - bubble,
                communication=communication,
                bubble=bubble,
                data=data,
            )
            self.channel.emit(StepPartsMeasured(step=self.last, parts=parts, blocks=blocks))

    def close(self) -> None:
        """End a profile that the end of the training has cut off."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start_profile(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.place.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
        )
        self._profile.start()

    def _exposed_seconds(self) -> float:
        """A step's seconds of exposed communication on this rank."""
        ended = self._profile
        self.close()
        if ended is None:
            return 0.0
        on_gpu = self.place.device.type == "cuda"
        return seconds_by_kind(ended.events(), PROFILED, on_gpu)["exposed_communication_seconds"]
