"""What commands share: common options, an experiment's arguments with completion, and errors."""

import contextlib
import dataclasses
import functools
import json
import os
import traceback as tracebacks
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click
from click.shell_completion import CompletionItem

from app.cli.document import document, text_of
from app.config import Config
from app.console.terminal import Console
from app.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    Interrupted,
    RunFailed,
    UserError,
    described,
    nearest,
    of_file,
    own_line,
    with_line,
)
from app.run.abort import before_abort
from app.run.endings import MACHINE_ERRORS, USER_ERRORS


class CommandRegistry(Protocol):
    """Makes commands of functions: Click itself, or one of its groups."""

    def command(self, name: str) -> Callable[[Callable[..., Any]], click.Command]:
        """A decorator that makes a command with this name."""
        ...


@dataclasses.dataclass
class Invocation:
    """One call of a command.

    Args:
        console: Where the command prints.
        as_json: Whether --json was given.
        verbose: Whether --verbose was given.
        answered: What the command has answered; None before it has.
    """

    console: Console
    as_json: bool
    verbose: bool = False
    answered: Any = None
    _is_closed: bool = False

    def answer(self, value: Any, text: str = "") -> None:
        """Give the command's result.

        With --json it is printed when the command has ended, since an error afterwards belongs
        into the same document.

        Args:
            value: A dataclass or mapping, printed as JSON with --json.
            text: Printed without --json.
        """
        self.answered = value
        if text and not self.as_json:
            self.console.result(text)

    def answer_of_job(self, log: str) -> None:
        """Give the answer of the same command that has run as a job.

        Args:
            log: What the job has printed, with its document in a line.

        Raises:
            RunFailed: No line is a document.
        """
        for line in reversed(log.splitlines()):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    self.answered = json.loads(line)
                    return
        raise RunFailed(f"the job on the cluster gave no answer; its log ends with: {log[-300:]}")

    def close(self, exit_code: int, error: str = "") -> None:
        """Print the document of --json, once, and by the first of several ranks only.

        Args:
            exit_code: How the command ends.
            error: A sentence on what went wrong; "" if nothing did.
        """
        is_first_rank = os.environ.get("RANK", "0") == "0"
        if self._is_closed or not self.as_json or not is_first_rank:
            return
        self._is_closed = True
        fields = document(self.answered, exit_code=exit_code, error=error)
        self.console.result(text_of(fields))

    def close_aborted(self, exit_code: int, sentence: str) -> None:
        """Print the document of a command whose process is ended at once."""
        if sentence:
            self.close(exit_code, sentence.removeprefix("trireme: "))


def verb(
    name: str, *, group: CommandRegistry = click, verbose: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes an Invocation and the command's parameters.

    The command also has the options --json and --traceback. An error that is meant for a person
    ends it with one sentence and an exit code.

    Args:
        name: The name of the command.
        group: The group of the command.
        verbose: Whether the command has the option --verbose.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def call(
            *, as_json: bool, traceback: bool, verbose: bool = False, **parameters: Any
        ) -> None:
            cli = Invocation(Console(result_only=as_json), as_json, verbose)
            before_abort(cli.close_aborted, say=cli.console.error)
            try:
                function(cli, **parameters)
            except (click.ClickException, click.Abort):
                raise  # `main` reports them
            except click.exceptions.Exit as end:
                cli.close(end.exit_code)
                raise
            except KeyboardInterrupt as interrupt:
                reason = str(interrupt) or "stopped by Ctrl-C"
                stopped = Interrupted(f"{reason}: run the same command again")
                raise click.exceptions.Exit(_report_error(cli, stopped)) from None
            except Exception as error:
                if traceback:
                    tracebacks.print_exception(error)
                raise click.exceptions.Exit(_report_error(cli, error)) from None
            cli.close(EXIT_DONE)

        command = group.command(name)(call)
        command.params.append(
            _flag(
                "--json",
                "as_json",
                "Print the result as one JSON document; all else goes to stderr.",
            )
        )
        if verbose:
            text = "Show the output of Ray and other libraries too."
            command.params.append(_flag("--verbose", "verbose", text))
        text = "Show Python's traceback of an error."
        command.params.append(_flag("--traceback", "traceback", text))
        return command

    return decorate


def _flag(option: str, parameter: str, text: str) -> click.Option:
    return click.Option([option, parameter], is_flag=True, help=text)


def _report_error(cli: Invocation, error: Exception) -> int:
    """Print an error as one sentence, and return its exit code."""
    if isinstance(error, USER_ERRORS):
        code = EXIT_REFUSED
    elif isinstance(error, Interrupted):
        code = EXIT_STOPPED
    else:
        code = EXIT_FAILED
    text = str(error)
    if not isinstance(error, (*USER_ERRORS, *MACHINE_ERRORS, RunFailed, Interrupted)):
        line = own_line(error)
        hint = "" if line else " (--traceback shows where)"
        sentence = "" if line else of_file(error)
        text = sentence or with_line(f"{described(error)}{hint}", line)
    cli.close(code, text)
    cli.console.error(f"trireme: {text}")
    return code


class NamedGroup(click.Group):
    """A group of commands that knows which one an unknown word may mean."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's hook: find the command that arguments begin with."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            hint = nearest(args[0], self.commands)
            raise click.UsageError(
                f"unknown command {args[0]!r}{hint}: write one of {', '.join(self.commands)}"
            )
        return super().resolve_command(ctx, args)


class GroupWithDefault(click.Group):
    """A group of commands, one of which need not be named, as in `submit EXPERIMENT.yaml`.

    Args:
        default: The command that runs if the first argument names no command.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's hook: insert the default command where none is named."""
        names_a_command = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        if not names_a_command:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class ExperimentArguments(click.ParamType):
    """YAML files and key=value, in any order; both have shell completion."""

    name = "YAML file or key=value"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Click's hook: complete a value, or else a path or a key."""
        from app.config.check import CHOICES

        key, equals, value = incomplete.partition("=")
        if equals:
            choices = [choice for choice in CHOICES.get(key, ()) if choice.startswith(value)]
            return [CompletionItem(f"{key}={choice}") for choice in choices]
        return [*_complete_path(incomplete), *_complete_key(incomplete)]


def _complete_path(incomplete: str) -> list[CompletionItem]:
    items = []
    for path in sorted(Path().glob(f"{incomplete}*")):
        if path.is_dir():
            items.append(CompletionItem(f"{path}/"))
        elif path.suffix == ".yaml":
            items.append(CompletionItem(str(path)))
    return items


def _complete_key(incomplete: str) -> list[CompletionItem]:
    from app.config.io import SECTIONS, documentation

    items = []
    for key, text in documentation().items():
        if key.startswith(incomplete) and key not in SECTIONS:
            first_sentence = text.split(".")[0]
            items.append(CompletionItem(f"{key}=", help=first_sentence))
    return items


experiment_arguments = click.argument(
    "arguments", nargs=-1, metavar="[EXPERIMENT.yaml] [key=value]…", type=ExperimentArguments()
)


def files_and_overrides(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Divide arguments into paths of YAML files and key=value overrides.

    Raises:
        UserError: Two overrides contradict each other.
    """
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    keys = {override.partition("=")[0] for override in overrides}
    if {"train.steps", "train.epochs"} <= keys:
        raise UserError(
            "train.steps and train.epochs are both given, but each sets the length: leave one out"
        )
    return files, overrides


def refuse_spaces(
    option: str, value: str | None, arguments: tuple[str, ...], *, is_item: Callable[[str], bool]
) -> None:
    """Check that the items of an option are divided by commas, not by spaces.

    After a space they are arguments of their own, as in `--workers 1 2`.

    Args:
        option: The option, such as --workers.
        value: Its value; None if it is not given.
        arguments: Arguments that should be YAML files and key=value.
        is_item: Whether a word may be an item of the option.

    Raises:
        UserError: There are items among the arguments.
    """
    if value is None:
        return
    words = [word for word in arguments if "=" not in word and not Path(word).exists()]
    strays = [word for word in words if all(map(is_item, filter(None, word.split(","))))]
    if strays:
        items = [item for word in (value, *strays) for item in word.split(",") if item]
        raise UserError(
            f"{' '.join([option, value, *strays])} has spaces: write {option} {','.join(items)}"
        )


def read_experiment(arguments: tuple[str, ...], *, needs_file: bool = True) -> Config:
    """The configuration that a command's arguments describe.

    Args:
        arguments: YAML files and key=value.
        needs_file: Whether no arguments at all are a mistake.

    Raises:
        UserError: The arguments are missing, or something in them is wrong.
    """
    from app.config.io import load_config

    if needs_file and not arguments:
        raise UserError("no experiment is given: write for instance experiments/mnist.yaml")
    files, overrides = files_and_overrides(arguments)
    return load_config(files, overrides)
