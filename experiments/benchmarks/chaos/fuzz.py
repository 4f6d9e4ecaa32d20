"""Mutated input of every kind: whatever a file holds, one sentence of ours or a good reading; no traceback, no hang,
and no file is changed by being read.

Each target has good files, from which Hypothesis makes bad ones: bytes flipped, put in, cut out, cut off, doubled;
lines exchanged; values replaced by awkward ones. What goes wrong is collected by where it was raised, the shortest
input of each kept.
"""

from __future__ import annotations

import contextlib
import json
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from app.errors import UserError
from cluster.errors import ClusterError
from strategies.layout import LayoutError

SENTENCES = (UserError, ClusterError, LayoutError)
HANG_SECONDS = 10.0
AWKWARD = ["", "0", "-1", "null", "true", "1e999", ".nan", "[]", "{}", "[[1]]", "{a: {b: 1}}", "!!python/object:os.x"]
AWKWARD += ["99999999999999999999", "é", "\x00", "*a", "&a [*a]", "${x}", "${oc.env:HOME}", "'", '"', "? x", "- -", "%"]
AWKWARD += ["\t", "NaN", "2024-01-01", "0x7f", "..", "/", "a" * 300, "<<: *x", "\ufeff", "???"]


class Hang(BaseException):
    """Reading takes too long."""


@dataclass(frozen=True)
class Target:
    """files: good content by name. read: what a person's command does with the folder they are in; it gets the name of
    the changed file. It may raise one of `SENTENCES`, and AssertionError for what must not be."""

    name: str
    files: dict[str, bytes]
    read: Callable[[Path, str], None]


@dataclass
class Found:
    """What went wrong in one place of the code."""

    target: str
    where: str
    error: str
    file: str
    content: bytes
    times: int = 1


@dataclass
class Result:
    examples: dict[str, int] = field(default_factory=dict)
    """By target."""
    refused: dict[str, int] = field(default_factory=dict)
    """Of these, answered with a sentence."""
    found: dict[tuple[str, str], Found] = field(default_factory=dict)


def fuzz(target: Target, folder: Path, examples: int, number: int, result: Result) -> None:
    """Reads `examples` mutations of the target's files, drawn from the seed `number`."""
    folder.mkdir(parents=True, exist_ok=True)

    @seed(number)
    @settings(max_examples=examples, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=_ALL)
    @given(mutated(target.files))
    def once(change: tuple[str, bytes | None]) -> None:
        name, content = change
        put(folder, target.files, name, content)
        result.examples[target.name] = result.examples.get(target.name, 0) + 1
        kept = contents(folder)
        problem = attempt(lambda: target.read(folder, name))
        if problem == "refused":
            result.refused[target.name] = result.refused.get(target.name, 0) + 1
            problem = None
        if problem is None and (changed := unlike(folder, kept)):
            problem = ("damage", f"reading changed {changed}")
        if problem:
            note(result, target.name, name, content or b"", *problem)

    once()


_ALL = list(HealthCheck)


def attempt(read: Callable[[], None]) -> Any:
    """None if it reads, "refused" if it says why not, else (where, error)."""
    try:
        with in_time():
            read()
    except SENTENCES as error:
        if "\n" in str(error).strip():
            return _where(error), f"a sentence of several lines: {str(error)[:200]!r}"
        return "refused"
    except (Exception, Hang) as error:
        return _where(error), f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _where(error: BaseException) -> str:
    """The innermost place in our own code."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    ours = [f for f in ours if any(f"/{part}/" in f.filename for part in ("app", "cluster", "strategies"))] or ours
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise Hang(f"not within {HANG_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def note(result: Result, target: str, file: str, content: bytes, where: str, error: str) -> None:
    key = (target, f"{where} {error.split(':')[0]}")
    old = result.found.get(key)
    if old is None:
        result.found[key] = Found(target, where, error, file, content)
    else:
        old.times += 1
        if len(content) < len(old.content):
            old.content, old.error, old.file = content, error, file


def put(folder: Path, files: dict[str, bytes], changed: str, content: bytes | None) -> None:
    """The good files in the folder, with one changed, or gone (None)."""
    for name, good in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted = content if name == changed else good
        if wanted is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != wanted:
            path.write_bytes(wanted)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def unlike(folder: Path, before: dict[str, bytes]) -> str | None:
    """The first file that is not as before; new ones do not matter."""
    now = contents(folder)
    return next((name for name, content in before.items() if now.get(name) != content), None)


# --- mutations ------------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, files: dict[str, bytes]) -> tuple[str, bytes | None]:
    """One file's name, and what it holds now; None: it is gone."""
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    if draw(st.integers(0, 60)) == 0:
        return name, None
    text = _is_text(content)
    for _ in range(draw(st.integers(1, 4))):
        change = draw(st.sampled_from(BY_LINE if text and draw(st.booleans()) else BY_BYTE))
        content = change(draw, content)
    return name, content


def _is_text(content: bytes) -> bool:
    try:
        return "\x00" not in content.decode()
    except UnicodeDecodeError:
        return False


def _place(draw: st.DrawFn, content: bytes) -> int:
    """Anywhere, but mostly where formats have their headers."""
    end = len(content)
    return draw(st.integers(0, min(end, 40)) if draw(st.booleans()) else st.integers(0, end))


def _flip(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + bytes(b ^ draw(st.integers(1, 255)) for b in content[at : at + 1]) + content[at + 1 :]


def _insert(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + draw(st.binary(min_size=1, max_size=12)) + content[at:]


def _cut(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + content[at + draw(st.integers(1, 64)) :]


def _end(draw: st.DrawFn, content: bytes) -> bytes:
    return content[: _place(draw, content)]


def _double(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    piece = content[at : at + draw(st.integers(1, 64))]
    return content[:at] + piece + content[at:]


def _fill(draw: st.DrawFn, content: bytes) -> bytes:
    at, length = _place(draw, content), draw(st.integers(1, 8))
    return content[:at] + bytes([draw(st.sampled_from([0, 1, 127, 128, 255]))]) * length + content[at + length :]


def _value(draw: st.DrawFn, content: bytes) -> bytes:
    """What comes after a line's colon, equals sign or comma is another thing."""
    lines = content.decode(errors="replace").split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    marks = [i for i, c in enumerate(lines[at]) if c in ":=,"]
    keep = lines[at][: draw(st.sampled_from(marks)) + 1] + " " if marks else ""
    lines[at] = keep + draw(st.sampled_from(AWKWARD))
    return "\n".join(lines).encode(errors="replace")


def _exchange(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.split(b"\n")
    one, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _drop(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    return b"\n".join(lines[:at] + lines[at + draw(st.integers(1, 3)) :])


def _indent(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = b"  " + lines[at] if draw(st.booleans()) else lines[at].lstrip()
    return b"\n".join(lines)


BY_BYTE = (_flip, _insert, _cut, _end, _double, _fill)
BY_LINE = (_value, _value, _value, _exchange, _drop, _indent)


def report(result: Result, out: Path | None) -> str:
    """What was found, as text; inputs that went wrong are kept in `out`."""
    total, refused = sum(result.examples.values()), sum(result.refused.values())
    counts = ", ".join(f"{name} {count:,}" for name, count in result.examples.items())
    lines = [f"{total:,} mutated inputs ({counts}): {refused:,} refused in a sentence, {len(result.found)} faults"]
    for number, found in enumerate(result.found.values()):
        lines.append(f"  {found.target}, {found.file}, at {found.where}, {found.times} times: {found.error}")
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{number}-{found.target.replace(' ', '-')}").write_bytes(found.content)
            (out / f"{number}.json").write_text(json.dumps([found.target, found.file, found.where, found.error]))
    return "\n".join(lines)
