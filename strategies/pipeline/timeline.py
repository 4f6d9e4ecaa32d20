"""What a stage does when, in one step.

Times are the host's clock on a CPU, and events in the stage's stream on a GPU. The host waits for
nothing inside the step. If it waited for the device around each instruction, it would also wait for
messages whose receives are posted and which have not been sent yet, and it would measure a pipeline
that never overlaps anything.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from strategies.pipeline.schedules import Op
from strategies.pipeline.simulate import Span

Mark: TypeAlias = "float | torch.cuda.Event"
"""A moment: seconds of the host's clock, or an event in a GPU's stream."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """Something that was timed; `op` is None if it belongs to no micro-batch."""

    kind: str
    op: Op | None
    block: str
    start: Mark
    end: Mark


class Timeline:
    """The times of one stage in one step, which starts when the timeline is created."""

    def __init__(self, stage: int, device: torch.device) -> None:
        """Start.

        Args:
            stage: Number of the stage.
            device: Where it computes.
        """
        self._stage = stage
        self._device = device
        self._records: list[_Record] = []
        self._start = self._now()

    @contextlib.contextmanager
    def timed(self, kind: str, op: Op | None, block: str = "") -> Iterator[None]:
        """Time what is done inside.

        Args:
            kind: See Span.
            op: The instruction that it belongs to, if it belongs to one.
            block: See Span.
        """
        start = self._now()
        yield
        end = self._now()
        self._records.append(_Record(kind=kind, op=op, block=block, start=start, end=end))

    def spans(self) -> list[Span]:
        """Everything that was timed so far; on a GPU, waits until it has been done."""
        if self._records:
            last = self._records[-1].end
            if not isinstance(last, float):
                last.synchronize()
        return [
            Span(
                stage=self._stage,
                kind=record.kind,
                micro_batch=record.op.micro_batch if record.op is not None else -1,
                chunk=record.op.chunk if record.op is not None else 0,
                block=record.block,
                start=self._seconds(record.start),
                end=self._seconds(record.end),
            )
            for record in self._records
        ]

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Mark) -> float:
        """Seconds from the start of the step."""
        if isinstance(mark, float) and isinstance(self._start, float):
            return mark - self._start
        assert not isinstance(mark, float) and not isinstance(self._start, float)
        return self._start.elapsed_time(mark) / 1e3
