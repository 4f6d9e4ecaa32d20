"""Other numbers of workers: which make a layout, how many find room, and when to use it."""

from __future__ import annotations

import pytest

from app.config import Config
from app.config_io import load_config
from app.launchers.elastic import Elastic, count_workers, limits_of
from app.launchers.failure_policy import Limits
from app.run.prepare import Prepared, prepare, read_task

NODES: dict[str, dict[str, float]] = {}


def elastic(workers: int, *more: str) -> Elastic:
    config = load_config([], ["task=tests.chain:Chain", "train.steps=5", f"workers={workers}", *more])
    task = read_task(config)

    def prepared(config: Config, workers: int) -> Prepared:
        return prepare(config, task, workers, devices_per_node=None)

    return Elastic(config, prepared(config, workers), {"CPU": 1.0}, prepared, lambda excluded: NODES)


@pytest.mark.parametrize(
    ("workers", "more", "sizes"),
    [
        (4, ["strategy=ddp", "train.global_batch_size=12"], [0, 1, 2, 3, 4, 4]),
        (4, ["strategy=fsdp", "train.global_batch_size=16"], [0, 1, 2, 2, 4, 4]),  # 16 does not divide by 3
        (4, ["strategy=ddp+pipeline", "parallel.pp=2", "train.global_batch_size=12"], [0, 0, 2, 2, 4, 4]),
        (4, ["strategy=ddp", "parallel.dp_replicate=4", "train.global_batch_size=12"], [0, 1, 2, 3, 4, 4]),
    ],
)
def test_whole_groups_and_the_same_global_batch(workers: int, more: list[str], sizes: list[int]) -> None:
    found = elastic(workers, *more)
    assert [found.largest(n) for n in range(len(sizes))] == sizes
    most = max(n for n in sizes if 0 < n < workers)
    prepared = found.prepared(most)
    assert prepared is not None
    config = prepared.config
    dims, first = prepared.layout.dims, found.first.layout.dims
    assert (dims.world_size, dims.pp, dims.tp) == (most, first.pp, first.tp)
    assert config.train.global_batch_size == found.first.config.train.global_batch_size
    share = config.train.global_batch_size // first.dp
    assert config.train.micro_batch_size is not None and config.train.micro_batch_size <= share, "more accumulation"
    assert prepared.steps == found.first.steps


def test_machines_that_come_back_one_after_another_cost_one_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, nodes = [100.0], {"a": {"CPU": 2.0}}
    monkeypatch.setattr("app.launchers.elastic.time.monotonic", lambda: now[0])
    found = elastic(4, "strategy=ddp", "train.global_batch_size=12")
    found.free = lambda excluded: nodes
    said: dict[float, int | None] = {}
    for second in range(100, 112):
        now[0] = float(second)
        nodes |= {"b": {"CPU": 1.0}} if second >= 102 else {}
        nodes |= {"c": {"CPU": 1.0}} if second >= 104 else {}
        said[second] = found.growth(2)
    assert {second for second, more in said.items() if more is None} == set(range(100, 107))
    assert {more for second, more in said.items() if second >= 107} == {4}, "never 3"


def test_room_is_counted_by_node() -> None:
    nodes = {"a": {"CPU": 1.5, "GPU": 2.0}, "b": {"CPU": 0.9}, "c": {"CPU": 8.0, "GPU": 1.0}}
    assert count_workers({"CPU": 0.5}, nodes) == 3 + 1 + 16
    assert count_workers({"CPU": 1.0, "GPU": 1.0}, nodes) == 1 + 0 + 1


def test_where_an_autoscaler_may_add_nodes_it_has_the_time_for_it() -> None:
    config = load_config([], ["task=tests.tasks:Points", "cluster.min_workers=2"])
    assert limits_of(config) == Limits(3, 30.0, 2)
    assert limits_of(config, autoscaling=True) == Limits(3, 600.0, 2)
