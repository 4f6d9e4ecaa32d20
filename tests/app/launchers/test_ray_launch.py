"""What a run does in Ray while what it asks for does not come, and what it leaves there and finds there."""

import os
from pathlib import Path

import pytest
import ray
from ray.util import placement_group as group
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup

from app.launchers.room import groups_of_this_job, remove_groups_but
from tests.running import POINTS, trireme, wait_until


@pytest.mark.slow
def test_a_run_says_who_holds_what_it_waits_for_and_gets_no_worker_on_an_excluded_node(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    assert group([{"CPU": 3}]).wait(30), "until this process disconnects"
    run = ["train", *POINTS, "train.steps=4", f"run.storage={tmp_path}", "workers=2", "cluster.wait_seconds=4"]
    ended = trireme(*run, "run.name=ends", env=ray_environment)
    assert ended.code == 2, ended.out + ended.err
    assert "there is room for 1 of 2 workers after 4 s: bundle 2 of 2 (CPU 1) cannot be placed" in ended.err
    assert "3 of 4 CPU are held by job " in ended.err
    smaller = trireme(*run, "run.name=shrinks", "cluster.when_pending=shrink", env=ray_environment)
    assert smaller.code == 0, smaller.out + smaller.err
    assert "continuing with 1 of 2 workers" in smaller.out
    (only,) = (node["NodeID"] for node in ray.nodes())
    ended = trireme(*run, "run.name=out", f"cluster.exclude_nodes=[{only}]", env=ray_environment)
    assert ended.code == 2 and "no node has it, the most is CPU 0" in ended.err, ended.out + ended.err


def test_what_an_ended_attempt_waits_for_is_not_left_behind_and_workers_have_the_environment(connected: None) -> None:
    """A group that nobody removes takes the places when they come, and the next attempt waits for ever."""
    others = [group([{"CPU": 0.5}]), group([{"CPU": 0.5}], name="a user's")]
    kept = groups_of_this_job()
    assert kept == {other.id.hex() for other in others}
    waiting, placed = group([{"CPU": 1000.0}]), group([{"CPU": 0.5}])
    unlike = group([{"CPU": 1000.0, "their_own": 1.0}])
    named = group([{"CPU": 1000.0}], name="another of theirs")
    assert placed.wait(30) and not waiting.wait(0.1)
    remove_groups_but(kept, {"CPU": 1.0, "GPU": 0.0})

    def states(*groups: PlacementGroup) -> set[str]:
        return {placement_group_table(each)["state"] for each in groups}

    wait_until(lambda: states(waiting, placed) == {"REMOVED"})
    assert states(named, unlike) == {"PENDING"} and all(other.wait(30) for other in others)
    for each in (*others, named, unlike):
        ray.util.remove_placement_group(each)
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_ALLOC_CONF")
    asked = ray.remote(lambda: [os.environ.get(name) for name in names])
    assert ray.get(asked.remote()) == ["2", "expandable_segments:True"]
