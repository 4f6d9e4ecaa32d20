"""Two runs, one after the other, on one group of warm actors; prints what became of them as JSON. Needs RAY_ADDRESS."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from app.config_io import load_config
from app.console import Console
from app.job import Job
from app.launchers.actor_group import ActorGroup
from app.run.driver import Driver
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from app.tracking.settings import resolve_tracking
from cluster.connect import connect

WORKERS = 2
CHAIN = ["task=tests.chain:Chain", "train.global_batch_size=16", "train.steps=10", "tracking.enabled=false"]


def run(group: ActorGroup, storage: str, name: str, strategy: str) -> dict[str, Any]:
    """One run on the group; seconds until its first step had been taken."""
    config = load_config(
        [],
        [*CHAIN, f"run.name={name}", f"run.storage={storage}", f"strategy={strategy}"],
    )
    opened = Run(config)
    prepared = prepare(config, read_task(config), WORKERS, devices_per_node=None)
    opened.open()
    driver = Driver(opened, Console(quiet=True), resolve_tracking(config.tracking, storage))
    driver.begin_tracking()
    job = Job(config, prepared.layout, opened.folder, opened.attempt, opened.manifest.uid, prepared.steps, os.getcwd())
    began = time.time()
    group.run(job, driver)
    opened.end("finished", driver.summary)
    assert driver.first_step_at is not None and group.crew is not None
    pids = [process.hello.pid for process in (group.crew.of(rank) for rank in range(WORKERS)) if process.hello]
    return {"step": driver.summary["step"], "first_step_seconds": driver.first_step_at - began, "pids": pids}


if __name__ == "__main__":
    connect(600.0)
    warm = ActorGroup(WORKERS, {"CPU": 1.0})
    warm.start()
    told = [run(warm, sys.argv[1], name, strategy) for name, strategy in (("a", "ddp"), ("b", "pipeline"))]
    warm.shutdown()
    print(json.dumps(told))
