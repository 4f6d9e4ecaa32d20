"""How many workers a run asks for and with what, where its ranks are placed, and when there is less: no process."""

from typing import Any

import pytest

from app.config import Config
from app.errors import UserError
from app.launchers.actors import Placement, placement, resources_of_stages
from app.launchers.ray_launch import resources_to_ask_for, when_over
from app.run.prepare import Prepared, with_idle_gpus
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.pending import Diagnosis
from cluster.shape import NodeState, of_nodes
from strategies.layout import ParallelDims
from strategies.parallelize import choose
from tests.chain import config
from tests.cluster.test_pending import node

ONE = {"CPU": 1.0}
EVERYTHING = ("CPU", "GPU", "disk", "net")


@pytest.mark.parametrize(
    ("dims", "cpus", "bundles", "bundle_of_rank"),
    [
        # a copy fits on a node: its stages together, the copies apart
        (ParallelDims(dp_replicate=2, pp=2), [2, 2], [2, 2], [0, 1, 0, 1]),
        # it does not: a stage with its shards together
        (ParallelDims(dp_shard=2, pp=2), [2, 2], [2, 2], [0, 0, 1, 1]),
        # one would, but not both: stages 3 + 3 on nodes of 4 and 2
        (ParallelDims(dp_replicate=2, pp=3), [4, 2], [1] * 6, [0, 3, 1, 4, 2, 5]),
        # not even that
        (ParallelDims(tp=2, pp=2), [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 2, 3]),
    ],
)
def test_what_talks_most_is_placed_together(
    dims: ParallelDims, cpus: list[int], bundles: list[int], bundle_of_rank: list[int]
) -> None:
    found = placement(dims, [ONE] * dims.pp, [node("", "", {"CPU": count}) for count in cpus])
    assert [bundle["CPU"] for bundle in found.bundles] == bundles
    together = [{r for r, b in enumerate(found.bundle_of_rank) if b == own} for own in found.bundle_of_rank]
    assert together == [{r for r, b in enumerate(bundle_of_rank) if b == own} for own in bundle_of_rank]


def test_unlike_stages_get_what_they_ask_for() -> None:
    asked = config("parallel.stage_resources=[{big: 1}, {small: 2, CPU: 0.5}]")
    dims = ParallelDims(pp=2, dp_replicate=2)
    stages = resources_of_stages(asked, dims, ONE)
    assert stages == [{"CPU": 1.0, "big": 1.0}, {"CPU": 0.5, "small": 2.0}]
    chosen = placement(dims, stages, [node("", "", {"CPU": 4, "big": 1, "small": 2})] * 2)
    assert chosen.bundles == [{"CPU": 1.5, "big": 1.0, "small": 2.0}] * 2
    # No node has both kinds, though each resource by itself is on one: a whole copy would wait for ever.
    apart = [node("a", "", {"CPU": 8, "big": 1}), node("b", "", {"CPU": 8, "small": 2})]
    assert placement(ParallelDims(pp=2), stages, apart) == Placement(stages, [0, 1])


def test_room_that_others_hold_just_now_counts_only_if_there_is_no_other() -> None:
    half = [node(name, "", {"CPU": 2}, CPU=1) for name in "ab"]
    assert placement(ParallelDims(pp=2), [ONE] * 2, half).bundles == [ONE, ONE], "now, on two nodes"
    full = [node(name, "", {"CPU": 2}, CPU=2) for name in "ab"]
    assert placement(ParallelDims(pp=2), [ONE] * 2, full).bundles == [{"CPU": 2.0}], "later, on one"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[{CPU: 1}]", "has 1 entries, but there are 2 stages"),
        ("[{CPU: 1}, {CPU: 9}]", r"worker 2 \(stage 1 of 2\) asks for CPU 9, for which no node"),
        ("[{CPU: 1}, {disk: 1, net: 1}]", "asks for CPU 1, disk 1, net 1, for which no node"),
        ("[{GPU: 1}, {CPU: 1}]", "GPUs to some stages and none to others"),
        ("[{CPU: 3}, {CPU: 3}]", "asks for CPU 3, for which no node has room beside the others"),
    ],
)
def test_resources_that_cannot_be_given(asked: str, said: str) -> None:
    wanted = config(f"parallel.stage_resources={asked}")
    dims = ParallelDims(pp=2, dp_replicate=2)
    nodes = [node("a", "", {"CPU": 4, "GPU": 1, "disk": 1}), node("b", "", {"CPU": 4, "GPU": 1, "net": 1})]
    with pytest.raises(UserError, match=said):
        placement(dims, resources_of_stages(wanted, dims, ONE), nodes)
    if "no node" in said:  # but one may yet come, or come back
        assert placement(dims, resources_of_stages(wanted, dims, ONE), nodes, returning=True).bundles
        assert placement(dims, resources_of_stages(wanted, dims, ONE), nodes, dict.fromkeys(EVERYTHING, 99.0)).bundles


def cluster(nodes: int, **each: float) -> Cluster:
    head = {"node:__internal_head__": 1.0}
    found = tuple(NodeState("here", "", each | ({} if number else head), {}) for number in range(nodes))
    return Cluster(found, of_nodes(found))


EIGHT, NONE = cluster(2, GPU=4.0, CPU=16.0), cluster(1, CPU=8.0)


@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        (["strategy=single"], EIGHT, (1, {"GPU": 1.0})),
        (["strategy=dp"], EIGHT, (1, {"GPU": 4.0})),
        (["strategy=dp", "resources_per_worker.GPU=2"], EIGHT, (1, {"GPU": 2.0})),
        (["strategy=ddp_model_parallel"], EIGHT, (4, {"GPU": 2.0})),
        (["strategy=ddp"], EIGHT, (8, {"GPU": 1.0})),
        (["strategy=dp"], NONE, (1, {"CPU": 1.0})),
        (["strategy=ddp"], NONE, (2, {"CPU": 1.0})),
    ],
)
def test_the_one_key_is_enough(values: list[str], found: Cluster, expected: tuple[int, dict[str, float]]) -> None:
    asked = config(*values)
    workers, each = resources_to_ask_for(asked, found)
    assert (workers, each) == expected
    assert choose(asked.strategy, workers).dims.world_size == workers
    if workers == 8:  # a GPU is asked for without CPUs, so that it is placed where none are free
        taken = [node(name, "", {"CPU": 64.0, "GPU": 4.0}, CPU=64.0) for name in "ab"]
        assert placement(ParallelDims(dp_replicate=workers), [each], taken).bundles == [each] * 8


def test_at_the_deadline_it_shrinks_or_ends() -> None:
    def asked(*more: str) -> Config:
        return config("train.global_batch_size=12", *more)

    held = Diagnosis("bundle 6 of 8 is held", 5, True)
    assert when_over(asked("cluster.when_pending=shrink"), held, 8) == 4, "the most that the batch divides by"
    too_few = r" \(the largest number that makes a layout is 4, below cluster.min_workers=5\)"
    for more, why in (([], ""), (["cluster.when_pending=shrink", "cluster.min_workers=5"], too_few)):
        with pytest.raises(ClusterError, match=rf"there is room for 5 of 8 workers after 600 s{why}: bundle 6 of 8"):
            when_over(asked(*more), held, 8)
    with pytest.raises(ClusterError, match="waiting would not help"):
        when_over(asked(), Diagnosis("at its limit", 0, False), 8)


def test_gpus_left_idle_are_named() -> None:
    def notes(*given: Any) -> tuple[str, ...]:
        return with_idle_gpus(Prepared(config(), choose("ddp", 8), 1, 1), *given).notes

    assert "computes on CPUs, but the cluster has 8 GPUs" in notes(8, 0, 8, "the cluster")[0]
    assert "4 of this machine's 8 GPUs are not used: workers=4 takes 4" in notes(4, 1.0, 8, "this machine")[0]
    assert notes(8, 1.0, 8, "") == notes(2, 0, 0, "") == ()
