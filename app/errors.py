"""Errors that are meant for a person: one sentence each, without a traceback unless asked for.

They are recognised by their class everywhere. Those of app/ and experiments/ have the base
`TriremeError`. strategies/ and cluster/ import nothing from app/ and have errors of their own:
app/run/endings.py says what all of them mean.
"""

from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130
"""The exit codes of commands that end with an error."""


class TriremeError(Exception):
    """The base of the errors that end a command with one sentence."""


class UserError(TriremeError):
    """Something that the person wrote or provided is wrong.

    The message is one sentence: what was wrong, where, and what to write instead. The command line
    prints it and ends with exit code 2.
    """


class MissingData(UserError):
    """The data that task_args.data names is missing, or no data is named."""


class RunFailed(TriremeError):
    """Training started and could not continue; the command line ends with exit code 1."""


class NonFiniteError(RunFailed):
    """The loss or the gradient is no longer a finite number; another try would not help."""


class Interrupted(TriremeError):
    """The person or a scheduler asked the run to stop; exit code 130. Its checkpoint is intact."""


def nearest(word: str, known: Iterable[object]) -> str:
    """The end of a sentence about an unknown word: " (did you mean 'x'?)", or "".

    Args:
        word: The unknown word.
        known: The known words.
    """
    import difflib

    close = difflib.get_close_matches(str(word), [str(candidate) for candidate in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
