"""What a person sees: a live line on a terminal, elsewhere a line every few seconds.

The output of libraries and other programs goes into a log instead.
"""

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
from typing import IO, TYPE_CHECKING

from app.console.masking import mask_text

if TYPE_CHECKING:
    from app.config import Config
    from app.training.events import StepsDone
    from app.training.job import Job

SECONDS_BETWEEN_LINES = 5.0
LINE_WIDTH = 79
"""Characters of the line that says how far training is: a terminal has 80 columns, and a cursor."""
LOG_TIME = "%Y-%m-%d %H:%M:%S"
"""How lines of a log begin."""
FIRST_SILENCE = 4.0
NEXT_SILENCE = 20.0
"""Seconds without output before the first and before each later "waiting for …" line."""


class Console:
    """Writes to the process's original streams, even while `capture` redirects all other output.

    Args:
        quiet: Print no progress and no remarks, as for ranks other than 0.
        result_only: Standard output gets the result and nothing else, as with --json; progress and
            remarks go to standard error.
    """

    def __init__(self, *, quiet: bool = False, result_only: bool = False) -> None:
        self.quiet = quiet
        self.start_clock = time.monotonic()
        """The monotonic clock when the command began, or the call from Python."""
        self._result_only = result_only
        self._out: IO[str] = sys.stdout
        self._err: IO[str] = sys.stderr
        self.output_closed = False
        """Whether writing failed: `| head -1` has read enough, or the terminal is gone."""
        self._has_live_line = False
        self._last_line = 0.0
        self._waiting: WaitingNotice | None = None
        self._json_log: JsonLines | None = None
        self._text_log: IO[str] | None = None

    @property
    def error_stream(self) -> IO[str]:
        """The process's original standard error, also inside `capture`."""
        return self._err

    @property
    def _messages(self) -> IO[str]:
        """Where progress and remarks go."""
        return self._err if self._result_only else self._out

    @contextlib.contextmanager
    def capture(self, log: Path, labels: Mapping[str, object] | None = None) -> Iterator[None]:
        """Redirect all output to a log, except what this console writes.

        Args:
            log: The file to append to.
            labels: If given, Python's output becomes JSON lines with these labels. What this
                console says is copied to the log in either form, with the time.
        """
        original_streams = self._out, self._err
        duplicates: list[IO[str]] = []
        with output_to(log) as originals, json_output(labels) as self._json_log:
            if _is_descriptor_1(self._out):  # a notebook's output does not go through a descriptor
                # Line buffered, so that each line appears as soon as it is written.
                duplicates = [os.fdopen(os.dup(fd), "w", buffering=1) for fd in originals]
                self._out, self._err = duplicates
            had_faulthandler = faulthandler.is_enabled()
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # If this process trains by itself, the person sees its crash.
                faulthandler.enable(self._err, all_threads=False)
            if self._json_log is None:
                self._text_log = log.open("a", buffering=1)
            try:
                yield
            except BaseException:
                traceback.print_exc(file=self._json_log or self._text_log)
                raise
            finally:
                self._clear()
                if self._text_log is not None:
                    self._text_log.close()
                    self._text_log = None
                faulthandler.disable()
                if had_faulthandler:
                    faulthandler.enable(sys.__stderr__ or 2)
                for stream in duplicates:
                    with contextlib.suppress(OSError):  # the reader of a pipe may be gone
                        stream.close()
                self._out, self._err = original_streams

    def _copy_to_log(self, text: str) -> None:
        if self._json_log:
            self._json_log.write(f"{text}\n")
        elif self._text_log:
            with contextlib.suppress(OSError, ValueError):  # the disk is full, for example
                now = time.strftime(LOG_TIME)
                self._text_log.write(f"{now} {mask_text(text)}\n")

    def restore(self) -> None:
        """Restore the process's own streams before it executes another program.

        Works within `capture` too.
        """
        self._clear()
        _flush()
        for fd, stream in enumerate((self._out, self._err), start=1):
            with contextlib.suppress(OSError):
                stream.flush()
            os.dup2(stream.fileno(), fd)

    def say(self, text: str) -> None:
        """Print a remark that should stay on the screen."""
        self._copy_to_log(text)
        if not self.quiet:
            self._print(text, stream=self._messages)

    def error(self, text: str) -> None:
        """Print what went wrong, even when quiet."""
        self._copy_to_log(text)
        self._print(text, stream=self._err)

    def result(self, text: str) -> None:
        """Print the command's result, such as JSON for machines, even when quiet."""
        self._print(text)

    def part(self, text: str) -> None:
        """Print a piece of a line."""
        if not self.quiet:
            self._print(text, end="", stream=self._messages)

    def status(self, text: str) -> None:
        """Show what is happening now in the live line of a terminal; elsewhere do nothing."""
        if not self.quiet and self._messages.isatty():
            self._rewrite(text)

    def waits_for(self, what: str, *, since: float | None = None) -> None:
        """From now on print "waiting for …" whenever nothing has been printed for a while.

        Args:
            what: For example "Ray to start"; "" stops the notices.
            since: When the wait began, in seconds of the monotonic clock; None means now.
        """
        if self._waiting is not None:
            self._waiting.stop.set()
            self._waiting = None
        if what and not self.quiet:
            self._waiting = WaitingNotice(
                what, lambda text: self._print(text, stream=self._messages), since=since
            )

    @contextlib.contextmanager
    def if_slow(self, text: str) -> Iterator[None]:
        """Print a remark to standard error if the block takes more than a second."""
        timer = threading.Timer(1.0, lambda: self._write(f"{text}\n", self._err))
        if not self.quiet:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def progress(self, event: StepsDone, evaluated: Mapping[str, float]) -> None:
        """Show the state of training.

        Args:
            event: How far the workers are.
            evaluated: The newest metrics on held-out data by name, empty before the first
                evaluation.
        """
        line = progress_line(event, evaluated)
        is_terminal = self._messages.isatty()
        if is_terminal and not self.quiet:
            self._rewrite(line)
        is_due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if is_due or event.step >= event.steps:
            self._last_line = time.monotonic()
            self._copy_to_log(line)
            if not is_terminal and not self.quiet:
                self._print(line, stream=self._messages)

    def _print(self, text: str, *, end: str = "\n", stream: IO[str] | None = None) -> None:
        if self._waiting is not None:
            self._waiting.last_output = time.monotonic()
        self._clear()
        self._write(text + end, stream or self._out)

    def _write(self, text: str, stream: IO[str]) -> None:
        """Write to a stream; training goes on if nobody reads it any more."""
        try:
            stream.write(text)
            stream.flush()
        except UnicodeEncodeError:  # the stream's encoding is ASCII, for example
            encoding = getattr(stream, "encoding", None) or "ascii"
            self._write(text.encode(encoding, "backslashreplace").decode(encoding), stream)
        except (OSError, ValueError):
            self.output_closed = True

    def _rewrite(self, text: str) -> None:
        try:
            width = (os.get_terminal_size(self._messages.fileno()).columns or 80) - 1
        except OSError:  # the terminal is gone
            self.output_closed = True
            return
        self._write("\r\x1b[2K" + text[:width], self._messages)
        self._has_live_line = True

    def _clear(self) -> None:
        if self._has_live_line:
            self._write("\r\x1b[2K", self._messages)
            self._has_live_line = False


class WaitingNotice:
    """A thread that prints "waiting for …" during silences, until `stop` is set.

    Args:
        what: What comes after "waiting for".
        say: Prints a line.
        since: When the wait began, in seconds of the monotonic clock; None means now.
    """

    def __init__(
        self, what: str, say: Callable[[str], None], *, since: float | None = None
    ) -> None:
        now = time.monotonic()
        self.what = what
        self.say = say
        self.started = now if since is None else since
        self.last_output = now
        self.stop = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="waiting-notice").start()

    def _run(self) -> None:
        silence = FIRST_SILENCE
        while not self.stop.wait(0.2):
            now = time.monotonic()
            if now - self.last_output >= silence:
                silence = NEXT_SILENCE
                self.last_output = now
                self.say(f"waiting for {self.what} ({duration(now - self.started)})")


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[tuple[int, int]]:
    """Redirect file descriptors 1 and 2 to the end of a file.

    That covers our own prints, Ray's C++ code and child processes.

    Yields:
        Duplicates of the original descriptors.
    """
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
    """A stream that turns each line into a JSON object, in one write to a file descriptor.

    Output that does not come from Python (C++, child processes) stays as plain lines between the
    objects: passing it through a pipe would lose the last lines before a crash.

    Args:
        descriptor: Where to write.
        labels: Fields of every object, besides `time` and `text`.
    """

    def __init__(self, descriptor: int, labels: Mapping[str, object]) -> None:
        self._descriptor = descriptor
        self._labels = labels
        self._incomplete_line = ""

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        *lines, self._incomplete_line = (self._incomplete_line + text).split("\n")
        for line in lines:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = json.dumps({"time": now, **self._labels, "text": mask_text(line)})
            os.write(self._descriptor, f"{record}\n".encode())
        return len(text)


def log_labels(config: Config, attempt: str, rank: int | str) -> dict[str, object] | None:
    """The labels of every log line with run.log_format=json; None for plain lines."""
    if config.run.log_format != "json":
        return None
    return {
        "run": config.run.name,
        "attempt": attempt,
        "rank": rank,
        "host": socket.gethostname(),
    }


@contextlib.contextmanager
def json_output(labels: Mapping[str, object] | None) -> Iterator[JsonLines | None]:
    """Write Python's output as JSON lines; without labels change nothing.

    Yields:
        The stream that writes the lines, or None.
    """
    if labels is None:
        yield None
        return
    streams = sys.stdout, sys.stderr
    json_lines = JsonLines(1, labels)
    sys.stdout = json_lines
    sys.stderr = json_lines
    try:
        yield json_lines
    finally:
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def worker_output(job: Job, rank: int | str) -> Iterator[None]:
    """Redirect a worker's output to a log of the run, if the run's storage is local.

    Args:
        job: What the worker trains.
        rank: Its rank, for logs/rank-N.log; or what it does, for logs/NAME.log.
    """
    from app.storage.storage import Storage

    storage = Storage(job.folder)
    labels = log_labels(job.config, job.attempt, rank)
    if not storage.is_local:
        yield
        return
    streams = sys.stdout, sys.stderr
    name = f"rank-{rank}" if isinstance(rank, int) else rank
    with output_to(storage.local_path / "logs" / f"{name}.log"):
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        # The log names the signal if one kills this process.
        faulthandler.enable(sys.stderr, all_threads=False)
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
    """Whether the stream writes to descriptor 1; a notebook's output does not."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def progress_line(event: StepsDone, evaluated: Mapping[str, float]) -> str:
    """The state of training in one line of at most `LINE_WIDTH` characters.

    For example `step 120/500  loss 0.2314  mean 1,204 samples/s  0:41 left  310 MB per worker`.
    After the first evaluation the line has `held out 0.2401` as well, and on GPUs whose peak
    performance is known `151 per GPU, MFU 41.2%`. The speed is that of `Speed` in
    app/training/reporting.py. Of a line that is too long the memory is left out, then the speed of
    a GPU, the step of the loss, the MFU, and what was held out.

    Args:
        event: How far the workers are.
        evaluated: The newest metrics on held-out data by name.
    """
    step = f"step {event.step:,}/{event.steps:,}"
    loss = loss_step = held_out = gpus = mfu = ""
    if event.loss is not None:
        loss = f"loss {event.loss:.4f}"
        if event.loss_step not in (0, event.step):
            loss_step = f" (step {event.loss_step:,})"
    if "loss" in evaluated:
        held_out = f"held out {evaluated['loss']:.4f}"
    speed = f"mean {quantity(event.rate)} {event.unit}/s"
    if event.mfu is not None:
        mfu = f"MFU {event.mfu:.1%}"
        gpus = f"{quantity(event.rate / event.gpus)} per GPU, {mfu}"
    left = f"{duration(event.seconds_left)} left"
    memory = f"{size(event.memory_bytes)} per worker"

    lines = []
    for shown in (
        (step, loss + loss_step, held_out, speed, gpus, left, memory),
        (step, loss + loss_step, held_out, speed, gpus, left),
        (step, loss + loss_step, held_out, speed, mfu, left),
        (step, loss, held_out, speed, mfu, left),
        (step, loss, held_out, speed, left),
        (step, loss, speed, left),
        (step, loss, speed.removeprefix("mean "), left),
    ):
        lines.append("  ".join(part for part in shown if part))
    return next((line for line in lines if len(line) <= LINE_WIDTH), lines[-1])


def evaluation_line(values: dict[str, float]) -> str:
    """The metrics of an evaluation in one line: `loss 0.07353, accuracy 98.00%`."""
    parts = []
    for name, value in values.items():
        number = f"{value:.2%}" if name == "accuracy" else f"{value:.4g}"
        parts.append(f"{name} {number}")
    return ", ".join(parts)


def quantity(value: float) -> str:
    """A number with at least three significant digits and separated thousands: 1,204 or 0.532."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as 0:41, 12:05, 3:07:00 or 2 d 04:00:00."""
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def size(count: float) -> str:
    """Bytes in a readable unit: 310 MB, 1.4 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("bytes", "kB", "MB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
