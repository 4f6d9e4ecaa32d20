"""Marks say what a test starts: `make check` and both halves of `make test` select by them."""

import ast
import functools
from pathlib import Path

import pytest

from tests.conftest import COLLECTED

pytestmark = pytest.mark.pure

STARTS = {
    "CliRunner",
    "in_processes",
    "invoke",
    "run_to_the_end",
    "start",
    "subprocess",
    "torchrun",
    "trireme",
}
"""Names with which a test file begins processes or whole commands: none of its tests is pure."""
MAY_START = {"ROWS", "Reader", "load_task", "mlflow"}
"""Names with which a test file builds whole models, reads runs or waits: its author decides."""
THROUGH_HELPERS = {"test_generated.py"}
"""Files that reach the pool's ranks by another module (tests/generated/compare.py).

They are quick enough for `make check` all the same.
"""


@functools.cache
def users_of_pool(path: Path) -> set[str]:
    """Functions of a file that train on ranks of the pool.

    By themselves or by others of that file.
    """
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    names = {
        function.name: {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        for function in functions
    }
    users = {"run_distributed"}
    while callers := {name for name, used in names.items() if used & users} - users:
        users |= callers
    return users


def wrong_marks(item: pytest.Function, uses_ray: bool) -> list[str]:
    """What is missing of a test's marks or superfluous, for a person."""
    names = set(dir(item.module))
    is_alone = item.originalname in users_of_pool(item.path) and not uses_ray
    may_be_pure = not (is_alone or uses_ray or names & STARTS)
    must_be_pure = may_be_pure and not names & MAY_START
    marks = {mark.name for mark in item.iter_markers()}
    wrong = {
        "add alone": is_alone and "alone" not in marks,
        "remove alone": "alone" in marks and not is_alone,
        "add pure": must_be_pure and "pure" not in marks,
        "remove pure": "pure" in marks and not may_be_pure,
    }
    return [f"{item.path.name}::{item.originalname}: {text}" for text in wrong if wrong[text]]


def test_marks_are_those_of_what_a_test_starts(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.config.stash[COLLECTED] if isinstance(item, pytest.Function)]
    ordinary = [item for item in items if not item.get_closest_marker("slow")]
    in_ray = {item.path for item in ordinary if "ray_environment" in item.fixturenames}
    checked = [item for item in ordinary if item.path.name not in THROUGH_HELPERS]
    wrong = {text for item in checked for text in wrong_marks(item, item.path in in_ray)}
    assert not wrong, "\n".join(sorted(wrong))
