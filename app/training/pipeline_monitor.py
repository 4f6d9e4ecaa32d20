"""Profiles of single steps of a pipeline, which show how every stage spends its time.

The ranks' clocks start together, at an all-reduce before the first instruction of a profiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from app.checkpoint.ranks import Ranks
from app.training.events import PipelineTraced
from app.training.job import Channel, Job
from strategies.parallel import Parallel
from strategies.pipeline.simulate import BlockSeconds, Span, pipeline_metrics, seconds_by_block

if TYPE_CHECKING:
    from strategies.pipeline.parallel import PipelineParallel

EARLY_STEP = 5  # profiled too, so that a short run has a profile


@dataclass(frozen=True, kw_only=True)
class MeasuredPipeline:
    """What one step of a pipeline was measured to take.

    Args:
        idle_seconds: The time in which the slowest stage computes nothing.
        communication_seconds: The part of it that the bubble does not explain.
        blocks: How long the pieces of the model compute.
    """

    idle_seconds: float
    communication_seconds: float
    blocks: BlockSeconds


Log = Callable[[int, Mapping[str, float]], None]
"""(step, metrics) → logs them."""


class PipelineMonitor:
    """Takes the steps of a pipeline, and profiles some. Every rank calls each method alike.

    Args:
        job: Says which steps are profiled.
        parallel: The model under its layout.
        channel: To the driver.
    """

    def __init__(self, job: Job, parallel: PipelineParallel, channel: Channel) -> None:
        self.job = job
        self.parallel = parallel
        self.channel = channel
        self.profile_every = job.config.parallel.profile_every
        self.trace_step = job.config.parallel.trace_step
        self.measured_step: int | None = None
        """A step that is profiled to be compared with the plan."""
        self.measured: MeasuredPipeline | None = None
        """What that step took; None before it."""

    @classmethod
    def of(cls, job: Job, parallel: Parallel, channel: Channel) -> PipelineMonitor | None:
        """The monitor of a training; None if its layout is not a pipeline."""
        if job.layout.dims.pp == 1:
            return None
        return cls(job, cast("PipelineParallel", parallel), channel)

    def take(self, step: int, take_step: Callable[[], None], log: Log) -> None:
        """Take a step, and profile it if that is due.

        Args:
            step: The step.
            take_step: Takes it.
            log: Logs the metrics of a profile.
        """
        if self._is_profiled(step):
            self._profile(step, take_step, log)
        else:
            take_step()

    def _is_profiled(self, step: int) -> bool:
        if step in (self.trace_step, self.measured_step):
            return True
        every = self.profile_every
        if not every:
            return False
        return step % every == 0 or step == EARLY_STEP < every

    def _profile(self, step: int, take_step: Callable[[], None], log: Log) -> None:
        local_spans = [asdict(span) for span in self.parallel.profile(take_step)]
        by_rank = [[Span(**span) for span in spans] for spans in Ranks().all_gather(local_spans)]
        parallel = self.job.config.parallel
        metrics = pipeline_metrics(by_rank, parallel.schedule, parallel.chunks)
        log(step, metrics)
        if step == self.measured_step:
            self.measured = _measured(
                metrics, seconds_by_block(by_rank, parallel.schedule, parallel.chunks)
            )
        if step == self.trace_step:
            dims = self.job.layout.dims
            ranks_per_stage = dims.world_size // dims.pp
            first_of_each_stage = by_rank[::ranks_per_stage]
            spans = [span for stage_spans in first_of_each_stage for span in stage_spans]
            self.channel.emit(PipelineTraced(step=step, spans=spans))


def _measured(metrics: Mapping[str, float], blocks: BlockSeconds) -> MeasuredPipeline:
    """The parts of a step, as a plan has them: its computing is that of the slowest stage.

    Idle time beyond the bubble that is simulated from the measured times, with free transfers, is
    counted as communication.
    """
    seconds = metrics["pipeline/seconds"]
    slowest_seconds = max(
        value
        for name, value in metrics.items()
        if name.startswith("pipeline/stage_") and name.endswith("/compute_seconds")
    )
    idle_seconds = max(0.0, seconds - slowest_seconds)
    of_sending = (metrics["pipeline/bubble"] - metrics["pipeline/bubble_by_simulation"]) * seconds
    return MeasuredPipeline(
        idle_seconds=idle_seconds,
        communication_seconds=min(max(0.0, of_sending), idle_seconds),
        blocks=blocks,
    )
