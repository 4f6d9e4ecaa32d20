"""Evaluation of committed checkpoints in a process of its own, whatever layout has saved them.

The whole model is on one device. It reads the held-out data in the shares and batches in which the
data-parallel workers would have read it, with their random numbers, and adds up their sums in the
same order, so that on the same kind of device the numbers are those of an evaluation in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app import checkpoint
from app.checkpoint import Commit
from app.checkpoint.evaluations import Plan
from app.data.randomness import seed_everything, seed_step
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.build import build_model
from app.tasks.by_value import read_task_file
from app.tasks.returned import derived_metrics
from app.training import hooks
from app.training.average import Average
from app.training.evaluation import Evaluator, means_of, metric_sums, shown
from app.training.events import Event, FilesWritten
from app.training.job import Job, Place, SilentChannel
from app.training.process import configure_torch
from app.training.reference import Reference
from strategies.options import Options
from strategies.parallelize import Layout, parallelize


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation has given.

    Args:
        metrics: By name.
        stops: Whether the task's `stop_early` says that training is to end.
        folders: Folders of the run, relative to its own, into which files were written.
    """

    metrics: dict[str, float]
    stops: bool = False
    folders: tuple[str, ...] = ()


class CheckpointEvaluation:
    """Evaluates checkpoints of a run, one after another, with one model.

    Args:
        job: What is trained.
        device: Where to evaluate.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.config = job.config
        train = self.config.train
        configure_torch(train, device)
        seed_everything(train.seed)  # a task that makes random data makes the same as in training
        read_task_file(self.config.task, Storage(job.folder))
        self.task = load_task(self.config.task, self.config.task_args)
        options = Options(
            precision=train.precision,
            compile=train.compile,
            compile_backend=train.compile_backend,
            float_output=self.task.float_output,
        )
        self.parallel = parallelize(
            self._build,
            Layout("single"),
            options,
            device=device,
            blocks=self.task.blocks,
        )
        self.average: Average | None = None
        if train.ema_decay is not None:
            self.average = Average(self.parallel, train.ema_decay)
        self.reference: dict[str, torch.Tensor] = {}
        if hooks.overrides(self.task, "reference"):
            self.reference = Reference(self.task, self.task.train_data()).values
        self.channel = _EventList()
        self.evaluator = ShareEvaluator(
            config=self.config,
            task=self.task,
            parallel=self.parallel,
            average=self.average,
            place=Place(rank=0, world_size=1, local_rank=0, device=device),
            channel=self.channel,
            folder=job.folder,
        )

    def _build(self) -> nn.Module:
        seed_everything(self.config.train.seed)
        return build_model(self.task)

    def evaluate(self, commit: Commit, before: Sequence[Mapping[str, float]]) -> Evaluated:
        """Evaluate a checkpoint that has a plan for it.

        Args:
            commit: The checkpoint.
            before: The metrics of every evaluation before, the newest last.

        Raises:
            UserError: The checkpoint is of another model, or there is no checkpoint.metric.
            DamagedCheckpoint: Its files are not as they were committed.
        """
        faults = checkpoint.verify(commit)
        if faults:
            raise DamagedCheckpoint(faults[0])
        self._load(commit)
        self.channel.events = []
        self.evaluator.plan = Plan.of(commit)
        metrics = self.evaluator.run(commit.step)
        hooks.require_metric(self.config, metrics)
        return Evaluated(
            metrics=metrics,
            stops=hooks.task_stops_early(self.task, [*before, metrics]),
            folders=tuple(
                event.folder for event in self.channel.events if isinstance(event, FilesWritten)
            ),
        )

    def _load(self, commit: Commit) -> None:
        state: dict[str, Any] = {"model": self.parallel.model_state()}
        if self.average is not None:
            state["ema"] = self.average.values
        if self.reference:
            state["reference"] = self.reference
        checkpoint.load(commit, state)
        self.parallel.load_model_state(state["model"])


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be evaluated, because its files have changed or are gone."""


class ShareEvaluator(Evaluator):
    """Evaluates in one process what several data-parallel workers would evaluate.

    Attributes:
        plan: In which shares and batches.
    """

    plan: Plan

    def held_out_metrics(self, step: int) -> dict[str, float]:
        """The task's metrics of the model's present weights; {} without held-out data."""
        data = self.task.eval_data()
        if data is None:
            return {}
        device = self.place.device
        sums_by_share: dict[int, dict[str, torch.Tensor]] = {}
        # The first share comes last, so that what follows goes on with the first rank's random
        # numbers.
        for share in reversed(range(self.plan.shares)):
            seed_step(self.config.train.seed, step, data_rank=share, device=device)
            sums_by_share[share] = metric_sums(
                self.task,
                self.parallel,
                data,
                batch_size=self.plan.batch_size,
                share=share,
                shares=self.plan.shares,
                device=device,
                heartbeat=self.channel.heartbeat,
            )
        totals = torch.stack([*sums_by_share[0].values()])
        for share in range(1, self.plan.shares):
            totals = totals + torch.stack([*sums_by_share[share].values()])
        metrics = means_of(sums_by_share[0], totals)
        return shown(metrics | derived_metrics(self.task, metrics))


class _EventList(SilentChannel):
    """A channel that keeps the events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)
