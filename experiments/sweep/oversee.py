"""Whether a trial goes on: every report and every end passes through here into the ledger."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.tune.error import TuneError
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from app.errors import UserError
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import INDEX, NAME, REPORT, TIME, VALUE
from experiments.sweep.trial_driver import REACHED


def scheduler_of(sweep: Sweep, longest: int, every: int) -> TrialScheduler:
    """Tune's scheduler of that name.

    longest: steps (or samples) of the longest trial. every: between two reports of it.
    Raises:
        UserError: an argument that it does not take.
    """
    common: dict[str, Any] = {"time_attr": TIME, "metric": VALUE, "mode": sweep.mode}
    given, defaults = dict(sweep.scheduler_args), dict[str, Any]()
    for key in ("grace", "interval"):
        if key in given and not (isinstance(given[key], int) and given[key] > 0):
            raise UserError(f"scheduler {sweep.scheduler}: {key} is {given[key]!r}, but it must be a number of steps")
    try:
        if sweep.scheduler == "asha":
            grace = given.pop("grace", max(1, every, longest // 16))
            defaults = {"max_t": longest + 1, "grace_period": min(grace, longest), "reduction_factor": 4}
            return ASHAScheduler(**common, **(defaults | given))
        if sweep.scheduler == "median":
            grace = given.pop("grace", max(every, longest // 8))
            return MedianStoppingRule(**common, **({"grace_period": grace, "min_samples_required": 3} | given))
        if sweep.scheduler == "pbt":
            interval = given.pop("interval", every)
            mutations = {
                key: list(domain.values) if domain.finite else domain.for_tune()
                for key, domain in sweep.space.items()
                if key not in _FIXED_FOR_LIFE
            }
            if not mutations:
                raise UserError(
                    f"scheduler pbt changes trials on the way, and {', '.join(sweep.space)} cannot be changed then: "
                    "put for instance optimizer.lr into the space, or write another scheduler"
                )
            defaults = {"perturbation_interval": interval, "hyperparam_mutations": mutations}
            return PopulationBasedTraining(**common, **(defaults | given))
    except (TypeError, ValueError, AssertionError, TuneError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"scheduler {sweep.scheduler} does not take these arguments: {said}") from error
    return FIFOScheduler()


_FIXED_FOR_LIFE = ("workers", "strategy", "train.global_batch_size", "train.seed", "task", "optimizer.name")
"""What a trial cannot change on the way without becoming another run, or leaving its place in the data."""


class _WithoutSearch:
    """Tune's controller, as one that was given no search algorithm: population-based training refuses all but Tune's
    own random search, and what it is given here are points that were drawn beforehand."""

    search_alg = None

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


_KEPT = ("step", "samples", "metrics", "steps", "workers", "first_step")
"""Of what a trial says, in a report; its seconds are counted here."""


@dataclass
class _Remembered:
    """Stands for a trial of an earlier start."""

    trial_id: str
    status: str = "TERMINATED"

    def __hash__(self) -> int:
        return hash(self.trial_id)


class Overseer(TrialScheduler):
    """Writes every report and every end into the ledger, and decides by Tune's scheduler, the target and plain sense.

    say: called after every change, with the trial concerned.
    """

    def __init__(self, sweep: Sweep, ledger: Ledger, inner: TrialScheduler, say: Callable[[Trial, str], None]) -> None:
        super().__init__()
        self.sweep, self.ledger, self.inner, self.say = sweep, ledger, inner, say
        self.problem: Exception | None = None  # why the whole sweep ends
        self.began: dict[int, tuple[float, float]] = {}  # per trial: its present start, and the seconds before it
        self.stopped = False  # by a person: what is under way stays so
        self.own: dict[str, tuple[int, str]] = {}  # Tune's trial ids → place in the ledger and name
        self.condemned: set[str] = set()  # Tune's ids of trials that the scheduler stopped when it was told their past
        self._replayed = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles what it is given, for a restore that nobody asks for: the ledger remembers

    # --- what Tune asks -----------------------------------------------------------------------------------------

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if not self._replayed:
            self._replayed = True
            with contextlib.suppress(AttributeError):  # Tune's own; without it warm processes are kept less often
                tune_controller._actor_cache.increase_max(trial.placement_group_factory, by=64)
            self._replay(tune_controller)
        self.inner.on_trial_add(_WithoutSearch(tune_controller), trial)  # type: ignore[arg-type]
        for report in self.ledger.trials[trial.config[INDEX]].reports:  # it continues: what it said, it said already
            decision = self.inner.on_trial_result(tune_controller, trial, self._seen(report))
            if decision == TrialScheduler.STOP and isinstance(self.inner, MedianStoppingRule):
                self.condemned.add(trial.trial_id)  # it asserts that it is asked about such a trial no more
                break

    def _replay(self, controller: Any) -> None:
        stand_ins = {trial.index: _Remembered(f"remembered-{trial.index}") for trial in self.ledger.ended}
        if isinstance(self.inner, PopulationBasedTraining):
            return  # it compares those that live
        for stand_in in stand_ins.values():
            self.inner.on_trial_add(controller, stand_in)  # type: ignore[arg-type]
        for index, report in self.ledger.order:
            if index in stand_ins:
                self.inner.on_trial_result(controller, stand_ins[index], self._seen(report))  # type: ignore[arg-type]

    def _seen(self, report: dict[str, Any]) -> dict[str, Any]:
        """A report as schedulers see it. A value that is not finite is the worst there is."""
        value = report["metrics"].get(self.sweep.metric)
        seen = {
            TIME: report["samples" if self.sweep.time == "samples" else "step"],
            "training_iteration": report["step"],
        }
        if value is not None:
            seen[VALUE] = value if math.isfinite(value) else math.copysign(1e30, self.sweep.worse)
        return seen

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        record = self.ledger.trials[trial.config[INDEX]]
        said = json.loads(result[REPORT])
        report = self._recorded(record, said)
        if report is not None:
            result.update(self._seen(report))
        if said["ended"]:
            return self._ended(tune_controller, record, said)
        if report is None:
            return TrialScheduler.CONTINUE
        if self.sweep.metric not in report["metrics"]:
            self._give_up(tune_controller, self._unknown_metric(report["metrics"]))
            return TrialScheduler.STOP
        self.say(record, "")
        value = report["metrics"][self.sweep.metric]
        reached = self.sweep.target is not None and not self.sweep.better(self.sweep.target, value)
        if reached and self.sweep.stop_at_target and math.isfinite(value):
            return self._stop(tune_controller, trial, record, "reached", REACHED)
        if trial.trial_id in self.condemned:
            decision = TrialScheduler.STOP
        else:
            decision = self.inner.on_trial_result(tune_controller, trial, result)
        self._keep_identities(tune_controller)
        if decision == TrialScheduler.STOP:
            if report["step"] >= (report["steps"] or math.inf):  # there is nothing left to stop: its end is next
                return TrialScheduler.CONTINUE
            return self._stop(tune_controller, trial, record, "pruned", f"stopped early by {self.sweep.scheduler}")
        return decision

    def _recorded(self, record: Trial, result: dict[str, Any]) -> dict[str, Any] | None:
        """The report in it, if it is news; its seconds are counted over all starts of the trial."""
        if not result.get("metrics") or result["step"] <= record.last.get("step", 0):
            return None
        if self.began.get(record.index, (None,))[0] != result["start"]:
            self.began[record.index] = (result["start"], record.last.get("seconds", 0.0))
        before = self.began[record.index][1]
        report = {key: result.get(key, record.last.get(key)) for key in _KEPT}
        report["seconds"] = before + result["seconds"] if "seconds" in result else record.last.get("seconds", before)
        if report["samples"] is None:
            return None
        self.ledger.report(record.index, report)
        return report

    def _ended(self, controller: Any, record: Trial, result: dict[str, Any]) -> str:
        status = result["status"]
        if status == "finished" and not record.reports:
            self._give_up(controller, self._unknown_metric(result.get("metrics") or {}))
        elif status in ("finished", "failed") and not record.ended:
            self.ledger.end(record.index, status, result["message"])
        self.say(record, status)
        return TrialScheduler.STOP

    def _stop(self, controller: Any, trial: Any, record: Trial, status: str, why: str) -> str:
        self.ledger.end(record.index, status, f"{why} after step {record.last['step']:,}")
        with contextlib.suppress(Exception):  # it gives its workers back now, not when the process is wanted again
            trial.temporary_state.ray_actor.halt.remote(why)
        self.say(record, status)
        return TrialScheduler.STOP

    def _unknown_metric(self, known: dict[str, Any]) -> UserError:
        names = ", ".join(sorted(known)) or "nothing, since the task has no data to evaluate on"
        return UserError(f"metric is {self.sweep.metric!r}, which the trials do not report; they report {names}")

    def _give_up(self, controller: Any, problem: Exception) -> None:
        self.problem = self.problem or problem
        controller.request_stop_experiment()

    def _keep_identities(self, controller: Any) -> None:
        """Population-based training copies a trial's whole configuration; a trial's place in the ledger is its own."""
        if not isinstance(self.inner, PopulationBasedTraining):
            return
        for trial in controller.get_trials():
            own = self.own.setdefault(trial.trial_id, (trial.config[INDEX], trial.config[NAME]))
            if (trial.config[INDEX], trial.config[NAME]) != own:
                trial.config[INDEX], trial.config[NAME] = own
                values = {key: value for key, value in trial.config.items() if key not in (INDEX, NAME)}
                self.ledger.begin(own[0], own[1], values)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        # Only an end that brings a value with it is news; without one, the median rule would keep what it cannot read.
        if VALUE in result and json.loads(result[REPORT])["ended"]:
            self.inner.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        record = self.ledger.trials[trial.config[INDEX]]
        if not record.ended and not self.stopped:
            self.ledger.end(record.index, "failed", f"its process died ({_last_line(trial)})")
            self.say(record, "died")
        self.inner.on_trial_error(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self.inner.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        return self.inner.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        return self.inner.debug_string()

    def save(self, checkpoint_path: str) -> None:
        """The ledger is what is kept."""

    def restore(self, checkpoint_path: str) -> None:
        """The ledger is what is kept."""


def _last_line(trial: Any) -> str:
    with contextlib.suppress(Exception):
        error = trial.get_pickled_error() or trial.get_error()
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        if any("OutOfMemory" in line or "memory" in line.lower() for line in lines):
            return "out of memory"
        if lines and lines[-1] != "None":  # which is what Tune keeps of a process that could not start
            return lines[-1][:200]
    return "its last words are in logs/sweep.log of the sweep's folder"
