"""The gloo pool itself: a rank that hangs is named, and the processes are replaced."""

from __future__ import annotations

import os
import time

import pytest

from tests.pool import DistributedFailure, run_distributed

pytestmark = pytest.mark.alone


def _process(rank: int, hangs: bool) -> int:
    while hangs and rank == 1:
        time.sleep(0.1)
    return os.getpid()


def test_a_rank_that_hangs_is_named_and_replaced() -> None:
    first = run_distributed(_process, 2, False)
    assert run_distributed(_process, 2, False) == first, "processes are kept"
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(_process, 2, True, timeout=2.0)
    assert "did not end within 2 s" in str(caught.value).split("--- rank 1\n")[1]
    assert not set(run_distributed(_process, 2, False)) & set(first)
