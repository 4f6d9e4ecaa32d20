"""TensorBoard's event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs.

Each start of a run writes a file of its own; TensorBoard shows the files of a folder as one curve.
They are written by the package `tensorboard` itself, which imports neither torch nor TensorFlow.
"""

import time as clock
from collections.abc import Mapping
from typing import Any

from app.tracking.trackers import TrackedRun

FLUSH_SECONDS = 5.0


class TensorBoard:
    """The tracker `tensorboard`."""

    def start(self, run: TrackedRun) -> None:
        """Open a file."""
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(run.folder / "tensorboard"))
        self._flushed = clock.monotonic()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Write points, which are on disk a few seconds later."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=time)
        if clock.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = clock.monotonic()

    def finish(self, status: str) -> None:
        """Close the file."""
        self._writer.close()
