"""Heartbeats: sent by a thread of every worker, judged by the driver.

A worker's thread sends a heartbeat each second, and answers what the driver asks. Training runs in
another thread and never waits for it. A process that is stopped, or deep in a call that holds the
interpreter lock, sends nothing.

Whether the run hangs, and which rank is to blame, is decided from heartbeats alone. Progress is any
change of any rank's phase, step or ticks. A pause is suspicious when it is far longer than any
before in this attempt. If nothing moves for about as long again, the run hangs, and the rank to
blame is one that has not answered all the while, or else one that does not wait for the others or
is furthest behind.

Limits are longer if there is no history: before the second step only a rank that has not answered
for half a minute or more is stuck, loading and saving may take half an hour, reading data and
evaluating a minute.
"""

import contextlib
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from app.launchers import blame
from app.launchers.aggregator import ANSWER_SECONDS, PERIOD_SECONDS, Answer, Beat
from app.launchers.workers import Status
from app.training.job import Heartbeat

COLLECTIVE_FRAMES = 4
"""How many innermost calls of the training thread are searched for torch.distributed."""


@dataclass(frozen=True)
class Reply:
    """What the driver replies to a heartbeat.

    Args:
        stop: Whether to save and stop.
        question: "stack", "collectives" (see blame.py) or "flight_recorder", asked until it is
            answered; "" if none is. Numbers of ranks may follow, if only these are to answer.
        number: Of the question.
    """

    stop: bool = False
    question: str = ""
    number: int = 0


def with_ranks(question: str, ranks: Collection[int]) -> str:
    """A question for these ranks; none means all."""
    return " ".join([question, *map(str, ranks)])


class HeartbeatThread:
    """Sends a worker's heartbeats, until it is closed.

    Args:
        heartbeat: What the worker does and how far it is.
        send: Hands a beat and an answer, if there is one, to the driver, and returns its reply. It
            may raise.
        on_reply: Called with each reply.
        training_thread: The id of the thread that trains; None means the thread that calls this.
        rank: Of the worker.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        send: Callable[[Beat, Answer | None], Reply],
        on_reply: Callable[[Reply], None],
        training_thread: int | None = None,
        *,
        rank: int = 0,
    ) -> None:
        self.rank = rank
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
                    self.answered = reply.number
                    question, *ranks = reply.question.split()
                    if not ranks or str(self.rank) in ranks:
                        answer = (reply.number, self.answer(question))
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

        record = flight_recorder()
        return blame.summary(self.rank, record) if question == "collectives" else record

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
"""That limit is at least this many seconds."""
EVALUATION = 6.0
"""A batch of evaluation, or of data, may take this many times the window."""
MINUTE = 60.0
"""That limit is at least this many seconds."""
UNBOUNDED_PHASES = ("starting", "saving", "ending")
"""Phases whose duration depends on the model and the storage; only steps have a history."""
UNBOUNDED_SECONDS = 1800.0
STOPPED_SECONDS = 5.0
"""If the driver has not looked for so long, it was stopped itself, as on a laptop that sleeps."""


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
    statuses: dict[int, Status] = field(default_factory=dict, init=False)
    """The newest of each rank."""
    _changed_clock: float = field(init=False)
    _looked_clock: float = field(init=False)
    _highest_step: int = field(default=-1, init=False)
    """The highest step of any rank; -1 before the first status."""
    _phases: Counter[str] = field(default_factory=Counter, init=False)
    """How many ranks are in each phase."""
    _silent_since: dict[int, float] = field(default_factory=dict, init=False)
    """Since when each of the ranks that do not answer has sent nothing."""

    def __post_init__(self) -> None:
        self._changed_clock = self.now
        self._looked_clock = self.now

    def update(
        self, statuses: Mapping[int, Status], now: float, silent: Set[int] = frozenset()
    ) -> Hang | None:
        """Takes in what has changed, and judges the run; unchanged ranks cost nothing.

        Args:
            statuses: The status of each rank whose status has changed.
            now: Seconds of the clock.
            silent: All ranks that do not answer.

        Returns:
            The hang, once it is certain.
        """
        away_seconds = now - self._looked_clock
        self._looked_clock = now
        if away_seconds > STOPPED_SECONDS:
            self._changed_clock += away_seconds
            self._silent_since.clear()
        self._note_silence(silent, now)
        if self._take(statuses):
            if self.steps > 2:  # the first steps load, allocate and compile
                self.longest_pause = max(self.longest_pause, now - self._changed_clock)
            self._changed_clock = now
            return None
        if self.least_seconds <= 0 or not self.statuses:
            return None
        return self._judge(now)

    def _note_silence(self, silent: Set[int], now: float) -> None:
        for rank in [rank for rank in self._silent_since if rank not in silent]:
            del self._silent_since[rank]
        for rank in silent:
            self._silent_since.setdefault(rank, now - ANSWER_SECONDS)

    def _take(self, statuses: Mapping[int, Status]) -> bool:
        """Notes new statuses; returns whether any of them is progress."""
        is_first = not self.statuses
        progressed = False
        highest_step = self._highest_step
        for rank, status in statuses.items():
            previous = self.statuses.get(rank)
            self.statuses[rank] = status
            if previous is not None:
                if _progress(previous) == _progress(status):
                    continue
                self._phases[previous.phase] -= 1
            self._phases[status.phase] += 1
            highest_step = max(highest_step, status.step)
            progressed = True
        if highest_step > self._highest_step:
            self._highest_step = highest_step
            if not is_first:
                self.steps += 1
        return progressed

    def _judge(self, now: float) -> Hang | None:
        """The hang if a pause is too long."""
        pause = now - self._changed_clock
        has_history = self.steps > 1
        suspicious = self.least_seconds
        window = UNBOUNDED_SECONDS
        silent_window = max(SILENT_SECONDS, SILENT * self.least_seconds)
        if has_history:
            suspicious = max(self.least_seconds, SUSPICIOUS * self.longest_pause)
            window = max(self.least_seconds, WINDOW * self.longest_pause)
            silent_window = window
        # On a busy machine, or while it imports or loads much, a rank may be silent for some
        # seconds and then go on. So it is stuck only if it has been silent for the whole time.
        if self._silent_since:
            longest = suspicious + silent_window
            stuck = [rank for rank, since in self._silent_since.items() if now - since >= longest]
            if pause < longest or not stuck:
                return None
            why = f"does not answer, and nothing has moved for {pause:.0f} s"
            return Hang(min(stuck), why, frozenset(stuck))
        phases = [phase for phase, ranks in self._phases.items() if ranks]
        longest_window = max(_window_of(phase, window) for phase in phases)
        if pause < suspicious + longest_window:
            return None
        rank = _furthest_behind(self.statuses)
        status = self.statuses[rank]
        why = (
            f"has been {status.phase} after step {status.step:,} for {pause:.0f} s without progress"
        )
        return Hang(rank, why, frozenset())


def _progress(status: Status) -> Progress:
    return status.phase, status.step, status.ticks


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
