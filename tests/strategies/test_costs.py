"""Costs are exact: what a rank really holds after a step, to the byte, beside the row's own cost function."""

from typing import Any

import pytest
import torch

from experiments.parity import curves
from experiments.parity.rows import ROWS, Row
from strategies import fsdp, registry
from strategies.blocks import find_blocks
from strategies.costs import Cost, ParameterSize, StepShape, model_size, part_of, rank_size, replicated, unit_size
from strategies.layout import Layout
from strategies.parallelize import Options, choose, parallelize
from strategies.tensor.plan import make_plan
from tests.layout_cost import layout_cost
from tests.pool import run_distributed
from tests.strategies.models import GPT_PLAN, PlainGPT, gpt_trial


def _stored(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors' local parts."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}.values())


def _measured(rank: int, row: Row) -> tuple[int, int, int]:
    trial = gpt_trial(tied=True, layers=2)
    plans: Any = {"tensor_plan": GPT_PLAN, "context_plan": trial.context_plan}
    parallel = parallelize(trial.build, row.layout, Options(**row.options), device=torch.device("cpu"), **plans)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    kept: list[torch.Tensor] = []
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=True: (  # type: ignore[method-assign,assignment]
        kept.extend(p.grad for p in parallel.parameters() if p.grad is not None),
        zero_grad(set_to_none),
    )
    curves.run_steps(trial, parallel, optimizer, range(1))
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _stored(list(parallel.parameters())), _stored(kept), _stored(states)


def _sizes(layout: Layout) -> tuple[ParameterSize, ...]:
    with torch.device("meta"):
        module = PlainGPT(tied=True, layers=2)
    dims = make_plan(module, GPT_PLAN, True).dims if layout.dims.tp > 1 else {}
    return model_size(module, find_blocks(module), dims).parameters


@pytest.mark.parametrize("row", [Row("single", 1), *(row for row in ROWS if row.layout.dims.pp == 1)], ids=str)
def test_memory_is_exact_to_the_byte(row: Row) -> None:
    measured = _measured(0, row) if row.workers == 1 else run_distributed(_measured, row.workers, row)[0]
    expected, _ = layout_cost(row.layout, _sizes(row.layout))
    assert measured == (expected.parameters, expected.gradients, expected.optimizer)


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
    sent = [(c.name, c.bytes) for c in fsdp.collectives(unit_size((part,), 2), StepShape(dp_shard=2)) if c.bytes]
    assert sent == [("all_reduce", 20)] * 2, "5 rows"


def test_what_is_large_is_so_beside_the_memory_that_there_is() -> None:
    assert [fsdp.parameters_are_large(*case) for case in ((1, None), (8, 64), (7, 64))] == [True, True, False]
    assert [fsdp.gradients_are_large(*case) for case in ((1, None), (8, 64), (7, 64))] == [False, True, False]


def test_everything_on_every_rank() -> None:
    found = replicated(rank_size([unit_size(SIZES, 1)], 24), StepShape(compute_itemsize=2, optimizer="sgd"))
    assert found == Cost(BYTES, BYTES, BYTES, buffers=24, transient=BYTES // 2)


def test_gradients_beside_tensor_parallelism_are_packed_into_buckets() -> None:
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
