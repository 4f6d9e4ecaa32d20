"""TensorBoard's event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs.

Each start of a run writes a file of its own; TensorBoard shows the files of a folder as one curve.
"""

import os
from collections.abc import Mapping
from typing import Any

from app.tracking.trackers import TrackedRun

FLUSH_SECONDS = 5


class TensorBoard:
    """The tracker `tensorboard`."""

    def start(self, run: TrackedRun) -> None:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter  # imports torch, which takes seconds

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            str(run.folder / "tensorboard"),
            flush_secs=FLUSH_SECONDS,
            filename_suffix=f".{os.getpid()}",
        )
        if not run.resumed:
            rows = [f"| {key} | {value} |" for key, value in sorted(run.params.items())]
            self._writer.add_text("configuration", "\n".join(["| key | value |", "|-|-|", *rows]))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Write points."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def finish(self, status: str) -> None:
        """Write how the run ended, and close the file."""
        self._writer.add_text("status", status)
        self._writer.close()
