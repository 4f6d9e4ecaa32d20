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
RunFailed, and Ctrl-C raises Interrupted after a checkpoint. A sentence about what your own code has
raised ends with the line of that code; the exception itself is the `__context__` of the error.

app/trireme/__init__.pyi shows editors and type checkers all keywords (app/trireme/stub.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from app.cli.common import files_and_overrides
from app.config import Config
from app.config.io import documentation
from app.config.task_source import refuse_wrong_task
from app.console.terminal import Console
from app.errors import RunFailed, TriremeError, UserError, described, own_line, with_line
from app.run.endings import MACHINE_ERRORS, USER_ERRORS
from app.run.look import RunState, look, open_run
from app.tasks.by_value import name_of

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from app.planner.plan import Plan as Planned
    from app.results.export import Exported
    from experiments.sweep.answer import BestTrial, SoonestTrial

_LOCK = threading.RLock()
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _with_plain_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function raise errors for people as Trireme's own, without what raised them.

    A traceback then has the caller's line and the sentence, also in a notebook.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True  # pytest's, and debuggers', name for frames that say nothing
        try:
            return function(*args, **kwargs)
        except Exception as error:
            plain_error = _plain_error(error)
            if plain_error is None:
                raise
            raise plain_error.with_traceback(None) from None

    return call


def _one_at_a_time(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let one thread at a time call a function, which raises errors as `_with_plain_errors` says.

    Ray's connection, the current folder and the output belong to all threads of a process.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _LOCK:
            return function(*args, **kwargs)

    return _with_plain_errors(call)


def _plain_error(error: Exception) -> TriremeError | None:
    """The error that a program gets for one of Trireme's or of its own code; None for others."""
    if isinstance(error, TriremeError):
        return error
    if isinstance(error, USER_ERRORS):
        return UserError(str(error))
    if isinstance(error, MACHINE_ERRORS):
        return RunFailed(str(error))
    line = own_line(error)
    return None if line is None else RunFailed(with_line(described(error), line))


class Run:
    """A run, read from its folder.

    Args:
        run: The run's folder, wherever it is, or the name of a run in ./runs.

    Raises:
        UserError: There is no such run.
    """

    @_with_plain_errors
    def __init__(self, run: str | Path) -> None:
        self.storage = open_run(str(run))

    @property
    @_with_plain_errors
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
    @_with_plain_errors
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

    @_with_plain_errors
    def metrics(self) -> pandas.DataFrame:
        """All logged metrics by step, a column for each, such as `train/loss` and `eval/loss`."""
        from app.results.history import history

        return history(self.storage)

    @_with_plain_errors
    def checkpoint(self, step: int | None = None) -> str:
        """The folder of a checkpoint.

        Args:
            step: The step of the checkpoint; None means the newest good one.

        Raises:
            UserError: There is no such checkpoint.
        """
        from app.results.trained import checkpoint_of

        return checkpoint_of(self.storage, step).path

    @_with_plain_errors
    def model(self, step: int | None = None) -> nn.Module:
        """The trained model, on the CPU and in evaluation mode.

        Args:
            step: The step of its checkpoint; None means the newest good one.

        Raises:
            UserError: There is no such checkpoint.
        """
        from app.results.trained import trained

        return trained(self.storage, step).model

    @_with_plain_errors
    def export(
        self, to: str = "safetensors", *, out: str | Path | None = None, step: int | None = None
    ) -> Exported:
        """Write the trained weights as files that other programs read.

        Args:
            to: safetensors, huggingface (a folder for `from_pretrained`), peft, or torch.
            out: The folder to write, which must be empty or not exist. None means
                export/FORMAT-step-N in the run's folder.
            step: The step of the checkpoint; None means the newest good one.

        Returns:
            The folder, its files and their size.

        Raises:
            UserError: There is no such checkpoint, the task does not support the format, or the
                folder cannot be written.
        """
        from app.results.export import export_run

        return export_run(self.folder, to=to, out=None if out is None else str(out), step=step)

    @_with_plain_errors
    def generate(
        self,
        text: str,
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        step: int | None = None,
    ) -> str:
        """Continue a text with the language model that the run has trained, or trains now.

        Args:
            text: The text to continue; a model with an encoder reads it and writes its own.
            max_tokens: How many tokens to add at most.
            temperature: 0 takes the most probable token.
            top_k: Draw from this many of the most probable tokens only.
            top_p: Draw from the fewest tokens that together reach this probability.
            seed: The same seed gives the same text.
            step: The step of the checkpoint; None means the newest good one.

        Returns:
            The continuation, without `text`.

        Raises:
            UserError: The run has trained no language model, has no such checkpoint, or a value is
                out of its range.
        """
        from app.results.generate import Sampling, Writer

        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        return "".join(Writer(self.storage, step).write(text, sampling=sampling, seed=seed))

    @_with_plain_errors
    def report(self, out: str | Path | None = None) -> Path:
        """Write one self-contained page about the run.

        Args:
            out: The file to write; None means report.html in the run's folder.

        Returns:
            The page.

        Raises:
            UserError: The file cannot be written.
        """
        return report(self, out=out)

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


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A scaling study that has ended.

    Args:
        folder: The study's folder.
        points: A row for each measurement.
        laws: The fitted law of each strategy.
        verdicts: For each strategy, whether more workers pay, in a sentence.
        recommended: The strategy to use.
        page: The path of the report.
    """

    folder: str
    points: pandas.DataFrame
    laws: dict[str, dict[str, Any]]
    verdicts: dict[str, str]
    recommended: str
    page: str


PROGRAM_TYPES = {"task": "str | type[Task] | Task", "workers": "int | str"}
"""Keys for which a program may give something else than the configuration keeps."""


def _takes_keys(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `help` and notebooks show the configuration's keys as keywords of a function.

    Each has its type, its default, and the first sentence of its documentation.
    """
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    known = {parameter.name for parameter in parameters}
    docs = documentation()
    lines = []
    for field in dataclasses.fields(Config):
        if field.name in known:
            continue
        is_section = dataclasses.is_dataclass(field.default_factory)
        default = field.default
        if default is dataclasses.MISSING:
            default = {}  # of a section: every key of it as it is by default
        annotation = "Mapping[str, Any]" if is_section else field.type
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=PROGRAM_TYPES.get(field.name, annotation),
            )
        )
        text = f"{field.name}: {docs[field.name].split('. ')[0].rstrip('.')}."
        if is_section:
            text += " Keys: " + ", ".join(
                key.removeprefix(f"{field.name}.")
                for key in docs
                if key.startswith(f"{field.name}.")
            )
        lines += textwrap.wrap(
            text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # From Python 3.13 on docstrings have no indentation, which cleandoc takes from earlier ones.
    before, marker, after = inspect.cleandoc(function.__doc__ or "").partition("    keys: ")
    if marker:
        rest = after.partition("\n")[2]
        function.__doc__ = before + "\n".join(lines) + "\n" + rest
    return function


@_takes_keys
@_one_at_a_time
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

    config, _ = _read_experiment(experiment, keys)
    outcome = start_training(config, Console(quiet=quiet), again=again)
    return Run(outcome.folder)


@_takes_keys
@_one_at_a_time
def fork(
    parent: Run | str | Path,
    *overrides: str,
    at: int | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Continue a checkpoint of a run as a new run, with other keys.

    The fork takes over weights, optimizer, step and position in the data; the same call continues
    it.

    Args:
        parent: The run, or its folder; it is not changed.
        overrides: key=value.
        at: The step of the checkpoint; None means the newest good one.
        quiet: Print nothing.
        keys: The configuration's own keys that differ from the run's.

    Raises:
        UserError: There is no such checkpoint, or the input is wrong.
        RunFailed: Training failed; its last good checkpoint is intact.
        Interrupted: Training was stopped by Ctrl-C or a signal, after a checkpoint.
    """
    from app.cli.fork import fork_config
    from app.launchers.train import train as start_training

    config = fork_config(_folder(parent), (*overrides, *_overrides(keys)), at)
    outcome = start_training(config, Console(quiet=quiet))
    return Run(outcome.folder)


@_takes_keys
@_one_at_a_time
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
    config, overrides = _read_experiment(experiment, keys)
    refuse_wrong_task(config.task, config.task_args, needs_data=False)
    # These import torch, which takes seconds.
    import pandas

    from app.planner import output
    from app.planner.machine import MachineOptions, find_machine
    from app.planner.stand_in import plan_experiment

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


@_takes_keys
@_one_at_a_time
def sweep(file: str | Path, *, quiet: bool = False, **keys: Any) -> Sweep:
    """Search the space of a sweep file; the same call continues the sweep.

    Args:
        file: The path of the sweep file.
        quiet: Print nothing.
        keys: The sweep file's own keys, and those of its experiment.

    Raises:
        UserError: The input is wrong.
    """
    import pandas

    from experiments.sweep import run, spec
    from experiments.sweep.trials import load_trial

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


@_takes_keys
@_one_at_a_time
def scale(
    *experiment: str | Path,
    workers: Sequence[int],
    strategy: str | Sequence[str] | None = None,
    weak: bool = False,
    repeats: int = 3,
    steps: int = 10,
    blocks: int = 5,
    quiet: bool = False,
    **keys: Any,
) -> Scaling:
    """Measure an experiment on several numbers of workers; the same call continues the study.

    Args:
        experiment: Paths of YAML files and key=value.
        workers: The numbers of workers to measure.
        strategy: One strategy or several; None means the experiment's.
        weak: Let the batch grow with the workers, instead of sharing the same one.
        repeats: Measurements of every point, in turns.
        steps: Steps in a block.
        blocks: Blocks of each measurement.
        quiet: Print nothing.
        keys: The configuration's own keys.

    Raises:
        UserError: The input is wrong.
        RunFailed: A point could not be measured.
    """
    import pandas

    from experiments.scale import run

    config, _ = _read_experiment(experiment, keys)
    names = [strategy] if isinstance(strategy, str) else strategy
    study = run.StudyPlan(
        workers=tuple(workers),
        strategies=run.strategies_to_measure(config, names, most_workers=max(workers, default=1)),
        weak=weak,
        repeats=repeats,
        blocks=blocks,
        steps=steps,
    )
    outcome = run.scale(config, study, Console(quiet=quiet))
    return Scaling(
        folder=outcome.folder,
        points=pandas.json_normalize([dict(point) for point in outcome.points]),
        laws=outcome.laws,
        verdicts=outcome.verdicts,
        recommended=outcome.recommended,
        page=outcome.page,
    )


@_with_plain_errors
def report(*runs: Run | str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained page about runs, a sweep or a scaling study.

    Args:
        runs: Runs, or the folders of runs, of a sweep or of a study.
        out: The file to write; None means report.html, or comparison.html of several runs.

    Returns:
        The page.

    Raises:
        UserError: A folder holds nothing to report on, or the file cannot be written.
    """
    from experiments.report.runs import report as write_report

    if not runs:
        raise UserError("no run is given: write for instance trireme.report('runs/mnist')")
    folders = [_folder(run) for run in runs]
    page, _ = write_report(folders, None if out is None else str(out))
    return page


@_with_plain_errors
def compare(
    *runs: Run | str | Path, metric: str = "train/loss", last: float = 0.5
) -> pandas.DataFrame:
    """Compare runs with the first one, over the same samples.

    Args:
        runs: Runs, or their folders.
        metric: The metric, of which a lower value is better.
        last: The share of the samples in common, at their end, over which to compare.

    Returns:
        A row for each run but the first, with the mean difference, its interval (`low`, `high`,
        95 %) and the verdict: better, worse, within noise or undecided.

    Raises:
        UserError: There are fewer than two runs, or they cannot be compared.
    """
    import pandas

    from app.results.compare import compare_runs

    storages = [open_run(_folder(run)) for run in runs]
    differences = compare_runs(storages, metric=metric, share=last)
    rows = [{**asdict(each), "verdict": each.verdict} for each in differences]
    return pandas.DataFrame(rows).set_index("name")


@_with_plain_errors
def load_run(run: str | Path) -> Run:
    """A run that was trained before, or that another process trains now.

    Args:
        run: The run's folder, or the name of a run in ./runs.

    Raises:
        UserError: There is no such run.
    """
    return Run(run)


def _folder(run: Run | str | Path) -> str:
    return run.folder if isinstance(run, Run) else str(run)


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
