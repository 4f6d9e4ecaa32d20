"""Between Ray Tune and the ledger: what is tried next, and whether a trial goes on.

Tune asks `Next` for trials and `Overseer` for decisions. Both hand the question on, to Tune's own searcher and
scheduler, and both know the ledger: when a sweep is run again, trials that were under way come first, the scheduler is
told every recorded report in its order, and the searcher every recorded result. So a sweep that was killed goes on as if
it had not been, with any searcher and scheduler, and without pickles of their insides.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

from app.errors import UserError
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.slots import Need, Resources, place
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import INDEX, NAME
from experiments.sweep.trial_driver import REACHED

VALUE, TIME = "value", "at"
"""Names under which schedulers and searchers see the metric and what trials are compared at."""


def scheduler_of(sweep: Sweep, longest: int, every: int) -> TrialScheduler:
    """Tune's scheduler of that name.

    longest: steps (or samples) of the longest trial. every: between two reports of it.
    Raises:
        UserError: an argument that it does not take.
    """
    common = {"time_attr": TIME, "metric": VALUE, "mode": sweep.mode}
    given = dict(sweep.scheduler_args)
    try:
        if sweep.scheduler == "asha":
            grace = max(1, int(given.pop("grace", max(every, longest // 16))))
            defaults = {"max_t": longest + 1, "grace_period": min(grace, longest), "reduction_factor": 4}
            return ASHAScheduler(**common, **(defaults | given))
        if sweep.scheduler == "median":
            grace = int(given.pop("grace", max(every, longest // 8)))
            return MedianStoppingRule(**common, **({"grace_period": grace, "min_samples_required": 3} | given))
        if sweep.scheduler == "pbt":
            interval = int(given.pop("interval", every))
            mutations = {
                key: list(domain.values) if domain.finite else domain.for_tune()
                for key, domain in sweep.space.items()
                if key not in _FIXED_FOR_LIFE
            }
            defaults = {"perturbation_interval": interval, "hyperparam_mutations": mutations}
            return PopulationBasedTraining(**common, **(defaults | given))
    except TypeError as error:
        raise UserError(f"scheduler {sweep.scheduler} does not take these arguments: {error}") from error
    return FIFOScheduler()


_FIXED_FOR_LIFE = ("workers", "strategy", "train.global_batch_size", "train.seed", "task", "optimizer.name")
"""What a trial cannot change on the way without becoming another run, or leaving its place in the data."""


def searcher_of(sweep: Sweep) -> Searcher | None:
    """Tune's searcher of that name; None where the points are known beforehand.

    Raises:
        UserError: its package is not installed, or it does not take an argument.
    """
    if sweep.points is not None:
        return None
    try:
        kind = SEARCH_ALG_IMPORT[sweep.searcher]()
        space = {key: domain.for_tune() for key, domain in sweep.space.items()}
        arguments = dict(sweep.searcher_args)
        if sweep.searcher == "optuna":
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            arguments = {"seed": sweep.seed} | arguments
        return kind(space=kind.convert_search_space(space), metric=VALUE, mode=sweep.mode, **arguments)
    except (ImportError, AssertionError) as error:
        package = {"bayesopt": "bayesian-optimization", "ax": "ax-platform"}.get(sweep.searcher, sweep.searcher)
        raise UserError(
            f"searcher {sweep.searcher} needs a package that is not installed: pip install {package}, or write "
            "searcher: optuna"
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"searcher {sweep.searcher} cannot search this space: {error}") from error


class Next(Searcher):
    """What Tune tries next: trials that were under way, then new ones, as long as they fit on the cluster.

    nodes: asked at most every few seconds, so that trials follow a cluster that grows.
    """

    def __init__(
        self,
        sweep: Sweep,
        ledger: Ledger,
        inner: Searcher | None,
        need: Callable[[dict[str, Any]], Need],
        nodes: Callable[[], list[Resources]],
        limits: Resources,
    ) -> None:
        super().__init__(VALUE, sweep.mode)
        self.sweep, self.ledger, self.inner, self.need = sweep, ledger, inner, need
        self.nodes, self.limits = nodes, limits
        self.live: dict[str, tuple[Trial, Need]] = {}
        self.again = [trial.index for trial in ledger.under_way]
        self.fresh = max(ledger.trials, default=-1) + 1
        self.held: dict[str, Any] | None = None  # a suggestion that has to wait for its place
        self._asked, self._known = 0.0, nodes()
        if inner is not None:
            self._tell_the_past(inner)

    def _tell_the_past(self, inner: Searcher) -> None:
        for trial in self.ledger.ended:
            value = self.best_of(trial)
            if value is not None:
                with contextlib.suppress(NotImplementedError):  # not every searcher can be told
                    inner.add_evaluated_point(trial.values, value)

    def best_of(self, trial: Trial) -> float | None:
        found = [value for _, value in trial.curve(self.sweep.metric) if math.isfinite(value)]
        return (min(found) if self.sweep.mode == "min" else max(found)) if found else None

    @property
    def left(self) -> int:
        return self.sweep.count - self.fresh + len(self.again)

    def suggest(self, trial_id: str) -> Any:
        if self.left <= 0 and self.held is None:
            return Searcher.FINISHED
        if self.sweep.concurrent is not None and len(self.live) >= self.sweep.concurrent:
            return None
        again = self.ledger.trials[self.again[0]] if self.again else None
        values = again.values if again else self._new_values(trial_id)
        if values is None:
            return None
        need = self.need(values)
        if not self._fits(need):
            return None
        if again:
            self.again.pop(0)
            index, name = again.index, again.name
        else:
            index, self.held = self.fresh, None
            name, self.fresh = trial_name(index, values), self.fresh + 1
        trial = self.ledger.begin(index, name, values)
        self.live[trial_id] = (trial, need)
        return {**values, INDEX: index, NAME: name}

    def _new_values(self, trial_id: str) -> dict[str, Any] | None:
        if self.sweep.points is not None:
            return self.sweep.points[self.fresh]
        if self.held is None:
            assert self.inner is not None
            self.held = self.inner.suggest(trial_id)
        return self.held

    def _fits(self, need: Need) -> bool:
        if time.monotonic() - self._asked > 5:
            self._asked, self._known = time.monotonic(), self.nodes()
        together = [n for _, n in self.live.values()] + [need]
        if place(self._known, together):
            return True
        wanted: Resources = {}
        for one in together:
            for name, amount in one.per_worker:
                wanted[name] = wanted.get(name, 0.0) + amount * one.workers
        return bool(self.limits) and all(self.limits.get(name, 0.0) >= amount for name, amount in wanted.items())

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if self.inner is not None and _usable(result):
            with contextlib.suppress(KeyError):  # a trial of an earlier start, which this searcher did not suggest
                self.inner.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.live.pop(trial_id, None)
        if self.inner is not None:
            usable = result if result and _usable(result) else None
            with contextlib.suppress(KeyError):
                self.inner.on_trial_complete(trial_id, result=usable, error=error or usable is None)


def _usable(result: dict[str, Any]) -> bool:
    return VALUE in result and math.isfinite(result[VALUE])


def trial_name(index: int, values: dict[str, Any]) -> str:
    """`t003-b64-lr0.003`: what is searched first of all is in the name."""
    name = f"t{index:03d}"
    if "train.global_batch_size" in values:
        name += f"-b{values['train.global_batch_size']}"
    if "optimizer.lr" in values:
        name += f"-lr{values['optimizer.lr']:.3g}".replace("+", "")
    return name


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
        self._replayed = False

    # --- what Tune asks -----------------------------------------------------------------------------------------

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if not self._replayed:
            self._replayed = True
            with contextlib.suppress(AttributeError):  # Tune's own; without it warm processes are kept less often
                tune_controller._actor_cache.increase_max(trial.placement_group_factory, by=64)
            self._replay(tune_controller)
        self.inner.on_trial_add(tune_controller, trial)
        for report in self.ledger.trials[trial.config[INDEX]].reports:  # it continues: what it said, it said already
            self.inner.on_trial_result(tune_controller, trial, self._seen(report))

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
        seen = {TIME: report["samples" if self.sweep.time == "samples" else "step"], "training_iteration": report["step"]}
        if value is not None:
            seen[VALUE] = value if math.isfinite(value) else math.copysign(1e30, self.sweep.worse)
        return seen

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        record = self.ledger.trials[trial.config[INDEX]]
        report = self._recorded(record, result)
        if report is not None:
            result.update(self._seen(report))
            trial.last_result.update(self._seen(report))
        if result["done"]:
            return self._ended(tune_controller, record, result)
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
        decision = self.inner.on_trial_result(tune_controller, trial, result)
        self._keep_identities(tune_controller)
        if decision == TrialScheduler.STOP:
            return self._stop(tune_controller, trial, record, "pruned", f"stopped early by {self.sweep.scheduler}")
        return decision

    def _recorded(self, record: Trial, result: dict[str, Any]) -> dict[str, Any] | None:
        """The report in it, if it is news; its seconds are counted over all starts of the trial."""
        if not result.get("metrics") or result["step"] <= record.last.get("step", 0):
            return None
        if self.began.get(record.index, (None,))[0] != result["start"]:
            self.began[record.index] = (result["start"], record.last.get("seconds", 0.0))
        before = self.began[record.index][1]
        report = {
            key: result.get(key, record.last.get(key)) for key in ("step", "samples", "metrics", "steps", "workers")
        }
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
            own = self._own.setdefault(trial.trial_id, (trial.config[INDEX], trial.config[NAME]))
            if (trial.config[INDEX], trial.config[NAME]) != own:
                trial.config[INDEX], trial.config[NAME] = own
                values = {key: value for key, value in trial.config.items() if key not in (INDEX, NAME)}
                self.ledger.begin(own[0], own[1], values)

    @property
    def _own(self) -> dict[str, tuple[int, str]]:
        return self.__dict__.setdefault("_own_names", {})

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
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
        return lines[-1][:200]
    return "no reason known"

