"""What the person sees: a live line on a terminal, elsewhere a line every few seconds; no other program's output."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from app.console.masking import mask_text

if TYPE_CHECKING:
    from app.config import Config
    from app.training.events import StepsDone
    from app.training.job import Job

SECONDS_BETWEEN_LINES = 5.0
FIRST_SILENCE = 4.0
NEXT_SILENCE = 20.0
"""Seconds without a line, first and again, after which a person is told what is waited for."""


class Console:
    """Writes to the streams the process was started with, also while `capture` keeps all other output away."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet  # for --json and for ranks other than 0: no progress, no remarks
        self._out: IO[str] = sys.stdout
        self._err: IO[str] = sys.stderr
        self.unheard = False  # whether what it wrote went nowhere: `| head -1` has read enough, or the terminal is gone
        self._live = False
        self._last_line = 0.0
        self._waits: Waits | None = None
        self._record: Any = None  # where what is said is kept as JSON lines

    @contextlib.contextmanager
    def capture(self, log: Path, labels: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Sends everything to `log` but what this console writes; with labels as JSON lines, and that too."""
        before, opened = (self._out, self._err), list[IO[str]]()
        with output_to(log) as originals, json_output(labels) as self._record:
            if _is_descriptor_1(self._out):  # a notebook's goes another way than to `log`
                # line buffered, so that lines appear when they are said
                opened = [os.fdopen(os.dup(fd), "w", buffering=1) for fd in originals]
                self._out, self._err = opened
            had_faults = faulthandler.is_enabled()
            with contextlib.suppress(OSError, ValueError, AttributeError):
                faulthandler.enable(self._err, all_threads=False)  # where this process itself trains, a person sees it
            try:
                yield
            except BaseException:
                with log.open("a") as file:  # where it happened
                    traceback.print_exc(file=self._record or file)
                raise
            finally:
                self._clear()
                faulthandler.disable()
                if had_faults:
                    faulthandler.enable(sys.__stderr__ or 2)
                for stream in opened:
                    with contextlib.suppress(OSError):  # nobody reads what was still to be written
                        stream.close()
                self._out, self._err = before

    def _keep(self, text: str) -> None:
        if self._record:
            self._record.write(f"{text}\n")

    def restore(self) -> None:
        """Gives this process its own streams back, also within `capture`: it is about to become another program."""
        self._clear()
        _flush()
        for fd, stream in enumerate((self._out, self._err), start=1):
            with contextlib.suppress(OSError):
                stream.flush()
            os.dup2(stream.fileno(), fd)

    def say(self, text: str) -> None:
        """A remark worth keeping."""
        self._keep(text)
        if not self.quiet:
            self._print(text)

    def error(self, text: str) -> None:
        """What went wrong; said even when quiet."""
        self._keep(text)
        self._print(text, stream=self._err)

    def result(self, text: str) -> None:
        """The answer itself (JSON for machines); said even when quiet."""
        self._print(text)

    def part(self, text: str) -> None:
        """A piece of a line."""
        if not self.quiet:
            self._print(text, end="")

    def status(self, text: str) -> None:
        """What is going on just now: on a terminal the live line, elsewhere nothing."""
        if not self.quiet and self._out.isatty():
            self._rewrite(text)

    def waits_for(self, what: str) -> None:
        """From now on, whenever nothing has been said for a while, says that this is waited for, and since when.

        Args:
            what: "Ray to start"; "" ends it.
        """
        if self._waits is not None:
            self._waits.over.set()
            self._waits = None
        if what and not self.quiet:
            self._waits = Waits(what, lambda text: self._print(text))

    @contextlib.contextmanager
    def if_slow(self, text: str) -> Iterator[None]:
        """Says what is going on, on the standard error stream, once it has taken a second."""
        timer = threading.Timer(1.0, lambda: self._write(f"{text}\n", self._err))
        if not self.quiet:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def progress(self, event: StepsDone, evaluated: Mapping[str, float]) -> None:
        """The state of training.

        Args:
            event: How far the workers are.
            evaluated: The newest figures on held-out data, by name; empty before the first evaluation.
        """
        if self.quiet:
            return
        if self._out.isatty():
            self._rewrite(progress_line(event, evaluated))
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or event.step >= event.steps:
            self._last_line = time.monotonic()
            self._print(progress_line(event, evaluated))

    def _print(self, text: str, *, end: str = "\n", stream: IO[str] | None = None) -> None:
        if self._waits is not None:
            self._waits.said_at = time.monotonic()
        self._clear()
        self._write(text + end, stream or self._out)

    def _write(self, text: str, stream: IO[str]) -> None:
        """Work does not end because nobody reads about it any more: then it goes on, and says nothing."""
        try:
            stream.write(text)
            stream.flush()
        except UnicodeEncodeError:  # of a stream that knows ASCII only
            encoding = getattr(stream, "encoding", None) or "ascii"
            self._write(text.encode(encoding, "backslashreplace").decode(encoding), stream)
        except (OSError, ValueError):
            self.unheard = True

    def _rewrite(self, text: str) -> None:
        try:
            width = (os.get_terminal_size(self._out.fileno()).columns or 80) - 1
        except OSError:  # the terminal is gone
            self.unheard = True
            return
        self._write("\r\x1b[2K" + text[:width], self._out)
        self._live = True

    def _clear(self) -> None:
        if self._live:
            self._write("\r\x1b[2K", self._out)
            self._live = False


class Waits:
    """A thread that says what is waited for, until `over` is set.

    Args:
        what: As in "waiting for …".
        say: Prints a line.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what = what
        self.say = say
        self.began = time.monotonic()
        self.said_at = self.began
        self.over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="waits").start()

    def _run(self) -> None:
        silence = FIRST_SILENCE
        while not self.over.wait(0.2):
            now = time.monotonic()
            if now - self.said_at >= silence:
                silence = NEXT_SILENCE
                self.said_at = now
                self.say(f"waiting for {self.what} ({duration(now - self.began)})")


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[tuple[int, int]]:
    """Sends file descriptors 1 and 2 (our own prints, Ray's C++ side, child processes) to the end of `log`; gives
    duplicates of what they were."""
    log.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    originals = os.dup(1), os.dup(2)
    with log.open("ab") as target:
        for fd in (1, 2):
            os.dup2(target.fileno(), fd)
    try:
        yield originals
    finally:
        _flush()
        for fd, original in enumerate(originals, start=1):
            os.dup2(original, fd)
            os.close(original)


class JsonLines(io.TextIOBase):
    """A stream whose every line becomes a JSON object with labels, in one write to a file descriptor. What is not
    Python's (C++, child processes) stays plain lines between them: nothing waits in a pipe that a crash would empty."""

    def __init__(self, descriptor: int, labels: Mapping[str, Any]) -> None:
        self._descriptor, self._labels, self._begun = descriptor, labels, ""

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = json.dumps({"time": now, **self._labels, "text": mask_text(line)})
            os.write(self._descriptor, f"{record}\n".encode())
        return len(text)


def log_labels(config: Config, attempt: str, rank: int | str) -> dict[str, Any] | None:
    """What stands in every line of a log: with run.log_format=json, else None."""
    labels = {"run": config.run.name, "attempt": attempt, "rank": rank, "host": socket.gethostname()}
    return labels if config.run.log_format == "json" else None


@contextlib.contextmanager
def json_output(labels: Mapping[str, Any] | None) -> Iterator[JsonLines | None]:
    """Python's output as JSON lines; the stream that makes them. Without labels nothing changes."""
    if labels is None:
        yield None
        return
    streams = sys.stdout, sys.stderr
    out = sys.stdout = sys.stderr = JsonLines(1, labels)
    try:
        yield out
    finally:
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def worker_output(job: Job, rank: int) -> Iterator[None]:
    """Sends a worker's output, prints included, to logs/rank-N.log of the run, where that is on this machine."""
    from app.storage.storage import Storage

    run, labels = Storage(job.folder), log_labels(job.config, job.attempt, rank)
    if not run.is_local:
        yield
        return
    streams = sys.stdout, sys.stderr
    with output_to(run.local_path / "logs" / f"rank-{rank}.log"):
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        faulthandler.enable(sys.stderr, all_threads=False)  # a signal that ends this process is named in the log
        try:
            with json_output(labels):
                try:
                    yield
                except BaseException:
                    traceback.print_exc()
                    raise
        finally:
            sys.stdout, sys.stderr = streams


def _is_descriptor_1(stream: IO[str]) -> bool:
    """Not so of a notebook's output, which goes another way."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def progress_line(event: StepsDone, evaluated: Mapping[str, float]) -> str:
    """`step 120/500  loss 0.2314  mean 1,204 samples/s  0:41 left  310 MB`; where a GPU's peak is known, after the rate
    also `151 per GPU, MFU 41.2%`; after the first evaluation also `held out 0.2401`. The speed is that of `Speed` in
    app/training/loop.py.
    """
    parts = [f"step {event.step:,}/{event.steps:,}"]
    if event.loss is not None:
        loss_step = event.loss_step or event.step
        parts.append(f"loss {event.loss:.4f}" + (f" (step {loss_step:,})" if loss_step != event.step else ""))
    if "loss" in evaluated:
        parts.append(f"held out {evaluated['loss']:.4f}")
    parts.append(f"mean {quantity(event.rate)} {event.unit}/s")
    if event.mfu is not None:
        parts.append(f"{quantity(event.rate / event.gpus)} per GPU, MFU {event.mfu:.1%}")
    parts.append(f"{duration(event.seconds_left)} left")
    parts.append(f"{size(event.memory_bytes)} per worker")
    return "  ".join(parts)


def evaluation_line(values: dict[str, float]) -> str:
    """`loss 0.07353, accuracy 98.00%`."""
    return ", ".join(
        f"{name} {f'{value:.2%}' if name == 'accuracy' else f'{value:.4g}'}" for name, value in values.items()
    )


def quantity(value: float) -> str:
    """Three significant digits, thousands separated: 1,204 or 0.532."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """0:41, 12:05, 3:07:00, 2 d 04:00:00."""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def size(count: float) -> str:
    """Bytes in the unit that reads best: 310 MB, 1.4 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("bytes", "kB", "MB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
