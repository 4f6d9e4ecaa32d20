"""Heartbeats: sent by a thread of every worker, judged by the driver.

A worker's thread sends one each second, and answers what the driver asks. Training runs in another thread and never
waits for it. A process that is stopped, or deep in a call that holds the interpreter, sends nothing.

Whether the run hangs, and which rank is to blame, is decided from heartbeats alone. Progress is any change of any
rank's phase, step or ticks. When there has been none for far longer than ever before in this attempt, and nothing moves
for about as long again, the rank that does not answer, does not wait for the others, or is furthest behind is the one.
Where there is no history, limits are longer: before the second step only a rank that does not answer at all is stuck,
loading and saving have half an hour, reading data and evaluating a minute.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.launchers.workers import Status
from app.training.job import Heartbeat

PERIOD_SECONDS = 1.0
COLLECTIVE_FRAMES = 4
"""Innermost calls of the training thread that are looked at for torch.distributed."""

Beat = tuple[str, int, int, bool]
"""Phase, step, ticks, waiting (see `workers.Status`)."""


@dataclass(frozen=True)
class Reply:
    """What the driver says to a heartbeat."""

    stop: bool = False  # save and stop
    question: str = ""  # "stack" or "flight_recorder", asked until it is answered
    number: int = 0  # of the question


class HeartbeatThread:
    """send: hands a beat and an answer, if there is one, to the driver, and returns its reply; it may raise."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        send: Callable[[Beat, tuple[int, str] | None], Reply],
        on_reply: Callable[[Reply], None],
        training_thread: int | None = None,
    ) -> None:
        self.heartbeat, self.send, self.on_reply = heartbeat, send, on_reply
        self.training_thread = training_thread or threading.get_ident()
        self.answered = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        answer: tuple[int, str] | None = None
        while True:
            try:
                reply = self.send(self.beat(), answer)
                answer = None
                if reply.question and reply.number > self.answered:
                    answer = (reply.number, self.answer(reply.question))
                    self.answered = reply.number
                self.on_reply(reply)
            except Exception:  # the driver is gone or does not answer just now: training does not depend on it
                pass
            if answer is None and self._over.wait(PERIOD_SECONDS):
                return

    def beat(self) -> Beat:
        own = self.heartbeat
        return own.phase, own.step, own.ticks, _waits_for_peers(self._frames())

    def answer(self, question: str) -> str:
        if question == "stack":
            return "".join(traceback.format_list(self._frames())) or "not training\n"
        from strategies.torch_internals import flight_recorder

        return flight_recorder()

    def _frames(self) -> traceback.StackSummary | list[traceback.FrameSummary]:
        frame = sys._current_frames().get(self.training_thread)
        return traceback.extract_stack(frame) if frame else []


def _waits_for_peers(frames: Any) -> bool:
    inner = list(frames)[-COLLECTIVE_FRAMES:]
    return any("torch/distributed" in frame.filename for frame in inner) or any(
        ".wait(" in (frame.line or "") for frame in inner[-1:]
    )


# --- the driver's side ------------------------------------------------------------------------------------------------

SUSPICIOUS = 5.0
"""A pause is suspicious when it lasts this many times the longest one before."""
WINDOW = 2.0
"""After that, nothing must move for this many times the longest pause."""
COMPILED = 10.0
"""Every limit is this many times longer where a new shape is compiled."""
SILENT, SILENT_SECONDS = 3.0, 20.0
"""Times `least`, and seconds at least, that a rank may not answer before there is a history."""
ANSWER_SECONDS = 3.0
"""A rank whose newest heartbeat is older than this does not answer."""
EVALUATION, MINUTE = 6.0, 60.0
"""A batch of evaluation, or of data, may take this many times the window, a minute at least."""
UNBOUNDED_PHASES, UNBOUNDED_SECONDS = ("starting", "saving", "ending"), 1800.0
"""Phases whose duration depends on the size of the model and the storage; a step has a history to compare with."""


@dataclass(frozen=True)
class Hang:
    """The rank that holds up the others, why, and all ranks that do not answer."""

    rank: int
    why: str
    silent: frozenset[int]


@dataclass
class HangDetector:
    """least: seconds below which no pause is suspicious; 0 suspects none. now: of the clock that `update` gets."""

    least: float
    now: float
    since: float = field(init=False)
    longest: float = 0.0
    steps: int = 0
    _newest: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = self.now

    def update(self, statuses: Mapping[int, Status], now: float) -> Hang | None:
        """Takes what every rank last said; the hang, once it is sure."""
        newest = {rank: (status.phase, status.step, status.ticks) for rank, status in statuses.items()}
        if newest != self._newest:
            if self._stepped(newest) and self.steps > 2:  # the first steps load, allocate and compile
                self.longest = max(self.longest, now - self.since)
            self._newest, self.since = newest, now
            return None
        if self.least <= 0 or not statuses:
            return None
        return self._judge(statuses, now - self.since)

    def _stepped(self, newest: Mapping[int, tuple[str, int, int]]) -> bool:
        """Whether a step was finished since the last change; counts them."""
        before = max((step for _, step, _ in self._newest.values()), default=None)
        after = max((step for _, step, _ in newest.values()), default=None)
        if before is not None and after is not None and after > before:
            self.steps += 1
        return self.steps > 0

    def _judge(self, statuses: Mapping[int, Status], paused: float) -> Hang | None:
        known = self.steps > 1
        limit = max(self.least, SUSPICIOUS * self.longest) if known else self.least
        window = max(self.least, WINDOW * self.longest) if known else UNBOUNDED_SECONDS
        silent = frozenset(rank for rank, status in statuses.items() if status.age > ANSWER_SECONDS)
        if silent:
            patience = window if known else max(SILENT_SECONDS, SILENT * self.least)
            if paused < limit + patience:
                return None
            return Hang(min(silent), f"does not answer, and nothing has moved for {paused:.0f} s", silent)
        if paused < limit + max(_patience(status.phase, window) for status in statuses.values()):
            return None
        busy = [rank for rank, status in statuses.items() if not status.waiting]
        behind = min(busy or statuses, key=lambda rank: (statuses[rank].step, statuses[rank].ticks, rank))
        status = statuses[behind]
        why = f"has been {status.phase} after step {status.step:,} for {paused:.0f} s without progress"
        return Hang(behind, why, silent)


def _patience(phase: str, window: float) -> float:
    if phase in UNBOUNDED_PHASES:
        return UNBOUNDED_SECONDS
    return max(MINUTE, EVALUATION * window) if phase in ("reading", "evaluating") else window
