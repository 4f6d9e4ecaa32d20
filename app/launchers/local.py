"""Launcher: this very process, one worker. No Ray, no process group; the driver is the worker's channel."""

from __future__ import annotations

import torch

from app import loop
from app.errors import Interrupted
from app.job import Job, Place
from app.run.driver import Driver
from app.tracking.system import SystemSampler


def launch(job: Job, driver: Driver) -> None:
    """Trains here.

    Raises:
        Interrupted: asked to stop, and the checkpoint is saved.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sampler = SystemSampler(driver.tracker.emit, "node-0", job.config.tracking.system_metrics_every)
    try:
        summary = loop.train(job, Place(0, 1, 0, device), driver)
    finally:
        sampler.close()
    driver.emit({"type": "done", "summary": summary})
    if summary["stopped"]:
        raise Interrupted(f"stopped after step {summary['step']:,}")
