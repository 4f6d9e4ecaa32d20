"""Doctor's judgement on facts: each planted fault is named rightly, and nothing is said where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.doctor.checks import bad_nodes, judge
from app.doctor.facts import ClusterFacts, Finding, GpuFacts, LinkFacts, NodeFacts, RingFacts
from app.doctor.gpu_probe import parse_gpu
from app.doctor.look import rounds
from app.doctor.rings import across, disjoint_pairs, seats_of, within

GB = 1_000_000_000
VERSIONS = {"ray": "2.60.0", "torch": "2.13.0", "numpy": "2.3.0", "mlflow": "3.17.2"}


def gpu(index: int, **more: Any) -> GpuFacts:
    known = {"name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GB, "memory_used": GB // 2, "flops": 7e14}
    return GpuFacts(index, **(known | more))


def node(number: int, **more: Any) -> NodeFacts:
    known: dict[str, Any] = {
        "host": f"host{number}",
        "head": number == 0,
        "ray_gpus": 2.0,
        "torch_gpus": 2,
        "torch_cuda": "12.8",
        "pci_gpus": 2,
        "device_files": 2,
        "driver_loaded": True,
        "driver": "570.133.20",
        "driver_cuda": "12.8",
        "gpus": (gpu(0), gpu(1)),
        "python": "3.11.7",
        "packages": VERSIONS,
        "nccl": "2.27.3",
        "flops": 5e10,
        "interfaces": {"lo": "127.0.0.1", "eth0": f"10.0.0.{number}"},
        "speeds": {"eth0": 1.25e9},
        "asked_interfaces": {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        "resolves_to": f"10.0.0.{number}",
        "storage_seen": ("n0", "n1", "n2"),
    }
    return NodeFacts(f"n{number}", f"10.0.0.{number}", **(known | more))


def bare(number: int, **more: Any) -> NodeFacts:
    """A node without GPUs."""
    nothing = {"ray_gpus": 0.0, "torch_gpus": None, "torch_cuda": None, "pci_gpus": 0, "device_files": 0, "gpus": ()}
    return node(number, **(nothing | {"driver_loaded": False, "driver": "", "driver_cuda": "", "nccl": ""} | more))


def links(*, rate: float = 1e9, **special: LinkFacts) -> tuple[LinkFacts, ...]:
    """All pairs of three nodes; special: by `a_b`, another one."""
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    return tuple(special.get(f"n{a}_n{b}", LinkFacts(f"n{a}", f"n{b}", rate)) for a, b in pairs)


def cluster(*nodes: NodeFacts, **more: Any) -> ClusterFacts:
    whole = {number: node(number) for number in range(3)} | {int(n.node_id[1:]): n for n in nodes}
    known: dict[str, Any] = {"links": links(), "storage": "/mnt/shared", "mlflow": "http://10.0.0.9:5000"}
    return ClusterFacts(tuple(whole.values()), **(known | more))


def gpus_of(**more: Any) -> tuple[GpuFacts, ...]:
    return (gpu(0), gpu(1, **more))


def cut(*pairs: tuple[int, int], problem: str = "timed out") -> tuple[LinkFacts, ...]:
    return links(**{f"n{a}_n{b}": LinkFacts(f"n{a}", f"n{b}", None, problem) for a, b in pairs})


def rings(whole: float, **pairs: float) -> tuple[RingFacts, ...]:
    """All-reduce over all nodes, where 100 GB/s should come, and between pairs, by `a_b`."""
    found = [RingFacts(("n0", "n1", "n2"), 6, "nccl", whole, 1e11)]
    return (*found, *(RingFacts(tuple(key.split("_")), 2, "nccl", rate, 1e11) for key, rate in pairs.items()))


WHOLE = [
    cluster(),
    cluster(rings=(*rings(6e10), RingFacts(("n1",), 2, "nccl", 4e11, 4.5e11), RingFacts(("n2",), 2, "nccl", 1e9))),
    cluster(bare(0), bare(1), bare(2)),  # no GPUs anywhere
    cluster(bare(0)),  # a CPU head
    cluster(node(0, ray_gpus=0.0)),  # a head that keeps its GPUs from Ray
    ClusterFacts((bare(0, resolves_to="127.0.1.1", asked_interfaces={}),)),  # one machine
    cluster(node(1, asked_interfaces={"NCCL_SOCKET_IFNAME": "^lo,docker"})),
    cluster(node(1, packages=VERSIONS | {"torch": "2.13.0"}, python="3.11.9")),
    cluster(node(1, skew=0.3, open_files=65536, flops=4e10)),
    cluster(node(1, gpus=(gpu(0, flops=6.6e14), gpu(1, temperature=78.0)))),
]


@pytest.mark.parametrize("facts", WHOLE)
def test_nothing_is_said_where_nothing_is_wrong(facts: ClusterFacts) -> None:
    assert [str(finding) for finding in judge(facts)] == []


# A planted fault per row: the facts, the code it must be given, the node it must be laid to, and words of the sentence.
PLANTED: list[tuple[ClusterFacts, str, str, str]] = [
    (cluster(node(1, visible="0", torch_gpus=1)), "hidden_gpus", "n1", "CUDA_VISIBLE_DEVICES='0'"),
    (cluster(node(1, visible="", torch_gpus=0, ray_gpus=0.0)), "hidden_gpus", "n1", "shows only 0"),
    (
        cluster(node(1, gpus=(), device_files=0, torch_gpus=None, ray_gpus=0.0, driver="")),
        "no_driver",
        "n1",
        "its container was not given them",
    ),
    (
        cluster(node(1, gpus=(), driver_loaded=False, torch_gpus=None, ray_gpus=0.0, driver="")),
        "no_driver",
        "n1",
        "no NVIDIA driver is loaded",
    ),
    (
        cluster(node(1, gpus=(), smi_error="No devices were found", torch_gpus=0, ray_gpus=0.0, driver="")),
        "no_driver",
        "n1",
        "No devices were found",
    ),
    (cluster(node(1, torch_cuda=None, torch_gpus=0, ray_gpus=0.0)), "cpu_torch", "n1", "built for CPUs only"),
    (
        cluster(*(node(n, torch_gpus=0, ray_gpus=0.0, driver_cuda="11.8") for n in range(3))),
        "old_driver",
        "n1",
        "up to 11.8",
    ),
    (
        cluster(node(1, torch_gpus=0, ray_gpus=0.0, torch_error="CUDA unknown error")),
        "torch_blind",
        "n1",
        "CUDA unknown error",
    ),
    (cluster(node(1, ray_gpus=8.0)), "ray_gpus", "n1", "has 8 GPUs, and torch sees 2"),
    (cluster(node(1, ray_gpus=0.0)), "ray_gpus", "n1", "has 0 GPUs"),
    (cluster(bare(1, ray_gpus=4.0)), "ray_gpus", "n1", "there is none"),
    (cluster(node(1, gpus=gpus_of(mig=True))), "mig", "n1", "GPU 1"),
    (cluster(node(1, gpus=gpus_of(ecc_errors=3))), "ecc", "n1", "3 memory errors"),
    (cluster(node(1, gpus=gpus_of(xids=("Xid 79",)))), "xid", "n1", "Xid 79"),
    (cluster(node(1, gpus=gpus_of(throttled=("thermal",), temperature=93.0))), "throttled", "n1", "93 °C"),
    (cluster(node(1, gpus=gpus_of(processes=("4711 python 10200 MiB",)))), "busy_gpu", "n1", "4711 python"),
    (cluster(node(1, gpus=gpus_of(memory_used=30 * GB))), "memory_taken", "n1", "30.0 GB of 80.0 GB"),
    (cluster(node(1, gpus=gpus_of(flops=4e14))), "slow_gpu", "n1", "400 TFLOP/s"),
    (cluster(node(1, gpus=(gpu(0, name="L4"), gpu(1, name="L4")))), "mixed_gpus", "", "unlike GPUs"),
    (cluster(node(1, python="3.12.1")), "other_version", "n1", "Python 3.12"),
    (cluster(node(1, packages=VERSIONS | {"torch": "2.12.0"})), "other_version", "n1", "torch 2.12.0"),
    (cluster(node(1, packages=VERSIONS | {"ray": "2.59.0"})), "other_version", "n1", "ray 2.59.0"),
    (cluster(node(1, nccl="2.21.5")), "other_version", "n1", "NCCL 2.21.5"),
    (cluster(node(1, driver="535.1")), "other_version", "n1", "driver 535.1"),
    (cluster(node(1, shm_bytes=64 * 2**20)), "small_shm", "n1", "67 MB"),
    (cluster(node(1, open_files=1024)), "few_files", "n1", "1,024 files"),
    (cluster(node(1, disk_free=GB)), "disk_full", "n1", "1.0 GB free"),
    (cluster(node(1, memory_available=GB // 2)), "little_memory", "n1", "500 MB of memory"),
    (cluster(node(1, skew=-40.0)), "clock", "n1", "40 s behind"),
    (cluster(node(1, flops=2e10)), "slow_node", "n1", "20.0 GFLOP/s"),
    (cluster(links=cut((0, 1), (2, 1))), "cut_link", "n1", "no other node reaches 10.0.0.1"),
    (cluster(links=cut((0, 1), (1, 0))), "cut_link", "n1", "10.0.0.0 (host0) does not reach 10.0.0.1"),
    (cluster(links=cut((0, 1), problem="refused")), "closed_port", "n1", "the port is closed"),
    (
        cluster(links=links(n0_n1=LinkFacts("n0", "n1", 1e8))),
        "slow_link",
        "n1",
        "0.8 Gbit/s come through, where 10 should",
    ),
    (
        cluster(
            *(node(n, speeds={}) for n in range(3)),
            links=links(n0_n1=LinkFacts("n0", "n1", 1e8)),
            link_expected=1.25e9,
        ),
        "slow_link",
        "n1",
        "where 10 should",
    ),
    (
        cluster(
            links=(
                *links(),
                *(LinkFacts("n1", "n1", 3e11, gpus=p) for p in ((0, 1), (1, 0), (0, 2))),
                LinkFacts("n1", "n1", 2e10, gpus=(2, 0)),
            )
        ),
        "slow_gpu_link",
        "n1",
        "GPU 2 to 0",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n0_n2=5e10, n1_n2=2e10)),
        "slow_pair",
        "n1",
        "between 10.0.0.1 (host1) and any other node moves at most 20 GB/s, between others 50 GB/s",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n0_n2=5e10, n1_n2=5e10)),
        "slow_pair",
        "n1",
        "between 10.0.0.0 (host0) and 10.0.0.1 (host1) moves 20 GB/s",
    ),
    (
        cluster(rings=rings(2e10, n0_n1=2e10, n0_n2=2e10, n1_n2=2e10)),
        "slow_all_reduce",
        "",
        "over 6 workers on 3 nodes",
    ),
    (
        cluster(rings=(RingFacts(("n1",), 2, "nccl", 3e10, 4.5e11),)),
        "slow_all_reduce",
        "n1",
        "within 10.0.0.1 (host1) moves 30 GB/s, where the hardware gives 450 GB/s",
    ),
    (cluster(rings=(RingFacts(("n0", "n1", "n2"), 6, "", problem="timed out"),)), "all_reduce", "", "timed out"),
    (cluster(node(1, asked_interfaces={"NCCL_SOCKET_IFNAME": "ib0"})), "no_interface", "n1", "it has eth0"),
    (cluster(node(1, asked_interfaces={"GLOO_SOCKET_IFNAME": "eth"})), "no_interface", "n1", "GLOO_SOCKET_IFNAME=eth"),
    (cluster(node(1, asked_interfaces={"NCCL_SOCKET_IFNAME": "lo"})), "loopback", "n1", "is the loopback"),
    (cluster(node(1, resolves_to="127.0.1.1", asked_interfaces={})), "host_name", "n1", "resolves to 127.0.1.1"),
    (cluster(node(1, resolves_to=None)), "host_name", "n1", "does not resolve"),
    (cluster(node(1, storage_problem="Permission denied", storage_seen=None)), "storage", "n1", "Permission denied"),
    (cluster(node(1, storage_seen=("n1",))), "storage_differs", "n1", "each sees only its own"),
    (cluster(node(1, mlflow_problem="Connection refused")), "mlflow", "n1", "Connection refused"),
    (
        cluster(*(node(n, mlflow_problem="Connection refused") for n in range(3))),
        "mlflow",
        "n2",
        "no node reaches MLflow",
    ),
    (cluster(NodeFacts("n1", "10.0.0.1", problem="nothing came back")), "no_answer", "n1", "nothing came back"),
]


@pytest.mark.parametrize(
    ("facts", "code", "where", "said"), PLANTED, ids=[f"{r[1]}-{i}" for i, r in enumerate(PLANTED)]
)
def test_a_planted_fault_is_named(facts: ClusterFacts, code: str, where: str, said: str) -> None:
    found = judge(facts)
    named = [finding for finding in found if finding.code == code]
    assert named, [str(finding) for finding in found]
    assert any(said in finding.sentence for finding in named), [finding.sentence for finding in named]
    assert not where or any(where in finding.nodes for finding in named)
    assert all(finding.mend for finding in named), "it says what to do"
    assert {finding.code for finding in found} == {code}, "and nothing else is reported"


def test_at_least_fifteen_kinds_of_faults_are_planted() -> None:
    assert len({row[1] for row in PLANTED}) >= 15


def test_bad_nodes_are_those_with_grave_faults() -> None:
    facts = cluster(node(1, skew=60.0), node(2, open_files=1024))
    assert bad_nodes(judge(facts)) == ["n1"]
    assert bad_nodes([Finding("x", "", "", ("a", "b")), Finding("y", "", "", ("b",))]) == ["a", "b"]


def test_two_faults_on_one_node_are_two_findings() -> None:
    found = judge(cluster(node(1, skew=60.0, disk_free=0)))
    assert {finding.code for finding in found} == {"clock", "disk_full"}


@pytest.mark.parametrize("count", [2, 3, 16, 17, 100])
def test_in_a_round_every_node_sends_once_and_hears_once(count: int) -> None:
    pairs = rounds(count)
    for one in pairs:
        assert sorted(a for a, _ in one) == sorted(b for _, b in one) == list(range(count))
    measured = {pair for one in pairs for pair in one}
    assert len(measured) == (count * (count - 1) if count <= 16 else 2 * count)
    assert all(a != b for a, b in measured)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_pairs_are_measured_without_one_disturbing_another(count: int) -> None:
    rounds = disjoint_pairs(count)
    for one in rounds:
        members = [member for pair in one for member in pair]
        assert len(members) == len(set(members))
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2


def test_who_takes_part_in_an_all_reduce_and_what_should_come() -> None:
    seats = [
        (node.node_id, gpu) for node, gpu in seats_of(cluster(bare(0), node(1, gpus=gpus_of(processes=("4711",)))))
    ]
    assert seats == [("n1", 0), ("n2", 0), ("n2", 1)], "no CPU beside GPUs, and no GPU that works for somebody"
    assert [gpu for _, gpu in seats_of(cluster(bare(0), bare(1), bare(2)))] == [None] * 3
    dead = cluster(bare(0), bare(1), bare(2), links=cut((0, 1)))
    assert [node.node_id for node, _ in seats_of(dead)] == ["n2"], "it would hang"
    assert across(cluster(), ["n0", "n1"], "nccl") == 1.25e9 and across(cluster(), ["n0", "n1"], "gloo") == 1e9
    assert across(cluster(link_expected=5e10), ["n0", "n1"], "nccl") == 5e10
    assert across(cluster(node(1, speeds={})), ["n0", "n1"], "nccl") is None
    assert within(cluster(), ["n1"], "nccl") == 4.5e11


def test_what_nvidia_smi_says_is_read() -> None:
    line = "1, NVIDIA A100-SXM4-80GB, 81920, 5120, 2, 65, Enabled, Active, Not Active, Active, GPU-abc"
    row = parse_gpu(line, {"GPU-abc": ["12 python 5000 MiB"]}, {1: ["Xid 48"]})
    facts = replace(GpuFacts(0), **{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    assert facts.index == 1 and facts.memory_total == 80 * 2**30 and facts.memory_used == 5 * 2**30
    assert facts.ecc_errors == 2 and facts.mig and facts.temperature == 65
    assert facts.throttled == ("thermal", "power brake")
    assert facts.processes == ("12 python 5000 MiB",) and facts.xids == ("Xid 48",)
    quiet = parse_gpu("0, T4, 15360, 0, [N/A], 40, [N/A], Not Active, Not Active, Not Active, GPU-x", {}, {})
    assert quiet["ecc_errors"] == 0 and not quiet["mig"] and quiet["throttled"] == []
