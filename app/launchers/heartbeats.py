"""The thread of a worker process that sends its heartbeat every second, and answers what the driver asks.

Training runs in another thread and never waits for this one. A process that is stopped, or deep in a call that holds
the interpreter, sends nothing: that is how it is noticed.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.heartbeat import Heartbeat

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
