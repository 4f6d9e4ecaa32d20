"""A mixture's experts over workers: routing, to the byte what is sent, from any layout to any. That training is the
same, and what is held: test_parity.py."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
from tests.strategies.models import CPU, EXPERTS, MIXTURE_LAYERS, PlainGPT, assert_refused, mixture_trial


def _train(micro_batches: int, row: Row, steps: range | None = None, **folders: str) -> Curve:
    trial = mixture_trial(steps=4, micro_batches=micro_batches, clip=0.5)
    return curves.train(trial, row.layout, Options(), CPU, steps=steps, **folders)


def _continued(rank: int, folder: str) -> None:
    """From experts over 4 workers to such over 2."""
    _train(2, Row("fsdp+expert", 4, {"ep": 4}), range(2), save=f"{folder}/4")
    _train(2, Row("ddp+tensor+expert", 4, {"tp": 2, "ep": 2}), range(2, 3), load=f"{folder}/4", save=f"{folder}/2")


@pytest.mark.alone
@pytest.mark.slow
def test_however_the_batch_is_divided_and_from_any_layouts_checkpoint_training_is_the_same(tmp_path: Any) -> None:
    whole, truth = _train(1, SINGLE), _train(2, SINGLE)
    assert curves.difference(whole, truth).within(1e-6)
    biases = [value for name, value in whole.weights.items() if name.endswith("router.bias")]
    assert all(bias.abs().max() > 0.005 for bias in biases), "and the biases have moved"
    assert all(torch.equal(value, truth.weights[name]) for name, value in whole.weights.items() if "router.b" in name)
    run_distributed(_continued, 4, str(tmp_path))
    end = _train(2, SINGLE, range(3, 4), load=f"{tmp_path}/2")
    assert curves.difference(Curve(truth.losses[3:], truth.norms[3:], truth.weights), end).within(1e-6)


def _all_choose_the_first(rank: int) -> tuple[list[float], float]:
    x, scale = torch.ones(3, 1, requires_grad=True), torch.tensor(2.0 + rank, requires_grad=True)
    index, weights = torch.zeros(3, 1, dtype=torch.long), torch.full((3, 1), 0.5)
    y = Exchange(dist.group.WORLD, 2)(lambda rows, *_: rows * scale, x, index, weights)  # type: ignore[arg-type]
    y.sum().backward()
    return x.grad.flatten().tolist(), scale.grad.item()


@pytest.mark.alone
def test_a_worker_whose_experts_nobody_chose_takes_part_in_backward() -> None:
    assert run_distributed(_all_choose_the_first, 2, timeout=30) == [([1.0] * 3, 3.0), ([1.0] * 3, 0.0)]


def _sent(_: int, row: Row, mode: str) -> list[int]:
    """Bytes of the rows that this rank gives into all-to-alls, and of the counts."""
    parallel = parallelize(mixture_trial().build, row.layout, Options(activation_checkpointing=mode), device=CPU)
    given, real = [0, 0], dist.all_to_all_single

    def noting(output: torch.Tensor, input: torch.Tensor, *args: Any, **named: Any) -> Any:
        given[not input.is_floating_point()] += input.nbytes
        return real(output, input, *args, **named)

    with mock.patch.object(dist, "all_to_all_single", noting):
        curves.run_steps(mixture_trial(), parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), range(1))
    return given


@pytest.mark.alone
@pytest.mark.parametrize(("ep", "mode", "forwards"), [(4, "none", 1), (2, "full", 2), (2, "selective", 2)])
def test_what_is_exchanged_is_what_it_costs_to_the_byte(ep: int, mode: str, forwards: int) -> None:
    sent = run_distributed(_sent, 4, Row("ddp+expert", 4, {"ep": ep}), mode)
    tokens = models.BATCH * models.SEQUENCE // 4
    rows = MIXTURE_LAYERS * exchanged_bytes(tokens, models.TOP_K, models.EXPERT_WIDTH, 4)
    assert sum(rows for rows, _ in sent) == 4 * rows * (1 + forwards) // 2
    assert [counts for _, counts in sent] == [MIXTURE_LAYERS * EXPERTS * 8 * forwards] * 4


@pytest.mark.pure
def test_selective_recomputation_keeps_experts_products_and_many_shards_share_few_experts_by_rows() -> None:
    assert is_kept(torch.ops.trireme.grouped_linear.default)
    assert [shard_dim((4, 24, 16), ways) for ways in (1, 2, 4, 8, 5)] == [0, 0, 0, 1, 0]


def _load(_: int, row: Row) -> dict[str, list[float]]:
    parallel = parallelize(mixture_trial().build, row.layout, device=CPU)
    optimizer = parallel.prepare_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.0))
    curves.run_steps(mixture_trial(micro_batches=2), parallel, optimizer, range(1))
    return parallel.router_metrics()


@pytest.mark.alone
def test_load_and_entropy_are_the_global_batchs_and_nothing_is_dropped() -> None:
    alone, (here, there) = _load(0, SINGLE), run_distributed(_load, 2, Row("ddp+expert", 2, {"ep": 2}))
    assert len(alone) == MIXTURE_LAYERS and here == there
    for name, (*load, entropy, dropped) in alone.items():
        assert sum(load) == pytest.approx(EXPERTS) and 0.5 < entropy <= 1 and dropped == 0
        assert here[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-9)


@pytest.mark.pure
def test_mixtures_are_told_by_their_looks() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        assert find_mixtures(PlainGPT()) == []
        for kind in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3"):
            config = AutoConfig.for_model(kind, num_hidden_layers=4)
            found = find_mixtures(AutoModelForCausalLM.from_config(config))
            assert found and all(each.router is not None for each in found)
            assert {each.top_k for each in found} == {config.num_experts_per_tok}


@pytest.mark.pure
def test_what_cannot_be_split_is_refused() -> None:
    words = ["parallel.ep is 3", "8 experts", "1, 2, 4, 8"]
    assert_refused(words, parallelize, models.mixture, choose("ddp", 3, ep=3), device=CPU)
