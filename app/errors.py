"""Errors that are meant for a person: one sentence each, without a traceback unless asked for.

They are recognised by their class everywhere. Those of app/ and experiments/ have the base
`TriremeError`. strategies/ and cluster/ import nothing from app/ and have errors of their own:
app/run/endings.py says what all of them mean.

An exception of a person's own code is reported with its class, its message and the line of that
code (`own_line`), which a traceback would hide among the frames of libraries.
"""

import ast
import contextlib
import errno
import inspect
import linecache
import os
import re
import shutil
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130
EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed: the same command may succeed later, or once what `error` names is fixed",
    EXIT_REFUSED: "refused before anything was started: change the command or the file",
    EXIT_STOPPED: "stopped by a signal or by its budget: the same command continues",
}
"""What each exit code of a command means; there are no others."""


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


# --- errors of a person's own code ----------------------------------------------------------------

_ROOT = str(Path(__file__).resolve().parents[1])
_TRIREME = tuple(
    os.path.join(_ROOT, name) + os.sep for name in ("app", "strategies", "cluster", "experiments")
)
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_KEPT = "trireme_own_line"
"""The attribute of an exception that has lost its traceback on the way from another process."""
_OWN_PACKAGES: set[str] = set()


@dataclass(frozen=True)
class SourceLine:
    """A line of a person's own code.

    Args:
        file: As Python has it: a path, or the name that a notebook gives to a cell.
        line: Its number, from 1.
        function: The name of the function that it is in; "" if that is not known.
        text: The line itself; "" if it cannot be read here.
    """

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        """As in a traceback, where editors and terminals make it a link."""
        where = f'File "{self.file}", line {self.line}'
        if self.file.startswith("<") or f"{os.sep}ipykernel_" in self.file:
            where = f"a cell of the notebook or session, line {self.line}"
        if self.function not in ("", "<module>"):
            where += f", in {self.function}"
        # A cell that a worker has run can be read only in the process that made it.
        text = self.text or linecache.getline(self.file, self.line).strip()
        return f"  {where}" + (f"\n    {text}" if text else "")


def claim_package(module: str) -> None:
    """From now on the code of this module's package is a person's own, wherever it is installed."""
    _OWN_PACKAGES.add(module.partition(".")[0])


def own_line(error: BaseException) -> SourceLine | None:
    """The innermost line of a person's own code that an exception comes from.

    One of Trireme's own errors comes from the exception that it was raised `from`.

    Args:
        error: The exception.

    Returns:
        None if no code but Trireme's and that of libraries is known to be involved.
    """
    kept = getattr(error, _KEPT, None)
    if isinstance(kept, SourceLine):
        return kept
    if not _is_triremes(error):
        line = _line_of_syntax(error) or _innermost_line(error)
        if line is not None:
            return line
    return own_line(error.__cause__) if error.__cause__ is not None else None


def keep_line(error: BaseException, line: SourceLine | None) -> None:
    """Let `own_line` return this line for an exception that has come from another process."""
    if line is not None:
        with contextlib.suppress(AttributeError, TypeError):  # a class with __slots__
            setattr(error, _KEPT, line)


def with_line(sentence: str, line: SourceLine | None) -> str:
    """A sentence, and below it the line of a person's own code if there is one."""
    return sentence if line is None else f"{sentence}\n{line}"


def described(error: BaseException) -> str:
    """An exception in one line: its class and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line.strip() for line in message.strip().splitlines()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return f"{type(error).__name__}: {text.rstrip('.')}"


FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def of_file(error: BaseException) -> str:
    """The sentence about a file for which there is no room or no right; "" for another error."""
    if not isinstance(error, OSError):
        return ""
    path = error.filename2 or error.filename
    if error.errno in FULL:
        if not isinstance(path, str):
            return f"a disk is full ({error.strerror}): make room on it (--traceback shows where)"
        return f"{path} cannot be written ({error.strerror}): make room there, {free_space(path)}"
    if error.errno in FORBIDDEN and isinstance(path, str):
        return (
            f"{path} cannot be opened or written ({error.strerror}): give another folder, or the "
            "right to write there"
        )
    return ""


def says_full(text: str) -> bool:
    """Whether an error's words, of whatever library, say that a disk has no room."""
    return any(os.strerror(number) in text for number in FULL)


def free_space(path: str) -> str:
    """How much is free where a file is or was to be, such as "3.1 MB are free"."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"


@contextlib.contextmanager
def own_code(what: str) -> Iterator[None]:
    """A context in which an exception of a person's own code becomes a `UserError`.

    Exceptions in which no such code is involved stay as they are, and so do Trireme's own.

    Args:
        what: The beginning of the sentence, such as "task 'a:B' cannot be made".

    Raises:
        UserError: The code has raised an exception; the message ends with its line.
    """
    try:
        yield
    except Exception as error:
        line = None if _is_triremes(error) else own_line(error)
        if line is None:
            raise
        raise UserError(with_line(f"{what}: {described(error)}", line)) from error


def return_line(function: Callable[..., Any], suspicious: str = "") -> SourceLine | None:
    """The `return` of a function, for a sentence about what it returns.

    Args:
        function: The function or method.
        suspicious: A regular expression of what the statement may have that is to blame.

    Returns:
        Of several returns the first that has it, or else the line of `def`. None if the source is
        not known.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    returns = {}
    definition = 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            returns[node.lineno] = ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            definition = node.lineno
    suspects = [
        number for number, text in returns.items() if suspicious and re.search(suspicious, text)
    ]
    number = definition
    if len(returns) == 1 or suspects:
        number = min(suspects or returns)
    text = lines[number - 1].strip()
    return SourceLine(inspect.getfile(function), first_line + number - 1, function.__name__, text)


def _is_triremes(error: BaseException) -> bool:
    """Whether the class of an exception is defined in Trireme's own files."""
    module = sys.modules.get(type(error).__module__)
    return os.path.realpath(getattr(module, "__file__", None) or "").startswith(_TRIREME)


def _line_of_syntax(error: BaseException) -> SourceLine | None:
    if not isinstance(error, SyntaxError) or not error.filename or not error.lineno:
        return None
    return SourceLine(error.filename, error.lineno, "", (error.text or "").strip())


def _innermost_line(error: BaseException) -> SourceLine | None:
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _is_own(frame):
            code = frame.f_code
            text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
            line = SourceLine(code.co_filename, number, code.co_name, text)
    return line


def _is_own(frame: FrameType) -> bool:
    """Whether a frame runs code of the person, not of Trireme or of a library."""
    file = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    if file.startswith("<"):
        # A cell of an interactive session has a source; what a library makes by exec has none.
        return bool(linecache.getline(file, 1, frame.f_globals)) and module == "__main__"
    path = os.path.realpath(file)
    if path.startswith(_TRIREME):
        return False
    if path.startswith(_LIBRARIES) or any(folder in path for folder in _INSTALLED):
        return module.partition(".")[0] in _OWN_PACKAGES
    return True
