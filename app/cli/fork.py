"""`trireme fork`: a new run that continues from a checkpoint of another run."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import click

from app.cli.common import ExperimentArguments, Invocation, files_and_overrides, verb
from app.errors import UserError

if TYPE_CHECKING:
    from app.config import Config
    from app.storage.storage import Storage


@verb("fork", verbose=True)
@click.argument("run", metavar="RUN")
@click.argument("arguments", nargs=-1, metavar="[key=value]…", type=ExperimentArguments())
@click.option(
    "--at",
    type=int,
    metavar="STEP",
    help="Continue from the checkpoint of this step. Default: the newest intact one.",
)
def fork(cli: Invocation, run: str, arguments: tuple[str, ...], at: int | None) -> None:
    """Continue a run's checkpoint as a new run, with another learning rate, batch or layout.

    \b
    trireme fork runs/gpt optimizer.lr=1e-4
    trireme fork runs/gpt --at 3000 train.global_batch_size=64 train.steps=6000
    trireme fork runs/gpt strategy=fsdp workers=8 run.name=gpt-wide

    The fork has the run's configuration but for the keys that are given, and takes over its
    weights, optimizer, step and position in the data, so that two forks of one checkpoint see the
    same samples. The run itself is not changed, and may be training; it keeps the checkpoint for as
    long as the fork needs it. The same command continues a fork that was stopped.
    """
    from app.launchers.train import train as start_training

    config = fork_config(run, arguments, at)
    outcome = start_training(config, cli.console, verbose=cli.verbose)
    cli.answer(outcome)


def fork_config(run: str, arguments: tuple[str, ...], at: int | None = None) -> Config:
    """The configuration of a fork.

    Args:
        run: The folder of the run that is forked, or the name of one in ./runs.
        arguments: key=value.
        at: The step of the checkpoint; None means the newest intact one.

    Raises:
        UserError: There is no such run or checkpoint, or something in the arguments is wrong.
    """
    from app.config.io import load_config
    from app.run.fork import config_file
    from app.run.look import open_run

    files, overrides = files_and_overrides(arguments)
    if files:
        raise UserError(
            f"{files[0]} is not of the form key=value: a fork takes the configuration of its "
            "run, of which key=value changes single keys"
        )
    storage = open_run(run)
    keys = [override.partition("=")[0] for override in overrides]
    folder, _, parent_name = storage.url.rpartition("/")
    defaults = [f"run.name={fork_name(parent_name, overrides, at)}", f"run.storage={folder}"]
    if "train.epochs" in keys:
        defaults.append("train.steps=null")
    if "train.steps" in keys:
        defaults.append("train.epochs=null")
    file = config_file(storage)
    config = load_config([file], [*defaults, *overrides])
    _require_secrets(config)
    checkpoint = _origin_of(config) or _checkpoint(storage, at)
    return load_config([file], [*defaults, *overrides, f"checkpoint.fork={checkpoint}"])


def fork_name(parent: str, overrides: list[str], at: int | None) -> str:
    """The name of a fork for which none is given; the same for the same command.

    Args:
        parent: The name of the run that is forked.
        overrides: The key=value arguments.
        at: The step that is given.
    """
    name = f"{parent}-fork" if at is None else f"{parent}-fork-{at}"
    if overrides:
        digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()
        name = f"{name}-{digest[:6]}"
    return name


def _require_secrets(config: Config) -> None:
    """Check that no value is left out, as secrets are in a run's config.yaml.

    Raises:
        UserError: One is.
    """
    from app.config.io import flatten, to_dict
    from app.console.masking import HIDDEN

    for key, value in flatten(to_dict(config)).items():
        if value == HIDDEN:
            raise UserError(f"{key} is a secret, which no run keeps: write {key}=VALUE again")


def _origin_of(config: Config) -> str:
    """The checkpoint that an earlier start of this fork has decided on; "" without one."""
    from app.run.manifest import Run

    return Run(config).manifest.fork


def _checkpoint(storage: Storage, at: int | None) -> str:
    from app.results.trained import checkpoint_of

    return checkpoint_of(storage, at).path
