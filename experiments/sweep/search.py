"""How a sweep searches: the search space, and Ray Tune's searchers and schedulers.

train.global_batch_size: [32, 64, 128]        a list: searcher grid tries all, others draw
optimizer.lr: {loguniform: [1e-4, 1e-1]}      a distribution, one of DISTRIBUTIONS
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.errors import UserError, nearest
from experiments.sweep.paired import Comparisons
from experiments.sweep.trials import RATE, SEED

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import SearchAlgorithm, Searcher

Values = dict[str, Any]
"""A point of the search space: values by key."""

SEARCHERS = ("grid", "random", "optuna")
PAIRED = "paired"
"""Stops trials that are shown to be worse over the same samples; see paired.py."""
SCHEDULERS = ("none", "asha", PAIRED)
DISTRIBUTIONS = {
    "choice": "any number of values",
    "uniform": "[low, high]",
    "loguniform": "[low, high]",
    "randint": "[low, high], high itself excluded",
    "lograndint": "[low, high], high itself excluded",
    "linspace": "[low, high, number of values]",
    "logspace": "[low, high, number of values]",
}
"""The arguments of each distribution."""
DEFAULT_TRIALS = 16
EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")


@dataclass(frozen=True)
class Domain:
    """The values that one key may have.

    Attributes:
        kind: "choice", or another distribution.
        values: The values of a choice, or the distribution's arguments.
    """

    kind: str
    values: tuple[Any, ...]

    @property
    def is_choice(self) -> bool:
        return self.kind == "choice"

    def for_tune(self) -> Any:
        """The domain as Tune's search spaces have it.

        https://docs.ray.io/en/latest/tune/api/search_space.html
        """
        from ray import tune

        if self.is_choice:
            return tune.choice(list(self.values))
        distribution = getattr(tune, self.kind)
        return distribution(*self.values)

    def ends(self) -> tuple[Any, Any]:
        """The smallest and the largest value; of values without an order the first one twice."""
        if any(number(value) is None for value in self.values):
            return self.values[0], self.values[0]
        if self.is_choice:
            return min(self.values), max(self.values)
        low, high = self.values
        return low, high


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
    """Where schedulers compare trials: at the same step, or the same number of samples, which is
    fairer where batch sizes differ."""
    trials: int | None = None
    """How many; a grid has its own number. Default: 16."""
    concurrent: int | None = None
    """The most trials at once. Default: as many as there is room for."""
    seed: int = 0
    """Of random and of suggested points."""

    @property
    def points(self) -> list[Values] | None:
        """All points of a grid, the first key changing fastest; None if Tune suggests points."""
        if self.searcher != "grid":
            return None
        keys = list(self.space)
        slowest_first = [self.space[key].values for key in reversed(keys)]
        points = []
        for values in itertools.product(*slowest_first):
            points.append(dict(zip(keys, reversed(values))))
        return points

    @property
    def count(self) -> int:
        """The number of trials."""
        points = self.points
        if points is not None:
            return len(points)
        return self.trials or DEFAULT_TRIALS

    @property
    def stop_reason(self) -> str:
        """Why the scheduler stops a trial, for a person."""
        if self.scheduler == PAIRED:
            return "stopped early for a better learning rate"
        return f"stopped early by {self.scheduler}"

    @property
    def sign(self) -> int:
        """1 if a lower value is better, else -1: a lower sign · value is always better."""
        return 1 if self.mode == "min" else -1


def make_searcher(search: Search, first_points: Sequence[Values]) -> Searcher | SearchAlgorithm:
    """Makes Tune's searcher.

    https://docs.ray.io/en/latest/tune/api/suggestion.html

    Args:
        search: Names it and has its arguments.
        first_points: Points that are tried before all others.

    Raises:
        UserError: It does not take one of the arguments.
    """
    from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter

    from app.data.randomness import mix

    points = [dict(values) for values in first_points]
    # A second start, which has points of the first one, must not draw the same points again, nor
    # those of a sweep with another seed. NumPy and Optuna take seeds of 32 bits.
    seed = mix(search.seed, len(points)) % 2**32 if points else search.seed
    try:
        if search.searcher != "optuna":
            return BasicVariantGenerator(
                points_to_evaluate=points,
                max_concurrent=search.concurrent or 0,
                random_state=seed,
                **search.searcher_args,
            )
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        arguments: dict[str, Any] = {
            "points_to_evaluate": points or None,
            "metric": search.metric,
            "mode": search.mode,
            "seed": seed,
        }
        searcher = OptunaSearch(**(arguments | search.searcher_args))
    except (TypeError, ValueError) as error:
        problem = f"searcher {search.searcher} does not take these arguments"
        raise UserError(f"{problem}: {error}") from error
    if search.concurrent:
        return ConcurrencyLimiter(searcher, search.concurrent)
    return searcher


def make_scheduler(search: Search, *, longest: int, report_every: int) -> TrialScheduler:
    """Makes Tune's scheduler.

    https://docs.ray.io/en/latest/tune/api/schedulers.html

    Args:
        search: Names it and has its arguments.
        longest: The steps of the longest trial, or its samples, as `search.time` says.
        report_every: Steps or samples between two reports of that trial.

    Raises:
        UserError: It does not take one of the arguments.
    """
    from ray.tune import TuneError, schedulers

    if search.scheduler == PAIRED:
        # Reports are due at multiples of the whole run's steps, so the first may come at once.
        return _make_paired(search, looks=math.ceil(longest / report_every))
    arguments: dict[str, Any] = {
        "time_attr": search.time,
        "metric": search.metric,
        "mode": search.mode,
        "max_t": longest + 1,
        "grace_period": max(report_every, longest // 16),
        "reduction_factor": 4,
    }
    try:
        if search.scheduler == "none":
            return schedulers.FIFOScheduler(**search.scheduler_args)
        arguments |= search.scheduler_args
        arguments["grace_period"] = min(arguments["grace_period"], longest)
        return schedulers.ASHAScheduler(**arguments)
    except (TypeError, ValueError, AssertionError, TuneError) as error:
        reason = " ".join(str(error).split())
        problem = f"scheduler {search.scheduler} does not take these arguments"
        raise UserError(f"{problem}: {reason}") from error


def _make_paired(search: Search, *, looks: int) -> TrialScheduler:
    from experiments.sweep.paired_scheduler import PairedScheduler

    rates = [float(rate) for rate in search.space[RATE].values]
    seeds = len(search.space[SEED].values) if SEED in search.space else 1
    comparisons = Comparisons(rates=sorted(rates), seeds=seeds, looks=looks)
    return PairedScheduler(comparisons)


def read_space(space: object) -> dict[str, Domain]:
    """Reads the search space of a sweep file.

    Args:
        space: What the file has under `space`.

    Returns:
        The domains by key.

    Raises:
        UserError: It is empty, or a domain is not valid.
    """
    if not isinstance(space, Mapping) or not space:
        example = "write for instance space: {optimizer.lr: [1.0e-3, 1.0e-2]}"
        raise UserError(f"the search space is empty: {example}")
    return {str(key): _read_domain(str(key), domain) for key, domain in space.items()}


def _read_domain(key: str, domain: Any) -> Domain:
    """Reads one key's domain in a sweep file: a list, or {distribution: arguments}."""
    if isinstance(domain, list):
        domain = {"choice": domain}
    if not isinstance(domain, Mapping) or len(domain) != 1:
        raise UserError(
            f"space.{key} is {domain!r}, which is one value, not a choice: write a list such as "
            f"[{domain!r}, …], a distribution such as {{loguniform: [1e-4, 1e-1]}}, or put it "
            "under `set`"
        )
    ((kind, arguments),) = domain.items()
    if kind not in DISTRIBUTIONS:
        problem = f"space.{key} has the unknown distribution {kind!r}"
        hint = nearest(str(kind), DISTRIBUTIONS)
        raise UserError(f"{problem}{hint}: write one of {', '.join(DISTRIBUTIONS)}")
    if kind == "choice" and isinstance(arguments, list):
        return _read_choice(key, arguments)
    return _read_distribution(key, kind, arguments)


def _read_choice(key: str, values: list[Any]) -> Domain:
    if not values:
        problem = f"space.{key} is an empty list, so there is nothing to try"
        raise UserError(f"{problem}: give at least one value")
    # YAML reads 1e-4, which has no point, as a text.
    values = [
        float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
        for value in values
    ]
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    return Domain("choice", tuple(different))


def _read_distribution(key: str, kind: str, arguments: object) -> Domain:
    numbers = []
    if isinstance(arguments, list):
        numbers = [number(argument) for argument in arguments]
    low, high, count = [*numbers, None, None, None][:3]
    is_spaced = kind.endswith("space")
    expected = 3 if is_spaced else 2
    if len(numbers) != expected or low is None or high is None or (is_spaced and count is None):
        raise UserError(f"space.{key}: {kind} takes {DISTRIBUTIONS[kind]}, but it is {arguments!r}")
    if low >= high:
        problem = f"{kind} goes from {low:g} to {high:g}, which is empty"
        raise UserError(f"space.{key}: {problem}: write the smaller first")
    if "log" in kind and low <= 0:
        problem = f"{kind} begins at {low:g}, but a logarithmic range begins above 0"
        raise UserError(f"space.{key}: {problem}")
    if count is not None:
        return _spaced_values(key, kind, low=low, high=high, count=int(count))
    if kind.endswith("randint"):
        return Domain(kind, (int(low), int(high)))
    return Domain(kind, (low, high))


def _spaced_values(key: str, kind: str, *, low: float, high: float, count: int) -> Domain:
    """The values of linspace or logspace, both ends included."""
    if count < 2:
        raise UserError(f"space.{key}: {kind} has {count} values: write at least 2")
    shares = [i / (count - 1) for i in range(count)]
    if kind == "linspace":
        values = [low + (high - low) * share for share in shares]
    else:
        values = [float(f"{low * (high / low) ** share:.6g}") for share in shares]
    return Domain("choice", tuple(values))


def number(value: Any) -> float | int | None:
    """A finite number, also from a text, as YAML reads 1e-4; None if the value is none."""
    if isinstance(value, bool):
        return None
    try:
        parsed = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return None
    return parsed if math.isfinite(parsed) else None
