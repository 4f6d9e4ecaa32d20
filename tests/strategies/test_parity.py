"""The one law: every row trains the same model as one device.

Few steps of a small model: what a strategy does wrong shows in the second. Twenty, and each switch alone, are
`trireme parity`'s.
"""

import functools
from typing import Any

import pytest
import torch

from experiments.parity import curves
from experiments.parity.curves import Curve, Difference
from experiments.parity.rows import ROWS, SINGLE, Row
from strategies.parallelize import Options
from tests.pool import run_distributed
from tests.strategies.models import ZOO, gpt_trial

CPU = torch.device("cpu")
EVERYTHING = {"steps": 3, "layers": 2, "tied": True, "micro_batches": 2, "clip": 0.5}
"""Accumulation, clipping and tying; the models of ZOO have none of them."""
MODELS = ZOO | {"gpt without its plan": gpt_trial(plan=False, **EVERYTHING)}


def _train(_: int, row: Row, options: Options, changes: dict[str, Any]) -> Curve:
    trial, options = row.applied(gpt_trial(**changes), options)
    return curves.train(trial, row.layout, options, CPU)


def _train_zoo(_: int, row: Row) -> dict[str, Curve]:
    return {name: curves.train(trial, row.layout, Options(), CPU) for name, trial in MODELS.items()}


def _on_ranks(func: Any, row: Row, *args: Any) -> Any:
    """Rank 0's answer."""
    return func(0, row, *args) if row.workers == 1 else run_distributed(func, row.workers, row, *args)[0]


@functools.cache
def _truth(**changes: Any) -> Curve:
    return _train(0, SINGLE, Options(), changes)


def _difference(row: Row, options: dict[str, Any], **changes: Any) -> Difference:
    changes = EVERYTHING | changes
    return curves.difference(_truth(**changes), _on_ranks(_train, row, Options(**options), changes))


LIKE_OTHERS = ("zero1+tensor", "zero2+tensor", "zero1+context", "zero2+context")
"""They differ from ddp's and fsdp's in what zero1 and zero2 do alone."""
WIDER = [row for row in ROWS if row.workers == 4 and not row.degrees and row.name not in ("ddp", "fsdp")]
"""Of what is tried at 2 workers already."""
SLOW = [row for row in ROWS if row.name in LIKE_OTHERS or row in WIDER]
EVERY = [pytest.param(row, id=str(row), marks=[pytest.mark.slow] * (row in SLOW)) for row in ROWS]


@pytest.mark.parametrize("row", EVERY)
def test_row_trains_the_same_model(row: Row) -> None:
    layers = 4 if row.layout.dims.pp > 1 else 2
    found = _difference(row, {"activation_checkpointing": "full"}, layers=layers)
    assert found.within(row.tolerance), found


_FSDP, _TENSOR, _FSDP_TENSOR = Row("fsdp", 2), Row("tensor", 2), Row("fsdp+tensor", 4, {"tp": 2})
_TENSOR_IN_HALVES = Row("tensor+pipeline", 4, {"tp": 2, "pp": 2}, options={"schedule": "zb_h1"}, micro_batches=4)
_DDP, _DDP_TENSOR = Row("ddp", 2), Row("ddp+tensor", 4, {"tp": 2})


def _compiled(mode: str) -> dict[str, Any]:
    return {"compile": True, "compile_backend": "aot_eager", "activation_checkpointing": mode}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (_DDP, {"activation_checkpointing": "selective", "bucket_mb": 0.01}),
        (_FSDP, {"activation_checkpointing": "selective"}),
        (_FSDP, {"activation_checkpointing": "every_2"}),
        (_FSDP, {"offload": True}),
        (_FSDP, {"reshard_after_forward": False}),
        (_FSDP, {"accumulate_sharded": True}),
        (Row("zero1", 2), {"reshard_after_forward": True}),
        (_TENSOR, {"activation_checkpointing": "selective"}),
        (_TENSOR, {}),  # unlike the rows above it gathers again in backward
        (_TENSOR_IN_HALVES, {}),
        (_TENSOR, {"sequence_parallel": False}),
        (_TENSOR, {"loss_parallel": False}),
        (_FSDP_TENSOR, {"offload": True, "accumulate_sharded": True}),
        (_DDP_TENSOR, {"bucket_mb": 0.01, "activation_checkpointing": "full"}),
        (SINGLE, _compiled("full")),
        (_DDP, _compiled("none")),
        (_FSDP, _compiled("full")),
        (_TENSOR, _compiled("selective")),
    ],
    ids=str,
)
def test_options_change_no_number(row: Row, options: dict[str, Any]) -> None:
    found = _difference(row, options)
    assert found.within(row.tolerance), found


@pytest.mark.parametrize(
    ("row", "options"),
    [
        *((row, {"precision": "bf16"}) for row in (_DDP, _FSDP, _TENSOR, _FSDP_TENSOR)),
        (_DDP, {"precision": "fp16"}),
        pytest.param(_TENSOR, {"precision": "fp16"}, marks=pytest.mark.slow),
        (_DDP, {"reduce_dtype": "bf16"}),
        (_FSDP, {"reduce_dtype": "bf16", "precision": "fp16"}),
        (_DDP_TENSOR, {"reduce_dtype": "bf16"}),
    ],
    ids=str,
)
def test_sixteen_bits_stay_within_their_rounding(row: Row, options: dict[str, Any]) -> None:
    found = _difference(row, options)
    assert 1e-6 < found.loss < 3e-3, "computed or reduced in 16 bits, and not far off"


WITHOUT_HINTS = [Row("model_parallel", 1), _DDP, _FSDP, _TENSOR, _FSDP_TENSOR]
WITHOUT_HINTS += [pytest.param(_DDP_TENSOR, marks=pytest.mark.slow, id=str(_DDP_TENSOR))]


@pytest.mark.parametrize("row", WITHOUT_HINTS, ids=str)
def test_any_model_without_hints(row: Row) -> None:
    trained = _on_ranks(_train_zoo, row)
    for name, truth in _zoo_truth().items():
        found = curves.difference(truth, trained[name])
        assert found.within(row.tolerance), (name, str(row), found)


@functools.cache
def _zoo_truth() -> dict[str, Curve]:
    return _train_zoo(0, SINGLE)
