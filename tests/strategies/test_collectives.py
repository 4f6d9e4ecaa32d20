"""Averages through memory that the processes of one machine share."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from strategies import collectives
from strategies.cpu_collectives import shared_memory as module
from strategies.cpu_collectives.shared_memory import PIECE_BYTES, shared_memory_all_reduce
from tests.pool import DistributedFailure, run_distributed
from tests.running import ROOT

CPU = torch.device("cpu")


def _random(rank: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _both(rank: int, numbers: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The average in shared memory, and gloo's, as bits."""
    ours, gloo = _random(rank, numbers, dtype), _random(rank, numbers, dtype)
    shared = shared_memory_all_reduce(None, CPU)
    assert shared is not None
    shared.average_(ours)
    dist.all_reduce(gloo.mul_(1 / dist.get_world_size()))
    shared.close()
    return ours.double().numpy(), gloo.double().numpy()


@pytest.mark.parametrize(("numbers", "dtype"), [(1, torch.float64), (PIECE_BYTES + 3, torch.float32)], ids=str)
def test_two_ranks_get_what_gloo_gives_to_the_last_bit(numbers: int, dtype: torch.dtype) -> None:
    for ours, gloo in run_distributed(_both, 2, numbers, dtype):
        assert np.array_equal(ours, gloo)


def _of_three(rank: int) -> tuple[np.ndarray, list[int]]:
    average, _ = _both(rank, 1000, torch.float32)
    shared = shared_memory_all_reduce(None, CPU)
    assert shared is not None
    everyones = [int(each[0]) for each in shared.gather(torch.full((7,), rank, dtype=torch.uint8))]
    shared.close()
    return average, everyones


def test_of_more_ranks_all_get_the_same_bits_in_order_of_rank() -> None:
    found = run_distributed(_of_three, 3)
    exact = sum(_random(rank, 1000, torch.float64) for rank in range(3)) / 3
    for average, everyones in found:
        assert np.array_equal(average, found[0][0]) and np.allclose(average, exact, rtol=1e-6, atol=1e-7)
        assert everyones == [0, 1, 2]


def _left_alone(rank: int) -> str:
    shared = shared_memory_all_reduce(None, CPU)
    assert shared is not None
    shared.average_(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        shared.average_(torch.ones(10))
    except ConnectionError as error:  # what is returned would be lost with the other rank
        raise AssertionError(f"noticed: {error}") from None
    return "went on"


def test_a_rank_that_is_killed_ends_the_others_waiting() -> None:
    with pytest.raises(DistributedFailure, match="Connection closed by peer"):
        run_distributed(_left_alone, 2, timeout=60)


def _elsewhere(rank: int) -> tuple[bool, float]:
    """Rank 1 finds another memory than rank 0's under its name, as on another machine."""
    own = os.pread
    try:
        if rank == 1:
            module.os.pread = lambda *_: b"another machine's"
        shared = shared_memory_all_reduce(None, CPU)
    finally:
        module.os.pread = own
    count = torch.ones(1)
    dist.all_reduce(count)
    return shared is None, count.item()


def test_ranks_on_several_machines_all_keep_to_gloo() -> None:
    assert run_distributed(_elsewhere, 2) == [(True, 2.0), (True, 2.0)]


def _train(rank: int) -> list[str]:
    from strategies.parallelize import choose, parallelize

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))

    lines = []
    for name in ("ddp", "fsdp"):
        parallel = parallelize(build, choose(name, 2), device=torch.device("cpu"))
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            loss = parallel.forward_backward([torch.randn(8, 7)], [0.5], lambda module, x: module(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            lines.append(f"{name} {step} {float(parallel.total(loss)):.5f}")
    return lines


SCRIPT = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # only the tree it stands in
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
{inspect.getsource(_train)}
print("\\n".join(_train(rank)))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.alone
def test_the_accelerator_can_be_deleted(tmp_path: Path) -> None:
    tree, store = tmp_path / "tree", str(tmp_path / "store")
    without = shutil.ignore_patterns("__pycache__", "cpu_collectives")
    shutil.copytree(ROOT / "strategies", tree / "strategies", ignore=without)
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen([*command, "1", store], cwd=tree, stdout=subprocess.PIPE):
        done = subprocess.run([*command, "0", store], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == run_distributed(_train, 2)[0]


def test_it_is_off_with_a_torch_it_was_not_tested_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectives._accelerator("shared_memory") is module
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    assert collectives._accelerator("shared_memory") is None
