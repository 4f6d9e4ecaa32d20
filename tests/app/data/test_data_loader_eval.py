"""Evaluation batches, and batches on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.loader import eval_batches, train_batches
from tests.app.data.test_data_loader import CPU, Plain, ReadyBatches, load, numbers


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 30), batch=st.integers(1, 9), dp_size=st.integers(1, 5))
def test_evaluation_counts_every_sample_once(n: int, batch: int, dp_size: int) -> None:
    ranks = [
        list(eval_batches(ReadyBatches(n), batch_size=batch, dp_rank=rank, dp_size=dp_size, device=CPU))
        for rank in range(dp_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    counted = [number for rank in ranks for (_, index), weight in rank if weight for number in index.tolist()]
    assert counted == list(range(n))
    total = sum(weight for rank in ranks for _, weight in rank)
    assert total == n
    if n:
        mean = sum(weight * inputs.mean().item() for rank in ranks for (inputs, _), weight in rank) / total
        assert mean == pytest.approx((n - 1) / 2)
    assert all(len(index) > 0 for rank in ranks for (_, index), _ in rank)


def test_evaluation_ranks_with_less_data_get_weightless_batches() -> None:
    ranks = [list(eval_batches(Plain(5), batch_size=1, dp_rank=r, dp_size=2, device=CPU)) for r in range(2)]
    assert [weight for _, weight in ranks[0]] == [1.0, 1.0, 1.0]
    assert [weight for _, weight in ranks[1]] == [1.0, 1.0, 0.0]


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_unharmed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    steps = train_batches(
        ReadyBatches(1000), seed=0, global_batch_size=64, micro_batch_size=16, dp_rank=0, dp_size=1,
        samples_seen=0, steps=200, device=device,
    )  # fmt: skip
    wanted = load(ReadyBatches(1000), batch=64, steps=200, seed=0, micro_batch_size=16)
    for step, expected in zip(steps, wanted, strict=True):
        assert step[0][0].device == device
        assert numbers(step) == numbers(expected)
