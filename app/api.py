"""Trireme from Python, as `import trireme` (see app/trireme).

The command line's verbs are functions here, and their results are objects. They work in a script, a
notebook or a thread, and on a Ray that is connected already.

    import trireme

    run = trireme.train("experiments/gpt.yaml", workers=2, strategy="fsdp", train={"steps": 200})
    run.metrics()["train/loss"].plot()
    model = run.model()

An experiment is what the command line takes: paths of YAML files and key=value, in any order.
Keywords are the configuration's own keys (`trireme config` lists them); a section is a mapping, or
has dotted keys: **{"train.steps": 200}. `task` may also be a class or an object of the calling
program.

All functions raise UserError, with one sentence, for wrong input. A training that fails raises
RunFailed, and Ctrl-C raises Interrupted after a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import files_and_overrides
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
    from experiments.sweep.answer import BestTrial, SoonestTrial

_LOCK = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one thread at a time train or plan, and turn all errors for people into Trireme's own.

    Ray's connection, the current folder and the output belong to all threads of a process.

    Raises:
        UserError: For what the command line ends with exit code 2 for.
        RunFailed: For a machine that did not do what it usually can.
    """
    with _LOCK:
        try:
            yield
        except UserError:
            raise
        except USER_ERRORS as error:
            raise UserError(str(error)) from error
        except MACHINE_ERRORS as error:
            raise RunFailed(str(error)) from error


class Run:
    """A run, read from its folder.

    Args:
        run: The run's folder, wherever it is, or the name of a run in ./runs.

    Raises:
        UserError: There is no such run.
    """

    def __init__(self, run: str | Path) -> None:
        self.storage = open_run(str(run))

    @property
    def state(self) -> RunState:
        """The state of the run now, which another process may be training."""
        return look(self.storage)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.state.name

    @property
    def folder(self) -> str:
        """The path or URL of the run's folder."""
        return self.storage.url

    @property
    def config(self) -> Config:
        """The configuration of the run's latest start, without secrets."""
        from app.results.trained import config_of

        return config_of(self.storage)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the latest start that ended.

        It has steps, seconds, the newest metrics, the number of parameters and bytes of memory.
        """
        return self._manifest().get("summary") or {}

    @property
    def mlflow_run_id(self) -> str | None:
        """The id of the MLflow run; None without tracking."""
        return self._manifest().get("mlflow_run_id")

    def _manifest(self) -> dict[str, Any]:
        return json.loads(self.storage.read_bytes("run.json"))

    def metrics(self) -> pandas.DataFrame:
        """All logged metrics by step, a column for each, such as `train/loss` and `eval/loss`."""
        from app.results.history import history

        return history(self.storage)

    def checkpoint(self, step: int | None = None) -> str:
        """The folder of a checkpoint.

        Args:
            step: The step of the checkpoint; None means the newest good one.

        Raises:
            UserError: There is no such checkpoint.
        """
        from app.results.trained import checkpoint_of

        return checkpoint_of(self.storage, step).path

    def model(self, step: int | None = None) -> nn.Module:
        """The trained model, on the CPU and in evaluation mode.

        Args:
            step: The step of its checkpoint; None means the newest good one.

        Raises:
            UserError: There is no such checkpoint.
        """
        from app.results.trained import trained

        return trained(self.storage, step).model

    def __repr__(self) -> str:
        state = self.state
        loss = "" if state.loss is None else f", loss {state.loss:.4f}"
        return f"<Run {state.name}: {state.state}, step {state.step:,} of {state.steps:,}{loss}>"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the planner predicts.

    Args:
        layouts: A row for each layout, the best first.
        best: The best layout; None if none fits.
        text: The plan for a person.
        planned: The planner's own object.
    """

    layouts: pandas.DataFrame
    best: dict[str, Any] | None
    text: str
    planned: Planned

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep that has ended.

    Args:
        status: finished; or incomplete if some trials failed, which the same call tries again.
        folder: The sweep's folder.
        best: The best trial.
        trials: A row for each trial, with its values and how it ended.
        recommendation: The batch size and learning rate to use; None if too little is known.
        page: The path of the report.
        message: What is left to do, for a person; "" if nothing is.
    """

    status: str
    folder: str
    best: BestTrial
    trials: pandas.DataFrame
    recommendation: SoonestTrial | None
    page: str
    message: str

    def run(self, trial: str | None = None) -> Run:
        """The run of a trial.

        Args:
            trial: The name of the trial; None means the best one.
        """
        return Run(f"{self.folder}/{trial or self.best['trial']}")


def train(*experiment: str | Path, again: bool = False, quiet: bool = False, **keys: Any) -> Run:
    """Train an experiment to its end; the same call continues a run that was stopped.

    Args:
        experiment: Paths of YAML files and key=value.
        again: If the run has finished, train it once more under a new name.
        quiet: Print nothing.
        keys: The configuration's own keys.

    Raises:
        UserError: The input is wrong.
        RunFailed: Training failed; its last good checkpoint is intact.
        Interrupted: Training was stopped by Ctrl-C or a signal, after a checkpoint.
    """
    from app.launchers.train import train as start_training

    with _one_at_a_time():
        config, _ = _read_experiment(experiment, keys)
        outcome = start_training(config, Console(quiet=quiet), again=again)
        return Run(outcome.folder)


def plan(
    *experiment: str | Path,
    cluster: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    interconnect: str | None = None,
    **keys: Any,
) -> Plan:
    """Predict which layouts of an experiment fit, how fast they train and at what cost.

    Nothing is started. Without the arguments below the plan is for the cluster or the machine on
    which `train` would train.

    Args:
        experiment: Paths of YAML files and key=value.
        cluster: A cluster's file, or the name of one of Trireme's own.
        gpus: Plan for this number of GPUs, which need not exist.
        gpu: The name of the GPU.
        gpus_per_node: The number of GPUs of one node.
        interconnect: The rate between nodes, such as 400Gb.
        keys: The configuration's own keys, which every layout has as they are given.

    Raises:
        UserError: The input is wrong.
    """
    import pandas

    from app.planner import output
    from app.planner.machine import MachineOptions, find_machine
    from app.planner.stand_in import plan_experiment

    with _one_at_a_time():
        config, overrides = _read_experiment(experiment, keys)
        request = MachineOptions(
            cluster=cluster,
            gpus=gpus,
            gpu=gpu,
            per_node=gpus_per_node,
            interconnect=interconnect,
        )
        machine = find_machine(request, config.workers)
        fixed_keys = frozenset(override.partition("=")[0] for override in overrides)
        planned = plan_experiment(config, machine, fixed_keys)
    return Plan(
        layouts=pandas.json_normalize([planned.layout(row) for row in planned.rows]),
        best=planned.layout(planned.best) if planned.best else None,
        text=output.text(planned),
        planned=planned,
    )


def sweep(file: str | Path, *, quiet: bool = False, **keys: Any) -> Sweep:
    """Search the space of a sweep file; the same call continues the sweep.

    Args:
        file: The path of the sweep file.
        quiet: Print nothing.
        keys: The sweep file's own keys.

    Raises:
        UserError: The input is wrong.
    """
    import pandas

    from experiments.sweep import run, spec
    from experiments.sweep.trials import load_trial

    with _one_at_a_time():
        sweep_spec = spec.read_sweep(str(file), _overrides(keys))
        outcome = run.sweep(sweep_spec, Console(quiet=quiet))
    rows = []
    for folder in sorted(Path(outcome.folder).iterdir()):
        trial = load_trial(folder) if folder.is_dir() else None
        if trial is not None:
            metrics = trial.last.get("metrics", {})
            rows.append({"trial": trial.name, "status": trial.status, **trial.values, **metrics})
    return Sweep(
        status=outcome.status,
        folder=outcome.folder,
        best=outcome.best,
        trials=pandas.DataFrame(rows).set_index("trial"),
        recommendation=outcome.recommendation,
        page=outcome.page,
        message=outcome.message,
    )


def load_run(run: str | Path) -> Run:
    """A run that was trained before, or that another process trains now.

    Args:
        run: The run's folder, or the name of a run in ./runs.

    Raises:
        UserError: There is no such run.
    """
    return Run(run)


def _read_experiment(
    experiment: tuple[str | Path, ...],
    keys: Mapping[str, Any],
) -> tuple[Config, list[str]]:
    """The configuration of an experiment, and its overrides as key=value.

    Args:
        experiment: Paths of YAML files and key=value.
        keys: The configuration's own keys.
    """
    from app.config.io import load_config

    files, overrides = files_and_overrides(tuple(map(str, experiment)))
    overrides += _overrides(keys)
    return load_config(files, overrides), overrides


def _overrides(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Python values as the command line's key=value.

    Args:
        keys: Values by key; a section is a mapping.
        prefix: What the dotted keys begin with.

    Raises:
        UserError: A value has no such form.
    """
    overrides: list[str] = []
    for name, value in keys.items():
        key = f"{prefix}{name}"
        if key == "task":
            value = name_of(value)
        if isinstance(value, Mapping) and value:
            overrides += _overrides(value, f"{key}.")
            continue
        try:
            overrides.append(f"{key}={json.dumps(value, default=_plain)}")
        except TypeError:
            advice = "write text, a number, a list or a mapping"
            raise UserError(f"{key} is {value!r}: {advice}") from None
    return overrides


def _plain(value: Any) -> Any:
    """A path or a number of NumPy's as a value that JSON has.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
