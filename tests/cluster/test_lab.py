"""Several real hosts: `cluster up` over SSH, training across them, jobs from another host, what happens when one is cut
off, and that nothing is left; and autoscaling, on one host. See tests/lab.py for what it needs; where that is missing
these tests are skipped.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab import NEEDS_LAB, Lab, isolate, onprem
from tests.running import POINTS, ROOT, committed, end_tree, wait_until

pytestmark = NEEDS_LAB

# --- from no workers to a run's placement group and back, with Ray's own stand-in for a cloud -------------------------

FAKE_HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # what Ray's fake provider calls the head
CONFIG = f"""
cluster_name: fake
max_workers: 3
idle_timeout_minutes: 0.3  # longer than Ray Train takes to its placement group; until then the run keeps its places
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
auth: {{}}  # this and what follows has no default for a provider of one's own
file_mounts: {{}}
setup_commands: []
head_setup_commands: []
worker_setup_commands: []
cluster_synced_files: []
"""
ENVIRONMENT = dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), FAKE_HEAD)
ENVIRONMENT |= {"RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "RAY_AUTH_MODE": "disabled"}
ENVIRONMENT["AUTOSCALER_UPDATE_INTERVAL_S"] = "1"
ALIVE = "import ray; ray.init(address='auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"


def test_a_run_makes_the_cluster_grow_and_its_end_makes_it_shrink() -> None:
    with Lab(1) as lab:
        config = lab.home(0) / "root" / "ray_bootstrap_config.yaml"  # where `ray up` leaves it on a head
        config.write_text(CONFIG)
        flags = [f"--autoscaling-config={config}", "--num-cpus=0", "--object-store-memory=100000000"]
        started = lab.run(0, ["ray", "start", "--head", "--disable-usage-stats", *flags], ENVIRONMENT)
        assert started.returncode == 0, started.stdout + started.stderr

        def alive() -> int:
            return int(lab.run(0, [sys.executable, "-c", ALIVE], ENVIRONMENT).stdout.split()[-1])

        assert alive() == 1, "the head alone"
        run = [*POINTS, "train.steps=20", "run.name=grown", f"run.storage={lab.shared}", "train.global_batch_size=12"]
        ask = ["workers=2", "resources_per_worker.CPU=2", "cluster.wait_seconds=120"]
        ended = lab.trireme(0, "train", *run, *ask, timeout=600, **ENVIRONMENT)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert committed(lab.shared / "grown") == [20]
        assert alive() == 3, "two workers came, and no third"
        too_much = lab.trireme(0, "train", *run, *ask, "run.name=x", "workers=4", **ENVIRONMENT)
        assert too_much.returncode == 2 and "do not fit" in too_much.stderr, too_much.stderr
        wait_until(lambda: alive() == 1)  # Ray Train's request for nodes lives for 180 s after it


# --- a cluster of three hosts, and one beside it ----------------------------------------------------------------------

HEAD, FIRST, SECOND, DESK = range(4)  # DESK is no part of the cluster: it starts it, submits to it, and has MLflow
SECRET = f"planted-{uuid.uuid4().hex}"  # made up anew, since this file itself is shipped
CPUS = f"resources_per_worker.CPU={os.cpu_count()}"  # all of a host: so every worker is on one of its own


@dataclass
class Site:
    """A lab with a cluster that is up."""

    lab: Lab
    file: str

    def says(self, *words: str, code: int = 0, has: str = "", host: int = DESK, **env: str) -> str:
        """What `trireme WORDS` prints on a host (of a refusal, to stderr), where it ends with `code` and says that."""
        ended = self.lab.trireme(host, *words, timeout=600, **env)
        text = ended.stdout + ended.stderr
        assert ended.returncode == code and has in text and "Traceback" not in text, text
        return ended.stderr if code == 2 else ended.stdout

    def submit(self, name: str, *more: str, code: int = 0, has: str = "") -> str:
        run = [*POINTS, "train.global_batch_size=12", f"run.name={name}", CPUS, *more]
        env = {"MLFLOW_TRACKING_URI": f"http://{self.lab.address(DESK)}:5000", "MLFLOW_TRACKING_TOKEN": SECRET}
        return self.says("submit", "--cluster", self.file, *run, code=code, has=has, **env)

    def stop(self, job: str) -> None:
        self.says("submit", "stop", job, "--cluster", self.file, has="has stopped")

    def alive(self) -> set[str]:
        status = json.loads(self.says("cluster", "status", self.file, "--json"))
        assert status["reachable"] and status["dollars_per_hour"] == 0
        return {node["ip"] for node in status["alive"]}

    def left(self) -> list[str]:
        return [line for host in range(3) for line in self.lab.processes_of(host)]

    def doctor(self, *more: str, code: int = 0, has: str = "") -> str:
        address = f"{self.lab.address(HEAD)}:6379"
        return self.says("doctor", *more, code=code, has=has, host=HEAD, RAY_AUTH_MODE="token", RAY_ADDRESS=address)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(4) as lab:
        made = Site(lab, str(onprem(lab)))
        database = f"sqlite:///{lab.home(DESK)}/mlflow.db"
        flags = ["--backend-store-uri", database, "--host", "0.0.0.0", "--workers", "1", "--artifacts-destination"]
        command = [sys.executable, "-m", "mlflow", "server", *flags, str(lab.home(DESK) / "artifacts")]
        mlflow = lab.start(DESK, command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, quiet=True)
        made.says("cluster", "up", made.file)
        yield made
        end_tree(mlflow.pid)
        mlflow.wait()


def test_the_cluster_is_up_and_says_so(site: Site) -> None:
    assert site.alive() == {site.lab.address(host) for host in range(3)}
    site.says("cluster", "up", site.file, code=2, has=f"Ray is running on {site.lab.address(HEAD)} already")
    for host, address, answers in ((HEAD, "127.0.0.1", True), (DESK, site.lab.address(HEAD), False)):
        asked = site.lab.run(host, ["timeout", "3", "bash", "-c", f"</dev/tcp/{address}/8265"])
        assert (asked.returncode == 0) == answers, "the job server listens on the head's loopback only"


def test_doctor_finds_nothing_in_a_sound_cluster_and_what_is_planted(site: Site) -> None:
    assert "3 nodes checked" in site.doctor("--storage", str(site.lab.shared), has="nothing is wrong")
    site.says("doctor", "--cluster", site.file, "--storage", str(site.lab.shared), has="3 nodes")
    with isolate(site.lab, FIRST, SECOND):  # each still reaches the head
        # /tmp is a folder of each host's own
        told = json.loads(site.doctor("--json", "--storage", "/tmp/own", code=1))
        left_out = site.doctor("--exclude-bad").strip()  # one end of the link is: either will do
        spared = {site.lab.address(host): host for host in range(3)}
        del spared[next(node["address"] for node in told["facts"]["nodes"] if node["node_id"] in left_out)]
        slow = ["strategy=ddp", "workers=2", "train.steps=2000", "task_args.step_seconds=0.05", "--detach"]
        job = site.submit("spared", *slow, left_out).split()[-1]

        def working() -> set[int]:
            return {h for h in range(3) if any("RayTrainWorker" in line for line in site.lab.processes_of(h))}

        wait_until(lambda: working() == set(spared.values()))
        site.stop(job)
    found = {finding["code"]: finding for finding in told["findings"]}
    assert set(found) == {"cut_link", "storage_differs"}, told
    assert site.lab.address(SECOND) in found["cut_link"]["sentence"]
    assert HEAD in spared.values() and left_out == f"cluster.exclude_nodes=[{found['cut_link']['nodes'][0]}]"


def test_a_token_that_is_not_the_clusters(site: Site) -> None:
    token = site.lab.home(DESK) / "root" / ".ray" / "auth_token"
    right = token.read_text()
    token.write_text("0" * len(right.strip()))
    try:
        sent = site.submit("expired", "train.steps=2", code=2)
        asked = site.says("submit", "logs", "raysubmit_x", "--cluster", site.file, code=2)
    finally:
        token.write_text(right)
    assert all("Authentication failed" in said and len(said.splitlines()) == 1 for said in (sent, asked)), (sent, asked)


def test_ddp_across_hosts_from_another_host_and_no_secret_anywhere(site: Site) -> None:
    run = ["workers=3", "strategy=ddp", "train.steps=30", "tracking.log_model=true"]
    assert SECRET not in site.submit("ddp", *run, has="MLFLOW_TRACKING_TOKEN (secret)")
    folder = site.lab.shared / "runs" / "ddp"
    assert committed(folder) == [30]
    assert len(list((folder / "logs").glob("rank-*.log"))) == 3, "each of which takes all CPUs of a host"
    assert b"train/loss" in (site.lab.home(DESK) / "mlflow.db").read_bytes(), "MLflow on yet another host has it"
    left = site.lab.home(HEAD) / "root" / ".trireme" / "secrets"
    assert left.is_dir() and not list(left.iterdir()), "it went over SSH into a file, which the job took and removed"
    places = [site.lab.shared, *map(site.lab.home, range(4)), ROOT / "cluster"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    leaks = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert leaks == [], "in no configuration, log, artifact, package or MLflow parameter"


HALF = f"resources_per_worker.CPU={(os.cpu_count() or 2) / 2:g}"  # two workers on a host
STAGES = ["task=tests.chain:Chain", HALF, "workers=4", "strategy=pipeline", "parallel.pp=4", "train.micro_batch_size=3"]


@pytest.mark.parametrize(
    ("name", "arguments", "process", "on_a_host"),
    [("fsdp", ["workers=2", "strategy=fsdp"], "RayTrainWorker", 1), ("staged", STAGES, "WorkerActor", 2)],
)
def test_a_run_survives_a_host_that_is_cut_off(
    site: Site, name: str, arguments: list[str], process: str, on_a_host: int
) -> None:
    lab, folder = site.lab, site.lab.shared / "runs" / name
    long = ["train.steps=100000", "checkpoint.every_seconds=2", "fault.max_restarts=5"]
    job = site.submit(name, *arguments, *long, "--detach").split()[-1]
    wait_until(lambda: committed(folder))
    workers = {host: sum(process in line for line in lab.processes_of(host)) for host in (FIRST, SECOND)}
    victim = max(workers, key=workers.__getitem__)
    assert workers[victim] == on_a_host, workers
    lab.cut(victim)
    before = committed(folder)[-1]
    try:
        wait_until(lambda: committed(folder) and committed(folder)[-1] > before + 20)
        assert lab.address(victim) not in site.alive()
        site.stop(job)
    finally:
        lab.mend(victim)


def test_down_leaves_nothing(site: Site) -> None:
    site.says("cluster", "down", site.file, has="the cluster is down")
    wait_until(lambda: not site.left())  # SSH's shared connections end by themselves, some seconds later
    assert not list((site.lab.home(DESK) / "tmp").glob("ray/cluster-onprem.*"))
    site.says("cluster", "status", site.file, code=1, has="is not up")


def test_machines_that_are_not_fit_are_named_before_anything_starts(site: Site) -> None:
    lab, up = site.lab, ("cluster", "up", site.file)
    keys = lab.home(FIRST) / "root" / ".ssh" / "authorized_keys"
    shutil.move(keys, f"{keys}.away")
    site.says(*up, code=2, has=f"SSH to root@{lab.address(FIRST)} fails")
    shutil.move(f"{keys}.away", keys)
    taker = lab.start(HEAD, [sys.executable, "-m", "http.server", "8265"], quiet=True)
    wait_until(lambda: not lab.run(HEAD, ["bash", "-c", "</dev/tcp/127.0.0.1/8265"]).returncode)
    site.says(*up, code=2, has=f"port 8265 of {lab.address(HEAD)} is taken")
    end_tree(taker.pid)
    assert not [line for line in site.left() if "raylet" in line]
