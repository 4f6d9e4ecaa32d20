"""Which layout a run moves to once a step was measured beside its plan: pure functions.

The ratio of measured to planned seconds of each part of a step is assumed to hold for the other
layouts too, except for those that were measured themselves. A run moves if the remaining steps
would then be at least a tenth faster, the restart included. It makes at most `MOST_MOVES` moves and
measures no layout twice. The last move is reserved for going back: if the layouts that were tried
are slower, the run returns to the fastest one that was measured, and stays there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.planner.auto import alternatives
from app.planner.corrections import Comparison, factors_of, multiplied
from app.planner.estimate import Estimate
from app.planner.plan import Plan, ranked
from strategies.pipeline.partition import balanced_partition
from strategies.pipeline.schedules import Placement
from strategies.pipeline.simulate import BlockSeconds

MOST_MOVES = 3
GAIN = 0.1
"""By how much the rest of a run has to be faster, with the restart, for a move."""


@dataclass(kw_only=True)
class History:
    """The layouts with which a run has trained.

    Args:
        path: Their names, in the order of the moves; the last is the present one.
        seconds: The measured seconds of a step, by name.
        refused: Names of layouts that could not train the model after all.
    """

    path: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Whether the run makes no more moves."""
        has_returned = len(set(self.path)) < len(self.path)
        return has_returned or len(self.path) > MOST_MOVES

    @property
    def tries_no_more(self) -> bool:
        """Whether the next move can only be to a layout that was measured."""
        return len(self.path) >= MOST_MOVES


def layout_name(row: Estimate) -> str:
    """Names a layout with all that a move may change."""
    if not row.stages:
        return row.candidate.key
    return f"{row.candidate.key}, {'+'.join(map(str, row.stages))} blocks"


def expected_layouts(
    plan: Plan, present: Estimate, comparison: Comparison, history: History
) -> list[Estimate]:
    """The other layouts that auto may choose, with the seconds that are now expected of them.

    Args:
        plan: All layouts.
        present: The one that was measured.
        comparison: Its plan beside what was measured.
        history: What was measured before.
    """
    factors = factors_of(comparison.planned, comparison.measured)
    rows = []
    for row in alternatives(plan, present):
        if row.candidate == present.candidate:
            continue
        seconds: Mapping[str, float] = multiplied(
            row.seconds, factors, data_seconds=comparison.measured.data
        )
        known = history.seconds.get(layout_name(row))
        if known is not None:
            seconds = {"measured": known}
        rows.append(replace(row, seconds=dict(seconds)))
    return rows


def rebalanced_stages(
    plan: Plan, present: Estimate, comparison: Comparison, measured: BlockSeconds
) -> Estimate | None:
    """The present pipeline with its stages cut by the measured times of its blocks.

    Args:
        plan: All layouts.
        present: The one that was measured.
        comparison: Its plan beside what was measured.
        measured: What the pieces of the model compute in a step.

    Returns:
        The layout, with the seconds that are expected of it; None if the cut stays the same, or the
        new one is not certain to fit.
    """
    sizes = present.stages
    if sizes is None or len(measured.blocks) != sum(sizes) or plan.config.parallel.stages:
        return None
    cut = balanced_partition(measured.blocks, len(sizes), measured.before, measured.after)
    if cut == sizes:
        return None
    candidate = present.candidate
    estimator = replace(plan.estimator, options=replace(plan.estimator.options, stages=cut))
    row = estimator.estimate(candidate)
    if row.verdict != "fits":
        return None
    placement = Placement.of(candidate.schedule, candidate.dims.pp, candidate.chunks)
    slowest_before = _slowest_stage(placement, measured.of_parts(sizes))
    slowest_after = _slowest_stage(placement, measured.of_parts(cut))
    saved = max(0.0, slowest_before - slowest_after)
    return replace(row, seconds={"measured": comparison.measured.step - saved})


def _slowest_stage(placement: Placement, part_seconds: Sequence[float]) -> float:
    return max(
        sum(part_seconds[part] for part in placement.parts_of(stage))
        for stage in range(placement.stages)
    )


def next_layout(
    rows: Sequence[Estimate],
    history: History,
    *,
    present_seconds: float,
    steps_left: int,
    moving_seconds: float,
) -> Estimate | None:
    """The layout to continue with; None to stay.

    Args:
        rows: The other layouts, with the seconds that are expected of them.
        history: What the run has trained with.
        present_seconds: The measured seconds of a step.
        steps_left: Optimizer steps until the end of the run.
        moving_seconds: What saving, starting the workers again and loading take.
    """
    if history.is_final:
        return None
    possible = [row for row in rows if layout_name(row) not in history.refused]
    if history.tries_no_more:
        possible = [row for row in possible if layout_name(row) in history.seconds]
    if not possible:
        return None
    best = ranked(possible)[0]
    stay_seconds = steps_left * present_seconds
    move_seconds = steps_left * best.step_seconds + moving_seconds
    return best if stay_seconds >= (1 + GAIN) * move_seconds else None
