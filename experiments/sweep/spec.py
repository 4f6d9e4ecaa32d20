"""Reads a sweep file: an experiment, a search space, and how to search it.

    trireme sweep experiments/sweep_mnist.yaml searcher=random trials=8 train.steps=100

The keys of the sweep itself are the fields of `Sweep` and `Search`; every other key=value is one of
the experiment's.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from app.checkpoint import Commit, find
from app.config import Config
from app.config.check import RUN_NAME
from app.config.io import flatten, from_dict, load_config, read_yaml, to_dict
from app.data.loader import length
from app.errors import UserError, nearest
from app.results.trained import checkpoint_of
from app.run.fork import config_file
from app.run.look import open_run
from app.run.manifest import run_folder
from app.run.prepare import prepare, read_task
from app.storage.storage import Storage
from app.training.batch_gather import evaluation_batch
from experiments.sweep.budget import Budget, read_budget
from experiments.sweep.paired import LEAST_RATES
from experiments.sweep.prior import Prior, prior_of
from experiments.sweep.search import (
    PAIRED,
    SCHEDULERS,
    SEARCHERS,
    Domain,
    Search,
    Values,
    number,
    read_space,
)
from experiments.sweep.trials import BATCH, RATE, SEED, Report, Trial

BEST = "best"
SOONEST = "soonest"
DEFAULT_SETTINGS = 3
DEFAULT_MORE_RATES = 2


@dataclass(frozen=True, kw_only=True)
class Sweep(Search):
    """What a sweep file says, checked."""

    name: str
    """The sweep's folder in run.storage, and its MLflow run. Default: the file's name."""
    experiment: Config
    """In the file: an experiment's path, relative to the file, or its keys; `set` and key=value are
    merged into it."""
    target: float | None = None
    """The value of the metric to reach; trials that have reached it stop."""
    reports: int | None = 10
    """Evaluations of each trial, evenly spread; null: as train.eval_every says."""
    fork: str = ""
    """A run, or RUN@STEP: every trial continues from this checkpoint. Without `experiment` trials
    have the run's configuration."""
    samples: int | None = None
    """With `fork`: the samples that each trial sees from there on."""
    budget: Budget = dataclasses.field(default_factory=Budget)
    """What all trials together may take, over all starts: {samples: 200_000, seconds: 3600,
    dollars: 5}, or a number of dollars, by the prices of the nodes. It is said before the first
    trial and never exceeded: more samples are refused, and at the end of the others trials save,
    and the answer is that of the trials that have ended. A higher budget continues the
    sweep."""
    confirm: int | None = None
    """The best settings that are trained again with other seeds before one is recommended; 0: none.
    Default: 3; 0 with `fork`, or where the space has train.seed and so its own seeds."""
    confirm_seeds: int = 2
    """With how many other seeds."""
    more_rates: int | None = None
    """With `fork` and a grid of two or more learning rates: how many are added at a batch size
    whose best one is the last that was tried, unless that batch size is worse than another. Each is
    as far from the last as that is from its neighbour, and gets all seeds, as far as budget.samples
    allows. Default: 2; 0: none."""
    next: str = ""
    """Which setting next.yaml has: best, or soonest at the target. Default: soonest with a target,
    at which trials stop, otherwise best."""
    origin_step: int = 0
    """The step of the checkpoint that trials continue from; not in the file."""
    origin_samples: int = 0
    """The samples that the run had seen at that step; not in the file."""

    @property
    def settings_to_confirm(self) -> int:
        """How many settings are trained again with other seeds."""
        if self.confirm is not None:
            return self.confirm
        return 0 if self.fork or SEED in self.space else DEFAULT_SETTINGS

    @property
    def has_rates_with_edge(self) -> bool:
        """Whether it is a grid of forks whose last learning rate may be the best one."""
        rates = self.space.get(RATE)
        is_grid_of_forks = bool(self.fork) and self.searcher == "grid"
        return is_grid_of_forks and rates is not None and len(rates.values) >= 2

    @property
    def rates_beyond(self) -> int:
        """How many learning rates a batch size gets beyond those of the grid."""
        if not self.has_rates_with_edge:
            return 0
        return DEFAULT_MORE_RATES if self.more_rates is None else self.more_rates

    def trying(self, trials: Sequence[Trial]) -> "Sweep":
        """This sweep, which tries the points of these trials and no others, each to its end."""
        space = {
            key: Domain("choice", tuple(dict.fromkeys(trial.values[key] for trial in trials)))
            if key in (SEED, RATE)
            else self.space[key]
            for key in trials[0].values
        }
        return dataclasses.replace(
            self,
            space=space,
            searcher="random",
            searcher_args={},
            scheduler="none",
            scheduler_args={},
            trials=len(trials),
        )

    def is_reached(self, report: Report) -> bool:
        """Whether a trial has reached the target with this report."""
        if self.target is None or not report:
            return False
        value = report["metrics"].get(self.metric)
        return value is not None and self.sign * value <= self.sign * self.target

    def config(self, values: Values, *, name: str, storage: str) -> Config:
        """The configuration of a trial's run.

        Args:
            values: The point of the search space.
            name: The run's name.
            storage: The folder with all runs of the sweep.

        Raises:
            UserError: A value is not valid.
        """
        tree = to_dict(self.experiment)
        for key, value in values.items():
            *sections, last = key.split(".")
            section = tree
            for part in sections:
                section = section.setdefault(part, {})
            section[last] = str(value) if key in ("workers", "strategy") else value
        # A space has one of them, and the experiment may have the other.
        if "train.steps" in values:
            tree["train"]["epochs"] = None
        elif "train.epochs" in values:
            tree["train"]["steps"] = None
        if BATCH in values:
            tree["train"]["batch_schedule"] = []
        if self.fork:
            tree["checkpoint"]["fork"] = self.fork
            for key, value in self._curve.items():
                if tree["schedule"].get(key) is None:
                    tree["schedule"][key] = value
        if self.samples is not None:
            train = from_dict({"train": tree["train"]}, source="a trial").train
            end = self.origin_samples + self.samples
            branch_steps = train.batches.steps_until(end, start=self.origin_samples)
            tree["train"] |= {"steps": self.origin_step + branch_steps, "epochs": None}
        tree["tracking"]["log_model"] = False  # the run that follows the sweep logs its model
        tree["run"] |= {"name": name, "storage": storage}
        # By default a trial takes one device, and the sweep uses the others for other trials.
        if tree["workers"] == "auto":
            tree["workers"] = "1"
        return from_dict(tree, source="a trial")

    @cached_property
    def _whole_run(self) -> tuple[int, int]:
        """Steps and samples of the run that is forked, or of the experiment."""
        train = self.experiment.train
        samples_of_data = None if train.steps else length(read_task(self.experiment).train_data())
        steps = train.steps_for(samples_of_data)
        return steps, train.batches.samples_after(steps)

    def to_the_end(self) -> "Sweep":
        """This sweep of forks, whose trials go on to the end of the run that is forked, if it is
        further than that of the branches.
        """
        _, run_samples = self._whole_run
        left = max(run_samples - self.origin_samples, self.samples or 0)
        return dataclasses.replace(self, samples=left)

    @cached_property
    def _curve(self) -> dict[str, int]:
        """The keys of `schedule` by which branches stay on the curve of the run that is forked.

        It is one of samples, the same for all batches: over steps a larger batch would begin
        further along it. A run that has ended, or ends before its branches, has its end moved to
        theirs.
        """
        run_steps, run_samples = self._whole_run
        batch = max(1, round(run_samples / run_steps))
        end = max(run_samples, self.origin_samples + (self.samples or 0))
        return {"steps": -(-end // batch), "batch_size": batch}

    @cached_property
    def configs(self) -> list[Config]:
        """Configurations by which the space is checked.

        Those of all points of a grid; otherwise of two points with the extremes of every key, since
        what is wrong with a suggested point is mostly wrong with one of these.

        Raises:
            UserError: A value is not valid.
        """
        points = self.points
        if points is None:
            lowest = {key: domain.ends()[0] for key, domain in self.space.items()}
            highest = {key: domain.ends()[1] for key, domain in self.space.items()}
            if "workers" in highest:
                # The smallest batch on the most workers is the point that may not be divisible.
                lowest["workers"] = highest["workers"]
            points = [lowest, highest]
        return [self.config(values, name="trial", storage="runs") for values in points]

    @cached_property
    def prior(self) -> Prior | None:
        """What a law says of the best batch size and rate; None if it is not for this experiment.

        Raises:
            UserError: A trial could not be trained.
            LayoutError: Likewise.
        """
        return None if self.fork else prior_of(self.configs[0])

    def longest(self) -> int:
        """The length of the longest trial, in steps or samples, as `time` says.

        Raises:
            UserError: A trial could not be trained, or trials could not be compared.
            LayoutError: Likewise.
        """
        tasks: dict[str, Any] = {}
        lengths = [1]
        evaluation_batches = set[int]()
        for config in self._different_configs():
            key = str((config.task, config.task_args))
            if key not in tasks:
                tasks[key] = read_task(config)
            prepared = prepare(config, tasks[key], int(config.workers), devices_per_node=None)
            if prepared.gathers and self.metric.startswith("eval/"):
                evaluation_batches.add(evaluation_batch(prepared.config, prepared.layout))
            steps = prepared.steps - self.origin_step
            samples = self.samples_of(config, steps)
            lengths.append(samples if self.time == "samples" else steps)
        if len(evaluation_batches) > 1:
            sizes = f"{min(evaluation_batches)} to {max(evaluation_batches)}"
            raise UserError(
                f"the trials would be evaluated in batches of {sizes} samples, and the task's "
                f"loss compares the samples of a batch (self.gather), so {self.metric} would say "
                "more of the batch than of the model: write train.eval_batch_size under `set`"
            )
        return max(lengths)

    def samples_of(self, config: Config, steps: int) -> int:
        """The samples that a trial has seen after some steps, from the checkpoint on if it forks.

        Args:
            config: The trial's configuration.
            steps: Its steps.
        """
        start = self.origin_samples
        return config.train.batches.samples_after(steps, start=start) - start

    def samples_of_branch(self, values: Values) -> int:
        """The samples that a trial of a fork sees.

        Args:
            values: Its point of the search space.
        """
        config = self.config(values, name="trial", storage="runs")
        return self.samples_of(config, (config.train.steps or 0) - self.origin_step)

    def all_samples(self) -> int:
        """The samples of all trials together, those that confirm the best ones included, and those
        beyond the grid not; of points that are drawn at most so many.
        """
        lengths = []
        samples_of_data: dict[str, int | None] = {}
        for config in self.configs:
            key = str((config.task, config.task_args))
            if config.train.steps is None and key not in samples_of_data:
                samples_of_data[key] = length(read_task(config).train_data())
            steps = config.train.steps_for(samples_of_data.get(key)) - self.origin_step
            lengths.append(self.samples_of(config, steps))
        confirming = self.settings_to_confirm * self.confirm_seeds * max(lengths)
        searched = sum(lengths) if self.points is not None else self.count * max(lengths)
        return searched + confirming

    def samples_beyond(self) -> int:
        """The most samples that trials beyond the grid may see, within the budget."""
        rates = self.space[RATE].values if self.rates_beyond else ()
        points = [values for values in self.points or () if values.get(RATE) in rates[:1]]
        most = self.rates_beyond * sum(self.samples_of_branch(values) for values in points)
        if self.budget.samples is None:
            return most
        return max(0, min(most, self.budget.samples - self.all_samples()))

    def workers_of(self, values: Values) -> int:
        """The number of workers of a trial."""
        workers = str(values.get("workers", self.experiment.workers))
        return 1 if workers == "auto" else int(workers)

    def _different_configs(self) -> Collection[Config]:
        """Of `configs`, one of each that have the same length and layout."""
        different = {}
        for config in self.configs:
            what_counts = (
                config.task,
                config.task_args,
                config.train,
                config.workers,
                config.strategy,
            )
            different[str(what_counts)] = config
        return different.values()

    def identity(self) -> dict[str, Any]:
        """What makes this sweep itself: with another value of any of these it is another one."""
        experiment = to_dict(self.experiment)
        for section in ("run", "tracking", "fault"):
            del experiment[section]
        space = {key: [domain.kind, *domain.values] for key, domain in self.space.items()}
        branches = {"fork": self.fork, "samples": self.samples} if self.fork else {}
        return {
            **branches,
            "searcher": self.searcher,
            "scheduler": self.scheduler,
            "metric": self.metric,
            "mode": self.mode,
            "seed": self.seed,
            "space": space,
            "experiment": experiment,
        }


FILE_KEYS = {field.name for field in dataclasses.fields(Sweep)} - {
    "searcher_args",
    "scheduler_args",
    "origin_step",
    "origin_samples",
}
"""The keys of a sweep file, besides `set`."""
EXPERIMENT_KEYS = {field.name for field in dataclasses.fields(Config)}
"""The keys and sections of an experiment."""


def read_sweep(file: str, overrides: list[str]) -> Sweep:
    """Reads a sweep file.

    Args:
        file: Its path.
        overrides: key=value of the command line, which take precedence.

    Raises:
        UserError: Something in them cannot be used.
    """
    path = Path(file)
    keys = _read_keys(path)
    experiment_overrides = _override_keys(keys, overrides)
    for key in keys.keys() - FILE_KEYS - {"set"}:
        hint = f"{nearest(key, FILE_KEYS)}: its keys are {', '.join(sorted(FILE_KEYS))}"
        raise UserError(f"{file} has the unknown key {key!r}{hint}")
    searcher, searcher_args = _name_and_arguments("searcher", keys.pop("searcher", "grid"))
    space = read_space(keys.pop("space", None))
    forked_run = str(keys.pop("fork", None) or "")
    default_scheduler = _default_scheduler(
        space,
        searcher,
        metric=str(keys.get("metric") or Search.metric),
        is_fork=bool(forked_run),
    )
    scheduler_key = keys.pop("scheduler", default_scheduler)
    scheduler, scheduler_args = _name_and_arguments("scheduler", scheduler_key)
    experiment_or_file = keys.pop("experiment", None)
    if forked_run and not experiment_or_file:
        experiment_or_file = str(config_file(_run_and_step(forked_run)[0]))
    experiment = _read_experiment(
        path,
        experiment_or_file,
        extra=keys.pop("set", None) or {},
        overrides=experiment_overrides,
    )
    name = str(keys.pop("name", None) or path.stem)
    if forked_run:
        checkpoint = _origin(forked_run, run_folder(experiment, name))
        keys |= {
            "fork": checkpoint.path,
            "origin_step": checkpoint.step,
            "origin_samples": checkpoint.meta["samples_seen"],
        }
    keys["budget"] = read_budget(keys.pop("budget", None))
    if not keys.get("next"):
        keys["next"] = SOONEST if keys.get("target") is not None else BEST
    sweep = Sweep(
        name=name,
        experiment=experiment,
        space=space,
        searcher=searcher,
        searcher_args=searcher_args,
        scheduler=scheduler,
        scheduler_args=scheduler_args,
        **{key: _checked(key, value) for key, value in keys.items()},
    )
    _check(sweep)
    return sweep


def _override_keys(keys: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Sets those keys of a sweep file that the command line has.

    Args:
        keys: Of the file; changed in place.
        overrides: key=value of the command line.

    Returns:
        The overrides of the experiment's keys.

    Raises:
        UserError: One is of no key, and similar to one of the sweep's.
    """
    experiment_overrides = []
    for override in overrides:
        key, _, value = override.partition("=")
        section, dot, name_in_section = key.partition(".")
        if dot and section in ("space", "budget"):
            keys[section] = {**(keys.get(section) or {}), name_in_section: yaml.safe_load(value)}
        elif key in FILE_KEYS - {"experiment", "space"}:
            keys[key] = yaml.safe_load(value)
        else:
            is_key = key in EXPERIMENT_KEYS or "." in key
            hint = "" if is_key else nearest(key, FILE_KEYS)
            if hint:
                raise UserError(f"there is no key {key!r} (on the command line){hint}")
            experiment_overrides.append(override)
    return experiment_overrides


def _default_scheduler(
    space: Mapping[str, Domain], searcher: str, *, metric: str, is_fork: bool
) -> str:
    """The scheduler of a sweep whose file names none.

    Args:
        space: The search space.
        searcher: Suggests its points.
        metric: What the sweep compares.
        is_fork: Whether its trials continue from a checkpoint, and so see the same samples.
    """
    if is_fork and _problem_of_paired(space, searcher, metric) is None:
        return PAIRED
    # A grid's table wants all its cells; of points that are drawn most are not worth their end.
    return "none" if searcher == "grid" else "asha"


def _run_and_step(fork: str) -> tuple[Storage, int | None]:
    """The folder of the run that a sweep forks, and the step if one is given.

    Args:
        fork: RUN or RUN@STEP.

    Raises:
        UserError: There is no such run.
    """
    run, separator, step = fork.rpartition("@")
    if separator and step.isdigit():
        return open_run(run), int(step)
    return open_run(fork), None


def _origin(fork: str, folder: Storage) -> Commit:
    """The checkpoint that all trials of a sweep continue from.

    The first start of the sweep decides on it, since the run may have saved newer ones by the next.

    Args:
        fork: RUN or RUN@STEP.
        folder: The sweep's.

    Raises:
        UserError: There is no such checkpoint.
    """
    if folder.exists("sweep.json"):
        chosen = json.loads(folder.read_bytes("sweep.json"))["about"].get("fork")
        if chosen:
            return find(chosen)
    storage, step = _run_and_step(fork)
    return checkpoint_of(storage, step)


def _read_keys(path: Path) -> dict[str, Any]:
    """The keys of a sweep file and their values.

    Raises:
        UserError: It cannot be read, or it is an experiment.
    """
    keys: Any = OmegaConf.to_container(read_yaml(path))
    if "space" not in keys and "task" in keys:
        problem = f"{path} is an experiment, which `trireme train` runs"
        raise UserError(f"{problem}; a sweep file has experiment and space")
    return dict(keys)


def _read_experiment(
    path: Path,
    experiment: Any,
    *,
    extra: Any,
    overrides: list[str],
) -> Config:
    """The experiment of a sweep file.

    Args:
        path: The sweep file.
        experiment: What it has under `experiment`: a path, or the experiment's keys.
        extra: What it has under `set`.
        overrides: key=value of the command line.

    Raises:
        UserError: There is none, or something in it cannot be used.
    """
    if not experiment:
        raise UserError(f"{path} names no experiment: write experiment: mnist.yaml, or its keys")
    if not isinstance(extra, Mapping):
        problem = f"{path}: set is {extra!r}"
        raise UserError(f"{problem}, but it must be a mapping of the experiment's keys to values")
    files: list[Path] = []
    keys: dict[str, Any] = {}
    if isinstance(experiment, Mapping):
        keys = flatten(experiment)
    else:
        file = Path(str(experiment)).expanduser()
        beside_sweep = path.parent / file
        files = [beside_sweep if beside_sweep.exists() or not file.exists() else file]
    keys = {**keys, **extra}
    settings = [f"{key}={_as_yaml(value)}" for key, value in keys.items()]
    return load_config(files, [*settings, *overrides])


def _as_yaml(value: Any) -> str:
    """A value as the command line has it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.strip().removesuffix("...").strip()  # YAML ends a document of one word with `...`


def _name_and_arguments(key: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of the searcher or the scheduler.

    Args:
        key: "searcher" or "scheduler".
        value: A name, or {name: NAME, ARGUMENT: …}.

    Raises:
        UserError: There is none of that name.
    """
    names = {"searcher": SEARCHERS, "scheduler": SCHEDULERS}[key]
    arguments = dict(value) if isinstance(value, Mapping) else {"name": value or "none"}
    name = str(arguments.pop("name", "")).lower()
    if name not in names:
        hint = f"{nearest(name, names)}: write one of {', '.join(names)}"
        raise UserError(f"there is no {key} {name!r}{hint}")
    return name, arguments


def _checked(key: str, value: Any) -> Any:
    """The value of one of the sweep's own keys.

    Raises:
        UserError: It is not valid.
    """
    is_integer = type(value) is int  # a truth value is none
    match key:
        case "trials" | "reports" | "concurrent" | "samples":
            is_valid = value is None or (is_integer and value > 0)
            expected = "a whole number greater than 0"
        case "confirm" | "more_rates":
            is_valid = value is None or (is_integer and value >= 0)
            expected = "a whole number, or 0 for none"
        case "confirm_seeds":
            is_valid = is_integer and value > 0
            expected = "a whole number greater than 0"
        case "next":
            is_valid = value in ("", BEST, SOONEST)
            expected = f"{BEST} or {SOONEST}"
        case "seed":
            is_valid = is_integer and value >= 0
            expected = "a whole number, 0 or greater"
        case "mode":
            is_valid = value in ("min", "max")
            expected = "min or max"
        case "time":
            is_valid = value in ("step", "samples")
            expected = "step or samples"
        case "metric":
            is_valid = str(value).startswith(("eval/", "train/"))
            expected = "eval/NAME or train/NAME, as trials log it"
        case "target":
            is_valid = value is None or number(value) is not None
            expected = "a number"
        case _:
            is_valid = True
            expected = ""
    if not is_valid:
        raise UserError(f"{key} is {value!r}, but it must be {expected}")
    return number(value) if key == "target" else value


def _problem_of_paired(space: Mapping[str, Domain], searcher: str, metric: str) -> str | None:
    """Why trials cannot be stopped by what they have lost over the same samples; None if they can.

    Args:
        space: The search space.
        searcher: Suggests its points.
        metric: What the sweep compares.
    """
    rates = space.get(RATE)
    if searcher != "grid" or rates is None or len(rates.values) < LEAST_RATES:
        return f"it needs a grid with {LEAST_RATES} or more values of {RATE}"
    if not metric.endswith("loss"):
        return f"it compares training losses, and this sweep compares {metric}"
    return None


def _check(sweep: Sweep) -> None:
    """Checks the keys together.

    Raises:
        UserError: They contradict each other, or a value of the space is not valid.
    """
    space = sweep.space
    is_grid = sweep.searcher == "grid"
    if sweep.next == SOONEST and sweep.target is None:
        problem = "next is soonest, but no target says when a trial is done"
        raise UserError(f"{problem}: write target: 0.1")
    if sweep.confirm and SEED in space:
        problem = "confirm is for a space without train.seed, and this one has its own seeds"
        raise UserError(f"{problem}: leave one of them out")
    if not RUN_NAME.fullmatch(sweep.name):
        rule = "use letters, digits, '.', '_' and '-' (at most 128)"
        raise UserError(f"name is {sweep.name!r}: {rule}")
    if sweep.fork and sweep.samples is None:
        problem = "a sweep of forks needs the number of samples that each trial sees"
        raise UserError(f"{problem}: write samples: 10000")
    if sweep.samples is not None and not sweep.fork:
        problem = "samples is for the trials of a fork, and fork is not given"
        raise UserError(f"{problem}: write fork: runs/NAME, or train.steps under set")
    if sweep.more_rates and not sweep.has_rates_with_edge:
        problem = "more_rates is for a fork and a grid of two or more learning rates"
        raise UserError(f"{problem}, which this sweep does not have: leave it out")
    if sweep.scheduler == PAIRED:
        reason = _problem_of_paired(space, sweep.searcher, sweep.metric)
        if reason is not None:
            raise UserError(f"scheduler is paired, but {reason}: write scheduler: none, or asha")
        if sweep.scheduler_args:
            raise UserError("scheduler paired takes no arguments: write scheduler: paired")
    if {"train.steps", "train.epochs"} <= space.keys():
        problem = "the space has train.steps and train.epochs, which contradict each other"
        raise UserError(f"{problem}: leave one out")
    for key, domain in space.items():
        if key.split(".")[0] in ("run", "tracking"):
            problem = f"the space has {key}, which the sweep sets itself for every trial"
            raise UserError(f"{problem}: put it under `set`")
        if is_grid and not domain.is_choice:
            problem = f"searcher grid cannot try all of space.{key}"
            raise UserError(f"{problem}: write a list, or searcher: random")
    if is_grid and sweep.trials not in (None, sweep.count):
        problem = f"trials is {sweep.trials}, but the grid has {sweep.count} points"
        raise UserError(f"{problem}: leave trials out")
    for config in sweep.configs:  # raises if a value is not valid
        if config.train.eval_separate:
            problem = "a sweep compares trials by what they evaluate while they train"
            raise UserError(f"{problem}: leave train.eval_separate out")
