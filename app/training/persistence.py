"""What a training saves: checkpoints, from which it continues, and the trained weights."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from app import checkpoint
from app.checkpoint import FROZEN, Checkpointer, CheckpointError, Commit, evaluations
from app.checkpoint.commit import Mode, find_together
from app.checkpoint.evaluations import PLAN, Plan
from app.checkpoint.ranks import Ranks
from app.data.mixture import ORDER_VERSION, SEED_PLUS_NUMBER
from app.errors import NonFiniteError, RunFailed, UserError, of_file
from app.storage.lease import is_current, read_lease
from app.storage.storage import Storage
from app.tasks.sources import change_note, length_note
from app.training.average import Average
from app.training.batch_growth import Decision, Position
from app.training.evaluation import evaluation_batch_size
from app.training.events import CheckpointSaved, MetricsLogged, WarningIssued
from app.training.hooks import Beginning, base_rate
from app.training.job import Channel, Job, Place
from app.training.optimizer import LossScale
from strategies.parallelize import Parallel

FIRST_SECONDS = 60.0  # until the first save, if the interval is measured
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts to save the last checkpoint
STORAGE_SECONDS = 600.0  # for which a start waits for its storage
STORAGE_POLL_SECONDS = 0.5
EVENTS = 2000  # metric events in a checkpoint, so that a driver that is killed loses none


@dataclass(kw_only=True)
class Progress:
    """How far a run is: what a checkpoint has besides the weights and the optimizer's state."""

    step: int = 0
    """Optimizer steps taken."""
    samples_seen: int = 0
    """Position in the run's stream of samples."""
    order_version: int = ORDER_VERSION
    """How the sets of a mixture are shuffled, which stays as it was when the run began."""
    stream: str = ""
    """Where data that is a stream continues; see app/data/stream.py."""
    beginning: Beginning | None = None
    """Where a fork began; None if the run is no fork."""
    decisions: tuple[Decision, ...] = ()
    """What a run that decides on its batch has decided."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each evaluation, for ending early."""
    ended: bool = False
    """Whether training has ended before its last step."""
    latest: dict[str, float] = field(default_factory=dict)
    """The newest value of every metric."""
    events: list[str] = field(default_factory=list)
    """On rank 0: metric events as JSON, the newest last."""

    @property
    def position(self) -> Position:
        return Position(step=self.step, samples_seen=self.samples_seen, stream=self.stream)

    @position.setter
    def position(self, position: Position) -> None:
        self.step = position.step
        self.samples_seen = position.samples_seen
        self.stream = position.stream

    def remember(self, event: MetricsLogged, rank: int) -> None:
        """Keep the metrics of an event for the next checkpoint."""
        self.latest |= event.values
        if rank == 0:
            # A save writes and reads markers several times; objects take ten times as long as text.
            self.events.append(event.to_json())
            if len(self.events) > 2 * EVENTS:
                del self.events[:-EVENTS]


class Persistence:
    """Saves and loads the state of a training. Every rank has one, and calls each method alike.

    Args:
        job: What is trained, and where its folder is.
        place: This rank's place.
        channel: To the driver.
        parallel: The model under its layout.
        optimizer: The run's.
        loss_scale: Of fp16; saved too.
        average: The moving average of the weights; saved too.
        reference: What the loss knows of the model before its first step (reference.py).
    """

    def __init__(
        self,
        *,
        job: Job,
        place: Place,
        channel: Channel,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        average: Average | None,
        reference: dict[str, torch.Tensor],
    ) -> None:
        self.job = job
        self.place = place
        self.channel = channel
        self.parallel = parallel
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.average = average
        self.reference = reference
        config = job.config.checkpoint
        mode: Mode = "max" if config.mode == "max" else "min"
        self.checkpointer = Checkpointer(
            job.checkpoints,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            mode=mode,
            metric=config.metric,
            keeps_waiting=job.config.train.eval_separate,
            attempt=job.attempt,
            fence=self._is_current,
        )
        named = parallel.inner.named_parameters(remove_duplicate=False)
        self.frozen = {name for name, parameter in named if not parameter.requires_grad}
        self.frozen_saved = False
        self.frozen_checkpointer: Checkpointer | None = None
        (some_are_frozen,) = Ranks().any(bool(self.frozen))
        if some_are_frozen:  # every stage of a pipeline makes one, or none does
            self.frozen_checkpointer = Checkpointer(
                f"{job.checkpoints}/{FROZEN}",
                keep_last=1,
                attempt=job.attempt,
                fence=self._is_current,
            )
        self.saved_step = -1
        self.saved_at = time.monotonic()
        self.last_warning = ""
        self.longest_stall: float | None = None
        """The most seconds that a save of this start has held up training; None without one."""

    def _is_current(self) -> bool:
        return is_current(self.job.folder, self.job.attempt)

    # --- when to save -----------------------------------------------------------------------------

    def is_overdue(self) -> bool:
        """Whether a checkpoint is due by time."""
        seconds = self.interval()
        return seconds is not None and time.monotonic() - self.saved_at >= seconds

    def interval(self) -> float | None:
        """Seconds from one save to the next; None if no save is due by time."""
        config = self.job.config.checkpoint
        if not config.auto:
            return config.every_seconds
        if self.longest_stall is None:
            return FIRST_SECONDS
        self.longest_stall = max(self.longest_stall, self.checkpointer.last_stall_seconds)
        return checkpoint_interval(
            self.longest_stall, self.checkpointer.last_total_seconds, self.job.mtbf_seconds
        )

    # --- saving -----------------------------------------------------------------------------------

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint of the step just taken; training continues while it is written.

        Args:
            progress: How far the run is.

        Raises:
            NonFiniteError: A weight is not finite. Nothing was saved.
            CheckpointError: Another start has taken over, or a rank is gone.
        """
        if self.saved_step == progress.step:
            return
        state = self._state()
        if self.frozen_checkpointer is not None:
            state["model"] = self._without_frozen(self.frozen_checkpointer, state["model"])
        metric = None
        if not self.job.config.train.eval_separate:  # whose results come later
            metric = progress.latest.get(f"eval/{self.job.config.checkpoint.metric}")
        self._begin(
            partial(
                self.checkpointer.save,
                state,
                meta=self._meta(progress),
                metric=metric,
                finite=are_finite(self.parallel.parameters()),
            ),
            progress.step,
        )
        self.saved_step = progress.step
        self.saved_at = time.monotonic()
        stall = self.checkpointer.last_stall_seconds
        self.longest_stall = max(stall, self.longest_stall or 0.0)
        self.channel.emit(
            CheckpointSaved(
                step=progress.step,
                stall_seconds=stall,
                # This save continues in the background, so only the one before has a total.
                previous_seconds=self.checkpointer.last_total_seconds,
                interval_seconds=self.interval() if self.job.config.checkpoint.auto else None,
            )
        )

    def _begin(self, save: Callable[[], None], step: int) -> None:
        try:
            try:
                save()
            except CheckpointError as error:  # of the save before, on all ranks: nothing was begun
                self._warn(error)
                save()
        except checkpoint.NotFinite:
            raise NonFiniteError(
                f"a weight was not finite after step {step}; the last good checkpoint is intact: "
                "try a lower optimizer.lr, a longer schedule.warmup_steps or train.clip_norm=1.0"
            ) from None

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self.parallel.model_state(),
            "optimizer": self.parallel.optimizer_state(self.optimizer),
        }
        if self.average is not None:
            state["ema"] = self.average.values
        if self.reference:
            state["reference"] = self.reference
        return state

    def _meta(self, progress: Progress) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "order_version": progress.order_version,
            "stream": progress.stream,
            "rate": base_rate(self.optimizer, self.job.config),
            "beginning": progress.beginning,
            "decisions": [decision.to_meta() for decision in progress.decisions],
            "evaluations": progress.evaluations,
            "ended": progress.ended,
            "run_uid": self.job.run_uid,
            "loss_scale": self.loss_scale.state(),
            "layout": str(self.job.layout),
            "latest": progress.latest,
            "events": progress.events[-EVENTS:],
            FROZEN: self.frozen_saved,
            "sources": self.job.sources,
            "samples": self.job.samples,
        }
        if self._is_evaluated_separately(progress):
            train = self.job.config.train
            dp = self.job.layout.dims.dp
            plan = Plan(batch_size=evaluation_batch_size(train, dp), shares=dp)
            meta[PLAN] = plan.to_meta()
        return meta

    def _is_evaluated_separately(self, progress: Progress) -> bool:
        """Whether the checkpoint of this step is evaluated beside training: as often as in it."""
        train = self.job.config.train
        is_due = bool(train.eval_every) and progress.step % (train.eval_every or 1) == 0
        is_last = progress.step == self.job.steps or progress.ended
        return train.eval_separate and (is_due or is_last)

    def is_ended_by_evaluations(self) -> bool:
        """Whether the results of evaluations beside training end it early. Collective."""
        ended = False
        if self.place.rank == 0:
            with contextlib.suppress(OSError):  # the storage is away: then this is a plain stop
                ended = evaluations.read(self.job.checkpoints).ended
        return Ranks().from_first(ended)

    def _without_frozen(self, checkpointer: Checkpointer, model: dict[str, Any]) -> dict[str, Any]:
        """The weights that a checkpoint still needs once the frozen ones are saved, which is here.

        If the frozen weights cannot be saved, the checkpoint needs all weights.
        """
        if not self.frozen_saved:
            frozen = {name: model[name] for name in self.frozen}
            try:
                checkpointer.save({"model": frozen}, meta={"step": 0})
                checkpointer.close()  # they are saved once, so their copy is not needed again
            except CheckpointError as error:
                self._warn(error)
                return model
            self.frozen_saved = True
        return {name: value for name, value in model.items() if name not in self.frozen}

    def check(self) -> None:
        """Warn if the last checkpoint could not be written, because the disk is full for example.

        Training continues, and the next checkpoint is tried when it is due.

        Raises:
            CheckpointError: Another start of the run has taken over.
        """
        try:
            self.checkpointer.check()
        except CheckpointError as error:
            self._warn(error)

    def finish(self, progress: Progress) -> None:
        """Wait for the last checkpoint of this start.

        If it fails it is tried again for half a minute, since no other checkpoint follows it.

        Args:
            progress: How far the run is.

        Raises:
            CheckpointError: It failed every time, or another start of the run has taken over.
        """
        for seconds in RETRY_SECONDS:
            try:
                self.checkpointer.wait()
                return
            except CheckpointError as error:
                self._warn(error)
            time.sleep(seconds)
            self.saved_step = -1
            self.save(progress)
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            if error.superseded:
                raise
            room = self._room(error)
            again = "; run the same command again when this is mended"
            raise CheckpointError(f"{error}{room}{again}") from error

    def _warn(self, error: CheckpointError) -> None:
        if error.superseded:
            raise error
        message = str(error)
        if self.place.rank == 0 and message != self.last_warning:
            consequence = "training continues, and the next one is tried when it is due"
            self.channel.emit(WarningIssued(message=f"{error}{self._room(error)}; {consequence}"))
        self.last_warning = message

    def _room(self, error: CheckpointError) -> str:
        """The words about a full disk, which are not in the error: all ranks raise the same one."""
        words = Storage(self.job.checkpoints).room(str(error))
        return f"; {words}" if words else ""

    def keep_weights(self) -> None:
        """Write all trained weights, under plain names, into one file for MLflow's model.

        No checkpoint follows, so the memory of the copies for checkpoints is freed first: beside
        one whole copy on rank 0 the host needs none.
        """
        if not self.job.config.checkpoint.weights:
            return
        self.checkpointer.close()
        state = self.parallel.full_model_state()
        if self.place.rank == 0:
            try:
                with Storage(self.job.folder).writing("model/weights.pt") as file:
                    torch.save(state, file)
            except OSError as error:
                sentence = of_file(error)
                if not sentence:
                    raise  # another try may succeed
                raise RunFailed(
                    f"{sentence}; the checkpoint is whole, and the same command writes the weights"
                ) from error

    def close(self) -> None:
        """Wait for the save under way, and free its memory."""
        if self.frozen_checkpointer is not None:
            self.frozen_checkpointer.close()
        self.checkpointer.close()

    # --- loading ----------------------------------------------------------------------------------

    def resume(self, progress: Progress) -> int | None:
        """Continue from the newest good checkpoint of this run.

        Args:
            progress: Set to that of the checkpoint.

        Returns:
            The step of the checkpoint; None if the run has none and does not continue another
            one's. Then the weights of `checkpoint.load` are loaded, if it is set.

        Raises:
            UserError: The run has checkpoints, but all are damaged; or `checkpoint.load` is not
                the path of a checkpoint.
        """
        self._wait_for_storage()
        commit, damaged = checkpoint.latest_good(self.job.checkpoints)
        if self.place.rank == 0:
            checkpoint.sweep(self.job.checkpoints)  # what a start that was killed left unfinished
            for message in damaged:
                self.channel.emit(WarningIssued(message=message))
        if commit is not None:
            self._load(commit, progress)
            # A driver that was killed may not have sent these; the tracker drops those that it has.
            for text in commit.meta["events"]:
                self.channel.emit(MetricsLogged.from_json(text))
            return progress.step
        if damaged:
            raise UserError(
                f"{damaged[0]}; no other checkpoint is undamaged: "
                f"remove {self.job.checkpoints} to start anew"
            )
        if self.job.fork:
            self._continue_other_run(progress)
            return progress.step
        self._load_weights(self.job.config.checkpoint.load)
        return None

    def _wait_for_storage(self) -> None:
        """Wait until the run's folder is there, which has the driver's lease.

        A start that does not see the storage would find no checkpoint, and begin anew.

        Raises:
            UserError: The storage has not come back for `STORAGE_SECONDS`.
        """
        deadline = time.monotonic() + STORAGE_SECONDS
        has_warned = False
        while self.job.leased and read_lease(Storage(self.job.folder)) is None:
            problem = f"the storage {self.job.folder} cannot be reached"
            if time.monotonic() > deadline:
                raise UserError(f"{problem}: run the same command again when it is back")
            if not has_warned:
                self.channel.emit(WarningIssued(message=f"{problem}: waiting for it"))
                has_warned = True
            time.sleep(STORAGE_POLL_SECONDS)

    def _load(self, commit: Commit, progress: Progress) -> None:
        state = self._state()
        checkpoint.load(commit, state)
        self.parallel.load_model_state(state["model"])
        self.parallel.load_optimizer_state(self.optimizer, state["optimizer"])
        meta = commit.meta
        self.loss_scale.load_state(meta["loss_scale"])
        self.frozen_saved = bool(meta.get(FROZEN))
        self.saved_step = meta["step"]
        progress.step = meta["step"]
        progress.samples_seen = meta["samples_seen"]
        progress.order_version = meta.get("order_version", SEED_PLUS_NUMBER)
        progress.stream = meta.get("stream", "")
        beginning = meta.get("beginning")
        progress.beginning = Beginning(*beginning) if beginning else None
        progress.decisions = tuple(Decision(**each) for each in meta.get("decisions", []))
        progress.evaluations = meta.get("evaluations", [])
        progress.ended = meta.get("ended", False)
        progress.latest = dict(meta["latest"])
        progress.events = meta["events"] if self.place.rank == 0 else []
        for changed in (
            change_note(meta.get("sources"), self.job.sources, progress.step),
            length_note(meta.get("samples"), self.job.samples, progress.step),
        ):
            if changed and self.place.rank == 0:
                self.channel.emit(WarningIssued(message=changed))

    def _continue_other_run(self, progress: Progress) -> None:
        """Take over the whole state of another run's checkpoint, as the beginning of this run.

        What the other run has logged is not taken over, nor are its decisions on the batch if this
        run begins with another one.
        """
        commit = self._find(self.job.fork)
        self._load(commit, progress)
        rate = commit.meta.get("rate")
        progress.beginning = None if rate is None else Beginning(progress.samples_seen, rate)
        self.frozen_saved = False
        self.saved_step = -1
        first_batch = self.job.config.train.global_batch_size
        if progress.decisions and progress.decisions[0].batch != first_batch:
            progress.decisions = ()
        progress.ended = False
        progress.events = []

    def _find(self, path: str) -> Commit:
        """The checkpoint that a path means, as rank 0 finds it."""
        commit = find_together(lambda: checkpoint.find(path), Ranks())
        assert commit is not None
        return commit

    def _load_weights(self, path: str | None) -> None:
        if not path:
            return
        state = {"model": self.parallel.model_state()}
        checkpoint.load(self._find(path), state)
        self.parallel.load_model_state(state["model"])


class NullPersistence(Persistence):
    """Saves and loads nothing, for measurements and tests; takes the arguments of `Persistence`."""

    def __init__(self, **_: object) -> None:
        """Needs none of them."""

    def is_overdue(self) -> bool:
        return False

    def save(self, progress: Progress) -> None: ...

    def check(self) -> None: ...

    def finish(self, progress: Progress) -> None: ...

    def keep_weights(self) -> None: ...

    def resume(self, progress: Progress) -> int | None:
        return None

    def close(self) -> None: ...

    def is_ended_by_evaluations(self) -> bool:
        return False


def are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether every number in the parameters' parts on this rank is finite."""
    floating = [p for p in parameters if p.is_floating_point() or p.is_complex()]
    local = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in floating]
    largest = torch.nn.utils.get_total_norm((p for p in local if p.numel()), float("inf"))
    return bool(torch.isfinite(largest))


def checkpoint_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds between two checkpoints that lose the least time.

    It is Young's formula (1974) with the next terms of Daly's (2006).

    Args:
        stall: Seconds that a save holds up training.
        write: Seconds until a save is committed in the background. The next one begins only then.
        mtbf: Mean seconds between failures.
    """
    if stall >= 2 * mtbf:
        return max(write, mtbf)
    ratio = math.sqrt(stall / (2 * mtbf))
    best = math.sqrt(2 * stall * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - stall
    return max(write, best)
