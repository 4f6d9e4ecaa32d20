"""Cutting a pipeline again, once in a start, when its first steps show a cut that is worth it.

A few early steps are measured; at the boundary after them all ranks agree on the answer, because each computes it from
what all have measured. Then the step is saved, as any other; every process lets go of its stage and builds the new one,
and the loop goes on from that checkpoint, which knows whole models and no cuts: in the same processes, the same process
group, the same MLflow run. The driver keeps the cut with the run, so that the next start begins with it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from app.job import Channel, Job
from strategies.initialization import forget_meshes
from strategies.parallel import Parallel

if TYPE_CHECKING:
    from strategies.pipeline.parallel import PipelineParallel
    from strategies.pipeline.rebalance import BetterCut

WARM_UP = 8
"""Steps of a start that tell nothing: caches, allocators and compilers get going in them."""
MEASURED = 3
LAST_PART = 0.1
"""Of a run, in which no cut pays any more."""


class Recut:
    """Measures the steps from `first` on."""

    def __init__(self, parallel: PipelineParallel, first: int) -> None:
        self.parallel, self.steps = parallel, range(first, first + MEASURED)

    @classmethod
    def of(cls, job: Job, parallel: Parallel, done: int) -> Recut | None:
        """None where there is no cut to change, a person has made it, or too few steps are left."""
        wanted = job.config.parallel
        fixed = wanted.stages or not wanted.recut or not job.may_recut or job.config.train.deterministic
        left = job.steps - (done + WARM_UP + MEASURED)
        if job.layout.dims.pp == 1 or fixed or left < max(1, LAST_PART * job.steps):
            return None
        return cls(cast("PipelineParallel", parallel), done + WARM_UP + 1)

    def around(self, step: int, take: Callable[[], None]) -> None:
        """Takes a step; measures it if it is one of those."""
        if step in self.steps:
            self.parallel.measure(take)
        else:
            take()

    def due(self, step: int) -> bool:
        """Whether the step just taken was the last to be measured."""
        return step == self.steps[-1]

    def decide(self, step: int, channel: Channel) -> tuple[int, ...] | None:
        """The cut to go on with, if it is another one; says so. Collective over all ranks."""
        found = self.parallel.better_cut()
        if found is None:
            return None
        channel.emit({"type": "recut", "step": step, "found": found})
        return found.sizes


def sentence(found: BetterCut, step: int) -> str:
    """For a person."""
    before, now = ("+".join(map(str, sizes)) for sizes in (found.before, found.sizes))
    milliseconds, then = f"{found.seconds * 1e3:,.1f} ms", f"{found.seconds_before * 1e3:,.1f}"
    return (
        f"cut again after step {step:,}, by measured times: {now} blocks instead of {before}, with which the slowest "
        f"stage should take {milliseconds} for a micro-batch instead of {then} ({found.gain:.0%} less)"
    )


def let_go() -> None:
    """Frees what the stages before held; to be called once nothing refers to them any more."""
    forget_meshes()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def remembered(job: Job, cut: list[int] | None) -> tuple[int, ...] | None:
    """The cut that an earlier start came to, if it fits this one's pipeline."""
    dims, wanted = job.layout.dims, job.config.parallel
    if cut is None or dims.pp == 1 or wanted.stages or not wanted.recut:
        return None
    from strategies.pipeline.schedules import chunks_of

    return tuple(cut) if len(cut) == dims.pp * chunks_of(wanted.schedule, wanted.chunks) else None
