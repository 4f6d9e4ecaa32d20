"""Doctor's judgement on facts: each planted fault is named rightly, and nothing is said where nothing is wrong."""

from typing import Any

import pytest

from app.doctor.checks import ClusterFacts, GpuFacts, NodeFacts, RingFacts, bad_nodes, judge
from app.doctor.look import choose_ranks, expected_rate

pytestmark = pytest.mark.pure

GB = 1_000_000_000
VERSIONS = {"Python": "3.11", "ray": "2.60.0", "torch": "2.13.0", "NCCL": "2.27.3", "the NVIDIA driver": "570.1"}


GPUS: dict[str, Any] = {"ray_gpus": 2.0, "torch_gpus": 2, "torch_cuda": "12.8", "pci_gpus": 2, "driver_cuda": "12.8"}
NO_GPUS: dict[str, Any] = {"ray_gpus": 0.0, "torch_gpus": None, "torch_cuda": None, "pci_gpus": 0, "gpus": ()}


def gpu(index: int, **more: Any) -> GpuFacts:
    known = {"name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GB, "memory_used": GB // 2, "flops": 7e14}
    return GpuFacts(index=index, **(known | more))


def node(number: int, **more: Any) -> NodeFacts:
    address = f"10.0.0.{number}"
    known = GPUS | {"gpus": (gpu(0), gpu(1)), "versions": VERSIONS, "storage_seen": ("n0", "n1", "n2")}
    known |= {"host": f"host{number}", "head": number == 0, "resolves_to": address}
    known |= {"interfaces": {"lo": "127.0.0.1", "eth0": address}}
    return NodeFacts(node_id=f"n{number}", address=address, **(known | more))


def bare(number: int, **more: Any) -> NodeFacts:
    """A node without GPUs."""
    versions = {name: VERSIONS[name] for name in ("Python", "ray", "torch")}
    return node(number, **(NO_GPUS | {"versions": versions} | more))


def cluster(*nodes: NodeFacts, **more: Any) -> ClusterFacts:
    """Three sound nodes, of which some are others."""
    whole = {number: node(number) for number in range(3)} | {int(n.node_id[1:]): n for n in nodes}
    return ClusterFacts(nodes=tuple(whole.values()), **({"storage": "/mnt/shared"} | more))


def gpus_of(**more: Any) -> tuple[GpuFacts, ...]:
    return (gpu(0), gpu(1, **more))


def rings(whole: float, **pairs: float) -> tuple[RingFacts, ...]:
    """All-reduce over all nodes, where 100 GB/s should come, and between neighbours, by `a_b`."""
    over_all = ring("n0", "n1", "n2", ranks=6, rate=whole, expected=1e11)
    between = (ring(*key.split("_"), rate=rate, expected=1e11) for key, rate in pairs.items())
    return (over_all, *between)


def ring(*nodes: str, ranks: int = 2, **more: Any) -> RingFacts:
    return RingFacts(nodes=nodes, ranks=ranks, **({"backend": "nccl"} | more))


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
def test_nothing_is_said_where_nothing_is_wrong(facts: ClusterFacts) -> None:
    assert judge(facts) == []


# A planted fault per row: the facts, the code it must be given, the node it must be laid to, and words of the sentence.
# Those that nvidia-smi tells of are in test_doctor_probe.py.
SEES_NONE = {"torch_gpus": 0, "ray_gpus": 0.0}
NEWER = [node(number, versions=VERSIONS | {"ray": "2.99rc1"}) for number in range(3)]
NO_N0, NO_N1 = {"n0": "timed out"}, {"n1": "timed out"}
PLANTED: list[tuple[ClusterFacts, str, str, str]] = [
    (cluster(node(1, visible="0", torch_gpus=1, ray_gpus=1.0)), "hidden_gpus", "n1", "CUDA_VISIBLE_DEVICES='0'"),
    (cluster(node(1, gpus=(), torch_gpus=None, ray_gpus=0.0)), "no_driver", "n1", "driver shows none"),
    (cluster(node(1, torch_cuda=None, **SEES_NONE)), "cpu_torch", "n1", "built for CPUs only"),
    (cluster(node(1, torch_error="driver too old", **SEES_NONE)), "torch_blind", "n1", "sees none (driver too old)"),
    (cluster(node(1, ray_gpus=8.0)), "ray_gpus", "n1", "has 2 usable GPUs, but Ray counts 8"),
    (cluster(node(1, ray_gpus=0.0)), "unused_gpus", "n1", "Ray counts 0"),
    (cluster(node(1, metrics_problem="No module named 'pynvml'")), "no_gpu_metrics", "n1", "has 2 GPUs whose load"),
    (cluster(node(1, gpus=gpus_of(flops=4e14))), "slow_gpu", "n1", "400 TFLOP/s, its peers at 700"),
    (cluster(node(1, versions=VERSIONS | {"torch": ""})), "other_version", "n1", "torch (none)"),
    (cluster(node(1, versions=VERSIONS | {"the NVIDIA driver": "535.1"})), "other_driver", "n1", "driver 535.1"),
    (cluster(*NEWER), "newer_version", "", "ray 2.99rc1 is newer"),
    (cluster(node(1, shm_bytes=64 * 2**20)), "small_shm", "n1", "67 MB"),
    (cluster(node(1, disk_free=GB)), "disk_full", "n1", "1.0 GB free"),
    (cluster(node(0, unreachable=NO_N1), node(2, unreachable=NO_N1)), "cut_link", "n1", "no other node can connect to"),
    (cluster(node(0, unreachable=NO_N1), node(1, unreachable=NO_N0)), "cut_link", "n1", "(host0) cannot connect to 10"),
    (cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=2e10, n2_n0=5e10)), "slow_pair", "n1", "between others 50 GB/s"),
    (cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=5e10, n2_n0=5e10)), "slow_pair", "n1", "and 10.0.0.0 (host0) moves"),
    (cluster(rings=rings(2e10, n0_n1=2e10, n1_n2=2e10, n2_n0=2e10)), "slow_all_reduce", "", "6 workers on 3 nodes"),
    (cluster(rings=(ring("n1", rate=3e10, expected=4.5e11),)), "slow_all_reduce", "n1", "within 10.0.0.1 (host1)"),
    (cluster(rings=(ring("n0", "n1", "n2", ranks=6, backend="", problem="timed out"),)), "all_reduce", "", "timed out"),
    (cluster(node(1, resolves_to="127.0.1.1")), "host_name", "n1", "its own name to 127.0.1.1"),
    (cluster(node(1, resolves_to=None)), "host_name", "n1", "its own name to nothing"),
    (cluster(node(1, storage_problem="Permission denied", storage_seen=None)), "storage", "n1", "Permission denied"),
    (cluster(node(1, storage_seen=("n1",))), "storage_differs", "n1", "each sees only its own"),
    (
        cluster(NodeFacts(node_id="n1", address="10.0.0.1", problem="no answer")),
        "no_answer",
        "n1",
        "10.0.0.1 does not answer",
    ),
]


@pytest.mark.parametrize(("facts", "code", "where", "said"), PLANTED)
def test_a_planted_fault_is_named(facts: ClusterFacts, code: str, where: str, said: str) -> None:
    found = judge(facts)
    assert {finding.code for finding in found} == {code}, "and nothing else is reported"
    assert any(said in finding.sentence for finding in found), [finding.sentence for finding in found]
    assert not where or any(where in finding.nodes for finding in found)
    assert all(finding.remedy for finding in found), "it says what to do"


def test_bad_nodes_are_those_with_critical_findings() -> None:
    assert bad_nodes(judge(cluster(node(1, shm_bytes=0, disk_free=0), node(2, ray_gpus=0.0)))) == ["n1"]


def test_who_takes_part_in_an_all_reduce_and_what_should_come() -> None:
    ranks = choose_ranks(cluster(bare(0), node(1, gpus=gpus_of(processes=("4711",)))))
    assert [(node.node_id, gpu) for node, gpu in ranks] == [("n1", 0), ("n2", 0), ("n2", 1)], "idle GPUs, and no CPU"
    assert [gpu for _, gpu in choose_ranks(cluster(bare(0), bare(1), bare(2)))] == [None] * 3
    cut = cluster(bare(0, unreachable={"n1": "timed out"}), bare(1), bare(2))
    assert [node.node_id for node, _ in choose_ranks(cut)] == ["n2"], "it would hang"
    assert expected_rate(cluster(link_expected=5e10), ("n0", "n1"), "nccl") == 5e10
    assert expected_rate(cluster(link_expected=5e10), ("n0", "n1"), "gloo") is None
    assert expected_rate(cluster(), ("n0", "n1"), "nccl") is None
    assert expected_rate(cluster(), ("n1",), "nccl") == 4.5e11
