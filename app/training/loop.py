"""The training loop: the same under every launcher, in a pipeline's stage and in one process.

A step (`Training.step` and `Training._update`) sets the learning rate, runs forward and backward of
each micro-batch, so that the gradients add up, clips the gradient and calls `optimizer.step()`. It
does not wait for the device.

A boundary (`Training._handle_boundary`) comes about once a second. There the ranks agree on what
has happened; then metrics are logged, the model is evaluated and a checkpoint is saved, as far as
each is due. With train.eval_separate another process evaluates the checkpoints. If its results end
training early, the driver asks the workers to stop, and the first rank reads the reason in them.

The loop imports no launcher and no tracker: it reports to the `Channel` that it receives.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.checkpoint.ranks import Ranks
from app.data.loader import Batch, number_on, pipeline_example, rows, train_batches
from app.data.randomness import seed_everything, seed_step
from app.errors import UserError, return_line, with_line
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.build import build_model
from app.tasks.by_value import read_task_file
from app.tasks.items import CountedBatch, count_items, weighs_items
from app.training import hooks
from app.training.average import Average
from app.training.batch_gather import Gathering
from app.training.branches import Branches
from app.training.evaluation import Evaluator
from app.training.events import TrainingStarted, WarningIssued
from app.training.expert_load import expert_metrics
from app.training.flops import Utilization
from app.training.job import Channel, Job, Place, memory_bytes
from app.training.noise_scale import NoiseScale
from app.training.optimizer import LossScale
from app.training.persistence import Persistence, Progress
from app.training.pipeline_monitor import PipelineMonitor
from app.training.process import (
    collect_garbage,
    configure_torch,
    freed_memory_stays,
    garbage_waits,
)
from app.training.profiler import Profiler
from app.training.reference import Reference
from app.training.reporting import Reporter
from app.training.step_parts import StepMeter
from app.training.step_sync import Agreement, StepSync
from app.training.width_transfer import scale_initial_weights
from strategies.parallel import Loss, LossError
from strategies.parallelize import Parallel, parallelize

Summary = dict[str, Any]
"""What a run reports at its end; see `Training._summary`."""


def train(job: Job, place: Place, channel: Channel) -> Summary:
    """Train until the last step, an early end, or a request to stop.

    Args:
        job: What to train.
        place: This rank's place.
        channel: To the driver.

    Returns:
        The summary of the run; rank 0's has all metrics.

    Raises:
        NonFiniteError: The loss or the gradient is no longer finite.
        UserError: The checkpoint to resume from, or the data, cannot be used.
    """
    training = Training(job, place, channel)
    try:
        return training.run()
    finally:
        training.close()


class Training:
    """One rank's part of a run: the model, the optimizer, the data and the progress.

    Args:
        job: What to train.
        place: This rank's place.
        channel: To the driver.
        persistence_class: What saves and loads checkpoints.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        channel: Channel,
        *,
        persistence_class: type[Persistence] = Persistence,
    ) -> None:
        self.job = job
        self.place = place
        self.channel = channel
        self.heartbeat = channel.heartbeat
        self.heartbeat.phase = "starting"
        self.config = job.config
        self.dims = job.layout.dims
        self.data_rank = self.dims.data_rank(place.rank)
        train = self.config.train
        self.global_batches = train.batches
        self.steps = job.steps
        """Optimizer steps of the whole run, as far as is decided."""
        self.in_branch = False

        configure_torch(train, place.device)
        seed_everything(train.seed)  # a task that makes random data makes the same on every rank
        read_task_file(self.config.task, Storage(job.folder))
        self.task = load_task(self.config.task, self.config.task_args)
        self.is_weighted_by_items = weighs_items(self.task)
        self.data = self.task.train_data()
        self.memory_before = memory_bytes(place.device)  # without the model

        # The optimizer is built over what the layout has left of the parameters.
        self.parallel = self._parallelize_model()
        self.gathering = Gathering(self.task, self.parallel, place.device)
        optimizer = hooks.build_optimizers(self.config, self.task, self.parallel, widths=job.widths)
        self.optimizer = self.parallel.prepare_optimizer(optimizer)
        self.loss_scale = LossScale(train.precision == "fp16")
        self.average: Average | None = None
        if train.ema_decay is not None:
            self.average = Average(self.parallel, train.ema_decay)
        self.parameter_count, self.trained_count = self._count_parameters()

        # All of this is in a checkpoint, from which the run continues if it has one.
        self.progress = Progress()
        self.reference = Reference(self.task, self.data)
        self.persistence = self._make_persistence(persistence_class)
        self.resumed_from = self.persistence.resume(self.progress)

        # What looks at training begins at the step that it continues from.
        self.restart_sync()
        self.reporter = self._make_reporter()
        self.branches: Branches | None = None
        if train.grows_by_itself:
            self.branches = Branches(self)
        self._require_shared_batch()
        self.evaluator = self._make_evaluator()
        self.noise_scale = self._make_noise_scale()
        self.pipeline_monitor = PipelineMonitor.of(job, self.parallel, channel)
        self.profiler = Profiler.of(job, place, channel, steps_done=self.steps_done)
        self.step_meter = StepMeter.of(
            job,
            place,
            channel,
            steps_done=self.steps_done,
            monitor=self.pipeline_monitor,
            profiler=self.profiler,
        )

    @property
    def steps_done(self) -> int:
        return self.progress.step

    def _require_shared_batch(self) -> None:
        """Check that the data-parallel workers can divide the batch of the next step.

        A run whose batch has grown may have more workers than at its start. If it continues from an
        older checkpoint, the batch is smaller again.

        Raises:
            UserError: They cannot.
        """
        batch = self.global_batches.batch_at(self.progress.samples_seen)
        if batch % self.dims.dp:
            raise UserError(
                f"the checkpoint of step {self.steps_done:,} continues with a batch of {batch}, "
                f"which {self.dims.dp} data-parallel workers cannot divide: run the same command "
                "again, which starts fewer workers"
            )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Train, save the last checkpoint and the weights; see `train`."""
        stopped = False
        self._announce()
        if self.resumed_from is None:
            self._compute_reference()
        with garbage_waits(), freed_memory_stays(self.place.device):
            while self.steps_done < self.steps and not (stopped or self.progress.ended):
                point = self.branches.point() if self.branches else None
                if self.branches is not None and point is not None:
                    stopped = self.branches.train(point)
                else:
                    stopped = self._take_steps()
        self.heartbeat.phase = "ending"
        # This comes first, because it retries while the storage is unreachable or full.
        self.persistence.finish(self.progress)
        if not stopped:
            with self.average.in_place() if self.average else contextlib.nullcontext():
                self.persistence.keep_weights()
        return self._summary(stopped)

    def _take_steps(self) -> bool:
        """Take steps until the run ends, or the next branches begin; whether it is to stop."""
        stopped = False
        last_step = self.steps
        if self.branches is not None:
            last_step = self.steps_done + self.branches.steps_until_next()
        batches = self.batches(last_step - self.steps_done)
        self.sync.restart_clock()
        try:
            while self.steps_done < last_step and not (stopped or self.progress.ended):
                stopped = self.advance(batches)
        finally:
            getattr(batches, "close", lambda: None)()
        return stopped

    def advance(self, batches: Iterator[list[CountedBatch]]) -> bool:
        """Take one step, and do what is due after it.

        Args:
            batches: From `batches`.

        Returns:
            Whether the run is to stop.
        """
        step = self.steps_done + 1
        with self.step_meter.step(step) if self.step_meter else contextlib.nullcontext():
            with self.step_meter.reading() if self.step_meter else contextlib.nullcontext():
                micro_batches = self.next_batches(batches)
            with self.profiler.step(step) if self.profiler else contextlib.nullcontext():
                if self.pipeline_monitor is None:
                    self.step(micro_batches)
                else:
                    take_step = partial(self.step, micro_batches)
                    self.pipeline_monitor.take(step, take_step, self.reporter.log)
        if self.step_meter is not None and self.step_meter.is_last(step):
            self._finish_step_meter(self.step_meter)
        if self.profiler is not None and self.profiler.is_last(step):
            self._finish_profile(self.profiler)
        if not self._is_boundary():
            return False
        return self._handle_boundary()

    # --- a step -----------------------------------------------------------------------------------

    def step(self, micro_batches: list[CountedBatch]) -> None:
        """Take one step: learning rate, forward, backward, clip, `optimizer.step()`.

        Args:
            micro_batches: This rank's share of the global batch, on the device.
        """
        step = self.steps_done + 1
        samples_seen = self.progress.samples_seen
        global_batch_size = self.global_batches.batch_at(samples_seen)
        is_logged = self.in_branch or self.is_logged(step)
        self._seed_step(step)
        point = self._curve_point(global_batch_size)
        learning_rates = hooks.set_learning_rate(
            self.optimizer,
            self.config,
            self.task,
            step=self.steps_done if self.branches is None else int(point.step),
            steps=self.job.steps,
            point=point,
            samples=samples_seen,
            beginning=self.progress.beginning,
        )
        batches = [micro_batch.batch for micro_batch in micro_batches]
        weights = self._weights(micro_batches, global_batch_size)
        if self.noise_scale is not None:
            self.noise_scale.batch_size = global_batch_size
        can_log_losses = self.dims.pp * self.dims.cp == 1
        self.task.recorded = {} if is_logged and can_log_losses else None  # filled by Task.log

        # By default this calls `_update` once, with the task's loss. A training_step of the task's
        # own may call it several times.
        updates = hooks.Updates(partial(self._update, batches, weights, is_logged))
        self.task.training_step(updates)
        if updates.loss is None:
            raise UserError("the task's training_step made no update: call update(loss) in it")
        if self.average is not None:
            self.average.update(step)

        self.progress.step = step
        self.progress.samples_seen = samples_seen + global_batch_size
        if self.in_branch:  # whose steps are taken twice
            self.heartbeat.ticks += 1
        else:
            self.heartbeat.step = step
        self.sync.add(updates.loss, sum(micro_batch.items for micro_batch in micro_batches))
        if is_logged:
            may_be_halved = self.noise_scale is not None
            losses = hooks.logged_losses(self.task, weights, may_be_halved=may_be_halved)
            self.sync.log(step, learning_rates, updates.grad_norm, losses=losses)

    def is_logged(self, step: int) -> bool:
        """Whether the losses of a step are logged."""
        return step in (1, self.steps) or step % self.config.train.log_every == 0

    def _curve_point(self, batch: int) -> hooks.CurvePoint:
        """The position on the learning-rate curve of the next step, whose global batch is given."""
        if self.branches is not None:
            return self.branches.curve_point(batch)
        samples = self.progress.samples_seen
        return hooks.curve_point(
            self.config, step=self.steps_done, steps=self.job.steps, samples=samples
        )

    def _update(
        self,
        batches: list[Batch],
        weights: list[float | Tensor],
        is_logged: bool,
        loss_function: Loss,
        optimizer_name: str = "",
    ) -> tuple[Tensor, Tensor | None]:
        """Update the weights once, by the gradient of the mean loss over the global batch.

        Returns:
            This worker's part of that loss, detached, and the norm of the gradient before
            clipping, or None if nothing needs the norm.
        """
        step = self.steps_done + 1
        clip_norm = self.config.train.clip_norm
        runner: Parallel | NoiseScale = self.parallel
        if self.noise_scale is not None and self.noise_scale.is_due(step):
            runner = self.noise_scale  # leaves the same gradients, and measures them on the way

        # For each micro-batch: loss = loss_function(model, batch); (weight · loss).backward().
        # The gradients add up, over micro-batches and, once per step, over workers.
        try:
            loss = self.gathering.forward_backward(
                runner, batches, weights, loss=loss_function, scale=self.loss_scale.factor
            )
        except LossError as error:
            line = return_line(loss_function, error.suspicious)
            raise UserError(with_line(str(error), line)) from error
        optimizer = hooks.choose_optimizer(
            self.optimizer, optimizer_name, self.parallel.parameters()
        )
        self.loss_scale.unscale_(self.parallel.parameters())
        grad_norm = None
        if is_logged or clip_norm is not None or self.loss_scale.enabled:
            grad_norm = self.parallel.grad_norm_(clip_norm)  # also clips the gradient
        if self.loss_scale.accepts(grad_norm, step):  # False only if the gradient of fp16 overflows
            optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    def _seed_step(self, step: int) -> None:
        seed_rank = self.dims.seed_rank(self.place.rank)
        seed_step(self.config.train.seed, step, data_rank=seed_rank, device=self.place.device)

    def _weights(
        self, micro_batches: list[CountedBatch], global_batch_size: int
    ) -> list[float | Tensor]:
        """Each micro-batch's share of the items of the global batch.

        The shares of all micro-batches and data-parallel workers sum to 1. A micro-batch without
        items has the weight 0.0 as a number of the host, so that strategies can leave it out.
        """
        if not self.is_weighted_by_items:
            return [rows(batch) / global_batch_size for batch, _ in micro_batches]
        local_items = sum(items for _, items in micro_batches)
        if self.parallel.group is None:
            return [items / local_items if items else 0.0 for _, items in micro_batches]
        total = self.parallel.total(number_on(self.place.device, local_items))
        return [(items / total).float() if items else 0.0 for _, items in micro_batches]

    # --- data -------------------------------------------------------------------------------------

    def batches(self, steps: int | None = None) -> Iterator[list[CountedBatch]]:
        """This rank's micro-batches of the next steps.

        Args:
            steps: How many; None means all that are left.
        """
        config = self.config.train

        def remember_position(position: str) -> None:
            self.progress.stream = position

        return train_batches(
            self.data,
            seed=config.seed,
            batches=self.global_batches,
            micro_batch_size=config.micro_batch_size,
            dp_rank=self.data_rank,
            dp_size=self.dims.dp,
            samples_seen=self.progress.samples_seen,
            steps=self.steps - self.steps_done if steps is None else steps,
            device=self.place.device,
            data_workers=config.data_workers,
            order_version=self.progress.order_version,
            mark=self.progress.stream,
            note=remember_position,
            counted=lambda batch: CountedBatch(batch, count_items(self.task, batch)),
        )

    def next_batches(self, batches: Iterator[list[CountedBatch]]) -> list[CountedBatch]:
        """The micro-batches of the next step, from `batches`."""
        if self.heartbeat.phase != "training":  # before the first step, which may take long
            return next(batches)
        self.heartbeat.phase = "reading"  # waiting for data has a time limit of its own
        micro_batches = next(batches)
        self.heartbeat.phase = "training"
        return micro_batches

    # --- boundaries -------------------------------------------------------------------------------

    def _is_boundary(self) -> bool:
        step = self.steps_done
        return (
            step == self.steps
            or self._branches_begin()
            or _is_due(step, self.config.checkpoint.every_steps)
            or _is_due(step, self.config.train.eval_every)
            or self.sync.is_due(step)
        )

    def _branches_begin(self) -> bool:
        """Whether the run tries another batch after the step just taken."""
        return self.branches is not None and self.branches.point() is not None

    def _handle_boundary(self) -> bool:
        """Agree with the other ranks, report, evaluate, save; whether the run is to stop."""
        step = self.steps_done
        is_last = step == self.steps
        wants_save = self.persistence.is_overdue() or self.heartbeat.save_requested
        self.heartbeat.save_requested = False
        agreed = self.sync.agree(
            step,
            stop=self.channel.stop_requested(),
            save=wants_save,
            may_be_infinite=self.loss_scale.enabled,
        )
        self.report_steps(agreed)
        self.log(expert_metrics(self.parallel))
        collect_garbage()
        if self.noise_scale is not None:
            self.log(self.noise_scale.values())
        is_evaluated_here = not self.config.train.eval_separate
        if is_evaluated_here and (is_last or _is_due(step, self.config.train.eval_every)):
            self.evaluate()
        if agreed.stop and not is_evaluated_here:
            self._set_ended(self.persistence.is_ended_by_evaluations())
        is_save_due = _is_due(step, self.config.checkpoint.every_steps)
        is_save_due = is_save_due or self._branches_begin()
        if is_last or self.progress.ended or agreed.save or agreed.stop or is_save_due:
            self.save()
        self.persistence.check()
        self.sync.restart_clock()
        return agreed.stop and not (is_last or self.progress.ended)

    def report_steps(self, agreed: Agreement) -> None:
        """Report the steps since the last boundary."""
        loss_scale = self.loss_scale.scale if self.loss_scale.enabled else None
        self.reporter.report_steps(agreed, loss_scale)

    def save(self) -> None:
        """Save a checkpoint of the step just taken."""
        self.heartbeat.phase = "saving"
        self.persistence.save(self.progress)
        self.heartbeat.phase = "training"

    def log(self, values: dict[str, float]) -> None:
        """Log metrics of the step just taken."""
        if values:
            self.reporter.log(self.steps_done, values)

    def evaluate(self) -> None:
        """Log the metrics on held-out data, and decide whether training ends early."""
        self.heartbeat.phase = "evaluating"
        metrics = self.evaluator.run(self.steps_done)
        hooks.require_metric(self.config, metrics)
        self.progress.evaluations.append(metrics)
        ends_early = hooks.stops_early(self.config, self.task, self.progress.evaluations)
        self._set_ended(any(Ranks().all_gather(ends_early)))
        self.log({f"eval/{name}": value for name, value in metrics.items()})

    def _set_ended(self, ended: bool) -> None:
        """Note whether training ends early, after this step."""
        self.progress.ended = ended
        if ended:
            self.warn(f"training ends early, after step {self.steps_done:,}")

    def warn(self, message: str) -> None:
        """Show a message to the person, once for all ranks."""
        if self.place.rank == 0:
            self.channel.emit(WarningIssued(message=message))

    def _finish_profile(self, profiler: Profiler) -> None:
        self.heartbeat.phase = "saving"  # writing a large trace takes a while
        with self.sync.paused():
            profiler.finish()
        self.heartbeat.phase = "training"

    def _finish_step_meter(self, meter: StepMeter) -> None:
        self.heartbeat.phase = "saving"  # reading a profile of many operators takes seconds
        with self.sync.paused():
            meter.finish()
        self.heartbeat.phase = "training"
        self.step_meter = None

    # --- start and end ----------------------------------------------------------------------------

    def restart_sync(self) -> None:
        """Begin to count steps and losses anew, at the next step."""
        self.sync = StepSync(
            loss_copies=self.dims.cp * self.dims.tp,
            data_copies=self.dims.world_size // self.dims.dp,
            first_step=self.steps_done + 1,
        )

    def _parallelize_model(self) -> Parallel:
        """Build the model from the seed, and apply the layout to it."""
        example = None
        if self.dims.pp > 1:
            micro_batch = pipeline_example(self.data, self.config.train.micro_batch_size)
            example = (self.task.loss, micro_batch)

        def build() -> torch.nn.Module:
            seed_everything(self.config.train.seed)
            model = build_model(self.task)
            scale_initial_weights(model, self.job.widths)
            return model

        parallel = parallelize(
            build,
            self.job.layout,
            hooks.options(self.config, self.task),
            device=self.place.device,
            blocks=self.task.blocks,
            tensor_plan=self.task.tensor_plan,
            context_plan=self.task.context_plan,
            example=example,
        )
        if hooks.overrides(self.task, "training_step"):
            hooks.disable_prefetch(parallel)
        return parallel

    def _make_persistence(self, persistence_class: type[Persistence]) -> Persistence:
        return persistence_class(
            job=self.job,
            place=self.place,
            channel=self.channel,
            parallel=self.parallel,
            optimizer=self.optimizer,
            loss_scale=self.loss_scale,
            average=self.average,
            reference=self.reference.values,
        )

    def _make_reporter(self) -> Reporter:
        utilization = Utilization.of(
            self.task, self.job.layout, self.place, precision=self.config.train.precision
        )
        return Reporter(
            channel=self.channel,
            place=self.place,
            progress=self.progress,
            steps=self.steps,
            batches=self.global_batches,
            unit=self.task.unit,
            utilization=utilization,
            moved=self.parallel.moved,
        )

    def _make_evaluator(self) -> Evaluator:
        return Evaluator(
            config=self.config,
            task=self.task,
            parallel=self.parallel,
            average=self.average,
            place=self.place,
            channel=self.channel,
            folder=self.job.folder,
        )

    def _compute_reference(self) -> None:
        """Compute what the loss needs of the model before its first step (reference.py)."""
        train = self.config.train
        share = max(1, self.global_batches.smallest // self.dims.dp)
        self.reference.compute(
            self.parallel,
            batch_size=train.eval_batch_size or train.micro_batch_size or share,
            data_rank=self.data_rank,
            device=self.place.device,
            heartbeat=self.heartbeat,
        )

    def _make_noise_scale(self) -> NoiseScale | None:
        train = self.config.train
        noise_scale = NoiseScale.of(
            self.parallel, train.noise_scale_every, self.global_batches.smallest
        )
        if noise_scale is not None and self.is_weighted_by_items:
            noise_scale.count_items = partial(count_items, self.task)
        return noise_scale

    def _count_parameters(self) -> tuple[int, int]:
        """Parameters of the whole model, of which a stage of a pipeline has a part.

        Returns:
            (all parameters, those that are trained)
        """
        counts = {
            name: (parameter.numel(), parameter.numel() * parameter.requires_grad)
            for name, parameter in self.parallel.named_parameters()
        }
        if self.dims.pp > 1:
            for stage_counts in Ranks().all_gather(counts):
                counts |= stage_counts
        return (
            sum(numel for numel, _ in counts.values()),
            sum(trained for _, trained in counts.values()),
        )

    def _announce(self) -> None:
        if self.place.rank == 0:
            for note in self.parallel.notes:
                self.channel.emit(WarningIssued(message=note))
        self.channel.emit(
            TrainingStarted(
                time=time.time(),
                resumed_from=self.resumed_from,
                step=self.steps_done,
                steps=self.steps,
                device=str(self.place.device),
                parameters=self.parameter_count,
                trained_parameters=self.trained_count,
            )
        )

    def _summary(self, stopped: bool) -> Summary:
        return {
            "stopped": stopped,
            "step": self.steps_done,
            "steps": self.steps,
            "seconds": self.reporter.speed.seconds,
            "rate": self.reporter.speed.items_per_second,
            "unit": self.task.unit,
            "metrics": self.progress.latest,
            "resumed_from": self.resumed_from,
            "parameters": self.parameter_count,
            "trained_parameters": self.trained_count,
            "memory_bytes": memory_bytes(self.place.device),
            "memory_bytes_before": self.memory_before,
            **({} if self.branches is None else {"batch": self.branches.growth.summary()}),
        }

    def close(self) -> None:
        """Write a profile that has not reached its last step, and finish the current checkpoint."""
        if self.profiler is not None:
            self.profiler.close()
        if self.step_meter is not None:
            self.step_meter.close()
        self.persistence.close()


def _is_due(step: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after this one."""
    if not every:
        return False
    return step % every == 0
