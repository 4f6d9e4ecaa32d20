"""The memory of a loss over a large vocabulary, as planned, is what torch's allocator hands out.

At batches that were not traced: where a chunk of the loss is full, or no larger than the rows, or
one of several smaller ones; of the whole model, and of one of several tensor-parallel workers.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.data.loader import fetch
from app.models.cross_entropy import LARGE_VOCABULARY
from app.planner import trace
from app.planner.part_trace import AFTER, BEFORE
from app.planner.read import AUTOCAST, CAST, PLAIN, Reader
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.language import LanguageModelling
from strategies import row_chunks
from strategies.tensor.apply import one_part
from tests.app.planner.conftest import allocated_peak

TOKENS = 16
GPT: dict[str, Any] = {
    "data": "python",
    "sequence_length": TOKENS,
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 4,
    "vocab_size": LARGE_VOCABULARY,
}
BATCHES = (3, 12)
"""48 and 192 rows; 32 and 64 are traced."""
ROWS_OF_CHUNK = (24, 70)
KINDS = ("plain", "chunked", "linear")
QUICK = (("plain", PLAIN, 24), ("chunked", CAST, 70), ("linear", AUTOCAST, 24))
"""Rows of `make test`: each kind, each precision and each number of rows."""


class PlainLoss(LanguageModelling):
    """A loss of all logits in float32 at once, as a user's own task may have."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs_BT, targets_BT = batch
        return F.cross_entropy(model(inputs_BT).flatten(0, 1).float(), targets_BT.flatten())


@functools.cache
def _task(kind: str) -> Task:
    if kind == "plain":
        return PlainLoss(**GPT)
    return load_task("language_modelling", GPT | {"linear_loss": kind == "linear"})


@functools.cache
def _reader(kind: str, rows_of_chunk: int) -> Reader:
    """Reads a task; the rows of a chunk are in what it reads."""
    return Reader(_task(kind), splits=kind != "linear")


def _planned_peak(reader: Reader, casting: str, batch: int, tp: int) -> float:
    """Bytes at the worst moment of forward and backward, without parameters and gradients."""
    costs = reader.costs(casting)
    saved = 0.0
    peaks = []
    for name in (BEFORE, *costs.order, AFTER):
        part = costs.parts[name]
        saved += part.at(batch, tp)["saved"]
        peaks.append(saved + part.working_bytes(batch, tp))
    return max(peaks)


def _measured_peak(reader: Reader, casting: str, batch: int, tp: int, folder: Path) -> float:
    """The same of torch's allocator on the CPU."""
    task = reader.task
    module = reader._make_module(casting, None)
    if tp > 1:
        one_part(module, task.tensor_plan(module), tp, sequence_parallel=True, loss_parallel=True)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(trace._drop_gradient)
    values = fetch(task.train_data(), [(i, i) for i in range(batch)])

    def forward_and_backward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casting == AUTOCAST):
            loss = task.loss(module, values)
        loss.backward()

    return allocated_peak(forward_and_backward, folder)


@pytest.mark.parametrize(
    ("kind", "casting", "rows_of_chunk"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row not in QUICK))
        for row in itertools.product(KINDS, (PLAIN, CAST, AUTOCAST), ROWS_OF_CHUNK)
    ],
)
def test_the_planned_peak_of_a_loss_is_the_allocators(
    kind: str, casting: str, rows_of_chunk: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", rows_of_chunk * LARGE_VOCABULARY)
    reader = _reader(kind, rows_of_chunk)
    degrees = (1,) if kind == "linear" else (1, 4)
    for batch in BATCHES:
        for tp in degrees:
            planned = _planned_peak(reader, casting, batch, tp)
            measured = _measured_peak(reader, casting, batch, tp, tmp_path)
            assert planned == pytest.approx(measured, rel=0.005), (batch, tp)
