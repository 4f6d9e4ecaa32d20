"""Evaluation beside training: a thread of the driver has each checkpoint that is due evaluated.

    rank 0 ── commits ──▶ checkpoints ──▶ this thread ──▶ a worker of its own (ray_evaluation.py)
       ▲                                     │
       └── a stop, if training ends early ───┴──▶ evaluations.json, and events for the driver

Whatever is killed, nothing is lost: which checkpoints wait follows from what is in the storage, and
a result is in the storage before it is reported. One evaluation runs at a time, in the order
of steps, so that patience counts late results as it counts those of training.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from app.checkpoint import Commit
from app.checkpoint.commit import commits, survey
from app.checkpoint.evaluations import (
    Evaluation,
    Evaluations,
    all_metrics,
    read,
    waiting,
    write,
)
from app.checkpoint.retention import Retention, prune
from app.errors import (
    Interrupted,
    RunFailed,
    UserError,
    described,
    own_line,
    with_line,
)
from app.launchers.workers import WorkerLost
from app.storage.lease import is_current
from app.storage.storage import Storage
from app.training import hooks
from app.training.checkpoint_evaluation import DamagedCheckpoint, Evaluated
from app.training.events import DriverEvent, FilesWritten, MetricsLogged, WarningIssued
from app.training.job import Job
from strategies.layout import LayoutError

if TYPE_CHECKING:
    from app.run.driver import Driver

LOOK_SECONDS = 1.0
"""Seconds between two looks at the checkpoints."""
REMOTE_LOOK_SECONDS = 5.0
"""The same in an object store, which is paid per request."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries, at most; they begin at one and double."""
MANY = 3
"""The user is told once when this many checkpoints wait."""
EVALUATION_LOG = "evaluation.log"
"""In the run's folder of logs."""
NAMED_STEPS = 4
"""How many steps a sentence names."""


class EvaluationWorker(Protocol):
    """The process that evaluates."""

    def start(self, job: Job) -> None:
        """Begins to start the process, for this job."""

    def evaluate(self, commit: Commit, before: Sequence[Mapping[str, float]]) -> Evaluated:
        """Evaluates a checkpoint, in a new process if there is none; see `CheckpointEvaluation`.

        Raises:
            WorkerLost: The process has died.
        """

    def missing(self) -> str:
        """Why the process has not started yet, for a person; "" if it has."""

    def close(self) -> None:
        """Ends the process, also one that evaluates."""


class SeparateEvaluation:
    """Has a run's checkpoints evaluated while it trains, and those that are left at its end.

    Args:
        worker: Evaluates.

    Attributes:
        failure: Why evaluation cannot continue, so that the run has to end; None while it can.
        ended: Whether training is to end early, by the results.
    """

    def __init__(self, worker: EvaluationWorker) -> None:
        self.worker = worker
        self.failure: BaseException | None = None
        self.ended = False
        self._events: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
        self._evaluations = Evaluations()
        self._metrics_of_origin: list[Mapping[str, float]] = []
        """Of the run that a fork continues, up to where it begins."""
        self._waiting: list[Commit] = []
        self._names: list[str] | None = None
        """What was in the folder when its markers were read."""
        self._damaged: set[str] = set()
        """Paths of checkpoints that cannot be evaluated."""
        self._has_warned = False
        self._trouble = ""
        """What was said last about the storage."""
        self._closing = threading.Event()
        self._finishing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="evaluation")

    # --- for the supervisor -----------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Reports the results of earlier starts, and begins to evaluate.

        Raises:
            UserError: The file with the results is damaged.
        """
        self._job = job
        self._storage = Storage(job.checkpoints)
        self._look_seconds = LOOK_SECONDS if self._storage.is_local else REMOTE_LOOK_SECONDS
        self._evaluations = read(self._storage)
        self._metrics_of_origin = _metrics_of_origin(job)
        for result in self._evaluations.results:
            self._tell(result)  # the tracker drops those that it has
        committed = commits(job.checkpoints)
        before = self._before(committed[0]) if committed else self._metrics_of_origin
        ended = self._is_ended(self._evaluations, before)
        if ended != self._evaluations.ended:  # with another patience, say
            self._evaluations = replace(self._evaluations, ended=ended)
            write(self._storage, self._evaluations)
        self.ended = ended
        self.worker.start(job)
        self._thread.start()

    @property
    def wants_stop(self) -> bool:
        """Whether the workers are to save and stop."""
        return self.ended or self.failure is not None

    def drain(self) -> list[DriverEvent]:
        """The events since the last call."""
        events: list[DriverEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def left(self) -> str:
        """The evaluations that are still to come, for a sentence; "" if there are none."""
        steps = [f"{commit.step:,}" for commit in self._waiting]
        if not steps:
            return ""
        if len(steps) == 1:
            return f"the evaluation of the checkpoint of step {steps[0]}"
        named = ", ".join(steps[:NAMED_STEPS]) + (", …" if len(steps) > NAMED_STEPS else "")
        return f"the evaluation of {len(steps)} checkpoints (steps {named})"

    def finish(self, driver: Driver) -> None:
        """Waits until every checkpoint that is due is evaluated, once training has ended.

        Then it adds the last metrics to the run's summary, and removes the checkpoints that are no
        longer kept.

        Args:
            driver: Shows and tracks the results.

        Raises:
            RunFailed: An evaluation failed, or another start has taken the run over.
            UserError: An evaluation found something that another try cannot mend.
            Interrupted: The run was asked to stop meanwhile.
        """
        self._finishing.set()
        self._wake.set()
        shown = ""
        while self._thread.is_alive():
            self._handle_events(driver)
            left = self.left()
            if left and not shown:
                driver.console.say(f"training is done; waiting for {left}")
            what = f"{left}{self.worker.missing()}" if left else ""
            if what != shown:
                driver.console.waits_for(what)
                shown = what
            if left and driver.stop_requested():
                raise Interrupted(f"stopped before {left}")
            driver.check()
            self._thread.join(0.1)
        driver.console.waits_for("")
        self._handle_events(driver)
        if self.failure is not None:
            raise self.failure
        driver.check()
        if self._evaluations.results:
            newest = self._evaluations.results[-1]
            metrics = driver.summary.get("metrics", {})
            driver.add_to_summary(metrics=metrics | _named(newest.metrics))
        prune(self._storage, commits(self._job.checkpoints), self._retention())

    def leave(self, driver: Driver) -> None:
        """Reports which evaluations are left for the next start of a run that was stopped.

        Args:
            driver: Shows and tracks the results so far.

        Raises:
            RunFailed: The run was stopped because an evaluation failed.
            UserError: Likewise; another try cannot mend it.
        """
        self._handle_events(driver)
        if self.failure is not None:
            raise self.failure
        left = self.left()
        if left:
            driver.note(f"{left} is left for the next start")

    def close(self) -> None:
        """Ends the thread and the worker; what is not evaluated waits for the next start."""
        self._closing.set()
        self._wake.set()
        self.worker.close()

    def _handle_events(self, driver: Driver) -> None:
        for event in self.drain():
            driver.handle(event)

    def _retention(self) -> Retention:
        config = self._job.config.checkpoint
        return Retention(
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            mode="max" if config.mode == "max" else "min",
            metric=config.metric,
            keeps_waiting=True,
        )

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                is_last_look = self._finishing.is_set()
                has_looked = self._look()
                if self._waiting:
                    self._evaluate(self._waiting[0])
                elif is_last_look and has_looked:
                    return
                else:
                    self._wake.wait(self._look_seconds)
                    self._wake.clear()
        except BaseException as error:  # the exception of a thread would be lost
            if not self._closing.is_set():
                self.failure = error

    def _look(self) -> bool:
        """Finds the checkpoints that wait; returns whether the storage could be read."""
        try:
            names = self._storage.list()
            if names != self._names:
                listing = survey(self._storage)
                # The marker of a save that is under way comes without another name in the folder.
                self._names = None if listing.uncommitted else names
                self._waiting = [
                    commit
                    for commit in waiting(listing.commits, self._evaluations)
                    if commit.path not in self._damaged
                ]
        except Exception as error:  # each object store library has its own exceptions
            self._warn_of_storage(error)
            return False
        if len(self._waiting) >= MANY and not self._has_warned:
            self._has_warned = True
            self._note(
                f"evaluation is slower than training: {len(self._waiting)} checkpoints wait for "
                "it, and are kept meanwhile; raise train.eval_every, or give its worker more in "
                "train.eval_resources"
            )
        return True

    def _evaluate(self, commit: Commit) -> None:
        """Evaluates a checkpoint, again if that fails, and keeps the result."""
        before = self._before(commit)
        evaluated = self._try(commit, all_metrics(before, self._evaluations))
        if evaluated is None:
            return
        result = Evaluation(
            step=commit.step, time=time.time(), metrics=evaluated.metrics, stops=evaluated.stops
        )
        evaluations = self._evaluations.with_result(result)
        ended = evaluations.ended or self._is_ended(evaluations, before)
        evaluations = replace(evaluations, ended=ended)
        if not self._write(evaluations):
            return
        self._evaluations = evaluations
        self._waiting = self._waiting[1:]
        for folder in evaluated.folders:
            self._events.put(FilesWritten(folder=folder))
        self._tell(result)
        self.ended = ended

    def _try(self, commit: Commit, before: Sequence[Mapping[str, float]]) -> Evaluated | None:
        """The result; None if there is none, because this is closing or the files are damaged.

        Raises:
            RunFailed: It fails every time.
            UserError: Another try cannot mend it.
        """
        tries = 0
        while True:
            try:
                return self.worker.evaluate(commit, before)
            except DamagedCheckpoint as error:
                self._damaged.add(commit.path)
                self._waiting = self._waiting[1:]
                self._note(f"the checkpoint of step {commit.step:,} is not evaluated: {error}")
                return None
            except (UserError, LayoutError):
                raise
            except Exception as error:
                if self._closing.is_set():
                    return None
                tries += 1
                self._judge(commit, error, tries)
                self._closing.wait(min(LONGEST_PAUSE, 2.0 ** (tries - 1)))

    def _judge(self, commit: Commit, error: Exception, tries: int) -> None:
        """Says that an evaluation has failed, and is tried again.

        What a person's own code raises is tried once more, anything else as often as workers are
        started again.

        Raises:
            RunFailed: It has been tried often enough.
        """
        line = own_line(error)
        where = f"the evaluation of the checkpoint of step {commit.step:,}"
        if isinstance(error, WorkerLost):
            sentence = f"the worker of {where} died{self._see_log()}"
        else:
            sentence = f"{where} failed: {described(error)}{self._see_log()}"
        most = 2 if line is not None else self._job.config.fault.max_restarts + 1
        if tries < most:
            self._note(with_line(f"{sentence}; evaluating it again", line))
            return
        often = "twice" if tries == 2 else f"{tries} times"
        raise RunFailed(
            with_line(f"{sentence}, {often}; the same command tries it again", line)
        ) from error

    def _see_log(self) -> str:
        """Where the worker's output is, if its storage keeps it."""
        folder = Storage(self._job.folder).join("logs")
        if not folder.is_local or not folder.exists(EVALUATION_LOG):
            return ""
        return f" (see {folder.local_path / EVALUATION_LOG})"

    def _write(self, evaluations: Evaluations) -> bool:
        """Keeps the results, as soon as the storage can be written.

        Returns:
            False if another start has taken the run over, or this one ends.
        """
        while not self._closing.is_set():
            try:
                if self._job.leased and not is_current(self._job.folder, self._job.attempt):
                    self._closing.set()
                    return False
                write(self._storage, evaluations)
                self._trouble = ""
                return True
            except Exception as error:  # each object store library has its own exceptions
                self._warn_of_storage(error)
                self._closing.wait(self._look_seconds)
        return False

    def _before(self, commit: Commit) -> list[Mapping[str, float]]:
        """The metrics of evaluations before all of these: of the origin, and in training."""
        return [*self._metrics_of_origin, *commit.meta.get("evaluations", [])]

    def _is_ended(self, evaluations: Evaluations, before: Sequence[Mapping[str, float]]) -> bool:
        """Whether training is to end early, by the task or because patience is used up."""
        if any(result.stops for result in evaluations.results):
            return True
        return hooks.ran_out_of_patience(self._job.config, all_metrics(before, evaluations))

    def _tell(self, result: Evaluation) -> None:
        event = MetricsLogged(
            step=result.step,
            time=result.time,
            training_seconds=0.0,
            values=_named(result.metrics),
        )
        self._events.put(event)

    def _note(self, message: str) -> None:
        self._events.put(WarningIssued(message=message))

    def _warn_of_storage(self, error: Exception) -> None:
        trouble = f"evaluation waits for the storage {self._storage} ({described(error)})"
        if trouble != self._trouble:
            self._trouble = trouble
            self._note(trouble)


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an evaluation under the names that MLflow and summaries have."""
    return {f"eval/{name}": value for name, value in metrics.items()}


def _metrics_of_origin(job: Job) -> list[Mapping[str, float]]:
    """What the run that this one continues had evaluated beside training, up to where it begins."""
    if not job.fork:
        return []
    folder, _, name = job.fork.rpartition("/")
    step = int(name.split("-")[1])
    return [result.metrics for result in read(folder).results if result.step <= step]
