"""What a worker process says of itself while it trains, asked from another of its threads."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.heartbeat import Beat

if TYPE_CHECKING:
    from app.job import Channel


@dataclass
class Now:
    """The run of this process, if there is one; thread: the id of the thread that trains, 0 for none."""

    channel: Any = None
    thread: int = 0

    def begin(self, channel: Channel) -> None:
        self.channel, self.thread = channel, threading.get_ident()

    def end(self) -> None:
        self.channel, self.thread = None, 0


NOW = Now()
"""Say `answers.NOW`: Ray sends an actor's class by value, with copies of the globals it names, but modules by name."""


def beat() -> tuple[Beat, bool]:
    """How far the run is, and whether it waits for its peers just now."""
    channel = NOW.channel
    return (channel.beat if channel else Beat()), _waits_for_peers(_frames())


def stack() -> str:
    """Where the run stands, innermost call last."""
    frames = _frames()
    return "".join(traceback.format_list(frames)) if frames else "not in a run\n"


def _frames() -> traceback.StackSummary | list[traceback.FrameSummary]:
    frame = sys._current_frames().get(NOW.thread)
    return traceback.extract_stack(frame) if frame else []


def _waits_for_peers(frames: traceback.StackSummary | list[traceback.FrameSummary]) -> bool:
    """Whether the innermost calls are of torch.distributed, or wait for a transfer."""
    inner = list(frames)[-4:]
    return any("torch/distributed" in frame.filename for frame in inner) or any(
        ".wait(" in (frame.line or "") for frame in inner[-1:]
    )
