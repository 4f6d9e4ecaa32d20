"""Averages and exchanges through memory that the processes of one machine share."""

import os
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from strategies import collectives
from strategies.cpu_collectives import shared_memory as module
from strategies.cpu_collectives.shared_memory import PIECE_BYTES, shared_memory
from tests.pool import DistributedFailure, run_distributed
from tests.running import environment, tree_without
from tests.strategies.models import CPU, random


def _averaged(rank: int, numbers: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """The average in shared memory, and gloo's, as bits."""
    ours, gloo = (random(numbers, seed=rank).to(dtype) for _ in range(2))
    shared = shared_memory(None, CPU)
    shared.average_(ours)
    shared.close()
    dist.all_reduce(gloo.mul_(1 / dist.get_world_size()))
    return ours.numpy(), gloo.numpy()


ASKED = [(2, 1, torch.float64), (2, PIECE_BYTES + 3, torch.float32), (3, 1000, torch.float32)]


@pytest.mark.parametrize(("ranks", "numbers", "dtype"), ASKED)
def test_all_ranks_get_the_same_bits_in_order_of_rank_and_two_get_gloos(ranks: int, numbers: int, dtype: Any) -> None:
    found = run_distributed(_averaged, ranks, numbers, dtype)
    exact = sum(random(numbers, seed=rank).double() for rank in range(ranks)) / ranks
    for ours, gloo in found:
        assert (ours == found[0][0]).all() and torch.allclose(torch.tensor(ours).double(), exact, rtol=1e-6, atol=1e-7)
        assert ranks > 2 or (ours == gloo).all()


def _exchanged(rank: int, rows: list[list[int]], width: int) -> None:
    """rows[i][j]: how many rank i sends to rank j. What arrives is what gloo brings, the second time too."""
    shared = shared_memory(None, CPU)
    gives, takes = rows[rank], [sent[rank] for sent in rows]
    for seed in (rank, rank + 9):
        given = random((sum(gives), width), seed=seed)
        ours, gloo = (torch.full((sum(takes), width), torch.nan) for _ in range(2))
        shared.all_to_all(ours, given, takes, gives)
        dist.all_to_all_single(gloo, given, takes, gives)
        assert torch.equal(ours, gloo)
    shared.close()


@pytest.mark.parametrize(
    ("rows", "width"),
    [([[1, 2], [0, 3]], 5), ([[2, 0, 1], [700, 1, 0], [0, 0, 0]], 1000), ([[0, 0], [0, 0]], 1)],
    ids=["one piece", "several pieces of one rank's", "nothing"],
)
def test_rows_are_exchanged_as_gloo_does(rows: list[list[int]], width: int) -> None:
    run_distributed(_exchanged, len(rows), rows, width)


def _left_alone(rank: int) -> None:
    shared = shared_memory(None, CPU)
    shared.average_(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    shared.average_(torch.ones(10))


def test_a_rank_that_is_killed_ends_the_others_waiting() -> None:
    with pytest.raises(DistributedFailure, match="the ranks cannot go on together"):
        run_distributed(_left_alone, 2, timeout=60)


def _elsewhere(rank: int) -> tuple[bool, float]:
    """Rank 1 finds another memory than rank 0's under its name, as on another machine."""
    found = (lambda *_: b"another machine's") if rank == 1 else os.pread
    with mock.patch.object(module.os, "pread", found):
        shared = shared_memory(None, CPU)
    count = torch.ones(1)
    dist.all_reduce(count)
    return shared is None, count.item()


def test_ranks_on_several_machines_all_keep_to_gloo() -> None:
    assert run_distributed(_elsewhere, 2) == [(True, 2.0), (True, 2.0)]


@pytest.mark.slow
def test_the_accelerator_can_be_deleted() -> None:
    """And rows of the parity matrix train the same model."""
    test = "tests/strategies/test_parity.py::test_row_trains_the_same_model_and_holds_what_it_costs_to_the_byte"
    rows = [f"{test}[ddp (dp_replicate 2)]", f"{test}[fsdp (dp_shard 2)]"]
    with tree_without("strategies/cpu_collectives") as tree:
        command = [sys.executable, "-m", "pytest", "--noconftest", *rows]
        done = subprocess.run(command, cwd=tree, env=environment(PYTHONPATH=tree), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_it_is_off_with_a_torch_it_was_not_tested_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectives._accelerator("shared_memory") is module
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    assert collectives._accelerator("shared_memory") is None
