"""A published run beside what the plain `trireme plan` command says of its model and layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.config.io import load_config
from app.planner.device import Device, apply_assumptions
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
    """A run, and what the plan says of it.

    Attributes:
        run: The run.
        plan: The plan; None if the command refuses to make one.
        refusal: Why it does.
        context: Bytes that the plan takes a process and its libraries to have on the card.
    """

    run: Run
    plan: Estimate | None
    refusal: str = ""
    context: float = 0.0

    @property
    def has_speed(self) -> bool:
        """Whether there are two speeds to compare."""
        return self.plan is not None and bool(self.run.step_seconds)

    @property
    def error(self) -> float:
        """The relative error of tokens/s: 0.1 is a tenth too fast."""
        assert self.plan is not None
        return self.run.step_seconds / self.plan.step_seconds - 1

    @property
    def is_inside(self) -> bool:
        """Whether the published speed is inside the range that the plan shows."""
        assert self.plan is not None
        low, high = self.plan.speed_range
        return low <= 1 / (1 + self.error) <= high

    @property
    def memory_gib(self) -> float:
        """What the plan says of the peak that the run's source has published, GiB."""
        assert self.plan is not None
        planned = self.plan.memory_bytes
        if self.run.peak == "allocated":
            planned = self.plan.allocated_bytes
        elif self.run.peak == "card":
            planned += self.context
        return planned / GIB

    @property
    def memory_error(self) -> float:
        """The relative error of the memory, for a run that tells it."""
        return self.memory_gib / self.run.memory_gib - 1


_READERS: dict[str, Reader] = {}
"""The readers of models, for all runs that differ in their layout alone."""


@dataclass(frozen=True)
class Prepared:
    """A run's plan, which can be made again with other constants.

    Attributes:
        run: The run.
        plan: The plan; None if the command refuses to make one.
        refusal: Why it does.
    """

    run: Run
    plan: Plan | None
    refusal: str = ""

    @property
    def traits(self) -> Traits:
        """What the error of its plan depends on."""
        assert self.plan is not None
        return self.plan.estimator.traits(self.plan.rows[0].candidate)

    def compare(
        self,
        change: Callable[[Device], Device] | None = None,
        *,
        described: bool = False,
    ) -> Compared:
        """The run beside its plan.

        Args:
            change: Returns the device with other constants.
            described: Whether the command has the --assume options with which a user of the run's
                trainer would describe it.
        """
        if self.plan is None:
            return Compared(self.run, None, self.refusal)
        estimator = self.plan.estimator
        device = estimator.machine.device
        if change is not None:
            device = change(device)
        if described:
            device = apply_assumptions(device, self.run.assumptions)
        estimator = replace(estimator, machine=replace(estimator.machine, device=device))
        estimates = []
        for row in self.plan.rows:
            # The stages of a pipeline hardly depend on the constants, and take time to find.
            options = replace(estimator.options, stages=row.stages)
            estimates.append(replace(estimator, options=options).estimate(row.candidate))
        fastest = min(estimates, key=lambda row: (not row.fits, row.step_seconds))
        context = device.context
        if described:
            context = dict(self.run.described).get("context_gib", context / GIB) * GIB
        return Compared(self.run, fastest, context=context)


def prepare(run: Run) -> Prepared:
    """The plan of the run's command; runs of one model share what was read of it."""
    words, options = run.command()
    if not run.sequence:
        return Prepared(run, None, "the sequence's length was not published")
    is_on_cpu = options["gpu"] == "cpu"
    key = json.dumps([run.task, run.task_args, is_on_cpu, run.sequence_parallel, run.tp > 1])
    keys = frozenset(word.partition("=")[0] for word in words)
    try:
        config = load_config([], words)
        machine = find_machine(MachineOptions(**options), config.workers)
        plan = plan_experiment(config, machine, keys, reader=_READERS.get(key))
    except USER_ERRORS as error:
        return Prepared(run, None, str(error))
    _READERS.setdefault(key, plan.reader)
    return Prepared(run, plan)
