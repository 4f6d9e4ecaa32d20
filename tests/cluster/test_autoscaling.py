"""From no workers to a run's placement group and back, with Ray's own stand-in for a cloud, on a host of the lab."""

import json
import sys

from tests.lab import NEEDS_LAB, Lab
from tests.running import POINTS, committed, wait_until

pytestmark = NEEDS_LAB

FAKE_HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # what Ray's fake provider calls the head
CONFIG = {
    "cluster_name": "fake",
    "max_workers": 3,
    # Longer than Ray Train takes to its own placement group; until it begins, the run keeps its places itself.
    "idle_timeout_minutes": 0.3,
    "upscaling_speed": 8,
    "provider": {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD,
    },
    "available_node_types": {
        "small": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 3},
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    "setup_commands": [],  # this and what follows has no default for a provider of one's own
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "cluster_synced_files": [],
    "file_mounts": {},
}
ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD,
    "RAY_AUTH_MODE": "disabled",
}
ALIVE = "import ray; ray.init(address='auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"


def test_a_run_makes_the_cluster_grow_and_its_end_makes_it_shrink() -> None:
    with Lab(1) as lab:
        config = lab.home(0) / "root" / "ray_bootstrap_config.yaml"  # where `ray up` leaves it on a head
        config.write_text(json.dumps(CONFIG))
        flags = [f"--autoscaling-config={config}", "--num-cpus=0", "--object-store-memory=100000000"]
        started = lab.run(0, ["ray", "start", "--head", "--disable-usage-stats", *flags], ENVIRONMENT)
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
        wait_until(lambda: alive() == 1)  # Ray Train's request for nodes lives for 180 s after it
