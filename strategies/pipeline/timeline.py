"""What a stage did when, in one step: by the host's clock on a CPU, by events in its stream on a GPU.

Nothing is waited for inside the step. To wait for the device around each instruction would be to wait for what has been
asked for and not been sent, and would time a pipeline that never overlaps.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from strategies.pipeline.schedules import Op
from strategies.pipeline.simulate import Span

T = TypeVar("T")


class Timeline:
    """Begins when it is made."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.marks: list[tuple[str, Op, Any, Any]] = []
        self.began = self._mark()

    def timed(self, kind: str, op: Op, work: Callable[[], T]) -> T:
        """Does `work`, which is a Span of that kind."""
        start = self._mark()
        result = work()
        self.marks.append((kind, op, start, self._mark()))
        return result

    def spans(self) -> list[Span]:
        """Everything so far; on a GPU, waits until it has been done."""
        if self.marks and self.device.type == "cuda":
            self.marks[-1][-1].synchronize()
        return [
            Span(self.stage, kind, op.micro, op.chunk, self._seconds(start), self._seconds(end))
            for kind, op, start, end in self.marks
        ]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Any) -> float:
        return mark - self.began if self.device.type != "cuda" else self.began.elapsed_time(mark) / 1e3
