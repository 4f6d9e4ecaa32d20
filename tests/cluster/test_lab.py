"""Several real hosts: a cluster over SSH, training across it, hosts that are cut off, autoscaling.

Also jobs from another host, and that nothing is left afterwards. Autoscaling is on one host.
tests/lab.py says what a lab needs; without it these tests are skipped.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.lab import NEEDS_LAB, Lab, isolate, onprem
from tests.running import POINTS, ROOT, committed, end_tree, wait_until

pytestmark = NEEDS_LAB

# --- from no workers to a run's placement group and back, with Ray's own stand-in for a cloud -----

FAKE_HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""What Ray's fake provider calls the head."""
CONFIG = f"""
cluster_name: fake
max_workers: 3
idle_timeout_minutes: 0.3  # longer than Ray Train takes to make its placement group
upscaling_speed: 8
provider:
  type: external
  module: ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider
  head_node_id: {FAKE_HEAD}
  disable_node_updaters: true
  disable_launch_config_check: true
  launch_multiple: true
available_node_types:
  small: {{resources: {{CPU: 2}}, node_config: {{}}, min_workers: 0, max_workers: 3}}
  ray.head.default: {{resources: {{CPU: 0}}, node_config: {{}}, max_workers: 0}}
head_node_type: ray.head.default
auth: {{}}  # an external provider has no default for this and what follows
file_mounts: {{}}
setup_commands: []
head_setup_commands: []
worker_setup_commands: []
cluster_synced_files: []
"""
ENVIRONMENT = {
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_AUTH_MODE": "disabled",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
COUNT_NODES = """
import ray
ray.init(address="auto", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
"""


def test_a_run_makes_the_cluster_grow_and_its_end_makes_it_shrink() -> None:
    with Lab(1) as lab:
        # `ray up` leaves the configuration there on a head.
        config = lab.home(0) / "root" / "ray_bootstrap_config.yaml"
        config.write_text(CONFIG)
        command = [
            "ray",
            "start",
            "--head",
            "--disable-usage-stats",
            f"--autoscaling-config={config}",
            "--num-cpus=0",
            "--object-store-memory=100000000",
        ]
        started = lab.run(0, command, ENVIRONMENT)
        assert started.returncode == 0, started.stdout + started.stderr

        def count_nodes() -> int:
            counted = lab.run(0, [sys.executable, "-c", COUNT_NODES], ENVIRONMENT)
            return int(counted.stdout.split()[-1])

        assert count_nodes() == 1
        run = [
            "train",
            *POINTS,
            "train.steps=20",
            f"run.storage={lab.shared}",
            "train.global_batch_size=12",
            "resources_per_worker.CPU=2",
            "cluster.wait_seconds=120",
        ]
        trained = lab.trireme(0, *run, "run.name=grown", "workers=2", timeout=600, **ENVIRONMENT)
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert committed(lab.shared / "grown") == [20]
        assert count_nodes() == 3, "the head and two workers"
        too_large = lab.trireme(0, *run, "run.name=x", "workers=4", **ENVIRONMENT)
        assert too_large.returncode == 2
        assert "do not fit" in too_large.stderr, too_large.stderr
        # Ray Train's request for nodes lives for 180 s after a run.
        wait_until(lambda: count_nodes() == 1)


# --- a cluster of three hosts, and a host beside it -----------------------------------------------

HEAD = 0
FIRST = 1
SECOND = 2
DESK = 3
"""Not a part of the cluster: it starts the cluster, submits to it, and has MLflow."""
CLUSTER = (HEAD, FIRST, SECOND)
SECRET = f"planted-{uuid.uuid4().hex}"
"""New in each process, since jobs take this file with them."""
WHOLE_HOST = f"resources_per_worker.CPU={os.cpu_count()}"
"""Makes every worker have a host of its own."""


@dataclass
class Site:
    """A lab with a cluster that is up.

    Attributes:
        lab: The lab.
        file: The cluster file.
    """

    lab: Lab
    file: str

    def trireme(
        self, *words: str, code: int = 0, has: str = "", host: int = DESK, **env: str
    ) -> str:
        """Run `trireme WORDS` on a host.

        Args:
            words: The command line.
            code: The exit code that it must have.
            has: What it must print.
            host: The host.
            env: Environment variables.

        Returns:
            Its output, or of a refusal what it writes to stderr.
        """
        ended = self.lab.trireme(host, *words, timeout=600, **env)
        text = ended.stdout + ended.stderr
        assert ended.returncode == code, text
        assert has in text, text
        assert "Traceback" not in text, text
        return ended.stderr if code == 2 else ended.stdout

    def submit(self, name: str, *more: str, code: int = 0, has: str = "") -> str:
        """Submit a run to the cluster."""
        run = [*POINTS, "train.global_batch_size=12", f"run.name={name}", WHOLE_HOST, *more]
        env = {
            "MLFLOW_TRACKING_URI": f"http://{self.lab.address(DESK)}:5000",
            "MLFLOW_TRACKING_TOKEN": SECRET,
        }
        return self.trireme("submit", "--cluster", self.file, *run, code=code, has=has, **env)

    def submit_detached(self, name: str, *more: str) -> str:
        """Submit a run, and return its job at once."""
        return self.submit(name, *more, "--detach").split()[-1]

    def stop(self, job: str) -> None:
        self.trireme("submit", "stop", job, "--cluster", self.file, has="has stopped")

    def doctor(self, *more: str, code: int = 0, has: str = "") -> str:
        """Run `trireme doctor` on the head."""
        env = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"{self.lab.address(HEAD)}:6379"}
        return self.trireme("doctor", *more, code=code, has=has, host=HEAD, **env)

    def living_nodes(self) -> set[str]:
        """The addresses of the nodes that are alive."""
        status = json.loads(self.trireme("cluster", "status", self.file, "--json"))
        assert status["reachable"]
        assert status["dollars_per_hour"] == 0
        return {node["ip"] for node in status["alive"]}

    def processes(self) -> list[str]:
        """The command lines on the hosts of the cluster."""
        return [line for host in CLUSTER for line in self.lab.processes_of(host)]

    def count_processes(self, host: int, part: str) -> int:
        """How many processes on a host have this part in their command lines."""
        return sum(part in line for line in self.lab.processes_of(host))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(4) as lab:
        site = Site(lab, str(onprem(lab)))
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{lab.home(DESK)}/mlflow.db",
            "--host",
            "0.0.0.0",
            "--workers",
            "1",
            "--artifacts-destination",
            str(lab.home(DESK) / "artifacts"),
        ]
        env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        mlflow = lab.start(DESK, command, env, quiet=True)
        site.trireme("cluster", "up", site.file)
        yield site
        end_tree(mlflow.pid)
        mlflow.wait()


def test_the_cluster_is_up_and_is_not_started_again(site: Site) -> None:
    assert site.living_nodes() == {site.lab.address(host) for host in CLUSTER}
    sentence = f"Ray is running on {site.lab.address(HEAD)} already"
    site.trireme("cluster", "up", site.file, code=2, has=sentence)


@pytest.mark.parametrize("host", [HEAD, DESK])
def test_the_job_server_listens_on_the_heads_loopback_only(site: Site, host: int) -> None:
    address = "127.0.0.1" if host == HEAD else site.lab.address(HEAD)
    connect = ["timeout", "3", "bash", "-c", f"</dev/tcp/{address}/8265"]
    is_open = site.lab.run(host, connect).returncode == 0
    assert is_open == (host == HEAD)


def test_doctor_finds_nothing_in_a_sound_cluster(site: Site) -> None:
    storage = str(site.lab.shared)
    assert "3 nodes checked" in site.doctor("--storage", storage, has="nothing is wrong")
    site.trireme("doctor", "--cluster", site.file, "--storage", storage, has="3 nodes")


def test_doctor_finds_a_cut_link_and_a_storage_that_is_not_shared(site: Site) -> None:
    with isolate(site.lab, FIRST, SECOND):  # each still reaches the head
        # /tmp is a folder of each host's own.
        answer = json.loads(site.doctor("--json", "--storage", "/tmp/own", code=1))
        exclusion = site.doctor("--exclude-bad").strip()
        spared_hosts = _hosts_without_excluded_node(site, answer, exclusion)
        job = site.submit_detached(
            "spared",
            "strategy=ddp",
            "workers=2",
            "train.steps=2000",
            "task_args.step_seconds=0.05",
            exclusion,
        )

        def hosts_with_workers() -> set[int]:
            return {host for host in CLUSTER if site.count_processes(host, "RayTrainWorker")}

        wait_until(lambda: hosts_with_workers() == spared_hosts)
        site.stop(job)
    findings = {finding["code"]: finding for finding in answer["findings"]}
    assert set(findings) == {"cut_link", "storage_differs"}, answer
    cut_link = findings["cut_link"]
    assert site.lab.address(SECOND) in cut_link["sentence"]
    assert HEAD in spared_hosts
    assert exclusion == f"cluster.exclude_nodes=[{cut_link['nodes'][0]}]"


def _hosts_without_excluded_node(site: Site, answer: dict[str, Any], exclusion: str) -> set[int]:
    """The cluster's hosts except one end of the cut link, which doctor proposes to exclude."""
    nodes = answer["facts"]["nodes"]
    excluded = next(node["address"] for node in nodes if node["node_id"] in exclusion)
    return {host for host in CLUSTER if site.lab.address(host) != excluded}


def test_a_token_of_another_cluster_is_refused_in_one_line(site: Site) -> None:
    token_file = site.lab.home(DESK) / "root" / ".ray" / "auth_token"
    token = token_file.read_text()
    token_file.write_text("0" * len(token.strip()))
    try:
        submitting = site.submit("expired", "train.steps=2", code=2)
        logs = site.trireme("submit", "logs", "raysubmit_x", "--cluster", site.file, code=2)
    finally:
        token_file.write_text(token)
    for message in (submitting, logs):
        assert "Authentication failed" in message
        assert len(message.splitlines()) == 1, message


def test_ddp_trains_across_hosts_and_leaves_no_secret_anywhere(site: Site) -> None:
    output = site.submit(
        "ddp",
        "workers=3",
        "strategy=ddp",
        "train.steps=30",
        "tracking.log_model=true",
        has="MLFLOW_TRACKING_TOKEN (secret)",
    )
    assert SECRET not in output
    folder = site.lab.shared / "runs" / "ddp"
    assert committed(folder) == [30]
    assert len(list((folder / "logs").glob("rank-*.log"))) == 3
    # MLflow runs on a host that is no part of the cluster.
    assert b"train/loss" in (site.lab.home(DESK) / "mlflow.db").read_bytes()
    # A secret goes over SSH into a file there, which the job reads and removes.
    secrets = site.lab.home(HEAD) / "root" / ".trireme" / "secrets"
    assert secrets.is_dir()
    assert not list(secrets.iterdir())
    homes = [site.lab.home(host) for host in (*CLUSTER, DESK)]
    leaks = []
    for folder in (site.lab.shared, *homes, ROOT / "cluster"):
        for path in folder.rglob("*"):
            if path.is_file() and SECRET.encode() in path.read_bytes():
                leaks.append(path)
    assert leaks == []


HALF_HOST = f"resources_per_worker.CPU={(os.cpu_count() or 2) / 2:g}"
PIPELINE = [
    "task=tests.chain:Chain",
    HALF_HOST,
    "workers=4",
    "strategy=pipeline",
    "parallel.pp=4",
    "train.micro_batch_size=3",
]


@pytest.mark.parametrize(
    ("name", "arguments", "process", "workers_per_host"),
    [
        ("fsdp", ["workers=2", "strategy=fsdp"], "RayTrainWorker", 1),
        ("staged", PIPELINE, "WorkerActor", 2),
    ],
)
def test_a_run_survives_a_host_that_is_cut_off(
    site: Site, name: str, arguments: list[str], process: str, workers_per_host: int
) -> None:
    lab = site.lab
    folder = lab.shared / "runs" / name
    job = site.submit_detached(
        name,
        *arguments,
        "train.steps=100000",
        "checkpoint.every_seconds=2",
        "fault.max_restarts=5",
    )
    wait_until(lambda: committed(folder))
    workers = {host: site.count_processes(host, process) for host in (FIRST, SECOND)}
    victim = max(workers, key=workers.__getitem__)
    assert workers[victim] == workers_per_host, workers
    lab.cut(victim)
    step_at_cut = committed(folder)[-1]

    def has_continued() -> bool:
        steps = committed(folder)
        return bool(steps) and steps[-1] > step_at_cut + 20

    try:
        wait_until(has_continued)
        assert lab.address(victim) not in site.living_nodes()
        site.stop(job)
    finally:
        lab.mend(victim)


def test_down_leaves_nothing(site: Site) -> None:
    site.trireme("cluster", "down", site.file, has="the cluster is down")
    # SSH's shared connections end by themselves, some seconds later.
    wait_until(lambda: not site.processes())
    assert not list((site.lab.home(DESK) / "tmp").glob("ray/cluster-onprem.*"))
    site.trireme("cluster", "status", site.file, code=1, has="is not up")


def test_machines_that_are_not_fit_are_named_before_anything_starts(site: Site) -> None:
    lab = site.lab
    up = ("cluster", "up", site.file)
    keys = lab.home(FIRST) / "root" / ".ssh" / "authorized_keys"
    shutil.move(keys, f"{keys}.away")
    site.trireme(*up, code=2, has=f"SSH to root@{lab.address(FIRST)} fails")
    shutil.move(f"{keys}.away", keys)
    server = lab.start(HEAD, [sys.executable, "-m", "http.server", "8265"], quiet=True)
    connect = ["bash", "-c", "</dev/tcp/127.0.0.1/8265"]
    wait_until(lambda: lab.run(HEAD, connect).returncode == 0)
    site.trireme(*up, code=2, has=f"port 8265 of {lab.address(HEAD)} is taken")
    end_tree(server.pid)
    assert not [line for line in site.processes() if "raylet" in line]
