"""Errors for users: how a command ends with each of their classes, and what a script catches."""

import json

import click
import pytest
import trireme
from click.testing import CliRunner

from app.api import _one_at_a_time
from app.checkpoint import CheckpointError
from app.cli.common import Invocation, verb
from app.errors import Interrupted, MissingData, NonFiniteError, RunFailed, TriremeError, UserError
from cluster import ClusterError, ClusterUnavailable
from cluster.hardware import HardwareError
from experiments.sweep.trial import WrongMetric
from strategies.layout import LayoutError

NAMESAKES = [
    type(name, (Exception,), {})
    for name in ("UserError", "LayoutError", "ClusterError", "RunFailed")
]
"""A user's classes of errors, with names of Trireme's."""


class Narrower(LayoutError):
    """A subclass of an error, with another name."""


def ending(error: Exception) -> tuple[int, dict[str, str]]:
    """The exit code of a command that raises an error, and what it prints with --json."""

    @verb("fail", group=click)
    def fail(cli: Invocation) -> None:
        raise error

    result = CliRunner().invoke(fail, ["--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[0])


REFUSALS = [UserError, MissingData, WrongMetric, LayoutError, Narrower, ClusterError, HardwareError]
FAILURES = [RunFailed, NonFiniteError, CheckpointError, ClusterUnavailable]


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        *[(kind, 2, "refused") for kind in REFUSALS],
        *[(kind, 1, "failed") for kind in FAILURES],
        (Interrupted, 130, "stopped"),
    ],
)
def test_a_command_ends_with_the_sentence_and_the_code_of_its_error(
    kind: type[Exception], code: int, status: str
) -> None:
    assert ending(kind("it is so.")) == (code, {"status": status, "error": "it is so."})


@pytest.mark.parametrize("kind", NAMESAKES, ids=lambda kind: kind.__name__)
def test_a_users_error_of_the_same_name_is_not_triremes(kind: type[Exception]) -> None:
    code, answer = ending(kind("it is so."))
    assert code == 1 and answer["error"].startswith(f"{kind.__name__}: it is so.")
    with pytest.raises(kind), _one_at_a_time():
        raise kind("it is so.")


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (LayoutError, UserError),
        (HardwareError, UserError),
        (WrongMetric, WrongMetric),
        (ClusterUnavailable, RunFailed),
        (NonFiniteError, NonFiniteError),
        (Interrupted, Interrupted),
    ],
)
def test_a_script_catches_every_error_by_one_class(
    kind: type[Exception], caught: type[Exception]
) -> None:
    with pytest.raises(trireme.TriremeError) as raised, _one_at_a_time():
        raise kind("it is so.")
    assert type(raised.value) is caught and str(raised.value) == "it is so."
    assert trireme.TriremeError is TriremeError
