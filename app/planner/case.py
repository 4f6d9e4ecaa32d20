"""A layout of one model on one machine, with everything on which its time and memory depend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.part_costs import PartCost
from app.planner.work import Work
from strategies.costs import StepShape, UnitSize
from strategies.options import Options


class ExpertExchange(NamedTuple):
    """What the workers of mixtures of experts send each other.

    Args:
        sent_bytes: Bytes of rows that a stage sends to experts and back for one micro-batch, if
            experts are split over workers.
        experts: The number of experts of a mixture.
        top_k: How many of them a token chooses.
        workers: How many workers share the experts, tensor-parallel workers included.
    """

    sent_bytes: float
    experts: int
    top_k: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout with everything on which its time and memory depend.

    Args:
        candidate: The layout.
        machine: The machine on which it runs.
        work: What a worker does with a micro-batch.
        step: What strategies need to know of a step.
        parts: The cost of each part of the model.
        units: The size, on one rank, of each part's unit of sharding.
        counts: How many of each part the slowest stage has.
        options: The options of the configuration.
        context_method: How workers that share a sequence compute attention.
        exchange: What mixtures of experts send.
        orthogonalised: (rows, columns, how many) of the slowest stage's matrices that Muon makes
            orthogonal; empty for other optimizers.
    """

    candidate: Candidate
    machine: Machine
    work: Work
    step: StepShape
    parts: list[PartCost]
    units: list[UnitSize]
    counts: tuple[int, ...]
    options: Options
    context_method: str
    exchange: ExpertExchange
    orthogonalised: tuple[tuple[int, int, int], ...] = ()

    def sum_over_parts(
        self, values: Sequence[float], counts: tuple[int, ...] | None = None
    ) -> float:
        """The sum over the parts of a stage.

        Args:
            values: A value of each kind of part.
            counts: How many of each part the stage has; None for those of the slowest stage.
        """
        if counts is None:
            counts = self.counts
        return sum(value * count for value, count in zip(values, counts))

    def blocks(self, counts: tuple[int, ...]) -> int:
        """The number of blocks among the parts of a stage.

        Args:
            counts: How many of each part the stage has.
        """
        return sum(count for part, count in zip(self.parts, counts) if part.is_block)
