"""What doctor's probes find out on real and on played machines, and doctor on a cluster that runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.doctor.checks import judge
from tests.app.doctor.test_doctor import cluster, node
from tests.running import ROOT, trireme

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,pci*) echo '0, 00000000:07:00.0'; echo '1, 00000000:0A:00.0';;
  --query-gpu=*OLDNAME*) echo 'Field "clocks_throttle_reasons" is not a valid field to query.'; exit 2;;
  --query-gpu=*) cat HERE/gpus;;
  --query-compute-apps=*) cat HERE/apps;;
  *) echo '| NVIDIA-SMI 570.133.20   Driver Version: 570.133.20   CUDA Version: 12.8 |';;
esac
"""
HEALTHY = "{}, NVIDIA H100 80GB HBM3, 81559, 500, 0, 41, Disabled, Not Active, Not Active, Not Active, GPU-{}"


def smi_row(gpu: int, **cells: str) -> str:
    names = ["index", "name", "total", "used", "ecc", "heat", "mig", "hardware", "software", "brake", "uuid"]
    row = dict(zip(names, HEALTHY.format(gpu, gpu).split(", "), strict=True)) | cells
    return ", ".join(row.values())


@pytest.mark.parametrize(
    ("second", "apps", "kernel", "code", "said"),
    [
        ({}, "", "", "", ""),
        ({"mig": "Enabled"}, "", "", "mig", "GPU 1"),
        ({"ecc": "7"}, "", "", "ecc", "7 memory errors"),
        ({"software": "Active", "heat": "91"}, "", "", "throttled", "thermal) at 91 °C"),
        ({"brake": "Active"}, "", "", "throttled", "power brake"),
        ({"used": "30000"}, "", "", "memory_taken", "31.5 GB of 85.5 GB"),
        ({"used": "30000"}, "GPU-1, 4711, /usr/bin/python, 29000", "", "busy_gpu", "4711 python 29000 MiB"),
        ({}, "", "[1.0] NVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU has fallen off the bus.", "xid", "Xid 79"),
    ],
)
@pytest.mark.parametrize("old_names", [True, False])
def test_a_fault_is_seen_through_the_drivers_own_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    second: dict[str, str],
    apps: str,
    kernel: str,
    code: str,
    said: str,
    old_names: bool,
) -> None:
    """nvidia-smi and dmesg of a machine with two GPUs, played by scripts: everything from there on is what runs."""
    from app.doctor.gpu_probe import smi
    from app.doctor.look import _gpu

    (tmp_path / "gpus").write_text(f"{smi_row(0)}\n{smi_row(1, **second)}\n")
    (tmp_path / "apps").write_text(apps)
    refused = "NOBODY" if old_names else "throttle_reasons"
    for name, text in (
        ("nvidia-smi", SMI.replace("OLDNAME", refused).replace("HERE", str(tmp_path))),
        ("dmesg", f"#!/bin/sh\necho '{kernel}'\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = smi()
    assert found["driver"] == "570.133.20" and found["driver_cuda"] == "12.8"
    findings = judge(cluster(node(1, gpus=tuple(_gpu(row) for row in found["gpus"]))))
    assert [finding.code for finding in findings] == ([code] if code else [])
    assert all(said in finding.sentence and finding.nodes == ("n1",) for finding in findings)


def test_nodes_need_nothing_of_ours_for_the_probe() -> None:
    from ray import cloudpickle

    from app.doctor.look import BY_VALUE
    from app.doctor.probe import Probe

    for module in BY_VALUE:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps(Probe).hex()
    finally:
        for module in BY_VALUE:
            cloudpickle.unregister_pickle_by_value(module)
    code = (
        "import sys, json; sys.modules['app'] = None; from ray import cloudpickle\n"
        "probe = cloudpickle.loads(bytes.fromhex(sys.stdin.read()))()\n"
        "print(json.dumps(probe.facts(0.0, '/tmp', '', '', 'mark')))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["packages"]["ray"] and facts["interfaces"]["lo"] == "127.0.0.1" and facts["flops"] > 1e8
    assert facts["disk_free"] > 0 and facts["open_files"] > 0 and facts["storage_problem"] == ""


POOR = "mount -t tmpfs -o size=64m x /dev/shm && mount -t tmpfs -o size=1m x {disk} && ulimit -n 1024 && exec "


def test_a_machine_with_little_of_everything_says_so(tmp_path: Path) -> None:
    """Small shared memory, a full disk and few files, planted for real in a mount namespace of its own."""
    space = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    poor = POOR.format(disk=tmp_path) + shlex.join([sys.executable, "-m", "app.doctor.probe", str(tmp_path)])
    done = subprocess.run([*space, "sh", "-c", poor], cwd=ROOT, capture_output=True, text=True)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    said = {key: found[key] for key in ("shm_bytes", "open_files", "disk_free")}
    assert {finding.code for finding in judge(cluster(node(1, **said)))} == {"small_shm", "few_files", "disk_full"}


def test_what_a_storage_and_a_server_say(tmp_path: Path) -> None:
    from app.doctor.probe import reach, remove_mark, see_marks, write_mark

    assert write_mark(str(tmp_path / "new"), "mark-a") == "" and see_marks(str(tmp_path / "new"), "mark-") == ["a"]
    remove_mark(str(tmp_path / "new"), "mark-a")
    assert see_marks(str(tmp_path / "new"), "mark-") == []
    assert "nowhere" in write_mark("/proc/nowhere", "mark-a") and see_marks("/proc/nowhere", "mark-") is None
    assert "refused" in reach("http://127.0.0.1:9") and reach("sqlite:///x.db") == "" and reach("") == ""


RINGS = """
import json, ray
from app.doctor import look, ring_probe, rings
from app.doctor.facts import ClusterFacts, NodeFacts
ray.init(address="auto", log_to_driver=False)
real = ray.nodes()[0]
for module in look.BY_VALUE:
    ray.cloudpickle.register_pickle_by_value(module)
nodes = tuple(NodeFacts(name, real["NodeManagerAddress"], interfaces={"lo": "127.0.0.1"}) for name in "abc")
facts = ClusterFacts(nodes, link_expected=1e12)
rings.SHARE["gloo"] = 1e6  # whatever comes is too little, so every pair is looked at
actors = [look.spawn(ring_probe.Ring, real["NodeID"], None, "lo") for _ in nodes]
found = rings._measure(facts, [(node, None) for node in nodes], actors)
ray.kill(actors[2])
alone = rings._measure(facts, [(node, None) for node in nodes], actors)
print(json.dumps([[(ring.nodes, ring.rate, ring.low, ring.problem) for ring in some] for some in (found, alone)]))
"""


def test_all_reduce_between_actors(ray_environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", RINGS], env=ray_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, broken = json.loads(done.stdout.splitlines()[-1])
    assert [nodes for nodes, *_ in found] == [["a", "b", "c"], ["b", "c"], ["a", "c"], ["a", "b"]]
    assert all(rate > 1e6 and low and not problem for _, rate, low, problem in found), found
    ((nodes, rate, _, problem),) = broken
    assert nodes == ["a", "b", "c"] and rate is None and problem


def test_doctor_on_a_running_cluster(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    told = trireme("doctor", "--json", "--storage", str(tmp_path), env=ray_environment)
    found = json.loads(told.out)
    (seen_node,) = found["facts"]["nodes"]
    assert seen_node["problem"] == "" and seen_node["head"] and seen_node["packages"]["ray"]
    assert seen_node["storage_seen"] == [seen_node["node_id"]] and not list(tmp_path.iterdir()), "its mark is gone"
    small = {"small_shm", "few_files", "disk_full", "little_memory"}  # this machine may really have these
    assert {finding["code"] for finding in found["findings"]} <= small, told.out
    bad = trireme("doctor", "--storage", "/proc/nowhere", env=ray_environment)
    assert bad.code == 1 and "cannot write to /proc/nowhere" in bad.out, bad.out + bad.err
    out = trireme("doctor", "--storage", "/proc/nowhere", "--exclude-bad", env=ray_environment)
    assert out.code == 1 and "every node is bad" in out.err


def test_which_cluster_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.doctor.elsewhere import result, where

    running: list[str] = []
    monkeypatch.setattr("cluster.connect.running_here", lambda: running[0] if running else None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert where(None) is None and where("laptop") is None
    there = where("aws")
    assert there and there.cluster == "aws", "its head is another machine"
    running.append("10.0.0.1:6379")
    assert where("aws") is None, "this is one of a running cluster"
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    there = where(None)
    assert there and there.address == "http://10.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert where("aws") is None
    assert result('note: x\n{"a": 1}\n', only="{") == '{"a": 1}' and result("note: x\n1 node\nfine") == "1 node\nfine"
