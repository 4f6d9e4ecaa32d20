"""Frozen matrices in 16 bits: the numbers of autocast, under every layout, in half the memory."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from experiments.parity.curves import Curve, train
from strategies import parallelize
from strategies.costs import StepShape, model_size, rank_size, replicated, unit_size
from strategies.frozen import CASTS_WEIGHTS, narrow, narrow_parameters
from strategies.parallelize import Options, choose
from tests.pool import run_distributed
from tests.strategies.models import PlainGPT, gpt_trial, seeded

CPU = torch.device("cpu")
LAYOUTS = (("ddp", {}), ("fsdp", {}), ("tensor", {}), ("pipeline", {"pp": 2}))


def _adapted() -> nn.Module:
    """A GPT of which only norms, biases and the first block train; its table has 16 bits."""
    model = PlainGPT(layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or name.startswith("blocks.0."))
    model.embed.weight.data = model.embed.weight.bfloat16().float()
    return model


def _curves(
    rank: int, workers: int, layouts: list[tuple[str, dict[str, int]]]
) -> list[list[Curve]]:
    """For each layout: the curve with frozen matrices in 16 bits, and with all in float32."""
    trial = replace(gpt_trial(), build=seeded(_adapted), steps=2)
    pairs = []
    for name, degrees in layouts:
        arguments = (trial, choose(name, workers, **degrees), Options(precision="bf16"), CPU)
        narrowed = train(*arguments)
        with mock.patch.object(parallelize, "narrowed", lambda build, *_: build):
            pairs.append([narrowed, train(*arguments)])
    return pairs


def _assert_same(narrowed: Curve, float32: Curve) -> None:
    assert narrowed.losses == float32.losses
    assert narrowed.norms == float32.norms
    assert narrowed.weights["head.weight"].dtype == torch.bfloat16
    assert float32.weights["head.weight"].dtype == torch.float32
    for name, weight in narrowed.weights.items():
        assert torch.equal(weight, float32.weights[name].to(weight.dtype)), name


@pytest.mark.pure
def test_one_device_trains_to_the_same_bits() -> None:
    ((narrowed, float32),) = _curves(0, 1, [("single", {})])
    _assert_same(narrowed, float32)


@pytest.mark.alone
def test_every_layout_trains_to_the_same_bits() -> None:
    for narrowed, float32 in run_distributed(_curves, 2, 2, LAYOUTS)[0]:
        _assert_same(narrowed, float32)


class _Scaled(nn.Embedding):
    """An embedding that computes with its rows, as some of transformers do."""


class _Experts(nn.Module):
    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.ones(2, 3, 4), requires_grad=False)
        setattr(self, CASTS_WEIGHTS, casts)


@pytest.mark.pure
def test_only_matrices_of_layers_that_autocast_casts_are_narrowed() -> None:
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(3, 4),
            "scaled": _Scaled(3, 4),
            "tied": nn.Linear(4, 3),
            "linear": nn.Linear(4, 3),
            "trained": nn.Linear(4, 3),
            "image": nn.Conv2d(3, 4, 2),
            "norm": nn.LayerNorm((3, 4)),
            "experts": _Experts(True),
            "others": _Experts(False),
        }
    ).requires_grad_(False)
    model["tied"].weight = model["scaled"].weight
    model["trained"].requires_grad_(True)
    narrow(model, "fp32")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    names = {"table.weight", "linear.weight", "image.weight", "experts.matrices"}
    assert narrow_parameters(model) == names
    narrow(model, "fp16")
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float16} == names
    tokens = torch.tensor([1])
    assert model["table"](tokens).dtype == torch.float16, "where everything is cast"
    with torch.autocast("cpu", dtype=torch.float16):
        assert model["table"](tokens).dtype == torch.float32, "as autocast leaves it"


@pytest.mark.pure
def test_checkpoints_are_read_into_either_type(tmp_path: Path) -> None:
    def weights(precision: str) -> dict[str, torch.Tensor]:
        model = seeded(_adapted)()
        narrow(model, precision)
        return model.state_dict()

    for saved, read in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")):
        folder = tmp_path / f"{saved}-{read}"
        dcp.save(weights(saved), checkpoint_id=folder, no_dist=True)
        state = {name: torch.zeros_like(tensor) for name, tensor in weights(read).items()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        for name, tensor in weights(saved).items():
            assert torch.equal(state[name], tensor.to(state[name].dtype)), (saved, read, name)


@pytest.mark.pure
def test_costs_count_the_bytes_that_are_held() -> None:
    model = seeded(_adapted)()
    size = model_size(model, narrow=narrow_parameters(model))
    narrow(model, "bf16")
    planned = [replace(p, itemsize=2) if p.narrows else p for p in size.parameters]
    cost = replicated(rank_size([unit_size(planned, 1)]), StepShape(compute_itemsize=2))
    assert cost.parameters == sum(p.nbytes for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cost.gradients == 4 * trained
