"""A training of ours in a benchmark's own process, so that it takes turns with what it is compared with.

The one place where benchmarks use the application's inside; all others run its commands.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.config import Config


class Ours:
    """What one worker of a run has: the rank of this process in its process group, or the only one.

    Preparing reads the data; `build` makes the model and all else that training needs. Events go nowhere.
    """

    def __init__(self, config: Config, device: Any = "cpu") -> None:
        import torch
        import torch.distributed as dist

        from app.job import Job
        from app.run.prepare import prepare, read_task

        grouped = dist.is_available() and dist.is_initialized()
        self.device = torch.device(device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        prepared = prepare(config, read_task(config), self.world, devices_per_node=None)
        self.config, folder = prepared.config, f"{config.run.storage}/{config.run.name}"
        self.job = Job(prepared.config, prepared.layout, folder, "benchmark", "benchmark", prepared.steps, os.getcwd())

    def build(self) -> Ours:
        from app.job import Place, SilentChannel
        from app.loop import Training

        self.training = Training(self.job, Place(self.rank, self.world, self.rank, self.device), SilentChannel())
        self.batches: Any = self.training.batches()
        return self

    def advance(self) -> None:
        """One step, and all that a run does between two."""
        self.training.advance(self.batches)

    def close(self) -> None:
        """Ends the data's threads."""
        self.batches.close()
