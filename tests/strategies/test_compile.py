"""What train.compile compiles of Hugging Face's models is one graph: around a break operations are launched one by one.
Of plain models: test_parity.py; of ours: tests/app/models."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from app.config import Config, TrainConfig
from app.config_io import to_dict
from experiments.parity.curves import begin, run_steps
from experiments.parity.experiment import make_trial
from experiments.parity.rows import SINGLE, Row
from strategies.parallelize import Options
from tests.pool import run_distributed

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"model": "llama", "config": SIZES | {"num_key_value_heads": 4}, "sequence_length": 16}
SLOW = [
    *(Row(name, 2) for name in ("ddp", "zero2", "fsdp", "tensor")),
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("fsdp+tensor", 4, {"tp": 2}),
    Row("pipeline", 2, {"pp": 2}, micro_batches=2),
]


def _losses(rank: int, row: Row, values: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """Of two steps; a break in a graph ends it."""
    trial, chosen = row.applied(make_trial(values, 2), Options(**options))
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, fullgraph=True)):
        parallel = begin(trial, row.layout, chosen, torch.device("cpu"))
        torch.compiler.reset()
        return run_steps(trial, parallel, trial.optimizer(parallel.parameters()), range(2))[0]


@pytest.mark.parametrize("row", [SINGLE, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=str)
def test_a_block_of_hugging_faces_is_one_graph(row: Row, text: str) -> None:
    train = TrainConfig(global_batch_size=8, steps=2)
    values = to_dict(Config("huggingface", {**LLAMA, "data": text, "eval_samples": 1}, train=train))
    options = {"compile": True, "compile_backend": "aot_eager", "activation_checkpointing": "selective"}
    run = functools.partial(run_distributed, _losses, row.workers) if row.workers > 1 else functools.partial(_losses, 0)
    found = run(row, values, options)
    last = found if row.workers == 1 else found[-1]
    assert last == pytest.approx(_losses(0, SINGLE, values, {}), rel=2e-5)
