"""Errors for users: how a command ends with each of their classes, and what a script catches."""

import json
import traceback

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


def raised_in_python(
    kind: type[Exception], from_error: Exception | None = None
) -> trireme.TriremeError:
    """What a verb of Python raises of an error of this kind."""

    @_one_at_a_time
    def verb_of_python() -> None:
        raise kind("it is so.") from from_error

    with pytest.raises(trireme.TriremeError) as raised:
        verb_of_python()
    return raised.value


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
    document = {"status": status, "error": "it is so.", "exit_code": code}
    assert ending(kind("it is so.")) == (code, document)


@pytest.mark.parametrize("kind", NAMESAKES, ids=lambda kind: kind.__name__)
def test_a_users_error_of_the_same_name_is_not_triremes(kind: type[Exception]) -> None:
    code, answer = ending(kind("it is so."))
    assert code == 1 and answer["error"].startswith(f"{kind.__name__}: it is so\n")
    plain_error = raised_in_python(kind)
    assert type(plain_error) is RunFailed and str(plain_error).startswith(
        f"{kind.__name__}: it is so\n  File "
    )


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
    raised = raised_in_python(kind)
    assert type(raised) is caught
    assert str(raised) == "it is so."
    assert trireme.TriremeError is TriremeError


def test_a_program_sees_its_own_line_and_the_sentence_and_no_chain() -> None:
    """Also of an error that was raised from others, as that of a Ray that does not start is."""
    plain_error = raised_in_python(ClusterUnavailable, from_error=OSError("out of ports"))
    text = "".join(traceback.format_exception(plain_error))
    assert text.count("Traceback") == 1 and text.count('  File "') <= 3, text
    assert text.endswith("RunFailed: it is so.\n")
    assert isinstance(plain_error.__context__, ClusterUnavailable), "for a debugger"


def test_a_bug_of_triremes_keeps_its_traceback() -> None:
    with pytest.raises(TypeError) as raised:
        trireme.plan(cluster=object(), task="tabular")  # type: ignore[arg-type]
    assert len(raised.traceback) > 4
