"""What the person sees: a live line on a terminal, elsewhere a line every few seconds; no other program's output."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.storage import Storage

SECONDS_BETWEEN_LINES = 5.0


class Console:
    """Writes to the streams the process was started with, also while `capture` keeps all other output away."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet  # for --json and for ranks other than 0: no progress, no remarks
        self._out: IO[str] = sys.stdout
        self._err: IO[str] = sys.stderr
        self._live = False
        self._last_line = 0.0

    @contextlib.contextmanager
    def capture(self, log: Path) -> Iterator[None]:
        """Sends everything to `log` but what this console writes."""
        with output_to(log) as originals:
            # line buffered, so that lines appear when they are said
            self._out, self._err = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in originals)
            try:
                yield
            except BaseException:
                with log.open("a") as file:  # where it happened
                    traceback.print_exc(file=file)
                raise
            finally:
                self._clear()
                self._out.close()
                self._err.close()
                self._out, self._err = sys.stdout, sys.stderr

    def say(self, text: str) -> None:
        """A remark worth keeping."""
        if not self.quiet:
            self._clear()
            print(text, file=self._out, flush=True)

    def error(self, text: str) -> None:
        """What went wrong; said even when quiet."""
        self._clear()
        print(text, file=self._err, flush=True)

    def result(self, text: str) -> None:
        """The answer itself (JSON for machines); said even when quiet."""
        self._clear()
        print(text, file=self._out, flush=True)

    def status(self, text: str) -> None:
        """What is going on just now: on a terminal the live line, elsewhere nothing."""
        if not self.quiet and self._out.isatty():
            self._rewrite(text)

    def progress(self, event: dict[str, Any]) -> None:
        """The state of training, from a worker's progress event."""
        if self.quiet:
            return
        if self._out.isatty():
            self._rewrite(progress_line(event))
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or event["step"] >= event["steps"]:
            self._last_line = time.monotonic()
            print(progress_line(event), file=self._out, flush=True)

    def _rewrite(self, text: str) -> None:
        width = (os.get_terminal_size(self._out.fileno()).columns or 80) - 1
        self._out.write("\r\x1b[2K" + text[:width])
        self._out.flush()
        self._live = True

    def _clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[2K")
            self._live = False


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


@contextlib.contextmanager
def stop_signals(ask: Callable[[], object]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `ask`; a second one ends everything at once, by KeyboardInterrupt."""
    asked = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def worker_output(run: Storage, rank: int) -> Iterator[None]:
    """Sends a worker's output, prints included, to logs/rank-N.log of the run, where that is on this machine."""
    if not run.is_local:
        yield
        return
    streams = sys.stdout, sys.stderr
    with output_to(run.local_path / "logs" / f"rank-{rank}.log"):
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout, sys.stderr = streams


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def progress_line(event: dict[str, Any]) -> str:
    """`step 120/500  loss 0.2314  1,204 samples/s  0:41 left  310 MB`; where a GPU's peak is known, after the rate also
    `151 per GPU, MFU 41.2%`."""
    parts = [f"step {event['step']:,}/{event['steps']:,}"]
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.4f}")
    parts.append(f"{quantity(event['rate'])} {event['unit']}/s")
    if event.get("mfu") is not None:
        parts.append(f"{quantity(event['rate'] / event['gpus'])} per GPU, MFU {event['mfu']:.1%}")
    parts.append(f"{duration(event['seconds_left'])} left")
    parts.append(f"{size(event['memory_bytes'])} per worker")
    return "  ".join(parts)


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
