"""A mixture's experts over workers: routing, bytes that are sent, checkpoints of any layout.

test_parity.py compares training and what ranks hold.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.parity import curves
from experiments.parity.curves import Curve
from experiments.parity.rows import SINGLE, Row
from strategies.activation_checkpointing import is_kept
from strategies.expert.exchange import Exchange, exchanged_bytes
from strategies.layout import choose
from strategies.mixtures import find_mixtures, shard_dim
from strategies.parallelize import Options, parallelize
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import (
    CPU,
    EXPERTS,
    MIXTURE_LAYERS,
    PlainGPT,
    assert_refused,
    mixture_trial,
)


def _train(row: Row, micro_batches: int, steps: range | None = None, **folders: str) -> Curve:
    trial = mixture_trial(steps=4, micro_batches=micro_batches, clip=0.5)
    return curves.train(trial, row.layout, Options(), CPU, steps=steps, **folders)


def _train_on_4_and_then_2_shards(rank: int, folder: str) -> None:
    """Leave a checkpoint of experts over 4 workers, and continue it with experts over 2."""
    over_4 = Row("fsdp+expert", 4, {"ep": 4})
    over_2 = Row("ddp+tensor+expert", 4, {"tp": 2, "ep": 2})
    _train(over_4, 2, range(2), save=f"{folder}/4")
    _train(over_2, 2, range(2, 3), load=f"{folder}/4", save=f"{folder}/2")


@pytest.mark.alone
@pytest.mark.slow
def test_training_does_not_depend_on_micro_batches_or_the_checkpoints_layout(
    tmp_path: Path,
) -> None:
    one_batch = _train(SINGLE, 1)
    two_batches = _train(SINGLE, 2)
    assert curves.difference(one_batch, two_batches).within(1e-6)
    largest_bias = 0.0
    for name, value in one_batch.weights.items():
        if "router.b" in name:
            assert torch.equal(value, two_batches.weights[name])
        if name.endswith("router.bias"):
            largest_bias = max(largest_bias, value.abs().max().item())
    # Each step moves a bias up or down, so that after four steps some are 0 again.
    assert largest_bias > 0.005, "no bias has moved"
    run_distributed(_train_on_4_and_then_2_shards, 4, str(tmp_path))
    last_step = _train(SINGLE, 2, range(3, 4), load=f"{tmp_path}/2")
    expected = Curve(two_batches.losses[3:], two_batches.norms[3:], two_batches.weights)
    assert curves.difference(expected, last_step).within(1e-6)


def _exchange_where_all_choose_the_first(rank: int) -> tuple[list[float], float]:
    """The gradients of the tokens, and of this worker's expert."""
    x = torch.ones(3, 1, requires_grad=True)
    scale = torch.tensor(2.0 + rank, requires_grad=True)
    index = torch.zeros(3, 1, dtype=torch.long)
    weights = torch.full((3, 1), 0.5)
    exchange = Exchange(dist.group.WORLD, 2)  # type: ignore[arg-type]
    y = exchange(lambda rows, *_: rows * scale, x, index, weights)
    y.sum().backward()
    assert x.grad is not None
    assert scale.grad is not None
    return x.grad.flatten().tolist(), scale.grad.item()


@pytest.mark.alone
def test_a_worker_whose_experts_nobody_chose_takes_part_in_backward() -> None:
    results = run_distributed(_exchange_where_all_choose_the_first, 2, timeout=30)
    assert results == [([1.0, 1.0, 1.0], 3.0), ([1.0, 1.0, 1.0], 0.0)]


def _exchanged_bytes_of_a_step(rank: int, row: Row, mode: str) -> tuple[int, int]:
    """The bytes of rows and of counts that this rank gives into all-to-alls in a step."""
    options = Options(activation_checkpointing=mode)
    parallel = parallelize(mixture_trial().build, row.layout, options, device=CPU)
    row_bytes = 0
    count_bytes = 0
    all_to_all = dist.all_to_all_single

    def measured(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal row_bytes, count_bytes
        if input.is_floating_point():
            row_bytes += input.nbytes
        else:
            count_bytes += input.nbytes
        return all_to_all(output, input, *args, **kwargs)

    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with mock.patch.object(dist, "all_to_all_single", measured):
        curves.run_steps(mixture_trial(), parallel, optimizer, range(1))
    return row_bytes, count_bytes


@pytest.mark.alone
@pytest.mark.parametrize(
    ("ep", "mode", "forwards"),
    [
        pytest.param(4, "none", 1, marks=pytest.mark.slow),
        (2, "full", 2),
        pytest.param(2, "selective", 2, marks=pytest.mark.slow),
    ],
)
def test_the_exchanged_bytes_are_those_of_the_cost(ep: int, mode: str, forwards: int) -> None:
    row = Row("ddp+expert", 4, {"ep": ep})
    sent = run_distributed(_exchanged_bytes_of_a_step, 4, row, mode)
    tokens = models.BATCH * models.SEQUENCE // 4
    cost_of_layer = exchanged_bytes(tokens, models.TOP_K, models.EXPERT_WIDTH, 4)
    cost = MIXTURE_LAYERS * cost_of_layer * (1 + forwards) // 2
    assert sum(row_bytes for row_bytes, _ in sent) == 4 * cost
    int64_bytes = 8
    expected_count_bytes = MIXTURE_LAYERS * EXPERTS * int64_bytes * forwards
    assert [count_bytes for _, count_bytes in sent] == [expected_count_bytes] * 4


@pytest.mark.pure
def test_selective_recomputation_keeps_the_products_of_experts() -> None:
    assert is_kept(torch.ops.trireme.grouped_linear.default)


@pytest.mark.pure
@pytest.mark.parametrize(("shards", "dim"), [(1, 0), (2, 0), (4, 0), (8, 1), (5, 0)])
def test_more_shards_than_experts_split_their_rows(shards: int, dim: int) -> None:
    assert shard_dim((4, 24, 16), shards) == dim


def _router_metrics(rank: int, row: Row) -> dict[str, list[float]]:
    parallel = parallelize(mixture_trial().build, row.layout, device=CPU)
    optimizer = parallel.prepare_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.0))
    curves.run_steps(mixture_trial(micro_batches=2), parallel, optimizer, range(1))
    return parallel.router_metrics()


@pytest.mark.alone
def test_router_metrics_are_those_of_the_global_batch_and_nothing_is_dropped() -> None:
    expected = _router_metrics(0, SINGLE)
    row = Row("ddp+expert", 2, {"ep": 2})
    metrics, metrics_of_rank_1 = run_distributed(_router_metrics, 2, row)
    assert metrics == metrics_of_rank_1
    assert len(expected) == MIXTURE_LAYERS
    for name, (*load, entropy, dropped) in expected.items():
        assert sum(load) == pytest.approx(EXPERTS)
        assert 0.5 < entropy <= 1
        assert dropped == 0
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9)


@pytest.mark.pure
def test_a_model_without_experts_has_no_mixtures() -> None:
    assert find_mixtures(PlainGPT()) == []


@pytest.mark.pure
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_the_mixtures_of_transformers_are_found_by_their_form(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, num_hidden_layers=4)
    with torch.device("meta"):
        mixtures = find_mixtures(AutoModelForCausalLM.from_config(config))
    assert mixtures
    for mixture in mixtures:
        assert mixture.router is not None
        assert mixture.top_k == config.num_experts_per_tok


@pytest.mark.pure
def test_a_degree_that_does_not_divide_the_experts_is_refused() -> None:
    words = ["parallel.ep is 3", "8 experts", "1, 2, 4, 8"]
    assert_refused(words, parallelize, models.mixture, choose("ddp", 3, ep=3), device=CPU)
