"""The doctor's probes on a machine, between actors, and on a running cluster."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import ray

from app.cli.cluster import report
from app.doctor import look, probe
from app.doctor.checks import ClusterFacts, GpuFacts, NodeFacts, judge
from app.doctor.probe import Probe, smi
from tests.app.doctor.test_doctor_checks import cluster, node
from tests.running import ROOT, trireme

GPU = """<gpu id="00000000:07:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <mig_mode><current_mig>{mig}</current_mig></mig_mode>
  <{reasons}><x_reason_hw_thermal_slowdown>Not Active</x_reason_hw_thermal_slowdown>
    <x_reason_hw_power_brake_slowdown>{brake}</x_reason_hw_power_brake_slowdown>
    <x_reason_sw_thermal_slowdown>{thermal}</x_reason_sw_thermal_slowdown></{reasons}>
  <fb_memory_usage><total>81559 MiB</total><reserved>5 MiB</reserved>
    <used>{used} MiB</used></fb_memory_usage>
  <ecc_errors><volatile>{ecc}</volatile>
    <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
  <temperature><gpu_temp>91 C</gpu_temp></temperature>
  <processes>{processes}</processes>
</gpu>"""
PROCESS = (
    "<process_info><pid>4711</pid><type>{}</type>"
    "<process_name>/usr/bin/python train.py</process_name>"
    "<used_memory>29000 MiB</used_memory></process_info>"
)
SOUND = {
    "mig": "Disabled",
    "brake": "Not Active",
    "thermal": "N/A",
    "used": "500",
    "ecc": "",
    "processes": "",
    "reasons": "clocks_event_reasons",
}
NEW_ECC = "<sram_uncorrectable_parity>N/A</sram_uncorrectable_parity>"
NEW_ECC += "<dram_uncorrectable>7</dram_uncorrectable>"
OLD_ECC = "<single_bit><total>3</total></single_bit><double_bit><total>7</total></double_bit>"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the nvidia-smi on PATH, a script that the test writes."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    return tmp_path / "nvidia-smi"


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({}, "", ""),
        ({"mig": "Enabled"}, "mig", "GPU 1"),
        ({"ecc": NEW_ECC}, "ecc", "7 memory errors"),
        ({"ecc": OLD_ECC}, "ecc", "7 memory errors"),
        ({"thermal": "Active"}, "throttled", "thermal) at 91 °C"),
        ({"brake": "Active", "reasons": "clocks_throttle_reasons"}, "throttled", "power brake"),
        ({"used": "30000"}, "memory_taken", "31.5 GB of 85.5 GB"),
        ({"used": "30000", "processes": PROCESS.format("C")}, "busy_gpu", "4711 python 29000 MiB"),
        ({"processes": PROCESS.format("G")}, "", ""),
    ],
)
def test_a_fault_is_seen_through_nvidia_smi(
    program: Path, change: dict[str, str], code: str, message: str
) -> None:
    """Of two GPUs the second has the fault; only nvidia-smi itself is a fake."""
    rows = [GPU.format(**row) for row in (SOUND, SOUND | change)]
    head = "<driver_version>570.1</driver_version><cuda_version>12.8</cuda_version>"
    log = f"<nvidia_smi_log>{head}{''.join(rows)}</nvidia_smi_log>"
    program.write_text(f"#!/bin/sh\necho '{log}'\n")
    facts = smi()
    assert facts["versions"] == {"the NVIDIA driver": "570.1"} and facts["driver_cuda"] == "12.8"
    findings = judge(cluster(node(1, gpus=tuple(GpuFacts(**row) for row in facts["gpus"]))))
    assert [finding.code for finding in findings] == ([code] if code else [])
    assert all(message in finding.sentence and finding.nodes == ("n1",) for finding in findings)


def test_a_failing_nvidia_smi_and_a_missing_pynvml_are_reported(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = f"<nvidia_smi_log>{GPU.format(**SOUND)}</nvidia_smi_log>"
    program.write_text(f"#!/bin/sh\necho '{log}'\n")
    monkeypatch.setattr(probe, "ask_torch", lambda facts: None)
    halted = "import of pynvml halted; None in sys.modules"
    for problem, nvml in ((halted, None), ("", mock.Mock())):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert probe.gpus(0.0)["metrics_problem"] == problem
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert smi() == {"gpus": [], "smi_error": "No devices were found"}
    program.unlink()
    assert smi() == {"gpus": [], "smi_error": "there is no nvidia-smi"}


SENT = """
import sys, json
sys.modules |= dict.fromkeys(('app', 'cluster', 'experiments', 'strategies'))
from ray import cloudpickle
probe, ring = cloudpickle.loads(bytes.fromhex(sys.stdin.read()))
print(json.dumps(probe().facts(0.0, {disk!r}, '', '')))
"""


def test_a_node_can_be_probed_without_triremes_modules(tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(probe)
    try:
        sent = ray.cloudpickle.dumps((probe.Probe, probe.RingRank)).hex()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)
    program = [sys.executable, "-c", SENT.format(disk=str(tmp_path / "session"))]
    done = subprocess.run(program, input=sent, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["versions"]["ray"] and facts["interfaces"]["lo"] == "127.0.0.1"
    assert facts["disk_path"] == str(tmp_path)
    assert facts["disk_free"] > 0 and facts["shm_bytes"] > 0


def test_a_port_that_is_closed_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peers = {"open": listening.getsockname(), "closed": ("127.0.0.1", 9)}
        assert Probe().unreachable(peers) == {"closed": "connection refused"}


@pytest.mark.slow
def test_a_running_cluster_is_examined(
    connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = look.gather_facts(storage=str(tmp_path))
    (this_node,) = facts.nodes
    assert this_node.problem == "" and this_node.head and this_node.versions["ray"]
    assert this_node.storage_seen == (this_node.node_id,)
    assert not list(tmp_path.iterdir()), "its mark in the storage is deleted"
    findings = judge(facts)
    # This machine may really have these faults.
    assert {finding.code for finding in findings} <= {"small_shm", "disk_full"}
    assert "1 node checked" in report(facts, findings)[-1]

    # All nodes are taken for slow, so neighbours are measured too.
    monkeypatch.setattr(look, "expected_rate", lambda *_: 1e12)
    loopback = {"lo": "127.0.0.1"}
    nodes = tuple(
        NodeFacts(node_id=name, address=this_node.address, interfaces=loopback) for name in "abc"
    )
    ranks = [look.Rank(node, None) for node in nodes]
    actors = [
        look.spawn(probe.RingRank, this_node.node_id, gpu=None, interface="lo") for _ in nodes
    ]
    measured = look.measure_rings(ClusterFacts(nodes=nodes), ranks, actors)
    assert ["".join(ring.nodes) for ring in measured] == ["abc", "ab", "bc", "ca"]
    assert all(min(ring.rate or 0, ring.exchange or 0) > 1e6 for ring in measured), measured
    assert all(ring.is_slow and not ring.problem for ring in measured), measured
    ray.kill(actors[2])
    (broken,) = look.measure_rings(ClusterFacts(nodes=nodes), ranks, actors)
    assert broken.nodes == ("a", "b", "c") and broken.rate is None and broken.problem


@pytest.mark.slow
def test_the_doctor_does_not_exclude_every_node(ray_environment: dict[str, str]) -> None:
    out = trireme("doctor", "--storage", "/proc/nowhere", "--exclude-bad", env=ray_environment)
    assert out.code == 1
    assert "every node is bad" in out.err
    assert "cannot write to the storage" in out.err


def test_the_examined_cluster_is_the_named_the_running_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    for cluster_option, address, running, expected in (
        (None, "", None, None),
        ("laptop", "", None, None),
        ("aws", "", None, "aws"),  # its head is another machine
        ("aws", "", "10.0.0.1:6379", None),  # this machine is in a running cluster
        ("aws", "10.0.0.1:6379", None, None),
        (None, "http://10.0.0.1:8265", None, "http://10.0.0.1:8265"),
    ):
        monkeypatch.setattr("cluster.connect.running_here", lambda running=running: running)
        monkeypatch.setenv("RAY_ADDRESS", address)
        server = look.remote_server(cluster_option)
        assert (str(server) if server else None) == expected, (cluster_option, address, running)
