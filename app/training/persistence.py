"""What a training process saves: checkpoints, how to continue from them, and the trained weights."""

import io
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from app import checkpoint
from app.checkpoint import FROZEN, Checkpointer, CheckpointError
from app.checkpoint.commit import Mode
from app.checkpoint.ranks import Ranks
from app.errors import NonFiniteError, UserError
from app.storage.lease import is_current, read_lease
from app.storage.storage import Storage
from app.tasks.sources import change_note
from app.training.events import CheckpointSaved, MetricsLogged, WarningIssued
from app.training.job import Channel, Job, Place
from app.training.optimizer import LossScale
from strategies.parallelize import Parallel

if TYPE_CHECKING:
    from app.training.average import Average

FIRST_SECONDS = 60.0  # until the first save, where the interval is measured
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # before the last checkpoint of a start is tried again
STORAGE_SECONDS = 600.0  # that a start waits for its storage
STORAGE_POLL_SECONDS = 0.5
EVENTS = 2000  # metric events saved with a checkpoint, so that a killed driver loses none


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds beside weights and optimizer state."""

    step: int = 0  # optimizer steps taken
    samples_seen: int = 0  # position in the stream of samples
    evaluations: list[dict[str, float]] = field(default_factory=list)  # the figures of each, for ending early
    ended: bool = False  # whether training has ended before its last step
    stream: str = ""  # where data that is a stream continues (app/data/stream.py)
    latest: dict[str, float] = field(default_factory=dict)  # the newest value of every metric
    events: list[str] = field(default_factory=list)  # rank 0: metric events as JSON, newest last

    def remember(self, event: MetricsLogged, rank: int) -> None:
        self.latest |= event.values
        # As text: markers are written and read several times in a save, and objects take ten times as long there.
        if rank == 0:
            self.events.append(event.to_json())
            if len(self.events) > 2 * EVENTS:
                del self.events[:-EVENTS]


class Persistence:
    """One object per training process; every rank calls each method alike."""

    def __init__(
        self,
        job: Job,
        place: Place,
        channel: Channel,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
    ) -> None:
        self.job, self.place, self.channel = job, place, channel
        self.parallel, self.optimizer, self.scale = parallel, optimizer, scale
        keep = job.config.checkpoint
        own: dict[str, Any] = {"attempt": job.attempt, "fence": lambda: is_current(job.folder, job.attempt)}
        mode: Mode = "max" if keep.mode == "max" else "min"
        kept: dict[str, Any] = {"keep_last": keep.keep_last, "keep_best": keep.keep_best, "mode": mode}
        self.checkpointer = Checkpointer(job.checkpoints, **kept, **own)
        named = parallel.inner.named_parameters(remove_duplicate=False)
        self.frozen = {name for name, parameter in named if not parameter.requires_grad}
        some = any(Ranks().all(bool(self.frozen)))  # of a pipeline, on any stage
        self.frozen_keeper = Checkpointer(f"{job.checkpoints}/{FROZEN}", keep_last=1, **own) if some else None
        self.frozen_saved = False
        self.average: Average | None = None  # of the weights, saved with them; the loop sets it
        self.saved, self.saved_at = -1, time.monotonic()
        self.last_warning = ""
        self.longest_stall: float | None = None  # seconds that a save of this start has held training up at most

    def overdue(self) -> bool:
        """Whether a checkpoint is due by time."""
        seconds = self.interval()
        return seconds is not None and time.monotonic() - self.saved_at >= seconds

    def interval(self) -> float | None:
        """Seconds from one save to the next; None: none by time."""
        keep = self.job.config.checkpoint
        if not keep.auto:
            return keep.every_seconds
        if self.longest_stall is None:
            return FIRST_SECONDS
        self.longest_stall = max(self.longest_stall, self.checkpointer.last_stall_seconds)
        return checkpoint_interval(self.longest_stall, self.checkpointer.last_total_seconds, self.job.mtbf_seconds)

    def save(self, progress: Progress) -> None:
        """Begins a checkpoint of the step just taken; training continues while it is written.

        Raises:
            NonFiniteError: a weight is not finite; nothing was saved.
            CheckpointError: another start has taken over, or a rank is gone.
        """
        if self.saved == progress.step:
            return
        state = self._state()
        if self.frozen_keeper is not None:
            state["model"] = self._without_frozen(self.frozen_keeper, state["model"])
        meta = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "stream": progress.stream,
            "evaluations": progress.evaluations,
            "ended": progress.ended,
            "run_uid": self.job.run_uid,
            "loss_scale": self.scale.state(),
            "layout": str(self.job.layout),
            "latest": progress.latest,
            "events": progress.events[-EVENTS:],
            FROZEN: self.frozen_saved,
            "sources": self.job.sources,
        }
        begin = partial(
            self.checkpointer.save,
            state,
            meta=meta,
            metric=progress.latest.get(f"eval/{self.job.config.checkpoint.metric}"),
            finite=are_finite(self.parallel.parameters()),
        )
        try:
            try:
                begin()
            except CheckpointError as error:  # the one before failed, on all ranks; nothing was begun
                self._warn(error)
                begin()
        except checkpoint.NotFinite:
            raise NonFiniteError(
                f"a weight was not finite after step {progress.step}; the last good checkpoint is intact: try a lower "
                "optimizer.lr, a longer schedule.warmup_steps or train.clip_norm=1.0"
            ) from None
        self.saved, self.saved_at = progress.step, time.monotonic()
        stall = self.checkpointer.last_stall_seconds
        self.longest_stall = max(stall, self.longest_stall or 0.0)
        self.channel.emit(
            CheckpointSaved(
                step=progress.step,
                stall_seconds=stall,
                # This one goes on in the background, so only the save before has a total.
                previous_seconds=self.checkpointer.last_total_seconds,
                interval_seconds=self.interval() if self.job.config.checkpoint.auto else None,
            )
        )

    def _without_frozen(self, keeper: Checkpointer, model: dict[str, Any]) -> dict[str, Any]:
        """What is left for a checkpoint of the weights when those that are not trained have been saved, which happens
        once, here; all of them where that fails."""
        if not self.frozen_saved:
            try:
                keeper.save({"model": {name: model[name] for name in self.frozen}}, meta={"step": 0})
                keeper.wait()
                self.frozen_saved = True
            except CheckpointError as error:
                self._warn(error)
                return model
        return {name: value for name, value in model.items() if name not in self.frozen}

    def check(self) -> None:
        """Says so if the last checkpoint could not be written (the disk is full, say): training continues, and the next
        one is tried when it is due. Raises CheckpointError if another start of the run has taken over."""
        try:
            self.checkpointer.check()
        except CheckpointError as error:
            self._warn(error)

    def finish(self, progress: Progress) -> None:
        """Waits for the last checkpoint of this start. One that fails is tried again for half a minute, since no other
        comes after it; then CheckpointError."""
        for pause in (*RETRY_SECONDS, None):
            try:
                return self.checkpointer.wait()
            except CheckpointError as error:
                if pause is None:
                    raise
                self._warn(error)
            time.sleep(pause)
            self.saved = -1
            self.save(progress)

    def _warn(self, error: CheckpointError) -> None:
        if error.superseded:
            raise error
        sentence = f"{error}; training continues, and the next one is tried when it is due"
        if self.place.rank == 0 and sentence != self.last_warning:
            self.channel.emit(WarningIssued(message=sentence))
        self.last_warning = sentence

    def resume(self, progress: Progress) -> int | None:
        """Continues from the newest good checkpoint of this run, if there is one; the step it continues after.

        Raises:
            UserError: no checkpoint is whole, though there are some; or checkpoint.load is none.
        """
        self._wait_for_storage()
        commit, damaged = checkpoint.latest_good(self.job.checkpoints)
        if self.place.rank == 0:
            checkpoint.sweep(self.job.checkpoints)  # what a killed start left half written
            for sentence in damaged:
                self.channel.emit(WarningIssued(message=sentence))
        if commit is None:
            if damaged:
                raise UserError(
                    f"{damaged[0]}; no other checkpoint is whole: remove {self.job.checkpoints} to start anew"
                )
            self._load_weights(self.job.config.checkpoint.load)
            return None
        state = self._state()
        checkpoint.load(commit, state)
        self.parallel.load_model_state(state["model"])
        self.parallel.load_optimizer_state(self.optimizer, state["optimizer"])
        meta = commit.meta
        progress.step, progress.samples_seen = meta["step"], meta["samples_seen"]
        progress.stream = meta.get("stream", "")
        progress.evaluations, progress.ended = meta.get("evaluations", []), meta.get("ended", False)
        changed = change_note(meta.get("sources"), self.job.sources, progress.step)
        if changed and self.place.rank == 0:
            self.channel.emit(WarningIssued(message=changed))
        self.saved, self.frozen_saved = progress.step, bool(meta.get(FROZEN))
        self.scale.load_state(meta["loss_scale"])
        progress.latest = dict(meta["latest"])
        for text in meta["events"]:  # the tracker drops those it has; a killed driver may not have sent them
            self.channel.emit(MetricsLogged.from_json(text))
        progress.events = meta["events"] if self.place.rank == 0 else []
        return progress.step

    def _wait_for_storage(self) -> None:
        """Otherwise a run whose storage cannot be reached would find no checkpoint, and begin anew.

        Raises:
            UserError: it has not come back for `STORAGE_SECONDS`.
        """
        until, warned = time.monotonic() + STORAGE_SECONDS, False
        while self.job.leased and read_lease(Storage(self.job.folder)) is None:
            if time.monotonic() > until:
                raise UserError(
                    f"the storage {self.job.folder} cannot be reached: run the same command again when it is back"
                )
            if not warned:
                sentence = f"the storage {self.job.folder} cannot be reached: waiting for it"
                self.channel.emit(WarningIssued(message=sentence))
            warned = True
            time.sleep(STORAGE_POLL_SECONDS)

    def _load_weights(self, path: str | None) -> None:
        if not path:
            return
        state = {"model": self.parallel.model_state()}
        checkpoint.load(checkpoint.find(path), state)
        self.parallel.load_model_state(state["model"])

    def keep_weights(self) -> None:
        """Writes the trained weights whole, under plain names, as one file; MLflow's model is made from it."""
        if not self.job.config.checkpoint.weights:
            return
        state = self.parallel.full_model_state()
        if self.place.rank == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            Storage(self.job.folder).write_bytes("model/weights.pt", buffer.getvalue())

    def _state(self) -> dict[str, Any]:
        state = {"model": self.parallel.model_state(), "optimizer": self.parallel.optimizer_state(self.optimizer)}
        return state | ({"ema": self.average.values} if self.average is not None else {})

    def close(self) -> None:
        if self.frozen_keeper is not None:
            self.frozen_keeper.close()
        self.checkpointer.close()


def are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether every parameter is a finite number on this rank."""
    local = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in parameters]
    greatest = torch.nn.utils.get_total_norm((p for p in local if p.numel()), float("inf"))
    return bool(torch.isfinite(greatest))


def checkpoint_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds between two checkpoints that lose least, by Young's formula (1974) with Daly's next terms (2006).

    stall: seconds that a save holds up training. write: seconds until it is committed in the background; one begins
    only when the one before has ended. mtbf: mean seconds between failures.
    """
    if stall >= 2 * mtbf:
        return max(write, mtbf)
    ratio = math.sqrt(stall / (2 * mtbf))
    best = math.sqrt(2 * stall * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - stall
    return max(write, best)
