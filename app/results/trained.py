"""What a run has trained, read from its folder: configuration, task, checkpoint and model."""

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
    """A model with the weights of a checkpoint, on the CPU and in evaluation mode."""

    task: Task
    model: nn.Module
    step: int


def config_of(storage: Storage) -> Config:
    """The configuration of a run's latest start, without secrets."""
    return from_dict(load_yaml(storage.read_bytes("config.yaml")), f"{storage.url}/config.yaml")


def task_of(storage: Storage) -> Task:
    """The run's task.

    Raises:
        UserError: The task or its data is not on this machine.
    """
    config = config_of(storage)
    read_task_file(config.task, storage)
    return load_task(config.task, config.task_args)


def checkpoint_of(storage: Storage, step: int | None, warn: Warn = lambda sentence: None) -> Commit:
    """A checkpoint of a run, after its files have been checked against their checksums.

    Args:
        storage: The run's folder.
        step: Which checkpoint; None means the newest good one.
        warn: Called with a sentence for each damaged checkpoint that is skipped.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
    """
    folder = storage.join("checkpoints").url
    if step is None:
        return _newest_checkpoint(folder, warn)
    committed = commits(folder)
    commit = next((each for each in committed if each.step == step), None)
    if commit is None:
        steps = ", ".join(str(number) for number in sorted({each.step for each in committed}))
        raise UserError(
            f"there is no checkpoint of step {step} in {folder}; "
            f"the steps with a checkpoint are: {steps or 'none'}"
        )
    faults = verify(commit)
    if faults:
        raise UserError(
            f"the checkpoint of step {step} is damaged: {faults[0]}; "
            "leave the step out to use the newest good one"
        )
    return commit


def _newest_checkpoint(folder: str, warn: Warn) -> Commit:
    commit, skipped = latest_good(folder)
    for sentence in skipped:
        warn(sentence)
    if commit is None:
        reason = skipped[0] if skipped else "train the run until it saves one"
        raise UserError(f"there is no good checkpoint in {folder}: {reason}")
    return commit


def trained(
    storage: Storage, step: int | None = None, warn: Warn = lambda sentence: None
) -> Trained:
    """A run's model with the weights of a checkpoint; arguments and errors as `checkpoint_of`."""
    commit = checkpoint_of(storage, step, warn)
    task = task_of(storage)
    model = task.build_trained()
    weights = Weights(commit)
    require_same(model, weights)
    model.load_state_dict({name: weights.read(name) for name in model.state_dict()})
    return Trained(task, model.eval(), commit.step)


def require_same(model: nn.Module, weights: Weights) -> None:
    """Check that the model has the tensors of the checkpoint.

    Raises:
        UserError: The task now builds a different model from the one that was trained.
    """
    shapes = weights.shapes()
    for name, tensor in model.state_dict().items():
        if shapes.get(name) != tuple(tensor.shape):
            raise UserError(
                "the run's task no longer builds the model that was trained "
                f"({name} is {shapes.get(name)} in the checkpoint and {tuple(tensor.shape)} now): "
                "use the same code and data as in training"
            )
