"""Reads a sweep file: an experiment, a search space and how to search it; each mistake is one sentence.

    trireme sweep experiments/sweep_mnist.yaml searcher=random trials=8 train.steps=100

Keys of the sweep itself are the fields of `Sweep` and `Search`; every other key=value is one of the experiment's.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from app.config import Config
from app.config.check import RUN_NAME
from app.config.io import flatten, from_dict, load_config, read_yaml, to_dict
from app.errors import UserError, nearest
from app.run.prepare import prepare, read_task
from experiments.sweep.search import SCHEDULERS, SEARCHERS, Search, number, read_space


@dataclass(frozen=True, kw_only=True)
class Sweep(Search):
    """What a sweep file says, checked."""

    name: str
    """The sweep's folder in run.storage, and its MLflow run. Default: the file's name."""
    experiment: Config
    """In the file: an experiment's path, relative to the file, or its keys; `set` and key=value are merged into it."""
    target: float | None = None
    """The value of the metric to reach; trials that have reached it stop."""
    reports: int | None = 10
    """Evaluations of each trial, evenly spread; null: as train.eval_every says."""

    def ends_at(self, report: Mapping[str, Any]) -> bool:
        """Whether a trial has reached the target with this report."""
        value = report["metrics"].get(self.metric) if report else None
        return self.target is not None and value is not None and self.sign * value <= self.sign * self.target

    def config(self, values: Mapping[str, Any], name: str, storage: str) -> Config:
        """A trial's configuration. Raises UserError: a value is not valid."""
        tree = to_dict(self.experiment)
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
        tree["tracking"]["log_model"] = False  # of the next run, not of each trial
        tree["run"] |= {"name": name, "storage": storage}
        # One trial takes one device unless told otherwise; a sweep uses the others for other trials.
        tree["workers"] = "1" if tree["workers"] == "auto" else tree["workers"]
        return from_dict(tree, source="a trial")

    @cached_property
    def configs(self) -> list[Config]:
        """Those of all points of a grid, else of two that hold the extremes of every key: what is wrong with a
        suggested point is mostly wrong there."""
        points = self.points
        if points is None:
            low, high = ({key: domain.ends()[i] for key, domain in self.space.items()} for i in (0, 1))
            points = [low | ({"workers": high["workers"]} if "workers" in high else {}), high]
        return [self.config(values, "trial", "runs") for values in points]

    def longest(self) -> int:
        """Steps (or samples, as `time` says) of the longest trial. Raises UserError, LayoutError: a trial could not be
        trained."""
        tasks: dict[str, Any] = {}
        alike = {str((c.task, c.task_args, c.train, c.workers, c.strategy)): c for c in self.configs}
        found = 1
        for config in alike.values():
            key = str((config.task, config.task_args))
            if key not in tasks:
                tasks[key] = read_task(config)
            steps = prepare(config, tasks[key], int(config.workers), devices_per_node=None).steps
            found = max(found, steps * (config.train.global_batch_size if self.time == "samples" else 1))
        return found

    def identity(self) -> dict[str, Any]:
        """What makes this sweep itself: another value of any of these is another sweep."""
        tree = {k: v for k, v in to_dict(self.experiment).items() if k not in ("run", "tracking", "fault")}
        space = {key: [domain.kind, *domain.values] for key, domain in self.space.items()}
        own = {key: getattr(self, key) for key in ("searcher", "scheduler", "metric", "mode", "seed")}
        return {**own, "space": space, "experiment": tree}


def read_sweep(file: str, overrides: list[str]) -> Sweep:
    """The sweep in a YAML file, with key=value on top. Raises UserError: something in it cannot be used."""
    path = Path(file)
    given, inner = _read(path), []
    known = {f.name for f in dataclasses.fields(Sweep)} - {"searcher_args", "scheduler_args"}
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("space."):
            given.setdefault("space", {})[key.removeprefix("space.")] = yaml.safe_load(value)
        elif key in known - {"experiment", "space"}:
            given[key] = yaml.safe_load(value)
        else:
            inner.append(override)
    for unknown in given.keys() - known - {"set"}:
        raise UserError(
            f"{file} has the unknown key {unknown!r}{nearest(unknown, known)}: its keys are {', '.join(sorted(known))}"
        )
    searcher, searcher_args = _named("searcher", given.pop("searcher", "grid"), SEARCHERS)
    scheduler, scheduler_args = _named("scheduler", given.pop("scheduler", None) or "none", SCHEDULERS)
    space = read_space(given.pop("space", None))
    experiment = _experiment(path, given.pop("experiment", None), given.pop("set", None) or {}, inner)
    own = {key: _checked(key, value) for key, value in given.items()}
    own["name"] = str(own.get("name") or path.stem)
    how: dict[str, Any] = {"searcher": searcher, "searcher_args": searcher_args}
    how |= {"scheduler": scheduler, "scheduler_args": scheduler_args}
    sweep = Sweep(experiment=experiment, space=space, **how, **own)
    _check(sweep)
    return sweep


def _read(path: Path) -> dict[str, Any]:
    given: Any = OmegaConf.to_container(read_yaml(path))
    if "space" not in given and "task" in given:
        raise UserError(f"{path} is an experiment, which `trireme train` runs; a sweep file has experiment and space")
    return dict(given)


def _experiment(path: Path, experiment: Any, extra: Any, overrides: list[str]) -> Config:
    if not experiment:
        raise UserError(f"{path} names no experiment: write experiment: mnist.yaml, or its keys")
    if not isinstance(extra, Mapping):
        raise UserError(f"{path}: set is {extra!r}, but it must be a mapping of the experiment's keys to values")
    files, inline = [], experiment
    if not isinstance(experiment, Mapping):
        file, inline = Path(str(experiment)).expanduser(), {}
        beside = path.parent / file
        files = [beside if beside.exists() or not file.exists() else file]
    keys = {**flatten(inline), **extra}
    lines = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000)}" for key, value in keys.items()]
    return load_config(files, [*(line.strip().removesuffix("...").strip() for line in lines), *overrides])


def _named(what: str, given: Any, known: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    arguments = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = str(arguments.pop("name", "")).lower()
    if name not in known:
        raise UserError(f"there is no {what} {name!r}{nearest(name, known)}: write one of {', '.join(known)}")
    return name, arguments


_COUNT = (lambda value: value is None or (type(value) is int and value > 0), "a whole number greater than 0")
_MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "trials": _COUNT,
    "reports": _COUNT,
    "concurrent": _COUNT,
    "seed": (lambda value: type(value) is int, "a whole number"),
    "mode": (lambda value: value in ("min", "max"), "min or max"),
    "time": (lambda value: value in ("step", "samples"), "step or samples"),
    "metric": (lambda value: str(value).startswith(("eval/", "train/")), "eval/NAME or train/NAME, as trials log it"),
    "target": (lambda value: value is None or number(value) is not None, "a number"),
}


def _checked(key: str, value: Any) -> Any:
    """The value of one of the sweep's own keys."""
    fits, kind = _MUST_BE.get(key, (lambda value: True, ""))
    if not fits(value):
        raise UserError(f"{key} is {value!r}, but it must be {kind}")
    return number(value) if key == "target" else value


def _check(sweep: Sweep) -> None:
    """What is wrong with several keys together."""
    space, grid = sweep.space, sweep.searcher == "grid"
    if not RUN_NAME.fullmatch(sweep.name):
        raise UserError(f"name is {sweep.name!r}: use letters, digits, '.', '_' and '-' (at most 128)")
    if {"train.steps", "train.epochs"} <= space.keys():
        raise UserError("the space has train.steps and train.epochs, which contradict each other: leave one out")
    for key, domain in space.items():
        if key.split(".")[0] in ("run", "tracking"):
            raise UserError(f"the space has {key}, which the sweep sets itself for every trial: put it under `set`")
        if grid and not domain.finite:
            raise UserError(f"searcher grid cannot try all of space.{key}: write a list, or searcher: random")
    if grid and sweep.trials not in (None, sweep.count):
        raise UserError(f"trials is {sweep.trials}, but the grid has {sweep.count} points: leave trials out")
    _ = sweep.configs  # says which value is not valid
