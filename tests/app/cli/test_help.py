"""What the command line says of itself: every command and option is explained, in plain words."""

import re
from collections.abc import Iterator

import click
import pytest

from app.cli import group

pytestmark = pytest.mark.pure

UNWANTED = r"\bnobody\b|\bis no [a-z]|\bso many\b|\bheld against\b|\bdear\b|\bhas not got\b|\belsewhere\b"


def commands(command: click.Command, path: str = "trireme") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
        found = command.get_command(click.Context(command), name)
        assert found is not None
        yield from commands(found, f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), commands(group))
def test_help_explains_everything_in_plain_words(path: str, command: click.Command) -> None:
    assert command.help and not re.search(UNWANTED, command.get_help(click.Context(command)), re.IGNORECASE)
    assert path.count(" ") < 2 or "..." not in command.get_short_help_str(68), "its first sentence fits the list"
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert all(option.help and option.help.endswith(".") for option in options), "a sentence each"
