"""What a run asks for in Ray, and what it does while that does not come: it waits, says why, shrinks or ends."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from app.config import ClusterConfig, Config, TrainConfig
from app.config_io import load_config
from app.launchers.ray_launch import resources_to_ask_for, when_over
from app.launchers.room import groups_of_this_job, remove_groups_but
from app.run.prepare import Prepared, with_idle_gpus
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.pending import Diagnosis
from cluster.shape import NodeState, of_nodes
from strategies.parallelize import choose
from tests.running import POINTS, trireme, wait_until


def _cluster(nodes: int, **each: float) -> Cluster:
    found = tuple(
        NodeState("here", "", each | ({} if n else {"node:__internal_head__": 1.0}), {}) for n in range(nodes)
    )
    return Cluster(found, of_nodes(found))


EIGHT, NONE = _cluster(2, GPU=4.0, CPU=16.0), _cluster(1, CPU=8.0)


@pytest.mark.parametrize(
    ("values", "cluster", "expected"),
    [
        (["strategy=single"], EIGHT, (1, {"GPU": 1.0})),
        (["strategy=dp"], EIGHT, (1, {"GPU": 4.0})),
        (["strategy=model_parallel"], EIGHT, (1, {"GPU": 4.0})),
        (["strategy=dp", "resources_per_worker.GPU=2"], EIGHT, (1, {"GPU": 2.0})),
        (["strategy=ddp_model_parallel"], EIGHT, (4, {"GPU": 2.0})),
        (["strategy=ddp"], EIGHT, (8, {"GPU": 1.0})),
        (["strategy=dp"], NONE, (1, {"CPU": 1.0})),
        (["strategy=ddp"], NONE, (2, {"CPU": 1.0})),
    ],
)
def test_the_one_key_is_enough(values: list[str], cluster: Cluster, expected: tuple[int, dict[str, float]]) -> None:
    config = load_config([], ["task=tabular", *values])
    workers, per_worker = resources_to_ask_for(config, cluster)
    assert (workers, per_worker) == expected
    assert choose(config.strategy, workers).dims.world_size == workers


def config(**more: Any) -> Config:
    return Config(train=TrainConfig(global_batch_size=12), cluster=ClusterConfig(**more))


def test_at_the_deadline_it_shrinks_or_ends() -> None:
    held = Diagnosis("bundle 6 of 8 is held", 5, True)
    assert when_over(config(when_pending="shrink"), held, 8) == 4, "the most that the batch divides by"
    too_few = r" \(the largest number that makes a layout is 4, below cluster.min_workers=5\)"
    for more, why in (({}, ""), ({"when_pending": "shrink", "min_workers": 5}, too_few)):
        with pytest.raises(ClusterError, match=rf"there is room for 5 of 8 workers after 600 s{why}: bundle 6 of 8"):
            when_over(config(**more), held, 8)
    with pytest.raises(ClusterError, match="waiting would not help"):
        when_over(config(), Diagnosis("at its limit", 0, False), 8)


def test_gpus_left_idle_are_named() -> None:
    def notes(*given: Any) -> tuple[str, ...]:
        return with_idle_gpus(Prepared(config(), choose("ddp", 8), 1, 1), *given).notes

    assert "computes on CPUs, but the cluster has 8 GPUs" in notes(8, 0, 8, "the cluster")[0]
    assert "4 of this machine's 8 GPUs are not used: workers=4 takes 4" in notes(4, 1.0, 8, "this machine")[0]
    assert notes(8, 1.0, 8, "") == notes(2, 0, 0, "") == ()


@pytest.mark.slow
def test_a_run_says_who_holds_what_it_waits_for(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    assert ray.util.placement_group([{"CPU": 3}]).wait(30), "until this process disconnects"
    run = ["train", *POINTS, "train.steps=4", f"run.storage={tmp_path}", "workers=2", "cluster.wait_seconds=4"]
    ended = trireme(*run, "run.name=ends", env=ray_environment)
    assert ended.code == 2, ended.out + ended.err
    assert "there is room for 1 of 2 workers after 4 s: bundle 2 of 2 (CPU 1) cannot be placed" in ended.err
    assert "3 of 4 CPU are held by job " in ended.err
    smaller = trireme(*run, "run.name=shrinks", "cluster.when_pending=shrink", env=ray_environment)
    assert smaller.code == 0, smaller.out + smaller.err
    assert "continuing with 1 of 2 workers" in smaller.out


@pytest.mark.slow
def test_a_run_gets_no_worker_on_an_excluded_node(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    (only,) = (node["NodeID"] for node in ray.nodes())
    run = ["train", *POINTS, "train.steps=4", "run.name=out", f"run.storage={tmp_path}", "workers=2"]
    ended = trireme(*run, f"cluster.exclude_nodes=[{only}]", env=ray_environment)
    assert ended.code == 2 and "no node has it, the most is CPU 0" in ended.err, ended.out + ended.err


def test_what_an_ended_attempt_waits_for_is_not_left_behind(connected: None) -> None:
    """A group that nobody removes takes the places when they come, and the next attempt waits for ever."""
    group = ray.util.placement_group
    others = [group([{"CPU": 0.5}]), group([{"CPU": 0.5}], name="a user's")]
    kept = groups_of_this_job()
    assert kept == {other.id.hex() for other in others}
    waiting, placed = group([{"CPU": 1000.0}]), group([{"CPU": 0.5}])
    unlike = group([{"CPU": 1000.0, "their_own": 1.0}])
    named = group([{"CPU": 1000.0}], name="another of theirs")
    assert placed.wait(30) and not waiting.wait(0.1)
    remove_groups_but(kept, {"CPU": 1.0, "GPU": 0.0})

    def state(of: PlacementGroup) -> str:
        return placement_group_table(of)["state"]

    wait_until(lambda: state(waiting) == state(placed) == "REMOVED")
    assert state(named) == state(unlike) == "PENDING" and all(other.wait(30) for other in others)
    for each in (*others, named, unlike):
        ray.util.remove_placement_group(each)
