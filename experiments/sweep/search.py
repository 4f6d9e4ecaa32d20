"""How a sweep searches: the space, and Ray Tune's searchers and schedulers.

train.global_batch_size: [32, 64, 128]        a list: every one under searcher grid, else drawn from
optimizer.lr: {loguniform: [1e-4, 1e-1]}      a distribution; DISTRIBUTIONS names them
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.errors import UserError, nearest

Values = dict[str, Any]
"""A point of the space: key → value."""

SEARCHERS = ("grid", "random", "optuna")
SCHEDULERS = ("none", "asha")
DISTRIBUTIONS = {
    "choice": "any number of values",
    "uniform": "[low, high]",
    "loguniform": "[low, high]",
    "randint": "[low, high], high itself excluded",
    "lograndint": "[low, high], high itself excluded",
    "linspace": "[low, high, number of values]",
    "logspace": "[low, high, number of values]",
}


@dataclass(frozen=True)
class Domain:
    """What one key may be: a `choice` among `values`, or the distribution `kind` with those numbers."""

    kind: str
    values: tuple[Any, ...]

    @property
    def finite(self) -> bool:
        return self.kind == "choice"

    def for_tune(self) -> Any:
        from ray import tune

        return tune.choice(list(self.values)) if self.finite else getattr(tune, self.kind)(*self.values)

    def ends(self) -> tuple[Any, Any]:
        """The smallest and the largest value; of values without an order the first."""
        if any(number(value) is None for value in self.values):
            return self.values[0], self.values[0]
        return (min(self.values), max(self.values)) if self.finite else (self.values[0], self.values[1])


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tried, in which order, and what is stopped early."""

    space: dict[str, Domain]
    searcher: str = "grid"
    """One of SEARCHERS, or {name: optuna, ARGUMENT: …}."""
    searcher_args: dict[str, Any] = field(default_factory=dict)
    scheduler: str = "none"
    """One of SCHEDULERS, or {name: asha, reduction_factor: 4, grace_period: …}."""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    metric: str = "eval/loss"
    """What is compared, as trials log it: eval/loss, eval/accuracy, train/loss."""
    mode: str = "min"
    time: str = "step"
    """What schedulers compare trials at: step or samples, which is fairer where batch sizes differ."""
    trials: int | None = None
    """How many; a grid has its own number. Default: 16."""
    concurrent: int | None = None
    """The most trials at once. Default: as many as there is room for."""
    seed: int = 0
    """Of random and of suggested points."""

    @property
    def points(self) -> list[Values] | None:
        """Every point of a grid, the first key of the space changing fastest; None: Tune suggests them."""
        if self.searcher != "grid":
            return None
        keys = list(self.space)[::-1]
        products = itertools.product(*(self.space[key].values for key in keys))
        return [dict(list(zip(keys, values))[::-1]) for values in products]

    @property
    def count(self) -> int:
        """Trials in all."""
        return len(self.points) if self.points is not None else self.trials or 16

    @property
    def sign(self) -> int:
        """1 where less is better, else -1: sign · value is what is minimised."""
        return 1 if self.mode == "min" else -1


def searcher_of(search: Search, first: Sequence[Values]) -> Any:
    """Tune's searcher of that name. first: points that are tried before all others. Raises UserError: an argument that
    it does not take."""
    from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter

    points, seed = [dict(values) for values in first], search.seed + len(first)  # else a second start would repeat
    own = {"points_to_evaluate": points or None, "metric": search.metric, "mode": search.mode, "seed": seed}
    try:
        if search.searcher != "optuna":
            return BasicVariantGenerator(points, search.concurrent or 0, random_state=seed, **search.searcher_args)
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        found = OptunaSearch(**(own | search.searcher_args))
        return ConcurrencyLimiter(found, search.concurrent) if search.concurrent else found
    except (TypeError, ValueError) as error:
        raise UserError(f"searcher {search.searcher} does not take these arguments: {error}") from error


def scheduler_of(search: Search, longest: int, every: int) -> Any:
    """Tune's scheduler of that name. longest: steps (or samples) of the longest trial. every: between two reports of
    it. Raises UserError: an argument that it does not take."""
    from ray.tune import TuneError, schedulers

    grace = min(max(every, longest // 16), longest)
    own: dict[str, Any] = {"max_t": longest + 1, "grace_period": grace, "reduction_factor": 4}
    own |= {"time_attr": search.time, "metric": search.metric, "mode": search.mode}
    try:
        if search.scheduler == "none":
            return schedulers.FIFOScheduler(**search.scheduler_args)
        given = own | search.scheduler_args
        return schedulers.ASHAScheduler(**(given | {"grace_period": min(given["grace_period"], longest)}))
    except (TypeError, ValueError, AssertionError, TuneError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"scheduler {search.scheduler} does not take these arguments: {reason}") from error


def read_space(given: Any) -> dict[str, Domain]:
    """The space that a sweep file holds. Raises UserError: it is empty, or a domain is not valid."""
    if not isinstance(given, Mapping) or not given:
        raise UserError("the search space is empty: write for instance space: {optimizer.lr: [1.0e-3, 1.0e-2]}")
    return {str(key): _domain(str(key), value) for key, value in given.items()}


def _domain(key: str, given: Any) -> Domain:
    if isinstance(given, list):
        given = {"choice": given}
    if not isinstance(given, Mapping) or len(given) != 1:
        raise UserError(
            f"space.{key} is {given!r}, which is one value, not a choice: write a list such as [{given!r}, …], a "
            "distribution such as {loguniform: [1e-4, 1e-1]}, or put it under `set`"
        )
    ((kind, values),) = given.items()
    if kind not in DISTRIBUTIONS:
        choice = f"{nearest(str(kind), DISTRIBUTIONS)}: write one of {', '.join(DISTRIBUTIONS)}"
        raise UserError(f"space.{key} has the unknown distribution {kind!r}{choice}")
    if kind == "choice" and values == []:
        raise UserError(f"space.{key} is an empty list, so there is nothing to try: give at least one value")
    if kind == "choice" and isinstance(values, list):
        return Domain(kind, tuple(value for i, value in enumerate(values) if value not in values[:i]))
    numbers = [n for value in values if (n := number(value)) is not None] if isinstance(values, list) else []
    if len(numbers) != (3 if kind.endswith("space") else 2) or len(numbers) != len(values):
        raise UserError(f"space.{key}: {kind} takes {DISTRIBUTIONS[kind]}, but it is {values!r}")
    low, high, *rest = numbers
    if low >= high:
        raise UserError(f"space.{key}: {kind} goes from {low:g} to {high:g}, which is empty: write the smaller first")
    if "log" in kind and low <= 0:
        raise UserError(f"space.{key}: {kind} begins at {low:g}, but a logarithmic range begins above 0")
    if not rest:
        return Domain(kind, tuple(int(n) for n in numbers) if kind.endswith("randint") else tuple(numbers))
    count = int(rest[0])
    if count < 2:
        raise UserError(f"space.{key}: {kind} has {count} values: write at least 2")
    shares = [i / (count - 1) for i in range(count)]
    if kind == "linspace":
        return Domain("choice", tuple(low + (high - low) * share for share in shares))
    return Domain("choice", tuple(float(f"{low * (high / low) ** share:.6g}") for share in shares))


def number(value: Any) -> float | int | None:
    """None where it is not a finite number. YAML reads 1e-4 as text."""
    if isinstance(value, bool):
        return None
    try:
        found = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
