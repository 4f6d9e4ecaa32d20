"""A GPT's faster options: the same numbers where they are not asked for, nearly the same where they are, everywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.config_io import load_config, to_dict
from app.models import linear
from app.models.gpt import GPT
from experiments.parity import curves
from experiments.parity.curves import Curve
from experiments.parity.experiment import make_trial
from strategies.layout import choose
from strategies.parallelize import Options
from tests.pool import run_distributed

OPTIONS = {"residual_in_fp32": False, "fused_projections": True}


def step(options: dict[str, Any], dtype: torch.dtype | None) -> tuple[list[Tensor], set[torch.dtype]]:
    """Loss and gradients of a step; the types of what flows into blocks."""
    torch.manual_seed(0)
    model, seen = GPT(50, d_model=32, n_layers=2, n_heads=4, **options), set()
    for block in model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], seen


def test_in_float32_the_residual_is_float32_and_one_operation_is_several_to_rounding() -> None:
    plain, seen = step({}, None)
    narrow, seen_too = step({"residual_in_fp32": False}, None)
    assert all(map(torch.equal, plain, narrow)) and seen == seen_too == {torch.float32}
    for a, b in zip(plain, step({"fused_projections": True}, None)[0]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"residual_in_fp32": False}, {"fused_projections": True}, OPTIONS])
def test_in_16_bits_they_differ_by_rounding(options: dict[str, Any]) -> None:
    plain, wide = step({}, torch.bfloat16)
    found, seen = step(options, torch.bfloat16)
    assert wide == {torch.float32} and seen == {torch.bfloat16 if "residual_in_fp32" in options else torch.float32}
    for a, b in zip(plain, found):
        assert (a - b).norm() <= 0.03 * a.norm() and a.dtype == b.dtype


def test_layers_that_compute_in_their_own_way_are_called() -> None:
    x, layers = torch.randn(2, 3, 8), [nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)]
    layers[1].forward = lambda x: x + 1  # type: ignore[method-assign]
    with mock.patch.object(linear._Linears, "apply") as applied:
        first, second = linear.linears(x, layers, fused=True)
        assert torch.equal(second, x + 1) and torch.equal(first, layers[0](x))
        linear.linears(x, layers[:1], fused=False)
        assert not applied.called
        linear.linears(x, layers[:1], fused=True)
        assert applied.called


def values(text: str, options: dict[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": 300, "sequence_length": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "data": text}
    given = ["task=language_modelling", f"task_args={json.dumps(sizes | options)}", "train.global_batch_size=8"]
    return to_dict(load_config([], [*given, "train.clip_norm=0.5", "optimizer.lr=0.01"]))


def train(_: int, name: str, workers: int, given: dict[str, Any], options: dict[str, Any]) -> tuple[Curve, int]:
    """The curve, and how often several layers' backward was one operation's (a pipeline runs forward to look at it)."""
    trial = replace(make_trial(given, steps=4), micro_batches=2)
    with mock.patch.object(linear._Linears, "backward", wraps=linear._Linears.backward) as backward:
        curve = curves.train(trial, choose(name, workers), Options(precision="bf16", **options), torch.device("cpu"))
    return curve, backward.call_count


ROWS = [("ddp", {}, True), ("fsdp", {"activation_checkpointing": "selective"}, True), ("tensor", {}, False)]
ROWS += [("pipeline", {"schedule": "zb_h1"}, False), ("pipeline", {}, True)]


@pytest.mark.parametrize(("name", "options", "fused"), ROWS, ids=[f"{name} {options}" for name, options, _ in ROWS])
def test_every_layout_trains_the_same_with_them(tmp_path: Path, name: str, options: dict, fused: bool) -> None:
    text = str(tmp_path / "tokens.bin")
    np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16).tofile(text)
    truth, none = train(0, "single", 1, values(text, {}), {})
    found, count = run_distributed(train, 2, name, 2, values(text, OPTIONS), options)[0]
    assert none == 0 and (count > 0) == fused
    differs = curves.difference(truth, found)
    assert differs.loss <= 3e-3 and differs.norm <= 3e-2, (name, differs)
