"""Between Ray Tune and the ledger: what is tried next, and whether a trial goes on (`oversee.py`).

Tune asks `Next` for trials and `Overseer` for decisions. Both hand the question on, to Tune's own searcher and
scheduler, and both know the ledger: when a sweep is run again, trials that were under way come first, the scheduler is
told every recorded report in its order, and the searcher every recorded result. So a sweep that was killed goes on as
if it had not been, with any searcher and scheduler, and without pickles of their insides.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

from app.errors import UserError
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.slots import Need, Resources, place
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import INDEX, NAME, VALUE


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
    except (ImportError, AssertionError, AttributeError) as error:  # Tune stands None for what is missing
        package = {"bayesopt": "bayesian-optimization", "ax": "ax-platform"}.get(sweep.searcher, sweep.searcher)
        raise UserError(
            f"searcher {sweep.searcher} needs a package that is not installed: pip install {package}, or write "
            "searcher: optuna"
        ) from error
    except (TypeError, ValueError) as error:
        what = "does not take these arguments" if "argument" in str(error) else "cannot search this space"
        raise UserError(f"searcher {sweep.searcher} {what}: {error}") from error


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
        self.over = False  # nothing more is to be begun
        self._asked, self._known = 0.0, nodes()
        if inner is not None:
            self._tell_the_past(inner)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as Overseer

    def save(self, checkpoint_path: str) -> None:
        """The ledger is what is kept."""

    def restore(self, checkpoint_path: str) -> None:
        """The ledger is what is kept."""

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
        if self.over or (self.left <= 0 and self.held is None):
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
