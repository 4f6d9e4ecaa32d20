"""Trireme from Python, as `import trireme` (see app/trireme): the command line's verbs as functions, their results as
objects. From a script, a notebook, a thread, and on a Ray that is connected already.

    import trireme

    run = trireme.train("experiments/gpt.yaml", workers=2, strategy="fsdp", train={"steps": 200})
    run.metrics()["train/loss"].plot()
    model = run.model()

An experiment is what the command line takes: paths of YAML files and key=value, in any order. Keywords are the
configuration's own keys (`trireme config` lists them); a section's are a mapping, or dotted: **{"train.steps": 200}.
`task` may also be a class, or an object, of the calling program. What is wrong raises UserError with one sentence; a
training that fails RunFailed; Ctrl-C Interrupted, after a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import split
from app.config import Config
from app.console.terminal import Console
from app.errors import RunFailed, UserError
from app.run.endings import MACHINE_ERRORS, USER_ERRORS
from app.run.look import RunState, look, open_run
from app.tasks.by_value import name_of

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from app.planner.plan import Plan as Planned

_ONE = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """One training at a time in a process: Ray's connection, the current folder and the output belong to all threads.
    What the command line ends with exit code 2 for is a UserError."""
    with _ONE:
        try:
            yield
        except UserError:
            raise
        except USER_ERRORS as error:
            raise UserError(str(error)) from error
        except MACHINE_ERRORS as error:
            raise RunFailed(str(error)) from error


class Run:
    """A run: its folder, and what is in it."""

    def __init__(self, run: str | Path) -> None:
        """run: its folder, wherever it is, or the name of one in ./runs. Raises UserError."""
        self.storage = open_run(str(run))

    @property
    def state(self) -> RunState:
        """As it is now; a run may be trained elsewhere meanwhile."""
        return look(self.storage)

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def folder(self) -> str:
        return self.storage.url

    @property
    def config(self) -> Config:
        """Of its latest start, without secrets."""
        from app.results.trained import config_of

        return config_of(self.storage)

    @property
    def summary(self) -> dict[str, Any]:
        """Of its latest start that ended: steps, seconds, newest metrics, parameters, bytes of memory."""
        return json.loads(self.storage.read_bytes("run.json")).get("summary") or {}

    @property
    def mlflow_run_id(self) -> str | None:
        return json.loads(self.storage.read_bytes("run.json")).get("mlflow_run_id")

    def metrics(self) -> pandas.DataFrame:
        """Everything that was logged, by step: a column for each metric, such as `train/loss` and `eval/loss`."""
        from app.results.history import history

        return history(self.storage)

    def checkpoint(self, step: int | None = None) -> str:
        """The folder of the newest good checkpoint, or of that of a step. Raises UserError where there is none."""
        from app.results.trained import checkpoint_of

        return checkpoint_of(self.storage, step).path

    def model(self, step: int | None = None) -> nn.Module:
        """The trained model, on the CPU and for evaluation: of the newest good checkpoint, or that of a step."""
        from app.results.trained import trained

        return trained(self.storage, step).model

    def __repr__(self) -> str:
        state = self.state
        loss = "" if state.loss is None else f", loss {state.loss:.4f}"
        return f"<Run {state.name}: {state.state}, step {state.step:,} of {state.steps:,}{loss}>"


@dataclass(frozen=True)
class Plan:
    """What the planner expects. layouts: a row for each, the best first."""

    layouts: pandas.DataFrame
    best: dict[str, Any] | None
    text: str
    planned: Planned

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended. status: finished, or incomplete: some trials failed, and the same call tries them again.
    trials: a row for each, with its values and how it ended."""

    status: str
    folder: str
    best: dict[str, Any]
    trials: pandas.DataFrame
    recommendation: dict[str, Any] | None
    page: str
    message: str

    def run(self, trial: str | None = None) -> Run:
        """A trial's run; the best one's where none is named."""
        return Run(f"{self.folder}/{trial or self.best['trial']}")


def train(*experiment: str | Path, again: bool = False, quiet: bool = False, **keys: Any) -> Run:
    """Trains an experiment to its end; the same call continues a run that was stopped.

    again: when the run has finished, train it once more under a new name. quiet: print nothing.
    Raises:
        UserError, RunFailed, Interrupted: see the module.
    """
    from app.launchers.train import train as start

    with _one_at_a_time():
        config = _read(experiment, keys)[0]
        return Run(start(config, Console(quiet=quiet), again=again).folder)


def plan(
    *experiment: str | Path,
    cluster: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    interconnect: str | None = None,
    **keys: Any,
) -> Plan:
    """Predicts which layouts of an experiment fit, how fast they train and at what cost; starts nothing.

    cluster, gpus, gpu, gpus_per_node, interconnect: as the command's options; by default for what train would use.
    keys: stay as they are given.
    """
    import pandas

    from app.planner import output
    from app.planner.machine import Asked, find
    from app.planner.stand_in import plan_experiment

    with _one_at_a_time():
        config, words = _read(experiment, keys)
        machine = find(Asked(cluster, gpus, gpu, gpus_per_node, interconnect), config.workers)
        given = frozenset(word.partition("=")[0] for word in words)
        found = plan_experiment(config, machine, given)
    rows = [found.layout(row) for row in found.rows]
    best = found.layout(found.best) if found.best else None
    return Plan(pandas.json_normalize(rows), best, output.text(found), found)


def sweep(file: str | Path, *, quiet: bool = False, **keys: Any) -> Sweep:
    """Searches the space that a sweep file has; the same call continues it. keys: the file's own."""
    import pandas

    from experiments.sweep import run, spec
    from experiments.sweep.trials import load_trial

    with _one_at_a_time():
        found = run.sweep(spec.read_sweep(str(file), _words(keys)), Console(quiet=quiet))
    kept = [load_trial(folder) for folder in sorted(Path(found.folder).iterdir()) if folder.is_dir()]
    rows = [
        {"trial": trial.name, "status": trial.status, **trial.values, **trial.last.get("metrics", {})}
        for trial in kept
        if trial is not None
    ]
    table = pandas.DataFrame(rows).set_index("trial")
    best, recommendation = dict(found.best), dict(found.recommendation) if found.recommendation else None
    return Sweep(found.status, found.folder, best, table, recommendation, found.page, found.message)


def load_run(run: str | Path) -> Run:
    """A run that was trained before, or is trained elsewhere now: its folder, or the name of one in ./runs."""
    return Run(run)


def _read(experiment: tuple[str | Path, ...], keys: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The configuration, and what of it was given as key=value."""
    from app.config.io import load_config

    files, words = split(tuple(map(str, experiment)))
    words += _words(keys)
    return load_config(files, words), words


def _words(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Python's values as the command line's key=value. Raises UserError for one that has no such form."""
    words: list[str] = []
    for key, value in keys.items():
        if f"{prefix}{key}" == "task":
            value = name_of(value)
        if isinstance(value, Mapping) and value:
            words += _words(value, f"{prefix}{key}.")
            continue
        try:
            words.append(f"{prefix}{key}={json.dumps(value, default=_plain)}")
        except TypeError:
            raise UserError(f"{prefix}{key} is {value!r}: write text, a number, a list or a mapping") from None
    return words


def _plain(value: Any) -> Any:
    """NumPy's numbers, and paths."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
