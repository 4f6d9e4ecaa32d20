"""Costs, computed by hand. test_parity.py compares them with what ranks really hold."""

import pytest
import torch
from torch import nn

from app.config.check import OPTIMIZERS
from app.config.schema import OptimizerConfig
from app.training.optimizer import build_optimizer
from strategies import costs, fsdp, registry
from strategies.costs import (
    Collective,
    Cost,
    ModelSize,
    ParameterSize,
    StepShape,
    part_of,
    rank_size,
    replicated,
    unit_size,
)
from strategies.parallelize import Options, choose
from tests.layout_cost import layout_cost
from tests.strategies.models import mixture

pytestmark = pytest.mark.pure

SIZES = (
    ParameterSize("embed", (8, 4)),
    ParameterSize("a.weight", (4, 4), unit="a", split_dim=0),
    ParameterSize("b.weight", (4, 4), unit="b", split_dim=1),
    ParameterSize("c.weight", (4, 4), unit="c"),
)
ROOT_BYTES = 4 * 32
BLOCK_BYTES = 4 * 16
BYTES = ROOT_BYTES + 3 * BLOCK_BYTES


def _cost(
    strategy: str,
    workers: int,
    options: Options | None = None,
    *,
    micro_batches: int = 1,
    **degrees: int,
) -> Cost:
    layout = choose(strategy, workers, **degrees)
    cost, _ = layout_cost(layout, SIZES, options, micro_batches)
    return cost


def _sent(
    strategy: str,
    workers: int,
    options: Options | None = None,
    *,
    micro_batches: int = 1,
    **degrees: int,
) -> dict[str, int]:
    """The bytes that a rank sends per step, by collective."""
    layout = choose(strategy, workers, **degrees)
    _, sent = layout_cost(layout, SIZES, options, micro_batches)
    return sent


# --- sizes ----------------------------------------------------------------------------------------


def test_the_size_of_a_model_has_its_parameters_and_buffers() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Linear(4, 2, bias=False),
            "ab": nn.Embedding(8, 4),
            "c": nn.BatchNorm1d(3),
        }
    ).half()
    model["ab"].requires_grad_(False)
    model["c"].running_var = None
    parameters = (
        ParameterSize("a.weight", (2, 4), itemsize=2, unit="a", split_dim=1),
        ParameterSize("ab.weight", (8, 4), itemsize=2, trainable=False),
        ParameterSize("c.weight", (3,), itemsize=2),
        ParameterSize("c.bias", (3,), itemsize=2),
    )
    running_mean_bytes = 3 * 2
    batch_count_bytes = 8
    expected = ModelSize(parameters, running_mean_bytes + batch_count_bytes)
    assert costs.model_size(model, ["a"], {"a.weight": 1}) == expected
    linear_parameters = (ParameterSize("weight", (1, 1)), ParameterSize("bias", (1,)))
    assert costs.model_size(nn.Linear(1, 1)) == ModelSize(linear_parameters)


def test_the_size_of_a_model_knows_which_parameters_are_experts() -> None:
    parameters = costs.model_size(mixture()).parameters
    assert {p.name.split(".")[-2] for p in parameters if p.is_expert} == {"experts"}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((10, 4), 0), ((9, 4), 1), ((9, 3), None), ((9,), None), ((), None), ((3, 3), None)],
)
def test_fsdp_does_not_split_uneven_rows_of_tensor_parallelism(
    shape: tuple[int, ...], expected: int | None
) -> None:
    """It splits columns if workers get equally many, and otherwise nothing."""
    is_uneven = shape[:1] in ((9,), (3,))
    assert fsdp.fsdp_dim(shape, is_uneven, 2) == expected


def test_gradients_that_fsdp_does_not_split_are_averaged_by_all_reduces() -> None:
    part = part_of(ParameterSize("bias", (9,), split_dim=0), 2)
    assert part.is_uneven
    assert not part_of(ParameterSize("bias", (8,), split_dim=0), 2).is_uneven
    sent = fsdp.collectives(unit_size((part,), 2), StepShape(dp_shard=2))
    five_float32 = 5 * 4
    assert [collective for collective in sent if collective.bytes] == [
        Collective(name="all_reduce", over=over, bytes=five_float32, times=1, phase="backward")
        for over in ("dp_shard", "dp_replicate")
    ]


def test_expert_parallelism_splits_experts_after_tensor_parallelism() -> None:
    weight = ParameterSize("w", (4, 7), split_dim=1, is_expert=True)
    assert part_of(weight, 2, 1).shape == (4, 4)
    assert part_of(weight, 2, 2).shape == (2, 4)
    assert not part_of(weight, 2).is_uneven
    assert part_of(ParameterSize("w", (4, 7)), 2, 2).shape == (4, 7)


def test_experts_are_split_over_shards_of_their_own() -> None:
    experts = (
        ParameterSize("few", (2, 8), is_expert=True),
        ParameterSize("many", (8, 2), is_expert=True),
    )
    others = (ParameterSize("w", (4, 4)), ParameterSize("frozen", (4, 4), trainable=False))
    size = unit_size((*experts, *others), 4, expert_shards=2)
    assert size.sharded_parameters == 4 * 24
    assert size.sharded_gradients == 4 * 20
    assert size.whole_gradients == 0
    assert size.gathered == 64
    assert unit_size(experts, 4).sharded_parameters == 4 * (8 + 4)
    # "few" is split along its second dimension.
    assert unit_size(experts, 4, expert_shards=4).sharded_parameters == 4 * (4 + 4)


# --- what is sent ---------------------------------------------------------------------------------


def test_bytes_that_are_sent_per_step() -> None:
    assert _sent("single", 1) == {}
    assert _sent("ddp", 4) == {"all_reduce": BYTES * 2 * 3 // 4}
    assert _sent("ddp", 4, Options(reduce_dtype="bf16")) == {"all_reduce": BYTES * 3 // 4}
    assert _sent("fsdp", 4) == {
        "all_gather": (ROOT_BYTES + 2 * 3 * BLOCK_BYTES) * 3 // 4,
        "reduce_scatter": BYTES * 3 // 4,
    }
    assert _sent("zero1", 4) == {"all_gather": BYTES * 3 // 4, "reduce_scatter": BYTES * 3 // 4}
    assert _sent("hsdp", 4, dp_shard=2)["all_reduce"] == BYTES // 2


def test_accumulation_communicates_once_unless_shards_are_accumulated() -> None:
    assert _sent("ddp", 2) == _sent("ddp", 2, micro_batches=4)
    zero1 = _sent("zero1", 2, micro_batches=4)
    zero2 = _sent("zero2", 2, micro_batches=4)
    assert zero2["reduce_scatter"] == 4 * zero1["reduce_scatter"]
    assert zero1["all_gather"] == zero2["all_gather"] == BYTES // 2
    fsdp_gathers = _sent("fsdp", 2, micro_batches=4)["all_gather"]
    assert fsdp_gathers == (4 * ROOT_BYTES + 8 * 3 * BLOCK_BYTES) // 2
    options = Options(accumulate_sharded=True)
    pipelined = _sent("fsdp", 4, options, micro_batches=4, pp=2)
    assert pipelined["reduce_scatter"] == BYTES // 2, "a stage reduces once"
    zero1_transient = _cost("zero1", 2, micro_batches=2).transient
    zero2_transient = _cost("zero2", 2, micro_batches=2).transient
    assert zero1_transient - zero2_transient == BYTES, "zero1 keeps whole gradients"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", ["dp_replicate backward"]),
        ("dp", ["devices forward", "devices backward"]),
        (
            "fsdp",
            [
                "dp_shard forward",
                "dp_shard backward",
                "dp_shard backward",
                "dp_replicate backward",
            ],
        ),
    ],
)
def test_each_collective_has_its_workers_and_its_phase(strategy: str, expected: list[str]) -> None:
    sent = registry.find(strategy).collectives(unit_size(SIZES, 2), StepShape(dp_shard=2))
    assert [f"{collective.over} {collective.phase}" for collective in sent] == expected


# --- what is held ---------------------------------------------------------------------------------


def test_freeing_after_forward_holds_the_root_and_two_blocks() -> None:
    """Also a third block that is being gathered, and the gradients of one that are reduced."""
    in_flight = BLOCK_BYTES + BLOCK_BYTES
    assert _cost("fsdp", 2).transient == ROOT_BYTES + 2 * BLOCK_BYTES + in_flight
    keeping = Options(reshard_after_forward=False)
    assert _cost("fsdp", 2, keeping).transient == BYTES + in_flight
    bf16 = Options(precision="bf16")
    bf16_in_flight = 16 * (2 + 4)
    bf16_gathered = (ROOT_BYTES + 2 * BLOCK_BYTES) // 2
    assert _cost("fsdp", 2, bf16).transient == bf16_gathered + bf16_in_flight
    # A pipeline gathers everything once per step, and adds up gradients in float32.
    pipelined = _cost("fsdp", 4, bf16, micro_batches=4, pp=2)
    assert pipelined.transient == BYTES // 2 + bf16_in_flight + BYTES


def test_the_largest_blocks_are_counted_in_numbers() -> None:
    units = [unit_size((ParameterSize("w", (n,), unit="w"),), 2) for n in (2, 6, 4)]
    size = rank_size(units)
    assert size.two_largest_blocks == 6 + 4
    assert size.largest_block == 6


@pytest.mark.parametrize("name", sorted(costs.STATES.keys() - {"adafactor", "muon"}))
def test_the_state_of_an_optimizer_is_counted_to_the_byte(name: str) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    optimizer = build_optimizer(OptimizerConfig(name=name), model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    size = sum(value.numel() * value.itemsize for value in state)
    eight_bit = rank_size([unit_size(costs.model_size(model).parameters, 1)]).eight_bit_state
    counted = costs.optimizer_bytes(3 * 8 * 8 * 4, 3, name, eight_bit_state=eight_bit)
    assert size == counted


def test_every_optimizer_with_a_name_has_its_state_counted() -> None:
    assert costs.STATES.keys() == set(OPTIMIZERS)


def test_an_unknown_optimizer_keeps_two_tensors_and_a_step_per_parameter() -> None:
    assert costs.optimizer_bytes(80, 3, "lion") == 2 * 80 + 3 * 4


def test_parameters_and_gradients_are_large_from_an_eighth_of_the_memory() -> None:
    assert fsdp.parameters_are_large(1, None)
    assert fsdp.parameters_are_large(8, 64)
    assert not fsdp.parameters_are_large(7, 64)
    assert not fsdp.gradients_are_large(1, None)
    assert fsdp.gradients_are_large(8, 64)
    assert not fsdp.gradients_are_large(7, 64)


def test_replicas_hold_everything() -> None:
    size = rank_size([unit_size(SIZES, 1)], 24)
    cost = replicated(size, StepShape(compute_itemsize=2, optimizer="sgd"))
    assert cost == Cost(parameters=BYTES, gradients=BYTES, optimizer=BYTES, buffers=24)


def test_ddp_holds_gradients_in_buckets_beside_tensor_parallelism() -> None:
    assert _cost("ddp", 2).transient == 0
    assert _cost("tensor", 2, tp=2).transient == 0
    cost = _cost("ddp", 4, tp=2)
    assert cost.transient == cost.gradients == BYTES - 2 * BLOCK_BYTES // 2


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    parameters = (ParameterSize("a", (4,), trainable=False), ParameterSize("b", (4,)))
    cost, _ = layout_cost(choose("fsdp", 2), parameters)
    assert cost.parameters == 16
    assert cost.gradients == 8
    assert cost.optimizer == 20
