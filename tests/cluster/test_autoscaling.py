"""From no workers to a run's placement group and back, with Ray's own stand-in for a cloud, on a host of the lab."""

from __future__ import annotations

import sys

import pytest

from tests.lab import Lab, unavailable
from tests.running import POINTS, committed, wait_until

WHY_NOT = unavailable()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a lab"), pytest.mark.slow]

GROW = """
from ray.cluster_utils import AutoscalingCluster
small = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 3}
# Idle for longer than Ray Train takes to its own placement group; until it begins, the run keeps its places itself.
more = {"max_workers": 3, "idle_timeout_minutes": 0.3}
AutoscalingCluster({"CPU": 0, "object_store_memory": 10**8}, {"small": small}, autoscaler_v2=True, **more).start()
"""
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
ALIVE = "import ray; ray.init(address='auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"


def test_a_run_makes_the_cluster_grow_and_its_end_makes_it_shrink() -> None:
    with Lab(1) as lab:
        started = lab.run(0, [sys.executable, "-c", GROW], ENVIRONMENT)
        assert started.returncode == 0, started.stdout + started.stderr

        def alive() -> int:
            return int(lab.run(0, [sys.executable, "-c", ALIVE], ENVIRONMENT).stdout.split()[-1])

        assert alive() == 1, "the head alone"
        run = [*POINTS, "train.steps=20", "run.name=grown", f"run.storage={lab.shared}", "train.global_batch_size=12"]
        ask = ["workers=2", "resources_per_worker.CPU=2", "cluster.wait_seconds=120"]
        ended = lab.trireme(0, "train", *run, *ask, timeout=200, **ENVIRONMENT)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert committed(lab.shared / "grown") == [20]
        assert alive() == 3, "two workers came, and no third"
        too_much = lab.trireme(0, "train", *run, "run.name=x", "workers=4", "resources_per_worker.CPU=2", **ENVIRONMENT)
        assert too_much.returncode == 2 and "do not fit" in too_much.stderr, too_much.stderr
        wait_until(lambda: alive() == 1, 120)
