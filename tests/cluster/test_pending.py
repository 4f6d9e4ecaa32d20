"""Why is it pending: which bundle, which node type, which limit, who holds it."""

from typing import Any

import pytest

from cluster import ClusterError
from cluster.pending import AutoscalerReport, Diagnosis, check_feasible, diagnose
from cluster.shape import ClusterShape, NodeState, NodeType, node_type

pytestmark = pytest.mark.pure


def _node_type(name: str, *, gpus: int, cpus: float, price: float, nodes: tuple[int, int]) -> NodeType:
    facts = {"gpus": gpus, "cpus": cpus, "price_per_hour": price}
    return node_type(name, [facts], *nodes)


BIG = _node_type("big", gpus=8, cpus=96.0, price=55.0, nodes=(0, 2))
SMALL = _node_type("small", gpus=1, cpus=8.0, price=1.0, nodes=(0, 4))
HEAD = _node_type("head", gpus=0, cpus=4.0, price=0.2, nodes=(1, 1))
SHAPE = ClusterShape(name="c", provider="aws", head=HEAD, workers=(BIG, SMALL), path="my.yaml", max_workers=5)


def node(name: str, kind: str, total: dict[str, float], **used: float) -> NodeState:
    available = {key: amount - used.get(key, 0.0) for key, amount in total.items()}
    return NodeState(address=name, kind=kind, total=total, available=available)


HEAD_NODE = node("10.0.0.1", "head", {"CPU": 4.0})
FULL = node("10.0.0.2", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=8)
FREE = node("10.0.0.3", "big", {"CPU": 96.0, "GPU": 8.0})
HALF = node("10.0.0.4", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=5)
NONE, GROWING = AutoscalerReport(), AutoscalerReport(True)
OTHER = {"job 02 (trireme train b.yaml)": {"GPU": 8.0}}


def why(
    gpus: list[float], *nodes: NodeState, of: str = "GPU", shape: Any = None, report: AutoscalerReport = NONE
) -> Diagnosis | None:
    return diagnose([{of: amount} for amount in gpus], nodes, OTHER, shape, report)


def test_what_fits_is_not_explained() -> None:
    assert why([1.0] * 8, HEAD_NODE, FREE) is None
    assert why([3.0, 8.0], FREE, HALF) is None, "the fuller node takes the smaller bundle"


SMALLS = [node(f"s{i}", "small", {"GPU": 1.0, "CPU": 8.0}) for i in range(5)]
STARTING = AutoscalerReport(True, starting=("10.0.0.8: small, waiting-for-ssh", "10.0.0.9: big, setting-up"))
FAILED = AutoscalerReport(True, failed=("small: x", "big: InsufficientInstanceCapacity (latest_attempt: 14:02:11)"))


@pytest.mark.parametrize(
    ("found", "ever", "placed", "said"),
    [
        (why([4.0], HEAD_NODE, FULL), True, 0, "bundle 1 of 1 (GPU 4) cannot be placed; it could be on 10.0.0.2, but"),
        (why([4.0], HEAD_NODE, FULL), True, 0, "8 of 8 GPU are held by job 02 (trireme train b.yaml)"),
        (why([2.0] * 3, HEAD_NODE, HALF), True, 1, "bundle 2 of 3"),
        (why([16.0], HEAD_NODE, FREE, shape=SHAPE), False, 0, "no node has it, the most is GPU 8"),
        (why([4.0], HEAD_NODE, FREE, of="TPU"), False, 0, "no node has it, the most is TPU 0"),
        (why([8.0], FULL, FULL, shape=SHAPE, report=GROWING), True, 0, "big is at its limit of 2 nodes (my.yaml)"),
        (why([8.0], FULL, FULL, shape=SHAPE, report=GROWING), True, 0, "16 of 16 GPU are held"),
        (why([8.0], *SMALLS, shape=SHAPE, report=GROWING), False, 0, "limit of 5 workers (max_workers in my.yaml)"),
        (why([8.0], shape=SHAPE, report=STARTING), True, 0, "still starting: 10.0.0.9: big, setting-up"),
        (why([8.0], shape=SHAPE, report=FAILED), True, 0, "did not provide such a node (big: InsufficientInstance"),
        (why([8.0], shape=SHAPE, report=GROWING), True, 0, "on big, but the autoscaler has not asked for one yet"),
        # without a file what may come is not known
        (why([2.0], of="CPU", report=GROWING), True, 0, "no node has it, but the autoscaler has not asked for one yet"),
        (why([2.0], of="CPU", report=STARTING), True, 0, "still starting: 10.0.0.8: small"),
    ],
)
def test_what_is_in_the_way(found: Diagnosis | None, ever: bool, placed: int, said: str) -> None:
    assert found is not None and said in found.sentence and (found.ever, found.placed) == (ever, placed)


@pytest.mark.parametrize(
    ("workers", "per_worker", "room"), [("21", {"GPU": 1.0}, 19), ("3", {"GPU": 8.0}, 2), ("400", {"CPU": 1.0}, 220)]
)
def test_a_job_larger_than_the_cluster_can_ever_be(workers: str, per_worker: dict[str, float], room: int) -> None:
    with pytest.raises(ClusterError, match=f"room for {room}"):
        check_feasible(SHAPE, workers, per_worker)
    check_feasible(SHAPE, str(room), per_worker)
    with pytest.raises(ClusterError, match=r"can ever hold a worker of GPU 9: the largest has 8 GPUs"):
        check_feasible(SHAPE, "1", {"GPU": 9.0})
