"""A training of ours inside a benchmark's own processes, so that it takes turns with what it is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.config import Config


def torchrun(module: str, *arguments: str, processes: int = 2, environment: dict[str, str] | None = None) -> None:
    """Runs `python -m MODULE ARGUMENTS` in so many processes, one thread each.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run([*command, "-m", module, *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


class Ours:
    """What one worker of a run has: the rank of this process in its process group, or the only one.

    Preparing reads the data; `build` makes the model and all else that training needs.
    tracked: rank 0 gets a driver, a spool and the writer process, as a real run has them; otherwise nobody listens.
    """

    def __init__(self, config: Config, *, tracked: bool = False, device: Any = "cpu") -> None:
        import torch
        import torch.distributed as dist

        from app.job import Job, SilentChannel
        from app.run.prepare import prepare, read_task

        grouped = dist.is_available() and dist.is_initialized()
        self.device = torch.device(device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        prepared = prepare(config, read_task(config), self.world, devices_per_node=None)
        self.tracked = tracked and self.rank == 0
        self.channel: Any = SilentChannel()
        attempt = "benchmark"
        if self.tracked:
            self.driver = self._driver(prepared.config, prepared.steps)
            self.channel, attempt = DriverChannel(self.driver), self.driver.run.attempt
        folder = f"{config.run.storage}/{config.run.name}"
        self.job = Job(config, prepared.layout, folder, attempt, "benchmark", prepared.steps, os.getcwd())
        self.training: Any = None
        self.batches: Any = None

    def _driver(self, config: Config, steps: int) -> Any:
        from app.console import Console
        from app.run.driver import Driver
        from app.run.manifest import Run
        from app.tracking.settings import resolve_tracking

        settings = resolve_tracking(config.tracking, config.run.storage)
        driver = Driver(Run(config), config, Console(quiet=True), settings)
        driver.run.open(config, steps)
        driver.begin_tracking()
        return driver

    def build(self) -> Ours:
        from app.job import Place
        from app.loop import Training

        place = Place(self.rank, self.world, self.rank, self.device)
        self.training = Training(self.job, place, self.channel)
        self.batches = self.training.batches()
        return self

    def advance(self) -> None:
        """One step, and all that a run does between two."""
        self.training.advance(self.batches)

    def step(self) -> None:
        """One step, and nothing else."""
        self.training.step(next(self.batches))

    def close(self) -> None:
        """Ends the data's threads and, if tracked, the run."""
        self.batches.close()
        if self.tracked:
            self.driver.tracker.finish("FINISHED", timeout=20.0)
            self.driver.run.end("stopped")


class DriverChannel:
    """Hands a worker's events to the driver of the same process."""

    def __init__(self, driver: Any) -> None:
        from app.heartbeat import Heartbeat

        self.driver, self.heartbeat = driver, Heartbeat()

    def emit(self, event: dict[str, Any]) -> None:
        self.driver.handle(event)

    def stop_requested(self) -> bool:
        return bool(self.driver.stop_requested())
