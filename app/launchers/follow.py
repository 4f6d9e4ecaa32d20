"""Comparing a run with its plan: what is reported, kept and changed (`plan.follow`).

plan.json in the run's folder remembers with which layouts the run has trained, so that a start that
follows a killed one continues with the layout to which it was moving.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.errors import UserError
from app.launchers.elastic import Elastic
from app.launchers.followed import FILE, read_record
from app.planner.corrections import Comparison, keep_correction, planned_parts
from app.planner.estimate import Estimate
from app.planner.follow import (
    History,
    expected_layouts,
    layout_name,
    next_layout,
    rebalanced_stages,
)
from app.planner.plan import Plan
from app.run.driver import Driver
from app.run.prepare import Prepared
from app.training.events import StepPartsMeasured
from app.training.job import Job
from strategies.layout import LayoutError


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change to another layout.

    Args:
        key: The layout, as `Candidate.key` names it.
        stages: The number of blocks of each part of its pipeline; empty for the plan's.
        name: The layout, as `layout_name` names it.
        sentence: Why, for a person.
    """

    key: str
    stages: tuple[int, ...]
    name: str
    sentence: str


class PlanFollower:
    """Compares each layout of a run with its plan, once.

    Args:
        driver: Of the run.
        prepared: What the run starts with.
        elastic: Prepares other layouts; None if workers cannot be started again.
        preparing_seconds: What preparing the run has taken.
    """

    def __init__(
        self,
        driver: Driver,
        prepared: Prepared,
        elastic: Elastic | None = None,
        *,
        preparing_seconds: float = 0.0,
    ) -> None:
        self.driver = driver
        self.prepared = prepared
        self.elastic = elastic
        self.preparing_seconds = preparing_seconds
        self.move_seconds = 0.0
        """What the last move has taken, from the decision to the first step; 0 without one."""
        self._decided_clock: float | None = None
        """When the move that is under way was decided; None if there is none."""
        self._record: dict[str, Any] = read_record(driver.run.storage)
        self._moves: list[str] = list(self._record.get("moves", []))
        """The moves of all starts, as sentences."""
        self.history = History(
            path=list(self._record.get("path", [])),
            seconds=dict(self._record.get("seconds", {})),
            refused=list(self._record.get("refused", [])),
        )

    @property
    def _planned(self) -> tuple[Plan, Estimate] | None:
        """The plan, and the layout that was chosen; None without a plan."""
        if self.prepared.plan is None or self.prepared.prediction is None:
            return None
        return self.prepared.plan, self.prepared.prediction

    def wants_parts(self) -> bool:
        """Whether the present layout has a plan and was not measured yet."""
        if self._planned is None:
            return False
        _, present = self._planned
        return layout_name(present) not in self.history.seconds

    def first_step_done(self) -> None:
        """Notes that the workers of an attempt have taken their first step."""
        if self._decided_clock is not None:
            self.move_seconds = time.monotonic() - self._decided_clock
            self._decided_clock = None

    def compare(self, job: Job, event: StepPartsMeasured, *, start_seconds: float) -> Move | None:
        """Compares a measured step with the plan.

        Args:
            job: What is trained.
            event: What was measured.
            start_seconds: From the start of the workers to their first step.

        Returns:
            The layout to continue with, if the run follows its plan and another one is worth it.
        """
        if self._planned is None:
            return None
        plan, present = self._planned
        name = layout_name(present)
        comparison = Comparison(
            planned=planned_parts(present.seconds),
            measured=event.parts,
            speed_range=present.speed_range,
        )
        self.history.seconds[name] = event.parts.step
        if not self.history.path:
            self.history.path.append(name)
        self._save()
        self.driver.plan_compared(event.step, comparison.metrics())
        if not comparison.is_inside:
            kept = self._keep_correction(plan, present, comparison)
            self.driver.note(f"{comparison.sentence}{kept}")
        if not job.config.plan.follow or self.elastic is None:
            return None
        rows = [] if comparison.is_inside else self._other_layouts(plan, present, comparison)
        if event.blocks is not None:
            row = rebalanced_stages(plan, present, comparison, event.blocks)
            rows += [] if row is None else [row]
        moving_seconds = self.move_seconds or self.preparing_seconds + start_seconds
        steps_left = job.steps - event.step
        chosen = next_layout(
            rows,
            self.history,
            present_seconds=event.parts.step,
            steps_left=steps_left,
            moving_seconds=moving_seconds,
        )
        if chosen is None:
            return None
        move = self._decide(
            chosen, comparison, steps_left=steps_left, moving_seconds=moving_seconds
        )
        self._moves.append(f"after step {event.step:,}: {move.sentence}")
        self._save()
        self.driver.move_decided(event.step, self._moves)
        return move

    def _other_layouts(
        self, plan: Plan, present: Estimate, comparison: Comparison
    ) -> list[Estimate]:
        assert self.elastic is not None
        rows = expected_layouts(plan, present, comparison, self.history)
        return [row for row in rows if row.candidate.dims.pp == 1 or self.elastic.has_stages]

    def _keep_correction(self, plan: Plan, present: Estimate, comparison: Comparison) -> str:
        """Keeps what was measured for later plans; the end of a sentence about it."""
        precision = present.candidate.precision
        try:
            keep_correction(
                plan.machine.device.gpu.name,
                comparison,
                plan.estimator.correction(precision),
                parameters=plan.reader.parameters,
                precision=precision,
                run=self.driver.run.manifest.name,
            )
        except (OSError, UserError) as error:
            return f" (not kept for later plans: {error})"
        return "; later plans of such models on this machine are corrected by it"

    def _decide(
        self, chosen: Estimate, comparison: Comparison, *, steps_left: int, moving_seconds: float
    ) -> Move:
        name = layout_name(chosen)
        seconds = comparison.measured.step
        saved = steps_left * (seconds - chosen.step_seconds) - moving_seconds
        move = Move(
            key=chosen.candidate.key,
            stages=chosen.stages or (),
            name=name,
            sentence=(
                f"following the plan: {name} is expected to take {chosen.step_seconds:.3g} s per "
                f"step instead of {seconds:.3g} s; over {steps_left:,} steps that saves "
                f"{saved:.3g} s, with {moving_seconds:.2g} s for the move"
            ),
        )
        self.history.path.append(name)
        self._record |= {"key": move.key, "stages": list(move.stages)}
        self._decided_clock = time.monotonic()
        return move

    def continue_with(self, prepared: Prepared) -> None:
        """Notes that the run continues with a layout that was not chosen here."""
        self.prepared = prepared
        self._decided_clock = None
        if self._planned is not None and self.history.path:
            _, present = self._planned
            self.history.path[-1] = layout_name(present)
            self._record |= {"key": present.candidate.key, "stages": list(present.stages or ())}
            self._save()

    def take(self, workers: int, move: Move) -> Prepared:
        """Prepares the run for the layout of a move.

        Args:
            workers: How many there are.
            move: The move.

        Raises:
            UserError: The layout cannot train the model after all, and the run stays as it was.
        """
        assert self.elastic is not None
        try:
            prepared = self.elastic.take_layout(workers, move.key, move.stages)
        except (UserError, LayoutError) as error:
            self._refuse(move)
            raise UserError(f"{move.name} cannot train this model: {error}") from error
        self.prepared = prepared
        return prepared

    def _refuse(self, move: Move) -> None:
        self.history.path.pop()
        self._moves.pop()
        self.driver.move_decided(self.driver.step, self._moves)
        self.history.refused.append(move.name)
        self._record |= {"key": "", "stages": []}
        if self._planned is not None and len(self.history.path) > 1:
            _, present = self._planned
            self._record |= {"key": present.candidate.key, "stages": list(present.stages or ())}
        self._decided_clock = None
        self._save()

    def _save(self) -> None:
        self._record |= {**asdict(self.history), "moves": self._moves}
        # A record that is lost costs a measurement, not a run.
        with contextlib.suppress(OSError):
            self.driver.run.storage.write_bytes(FILE, _as_bytes(self._record))


def _as_bytes(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()
