"""A published run beside what the plain `trireme plan` command says of the same model in the same layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from app.config.io import load_config
from app.planner.device import Device, family_of
from app.planner.estimate import Estimate
from app.planner.machine import MachineOptions, find_machine
from app.planner.plan import GIB, Plan
from app.planner.ranges import Traits
from app.planner.read import Reader
from app.planner.stand_in import plan_experiment
from app.run.endings import USER_ERRORS
from experiments.benchmarks.published_runs import Run


@dataclass(frozen=True)
class Compared:
    """A run and what the plan says of it. plan: None where the command refuses, with why in `refusal`."""

    run: Run
    plan: Estimate | None
    refusal: str = ""

    @property
    def has_speed(self) -> bool:
        """Whether there are two speeds to compare."""
        return self.plan is not None and bool(self.run.step_seconds)

    @property
    def error(self) -> float:
        """Of tokens/s: 0.1 is a tenth too fast."""
        assert self.plan is not None
        return self.run.step_seconds / self.plan.step_seconds - 1

    @property
    def is_inside(self) -> bool:
        """Whether the published speed is inside the range that the plan shows."""
        assert self.plan is not None
        return self.plan.speed_range[0] <= 1 / (1 + self.error) <= self.plan.speed_range[1]

    @property
    def memory_error(self) -> float:
        """Of what was published, be it what torch has reserved or the whole card; of a run that tells it."""
        assert self.plan is not None
        beside = dict(self.run.described).get("beside_gib", 0.0)
        return (self.plan.memory_bytes / GIB + beside) / self.run.memory_gib - 1


@functools.cache
def _reader(key: str) -> list[Reader]:
    """The reader of a task, kept for all runs that differ in their layout alone; empty until it is first made."""
    return []


FLASH_OF_TORCH = {"hopper": 1.4}
"""By family of GPUs, the speed of the attention that torch takes there, FlashAttention-2 being 1: cuDNN's on H100."""


def _described(device: Device, about: dict[str, Any]) -> Device:
    """The device as the run's trainer used it."""
    flash = about.get("flash", 1.0) / FLASH_OF_TORCH.get(family_of(device.gpu), 1.0)
    device = replace(device, attention=device.attention * flash, again=about.get("again", 0.0))
    if fragments := about.get("fragments", 0.0):
        device = replace(device, fragmentation=fragments / (1 - fragments))
    return device


@dataclass(frozen=True)
class Prepared:
    """A run's plan, to be made again with other constants."""

    run: Run
    plan: Plan | None
    refusal: str = ""

    @property
    def traits(self) -> Traits:
        """What the error of its plan depends on."""
        assert self.plan is not None
        return self.plan.estimator.traits(self.plan.rows[0].candidate)

    def compare(self, change: Callable[[Device], Device] | None = None, *, described: bool = False) -> Compared:
        """The run beside its plan.

        Args:
            change: Gives the device with other constants.
            described: Whether the plan knows what published_sources.yaml says of the run's kernels and memory, which
                the plain command does not.
        """
        if self.plan is None:
            return Compared(self.run, None, self.refusal)
        estimator, candidates = self.plan.estimator, [row.candidate for row in self.plan.rows]
        device = estimator.machine.device
        if change is not None:
            device = change(device)
        if described:
            device = _described(device, dict(self.run.described))
        estimator = replace(estimator, machine=replace(estimator.machine, device=device))
        cuts = {row.candidate: row.stages for row in self.plan.rows}
        rows = []
        for candidate in candidates:  # the cut of a pipeline hardly depends on the constants, and takes time to find
            asked = replace(estimator.options, stages=cuts[candidate])
            rows.append(replace(estimator, options=asked).estimate(candidate))
        return Compared(self.run, min(rows, key=lambda row: (not row.fits, row.step_seconds)))


def prepare(run: Run) -> Prepared:
    """The plan of the run's command; the reading of a model is shared between runs."""
    words, options = run.command()
    if not run.sequence:
        return Prepared(run, None, "the sequence's length was not published")
    try:
        config = load_config([], words)
        machine = find_machine(MachineOptions(**options), config.workers)
        key = json.dumps([run.task, run.task_args, options["gpu"] == "cpu", run.sequence_parallel, run.tp > 1])
        kept = _reader(key)
        given = frozenset(word.partition("=")[0] for word in words)
        plan = plan_experiment(config, machine, given, reader=kept[0] if kept else None)
        if not kept:
            kept.append(plan.reader)
    except USER_ERRORS as error:
        return Prepared(run, None, str(error))
    return Prepared(run, plan)
