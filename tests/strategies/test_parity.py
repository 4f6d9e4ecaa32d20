"""The one law: every row trains the same model as one device.

Few steps of a small model: what a strategy does wrong shows in the second. Twenty, and each switch alone, are
`trireme parity`'s.
"""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from experiments.parity import curves, matrix
from experiments.parity.curves import Curve, Difference, Trial
from experiments.parity.matrix import ORDERS, RowRun, Runner
from experiments.parity.rows import SINGLE, Row
from strategies.blocks import find_blocks
from strategies.context.apply import METHODS
from strategies.costs import model_size
from strategies.parallelize import Options
from strategies.tensor.plan import make_plan
from tests.layout_cost import layout_cost
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import BF16, COMPILED, CPU, DDP, FSDP, TENSOR, gpt_trial, slow

pytestmark = pytest.mark.alone

HARD: dict[str, Any] = {"steps": 2, "micro_batches": 2, "clip": 0.5}
EVERYTHING = {**HARD, "layers": 2, "tied": True}
"""Accumulation, clipping and tying; the models of ZOO have none of them."""
MODELS = models.ZOO | {"gpt without its plan": gpt_trial(plan=False, **EVERYTHING)}


def _trial(row: Row, name: str = "") -> Trial:
    dims = row.layout.dims
    if name:
        return models.LLAMA if name == "llama" else MODELS[name]
    if dims.ep > 1:
        return models.mixture_trial(**HARD)
    return models.masked_trial(**HARD) if dims.cp > 1 else gpt_trial(**EVERYTHING | {"layers": 4 if dims.pp > 1 else 2})


def _train(_: int, row: Row, options: Options, name: str = "") -> tuple[Curve, list[int]]:
    """The curve, and bytes of parameters, gradients and optimizer state. Where it is compiled, a break in a block's
    graph, around which operations would be launched one by one, ends it, but where its layers leave the compiler."""
    trial, options = row.adapt(_trial(row, name), options)
    held: list[int] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        made = trial.optimizer(own)

        def measure(*_: Any) -> None:
            states = [value for state in made.state.values() for value in state.values()]
            gradients = (p.grad for p in own if p.grad is not None)
            held[:] = (models.stored(tensors) for tensors in (own, gradients, states))

        made.register_step_post_hook(measure)
        return made

    whole = not options.async_tp and row.layout.dims.ep == 1  # experts' sizes have to be known to the host
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, fullgraph=whole)):
        return curves.train(replace(trial, optimizer=optimizer), row.layout, options, CPU), held


def _on_ranks(func: Any, row: Row, *args: Any) -> Any:
    """Rank 0's answer."""
    return func(0, row, *args) if row.workers == 1 else run_distributed(func, row.workers, row, *args)[0]


_truths: dict[str, Curve] = {}


def _found(row: Row, name: str = "", **options: Any) -> tuple[Difference, list[int]]:
    """From one device's curve of the same trial; and bytes."""
    dims, (curve, held) = row.layout.dims, _on_ranks(_train, row, Options(**options), name)
    trial = name or f"{dims.ep > 1} {dims.cp > 1} {dims.pp > 1}"
    if trial not in _truths:
        _truths[trial] = curves.train(_trial(row, name), SINGLE.layout, Options(), CPU)
    return curves.difference(_truths[trial], curve), held


@pytest.mark.parametrize("row", models.EVERY)
def test_row_trains_the_same_model_and_holds_what_it_costs_to_the_byte(row: Row) -> None:
    found, held = _found(row, activation_checkpointing="full")
    assert found.within(1e-6 if row.layout.dims.ep > 1 else row.tolerance), found
    if row.layout.dims.pp == 1:
        with torch.device("meta"):
            module = _trial(row).build()
        split = make_plan(module, _trial(row).tensor_plan, True).dims if row.layout.dims.tp > 1 else {}
        cost, _ = layout_cost(row.layout, model_size(module, find_blocks(module), split).parameters)
        assert held == [cost.parameters, cost.gradients, cost.optimizer]


_DDP_TENSOR, _FSDP_TENSOR = (Row(f"{name}+tensor", 4, {"tp": 2}) for name in ("ddp", "fsdp"))
_TENSOR_IN_HALVES = Row("tensor+pipeline", 4, {"tp": 2, "pp": 2}, options={"schedule": "zb_h1"}, micro_batches=4)
_RING, *_CONTEXTS = (Row("context", 2, options={"context": method}) for method in METHODS)
WIDE = [DDP, _FSDP_TENSOR, Row("pipeline", 2, {"pp": 2}, micro_batches=2)]
FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (DDP, SELECTIVE | {"bucket_mb": 0.01}),
        (FSDP, SELECTIVE),
        (TENSOR, SELECTIVE),
        (TENSOR, {}),  # unlike the rows above it gathers again in backward
        slow(_TENSOR_IN_HALVES, {}),
        (TENSOR, {"sequence_parallel": False}),
        (TENSOR, {"loss_parallel": False}),
        (TENSOR, {"async_tp": True} | SELECTIVE),
        slow(TENSOR, {"async_tp": True} | COMPILED),
        slow(Row("fsdp+tensor+pipeline", 8, {"tp": 2, "pp": 2}), {"async_tp": True}),
        (_FSDP_TENSOR, {"offload": True, "accumulate_sharded": True}),
        slow(_DDP_TENSOR, FULL | {"bucket_mb": 0.01}),
        (_RING, {}),
        *((row, SELECTIVE) for row in (_RING, *_CONTEXTS)),
        slow(Row("ddp+expert", 2, {"ep": 2}), COMPILED),
        (FSDP, COMPILED | FULL),
        slow(TENSOR, COMPILED | SELECTIVE),
        slow(_RING, COMPILED | FULL),  # traced without what lets attention go across workers
        slow(_CONTEXTS[-1], COMPILED),
        *((row, BF16) for row in (DDP, FSDP, TENSOR)),
        slow(_FSDP_TENSOR, BF16),
        (DDP, {"reduce_dtype": "bf16"}),
        (FSDP, {"reduce_dtype": "bf16", "precision": "fp16"}),
        slow(_DDP_TENSOR, {"reduce_dtype": "bf16"}),
    ],
    ids=str,
)
def test_options_change_no_number_but_by_the_rounding_of_sixteen_bits(row: Row, options: dict[str, Any]) -> None:
    found, _ = _found(row, **options)
    if {"precision", "reduce_dtype"} & options.keys():
        assert 1e-6 < found.loss < 3e-3, "computed or reduced in 16 bits, and not far off"
    else:
        assert found.within(row.tolerance), found


@pytest.mark.parametrize("row", [Row("ddp+expert", 2, {"ep": 2}), slow(Row("fsdp+expert", 4, {"ep": 2}))], ids=str)
def test_experts_in_sixteen_bits_are_as_far_off_as_one_device_from_itself(row: Row) -> None:
    """In float32 they would be further off."""
    runner = Runner(functools.partial(models.mixture_trial, **HARD), Options(), "cpu")
    is_sharded = row.layout.dims.dp_shard > 1
    runs = [RowRun(SINGLE, "bf16", order=order, all_low_precision=is_sharded) for order in (None, *ORDERS)]
    curves_found = [matrix.train_row(runner, run, CPU).curve for run in runs]
    truth, *others = [curve for curve in curves_found if curve is not None]
    curve, _ = _on_ranks(_train, row, Options(precision="bf16"))
    found = curves.difference(truth, curve)
    assert len(others) == len(ORDERS) and found.within(matrix.drift(truth, others)), found


@pytest.mark.slow
@pytest.mark.parametrize("row", [SINGLE, *WIDE], ids=str)
def test_a_block_of_hugging_faces_is_compiled_as_one_graph(row: Row) -> None:
    """Of ours: tests/app/models."""
    found, _ = _found(row, "llama", **COMPILED | SELECTIVE)
    assert found.within(row.tolerance), found


@pytest.mark.parametrize("row", [Row("model_parallel", 1), DDP, FSDP, TENSOR], ids=str)
def test_any_model_without_hints(row: Row) -> None:
    for name in MODELS:
        found, _ = _found(row, name)
        assert found.within(row.tolerance), (name, found)
