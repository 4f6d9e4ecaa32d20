"""The command line. Each command is a module of its own, imported when it is called: `--help` needs none of them."""

import importlib
import os
import sys
from typing import Any

import click

from app.errors import nearest
from app.run.abort import abort
from app.run.stopping import drop_streams, end_at_once, end_on_signals, nobody_reads, open_streams

COMMANDS = {
    "train": ("runs", "Train an experiment, or continue one that was stopped."),
    "sweep": ("studies", "Search batch size, learning rate and other keys; run it again to continue."),
    "scale": ("studies", "Measure what more workers bring, and whether the next doubling pays."),
    "runs": ("look", "List runs with their state, last loss and age."),
    "watch": ("look", "Follow a run that trains in another shell or on another machine."),
    "profile": ("look", "Show where the time of a run's profiled steps went."),
    "report": ("studies", "Write one page about runs, a sweep or a scaling study."),
    "config": ("runs", "Show every key of an experiment, its value and what it means."),
    "parity": ("studies", "Check that every strategy trains the same model as one device."),
    "export": ("runs", "Write trained weights as safetensors, a torch file or a Hugging Face folder."),
    "generate": ("generate", "Continue a text with a trained language model."),
    "sync": ("runs", "Send MLflow what a run could not deliver while the tracking server was down."),
    "submit": ("runs", "Send an experiment to a cluster, follow it, stop it."),
    "queue": ("queue", "Show the queue of a cluster, and set quotas."),
    "doctor": ("cluster", "Check every node and GPU; say what is wrong and what to do."),
    "plan": ("plan", "Predict which layouts fit, how fast they train and at what cost, before anything starts."),
    "calibrate": ("plan", "Measure what devices and links reach, for better plans."),
    "cluster": ("cluster", "Define, check, start and stop clusters."),
}
"""Name: (module of app.cli with a command of this name, help)."""


class LazyGroup(click.Group):
    """Knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"app.cli.{COMMANDS[cmd_name][0]}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(
                f"unknown command {args[0]!r}{nearest(args[0], COMMANDS)}: write one of {', '.join(COMMANDS)}"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trireme", message="trireme %(version)s")
def group() -> None:
    """Train any PyTorch model on any Ray cluster, with any parallel strategy and the same loss curve.

    \b
    trireme doctor                                are the GPUs usable?
    trireme plan experiments/gpt.yaml             which strategy fits, how fast, at what cost?
    trireme train experiments/gpt.yaml workers=8  train; the same command again continues

    `trireme COMMAND --help` shows the options of a command.

    Shell completion: eval "$(_TRIREME_COMPLETE=bash_source trireme)" (or zsh_source, fish_source).
    """


def main() -> None:
    """The console script: exit code 0 for success, 1 for a failed run, 2 for wrong input, 130 for a stopped run."""
    open_streams()
    if "RANK" not in os.environ:  # else temporary folders and processes would be left behind
        end_on_signals()
    try:
        _check_folder()
        program = [sys.executable, *sys.orig_argv[1:]]
        code = group.main(prog_name="trireme", standalone_mode=False, obj=program)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except SystemExit:
        if not nobody_reads():
            raise
        code = 0  # Click ends with 1 where what it prints has nowhere to go
    except click.ClickException as error:
        print(f"trireme: {sentence(error)}", file=sys.stderr)
        code = 2
    except (click.Abort, KeyboardInterrupt) as stop:  # in what no command's own code has been reached
        reason = stop if isinstance(stop, KeyboardInterrupt) else stop.__cause__
        print(f"trireme: {str(reason or '') or 'stopped by Ctrl-C'}", file=sys.stderr)
        code = 130
    if "torch" in sys.modules and "RANK" in os.environ:
        # One of torchrun's. gloo's threads sometimes abort an interpreter that shuts down around them, and torchrun
        # would take a finished training for a failed one.
        abort(code or 0)
    if "RANK" not in os.environ:
        end_at_once(code or 0)
    drop_streams()
    sys.exit(code or 0)


def sentence(error: click.ClickException) -> str:
    """What a command line has wrong. Keys are no options: `--workers 4` is written workers=4."""
    if isinstance(error, click.NoSuchOption) and not error.possibilities:
        from app.config.words import OTHER_NAMES, meant_key

        word = error.option_name.lstrip("-")
        key = word if word in OTHER_NAMES else meant_key(word)
        if key is not None:
            return f"there is no option {error.option_name}: write {key}=VALUE, without dashes"
    return error.format_message()


def _check_folder() -> None:
    """Raises click.UsageError where the current folder has been removed: relative paths mean nothing in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise click.UsageError("the current folder has been removed: go to another one (`cd`) first") from None
