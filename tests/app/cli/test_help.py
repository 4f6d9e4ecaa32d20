"""The help of the command line: every command and option is explained, in plain words."""

import gc
import re
from collections.abc import Iterator

import click
import pytest

from app.cli import group
from tests.running import here

pytestmark = pytest.mark.pure

UNWANTED = (
    r"\bnobody\b|\bis no [a-z]|\bso many\b|\bheld against\b|\bdear\b|\bhas not got\b|\belsewhere\b"
)


def commands(command: click.Command, path: str = "trireme") -> Iterator[tuple[str, click.Command]]:
    """A command and all commands below it, each with its words."""
    yield path, command
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(click.Context(command)):
        subcommand = command.get_command(click.Context(command), name)
        assert subcommand is not None
        yield from commands(subcommand, f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), commands(group))
def test_help_explains_everything_in_plain_words(path: str, command: click.Command) -> None:
    assert command.help
    assert not re.search(UNWANTED, command.get_help(click.Context(command)), re.IGNORECASE)
    if path.count(" ") >= 2:
        assert "..." not in command.get_short_help_str(68), "the first sentence fits the list"
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert all(option.help and option.help.endswith(".") for option in options), "a sentence each"


def test_a_command_does_not_end_with_a_search_for_garbage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes most of two seconds where torch and Ray are imported."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    here(monkeypatch, capsys, "--help").expect()
    assert frozen == [True]
