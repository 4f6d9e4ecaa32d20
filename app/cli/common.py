"""What the commands share: their common options, an experiment's arguments with completion, and how errors end."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from app.config import Config
from app.console.terminal import Console
from app.errors import Interrupted, RunFailed, UserError
from app.run.endings import MACHINE_ERRORS, USER_ERRORS

COMMON = {
    "--json": ("as_json", "Print only the result, as JSON."),
    "--verbose": ("verbose", "Show the output of Ray and other libraries too."),
    "--traceback": ("traceback", "Show Python's traceback of an error."),
}
STATUS = {1: "failed", 2: "refused", 130: "stopped"}


@dataclasses.dataclass
class Invocation:
    """One call of a command: where it prints, and what its common options say."""

    console: Console
    as_json: bool
    verbose: bool = False

    def answer(self, value: Any, text: str = "") -> None:
        """Prints the result: `value` (a dataclass or plain values) as JSON with --json, else `text`."""
        if self.as_json:
            plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            self.console.result(json.dumps(plain, default=str))
        elif text:
            self.console.result(text)


def verb(name: str, *, group: Any = click, verbose: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function (Invocation, arguments and options); adds --json, --traceback and, if asked for,
    --verbose. An error that is meant for a person ends it with one sentence and an exit code."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def call(*, as_json: bool, traceback: bool, verbose: bool = False, **given: Any) -> None:
            cli = Invocation(Console(quiet=as_json), as_json, verbose)
            try:
                function(cli, **given)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except KeyboardInterrupt as stop:
                sentence = f"{str(stop) or 'stopped by Ctrl-C'}: run the same command again"
                raise click.exceptions.Exit(_explain(cli, Interrupted(sentence))) from None
            except Exception as error:
                if traceback:
                    raise
                raise click.exceptions.Exit(_explain(cli, error)) from None

        command = group.command(name)(call)
        for option, (field, text) in COMMON.items():
            if verbose or field != "verbose":
                command.params.append(click.Option([option, field], is_flag=True, help=text))
        return command

    return decorate


class WithDefault(click.Group):
    """A group of which `default` is meant where none of its commands is named: `submit EXPERIMENT.yaml`, `queue`."""

    def __init__(self, *given: Any, default: str, **named: Any) -> None:
        super().__init__(*given, **named)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def _explain(cli: Invocation, error: Exception) -> int:
    """Says an error in one sentence; the exit code that it stands for."""
    code = 2 if isinstance(error, USER_ERRORS) else 130 if isinstance(error, Interrupted) else 1
    text = str(error)
    if not isinstance(error, (*USER_ERRORS, *MACHINE_ERRORS, RunFailed, Interrupted)):
        text = f"{type(error).__name__}: {text.strip().partition(chr(10))[0]} (--traceback shows where)"
    cli.answer({"status": STATUS[code], "error": text})
    cli.console.error(f"trireme: {text}")
    return code


class ExperimentArguments(click.ParamType):
    """YAML files and key=value, in any order; completes both."""

    name = "YAML file or key=value"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from app.config.check import CHOICES
        from app.config.io import documentation

        key, equals, value = incomplete.partition("=")
        if equals:
            return [CompletionItem(f"{key}={choice}") for choice in CHOICES.get(key, ()) if choice.startswith(value)]
        known = documentation()
        keys = [
            CompletionItem(f"{name}=", help=text.split(".")[0])
            for name, text in known.items()
            if name.startswith(incomplete) and not any(other.startswith(f"{name}.") for other in known)
        ]
        paths = [path for path in sorted(Path().glob(f"{incomplete}*")) if path.is_dir() or path.suffix == ".yaml"]
        return [CompletionItem(f"{path}/" if path.is_dir() else str(path)) for path in paths] + keys


experiment_arguments = click.argument(
    "arguments", nargs=-1, metavar="[EXPERIMENT.yaml] [key=value]…", type=ExperimentArguments()
)


def split(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """YAML files, and key=value overrides. Raises UserError for two that contradict each other."""
    given = {a.partition("=")[0] for a in arguments if "=" in a}
    if {"train.steps", "train.epochs"} <= given:
        raise UserError("train.steps and train.epochs are both given, and say two lengths: leave one out")
    return [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def read(arguments: tuple[str, ...], *, needs_file: bool = True) -> Config:
    from app.config.io import load_config

    if needs_file and not arguments:
        raise UserError("no experiment is given: write for instance experiments/mnist.yaml")
    return load_config(*split(arguments))
