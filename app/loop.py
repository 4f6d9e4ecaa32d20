"""The training loop. The same one runs under every launcher, in a pipeline's stage, and in one process.

    for each step:   micro-batches → forward, backward → gradient norm, clip → optimizer.step()
    at a boundary:   ranks agree (step_sync.py) → metrics → evaluation → checkpoint

It imports no launcher and no tracker: what it has to say goes to the `Channel` that it is given, which sends nothing on
all ranks but the first. No step waits for the device; only boundaries do, about once a second.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from app import hooks
from app.checkpoint.ranks import Ranks
from app.data.loader import fetch, number_on, pipeline_example, rows, train_batches
from app.evaluation import evaluate
from app.expert_load import expert_metrics
from app.flops import Utilization
from app.job import Channel, Job, Place, memory_bytes
from app.noise_scale import NoiseScale
from app.optimizer import LossScale
from app.persistence import Persistence, Progress
from app.pipeline_monitor import PipelineMonitor
from app.process import collect_garbage, configure_torch, garbage_waits
from app.profiler import Profiler
from app.randomness import seed_everything, seed_step
from app.step_sync import Agreement, StepSync
from app.storage import Storage
from app.tasks import load_task
from app.tasks.build import build_model
from app.tasks.by_value import read_task_file
from strategies.collectives import keep_freed_memory
from strategies.parallelize import parallelize

Summary = dict[str, Any]


def train(job: Job, place: Place, channel: Channel) -> Summary:
    """Trains until `job.steps`, or until asked to stop; returns the summary, rank 0's with all metrics.

    Raises:
        NonFiniteError: the loss or gradient stopped being finite.
        UserError: the checkpoint to resume from, or the data, is not usable.
    """
    training = Training(job, place, channel)
    try:
        return training.run()
    finally:
        training.close()


class Training:
    """One rank's part of a run: model, optimizer, data, and how far they are. keeper: what its state is kept by."""

    def __init__(self, job: Job, place: Place, channel: Channel, keeper: Callable[..., Any] = Persistence) -> None:
        config = self.config = job.config
        self.job, self.place, self.channel, self.heartbeat = job, place, channel, channel.heartbeat
        self.heartbeat.phase = "starting"
        configure_torch(config.train, place.device)
        if place.device.type == "cpu":
            keep_freed_memory()
        seed_everything(config.train.seed)  # all ranks, and all starts, make the same data
        read_task_file(config.task, Storage(job.folder))
        self.task = load_task(config.task, config.task_args)
        self.data = self.task.train_data()
        self.memory_before = memory_bytes(place.device)  # without a model
        example = None
        if job.layout.dims.pp > 1:
            example = (self.task.loss, pipeline_example(self.data, config.train.micro_batch_size))
        self.dims = job.layout.dims
        self.data_rank = self.dims.data_rank(place.rank)
        self.parallel = parallelize(
            self._build_model,
            job.layout,
            hooks.options(config, self.task),
            device=place.device,
            blocks=self.task.blocks,
            tensor_plan=self.task.tensor_plan,
            context_plan=self.task.context_plan,
            example=example,
        )
        if hooks.overrides(self.task, "training_step"):
            hooks.gather_when_called(self.parallel)
        self.optimizer = self.parallel.prepare_optimizer(hooks.build_optimizers(config, self.task, self.parallel))
        self.scale = LossScale(config.train.precision == "fp16")
        self.persistence = keeper(job, place, channel, self.parallel, self.optimizer, self.scale)
        self.average: hooks.Average | None = None
        if config.train.ema_decay is not None:
            self.average = self.persistence.average = hooks.Average(self.parallel, config.train.ema_decay)
        self.progress = Progress()
        self.items_per_sample = 1.0  # items are what the task counts: tokens, say
        if self.task.unit != "samples":
            self.items_per_sample = float(self.task.items(fetch(self.data, [(0, 0)])))
        self.parameters = self._count_parameters()
        self.resumed_from = self.persistence.resume(self.progress)
        self.seen_before, self.logged_at = self.progress.samples_seen, 0
        self.noise = NoiseScale.of(self.parallel, config.train.noise_scale_every, config.train.global_batch_size)
        self.sync = StepSync(self.dims.cp * self.dims.tp, self.steps_done + 1)
        self.utilization = Utilization.of(self.task, job.layout, place, config.train.precision)
        self.monitor = PipelineMonitor.of(job, self.parallel, channel)
        self.profiler = Profiler.around(self) if config.profile.steps else None

    @property
    def steps_done(self) -> int:
        return self.progress.step

    def _build_model(self) -> torch.nn.Module:
        seed_everything(self.config.train.seed)
        return build_model(self.task)

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        began, stopped = time.monotonic(), False
        self._announce()
        batches = self.batches()
        try:
            with garbage_waits():
                while self.steps_done < self.job.steps and not (stopped or self.progress.ended):
                    stopped = self.advance(batches)
        finally:
            getattr(batches, "close", lambda: None)()
        self.heartbeat.phase = "ending"
        self.persistence.finish(self.progress)  # first: it waits for a storage that is away or full
        if not stopped:
            with self.average.in_place() if self.average else contextlib.nullcontext():
                self.persistence.keep_weights()
        return self._summary(stopped, time.monotonic() - began)

    def advance(self, batches: Iterator[list[Any]]) -> bool:
        """One step, and what is due after it; true when the run is to stop."""
        if self.heartbeat.phase == "training":  # waiting for data has a limit of its own, after the first step
            self.heartbeat.phase = "reading"
            micro_batches = next(batches)
            self.heartbeat.phase = "training"
        else:
            micro_batches = next(batches)
        if self.monitor is None:
            self.step(micro_batches)
        else:
            self.monitor.take(self.steps_done + 1, partial(self.step, micro_batches), self._metrics)
        return self._is_boundary() and self._boundary()

    def step(self, micro_batches: list[Any]) -> None:
        """One step: updates of the weights from the gradient's exact mean over the global batch, as the task's
        training_step asks for them (one, of its loss)."""
        config = self.config
        step = self.steps_done + 1
        seed_step(config.train.seed, step, self.dims.seed_rank(self.place.rank), self.place.device)
        batch = config.train.global_batch_size
        rate = hooks.set_learning_rate(self)
        logged = step in (1, self.job.steps) or step % config.train.log_every == 0
        update = hooks.Update(self, micro_batches, self._weights(micro_batches), logged)
        self.task.training_step(update)
        if self.average is not None:
            self.average.update(step)
        self.progress.step = self.heartbeat.step = step
        self.progress.samples_seen += batch
        self.sync.add(update.loss)
        if logged:
            self.sync.log(step, rate, update.norm, update.losses())

    def _weights(self, micro_batches: list[Any]) -> list[Any]:
        """Each micro-batch's part of the global batch's items; they sum to 1 over micro-batches and data ranks."""
        if self.task.items_vary:
            items = [number_on(self.place.device, self.task.items(batch)) for batch in micro_batches]
            total = self.parallel.total(torch.stack(items).sum())
            return [(n / total).float() for n in items]
        return [rows(batch) / self.config.train.global_batch_size for batch in micro_batches]

    def batches(self) -> Iterator[list[Any]]:
        """This rank's micro-batches, a list for each step."""
        config = self.config.train
        return train_batches(
            self.data,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            dp_rank=self.data_rank,
            dp_size=self.dims.dp,
            samples_seen=self.progress.samples_seen,
            steps=self.job.steps - self.steps_done,
            device=self.place.device,
            data_workers=config.data_workers,
            mark=self.progress.stream,
            note=lambda mark: setattr(self.progress, "stream", mark),
        )

    # --- boundaries ---------------------------------------------------------------------------------------------

    def _is_boundary(self) -> bool:
        step, save, check = self.steps_done, self.config.checkpoint.every_steps, self.config.train.eval_every
        scheduled = (save and step % save == 0) or (check and step % check == 0)
        return bool(scheduled) or step == self.job.steps or self.sync.due(step)

    def _boundary(self) -> bool:
        """Agrees with the other ranks on what happened and what to do now; true when the run is to stop."""
        config, step = self.config, self.steps_done
        stop, save = self.channel.stop_requested(), self.persistence.overdue() or self.heartbeat.save_requested
        self.heartbeat.save_requested = False
        agreed = self.sync.agree(step, stop=stop, save=save, may_be_infinite=self.scale.enabled)
        self._report(agreed)
        if used := expert_metrics(self.parallel):
            self._metrics(step, used)
        collect_garbage()
        if self.noise is not None and (found := self.noise.values()):
            self._metrics(step, found)
        last = step == self.job.steps
        if last or (config.train.eval_every and step % config.train.eval_every == 0):
            self._evaluate()
        every = config.checkpoint.every_steps
        if last or self.progress.ended or agreed.save or agreed.stop or (every and step % every == 0):
            self.heartbeat.phase = "saving"
            self.persistence.save(self.progress)
        self.persistence.check()
        self.heartbeat.phase = "training"
        return agreed.stop and not last

    def _report(self, agreed: Agreement) -> None:
        """Metrics of the steps since the last boundary, and how far the run is."""
        rate = self.config.train.global_batch_size / agreed.seconds_per_step
        items_rate, used = rate * self.items_per_sample, self.utilization
        of_gpus = (
            {"mfu": used.mfu(rate), f"{self.task.unit}_per_second_per_gpu": items_rate / used.gpus} if used else {}
        )
        for entry in agreed.logged:
            values = {"train/loss": entry.loss, "train/lr": entry.learning_rate}
            values |= {f"train/{name}": value for name, value in entry.losses.items()}
            if entry.grad_norm is not None:
                values["train/grad_norm"] = entry.grad_norm
            if entry is agreed.logged[-1]:  # one number for all of them
                values["train/samples_per_second"] = rate
                values[f"train/{self.task.unit}_per_second"] = items_rate
                values |= {f"train/{name}": value for name, value in of_gpus.items()}
            if self.scale.enabled:
                values["train/loss_scale"] = self.scale.scale
            self._metrics(entry.step, values, entry.time)
            self.logged_at = entry.step
        self.channel.emit(
            {
                "type": "progress",
                "step": agreed.step,
                "steps": self.job.steps,
                "loss": self.progress.latest.get("train/loss"),
                "loss_step": self.logged_at,
                "rate": items_rate,
                "unit": self.task.unit,
                "gpus": used.gpus if used else 0,
                "mfu": of_gpus.get("mfu"),
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
        self.heartbeat.phase = "evaluating"
        if values := hooks.evaluate(self, self._figures):
            self._metrics(self.steps_done, {f"eval/{name}": value for name, value in values.items()})

    def _figures(self) -> dict[str, float]:
        data, train = self.task.eval_data(), self.config.train
        if data is None:
            return {}
        size = train.eval_batch_size or train.micro_batch_size or max(1, train.global_batch_size // self.dims.dp)
        seed_step(train.seed, self.steps_done, self.data_rank, self.place.device)  # for metrics that draw
        return evaluate(self.task, self.parallel, data, size, self.data_rank, self.place.device, self.heartbeat)

    # --- beginning and end --------------------------------------------------------------------------------------

    def _count_parameters(self) -> int:
        """Of the whole model; a stage of a pipeline has a part of them."""
        counts = {name: parameter.numel() for name, parameter in self.parallel.named_parameters()}
        parts = Ranks().all(counts) if self.dims.pp > 1 else [counts]
        return sum({name: count for part in parts for name, count in part.items()}.values())

    def _announce(self) -> None:
        for note in self.parallel.notes if self.place.rank == 0 else ():
            self.channel.emit({"type": "warning", "text": note})
        self.channel.emit(
            {
                "type": "start",
                "time": time.time(),
                "resumed_from": self.resumed_from,
                "step": self.steps_done,
                "steps": self.job.steps,
                "device": str(self.place.device),
                "parameters": self.parameters,
            }
        )

    def _summary(self, stopped: bool, seconds: float) -> Summary:
        return {
            "stopped": stopped,
            "step": self.steps_done,
            "steps": self.job.steps,
            "seconds": seconds,
            "rate": (self.progress.samples_seen - self.seen_before) * self.items_per_sample / seconds,
            "unit": self.task.unit,
            "metrics": self.progress.latest,
            "resumed_from": self.resumed_from,
            "parameters": self.parameters,
            "memory_bytes": memory_bytes(self.place.device),
            "memory_bytes_before": self.memory_before,
        }

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.close()
        self.persistence.close()
