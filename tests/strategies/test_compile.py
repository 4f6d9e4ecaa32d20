"""What train.compile compiles is one graph, blocks of ours and of Hugging Face's, but with parallel.cp: around a break
operations are launched one by one."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from app.config import Config, TrainConfig
from app.config_io import to_dict
from experiments.parity.curves import begin, run_steps
from experiments.parity.experiment import make_trial
from experiments.parity.rows import SINGLE, Row
from strategies.parallelize import LayoutError, Options, check
from tests.pool import run_distributed

GPT: dict[str, Any] = {"d_model": 32, "n_layers": 4, "n_heads": 4, "sequence_length": 16}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"model": "llama", "config": SIZES | {"num_key_value_heads": 4}, "sequence_length": 16}
ROWS = [
    SINGLE,
    *(Row(name, 2) for name in ("ddp", "zero2", "fsdp", "tensor")),
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("fsdp+tensor", 4, {"tp": 2}),
    Row("pipeline", 2, {"pp": 2}, micro_batches=2),
]


def _losses(rank: int, row: Row, values: dict[str, Any], options: dict[str, Any], graphs: bool) -> list[float]:
    """Of two steps. graphs: a break ends it."""
    trial, chosen = row.applied(make_trial(values, 2), Options(**options))
    whole = functools.partial(torch.compile, fullgraph=True)
    with mock.patch.object(torch, "compile", whole if graphs else torch.compile):
        parallel = begin(trial, row.layout, chosen, torch.device("cpu"))
        torch.compiler.reset()
        return run_steps(trial, parallel, trial.optimizer(parallel.parameters()), range(2))[0]


def _values(task: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{i} and {i} are {2 * i}.\n" for i in range(200)))
    train = TrainConfig(global_batch_size=8, steps=2)
    return to_dict(Config(task, {**arguments, "data": str(text), "eval_samples": 1}, train=train))


TASKS = {"language_modelling": GPT, "huggingface": LLAMA}
QUICK = [(SINGLE, "huggingface"), (ROWS[3], "language_modelling")]
CASES = [
    pytest.param(row, task, id=f"{row} {task}", marks=[pytest.mark.slow] * ((row, task) not in QUICK))
    for row in ROWS
    for task in TASKS
]


@pytest.mark.parametrize(("row", "task"), CASES)
def test_a_block_is_one_graph(row: Row, task: str, tmp_path: Path) -> None:
    values = _values(task, TASKS[task], tmp_path)
    options = {"compile": True, "compile_backend": "aot_eager", "activation_checkpointing": "selective"}
    truth = _losses(0, SINGLE, values, {}, False)
    run = functools.partial(run_distributed, _losses, row.workers) if row.workers > 1 else functools.partial(_losses, 0)
    found = run(row, values, options, True)
    last = found if row.workers == 1 else found[-1]
    assert last == pytest.approx(truth, rel=2e-5)


def test_a_split_sequence_is_compiled_and_recomputed(tmp_path: Path) -> None:
    """The compiler traces recomputing without what lets attention go across workers."""
    values, options = _values("language_modelling", GPT, tmp_path), {"compile": True, "compile_backend": "aot_eager"}
    row, full = Row("context", 2, options={"context": "ring"}), {"activation_checkpointing": "full"}
    found = run_distributed(_losses, 2, row, values, options | full, False)[0]
    assert found == pytest.approx(_losses(0, SINGLE, values, {}, False), rel=2e-5)
    with pytest.raises(LayoutError, match="activation_checkpointing=full"):
        check(row.layout, Options(**(options | {"activation_checkpointing": "selective"})))
