"""Heartbeats: sent by a thread of every worker, judged by the driver.

A worker's thread sends a heartbeat each second, and answers what the driver asks. Training runs in
another thread and never waits for it. A process that is stopped, or deep in a call that holds the
interpreter lock, sends nothing.

Whether the run hangs, and which rank is to blame, is decided from heartbeats alone. Progress is any
change of any rank's phase, step or ticks. A pause is suspicious when it is far longer than any
before in this attempt. If nothing moves for about as long again, the run hangs, and the rank to
blame is one that does not answer, or else one that does not wait for the others or is furthest
behind.

Limits are longer if there is no history: before the second step only a rank that does not answer at
all is stuck, loading and saving may take half an hour, reading data and evaluating a minute.
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from app.launchers.workers import Status
from app.training.job import Heartbeat

PERIOD_SECONDS = 1.0
COLLECTIVE_FRAMES = 4
"""How many innermost calls of the training thread are searched for torch.distributed."""

Beat = tuple[str, int, int, bool]
"""Phase, step, ticks and whether the rank waits (see `workers.Status`)."""
Answer = tuple[int, str]
"""The number of a question, and the answer."""


@dataclass(frozen=True)
class Reply:
    """What the driver replies to a heartbeat.

    Args:
        stop: Whether to save and stop.
        question: "stack" or "flight_recorder", asked until it is answered; "" if none is.
        number: Of the question.
    """

    stop: bool = False
    question: str = ""
    number: int = 0


class HeartbeatThread:
    """Sends a worker's heartbeats, until it is closed.

    Args:
        heartbeat: What the worker does and how far it is.
        send: Hands a beat and an answer, if there is one, to the driver, and returns its reply. It
            may raise.
        on_reply: Called with each reply.
        training_thread: The id of the thread that trains; None means this one.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        send: Callable[[Beat, Answer | None], Reply],
        on_reply: Callable[[Reply], None],
        training_thread: int | None = None,
    ) -> None:
        self.heartbeat = heartbeat
        self.send = send
        self.on_reply = on_reply
        self.training_thread = training_thread or threading.get_ident()
        self.answered = 0
        """The number of the newest question that was answered."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def close(self) -> None:
        """Sends no more; does not wait for the thread."""
        self._closed.set()

    def _run(self) -> None:
        answer: Answer | None = None
        while True:
            has_new_answer = False
            # The driver may be gone, or not answer just now: training does not depend on it.
            with contextlib.suppress(Exception):
                reply = self.send(self.beat(), answer)
                answer = None
                if reply.question and reply.number > self.answered:
                    answer = (reply.number, self.answer(reply.question))
                    self.answered = reply.number
                    has_new_answer = True
                self.on_reply(reply)
            # An answer is sent at once, and tried again with the next heartbeat.
            if not has_new_answer and self._closed.wait(PERIOD_SECONDS):
                return

    def beat(self) -> Beat:
        """The heartbeat of this moment."""
        heartbeat = self.heartbeat
        waiting = _waits_for_peers(self._frames())
        return heartbeat.phase, heartbeat.step, heartbeat.ticks, waiting

    def answer(self, question: str) -> str:
        """Answers a question of the driver's; see `Reply.question`."""
        if question == "stack":
            return "".join(traceback.format_list(self._frames())) or "not training\n"
        from strategies.torch_internals import flight_recorder

        return flight_recorder()

    def _frames(self) -> list[traceback.FrameSummary]:
        """The stack of the training thread; empty if it has ended."""
        frame = sys._current_frames().get(self.training_thread)
        return list(traceback.extract_stack(frame)) if frame else []


def _waits_for_peers(frames: Sequence[traceback.FrameSummary]) -> bool:
    innermost = frames[-COLLECTIVE_FRAMES:]
    if any("torch/distributed" in frame.filename for frame in innermost):
        return True
    return any(".wait(" in (frame.line or "") for frame in innermost[-1:])


# --- the driver's side ----------------------------------------------------------------------------

SUSPICIOUS = 5.0
"""A pause is suspicious when it lasts this many times the longest one before."""
WINDOW = 2.0
"""After that, nothing may move for this many times the longest pause."""
COMPILED = 10.0
"""Every limit is this many times longer if models are compiled, once for each new shape."""
SILENT = 3.0
"""Before there is a history, a rank may be silent for this many times `least_seconds`."""
SILENT_SECONDS = 20.0
"""And for this many seconds at least."""
ANSWER_SECONDS = 3.0
"""A rank whose newest heartbeat is older than this does not answer."""
EVALUATION = 6.0
"""A batch of evaluation, or of data, may take this many times the window."""
MINUTE = 60.0
"""And this many seconds at least."""
UNBOUNDED_PHASES = ("starting", "saving", "ending")
"""Phases whose duration depends on the model and the storage; only steps have a history."""
UNBOUNDED_SECONDS = 1800.0


@dataclass(frozen=True)
class Hang:
    """A run that makes no progress.

    Args:
        rank: The rank that holds up the others.
        why: Continues a sentence that begins with the rank's name.
        silent: All ranks that do not answer.
    """

    rank: int
    why: str
    silent: frozenset[int]


Progress = tuple[str, int, int]
"""Phase, step and ticks of a rank."""


@dataclass
class HangDetector:
    """Decides from heartbeats whether a run hangs.

    Args:
        least_seconds: No shorter pause is suspicious; 0 detects nothing.
        now: Seconds of the clock that `update` gets.
    """

    least_seconds: float
    now: float
    longest_pause: float = field(default=0.0, init=False)
    steps: int = field(default=0, init=False)
    _changed_clock: float = field(init=False)
    _progress: dict[int, Progress] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._changed_clock = self.now

    def update(self, statuses: Mapping[int, Status], now: float) -> Hang | None:
        """Takes every rank's newest status; returns the hang, once it is certain."""
        progress = {
            rank: (status.phase, status.step, status.ticks) for rank, status in statuses.items()
        }
        if progress != self._progress:
            if self._has_stepped(progress):
                self.steps += 1
            if self.steps > 2:  # the first steps load, allocate and compile
                self.longest_pause = max(self.longest_pause, now - self._changed_clock)
            self._progress = progress
            self._changed_clock = now
            return None
        if self.least_seconds <= 0 or not statuses:
            return None
        return self._judge(statuses, now - self._changed_clock)

    def _has_stepped(self, progress: Mapping[int, Progress]) -> bool:
        """Whether a step was finished since the last change."""
        if not progress or not self._progress:
            return False
        highest_before = max(step for _, step, _ in self._progress.values())
        highest = max(step for _, step, _ in progress.values())
        return highest > highest_before

    def _judge(self, statuses: Mapping[int, Status], pause: float) -> Hang | None:
        """The hang if a pause is too long.

        Args:
            statuses: Every rank's newest status.
            pause: Seconds without any progress.
        """
        has_history = self.steps > 1
        suspicious = self.least_seconds
        window = UNBOUNDED_SECONDS
        silent_window = max(SILENT_SECONDS, SILENT * self.least_seconds)
        if has_history:
            suspicious = max(self.least_seconds, SUSPICIOUS * self.longest_pause)
            window = max(self.least_seconds, WINDOW * self.longest_pause)
            silent_window = window
        silent = frozenset(rank for rank, status in statuses.items() if status.age > ANSWER_SECONDS)
        if silent:
            if pause < suspicious + silent_window:
                return None
            why = f"does not answer, and nothing has moved for {pause:.0f} s"
            return Hang(min(silent), why, silent)
        longest_window = max(_window_of(status.phase, window) for status in statuses.values())
        if pause < suspicious + longest_window:
            return None
        rank = _furthest_behind(statuses)
        status = statuses[rank]
        why = (
            f"has been {status.phase} after step {status.step:,} for {pause:.0f} s without progress"
        )
        return Hang(rank, why, silent)


def _window_of(phase: str, window: float) -> float:
    """How many seconds a suspicious pause may go on in a phase."""
    if phase in UNBOUNDED_PHASES:
        return UNBOUNDED_SECONDS
    if phase in ("reading", "evaluating"):
        return max(MINUTE, EVALUATION * window)
    return window


def _furthest_behind(statuses: Mapping[int, Status]) -> int:
    """The rank with the least progress, of those that do not wait if there are any."""
    not_waiting = [rank for rank, status in statuses.items() if not status.waiting]
    ranks = not_waiting or list(statuses)
    return min(ranks, key=lambda rank: (statuses[rank].step, statuses[rank].ticks, rank))
