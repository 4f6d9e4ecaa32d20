"""The gloo pool itself: results by rank, fresh groups, and clear ends for ranks that raise, die or hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import pool
from tests.pool import DistributedFailure, run_distributed

pytestmark = pytest.mark.alone


def _sum(rank: int, x: float) -> tuple[int, float, int]:
    t = torch.tensor(x + rank)
    dist.all_reduce(t)
    return os.getpid(), t.item(), torch.get_num_threads()


def _raise_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError("the cause")
    dist.barrier()


def _die_on(rank: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def _hang_on(rank: int, bad: int) -> None:
    while rank == bad:
        time.sleep(0.1)


def _mesh_sum(rank: int, other_first: bool) -> list[float]:
    """Builds groups in a different order on the same mesh shape, so that remembered groups would be wrong ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if other_first:
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = DTensor.from_local(torch.ones(1) * (rank + 1), mesh, [Shard(0)])
    return (x * 2).redistribute(mesh, [Replicate()]).to_local().tolist()


def _own_group(rank: int) -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size()


def test_either_name_is_the_same_pool() -> None:
    import pool as other

    assert other is pool


def test_results_by_rank_and_processes_are_kept() -> None:
    first = run_distributed(_sum, 2, 1.0)
    assert [r[1:] for r in first] == [(3.0, 1), (3.0, 1)]
    second = run_distributed(_sum, 3, 0.0)
    assert [r[1] for r in second] == [3.0] * 3
    assert [r[0] for r in second[:2]] == [r[0] for r in first]


def test_groups_are_fresh() -> None:
    for other_first in (False, True, False):
        assert run_distributed(_mesh_sum, 2, other_first) == [[2.0, 4.0]] * 2
    assert run_distributed(_own_group, 2, init=False) == [2, 2]


@pytest.mark.parametrize(
    ("func", "timeout", "said"),
    [
        (_raise_on, 60.0, "ValueError: the cause"),
        (_die_on, 60.0, "exit code 7"),
        (_hang_on, 2.0, "rank 1 did not end within 2 s"),
    ],
)
def test_a_failed_rank_is_named_and_replaced(func, timeout, said) -> None:  # type: ignore[no-untyped-def]
    run_distributed(_sum, 2, 0.0)
    started = time.monotonic()
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(func, 2, 1, timeout=timeout)
    assert time.monotonic() - started < 12
    assert "--- rank 1" in str(caught.value) and said in str(caught.value)
    if func is _hang_on:
        assert "_hang_on" in str(caught.value).split("rank 1")[1]
    assert not pool._workers
    assert run_distributed(_sum, 2, 0.0)[0][1] == 1.0
