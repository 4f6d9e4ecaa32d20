"""A sweep on a cluster that grows, with Ray's own stand-in for a cloud, on a host of the lab."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
import yaml

from tests.cluster.test_autoscaling import ALIVE, ENVIRONMENT, start_growing
from tests.lab import Lab, unavailable

WHY_NOT = unavailable()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a lab"), pytest.mark.slow]
GROUPS = (
    "import ray; ray.init(address='auto', log_to_driver=False); from ray.util import placement_group_table as t; "
    "print(sum(g['state'] != 'REMOVED' for g in t().values()))"
)


def test_more_trials_at_once_as_nodes_come() -> None:
    """The head has no CPU; up to three nodes of two come, and each takes one trial of one worker with two."""
    with Lab(1) as lab:
        start_growing(lab)

        def ask(code: str) -> int:
            return int(lab.run(0, [sys.executable, "-c", code], ENVIRONMENT).stdout.split()[-1])

        assert ask(ALIVE) == 1, "the head alone"
        task = {"task": "tests.tasks:Points", "task_args": {"step_seconds": 0.4}}
        experiment = {**task, "train": {"steps": 40, "global_batch_size": 16}, "run": {"storage": str(lab.shared)}}
        settings = {"resources_per_worker.CPU": 2, "cluster.wait_seconds": 120, "tracking.system_metrics_every": 0}
        sweep = {"experiment": experiment, "set": settings, "space": {"optimizer.lr": [0.01 * i for i in range(1, 7)]}}
        file = lab.shared / "growing.yaml"
        file.write_text(yaml.safe_dump(sweep))
        most, over = 0, threading.Event()

        def watch() -> None:  # a trial that runs holds the lease of its run
            nonlocal most
            while not over.is_set():
                most = max(most, len(list((lab.shared / "growing").glob("*/lease.json"))))
                time.sleep(0.2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            ended = lab.trireme(0, "sweep", str(file), "--json", timeout=240, **ENVIRONMENT)
        finally:
            over.set()
            watcher.join()
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1])["trials"]["finished"] == 6
        assert most == 3, "as many at once as nodes may come"
        assert ask(GROUPS) == 0, "nothing of the cluster is held on to"
        refused = lab.trireme(0, "sweep", str(file), "name=x", "workers=4", **ENVIRONMENT)
        assert refused.returncode == 2 and "do not fit on" in refused.stderr, refused.stderr
