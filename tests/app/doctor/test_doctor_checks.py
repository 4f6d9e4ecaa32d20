"""The doctor's judgement on facts: each planted fault is named, and a sound cluster has none."""

from typing import Any

import pytest

from app.doctor.checks import ClusterFacts, GpuFacts, NodeFacts, RingFacts, bad_nodes, judge
from app.doctor.look import choose_ranks, expected_rate

pytestmark = pytest.mark.pure

GB = 1_000_000_000
VERSIONS = {
    "Python": "3.11",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "NCCL": "2.27.3",
    "the NVIDIA driver": "570.1",
}


GPUS: dict[str, Any] = {
    "ray_gpus": 2.0,
    "torch_gpus": 2,
    "torch_cuda": "12.8",
    "pci_gpus": 2,
    "driver_cuda": "12.8",
}
NO_GPUS: dict[str, Any] = {
    "ray_gpus": 0.0,
    "torch_gpus": None,
    "torch_cuda": None,
    "pci_gpus": 0,
    "gpus": (),
}


def gpu(index: int, **facts: Any) -> GpuFacts:
    """A sound GPU, but for these facts."""
    defaults = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_total": 80 * GB,
        "memory_used": GB // 2,
        "flops": 7e14,
    }
    return GpuFacts(index=index, **(defaults | facts))


def node(number: int, **facts: Any) -> NodeFacts:
    """A sound node with two GPUs, but for these facts."""
    address = f"10.0.0.{number}"
    defaults = GPUS | {
        "gpus": (gpu(0), gpu(1)),
        "versions": VERSIONS,
        "storage_seen": ("n0", "n1", "n2"),
    }
    defaults |= {"host": f"host{number}", "head": number == 0, "resolves_to": address}
    defaults |= {"interfaces": {"lo": "127.0.0.1", "eth0": address}}
    return NodeFacts(node_id=f"n{number}", address=address, **(defaults | facts))


def bare(number: int, **facts: Any) -> NodeFacts:
    """A node without GPUs."""
    versions = {name: VERSIONS[name] for name in ("Python", "ray", "torch")}
    return node(number, **(NO_GPUS | {"versions": versions} | facts))


def cluster(*nodes: NodeFacts, **facts: Any) -> ClusterFacts:
    """Three sound nodes, some of them replaced by the nodes given."""
    by_number = {number: node(number) for number in range(3)}
    by_number |= {int(replacement.node_id[1:]): replacement for replacement in nodes}
    return ClusterFacts(nodes=tuple(by_number.values()), **({"storage": "/mnt/shared"} | facts))


def gpus_of(**facts: Any) -> tuple[GpuFacts, ...]:
    """A sound GPU, and one with these facts."""
    return (gpu(0), gpu(1, **facts))


def rings(overall_rate: float, **pairs: float) -> tuple[RingFacts, ...]:
    """Measured rates over all nodes and between neighbours `a_b`, where 100 GB/s is expected."""
    over_all = ring("n0", "n1", "n2", ranks=6, rate=overall_rate, expected=1e11)
    between = (ring(*key.split("_"), rate=rate, expected=1e11) for key, rate in pairs.items())
    return (over_all, *between)


def ring(*nodes: str, ranks: int = 2, **facts: Any) -> RingFacts:
    """A measured all-reduce."""
    return RingFacts(nodes=nodes, ranks=ranks, **({"backend": "nccl"} | facts))


SOUND = [
    cluster(),
    cluster(rings=(*rings(6e10), ring("n1", rate=4e11, expected=4.5e11), ring("n2", rate=1e9))),
    cluster(bare(0), bare(1), bare(2)),  # no GPUs anywhere
    cluster(bare(0)),  # a CPU head
    cluster(node(0, ray_gpus=0.0)),  # a head that keeps its GPUs from Ray
    ClusterFacts(nodes=(bare(0, resolves_to="127.0.1.1"),)),  # one machine
    cluster(node(1, resolves_to="127.0.1.1", gloo_interface="eth0")),
    cluster(node(1, gpus=(gpu(0, flops=6.6e14), gpu(1, temperature=78.0)))),
]


@pytest.mark.parametrize("facts", SOUND)
def test_a_sound_cluster_has_no_findings(facts: ClusterFacts) -> None:
    assert judge(facts) == []


# One planted fault per row: the facts, its code, the node at fault, and words of the sentence.
# Faults that nvidia-smi shows are in test_doctor_probe.py.
SEES_NONE = {"torch_gpus": 0, "ray_gpus": 0.0}
NEWER = [node(number, versions=VERSIONS | {"ray": "2.99rc1"}) for number in range(3)]
NO_N0 = {"n0": "timed out"}
NO_N1 = {"n1": "timed out"}
PLANTED: list[tuple[ClusterFacts, str, str, str]] = [
    (
        cluster(node(1, visible="0", torch_gpus=1, ray_gpus=1.0)),
        "hidden_gpus",
        "n1",
        "CUDA_VISIBLE_DEVICES='0'",
    ),
    (
        cluster(node(1, gpus=(), torch_gpus=None, ray_gpus=0.0)),
        "no_driver",
        "n1",
        "driver shows none",
    ),
    (cluster(node(1, torch_cuda=None, **SEES_NONE)), "cpu_torch", "n1", "built for CPUs only"),
    (
        cluster(node(1, torch_error="driver too old", **SEES_NONE)),
        "torch_blind",
        "n1",
        "sees none (driver too old)",
    ),
    (cluster(node(1, ray_gpus=8.0)), "ray_gpus", "n1", "has 2 usable GPUs, but Ray counts 8"),
    (cluster(node(1, ray_gpus=0.0)), "unused_gpus", "n1", "Ray counts 0"),
    (
        cluster(node(1, metrics_problem="No module named 'pynvml'")),
        "no_gpu_metrics",
        "n1",
        "has 2 GPUs whose load",
    ),
    (cluster(node(1, gpus=gpus_of(flops=4e14))), "slow_gpu", "n1", "400 TFLOP/s, its peers at 700"),
    (cluster(node(1, versions=VERSIONS | {"torch": ""})), "other_version", "n1", "torch (none)"),
    (
        cluster(node(1, versions=VERSIONS | {"the NVIDIA driver": "535.1"})),
        "other_driver",
        "n1",
        "driver 535.1",
    ),
    (cluster(*NEWER), "newer_version", "", "ray 2.99rc1 is newer"),
    (cluster(node(1, shm_bytes=64 * 2**20)), "small_shm", "n1", "67 MB"),
    (cluster(node(1, disk_free=GB)), "disk_full", "n1", "1.0 GB free"),
    (
        cluster(node(0, unreachable=NO_N1), node(2, unreachable=NO_N1)),
        "cut_link",
        "n1",
        "no other node can connect to",
    ),
    (
        cluster(node(0, unreachable=NO_N1), node(1, unreachable=NO_N0)),
        "cut_link",
        "n1",
        "(host0) cannot connect to 10",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=2e10, n2_n0=5e10)),
        "slow_pair",
        "n1",
        "between others 50 GB/s",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=5e10, n2_n0=5e10)),
        "slow_pair",
        "n1",
        "and 10.0.0.0 (host0) moves",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=2e10, n2_n0=2e10)),
        "slow_all_reduce",
        "",
        "6 workers on 3 nodes",
    ),
    (
        cluster(rings=(ring("n1", rate=3e10, expected=4.5e11),)),
        "slow_all_reduce",
        "n1",
        "within 10.0.0.1 (host1)",
    ),
    (
        cluster(rings=(ring("n0", "n1", "n2", ranks=6, backend="", problem="timed out"),)),
        "all_reduce",
        "",
        "timed out",
    ),
    (cluster(node(1, resolves_to="127.0.1.1")), "host_name", "n1", "its own name to 127.0.1.1"),
    (cluster(node(1, resolves_to=None)), "host_name", "n1", "its own name to nothing"),
    (
        cluster(node(1, storage_problem="Permission denied", storage_seen=None)),
        "storage",
        "n1",
        "Permission denied",
    ),
    (cluster(node(1, storage_seen=("n1",))), "storage_differs", "n1", "each sees only its own"),
    (
        cluster(NodeFacts(node_id="n1", address="10.0.0.1", problem="no answer")),
        "no_answer",
        "n1",
        "10.0.0.1 does not answer",
    ),
]


@pytest.mark.parametrize(("facts", "code", "node_id", "message"), PLANTED)
def test_a_planted_fault_is_named(
    facts: ClusterFacts, code: str, node_id: str, message: str
) -> None:
    findings = judge(facts)
    assert {finding.code for finding in findings} == {code}, "and nothing else is reported"
    sentences = [finding.sentence for finding in findings]
    assert any(message in sentence for sentence in sentences), sentences
    assert not node_id or any(node_id in finding.nodes for finding in findings)
    assert all(finding.remedy for finding in findings)


def test_bad_nodes_are_those_with_critical_findings() -> None:
    facts = cluster(node(1, shm_bytes=0, disk_free=0), node(2, ray_gpus=0.0))
    assert bad_nodes(judge(facts)) == ["n1"]


def test_idle_gpus_of_reachable_nodes_take_part_in_an_all_reduce() -> None:
    ranks = choose_ranks(cluster(bare(0), node(1, gpus=gpus_of(processes=("4711",)))))
    members = [(node.node_id, gpu) for node, gpu in ranks]
    assert members == [("n1", 0), ("n2", 0), ("n2", 1)], "idle GPUs, and no CPU"
    assert [gpu for _, gpu in choose_ranks(cluster(bare(0), bare(1), bare(2)))] == [None] * 3
    cut = cluster(bare(0, unreachable={"n1": "timed out"}), bare(1), bare(2))
    assert [node.node_id for node, _ in choose_ranks(cut)] == ["n2"], "with others it would hang"


def test_the_expected_rate_is_that_of_the_link_and_the_backend() -> None:
    assert expected_rate(cluster(link_expected=5e10), ("n0", "n1"), "nccl") == 5e10
    assert expected_rate(cluster(link_expected=5e10), ("n0", "n1"), "gloo") is None
    assert expected_rate(cluster(), ("n0", "n1"), "nccl") is None
    assert expected_rate(cluster(), ("n1",), "nccl") == 4.5e11
