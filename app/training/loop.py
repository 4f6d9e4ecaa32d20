"""The training loop. The same one runs under every launcher, in a pipeline's stage, and in one process.

    for each step:   micro-batches → forward, backward → gradient norm, clip → optimizer.step()
    at a boundary:   ranks agree (step_sync.py) → metrics → evaluation → checkpoint

It imports no launcher and no tracker: what it has to say goes to the `Channel` that it is given, which sends nothing on
all ranks but the first. No step waits for the device; only boundaries do, about once a second.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from app.checkpoint.ranks import Ranks
from app.data.loader import Batch, number_on, pipeline_example, rows, train_batches
from app.data.randomness import seed_everything, seed_step
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.build import build_model
from app.tasks.by_value import read_task_file
from app.tasks.items import CountedBatch, count_items, weighs_items
from app.training import hooks
from app.training.average import Average
from app.training.batch_gather import Gathering
from app.training.evaluation import evaluate
from app.training.events import FilesWritten, MetricsLogged, StepsDone, TrainingStarted, WarningIssued
from app.training.expert_load import expert_metrics
from app.training.flops import Utilization
from app.training.job import Channel, Job, Place, memory_bytes
from app.training.noise_scale import NoiseScale
from app.training.optimizer import LossScale
from app.training.persistence import Persistence, Progress
from app.training.pipeline_monitor import PipelineMonitor
from app.training.process import collect_garbage, configure_torch, garbage_waits
from app.training.profiler import Profiler
from app.training.step_sync import Agreement, StepSync
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


@dataclass
class Speed:
    """How fast a start of a run trains: the one figure that the terminal, `trireme runs` and the report show.

    It is the mean over all steps of the start: their items over the seconds of training. Those are the seconds in
    steps, waiting for data included; evaluation, checkpoints and waiting for the storage or for workers are not in it.
    """

    seconds: float = 0.0
    items: float = 0.0
    samples: float = 0.0

    def add(self, seconds: float, items: float, samples: float) -> None:
        """Adds some steps."""
        self.seconds += seconds
        self.items += items
        self.samples += samples

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class Training:
    """One rank's part of a run: model, optimizer, data, and how far they are. keeper: what its state is kept by."""

    def __init__(self, job: Job, place: Place, channel: Channel, keeper: Callable[..., Any] = Persistence) -> None:
        config = self.config = job.config
        self.job, self.place, self.channel, self.heartbeat = job, place, channel, channel.heartbeat
        self.heartbeat.phase = "starting"
        configure_torch(config.train, place.device)
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
        self.average: Average | None = None
        if config.train.ema_decay is not None:
            self.average = Average(self.parallel, config.train.ema_decay)
            self.persistence.average = self.average
        self.progress = Progress()
        self.weighs_items = weighs_items(self.task)
        self.speed = Speed()
        self.parameters = self._count_parameters()
        self.resumed_from = self.persistence.resume(self.progress)
        self.logged_at = 0
        self.noise = NoiseScale.of(self.parallel, config.train.noise_scale_every, config.train.global_batch_size)
        self.gathering = Gathering(self.task, self.parallel, place.device)
        if self.noise is not None and self.weighs_items:
            self.noise.items = partial(count_items, self.task)
        self.sync = StepSync(
            self.dims.cp * self.dims.tp, self.steps_done + 1, data_copies=self.dims.world_size // self.dims.dp
        )
        self.utilization = Utilization.of(self.task, job.layout, place, config.train.precision)
        self.monitor = PipelineMonitor.of(job, self.parallel, channel)
        self.profiler = Profiler.of(job, place, channel, steps_done=self.steps_done)

    @property
    def steps_done(self) -> int:
        return self.progress.step

    def _build_model(self) -> torch.nn.Module:
        seed_everything(self.config.train.seed)
        return build_model(self.task)

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        stopped = False
        self._announce()
        batches = self.batches()
        self.sync.restart_clock()
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
        return self._summary(stopped)

    def advance(self, batches: Iterator[list[CountedBatch]]) -> bool:
        """One step, and what is due after it; true when the run is to stop."""
        if self.heartbeat.phase == "training":  # waiting for data has a limit of its own, after the first step
            self.heartbeat.phase = "reading"
            micro_batches = next(batches)
            self.heartbeat.phase = "training"
        else:
            micro_batches = next(batches)
        step = self.steps_done + 1
        with contextlib.nullcontext() if self.profiler is None else self.profiler.step(step):
            if self.monitor is None:
                self.step(micro_batches)
            else:
                self.monitor.take(step, partial(self.step, micro_batches), self._metrics)
        if self.profiler is not None and self.profiler.is_last(step):
            self._finish_profile(self.profiler)
        return self._is_boundary() and self._boundary()

    def step(self, micro_batches: list[CountedBatch]) -> None:
        """One step: the weights move by the gradient of the mean loss over the global batch, once, or as often as the
        task's own training_step says."""
        config = self.config
        step = self.steps_done + 1
        is_logged = step in (1, self.job.steps) or step % config.train.log_every == 0
        seed_step(config.train.seed, step, self.dims.seed_rank(self.place.rank), self.place.device)
        rates = hooks.set_learning_rate(self.optimizer, config, self.task, step=self.steps_done, steps=self.job.steps)
        batches = [micro_batch.batch for micro_batch in micro_batches]
        weights = self._weights(micro_batches)
        self.task.recorded = {} if is_logged and self.dims.pp * self.dims.cp == 1 else None

        if hooks.overrides(self.task, "training_step"):
            updates = hooks.Updates(partial(self._update, batches, weights, is_logged))
            self.task.training_step(updates)
            loss, grad_norm = updates.loss, updates.grad_norm
        else:
            loss, grad_norm = self._update(batches, weights, is_logged, self.task.loss)
        if loss is None:
            raise UserError("the task's training_step made no update: call update(loss) in it")

        if self.average is not None:
            self.average.update(step)
        self.progress.step = step
        self.heartbeat.step = step
        self.progress.samples_seen += config.train.global_batch_size
        self.sync.add(loss, sum(micro_batch.items for micro_batch in micro_batches))
        if is_logged:
            losses = hooks.logged_losses(self.task, weights, in_parts=self.noise is not None)
            self.sync.log(step, rates, grad_norm, losses)

    def _update(
        self,
        batches: list[Batch],
        weights: list[float | torch.Tensor],
        is_logged: bool,
        loss_function: hooks.LossFunction,
        optimizer_name: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One update of the weights: forward and backward of every micro-batch, whose gradients add up, then the
        optimizer's step.

        Args:
            batches: the step's micro-batches, on the device.
            weights: their parts of the global batch.
            is_logged: whether the gradient's norm is asked for.
            loss_function: (model, batch) → the mean loss.
            optimizer_name: of several, the one that takes the step.

        Returns:
            This worker's part of the mean loss over the global batch, detached, and the gradient's norm before
            clipping, where it is known.
        """
        step = self.steps_done + 1
        clip_norm = self.config.train.clip_norm
        measures_noise = self.noise is not None and self.noise.due(step)

        loss = self.gathering.forward_backward(
            self.noise if measures_noise else self.parallel,
            batches,
            weights,
            loss_function,
            self.scale.factor,
        )
        optimizer = self.optimizer
        if optimizer_name:
            optimizer = hooks.one_of_several(self.optimizer, optimizer_name, self.parallel.parameters())
        self.scale.unscale_(self.parallel.parameters())
        grad_norm = None
        if is_logged or clip_norm is not None or self.scale.enabled:
            grad_norm = self.parallel.grad_norm_(clip_norm)  # which also clips
        if self.scale.accepts(grad_norm, step):
            optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    def _finish_profile(self, profiler: Profiler) -> None:
        self.heartbeat.phase = "saving"  # a large trace takes a while to write
        with self.sync.paused():
            profiler.finish()
        self.heartbeat.phase = "training"

    def _weights(self, counted: list[CountedBatch]) -> list[float | torch.Tensor]:
        """Each micro-batch's part of the global batch's items; they sum to 1 over micro-batches and data ranks.

        One without an item has the weight 0.0, a number of the host, by which strategies leave it out.
        """
        if not self.weighs_items:
            return [rows(batch) / self.config.train.global_batch_size for batch, _ in counted]
        mine = sum(items for _, items in counted)
        if self.parallel.group is None:
            return [items / mine if items else 0.0 for _, items in counted]
        total = self.parallel.total(number_on(self.place.device, mine))
        return [(items / total).float() if items else 0.0 for _, items in counted]

    def batches(self) -> Iterator[list[CountedBatch]]:
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
            counted=lambda batch: CountedBatch(batch, count_items(self.task, batch)),
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
        self.sync.restart_clock()
        return agreed.stop and not last

    def _report(self, agreed: Agreement) -> None:
        """Metrics of the steps since the last boundary, and how far the run is."""
        unit, used = self.task.unit, self.utilization
        samples = self.config.train.global_batch_size * agreed.steps
        items = agreed.items if unit != "samples" else samples
        self.speed.add(agreed.seconds, items, samples)
        rate, items_rate = samples / agreed.seconds, items / agreed.seconds
        of_gpus = {"mfu": used.mfu(rate), f"{unit}_per_second_per_gpu": items_rate / used.gpus} if used else {}
        for entry in agreed.logged:
            values = {f"train/{name}": value for name, value in entry.learning_rates.items()}
            if entry.items > 0:  # else nothing of the batch counted, and there is no loss to show
                values["train/loss"] = entry.loss
                values |= {f"train/{name}": value for name, value in entry.losses.items()}
            if entry.grad_norm is not None:
                values["train/grad_norm"] = entry.grad_norm
            if entry is agreed.logged[-1]:  # one number for all of them
                values["train/samples_per_second"] = rate
                values[f"train/{unit}_per_second"] = items_rate
                values[f"train/mean_{unit}_per_second"] = self.speed.items_per_second
                values |= {f"train/{name}": value for name, value in of_gpus.items()}
            if self.scale.enabled:
                values["train/loss_scale"] = self.scale.scale
            self._metrics(entry.step, values, entry.time)
            self.logged_at = entry.step
        self.channel.emit(
            StepsDone(
                step=agreed.step,
                steps=self.job.steps,
                # One of before a resume is of no step of this start.
                loss=self.progress.latest.get("train/loss") if self.logged_at else None,
                loss_step=self.logged_at,
                rate=self.speed.items_per_second,
                unit=unit,
                gpus=used.gpus if used else 0,
                mfu=used.mfu(self.speed.samples_per_second) if used else None,
                seconds_left=(self.job.steps - agreed.step) * agreed.seconds_per_step,
                seconds_per_step=agreed.seconds_per_step,
                memory_bytes=memory_bytes(self.place.device),
            )
        )

    def _metrics(self, step: int, values: dict[str, float], when: float | None = None) -> None:
        event = MetricsLogged(
            step=step,
            time=when or time.time(),
            training_seconds=self.speed.seconds,
            values=values,
        )
        self.progress.remember(event, self.place.rank)
        self.channel.emit(event)

    def _evaluate(self) -> None:
        """The figures of the weights, of their average (ema_…), and what the task logs; and whether training ends."""
        self.heartbeat.phase = "evaluating"
        values = self._figures()
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            if self.average is not None:
                values |= {f"ema_{name}": value for name, value in self._figures().items()}
            if hooks.overrides(self.task, "on_evaluation") and self.dims.pp * self.dims.cp == 1:
                values |= self._call_on_evaluation()
        self.progress.evaluations.append(values)
        ends = hooks.stops_early(self.config, self.task, self.progress.evaluations)
        self.progress.ended = any(Ranks().all(ends))
        if self.progress.ended and self.place.rank == 0:
            self.channel.emit(WarningIssued(message=f"training ends early, after step {self.steps_done:,}"))
        if values:
            self._metrics(self.steps_done, {f"eval/{name}": value for name, value in values.items()})

    def _call_on_evaluation(self) -> dict[str, float]:
        log = hooks.call_on_evaluation(
            self.task,
            self.parallel,
            self.heartbeat,
            folder=self.job.folder,
            step=self.steps_done,
            is_first_rank=self.place.rank == 0,
        )
        if log.written:
            self.channel.emit(FilesWritten(folder=log.folder))
        return log.numbers

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
            self.channel.emit(WarningIssued(message=note))
        self.channel.emit(
            TrainingStarted(
                time=time.time(),
                resumed_from=self.resumed_from,
                step=self.steps_done,
                steps=self.job.steps,
                device=str(self.place.device),
                parameters=self.parameters,
            )
        )

    def _summary(self, stopped: bool) -> Summary:
        return {
            "stopped": stopped,
            "step": self.steps_done,
            "steps": self.job.steps,
            "seconds": self.speed.seconds,
            "rate": self.speed.items_per_second,
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
