"""The table of exit codes, beside the code; and a document of --json for every command."""

import ast
import re
from collections.abc import Iterator

import click
import pytest

from app.cli import group
from app.cli.document import document, plain, text_of
from app.cli.fields import ERRORS, FIELDS, fields_of
from app.errors import EXIT_CODES
from tests.running import ROOT

pytestmark = pytest.mark.pure

PLACE_OF_CODE = {"Exit": 0, "abort": 0, "exit": 0, "_exit": 0, "end_at_once": 0, "_report": 1}
"""Functions that get an exit code, and which of their arguments it is."""
CODES = re.compile(r"EXIT_(DONE|FAILED|REFUSED|STOPPED)|code|exit_code|_report_error")
"""Names of constants of the table, and of what holds or returns one."""
NO_COMMAND = ("app/tracking/writer.py", "app/submit/__main__.py")
"""Programs of their own."""


def exit_codes_in(tree: ast.AST) -> Iterator[ast.expr]:
    """What stands where a command's exit code is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            place = PLACE_OF_CODE.get(last_name(node))
            if place is not None:
                yield node.args[place]


def last_name(node: ast.expr) -> str:
    """Of a name, an attribute or a call, the last name."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_commands_end_with_the_codes_of_the_table() -> None:
    counted = 0
    for file in sorted((ROOT / "app").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in exit_codes_in(ast.parse(file.read_text())):
            is_number = isinstance(node, ast.Constant) and node.value in EXIT_CODES
            is_named = CODES.fullmatch(last_name(node)) is not None
            assert is_number or is_named or name in NO_COMMAND, f"{name}: {ast.unparse(node)}"
            counted += 1
    assert counted > 20


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    table = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in table} == EXIT_CODES


def leaves(command: click.Command, path: str = "") -> Iterator[str]:
    """The commands that are no groups, by their words."""
    if not isinstance(command, click.Group):
        yield path
        return
    for name in command.list_commands(click.Context(command)):
        subcommand = command.get_command(click.Context(command), name)
        assert subcommand is not None
        yield from leaves(subcommand, f"{path} {name}".strip())


def test_every_command_has_a_documented_document() -> None:
    assert set(leaves(group)) == FIELDS.keys()
    for command in FIELDS:
        meanings = fields_of(command)
        assert meanings.keys() >= ERRORS.keys()
        unexplained = [path for path, meaning in meanings.items() if not meaning]
        assert all(path.endswith("*") for path in unexplained), unexplained


def test_a_document_is_json_that_every_parser_reads() -> None:
    strange = {"nan": float("nan"), "list": (float("inf"), 1.5), 3: {"path": ROOT}}
    assert plain(strange) == {"nan": None, "list": [None, 1.5], "3": {"path": str(ROOT)}}
    assert "NaN" not in text_of(document(strange, exit_code=0))
    ended = document({"rows": []}, exit_code=1, error="one row differs")
    assert ended == {"status": "failed", "rows": [], "error": "one row differs", "exit_code": 1}
