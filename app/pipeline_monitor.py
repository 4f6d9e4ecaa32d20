"""What the loop measures of a pipeline: profiles of single steps, and whether blocks should move between stages.

A profiled step tells what every stage did with its time; the clocks of the nodes are aligned by a barrier before its
first instruction. A few early steps are also measured call by call: if another distribution of the blocks over the
stages would be faster, all ranks agree on it, save, build the new stages in the same processes and continue from that
checkpoint, which knows whole models and no stages. The driver keeps the distribution for the run's next start.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, cast

import torch

from app.checkpoint.ranks import Ranks
from app.job import Channel, Job
from strategies import collectives
from strategies.parallel import Parallel
from strategies.pipeline.simulate import Span, figures

if TYPE_CHECKING:
    from strategies.pipeline.parallel import PipelineParallel

EARLY_STEP = 5
"""Profiled as well, so that a short run has a profile."""
WARM_UP_STEPS = 8
"""Of a start, which tell nothing about stage times: caches, allocators and compilers warm up in them."""
MEASURED_STEPS = 3
LAST_PART = 0.1
"""Of a run, in which moving blocks does not pay any more."""


class PipelineMonitor:
    """Wraps the steps of a pipeline. Every rank calls each method alike."""

    def __init__(self, job: Job, parallel: PipelineParallel, channel: Channel, steps_done: int) -> None:
        self.job, self.parallel, self.channel = job, parallel, channel
        wanted = job.config.parallel
        self.profile_every, self.trace_step = wanted.profile_every, wanted.trace_step
        first = steps_done + WARM_UP_STEPS + 1
        fixed = wanted.stages or not wanted.rebalance or not job.may_rebalance or job.config.train.deterministic
        enough = job.steps - (first + MEASURED_STEPS - 1) >= max(1, LAST_PART * job.steps)
        self.measured = range(first, first + MEASURED_STEPS) if enough and not fixed else range(0)

    @classmethod
    def of(cls, job: Job, parallel: Parallel, channel: Channel, steps_done: int) -> PipelineMonitor | None:
        """None for any other layout."""
        if job.layout.dims.pp == 1:
            return None
        return cls(job, cast("PipelineParallel", parallel), channel, steps_done)

    def take(self, step: int, function: Callable[[], None], report: Callable[[int, dict[str, float]], None]) -> None:
        """Takes a step by calling `function`; measures or profiles it if it is due."""
        every = self.profile_every
        if step in self.measured:
            self.parallel.measure(function)
        elif step == self.trace_step or (every and (step % every == 0 or step == EARLY_STEP < every)):
            self._profile(step, function, report)
        else:
            function()

    def _profile(
        self, step: int, function: Callable[[], None], report: Callable[[int, dict[str, float]], None]
    ) -> None:
        everyone = Ranks().all([astuple(span) for span in self.parallel.profile(function)])
        ranks = [[Span(*span) for span in spans] for spans in everyone]
        wanted = self.job.config.parallel
        report(step, figures(ranks, wanted.schedule, wanted.chunks))
        if step == self.trace_step:
            replicas = self.job.layout.dims.world_size // self.job.layout.dims.pp
            first = [span for spans in ranks[::replicas] for span in spans]
            self.channel.emit({"type": "spans", "step": step, "spans": first})

    def due(self, step: int) -> bool:
        """Whether the step just taken was the last to be measured."""
        return bool(self.measured) and step == self.measured[-1]

    def better_stages(self, step: int) -> tuple[int, ...] | None:
        """The blocks per part to continue with, if others are better. Collective."""
        found = self.parallel.better_partition()
        if found is None:
            return None
        text = (
            f"moving blocks between stages after step {step:,}, by measured times: {_join(found.sizes)} instead of "
            f"{_join(found.before)}; the slowest stage should take {found.seconds * 1e3:,.1f} ms for a "
            f"micro-batch instead of {found.seconds_before * 1e3:,.1f} ({found.gain:.0%} less)"
        )
        self.channel.emit({"type": "rebalance", "step": step, "sizes": found.sizes, "gain": found.gain, "text": text})
        return found.sizes


def _join(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes))


def release_stages(compiled: bool) -> None:
    """Frees what the previous stages held, once nothing refers to them any more."""
    collectives.release()
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def remembered_stages(job: Job, sizes: list[int] | None) -> tuple[int, ...] | None:
    """The blocks per part that an earlier start came to, if they fit this one's pipeline."""
    dims, wanted = job.layout.dims, job.config.parallel
    if sizes is None or dims.pp == 1 or wanted.stages or not wanted.rebalance:
        return None
    from strategies.pipeline.schedules import chunks_of

    return tuple(sizes) if len(sizes) == dims.pp * chunks_of(wanted.schedule, wanted.chunks) else None
