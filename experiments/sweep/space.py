"""A search space: for each configuration key its values or its distribution, and the points that are tried.

    train.global_batch_size: [32, 64, 128]        a list: every one under searcher grid, else drawn from
    optimizer.lr: {loguniform: [1e-4, 1e-1]}      a distribution; DISTRIBUTIONS names them

Grid and random points are a pure function of (space, trials, seed), so a sweep that is run again tries the same ones.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import UserError

DISTRIBUTIONS = {
    "choice": "any number of values",
    "uniform": "[low, high]",
    "loguniform": "[low, high]",
    "quniform": "[low, high, step]",
    "qloguniform": "[low, high, step]",
    "randint": "[low, high], high itself left out",
    "lograndint": "[low, high], high itself left out",
    "normal": "[mean, standard deviation]",
    "linspace": "[low, high, how many]",
    "logspace": "[low, high, how many]",
}
_NUMBERS = {"linspace": 3, "logspace": 3, "quniform": 3, "qloguniform": 3}


@dataclass(frozen=True)
class Domain:
    """What one key may be: a `choice` among `values`, or the distribution `kind` with those numbers."""

    kind: str
    values: tuple[Any, ...]

    @property
    def finite(self) -> bool:
        return self.kind == "choice"

    def draw(self, source: random.Random) -> Any:
        """One value."""
        v = self.values
        if self.kind == "choice":
            return source.choice(v)
        if self.kind == "normal":
            return source.gauss(v[0], v[1])
        if self.kind in ("randint", "lograndint"):
            if self.kind == "randint":
                return source.randrange(v[0], v[1])
            return min(v[1] - 1, int(math.exp(source.uniform(math.log(v[0]), math.log(v[1])))))
        if "log" in self.kind:
            value = math.exp(source.uniform(math.log(v[0]), math.log(v[1])))
        else:
            value = source.uniform(v[0], v[1])
        if self.kind.startswith("q"):
            value = min(v[1], max(v[0], round(value / v[2]) * v[2]))
            return int(value) if all(isinstance(x, int) for x in v) else value
        return value

    def for_tune(self) -> Any:
        """The same as Ray Tune writes it, for its searchers."""
        from ray import tune

        if self.kind == "choice":
            return tune.choice(list(self.values))
        return getattr(tune, "randn" if self.kind == "normal" else self.kind)(*self.values)

    def smallest_and_largest(self) -> tuple[Any, Any]:
        return (min(self.values), max(self.values)) if self.finite else (self.values[0], self.values[1])


Space = Mapping[str, Domain]


def read_space(given: Any) -> dict[str, Domain]:
    """The space that a sweep file holds.

    Raises:
        UserError: it is empty, or a domain is none.
    """
    if not isinstance(given, Mapping) or not given:
        raise UserError(
            "the search space is empty: write for instance space: {optimizer.lr: {loguniform: [1e-4, 1e-1]}}"
        )
    return {str(key): _domain(str(key), value) for key, value in given.items()}


def _domain(key: str, given: Any) -> Domain:
    if isinstance(given, list):
        return _choice(key, given)
    if not isinstance(given, Mapping) or len(given) != 1:
        raise UserError(
            f"space.{key} is {given!r}, which is one value, not a choice: write a list such as [{given!r}, …], a "
            "distribution such as {loguniform: [1e-4, 1e-1]}, or put it under `set`"
        )
    ((kind, values),) = given.items()
    if kind == "grid":
        kind = "choice"
    if kind not in DISTRIBUTIONS:
        near = difflib.get_close_matches(str(kind), DISTRIBUTIONS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(DISTRIBUTIONS)}"
        raise UserError(f"space.{key} has the unknown distribution {kind!r}: {hint}")
    if not isinstance(values, list):
        raise UserError(f"space.{key}: {kind} takes {DISTRIBUTIONS[kind]}, but it is {values!r}")
    return _choice(key, values) if kind == "choice" else _distribution(key, kind, values)


def _choice(key: str, values: list[Any]) -> Domain:
    if not values:
        raise UserError(f"space.{key} is an empty list, so there is nothing to try: give at least one value")
    unique = [v for i, v in enumerate(values) if v not in values[:i]]
    if len(unique) < len(values):
        twice = next(v for i, v in enumerate(values) if v in values[:i])
        raise UserError(f"space.{key} names {twice!r} twice: name each value once")
    return Domain("choice", tuple(values))


def _distribution(key: str, kind: str, values: list[Any]) -> Domain:
    numbers = [number(v) for v in values]
    if len(numbers) != _NUMBERS.get(kind, 2) or any(v is None for v in numbers):
        raise UserError(f"space.{key}: {kind} takes {DISTRIBUTIONS[kind]}, but it is {values!r}")
    low, high = numbers[0], numbers[1]
    assert low is not None and high is not None
    if kind != "normal" and low >= high:
        raise UserError(f"space.{key}: {kind} goes from {low:g} to {high:g}, which is empty: write the smaller first")
    if "log" in kind and low <= 0:
        raise UserError(f"space.{key}: {kind} begins at {low:g}, but a logarithmic range begins above 0")
    if kind in ("linspace", "logspace"):
        count = int(numbers[2] or 0)
        if count < 2:
            raise UserError(f"space.{key}: {kind} is of {count} values: write at least 2")
        if kind == "linspace":
            return Domain("choice", tuple(low + (high - low) * i / (count - 1) for i in range(count)))
        ratio = math.log(high / low) / (count - 1)
        return Domain("choice", tuple(float(f"{low * math.exp(ratio * i):.6g}") for i in range(count)))
    if kind in ("randint", "lograndint"):
        return Domain(kind, tuple(int(v or 0) for v in numbers))
    return Domain(kind, tuple(numbers))


def number(value: Any) -> float | int | None:
    """YAML reads 1e-4 as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def points(space: Space, searcher: str, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """What `grid` or `random` tries, in order; the first key of the space changes fastest.

    Raises:
        UserError: grid over a distribution, or more trials than the grid has points.
    """
    if searcher == "random":
        source = random.Random(seed)
        return [{key: domain.draw(source) for key, domain in space.items()} for _ in range(trials or 16)]
    for key, domain in space.items():
        if not domain.finite:
            raise UserError(
                f"searcher grid cannot try all of space.{key}, which is a {domain.kind}: write a list, "
                "{logspace: [low, high, how many]}, or searcher: random"
            )
    keys = list(space)[::-1]
    products = itertools.product(*(space[key].values for key in keys))
    grid = [dict(list(zip(keys, values))[::-1]) for values in products]
    if trials is not None and trials != len(grid):
        raise UserError(
            f"trials is {trials}, but the grid has {len(grid)} points: leave trials out, or write searcher: random"
        )
    return grid
