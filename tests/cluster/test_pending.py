"""Why is it pending: which bundle, which node type, which limit, who holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster import ClusterError
from cluster.files import read_cluster
from cluster.pending import AutoscalerReport, Diagnosis, JobUsage, check_feasible, diagnose
from cluster.shape import ClusterShape, NodeState, NodeType

BIG = NodeType("big", 8, "h100-80gb", 96.0, 0, None, None, 55.0, False, 0, 2)
SMALL = NodeType("small", 1, "l4", 8.0, 0, None, None, 1.0, False, 0, 4)
HEAD = NodeType("head", 0, "", 4.0, 0, None, None, 0.2, False, 1, 1)
SHAPE = ClusterShape("c", "aws", HEAD, (BIG, SMALL), "my.yaml", 5)


def node(name: str, kind: str, total: dict[str, float], **used: float) -> NodeState:
    return NodeState(name, kind, total, {key: amount - used.get(key, 0.0) for key, amount in total.items()})


HEAD_NODE = node("10.0.0.1", "head", {"CPU": 4.0})
FULL = node("10.0.0.2", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=8)
FREE = node("10.0.0.3", "big", {"CPU": 96.0, "GPU": 8.0})
HALF = node("10.0.0.4", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=5)
NOTHING_NEW = AutoscalerReport(True)
OTHER = JobUsage("job 02 (trireme train b.yaml)", {"GPU": 8.0})


def why(demand: list[dict[str, float]], *nodes: NodeState, **more: Any) -> Diagnosis:
    found = diagnose(demand, nodes, **more)
    assert found is not None
    return found


def test_what_fits_is_not_explained() -> None:
    assert diagnose([{"GPU": 1.0}] * 8, [HEAD_NODE, FREE]) is None
    assert diagnose([{"GPU": 3.0}, {"GPU": 8.0}], [FREE, HALF]) is None, "the fuller node takes the smaller bundle"


def test_held_by_another_job() -> None:
    found = why([{"GPU": 4.0}], HEAD_NODE, FULL, usage=[OTHER])
    assert "bundle 1 of 1 (GPU 4) cannot be placed" in found.sentence and found.ever
    assert "8 of 8 GPU are held by job 02 (trireme train b.yaml)" in found.sentence and found.placed == 0


def test_which_bundle_and_how_many_find_room() -> None:
    found = why([{"GPU": 2.0}] * 3, HEAD_NODE, HALF)
    assert found.placed == 1 and "bundle 2 of 3" in found.sentence


def test_no_node_type_has_it() -> None:
    found = why([{"GPU": 16.0}], HEAD_NODE, FREE, shape=SHAPE)
    assert not found.ever and "no node type of my.yaml has it, the most is GPU 8" in found.sentence
    found = why([{"TPU": 4.0}], HEAD_NODE, FREE)
    assert not found.ever and "no node has it, the most is TPU 0" in found.sentence


def test_at_the_limit_of_the_file() -> None:
    found = why(
        [{"GPU": 8.0}], HEAD_NODE, FULL, replace(FULL, address="x"), shape=SHAPE, autoscaler=AutoscalerReport(True)
    )
    assert "big is at its limit of 2 nodes (my.yaml)" in found.sentence
    assert "16 of 16 GPU are held" in found.sentence and found.ever, "who holds them may end"
    smalls = [node(f"s{i}", "small", {"GPU": 1.0, "CPU": 8.0}) for i in range(5)]
    found = why([{"GPU": 8.0}], HEAD_NODE, *smalls, shape=SHAPE, autoscaler=AutoscalerReport(True))
    assert "at its limit of 5 workers (max_workers in my.yaml)" in found.sentence and not found.ever


def test_a_node_is_starting_or_the_cloud_has_none() -> None:
    starting = AutoscalerReport(True, starting=("10.0.0.8: small, waiting-for-ssh", "10.0.0.9: big, setting-up"))
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, autoscaler=starting)
    assert "still starting: 10.0.0.9: big, setting-up" in found.sentence and found.ever
    failed = AutoscalerReport(True, failed=("small: x", "big: InsufficientInstanceCapacity (latest_attempt: 14:02:11)"))
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, autoscaler=failed)
    assert "did not provide such a node (big: InsufficientInstanceCapacity" in found.sentence and found.ever
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, autoscaler=AutoscalerReport(True))
    assert "it could be on big" in found.sentence and "has not asked for one yet" in found.sentence


def test_free_but_scattered() -> None:
    one = node("a", "", {"GPU": 4.0, "CPU": 1.0}, GPU=0, CPU=1)
    found = why([{"GPU": 2.0, "CPU": 1.0}], one)
    assert "1 of 1 CPU are held" in found.sentence


@pytest.mark.parametrize(
    ("workers", "per_worker", "room"),
    [("21", {"GPU": 1.0}, 19), ("3", {"GPU": 8.0}, 2), ("400", {"CPU": 1.0}, 220)],
)
def test_a_job_larger_than_the_cluster_can_ever_be(workers: str, per_worker: dict[str, float], room: int) -> None:
    with pytest.raises(ClusterError, match=f"room for {room}"):
        check_feasible(SHAPE, workers, per_worker)
    check_feasible(SHAPE, str(room), per_worker)


def test_a_worker_larger_than_any_machine() -> None:
    with pytest.raises(ClusterError, match=r"can ever hold a worker of GPU 9: the largest has 8 GPUs"):
        check_feasible(SHAPE, "1", {"GPU": 9.0})


# --- cost -----------------------------------------------------------------------------------------------------------


def test_what_an_autoscaler_may_grow_to() -> None:
    small = replace(SMALL, max_nodes=3)
    assert replace(SHAPE, workers=(BIG, small), max_workers=4).max_on_workers(lambda kind: kind.cpus) == 2 * 96 + 2 * 8
    assert replace(SHAPE, workers=(BIG, small), max_workers=1).max_on_workers(lambda kind: kind.gpus) == 8
    assert replace(SHAPE, workers=(), max_workers=4).max_on_workers(lambda kind: kind.gpus) == 0


def test_own_files_can_hold_what_they_say() -> None:
    check_feasible(read_cluster("aws"), "64", {"GPU": 1.0})
    with pytest.raises(ClusterError, match="room for 64"):
        check_feasible(read_cluster("aws"), "65", {"GPU": 1.0})


def test_from_no_workers_and_without_a_file_it_waits_for_the_autoscaler() -> None:
    head = node("head", "", {"CPU": 0.0})
    found = why([{"CPU": 2.0}] * 2, head, autoscaler=AutoscalerReport(True))
    assert found.ever and "no node has it, but the autoscaler has not asked for one yet" in found.sentence
    found = why([{"CPU": 2.0}], head, autoscaler=AutoscalerReport(True, starting=("small, 1 launching",)))
    assert found.ever and "still starting: small, 1 launching" in found.sentence
