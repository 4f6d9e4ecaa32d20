"""What the commands share: arguments of an experiment, its completion, and how errors end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from app.config import Config
    from app.console import Console

LAYOUT_ERRORS = ("LayoutError", "ClusterError", "HardwareError")  # strategies/ and cluster/ know nothing of app.errors


class ExperimentArguments(click.ParamType):
    """YAML files and key=value, in any order; completes both."""

    name = "YAML file or key=value"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from app.config_io import documentation

        key, equals, value = incomplete.partition("=")
        if equals:
            return [CompletionItem(f"{key}={choice}") for choice in _values(key) if choice.startswith(value)]
        keys = [
            CompletionItem(f"{name}=", help=text.split(".")[0])
            for name, text in documentation().items()
            if name.startswith(incomplete) and f"{name}." not in {n[: len(name) + 1] for n in documentation()}
        ]
        files = [
            CompletionItem(str(path) + ("/" if path.is_dir() else ""))
            for path in sorted(Path().glob(f"{incomplete}*"))
            if path.is_dir() or path.suffix in (".yaml", ".yml")
        ]
        return files + keys


def _values(key: str) -> list[str]:
    from app.config_check import CHOICES

    return list(CHOICES.get(key, ()))


def experiment_arguments(function: Any) -> Any:
    return click.argument("arguments", nargs=-1, metavar="EXPERIMENT.yaml [key=value]…", type=ExperimentArguments())(
        function
    )


def split(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """YAML files, and key=value overrides."""
    files = [a for a in arguments if "=" not in a]
    return files, [a for a in arguments if "=" in a]


def read(arguments: tuple[str, ...], *, needs_file: bool = True) -> Config:
    from app.config_io import load_config
    from app.errors import UserError

    files, overrides = split(arguments)
    if needs_file and not arguments:
        raise UserError("no experiment is given: write for instance experiments/mnist.yaml")
    return load_config(files, overrides)


@contextlib.contextmanager
def sentences(console: Console, *, as_json: bool = False, traceback: bool = False) -> Iterator[None]:
    """Turns the errors that are meant for a person into one sentence and an exit code."""
    from app.errors import Interrupted, RunFailed, UserError

    try:
        yield
    except Exception as error:
        if traceback:
            raise
        known = isinstance(error, UserError) or type(error).__name__ in LAYOUT_ERRORS
        code = 2 if known else 130 if isinstance(error, Interrupted) else 1
        text = str(error) if known or isinstance(error, RunFailed | Interrupted) else _unforeseen(error)
        if as_json:
            console.result(json.dumps({"status": _STATUS[code], "error": text}))
        console.error(f"trireme: {text}")
        raise click.exceptions.Exit(code) from None


_STATUS = {1: "failed", 2: "refused", 130: "stopped"}


def _unforeseen(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} (--traceback shows where)"
