"""Why something is pending: which bundle, which node type, which limit, and who holds the rest."""

from random import Random

import pytest

from cluster import ClusterError
from cluster.pending import AutoscalerReport, Diagnosis, check_feasible, diagnose, place
from cluster.shape import ClusterShape, NodeState, NodeType, node_type

pytestmark = pytest.mark.pure


def _node_type(
    name: str, *, gpus: int, cpus: float, price: float, nodes: tuple[int, int]
) -> NodeType:
    facts = {"gpus": gpus, "cpus": cpus, "price_per_hour": price}
    return node_type(name, [facts], *nodes)


SHAPE = ClusterShape(
    name="c",
    provider="aws",
    head=_node_type("head", gpus=0, cpus=4.0, price=0.2, nodes=(1, 1)),
    workers=(
        _node_type("big", gpus=8, cpus=96.0, price=55.0, nodes=(0, 2)),
        _node_type("small", gpus=1, cpus=8.0, price=1.0, nodes=(0, 4)),
    ),
    path="my.yaml",
    max_workers=5,
)


def node(address: str, kind: str, total: dict[str, float], **used: float) -> NodeState:
    available = {name: amount - used.get(name, 0.0) for name, amount in total.items()}
    return NodeState(address=address, kind=kind, total=total, available=available)


HEAD_NODE = node("10.0.0.1", "head", {"CPU": 4.0})
FULL = node("10.0.0.2", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=8)
FREE = node("10.0.0.3", "big", {"CPU": 96.0, "GPU": 8.0})
HALF = node("10.0.0.4", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=5)
SMALL_NODES = [node(f"s{i}", "small", {"GPU": 1.0, "CPU": 8.0}) for i in range(5)]
HOLDERS = {"job 02 (trireme train b.yaml)": {"GPU": 8.0}}

NO_AUTOSCALER = AutoscalerReport()
GROWING = AutoscalerReport(True)
STARTING = AutoscalerReport(
    True, starting=("10.0.0.8: small, waiting-for-ssh", "10.0.0.9: big, setting-up")
)
FAILED = AutoscalerReport(
    True, failed=("small: x", "big: InsufficientInstanceCapacity (latest_attempt: 14:02:11)")
)


def _diagnose(
    amounts: list[float],
    *nodes: NodeState,
    resource: str = "GPU",
    shape: ClusterShape | None = None,
    report: AutoscalerReport = NO_AUTOSCALER,
) -> Diagnosis | None:
    """Why bundles of these amounts are pending on these nodes."""
    bundles = [{resource: amount} for amount in amounts]
    return diagnose(bundles, nodes, HOLDERS, shape, report)


def test_bundles_that_fit_need_no_explanation() -> None:
    assert _diagnose([1.0] * 8, HEAD_NODE, FREE) is None
    assert _diagnose([3.0, 8.0], FREE, HALF) is None, "the fuller node takes the smaller bundle"


def _of_cpu(report: AutoscalerReport) -> Diagnosis | None:
    """Without a cluster file, nobody knows which nodes may come."""
    return _diagnose([2.0], resource="CPU", report=report)


@pytest.mark.parametrize(
    ("diagnosis", "ever", "placed", "words"),
    [
        (
            _diagnose([4.0], HEAD_NODE, FULL),
            True,
            0,
            "bundle 1 of 1 (GPU 4) cannot be placed; it could be on 10.0.0.2, but",
        ),
        (
            _diagnose([4.0], HEAD_NODE, FULL),
            True,
            0,
            "8 of 8 GPU are held by job 02 (trireme train b.yaml)",
        ),
        (_diagnose([2.0] * 3, HEAD_NODE, HALF), True, 1, "bundle 2 of 3"),
        (
            _diagnose([16.0], HEAD_NODE, FREE, shape=SHAPE),
            False,
            0,
            "no node has it, the most is GPU 8",
        ),
        (
            _diagnose([4.0], HEAD_NODE, FREE, resource="TPU"),
            False,
            0,
            "no node has it, the most is TPU 0",
        ),
        (
            _diagnose([8.0], FULL, FULL, shape=SHAPE, report=GROWING),
            True,
            0,
            "big is at its limit of 2 nodes (my.yaml)",
        ),
        (
            _diagnose([8.0], FULL, FULL, shape=SHAPE, report=GROWING),
            True,
            0,
            "16 of 16 GPU are held",
        ),
        (
            _diagnose([8.0], *SMALL_NODES, shape=SHAPE, report=GROWING),
            False,
            0,
            "limit of 5 workers (max_workers in my.yaml)",
        ),
        (
            _diagnose([8.0], shape=SHAPE, report=STARTING),
            True,
            0,
            "still starting: 10.0.0.9: big, setting-up",
        ),
        (
            _diagnose([8.0], shape=SHAPE, report=FAILED),
            True,
            0,
            "did not provide such a node (big: InsufficientInstance",
        ),
        (
            _diagnose([8.0], shape=SHAPE, report=GROWING),
            True,
            0,
            "on big, but the autoscaler has not asked for one yet",
        ),
        (
            _of_cpu(GROWING),
            True,
            0,
            "no node has it, but the autoscaler has not asked for one yet",
        ),
        (_of_cpu(STARTING), True, 0, "still starting: 10.0.0.8: small"),
    ],
)
def test_a_diagnosis_says_what_is_in_the_way(
    diagnosis: Diagnosis | None, ever: bool, placed: int, words: str
) -> None:
    assert diagnosis is not None
    assert words in diagnosis.sentence
    assert diagnosis.ever == ever
    assert diagnosis.placed == placed


@pytest.mark.parametrize(
    ("workers", "per_worker", "room"),
    [("21", {"GPU": 1.0}, 19), ("3", {"GPU": 8.0}, 2), ("400", {"CPU": 1.0}, 220)],
)
def test_a_job_larger_than_the_cluster_can_ever_be_is_refused(
    workers: str, per_worker: dict[str, float], room: int
) -> None:
    with pytest.raises(ClusterError, match=f"room for {room}"):
        check_feasible(SHAPE, workers, per_worker)
    check_feasible(SHAPE, str(room), per_worker)


def test_a_worker_larger_than_any_node_is_refused() -> None:
    sentence = r"can ever hold a worker of GPU 9: the largest has 8 GPUs"
    with pytest.raises(ClusterError, match=sentence):
        check_feasible(SHAPE, "1", {"GPU": 9.0})


def _place_slowly(demand: list[dict[str, float]], nodes: list[NodeState]) -> tuple[int, int | None]:
    """Each bundle on the fullest node with room, by looking at every node."""
    free = [dict(node.available) for node in nodes]
    missing = []
    for number, bundle in enumerate(demand):
        fitting = [
            room
            for room in free
            if all(room.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items())
        ]
        if not fitting:
            missing.append(number)
            continue
        room = min(fitting, key=lambda room: sum(room.get(name, 0.0) for name in bundle))
        for name, amount in bundle.items():
            room[name] = room.get(name, 0.0) - amount
    return len(demand) - len(missing), missing[0] if missing else None


def test_bundles_are_placed_as_if_every_node_were_looked_at() -> None:
    random = Random(7)
    outcomes = set()
    for _ in range(300):
        nodes = [
            node("", "", {"CPU": random.randrange(5), "GPU": random.randrange(3), "memory": i})
            for i in range(random.randrange(1, 8))
        ]
        demand = [
            {name: random.choice((0.0, 0.5, 1.0, 2.0)) for name in names}
            for names in random.choices((["CPU"], ["GPU"], ["CPU", "GPU"]), k=random.randrange(12))
        ]
        outcomes.add(place(demand, nodes))
        assert place(demand, nodes) == _place_slowly(demand, nodes)
    assert len(outcomes) > 20
