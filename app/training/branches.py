"""Branches of a run that decides on its batch (train.batch_schedule=auto): trained, then compared.

batch_growth.py says when two branches begin and which is taken over. Here the loop trains them, one
after the other from the same state, and continues from the end of the better one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from app.checkpoint.ranks import Ranks
from app.config.batch_schedule import BatchSchedule
from app.errors import NonFiniteError
from app.training import hooks
from app.training.batch_growth import (
    Branch,
    BranchPoint,
    Decision,
    Growth,
    Position,
    compare,
    is_as_good,
    pairs_of,
)
from app.training.process import collect_garbage
from app.training.snapshot import Snapshot

if TYPE_CHECKING:
    from app.training.loop import Training


class Branches:
    """Chooses the global batch of a run, by branches of it.

    Args:
        training: The run, whose batch and steps are set to what was decided before.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        config = training.config
        growth = Growth.of(
            batch=config.train.global_batch_size,
            steps=training.job.steps,
            warmup_steps=config.schedule.warmup_steps,
        )
        self._apply(replace(growth, decisions=training.progress.decisions))

    def point(self) -> BranchPoint | None:
        """The branches that begin at the step just taken; None if none do."""
        return self.growth.point_at(self.training.progress.samples_seen)

    def steps_until_next(self) -> int:
        """The steps until the next branches begin, or else until the run ends."""
        training = self.training
        samples = training.progress.samples_seen
        steps_left = training.steps - training.steps_done
        point = self.growth.next_point(samples)
        if point is None:
            return steps_left
        return min(steps_left, training.global_batches.steps_until(point, start=samples))

    def curve_point(self, batch: int) -> hooks.CurvePoint:
        """Where the schedule of the rate is in the next step.

        Args:
            batch: Its global batch.
        """
        training = self.training
        samples = training.progress.samples_seen
        return hooks.CurvePoint(
            step=self.growth.step_on_curve(samples, batch),
            steps=training.config.schedule.steps or training.job.steps,
            batch_size=batch,
        )

    def train(self, point: BranchPoint) -> bool:
        """Train two branches from here, and continue from the end of the better one.

        The checkpoint of this step is committed before anything of it is given up, and the one
        after the branches knows the decision. So a run that is killed between them trains the
        branches again, and decides the same.

        Args:
            point: From `point`.

        Returns:
            Whether the run is to stop. Then the branches are forgotten.
        """
        training = self.training
        start = training.progress.position
        training.warn(
            f"at {point.samples:,} samples: trying a batch of {2 * point.batch:,} beside "
            f"{point.batch:,}, over the next {point.window:,} samples"
        )
        # Beside the state that is trained, one copy is needed: of where the branches begin, and
        # while the second one is trained, of the end of the first.
        snapshot = Snapshot(
            training.parallel, training.optimizer, training.loss_scale, training.average
        )
        doubled = self._train_branch(2 * point.batch, point.window)
        snapshot.swap()
        training.progress.position = start
        if not doubled.stopped:
            training.heartbeat.phase = "saving"
            training.persistence.finish(training.progress)
            training.heartbeat.phase = "training"
            same = self._train_branch(point.batch, point.window)
            if not same.stopped:
                self._decide(point, start, same=same, doubled=doubled, snapshot=snapshot)
                return False
            training.progress.position = start
        self._apply(self.growth)
        training.restart_sync()
        return True

    def _train_branch(self, batch: int, window: int) -> Branch:
        """Take the steps of a branch.

        Args:
            batch: Its global batch.
            window: Its samples.
        """
        training = self.training
        training.global_batches = BatchSchedule.constant(batch)
        training.restart_sync()
        branch = Branch(end=training.progress.position)
        steps = window // batch
        last_step = training.steps_done + steps
        batches = training.batches(steps)
        with self._in_branch():
            training.sync.restart_clock()
            try:
                while training.steps_done < last_step and not branch.stopped:
                    training.step(training.next_batches(batches))
                    step = training.steps_done
                    if step == last_step or training.sync.is_due(step):
                        self._agree(branch)
            except NonFiniteError as error:
                branch.diverged = error
            finally:
                getattr(batches, "close", lambda: None)()
        branch.end = training.progress.position
        return branch

    @contextmanager
    def _in_branch(self) -> Iterator[None]:
        """Log every step, and count none as progress, since a branch may be dropped."""
        self.training.in_branch = True
        try:
            yield
        finally:
            self.training.in_branch = False

    def _agree(self, branch: Branch) -> None:
        """Agree with the other ranks on the losses of a branch, and on whether the run stops."""
        training = self.training
        agreed = training.sync.agree(
            training.steps_done,
            stop=training.channel.stop_requested(),
            save=False,  # the checkpoint of where the branches begin is there
            may_be_infinite=training.loss_scale.enabled,
        )
        branch.agreements.append(agreed)
        branch.stopped = agreed.stop
        collect_garbage()

    def _decide(
        self,
        point: BranchPoint,
        start: Position,
        *,
        same: Branch,
        doubled: Branch,
        snapshot: Snapshot,
    ) -> None:
        """Compare the branches, and take over the better one.

        Args:
            point: Where they begin.
            start: Likewise.
            same: The branch with the batch, whose end is the present state.
            doubled: The branch with twice the batch.
            snapshot: The state at its end.

        Raises:
            NonFiniteError: Both have diverged.
        """
        training = self.training
        if same.diverged is not None and doubled.diverged is not None:
            raise same.diverged
        difference = compare(same.losses, doubled.losses)
        # The numbers are the same on all ranks; the first one decides all the same.
        takes_doubled = Ranks().from_first(is_as_good(difference))
        taken, dropped = (doubled, same) if takes_doubled else (same, doubled)
        decision = Decision(
            samples=point.samples,
            batch=point.batch,
            window=point.window,
            difference=difference.mean,
            error=difference.error,
            doubled=takes_doubled,
            dropped_steps=sum(agreed.steps for agreed in dropped.agreements),
            dropped_seconds=sum(agreed.seconds for agreed in dropped.agreements),
        )
        if takes_doubled:
            snapshot.swap()
        training.progress.position = start
        self._apply(replace(self.growth, decisions=(*self.growth.decisions, decision)))
        training.warn(decision.sentence)
        self._take_over(taken)
        self._log_losses(start, same, doubled, decision)
        every = training.config.train.eval_every
        if every and training.steps_done // every > start.step // every:
            training.evaluate()
        training.save()
        training.persistence.check()
        training.restart_sync()

    def _apply(self, growth: Growth) -> None:
        """Take what was decided: the batch from now on, and the steps that are left."""
        training = self.training
        self.growth = growth
        training.progress.decisions = growth.decisions
        training.global_batches = growth.batches
        steps_left = growth.steps_left(training.progress.samples_seen)
        training.steps = training.steps_done + steps_left
        training.reporter.follow(training.global_batches, training.steps)

    def _take_over(self, taken: Branch) -> None:
        """Report the steps of the branch that was taken over, and go to its end."""
        training = self.training
        progress = training.progress
        for agreed in taken.agreements:
            batch = training.global_batches.batch_at(progress.samples_seen)
            progress.step += agreed.steps
            progress.samples_seen += agreed.steps * batch
            due = [entry for entry in agreed.logged if training.is_logged(entry.step)]
            training.report_steps(replace(agreed, logged=due))
        progress.position = taken.end
        training.heartbeat.step = training.steps_done

    def _log_losses(
        self, start: Position, same: Branch, doubled: Branch, decision: Decision
    ) -> None:
        """Log the losses of both branches by step of the larger batch, and their difference."""
        training = self.training
        if same.diverged is None and doubled.diverged is None:
            pairs = pairs_of(same.losses, doubled.losses)
            for number, (of_same, of_doubled) in enumerate(pairs, start=start.step + 1):
                values = {"batch/loss_same": of_same, "batch/loss_doubled": of_doubled}
                training.reporter.log(number, values)
            training.log({"batch/difference": decision.difference, "batch/error": decision.error})
