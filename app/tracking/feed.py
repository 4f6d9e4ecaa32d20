"""Feeds the trackers of `tracking.also` with the events of spools, in the writer's process.

Each tracker has a thread of its own, so that one that is slow holds up neither MLflow nor the
others, and a file of its own that says how far it is, `tracker-NAME.json` beside the spool.
"""

import logging
import re
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from app.console.masking import mask_text
from app.errors import described
from app.tracking.spool import (
    Event,
    last_start,
    look_at_lock,
    read,
    read_json,
    size,
    write_json,
)
from app.tracking.trackers import RunTracker, TrackedRun, find_tracker

POLL_SECONDS = 1.0
SAVE_SECONDS = 1.0
"""Between two notes on how far a tracker is: what a kill of the writer repeats at most."""
SETTLE_SECONDS = 5.0
"""How long the end of a run waits for its trackers."""
MOST_ERRORS = 10
"""Calls in a row that may raise before a tracker is no longer called, until the next start."""
MOST_TRIES = 3
"""How often a tracker may end the whole process before it is no longer called."""
_log = logging.getLogger("writer")


@dataclass
class FeedState:
    """How far a tracker is.

    Args:
        offset: The place in events.jsonl up to which it has the events, in bytes.
        attempt: The driver's start that was served last.
        tries: How often the events at `offset` have been begun in that start.
        began: Unix seconds of the run's first start.
        was_started: Whether the tracker has been started for the run.
        open: Whether the last start has not been finished.
        steps: The highest step that it has of each metric.
        params: The run's parameters.
        problem: What a person should know; "" if it has everything.
    """

    offset: int = 0
    attempt: str = ""
    tries: int = 0
    began: float = 0.0
    was_started: bool = False
    open: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def state_file(folder: Path, name: str) -> Path:
    """Where a spool's folder says how far a tracker is."""
    return folder / f"tracker-{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"


def problems(folder: Path) -> list[str]:
    """What a person should know about the trackers of a run, a sentence each."""
    states = [read_json(path) for path in sorted(folder.glob("tracker-*.json"))]
    return [state["problem"] for state in states if state.get("problem")]


class Feed:
    """Feeds one tracker with one spool, which this process has claimed.

    Args:
        folder: The spool.
        name: The tracker, as in `tracking.also`.
        attempt: The driver's start that is served.
    """

    def __init__(self, folder: Path, name: str, attempt: str) -> None:
        self.folder = folder
        self.name = name
        self.is_off = False
        """Whether the tracker is no longer called; the next start gives it the rest."""
        self._saving = threading.Lock()
        self._saved_clock = 0.0
        self._file = state_file(folder, name)
        names = [each.name for each in fields(FeedState)]
        values = read_json(self._file)
        self.state = FeedState(**{key: values[key] for key in names if key in values})
        if self.state.attempt != attempt:
            self.state.attempt = attempt
            self.state.tries = 0
            self.state.problem = ""
        self._is_late = False
        self._tracker: RunTracker | None = None
        self._errors = 0
        self.is_off = self.state.tries >= MOST_TRIES
        if self.is_off:
            self._note(f"it ended the tracking writer {MOST_TRIES} times")
        self.save()

    @property
    def has_all(self) -> bool:
        """Whether the tracker has the whole spool."""
        return self.state.offset >= size(self.folder) and not self.state.open

    def deliver(self) -> None:
        """Give the tracker what is new, and the end of a run whose driver has died."""
        is_appending, _ = look_at_lock(self.folder, "driver")  # before the size: see Uploader
        end = size(self.folder)
        while self.state.offset < end and not self.is_off:
            events = read(self.folder, self.state.offset)
            if not events:
                break  # the last line is still being written
            self.state.tries += 1
            self.save()
            for event, offset in events:
                self._give(event)
                if self.is_off:
                    break
                self.state.offset = offset
                if time.monotonic() - self._saved_clock > SAVE_SECONDS:
                    self.save()
            self.state.tries = 0
            self.save()
        if not is_appending and self.state.open and self.state.offset >= end and not self.is_off:
            self._finish("KILLED")
            self.save()
        if self._is_late and self.has_all:
            self._is_late = False
            self.state.problem = ""
            self.save()

    def save(self) -> None:
        """Write the state; any thread may."""
        with self._saving:
            self._saved_clock = time.monotonic()
            write_json(self._file, asdict(self.state))

    def too_slow(self) -> None:
        """Note that the process ends before the tracker has everything."""
        self._is_late = True
        self._note("it is slow, and gets the rest at the next start or with `trireme sync`")
        self.save()

    # --- events

    def _give(self, event: Event) -> None:
        match event["type"]:
            case "start":
                self.state.began = self.state.began or event["time"]
                self.state.open = True
                self._tracker = None
            case "params":
                self.state.params |= event["values"]
            case "metrics":
                self._log(event)
            case "finish":
                self._finish(event["status"])

    def _log(self, event: Event) -> None:
        """Log the points of an event that are not replays."""
        step = event["step"]
        if step is None:  # system metrics: the seconds since the run began, as MLflow has them
            step = max(0, (int(event["time"] * 1000) - int(self.state.began * 1000)) // 1000)
        steps = self.state.steps
        values = {
            name: value for name, value in event["values"].items() if step > steps.get(name, -1)
        }
        if values:
            self._call("log", step, values, event["time"])
        if not self.is_off:
            steps |= dict.fromkeys(values, step)

    def _finish(self, status: str) -> None:
        self._call("finish", status)
        self._tracker = None
        self.state.open = self.is_off

    def _call(self, method: str, *arguments: Any) -> None:
        """Call the tracker, which is made and started first; what it raises is only logged."""
        if self.is_off:
            return
        try:
            if self._tracker is None:
                self._tracker = self._started()
            getattr(self._tracker, method)(*arguments)
            self._errors = 0
        except BaseException as error:  # its SystemExit too must not end this thread
            self._errors += 1
            self.is_off = self._tracker is None or self._errors >= MOST_ERRORS
            _log.warning("tracker %s raises in %s", self.name, method, exc_info=True)
            consequence = ", and is not called again before the next start" if self.is_off else ""
            self._note(f"it raises {mask_text(described(error))}{consequence}")

    def _started(self) -> RunTracker:
        start = last_start(self.folder)
        tracker = find_tracker(self.name)()
        tracker.start(
            TrackedRun(
                name=start["run_name"],
                uid=start["run_uid"],
                folder=self.folder.parent,
                params=dict(self.state.params),
                resumed=self.state.was_started,
            )
        )
        self.state.was_started = True
        return tracker

    def _note(self, problem: str) -> None:
        log = self.folder / "writer.log"
        self.state.problem = (
            f"tracker {self.name} has not received everything: {problem}; see {log}"
        )


class TrackerThread:
    """Feeds one tracker in a thread: this process does not wait for it.

    Args:
        name: The tracker, as in `tracking.also`.
    """

    def __init__(self, name: str) -> None:
        self._feeds: list[Feed] = []
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def add(self, feed: Feed) -> None:
        """Deliver this feed too."""
        self._feeds = [*self._feeds, feed]
        self.wake()

    def wake(self) -> None:
        """Look for new events now."""
        self._wake.set()

    @property
    def unfinished(self) -> list[Feed]:
        """The feeds whose tracker is to get more."""
        return [feed for feed in self._feeds if not (feed.has_all or feed.is_off)]

    def _run(self) -> None:
        while True:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            for feed in self._feeds:
                try:
                    feed.deliver()
                except Exception:  # the disk is full, for example
                    _log.warning("tracker %s is not fed", feed.name, exc_info=True)


class Trackers:
    """The trackers of a writer's spools.

    Args:
        attempt: The driver's start that the writer serves.
    """

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._threads: dict[str, TrackerThread] = {}
        self._pending: list[Path] = []
        self._has_settled = False

    def add(self, folder: Path) -> None:
        """Feed the trackers of this spool, once it says which."""
        self._pending.append(folder)

    def wake(self) -> None:
        """Look for new events now."""
        for folder in list(self._pending):
            start = last_start(folder)
            if start:
                self._pending.remove(folder)
                for name in start.get("also", ()):
                    thread = self._threads.get(name) or self._new_thread(name)
                    thread.add(Feed(folder, name, self._attempt))
        for thread in self._threads.values():
            thread.wake()

    def _new_thread(self, name: str) -> TrackerThread:
        self._threads[name] = TrackerThread(name)
        return self._threads[name]

    def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until the trackers have everything, once, and note which of them are too slow.

        Args:
            seconds: How long to wait at most.
        """
        if self._has_settled:
            return
        self._has_settled = True
        deadline = time.monotonic() + seconds
        self.wake()
        while self.unfinished() and time.monotonic() < deadline:
            time.sleep(0.05)
        for feed in self.unfinished():
            feed.too_slow()

    def unfinished(self) -> list[Feed]:
        """The feeds whose tracker is to get more."""
        return [feed for thread in self._threads.values() for feed in thread.unfinished]
