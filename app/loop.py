"""The training loop. The same one runs in a TorchTrainer worker, under torchrun, and in a plain process.

It imports neither Ray nor MLflow: what it has to say goes to the `Channel` it is handed, which on all ranks but the
first says nothing. One optimizer step is `Training.step`; everything around it happens at a `Pulse`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from app.data.loader import fetch, rows, train_batches
from app.evaluation import evaluate
from app.heartbeat import Beat
from app.job import Channel, Job, Place, memory_bytes, options
from app.loss_scale import LossScale
from app.noise_scale import NoiseScale
from app.optimizer import build_optimizer, learning_rate, set_learning_rate
from app.persistence import Persistence, Progress
from app.pipeline_profile import StageProfile
from app.randomness import seed_everything, seed_step
from app.rebalance import Recut, let_go
from app.step_sync import Agreement, Pulse
from app.tasks import load_task
from strategies.cpu_collectives.allocator import keep_freed_memory
from strategies.parallelize import parallelize


def train(job: Job, place: Place, channel: Channel) -> dict[str, Any]:
    """Trains until `job.steps` or until asked to stop; returns rank 0's summary.

    Raises:
        NonFiniteError: the loss or gradient stopped being finite.
        UserError: the checkpoint to resume from, or the data, is not usable.
    """
    summary, better = _until_another_cut(job, place, channel, None)
    if better is not None:
        let_go()
        summary, _ = _until_another_cut(replace(job, stages=better), place, channel, summary)
    return summary


def _until_another_cut(
    job: Job, place: Place, channel: Channel, before: dict[str, Any] | None
) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """Trains to the end, or until a pipeline is to be cut otherwise; before: the summary of what led to this cut."""
    training = Training(job, place, channel)
    try:
        if before is None:
            training.recut = Recut.of(job, training.parallel, training.done)
        return training.run(before), training.better
    finally:
        training.close()


class Training:
    def __init__(self, job: Job, place: Place, channel: Channel) -> None:
        config = self.config = job.config
        self.job, self.place, self.channel = job, place, channel
        self.beat = Beat()
        channel.follow(self.beat)
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        if place.device.type == "cpu":
            keep_freed_memory()
        self.task = load_task(config.task, config.task_args)
        self.data = self.task.train_data()
        self.memory_before = memory_bytes(place.device)  # without a model

        def build() -> torch.nn.Module:
            seed_everything(config.train.seed)
            return self.task.build_model()

        self.parallel = parallelize(
            build,
            job.layout,
            replace(options(config, job.stages), float_output=self.task.float_output),
            device=place.device,
            blocks=self.task.blocks,
            tensor_plan=self.task.tensor_plan,
            example=(self.task.loss, fetch(self.data, [(0, 0)])) if job.layout.dims.pp > 1 else None,
        )
        self.optimizer = self.parallel.adopt(build_optimizer(config.optimizer, self.parallel.parameters()))
        self.scale = LossScale(config.train.precision == "fp16")
        self.dims = job.layout.dims
        self.data_rank = self.dims.data_rank(place.rank)
        self.kept = Persistence(job, place, channel, self.parallel, self.optimizer, self.scale)
        self.progress = Progress()
        self.items_per_sample = self._count_items()
        self.parameters = self._count_parameters()
        self.resumed_from = self.kept.resume(self.progress)
        self.noise = NoiseScale.of(self.parallel, config.train.noise_scale_every, config.train.global_batch_size)
        self.pulse = Pulse(place.rank, place.world_size, self.dims.tp, self.done + 1)
        self.profile = StageProfile.of(config, self.parallel, channel)
        self.recut: Recut | None = None
        self.better: tuple[int, ...] | None = None  # the cut that a pipeline is to go on with

    @property
    def done(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Trains; before: the summary of the same start with another cut, which this goes on from."""
        began = time.monotonic() - (before["seconds"] if before else 0.0)
        if before is None:
            self._announce()
        else:
            self.resumed_from = before["resumed_from"]
        stopped = False
        batches = self.batches()
        try:
            while self.done < self.job.steps and not stopped:
                stopped = self.advance(batches)
        finally:
            getattr(batches, "close", lambda: None)()
        self.beat.doing = "ending"
        if not stopped:
            self.kept.keep_weights()
        self.kept.finish(self.progress)
        return self._summary(stopped, time.monotonic() - began)

    def advance(self, batches: Iterator[list[Any]]) -> bool:
        """One step, and what is due after it; true when the run is to stop."""
        take: Callable[[], None] = partial(self._take, batches)
        if self.recut is not None:
            take = partial(self.recut.around, self.done + 1, take)
        if self.profile is not None:
            take = partial(self.profile.around, self.done + 1, take, self._metrics)
        take()
        return self._is_boundary() and self._boundary()

    def _take(self, batches: Iterator[list[Any]]) -> None:
        begun = self.beat.doing == "training"
        if begun:
            self.beat.doing = "reading"
        batch = next(batches)
        if begun:
            self.beat.doing = "training"
        self.step(batch)

    def step(self, micro_batches: list[Any]) -> None:
        """One optimizer step: the gradient's exact mean over the global batch, from micro-batches; the update."""
        config, parallel, task = self.config, self.parallel, self.task
        step = self.done + 1
        seed_step(config.train.seed, step, self.data_rank, self.place.device)
        batch = config.train.global_batch_size
        rate = learning_rate(config.optimizer, config.schedule, self.done, self.job.steps, batch)
        set_learning_rate(self.optimizer, rate)
        scale = self.scale.scale if self.scale.enabled else 1.0
        passes = self.noise if self.noise is not None and self.noise.due(step) else parallel
        loss = passes.forward_backward(micro_batches, self._shares(micro_batches), task.loss, scale)
        logged = self._is_logged(step)
        self.scale.unscale_(parallel.parameters())
        norm = None
        if logged or config.train.clip_norm is not None or self.scale.enabled:
            norm = parallel.grad_norm_(config.train.clip_norm)
        if self.scale.accepts(norm, step):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = self.beat.step = step
        self.progress.samples_seen += batch
        self.pulse.add(loss)
        if logged:
            self.pulse.log(step, rate, norm)

    def _shares(self, micro_batches: list[Any]) -> list[Any]:
        """Each micro-batch's part of the global batch's items; they sum to 1 over micro-batches and data ranks."""
        if self.task.items_vary:
            items = [self.task.items(batch) for batch in micro_batches]
            total = self.parallel.total(torch.as_tensor(sum(items), dtype=torch.float64, device=self.place.device))
            return [(torch.as_tensor(n, device=total.device) / total).float() for n in items]
        return [rows(batch) / self.config.train.global_batch_size for batch in micro_batches]

    def batches(self) -> Iterator[list[Any]]:
        config = self.config.train
        return train_batches(
            self.data,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            dp_rank=self.data_rank,
            dp_size=self.dims.dp,
            samples_seen=self.progress.samples_seen,
            steps=self.job.steps - self.done,
            device=self.place.device,
            data_workers=config.data_workers,
        )

    # --- between steps ------------------------------------------------------------------------------------------

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.config.train.log_every == 0 or step == self.job.steps

    def _is_boundary(self) -> bool:
        save, check = self.config.checkpoint.every_steps, self.config.train.eval_every
        scheduled = (save and self.done % save == 0) or (check and self.done % check == 0)
        measured = self.recut is not None and self.recut.due(self.done)
        return bool(scheduled) or measured or self.done == self.job.steps or self.pulse.due(self.done)

    def _boundary(self) -> bool:
        """Agrees with the other ranks on what happened and what to do now; true when the run is to stop."""
        config, step = self.config, self.done
        stop, save = self.channel.stop_requested(), self.kept.overdue() or self.beat.save
        self.beat.save = False
        agreed = self.pulse.agree(step, stop=stop, save=save, may_be_infinite=self.scale.enabled)
        self._report(agreed)
        if self.noise is not None and (found := self.noise.values()):
            self._metrics(step, found)
        last = step == self.job.steps
        if last or (config.train.eval_every and step % config.train.eval_every == 0):
            self._evaluate()
        if self.recut is not None and self.recut.due(step) and not agreed.stop:
            self.better = self.recut.decide(step, self.channel)
        stop_here = agreed.stop or self.better is not None
        every = config.checkpoint.every_steps
        if last or agreed.save or stop_here or (every and step % every == 0):
            self.beat.doing = "saving"
            self.kept.save(self.progress)
        self.kept.check()
        self.beat.doing = "training"
        return stop_here and not last

    def _report(self, agreed: Agreement) -> None:
        batch = self.config.train.global_batch_size
        rate = batch / agreed.seconds_per_step
        per_sample = self.items_per_sample
        for entry in agreed.logged:
            values = {"train/loss": entry.loss, "train/lr": entry.learning_rate}
            if entry.grad_norm is not None:
                values["train/grad_norm"] = entry.grad_norm
            if entry is agreed.logged[-1]:  # one number for all of them
                values["train/samples_per_second"] = rate
                values[f"train/{self.task.unit}_per_second"] = rate * per_sample
            if self.scale.enabled:
                values["train/loss_scale"] = self.scale.scale
            self._metrics(entry.step, values, entry.time)
        self.channel.emit(
            {
                "type": "progress",
                "step": agreed.step,
                "steps": self.job.steps,
                "loss": self.progress.latest.get("train/loss"),
                "rate": rate * per_sample,
                "unit": self.task.unit,
                "seconds_left": (self.job.steps - agreed.step) * agreed.seconds_per_step,
                "seconds_per_step": agreed.seconds_per_step,
                "memory_bytes": memory_bytes(self.place.device),
            }
        )

    def _metrics(self, step: int, values: dict[str, float], when: float | None = None) -> None:
        event = {"type": "metrics", "step": step, "time": when or time.time(), "values": values}
        self.progress.remember(event, self.place.rank)
        self.channel.emit(event)

    def _evaluate(self) -> None:
        data = self.task.eval_data()
        if data is None:
            return
        train = self.config.train
        size = train.eval_batch_size or train.micro_batch_size or max(1, train.global_batch_size // self.dims.dp)
        self.beat.doing = "evaluating"
        values = evaluate(self.task, self.parallel, data, size, self.data_rank, self.place.device, self.beat)
        self._metrics(self.done, {f"eval/{name}": value for name, value in values.items()})

    def _first_rank_warns(self, text: str) -> None:
        if self.place.rank == 0:
            self.channel.emit({"type": "warning", "text": text})

    # --- beginning and end --------------------------------------------------------------------------------------

    def _count_items(self) -> float:
        """Items (tokens, say) in one sample."""
        if self.task.unit == "samples":
            return 1.0
        return float(self.task.items(fetch(self.data, [(0, 0)])))

    def _count_parameters(self) -> int:
        """Of the whole model; a stage of a pipeline has a part of them."""
        counts = {name: parameter.numel() for name, parameter in self.parallel.named_parameters()}
        if self.dims.pp > 1:
            everyone: list[Any] = [None] * self.place.world_size
            dist.all_gather_object(everyone, counts)
            counts = {name: count for part in everyone for name, count in part.items()}
        return sum(counts.values())

    def _announce(self) -> None:
        for note in self.parallel.notes:
            self._first_rank_warns(note)
        self.channel.emit(
            {
                "type": "start",
                "time": time.time(),
                "resumed_from": self.resumed_from,
                "step": self.done,
                "steps": self.job.steps,
                "device": str(self.place.device),
                "parameters": self.parameters,
            }
        )

    def _summary(self, stopped: bool, seconds: float) -> dict[str, Any]:
        return {
            "stopped": stopped,
            "step": self.done,
            "steps": self.job.steps,
            "seconds": seconds,
            "metrics": self.progress.latest,
            "resumed_from": self.resumed_from,
            "parameters": self.parameters,
            "memory_bytes": memory_bytes(self.place.device),
            "memory_bytes_before": self.memory_before,
        }

    def close(self) -> None:
        self.kept.close()
