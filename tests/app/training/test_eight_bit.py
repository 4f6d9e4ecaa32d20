"""AdamW in 8 bits: torchao's numbers on one device, and the same ones under every layout."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from app.config import OptimizerConfig
from app.errors import UserError
from app.tasks.huggingface.quantized import without_warnings_of_torchao
from app.training import narrow_adamw
from app.training.eight_bit import AdamW8bit
from app.training.optimizer import build_optimizer
from experiments.parity.curves import Curve, difference, train
from strategies.costs import model_size, optimizer_bytes, rank_size, unit_size
from strategies.parallelize import Options, choose
from tests.pool import run_distributed
from tests.strategies.models import gpt_trial

CPU = torch.device("cpu")
BLOCK = 8
"""Divides the rows of a small GPT, also where two workers have half of each."""
STEPS = 4


def _parameters() -> list[nn.Parameter]:
    """Of two matrices the rows are whole blocks; torchao rounds them too, as they are large."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 512), (3, 8, 256), (256,), ())
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient * 10 ** torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.pure
def test_one_device_has_the_numbers_of_torchao_to_the_bit() -> None:
    with without_warnings_of_torchao():
        from torchao.optim import AdamW8bit as TorchAO

    values: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    theirs = _parameters()
    with torch.compiler.set_stance("force_eager"):
        expected = _train(theirs, TorchAO(theirs, lr=torch.tensor(1e-2), **values))
    ours = _parameters()
    optimizer = AdamW8bit(ours, lr=1e-2, **values)
    for one, other in zip(expected, _train(ours, optimizer), strict=True):
        assert torch.equal(one, other)
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[ours[2]]["exp_avg"].dtype == torch.float32


@pytest.mark.pure
def test_pieces_of_a_parameter_have_the_numbers_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = _parameters()
    expected = _train(at_once, AdamW8bit(at_once))
    monkeypatch.setattr(narrow_adamw, "PIECE", 1500)
    parts = _parameters()
    for one, other in zip(expected, _train(parts, AdamW8bit(parts)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.pure
def test_a_step_is_one_graph_with_the_same_numbers() -> None:
    """As it is compiled on GPUs, here without a code generator."""
    expected = _parameters()[:1]
    _train(expected, AdamW8bit(expected))
    compiled = torch.compile(
        narrow_adamw.update_piece, fullgraph=True, dynamic=True, backend="eager"
    )
    parameters = _parameters()[:1]
    with mock.patch.object(narrow_adamw, "update_piece", compiled):
        _train(parameters, AdamW8bit(parameters))
    for one, other in zip(expected, parameters, strict=True):
        assert torch.equal(one, other)


@pytest.mark.pure
def test_the_state_has_two_bytes_a_weight_and_is_counted_to_the_byte() -> None:
    model = nn.Sequential(
        nn.Linear(512, 6),
        nn.Conv2d(32, 4, (2, 4)),
        nn.Linear(96, 3),
        nn.Conv2d(3, 4, 3),
        nn.LayerNorm(256),
    )
    parameters = list(model.parameters())
    optimizer = build_optimizer(OptimizerConfig(name="adamw8bit"), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    size = rank_size([unit_size(model_size(model).parameters, 1)])
    assert sum(value.nbytes for value in state) == optimizer_bytes(
        size.gradients, size.tensors, "adamw8bit", eight_bit_state=size.eight_bit_state
    )
    bytes_a_weight = [
        sum(value.nbytes for name, value in optimizer.state[p].items() if name != "step")
        / p.numel()
        for p in parameters
        if p.dim() > 1
    ]
    # 256 numbers share a scale, 256, 32, and in rows of 27 none do.
    assert bytes_a_weight == [2 + 8 / 256, 2 + 8 / 256, 2 + 8 / 32, 8]


def _built(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    config = OptimizerConfig(
        name="adamw8bit", lr=1e-2, eps=1e-3, weight_decay=0.01, args={"block_size": BLOCK}
    )
    return build_optimizer(config, parameters)


def _curve(strategy: str, workers: int, **values: Any) -> Curve:
    trial = replace(gpt_trial(layers=1), steps=STEPS, optimizer=_built)
    options = Options(offload=values.pop("offload", False))
    return train(trial, choose(strategy, workers), options, CPU, **values)


def _continued(rank: int, folder: str) -> list[Curve]:
    """The first half of the steps under one layout, and the others under the next."""
    half = STEPS // 2
    first = range(half)
    second = range(half, STEPS)
    return [
        _curve("fsdp", 2),
        _curve("tensor", 2),
        _curve("ddp", 2, steps=first, save=f"{folder}/ddp"),
        _curve("fsdp", 2, steps=second, load=f"{folder}/ddp"),
        _curve("fsdp", 2, steps=first, save=f"{folder}/fsdp", offload=True),
        _curve("tensor", 2, steps=second, load=f"{folder}/fsdp"),
        _curve("tensor", 2, steps=first, save=f"{folder}/tensor"),
    ]


@pytest.mark.alone
def test_every_layout_rounds_alike_and_reads_the_state_of_others(tmp_path: Path) -> None:
    single = _curve("single", 1)
    fsdp, tensor, *parts = run_distributed(_continued, 2, str(tmp_path))[0]
    assert difference(single, fsdp).within(2e-5)
    assert difference(single, tensor).within(2e-5)
    resumed = _curve("single", 1, steps=range(STEPS // 2, STEPS), load=f"{tmp_path}/tensor")
    for first, second in (parts[:2], parts[2:4], (parts[4], resumed)):
        curve = Curve(first.losses + second.losses, first.norms + second.norms, second.weights)
        assert difference(single, curve).within(2e-5)


def _refused(rank: int, block_size: int) -> str:
    config = OptimizerConfig(name="adamw8bit", args={"block_size": block_size})
    trial = replace(
        gpt_trial(layers=1), steps=1, optimizer=functools.partial(build_optimizer, config)
    )
    try:
        train(trial, choose("tensor", 2), Options(), CPU)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.alone
def test_a_layout_that_splits_blocks_is_refused_in_a_sentence() -> None:
    for message in run_distributed(_refused, 2, 16):
        assert "rounds 16 numbers of a row" in message and "\n" not in message
        assert "write optimizer.args={block_size: 8}" in message


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same_numbers_but_for_rounding() -> None:
    expected = _parameters()
    _train(expected, AdamW8bit(expected))
    on_gpu = [nn.Parameter(parameter.detach().cuda()) for parameter in _parameters()]
    generator = torch.Generator().manual_seed(1)
    optimizer = AdamW8bit(on_gpu)
    for _ in range(STEPS):
        for parameter in on_gpu:
            gradient = torch.randn(parameter.shape, generator=generator)
            scale = 10 ** torch.randn(parameter.shape, generator=generator)
            parameter.grad = (gradient * scale).cuda()
        optimizer.step()
    for one, other in zip(expected, on_gpu, strict=True):
        assert torch.allclose(one, other.cpu(), atol=1e-5)
