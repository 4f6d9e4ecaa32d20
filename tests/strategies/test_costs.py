"""Costs, by hand. That they are what ranks really hold, to the byte: test_parity.py."""

import pytest
from torch import nn

from strategies import costs, fsdp, registry
from strategies.costs import Cost, ParameterSize, StepShape, part_of, rank_size, replicated, unit_size
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
BYTES = 4 * (32 + 3 * 16)


def _cost(name: str, workers: int, options: Options | None = None, micro: int = 1, **degrees: int) -> Cost:
    return layout_cost(choose(name, workers, **degrees), SIZES, options, micro)[0]


def _sent(name: str, workers: int, options: Options | None = None, micro: int = 1, **degrees: int) -> dict[str, int]:
    return layout_cost(choose(name, workers, **degrees), SIZES, options, micro)[1]


def test_what_is_read_of_a_model() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 2, bias=False), "ab": nn.Embedding(8, 4), "c": nn.BatchNorm1d(3)}).half()
    model["ab"].requires_grad_(False)
    model["c"].running_var = None
    weight = ParameterSize("a.weight", (2, 4), itemsize=2, unit="a", split_dim=1)
    table = ParameterSize("ab.weight", (8, 4), itemsize=2, trainable=False)
    norm = (ParameterSize("c.weight", (3,), itemsize=2), ParameterSize("c.bias", (3,), itemsize=2))
    assert costs.model_size(model, ["a"], {"a.weight": 1}) == costs.ModelSize((weight, table, *norm), 3 * 2 + 8)
    two = (ParameterSize("weight", (1, 1)), ParameterSize("bias", (1,)))
    assert costs.model_size(nn.Linear(1, 1)) == costs.ModelSize(two)
    of_experts = {p.name.split(".")[-2] for p in costs.model_size(mixture()).parameters if p.is_expert}
    assert of_experts == {"experts"}


def test_what_is_sent_per_step() -> None:
    assert _sent("single", 1) == {}
    assert _sent("ddp", 4) == {"all_reduce": BYTES * 2 * 3 // 4}
    assert _sent("ddp", 4, Options(reduce_dtype="bf16")) == {"all_reduce": BYTES * 3 // 4}
    blocks, root = 3 * 64, 128
    assert _sent("fsdp", 4) == {"all_gather": (root + 2 * blocks) * 3 // 4, "reduce_scatter": BYTES * 3 // 4}
    assert _sent("zero1", 4) == {"all_gather": BYTES * 3 // 4, "reduce_scatter": BYTES * 3 // 4}
    assert _sent("hsdp", 4, dp_shard=2)["all_reduce"] == BYTES // 2


def test_accumulation_communicates_once_unless_shards_are_accumulated() -> None:
    assert _sent("ddp", 2) == _sent("ddp", 2, micro=4)
    zero1, zero2 = (_sent(name, 2, micro=4) for name in ("zero1", "zero2"))
    assert zero2["reduce_scatter"] == 4 * zero1["reduce_scatter"]
    assert zero1["all_gather"] == zero2["all_gather"] == BYTES // 2
    assert _sent("fsdp", 2, micro=4)["all_gather"] == (4 * 128 + 8 * 192) // 2, "and gathers for each"
    scattered = _sent("fsdp", 4, Options(accumulate_sharded=True), micro=4, pp=2)["reduce_scatter"]
    assert scattered == BYTES // 2, "by a stage, once"
    kept = _cost("zero1", 2, micro=2).transient - _cost("zero2", 2, micro=2).transient
    assert kept == BYTES, "stage 1 keeps whole gradients between micro-batches"


def test_freeing_after_forward_holds_two_blocks() -> None:
    """And a third on its way in and one's gradients on their way out."""
    assert _cost("fsdp", 2).transient == 128 + 2 * 64 + 2 * 64
    assert _cost("fsdp", 2, Options(reshard_after_forward=False)).transient == BYTES + 2 * 64
    assert _cost("fsdp", 2, Options(precision="bf16")).transient == (128 + 2 * 64) // 2 + 16 * (2 + 4)
    uneven = [unit_size((ParameterSize("w", (n,), unit="w"),), 2) for n in (2, 6, 4)]
    assert (rank_size(uneven).two_largest_blocks, rank_size(uneven).largest_block) == (10, 6), "numbers, not bytes"
    piped = _cost("fsdp", 4, Options(precision="bf16"), micro=4, pp=2)  # gathered once per step
    assert piped.transient == BYTES // 2 + 16 * (2 + 4) + BYTES, "in 16 bits; gradients add up in float32"


def test_rows_that_tensor_parallelism_has_split_unevenly_are_not_split_again() -> None:
    """By columns where workers get equally many, or not at all, and then averaged by an all-reduce."""
    for shape, expected in (((10, 4), 0), ((9, 4), 1), ((9, 3), None), ((9,), None), ((), None), ((3, 3), None)):
        assert fsdp.fsdp_dim(shape, shape[:1] in ((9,), (3,)), 2) == expected
    part = part_of(ParameterSize("bias", (9,), split_dim=0), 2)
    assert part.is_uneven and not part_of(ParameterSize("bias", (8,), split_dim=0), 2).is_uneven
    sent = [c for c in fsdp.collectives(unit_size((part,), 2), StepShape(dp_shard=2)) if c.bytes]
    rows = [
        costs.Collective(name="all_reduce", over=over, bytes=20, times=1, phase="backward")
        for over in ("dp_shard", "dp_replicate")
    ]
    assert sent == rows, "5 of them"


def test_experts_are_shared_out_too_and_an_optimizer_that_is_not_known_keeps_two_tensors_and_a_step() -> None:
    weight = ParameterSize("w", (4, 7), split_dim=1, is_expert=True)
    assert [part_of(weight, 2, ep).shape for ep in (1, 2)] == [(4, 4), (2, 4)] and not part_of(weight, 2).is_uneven
    assert part_of(ParameterSize("w", (4, 7)), 2, 2).shape == (4, 7)
    assert costs.optimizer_bytes(80, 3, "lion") == 2 * 80 + 3 * 4


def test_what_is_large_is_so_beside_the_memory_that_there_is() -> None:
    assert [fsdp.parameters_are_large(*case) for case in ((1, None), (8, 64), (7, 64))] == [True, True, False]
    assert [fsdp.gradients_are_large(*case) for case in ((1, None), (8, 64), (7, 64))] == [False, True, False]


def test_what_replicas_hold_is_everything_and_gradients_in_buckets_beside_tensor_parallelism() -> None:
    found = replicated(rank_size([unit_size(SIZES, 1)], 24), StepShape(compute_itemsize=2, optimizer="sgd"))
    assert found == Cost(parameters=BYTES, gradients=BYTES, optimizer=BYTES, buffers=24, transient=BYTES // 2)
    assert [_cost(name, n, tp=tp).transient for name, n, tp in (("ddp", 2, 1), ("tensor", 2, 2))] == [0, 0]
    assert _cost("ddp", 4, tp=2).transient == _cost("ddp", 4, tp=2).gradients == BYTES - 2 * 32


def test_when_and_over_which_workers_each_is_sent() -> None:
    phases = {"ddp": ["dp_replicate backward"], "dp": ["devices forward", "devices backward"]}
    phases["fsdp"] = ["dp_shard forward", *["dp_shard backward"] * 2, "dp_replicate backward"]
    for name, expected in phases.items():
        found = registry.find(name).collectives(unit_size(SIZES, 2), StepShape(dp_shard=2))
        assert [f"{c.over} {c.phase}" for c in found] == expected


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    frozen = (ParameterSize("a", (4,), trainable=False), ParameterSize("b", (4,)))
    found, _ = layout_cost(choose("fsdp", 2), frozen)
    assert (found.parameters, found.gradients, found.optimizer) == (16, 8, 20)


def test_experts_are_split_over_shards_of_their_own() -> None:
    given = (ParameterSize("few", (2, 8), is_expert=True), ParameterSize("many", (8, 2), is_expert=True))
    others = (ParameterSize("w", (4, 4)), ParameterSize("frozen", (4, 4), trainable=False))
    found = unit_size((*given, *others), 4, expert_shards=2)
    assert (found.sharded_parameters, found.sharded_gradients, found.whole_gradients) == (4 * 24, 4 * 20, 0)
    assert found.gathered == 64 and unit_size(given, 4).sharded_parameters == 4 * (8 + 4)
    assert unit_size(given, 4, expert_shards=4).sharded_parameters == 4 * (4 + 4), "few: along another dimension"
