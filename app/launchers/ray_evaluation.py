"""The worker that evaluates checkpoints, as a Ray actor with resources of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from app.checkpoint import Commit
from app.console.terminal import LOG_TIME, worker_output
from app.errors import SourceLine, keep_line, own_line
from app.launchers.ray_workers import picklable, work_in
from app.launchers.room import node_selector
from app.launchers.workers import WorkerLost
from app.training.checkpoint_evaluation import Evaluated
from app.training.job import Job
from cluster.pending import format_resources

if TYPE_CHECKING:
    from app.training.checkpoint_evaluation import CheckpointEvaluation

BACKGROUND = 10
"""How much nicer than training a worker is that has no processor of its own."""


@dataclass(frozen=True)
class _Failed:
    """What an evaluation has raised, with the line of a person's own code that it came from."""

    error: Exception
    line: SourceLine | None


@ray.remote(max_restarts=0, max_task_retries=0)
class EvaluationActor:
    """The process that evaluates.

    Args:
        job: What is trained.
        use_gpu: Whether it has a GPU.
        is_background: Whether it has no processor of its own.
    """

    def __init__(self, job: Job, use_gpu: bool, is_background: bool) -> None:
        self.job = job
        self.use_gpu = use_gpu
        self.evaluation: CheckpointEvaluation | None = None
        if is_background:
            os.nice(BACKGROUND)
        work_in(job.cwd)

    def started(self) -> None:
        """Returns as soon as the process runs."""

    def evaluate(
        self, commit: Commit, before: Sequence[Mapping[str, float]]
    ) -> Evaluated | _Failed:
        """Evaluates a checkpoint; its output goes to logs/evaluation.log."""
        try:
            with worker_output(self.job, "evaluation"):
                return self._evaluate(commit, before)
        except Exception as error:
            return _Failed(picklable(error), own_line(error))

    def _evaluate(self, commit: Commit, before: Sequence[Mapping[str, float]]) -> Evaluated:
        import torch

        from app.training.checkpoint_evaluation import CheckpointEvaluation

        print(f"{time.strftime(LOG_TIME)} evaluating {commit.path}", flush=True)
        if self.evaluation is None:
            device = torch.device("cuda", 0) if self.use_gpu else torch.device("cpu")
            self.evaluation = CheckpointEvaluation(self.job, device)
        return self.evaluation.evaluate(commit, before)


class RayEvaluationWorker:
    """An `EvaluationWorker` in Ray. Another actor takes the place of one that has died.

    Args:
        resources: Ray resources of the actor.
    """

    def __init__(self, resources: Mapping[str, float]) -> None:
        self.resources = dict(resources)
        self.actor: Any = None
        self.is_closed = False
        self.started: ray.ObjectRef[None] | None = None

    def start(self, job: Job) -> None:
        """See `EvaluationWorker`. The actor has its place as soon as there is room for it."""
        self.job = job
        self._start_actor()

    def _start_actor(self) -> None:
        others = dict(self.resources)
        cpus = others.pop("CPU", 0.0)
        gpus = others.pop("GPU", 0.0)
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if "memory" in others:
            options["memory"] = others.pop("memory")
        selector = node_selector(self.job.excluded_nodes)
        if selector is not None:
            options["label_selector"] = selector
        self.actor = EvaluationActor.options(  # type: ignore[attr-defined]
            resources=others, **options
        ).remote(self.job, use_gpu=gpus > 0, is_background=cpus + gpus == 0)
        self.started = self.actor.started.remote()

    def evaluate(self, commit: Commit, before: Sequence[Mapping[str, float]]) -> Evaluated:
        """See `EvaluationWorker`."""
        if self.actor is None and not self.is_closed:
            self._start_actor()
        try:
            outcome = ray.get(self.actor.evaluate.remote(commit, before))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            self.actor = None
            raise WorkerLost("the worker that evaluates", str(error)) from error
        if isinstance(outcome, _Failed):
            # Another process may do what this one, whose device may be broken, cannot.
            self._end_actor()
            keep_line(outcome.error, outcome.line)
            raise outcome.error
        result: Evaluated = outcome
        return result

    def missing(self) -> str:
        """See `EvaluationWorker`."""
        if self.started is None or ray.wait([self.started], timeout=0)[0]:
            return ""
        asked = f" ({format_resources(self.resources)})" if self.resources else ""
        return f", whose worker{asked} has not started yet"

    def close(self) -> None:
        """See `EvaluationWorker`."""
        self.is_closed = True
        self._end_actor()

    def _end_actor(self) -> None:
        actor = self.actor
        self.actor = None
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
