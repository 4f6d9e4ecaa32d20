"""Reads a sweep file: an experiment, a search space, and how to search it; each mistake is one sentence.

    trireme sweep experiments/sweep_mnist.yaml trials=8 train.steps=100

Keys of the sweep itself are those of `Sweep`; every other key=value is one of the experiment's.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.config import Config
from app.config_check import RUN_NAME
from app.config_io import from_dict, load_config, to_dict
from app.errors import UserError
from experiments.sweep.space import Domain, number, points, read_space

SEARCHERS = ("grid", "random", "optuna", "ax", "bayesopt", "bohb", "hebo", "hyperopt", "nevergrad", "zoopt")
SCHEDULERS = ("none", "asha", "pbt", "median")
TIMES = ("step", "samples")


@dataclass
class Sweep:
    """What a sweep file says, checked."""

    name: str
    base: Config
    space: dict[str, Domain]
    searcher: str = "grid"
    searcher_args: dict[str, Any] = field(default_factory=dict)
    scheduler: str = "none"
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    metric: str = "eval/loss"
    mode: str = "min"
    target: float | None = None
    stop_at_target: bool = True
    trials: int | None = None
    reports: int | None = 10
    time: str = "step"
    warm: bool = True
    log_models: bool = False
    concurrent: int | None = None
    price_per_worker_hour: float | None = None
    seed: int = 0
    points: list[dict[str, Any]] | None = None  # None: a searcher of Tune's suggests them one by one

    @property
    def count(self) -> int:
        """Trials in all."""
        return len(self.points) if self.points is not None else self.trials or 16

    @property
    def worse(self) -> float:
        return math.inf if self.mode == "min" else -math.inf

    def better(self, a: float, b: float) -> bool:
        return a < b if self.mode == "min" else a > b

    def config(self, values: Mapping[str, Any], name: str, storage: str) -> Config:
        """A trial's configuration.

        Raises:
            UserError: the values make no valid one.
        """
        tree = to_dict(self.base)
        for key, value in values.items():
            *path, last = key.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
            place[last] = str(value) if key in ("workers", "strategy") else value
        if "train.steps" in values:
            tree["train"]["epochs"] = None
        elif "train.epochs" in values:
            tree["train"]["steps"] = None
        if not self.log_models:
            tree["tracking"]["log_model"] = False
        tree["run"] |= {"name": name, "storage": storage}
        # One trial takes one device unless told otherwise; a sweep uses the others for other trials.
        tree["workers"] = "1" if tree["workers"] == "auto" else tree["workers"]
        return from_dict(tree, source="a trial")

    def about(self) -> dict[str, Any]:
        """What makes this sweep itself: another value of any of these is another sweep."""
        tree = to_dict(self.base)
        for section in ("run", "tracking", "fault"):
            tree.pop(section)
        return {
            "experiment": tree,
            "space": {key: [domain.kind, *domain.values] for key, domain in self.space.items()},
            "searcher": self.searcher,
            "scheduler": self.scheduler,
            "metric": self.metric,
            "mode": self.mode,
            "seed": self.seed,
        }


DOCUMENTATION = {
    "name": "the sweep's folder in run.storage and its MLflow run; default: the file's name",
    "experiment": "an experiment's file (relative to this one), or its keys",
    "set": "further keys of the experiment",
    "space": "key: [values] or key: {distribution: [numbers]}",
    "searcher": "grid, random, optuna or another of Tune's; or {name: optuna, ARGUMENT: …}",
    "scheduler": "none, asha, pbt or median; or {name: asha, reduction_factor: 4, grace: …}",
    "metric": "what is compared, as trials log it: eval/loss, eval/accuracy, train/loss",
    "mode": "min or max",
    "target": "value of the metric that is to be reached; trials that have reached it stop",
    "stop_at_target": "false: they go on",
    "trials": "how many (random and others; a grid has its own number)",
    "reports": "evaluations per trial, evenly spread; null: as train.eval_every says",
    "time": "what schedulers compare trials at: step or samples (fairer where batch sizes differ)",
    "warm": "true: worker processes outlive a trial; false: Ray Train starts new ones for each",
    "log_models": "true: every trial's model goes to MLflow, as one run's would",
    "concurrent": "most trials at once; default: as many as fit",
    "price_per_worker_hour": "for the cost of reaching the target",
    "seed": "of the random and the suggested points",
}


def read_sweep(file: str, overrides: list[str]) -> Sweep:
    """The sweep in a YAML file, with key=value on top.

    Raises:
        UserError: something in it cannot be used.
    """
    given = _read(Path(file))
    inner: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in DOCUMENTATION and key not in ("experiment", "set", "space"):
            given[key] = yaml.safe_load(value)
        elif key.startswith("space."):
            given.setdefault("space", {})[key.removeprefix("space.")] = yaml.safe_load(value)
        else:
            inner.append(override)
    unknown = next((key for key in given if key not in DOCUMENTATION), None)
    if unknown is not None:
        raise UserError(f"{file} has the unknown key {unknown!r}{_near(str(unknown), tuple(DOCUMENTATION))}")
    return _sweep(Path(file), given, inner)


def _read(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "write the path of a sweep's YAML file"
        raise UserError(f"there is no file {path}: {hint}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path} is no readable YAML: {first}") from error
    if not isinstance(given, dict):
        raise UserError(f"{path} holds no sweep: write at least experiment and space")
    if "space" not in given and "task" in given:
        raise UserError(
            f"{path} is an experiment, not a sweep: `trireme train` runs it; a sweep has experiment and space"
        )
    return given


def _sweep(path: Path, given: dict[str, Any], overrides: list[str]) -> Sweep:
    space = read_space(given.get("space"))
    base = _base(path, given, overrides)
    searcher, searcher_args = _named("searcher", given.get("searcher", "grid"), SEARCHERS)
    scheduler, scheduler_args = _named("scheduler", given.get("scheduler") or "none", SCHEDULERS)
    handled = ("name", "experiment", "set", "space", "searcher", "scheduler")
    plain = {key: _plain(key, value) for key, value in given.items() if key not in handled}
    sweep = Sweep(
        str(given.get("name") or path.stem), base, space, searcher, searcher_args, scheduler, scheduler_args, **plain
    )
    _check(sweep)
    if searcher in ("grid", "random"):
        sweep.points = points(space, searcher, sweep.trials, sweep.seed)
        _check_points(sweep)
    else:
        _check_points(dataclasses.replace(sweep, points=_corners(space)))
    return sweep


def _base(path: Path, given: dict[str, Any], overrides: list[str]) -> Config:
    experiment, extra = given.get("experiment"), given.get("set") or {}
    if not experiment:
        raise UserError(f"{path} names no experiment: write experiment: mnist.yaml, or its keys")
    if not isinstance(extra, Mapping):
        raise UserError(f"{path}: set is {extra!r}, but it must be a mapping of the experiment's keys to values")
    lines = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"
        for key, value in extra.items()
    ]
    if isinstance(experiment, Mapping):
        with tempfile.TemporaryDirectory() as folder:  # so that it is read and checked as every other experiment is
            inline = Path(folder) / path.name
            inline.write_text(yaml.safe_dump(dict(experiment), sort_keys=False))
            return load_config([inline], [*lines, *overrides])
    file = Path(str(experiment)).expanduser()
    beside = path.parent / file
    return load_config([beside if beside.exists() or not file.exists() else file], [*lines, *overrides])


def _named(what: str, given: Any, known: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    arguments = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = str(arguments.pop("name", "")).lower()
    if name not in known:
        raise UserError(f"there is no {what} {name!r}{_near(name, known)}")
    return name, arguments


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, 2, 0.6)
    return f": did you mean {' or '.join(near)}?" if near else f": there are {', '.join(known)}"


def _plain(key: str, value: Any) -> Any:
    """The value of one of the sweep's own keys, of the type that it must have."""
    if key in _COUNTS and not (value is None or (type(value) is int and value > 0)):
        raise UserError(f"{key} is {value!r}, but it must be a whole number greater than 0")
    if key in _SWITCHES and not isinstance(value, bool):
        raise UserError(f"{key} is {value!r}, but it must be true or false")
    if key in _NUMBERS and value is not None:
        found = number(value)
        if found is None or not math.isfinite(found):
            raise UserError(f"{key} is {value!r}, but it must be a number")
        return found
    if key == "seed" and type(value) is not int:
        raise UserError(f"seed is {value!r}, but it must be a whole number")
    return value


_COUNTS = ("trials", "reports", "concurrent")
_SWITCHES = ("warm", "stop_at_target", "log_models")
_NUMBERS = ("target", "price_per_worker_hour")


def _check(sweep: Sweep) -> None:
    if not RUN_NAME.fullmatch(sweep.name):
        raise UserError(f"name is {sweep.name!r}: use letters, digits, '.', '_' and '-' (at most 128)")
    if sweep.mode not in ("min", "max"):
        raise UserError(f"mode is {sweep.mode!r}, but it must be min or max")
    if sweep.time not in TIMES:
        raise UserError(f"time is {sweep.time!r}, but it must be one of {', '.join(TIMES)}")
    if not isinstance(sweep.metric, str) or sweep.metric.split("/")[0] not in ("eval", "train"):
        raise UserError(
            f"metric is {sweep.metric!r}, but trials log eval/NAME and train/NAME: write for instance eval/loss"
        )
    if {"train.steps", "train.epochs"} <= sweep.space.keys():
        raise UserError(
            "the space has train.steps and train.epochs, which contradict each other: leave one of them out"
        )
    for key in sweep.space:
        if key.split(".")[0] in ("run", "tracking"):
            raise UserError(f"the space has {key}, which the sweep sets itself for every trial: put it under `set`")
    if sweep.price_per_worker_hour is not None and sweep.price_per_worker_hour < 0:
        raise UserError(f"price_per_worker_hour is {sweep.price_per_worker_hour:g}, but it must not be negative")
    if sweep.scheduler == "pbt" and sweep.searcher not in ("grid", "random"):
        raise UserError(f"scheduler pbt changes the values itself: write searcher: random instead of {sweep.searcher}")
    if sweep.scheduler == "pbt" and sweep.time == "samples":
        raise UserError("scheduler pbt copies trials from one another, which must count steps: write time: step")


def _corners(space: Mapping[str, Domain]) -> list[dict[str, Any]]:
    """Two points that hold the extremes of every key: what is wrong with a suggested point is mostly wrong there."""
    ends = {key: domain.smallest_and_largest() for key, domain in space.items() if _ordered(domain)}
    rest = {key: domain.values[0] for key, domain in space.items() if not _ordered(domain)}
    few = {key: low for key, (low, _) in ends.items()} | rest
    workers = {"workers": ends["workers"][1]} if "workers" in ends else {}
    return [few | workers, {key: high for key, (_, high) in ends.items()} | rest]


def _ordered(domain: Domain) -> bool:
    return all(isinstance(value, int | float) for value in domain.values)


def _check_points(sweep: Sweep) -> None:
    """Every point makes a valid configuration, whose batch feeds its workers."""
    for values in (sweep.points or [])[:256]:
        config = sweep.config(values, "trial", "runs")
        workers, batch = int(config.workers), config.train.global_batch_size
        if batch < workers:
            raise UserError(
                f"train.global_batch_size={batch} is below workers={workers}, so some would have nothing to do: leave "
                "one of the two out of the space, or write larger batch sizes"
            )
        if (config.train.steps is None) == (config.train.epochs is None):
            raise UserError("give train.steps or train.epochs, one of the two")
