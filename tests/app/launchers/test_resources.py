"""Where the GPUs are: what is asked for by the one key `strategy`."""

from __future__ import annotations

import pytest

from app.config import Config
from app.config_io import load_config
from app.launchers.ray_launch import resources_to_ask_for
from cluster.connect import Cluster
from cluster.shape import NodeState, of_nodes
from strategies.parallelize import choose


def _cluster(nodes: int, **each: float) -> Cluster:
    found = tuple(
        NodeState("here", "", each | ({} if n else {"node:__internal_head__": 1.0}), {}) for n in range(nodes)
    )
    return Cluster(found, of_nodes(found))


EIGHT, NONE = _cluster(2, GPU=4.0, CPU=16.0), _cluster(1, CPU=8.0)


def _config(*values: str) -> Config:
    return load_config([], ["task=tabular", *values])


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
    config = _config(*values)
    workers, per_worker = resources_to_ask_for(config, cluster)
    assert (workers, per_worker) == expected
    assert choose(config.strategy, workers).dims.world_size == workers
