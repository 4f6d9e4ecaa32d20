"""What the loop measures of a pipeline: profiles of single steps, which tell what every stage did with its time.

The clocks of the workers begin at an all-reduce before a profiled step's first instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from app.checkpoint.ranks import Ranks
from app.training.events import PipelineTraced
from app.training.job import Channel, Job
from strategies.parallel import Parallel
from strategies.pipeline.simulate import Span, pipeline_metrics

if TYPE_CHECKING:
    from strategies.pipeline.parallel import PipelineParallel

EARLY_STEP = 5
"""Profiled as well, so that a short run has a profile."""


class PipelineMonitor:
    """Wraps the steps of a pipeline. Every rank calls each method alike."""

    def __init__(self, job: Job, parallel: PipelineParallel, channel: Channel) -> None:
        self.job, self.parallel, self.channel = job, parallel, channel
        self.profile_every, self.trace_step = job.config.parallel.profile_every, job.config.parallel.trace_step

    @classmethod
    def of(cls, job: Job, parallel: Parallel, channel: Channel) -> PipelineMonitor | None:
        """None for any other layout."""
        if job.layout.dims.pp == 1:
            return None
        return cls(job, cast("PipelineParallel", parallel), channel)

    def take(self, step: int, function: Callable[[], None], report: Callable[[int, dict[str, float]], None]) -> None:
        """Takes a step by calling `function`; profiles it if it is due."""
        every = self.profile_every
        if step == self.trace_step or (every and (step % every == 0 or step == EARLY_STEP < every)):
            self._profile(step, function, report)
        else:
            function()

    def _profile(
        self, step: int, function: Callable[[], None], report: Callable[[int, dict[str, float]], None]
    ) -> None:
        everyone = Ranks().all([asdict(span) for span in self.parallel.profile(function)])
        ranks = [[Span(**span) for span in spans] for spans in everyone]
        wanted = self.job.config.parallel
        report(step, pipeline_metrics(ranks, wanted.schedule, wanted.chunks))
        if step == self.trace_step:
            replicas = self.job.layout.dims.world_size // self.job.layout.dims.pp
            first = [span for spans in ranks[::replicas] for span in spans]
            self.channel.emit(PipelineTraced(step=step, spans=first))
