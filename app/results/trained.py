"""What a run has trained, read back from its folder: its configuration, its task, a checkpoint, the model."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from app.checkpoint import Commit, Weights, commits, latest_good, verify
from app.config import Config
from app.config.io import from_dict
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks import Task, load_task
from app.tasks.by_value import read_task_file
from cluster.document import load_yaml

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A model with the weights of a checkpoint, on the CPU, for evaluation."""

    task: Task
    model: nn.Module
    step: int


def config_of(storage: Storage) -> Config:
    """The configuration of a run's latest start, without secrets."""
    return from_dict(load_yaml(storage.read_bytes("config.yaml")), f"{storage.url}/config.yaml")


def task_of(storage: Storage) -> Task:
    """The run's task. Raises UserError: it, or its data, is not on this machine."""
    config = config_of(storage)
    read_task_file(config.task, storage)
    return load_task(config.task, config.task_args)


def checkpoint_of(storage: Storage, step: int | None, warn: Warn = lambda sentence: None) -> Commit:
    """The newest good checkpoint of a run, or that of a step, its files read once to see that they are as they were
    written. warn: told of each damaged one that was passed over. Raises UserError."""
    folder = storage.join("checkpoints").url
    if step is None:
        newest, passed = latest_good(folder)
        for sentence in passed:
            warn(sentence)
        if newest is None:
            why = passed[0] if passed else "train the run until it saves one"
            raise UserError(f"there is no good checkpoint in {folder}: {why}")
        return newest
    found = commits(folder)
    commit = next((each for each in found if each.step == step), None)
    if commit is None:
        steps = ", ".join(str(number) for number in sorted({each.step for each in found})) or "none"
        raise UserError(f"there is no checkpoint of step {step} in {folder}; there are those of {steps}")
    faults = verify(commit)
    if faults:
        raise UserError(f"the checkpoint of step {step} is damaged: {faults[0]}; leave the step out to take a good one")
    return commit


def trained(storage: Storage, step: int | None = None, warn: Warn = lambda sentence: None) -> Trained:
    """The run's model with the weights of its newest good checkpoint, or of that of a step. Raises UserError."""
    commit, task = checkpoint_of(storage, step, warn), task_of(storage)
    model, weights = task.build_trained(), Weights(commit)
    require_same(model, weights)
    model.load_state_dict({name: weights.read(name) for name in model.state_dict()})
    return Trained(task, model.eval(), commit.step)


def require_same(model: nn.Module, weights: Weights) -> None:
    """Raises UserError where the task makes another model than the one that was trained."""
    shapes = weights.shapes()
    for name, tensor in model.state_dict().items():
        if shapes.get(name) != tuple(tensor.shape):
            raise UserError(
                f"the run's task no longer makes the model that was trained ({name} is {shapes.get(name)} in the "
                f"checkpoint and {tuple(tensor.shape)} now): give it the code and the data of the training"
            )
