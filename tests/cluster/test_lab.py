"""Several real hosts: `cluster up` over SSH, training across them, jobs from another host, what happens when one is cut
off, and that nothing is left. See tests/lab.py for what it needs; where that is missing these tests are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import NEEDS_LAB, Lab, isolate, onprem
from tests.running import POINTS, ROOT, committed, end_tree, wait_until

pytestmark = NEEDS_LAB
HEAD, FIRST, SECOND, DESK = range(4)  # DESK is no part of the cluster: it starts it, submits to it, and has MLflow
SECRET = f"planted-{uuid.uuid4().hex}"  # made up anew, since this file itself is shipped
CPUS = f"resources_per_worker.CPU={os.cpu_count()}"  # all of a host: so every worker is on one of its own


@dataclass
class Site:
    """A lab with a cluster that is up."""

    lab: Lab
    file: Path

    def submit(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        run = [*POINTS, "train.global_batch_size=12", f"run.name={name}", CPUS, *more]
        return self.lab.trireme(
            DESK,
            *("submit", "--cluster", str(self.file), *run),
            timeout=150,
            MLFLOW_TRACKING_URI=f"http://{self.lab.address(DESK)}:5000",
            MLFLOW_TRACKING_TOKEN=SECRET,
        )

    def working_on(self) -> set[int]:
        """The hosts of the cluster that have a worker of a run."""
        return {h for h in range(3) if any("RayTrainWorker" in line for line in self.lab.processes_of(h))}

    def doctor(self, *more: str) -> subprocess.CompletedProcess[str]:
        ray = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"{self.lab.address(HEAD)}:6379"}
        return self.lab.trireme(HEAD, "doctor", *more, **ray)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(4) as lab:
        file = onprem(lab)
        database = f"sqlite:///{lab.home(DESK)}/mlflow.db"
        flags = ["--backend-store-uri", database, "--host", "0.0.0.0", "--workers", "1", "--artifacts-destination"]
        command = [sys.executable, "-m", "mlflow", "server", *flags, str(lab.home(DESK) / "artifacts")]
        mlflow = lab.start(DESK, command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, quiet=True)
        up = lab.trireme(DESK, "cluster", "up", str(file), timeout=200)
        log = lab.home(DESK) / "root" / ".cache" / "trireme" / "clusters" / "onprem-up.log"
        assert up.returncode == 0, up.stdout + up.stderr + (log.read_text()[-3000:] if log.exists() else "")
        yield Site(lab, file)
        end_tree(mlflow.pid)
        mlflow.wait()


def test_the_cluster_is_up_and_says_so(site: Site) -> None:
    status = site.lab.trireme(DESK, "cluster", "status", str(site.file), "--json")
    said = json.loads(status.stdout)
    assert said["reachable"] and {node["ip"] for node in said["alive"]} == {site.lab.address(h) for h in range(3)}
    assert said["dollars_per_hour"] == 0
    again = site.lab.trireme(DESK, "cluster", "up", str(site.file))
    assert again.returncode == 2 and f"Ray is running on {site.lab.address(HEAD)} already" in again.stderr
    stranger = site.lab.run(DESK, ["curl", "-s", "-m", "3", f"http://{site.lab.address(HEAD)}:8265/api/version"])
    assert stranger.returncode != 0, "the job server listens on the head's loopback only"


def test_doctor_finds_nothing_in_a_sound_cluster_and_what_is_planted(site: Site) -> None:
    sound = site.doctor("--storage", str(site.lab.shared))
    assert sound.returncode == 0 and "nothing is wrong" in sound.stdout, sound.stdout + sound.stderr
    assert "3 nodes checked" in sound.stdout
    afar = site.lab.trireme(DESK, "doctor", "--cluster", str(site.file), "--storage", str(site.lab.shared))
    assert afar.returncode == 0 and "3 nodes" in afar.stdout, afar.stdout + afar.stderr
    with isolate(site.lab, FIRST, SECOND):  # each still reaches the head
        # /tmp is a folder of each host's own
        told = site.doctor("--json", "--storage", "/tmp/own")
        left_out = site.doctor("--exclude-bad").stdout.strip()  # one end of the link is: either will do
        spared = {site.lab.address(host): host for host in range(3)}
        facts = json.loads(told.stdout)["facts"]
        del spared[next(node["address"] for node in facts["nodes"] if node["node_id"] in left_out)]
        slow = ["strategy=ddp", "workers=2", "train.steps=2000", "task_args.step_seconds=0.05", "--detach"]
        job = site.submit("spared", *slow, left_out).stdout.strip().splitlines()[-1]
        wait_until(lambda: site.working_on() == set(spared.values()))
        stopped = site.lab.trireme(DESK, "submit", "stop", job, "--cluster", str(site.file))
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    found = {finding["code"]: finding for finding in json.loads(told.stdout)["findings"]}
    assert set(found) == {"cut_link", "storage_differs"}, told.stdout
    assert site.lab.address(SECOND) in found["cut_link"]["sentence"] and told.returncode == 1
    assert HEAD in spared.values() and left_out == f"cluster.exclude_nodes=[{found['cut_link']['nodes'][0]}]"


def test_a_token_that_is_not_the_clusters(site: Site) -> None:
    token = site.lab.home(DESK) / "root" / ".ray" / "auth_token"
    right = token.read_text()
    token.write_text("0" * len(right.strip()))
    try:
        sent = site.submit("expired", "train.steps=2")
        asked = site.lab.trireme(DESK, "submit", "logs", "raysubmit_x", "--cluster", str(site.file))
    finally:
        token.write_text(right)
    for ended in (sent, asked):
        assert ended.returncode == 2 and "Authentication failed" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


def test_ddp_across_hosts_from_another_host_and_no_secret_anywhere(site: Site) -> None:
    ended = site.submit("ddp", "workers=3", "strategy=ddp", "train.steps=30", "tracking.log_model=true")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "MLFLOW_TRACKING_TOKEN (secret)" in ended.stdout and SECRET not in ended.stdout + ended.stderr
    folder = site.lab.shared / "runs" / "ddp"
    assert committed(folder) == [30]
    assert len(list((folder / "logs").glob("rank-*.log"))) == 3, "each of which takes all CPUs of a host"
    database = site.lab.home(DESK) / "mlflow.db"
    assert b"train/loss" in database.read_bytes(), "MLflow on yet another host has it"
    left = site.lab.home(HEAD) / "root" / ".trireme" / "secrets"
    assert left.is_dir() and not list(left.iterdir()), "it went over SSH into a file, which the job took and removed"
    leaks = [
        path
        for where in (site.lab.shared, *(site.lab.home(host) for host in range(4)), ROOT / "cluster")
        for path in where.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
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
    sent = site.submit(name, *arguments, *long, "--detach")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    job = sent.stdout.strip().splitlines()[-1]
    wait_until(lambda: committed(folder))
    workers = {host: sum(process in line for line in lab.processes_of(host)) for host in (FIRST, SECOND)}
    victim = max(workers, key=workers.__getitem__)
    assert workers[victim] == on_a_host, workers
    lab.cut(victim)
    before = committed(folder)[-1]
    try:
        wait_until(lambda: committed(folder) and committed(folder)[-1] > before + 20)
        status = json.loads(lab.trireme(DESK, "cluster", "status", str(site.file), "--json").stdout)
        assert lab.address(victim) not in {node["ip"] for node in status["alive"]}
        stopped = lab.trireme(DESK, "submit", "stop", job, "--cluster", str(site.file))
        assert stopped.returncode == 0 and "has stopped" in stopped.stdout, stopped.stdout + stopped.stderr
    finally:
        lab.mend(victim)


def test_down_leaves_nothing(site: Site) -> None:
    down = site.lab.trireme(DESK, "cluster", "down", str(site.file))
    assert down.returncode == 0 and "the cluster is down" in down.stdout, down.stdout + down.stderr

    def left() -> list[str]:
        return [line for host in range(3) for line in site.lab.processes_of(host)]

    wait_until(lambda: not left())  # SSH's shared connections end by themselves, some seconds later
    assert not list((site.lab.home(DESK) / "tmp").glob("ray/cluster-onprem.*"))
    status = site.lab.trireme(DESK, "cluster", "status", str(site.file))
    assert status.returncode == 1 and "is not up" in status.stdout


def test_machines_that_are_not_fit_are_named_before_anything_starts(site: Site) -> None:
    lab = site.lab
    keys = lab.home(FIRST) / "root" / ".ssh" / "authorized_keys"
    shutil.move(keys, f"{keys}.away")
    refused = lab.trireme(DESK, "cluster", "up", str(site.file))
    shutil.move(f"{keys}.away", keys)
    assert refused.returncode == 2 and f"SSH to root@{lab.address(FIRST)} fails" in refused.stderr, refused.stderr
    taker = lab.start(HEAD, [sys.executable, "-m", "http.server", "8265"], quiet=True)
    wait_until(lambda: not lab.run(HEAD, ["bash", "-c", "</dev/tcp/127.0.0.1/8265"]).returncode)
    taken = lab.trireme(DESK, "cluster", "up", str(site.file))
    end_tree(taker.pid)
    assert taken.returncode == 2 and f"port 8265 of {lab.address(HEAD)} is taken" in taken.stderr, taken.stderr
    assert not [line for host in range(3) for line in lab.processes_of(host) if "raylet" in line]
