"""The one law: every row trains the same model as one device.

A few steps of a small model are enough: what a strategy does wrong shows in the second step.
`trireme parity` runs twenty steps, and each switch alone.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn

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

T = TypeVar("T")

SHORT: dict[str, Any] = {"steps": 2, "micro_batches": 2, "clip": 0.5}
SHORT_TIED: dict[str, Any] = {**SHORT, "layers": 2, "tied": True}
"""Accumulation, clipping and tied weights, which the models of ZOO do not have."""
MODELS = models.ZOO | {"gpt without its plan": gpt_trial(plan=False, **SHORT_TIED)}


def _trial(row: Row, model_name: str = "") -> Trial:
    """What a row trains.

    Args:
        row: The row.
        model_name: A key of MODELS, or "llama"; "" for a model with what the row's layout splits.
    """
    if model_name == "llama":
        return models.LLAMA
    if model_name:
        return MODELS[model_name]
    dims = row.layout.dims
    if dims.ep > 1:
        return models.mixture_trial(**SHORT)
    if dims.cp > 1:
        return models.masked_trial(**SHORT)
    return gpt_trial(**{**SHORT_TIED, "layers": 4 if dims.pp > 1 else 2})


@dataclass
class _TrainingState:
    """Bytes of a rank's training state after a step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


def _train(
    rank: int, row: Row, options: Options, model_name: str = ""
) -> tuple[Curve, _TrainingState]:
    """Train what a row trains.

    A compiled block must be one graph: around a break, operations would be launched one by one.
    Only the layers of async_tp leave the compiler, and experts, whose sizes the host has to know.
    """
    trial, options = row.adapt(_trial(row, model_name), options)
    sizes = _TrainingState()

    def measured_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = trial.optimizer(parameters)

        def measure(*_: Any) -> None:
            states = [tensor for state in optimizer.state.values() for tensor in state.values()]
            gradients = [p.grad for p in parameters if p.grad is not None]
            sizes.parameters = models.storage_bytes(parameters)
            sizes.gradients = models.storage_bytes(gradients)
            sizes.optimizer = models.storage_bytes(states)

        optimizer.register_step_post_hook(measure)
        return optimizer

    is_one_graph = not options.async_tp and row.layout.dims.ep == 1
    compile_block = functools.partial(torch.compile, fullgraph=is_one_graph)
    with mock.patch.object(torch, "compile", compile_block):
        measured_trial = replace(trial, optimizer=measured_optimizer)
        curve = curves.train(measured_trial, row.layout, options, CPU)
    return curve, sizes


def _result_of_rank_0(function: Callable[..., T], row: Row, *args: Any) -> T:
    """Call a function on the ranks of a row."""
    if row.workers == 1:
        return function(0, row, *args)
    return run_distributed(function, row.workers, row, *args)[0]


_single_device_curves: dict[str, Curve] = {}
"""By trial."""


def _compare(row: Row, model_name: str = "", **options: Any) -> tuple[Difference, _TrainingState]:
    """Train a row and compare its curve with that of one device."""
    curve, sizes = _result_of_rank_0(_train, row, Options(**options), model_name)
    dims = row.layout.dims
    key = model_name or f"ep {dims.ep > 1}, cp {dims.cp > 1}, pp {dims.pp > 1}"
    if key not in _single_device_curves:
        trial = _trial(row, model_name)
        _single_device_curves[key] = curves.train(trial, SINGLE.layout, Options(), CPU)
    return curves.difference(_single_device_curves[key], curve), sizes


@pytest.mark.parametrize("row", models.ROW_PARAMS)
def test_a_row_trains_the_same_model_and_has_the_bytes_of_its_cost(row: Row) -> None:
    dims = row.layout.dims
    difference, sizes = _compare(row, activation_checkpointing="full")
    assert difference.within(1e-6 if dims.ep > 1 else row.tolerance), difference
    if dims.pp > 1:
        return  # costs are those of a whole model
    with torch.device("meta"):
        module = _trial(row).build()
    split_dims = {}
    if dims.tp > 1:
        split_dims = make_plan(module, _trial(row).tensor_plan, True).dims
    parameters = model_size(module, find_blocks(module), split_dims).parameters
    cost, _ = layout_cost(row.layout, parameters)
    assert sizes == _TrainingState(cost.parameters, cost.gradients, cost.optimizer)


DDP_TENSOR = Row("ddp+tensor", 4, {"tp": 2})
FSDP_TENSOR = Row("fsdp+tensor", 4, {"tp": 2})
DDP_EXPERT = Row("ddp+expert", 2, {"ep": 2})
ZERO_BUBBLE_TENSOR = Row(
    "tensor+pipeline", 4, {"tp": 2, "pp": 2}, options={"schedule": "zb_h1"}, micro_batches=4
)
RING, *OTHER_CONTEXTS = (Row("context", 2, options={"context": method}) for method in METHODS)
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (DDP, SELECTIVE | {"bucket_mb": 0.01}),
        (FSDP, SELECTIVE),
        slow(TENSOR, SELECTIVE),
        (TENSOR, {}),  # gathers again in backward, unlike the rows with full recomputation
        slow(ZERO_BUBBLE_TENSOR, {}),
        (TENSOR, {"sequence_parallel": False}),
        (TENSOR, {"loss_parallel": False}),
        (TENSOR, {"async_tp": True} | SELECTIVE),
        slow(TENSOR, {"async_tp": True} | COMPILED),
        slow(Row("fsdp+tensor+pipeline", 8, {"tp": 2, "pp": 2}), {"async_tp": True}),
        (FSDP_TENSOR, {"offload": True, "accumulate_sharded": True}),
        slow(DDP_TENSOR, FULL | {"bucket_mb": 0.01}),
        (RING, {}),
        slow(RING, SELECTIVE),
        *((row, SELECTIVE) for row in OTHER_CONTEXTS),
        slow(DDP_EXPERT, COMPILED),
        slow(FSDP, COMPILED | FULL),
        slow(TENSOR, COMPILED | SELECTIVE),
        slow(RING, COMPILED | FULL),  # traced where attention is not replaced
        slow(OTHER_CONTEXTS[-1], COMPILED),
        *((row, BF16) for row in (DDP, FSDP, TENSOR)),
        slow(FSDP_TENSOR, BF16),
        (DDP, {"reduce_dtype": "bf16"}),
        (FSDP, {"reduce_dtype": "bf16", "precision": "fp16"}),
        slow(DDP_TENSOR, {"reduce_dtype": "bf16"}),
    ],
    ids=str,
)
def test_options_change_numbers_only_by_the_rounding_of_16_bits(
    row: Row, options: dict[str, Any]
) -> None:
    difference, _ = _compare(row, **options)
    if "precision" in options or "reduce_dtype" in options:
        assert 1e-6 < difference.loss < 3e-3
    else:
        assert difference.within(row.tolerance), difference


@pytest.mark.parametrize("row", [DDP_EXPERT, slow(Row("fsdp+expert", 4, {"ep": 2}))], ids=str)
def test_experts_in_16_bits_differ_as_one_device_in_another_order_does(row: Row) -> None:
    """A curve in float32 would differ more."""
    runner = Runner(functools.partial(models.mixture_trial, **SHORT), Options(), "cpu")
    is_sharded = row.layout.dims.dp_shard > 1
    single_curves = []
    for order in (None, *ORDERS):
        run = RowRun(SINGLE, "bf16", order=order, all_low_precision=is_sharded)
        single_curve = matrix.train_row(runner, run, CPU).curve
        assert single_curve is not None
        single_curves.append(single_curve)
    expected, *reordered = single_curves
    curve, _ = _result_of_rank_0(_train, row, Options(precision="bf16"))
    difference = curves.difference(expected, curve)
    assert difference.within(matrix.drift(expected, reordered)), difference


PIPELINE = Row("pipeline", 2, {"pp": 2}, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", [SINGLE, DDP, FSDP_TENSOR, PIPELINE], ids=str)
def test_a_block_of_hugging_faces_is_compiled_as_one_graph(row: Row) -> None:
    """tests/app/models does the same with our own blocks."""
    difference, _ = _compare(row, "llama", **COMPILED | SELECTIVE)
    assert difference.within(row.tolerance), difference


@pytest.mark.parametrize("row", [Row("model_parallel", 1), DDP, FSDP, TENSOR], ids=str)
def test_any_model_trains_without_hints(row: Row) -> None:
    for model_name in MODELS:
        difference, _ = _compare(row, model_name)
        assert difference.within(row.tolerance), (model_name, difference)
