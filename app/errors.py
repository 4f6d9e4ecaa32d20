"""Errors that are meant for a person: one sentence each, no traceback unless asked for.

They are recognised by class everywhere. Those of app/ and experiments/ have the base
`TriremeError`. strategies/ and cluster/ import nothing of app/ and raise errors of their own: app/run/endings.py
says what all of them mean.
"""

from collections.abc import Iterable
from typing import Any


class TriremeError(Exception):
    """What ends a command with one sentence for a person."""


class UserError(TriremeError):
    """Something the person wrote or provided is wrong.

    The message is one sentence: what was wrong, where, and what to write instead.
    The command line prints it and ends with exit code 2.
    """


class MissingData(UserError):
    """What task_args.data names is not there, or it is not given."""


class RunFailed(TriremeError):
    """Training started and could not go on; the command line ends with exit code 1."""


class NonFiniteError(RunFailed):
    """The loss or the gradient stopped being a finite number; trying again would not help."""


class Interrupted(TriremeError):
    """The person (or a scheduler) asked the run to stop; exit code 130. Its checkpoint is intact."""


def nearest(word: str, known: Iterable[Any]) -> str:
    """ " (did you mean 'x'?)" with the nearest known word, or "" if none is near."""
    import difflib

    close = difflib.get_close_matches(str(word), [str(each) for each in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
