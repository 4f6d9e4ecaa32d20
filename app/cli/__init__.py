"""The `trireme` command.

The module of a command is imported when the command is called, so that `--help` imports neither
torch nor Ray.
"""

import gc
import importlib
import os
import sys

import click

from app.cli.document import document, text_of
from app.errors import EXIT_DONE, EXIT_REFUSED, EXIT_STOPPED, nearest
from app.run.abort import abort
from app.run.stopping import drop_streams, end_at_once, end_on_signals, nobody_reads, open_streams

COMMANDS = {
    "train": ("runs", "Train an experiment, or continue one that was stopped."),
    "fork": ("fork", "Continue a checkpoint of a run as a new run, with other keys."),
    "sweep": (
        "studies",
        "Search batch size, learning rate and other keys; run it again to continue.",
    ),
    "scale": ("studies", "Measure what more workers gain, and whether the next doubling pays."),
    "runs": ("look", "List runs with their state, last loss and age."),
    "watch": ("look", "Follow a run that trains in another shell or on another machine."),
    "compare": ("look", "Compare runs, and tell whether a difference is more than noise."),
    "profile": ("look", "Show where the time of a run's profiled steps went."),
    "coordinate-check": (
        "studies",
        "Test whether a learning rate found at one width holds at others.",
    ),
    "report": ("studies", "Write one page about runs, a sweep or a scaling study."),
    "config": ("runs", "Show every key of an experiment, its value and what it means."),
    "parity": ("studies", "Check that every strategy trains the same model as one device."),
    "export": (
        "runs",
        "Write trained weights as safetensors, a torch file or a Hugging Face folder.",
    ),
    "generate": ("generate", "Continue a text with a trained language model."),
    "sync": (
        "runs",
        "Send MLflow what a run could not deliver while the tracking server was down.",
    ),
    "submit": ("runs", "Send an experiment to a cluster, follow it, stop it."),
    "queue": ("queue", "Show the queue of a cluster, and set quotas."),
    "doctor": ("cluster", "Check every node and GPU; say what is wrong and what to do."),
    "plan": (
        "plan",
        "Predict which layouts fit, how fast they train and at what cost, before anything starts.",
    ),
    "calibrate": ("plan", "Measure what devices and links reach, for better plans."),
    "cluster": ("cluster", "Define, check, start and stop clusters."),
    "fields": ("fields", "Show the fields of each command's --json, and the exit codes."),
}
"""For each command, the module of app.cli that defines it, and its line in `trireme --help`."""


EXTRA = "Got unexpected extra argument"
"""The beginning of Click's sentence about words after the last argument of a command."""


class LazyGroup(click.Group):
    """A group that lists its commands without importing them. Its methods are Click's hooks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name, imported; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module_name, _ = COMMANDS[cmd_name]
        module = importlib.import_module(f"app.cli.{module_name}")
        return getattr(module, cmd_name.replace("-", "_"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that arguments begin with.

        Raises:
            UsageError: There is no such command.
        """
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = nearest(args[0], COMMANDS)
            raise click.UsageError(
                f"unknown command {args[0]!r}{hint}: write one of {', '.join(COMMANDS)}"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trireme", message="trireme %(version)s")
def group() -> None:
    """Train any PyTorch model on any Ray cluster, with any parallel strategy and the same loss
    curve.

    \b
    trireme doctor                                are the GPUs usable?
    trireme plan experiments/gpt.yaml             which strategy fits, how fast, at what cost?
    trireme train experiments/gpt.yaml workers=8  train; the same command again continues

    `trireme COMMAND --help` shows the options of a command.

    Shell completion: eval "$(_TRIREME_COMPLETE=bash_source trireme)" (or zsh_source, fish_source).
    """


def main() -> None:
    """The console script.

    Its exit code is one of `EXIT_CODES` (app/errors.py).
    """
    open_streams()
    if not _is_rank():  # a signal that is not handled leaves temporary folders and processes behind
        end_on_signals()
    exit_code = _run_command()
    if _is_rank() and "torch" in sys.modules:
        # gloo's threads sometimes abort an interpreter that shuts down around them, and torchrun
        # would take a finished training for a failed one.
        abort(exit_code)
    if not _is_rank():
        end_at_once(exit_code)
    drop_streams()
    # Otherwise Python looks through all objects of torch and Ray again, for most of two seconds.
    gc.freeze()
    sys.exit(exit_code)


def _is_rank() -> bool:
    """Whether this process is one rank of several that torchrun or Slurm started.

    Under Slurm this becomes true while the command runs: launcher=torchrun sets RANK then.
    """
    return "RANK" in os.environ


def _run_command() -> int:
    """Run the command that the command line names, and return its exit code."""
    try:
        _check_folder()
        program = [sys.executable, *sys.orig_argv[1:]]
        return group.main(prog_name="trireme", standalone_mode=False, obj=program) or EXIT_DONE
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except SystemExit:
        if not nobody_reads():
            raise
        return EXIT_DONE  # Click exits with 1 if the reader of its output has gone, as in `| head`
    except click.ClickException as error:
        return _report(usage_error(error), EXIT_REFUSED)
    except (click.Abort, KeyboardInterrupt) as stop:  # before the command's own code was reached
        interrupt = stop if isinstance(stop, KeyboardInterrupt) else stop.__cause__
        reason = str(interrupt or "") or "stopped by Ctrl-C"
        return _report(reason, EXIT_STOPPED)


def _report(sentence: str, exit_code: int) -> int:
    """Print an error of a command that has not begun, and return its exit code."""
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in options:
        print(text_of(document(None, exit_code=exit_code, error=sentence)))
    print(f"trireme: {sentence}", file=sys.stderr)
    return exit_code


def usage_error(error: click.ClickException) -> str:
    """What is wrong with a command line.

    Keys are not options: someone who writes `--workers 4` is told to write workers=VALUE.
    """
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
    match error:
        case click.NoSuchOption(possibilities=similar) if not set(similar or ()) - {"--help"}:
            from app.config.io import documentation
            from app.config.words import OTHER_NAMES, meant_key, remark_on

            word = error.option_name.lstrip("-").replace("-", "_")
            keys = [key for key in documentation() if word in (key, key.rpartition(".")[2])]
            is_known = word in OTHER_NAMES or word in documentation()
            key = word if is_known else meant_key(word) or next(iter(keys), None)
            if key is not None:
                return f"there is no option {error.option_name}: write {key}=VALUE, without dashes"
            remark = remark_on(word)
            if remark is not None:
                return f"there is no option {error.option_name}: {remark}"
            return f"{error.format_message()} `{command} --help` lists those that there are"
        case click.MissingParameter(param=click.Parameter() as parameter):
            name = parameter.opts[0] if isinstance(parameter, click.Option) else ""
            metavar = parameter.make_metavar(error.ctx)  # type: ignore[arg-type]
            shown = " ".join(filter(None, (name, metavar)))
            missing = name or parameter.human_readable_name
            return f"{missing} is missing: write {command} {shown}; {command} --help explains it"
        case click.BadOptionUsage(option_name=option, message=message) if "requires" in message:
            return f"{option} has no value: write {option} VALUE"
        case click.UsageError(message=message) if message.startswith(EXTRA):
            words = message.rpartition("(")[2].rstrip(")")
            return f"{words} is unexpected: `{command} --help` lists the arguments"
    return error.format_message()


def _check_folder() -> None:
    """Check that the current folder exists, since relative paths depend on it.

    Raises:
        UsageError: The current folder has been removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise click.UsageError(
            "the current folder has been removed: go to another one (`cd`) first"
        ) from None
