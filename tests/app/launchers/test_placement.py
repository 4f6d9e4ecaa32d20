"""Where the ranks of a layout are placed, and what their stages ask for: pure functions."""

import pytest

from app.errors import UserError
from app.launchers.actors import Placement, placement, resources_of_stages
from strategies.layout import ParallelDims
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
