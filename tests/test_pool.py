"""The gloo pool itself: a rank that raises or hangs is named, and the processes are replaced."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import pool
from tests.pool import DistributedFailure, run_distributed

pytestmark = pytest.mark.alone


def _sum(rank: int) -> tuple[int, float]:
    t = torch.tensor(1.0 + rank)
    dist.all_reduce(t)
    return os.getpid(), t.item()


def _fail(rank: int, how: str) -> None:
    if rank == 1 and how == "raises":
        raise ValueError("the cause")
    while rank == 1:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("how", "timeout", "said"),
    [
        ("raises", 60.0, "ValueError: the cause"),
        ("hangs", 2.0, "did not end within 2 s"),
    ],
)
def test_a_failed_rank_is_named_and_replaced(how: str, timeout: float, said: str) -> None:
    first, second = run_distributed(_sum, 2), run_distributed(_sum, 2)
    assert first == second and first[0][1] == 3.0, "processes are kept, groups are not"
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(_fail, 2, how, timeout=timeout)
    assert said in str(caught.value).split("--- rank 1\n")[1]
    assert not pool._workers
    assert run_distributed(_sum, 2)[0][1] == 3.0
