"""Models: shapes, construction on meta, the same start from the same seed, and what parallelism relies on; a GPT's
options: the same numbers, or nearly, under every kind of layout."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.config.io import load_config, to_dict
from app.models import linear
from app.models.cross_entropy import linear_cross_entropy
from app.models.feedforward import CNN, MLP, ResNet
from app.models.gpt import GPT, apply_rotary, rotary_table
from experiments.parity.curves import Curve, difference, train
from experiments.parity.experiment import make_trial
from strategies import activation_checkpointing, precision
from strategies.blocks import find_blocks
from strategies.parallelize import Options, choose
from tests.pool import run_distributed
from tests.running import same_bits
from tests.strategies.models import random, seeded

Build = Callable[[], nn.Module]


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def gpt(**changes: Any) -> GPT:
    return GPT(50, **({"d_model": 32, "n_layers": 2, "n_heads": 4} | changes))


MODELS: dict[str, tuple[Build, Tensor, tuple[int, ...]]] = {
    "mlp of images": (lambda: MLP(48, 3, hidden=(8,)), random(5, 3, 4, 4), (5, 3)),
    "cnn of small colour images": (lambda: CNN(3, 8, 9, 4, widths=(4, 8, 8)), random(2, 3, 8, 9), (2, 4)),
    "resnet18": (lambda: ResNet(1, 28, 10, width=8), random(2, 1, 28, 28), (2, 10)),
    "resnet50 large": (lambda: ResNet(3, 96, 5, depth=50, width=8), random(2, 3, 96, 96), (2, 5)),
    "gpt": (gpt, tokens(2, 7), (2, 7, 50)),
    "gpt tied": (lambda: gpt(tie_weights=True), tokens(2, 7), (2, 7, 50)),
    "gpt dropout": (lambda: gpt(dropout=0.1, d_hidden=24), tokens(1, 1), (1, 1, 50)),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_and_the_same_state_give_the_same_model_with_all_gradients(name: str) -> None:
    build, inputs, shape = MODELS[name]
    model, other, again = (seeded(build, seed)().eval() for seed in (3, 4, 3))
    assert same_bits(model.state_dict(), again.state_dict())
    assert not same_bits(model.state_dict(), other.state_dict()), "weights come from the global generator"
    generator_before = torch.get_rng_state()
    with torch.device("meta"):
        twin = build().eval()
    assert torch.equal(generator_before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in twin.parameters())
    if name == "gpt tied":
        assert isinstance(model, GPT) and model.head.weight is model.embed.weight
    twin.to_empty(device="cpu")
    if isinstance(twin, GPT):
        twin.tie_weights()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs), twin(inputs))
    # every row is computed on its own, as micro-batches rely on (BatchNorm has fixed statistics here)
    assert torch.allclose(model(inputs)[:1], model(inputs[:1]), atol=1e-5)
    outputs = model.train()(inputs)
    assert outputs.shape == shape and outputs.isfinite().all()
    outputs.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if name == "resnet18":  # blocks that keep the shape start as the identity
        x = random(2, 8, 6, 6).relu()
        assert torch.equal(model.blocks["0"](x), x)  # type: ignore[index, operator]


@pytest.mark.pure
def test_a_gpt_starts_at_chance_and_cannot_see_the_future() -> None:
    torch.manual_seed(0)
    model, inputs = gpt(), tokens(4, 16)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten().roll(1))
    assert loss.item() == pytest.approx(3.912, abs=0.1), "ln 50"
    before = tokens(1, 9)
    after = before.clone()
    after[0, 5:] = (after[0, 5:] + 1) % 50
    assert torch.allclose(model(before)[0, :5], model(after)[0, :5], atol=1e-6)
    assert not torch.allclose(model(before)[0, 5:], model(after)[0, 5:], atol=1e-3)


@pytest.mark.pure
def test_rotary_attention_depends_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 12, 1, 8) for _ in range(2))
    turns = rotary_table(torch.zeros(1, 12), 8)
    turned_q, turned_k = apply_rotary(q, turns), apply_rotary(k, turns)
    scores = turned_q[0, :, 0] @ turned_k[0, :, 0].T
    for distance in range(-4, 5):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1], atol=1e-5)
    assert (scores.diagonal(0)[0] - scores.diagonal(3)[0]).abs() > 1e-3
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.pure
@pytest.mark.parametrize(("depth", "millions"), [(18, 11.7), (34, 21.8), (50, 25.6)])
def test_resnets_have_the_size_of_the_paper(depth: int, millions: float) -> None:
    with torch.device("meta"):
        model = ResNet(3, 224, 1000, depth=depth)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


NARROW, FUSED = {"residual_in_fp32": False}, {"fused_projections": True}


def step(options: dict[str, Any], dtype: torch.dtype | None) -> tuple[list[Tensor], set[torch.dtype]]:
    """Loss and gradients of a step; the types of what flows into blocks."""
    torch.manual_seed(0)
    model, seen = gpt(**options), set()
    for block in model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(tokens(3, 9)[:, :-1], tokens(3, 9)[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], seen


@pytest.mark.pure
@pytest.mark.parametrize("options", [NARROW, FUSED, NARROW | FUSED])
def test_options_change_nothing_in_float32_and_by_rounding_in_16_bits(options: dict[str, Any]) -> None:
    (plain, wide), (found, seen) = step({}, None), step(options, None)
    assert wide == seen == {torch.float32} and (options is not NARROW or all(map(torch.equal, plain, found)))
    for a, b in zip(plain, found):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    (plain, wide), (found, seen) = step({}, torch.bfloat16), step(options, torch.bfloat16)
    assert wide == {torch.float32} and seen == {torch.bfloat16 if "residual_in_fp32" in options else torch.float32}
    for a, b in zip(plain, found):
        assert (a - b).norm() <= 0.03 * a.norm() and a.dtype == b.dtype


def _values(text: str, options: dict[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": 300, "sequence_length": 16, "d_model": 32, "n_layers": 2, "n_heads": 2, "data": text}
    given = ["task=language_modelling", f"task_args={json.dumps(sizes | options)}", "train.global_batch_size=8"]
    return to_dict(load_config([], [*given, "train.clip_norm=0.5", "optimizer.lr=0.01"]))


def _trained(rank: int, name: str, workers: int, values: Any, options: Any) -> tuple[Curve, int, int]:
    """The curve, how many micro-batches' losses the model gave, and how often several layers' backward was one
    operation's (a pipeline runs forward to look at it)."""
    trial = replace(make_trial(values, steps=3), micro_batches=2)
    with (
        mock.patch.object(linear._Linears, "backward", wraps=linear._Linears.backward) as fused,
        mock.patch("app.models.gpt.linear_cross_entropy", wraps=linear_cross_entropy) as given,
    ):
        curve = train(trial, choose(name, workers), Options(**options), torch.device("cpu"))
    return curve, given.call_count, fused.call_count


@functools.cache
def _alone(text: str, tied: bool, precision: str) -> Curve:
    """Without any of the options."""
    plain = {"linear_loss": False, "tie_weights": tied}
    curve, given, fused = _trained(0, "single", 1, _values(text, plain), {"precision": precision})
    assert given == fused == 0
    return curve


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("numbers") / "tokens.bin"
    np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16).tofile(path)
    return str(path)


LAYOUTS = [("ddp", {}, True, True), ("fsdp", {"activation_checkpointing": "selective"}, True, True)]
LAYOUTS += [("tensor", {}, False, False), ("pipeline", {"schedule": "zb_h1"}, False, False)]
LAYOUTS += [("pipeline", {}, False, True)]


@pytest.mark.alone
@pytest.mark.parametrize(("name", "options", "gives_loss", "fuses"), LAYOUTS)
@pytest.mark.parametrize(("tied", "precision"), [(True, "fp32"), (False, "bf16")])
def test_every_layout_trains_the_same_with_all_options(
    name: str, options: dict[str, Any], gives_loss: bool, fuses: bool, tied: bool, precision: str, numbers: str
) -> None:
    values = _values(numbers, {"linear_loss": True, "tie_weights": tied, **NARROW, **FUSED})
    found, given, fused = run_distributed(_trained, 2, name, 2, values, options | {"precision": precision})[0]
    assert given == (6 if gives_loss else 0) and (fused > 0) == fuses
    differs = difference(_alone(numbers, tied, precision), found)
    loss, norm, weights = (5e-6, 5e-5, 1e-3) if precision == "fp32" else (3e-3, 3e-2, 1.0)
    assert differs.loss <= loss and differs.norm <= norm and differs.weights <= weights, differs


BLOCKS = [("bf16", "none", False), ("bf16", "selective", True), ("fp8", "selective", False)]


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode", "options"), BLOCKS)
def test_a_block_of_a_gpt_is_compiled_as_one_graph(kind: str, mode: str, options: bool) -> None:
    """Forward and backward, as strategies/parallelize.py puts things on it: a break would launch what lies between two
    graphs operation by operation."""
    model = GPT(50, d_model=32, n_heads=2, dropout=0.1, fused_projections=options)
    names = find_blocks(model)
    if kind == "fp8":
        precision.use_float8(model, names)
    activation_checkpointing.apply(model, names, mode)
    block = model.get_submodule(names[0])
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16 if options else torch.float32, requires_grad=True)
    with precision.autocast(kind, "cpu")():
        torch.compile(block.forward, fullgraph=True, backend="aot_eager")(x).float().square().mean().backward()
    assert x.grad is not None and all(parameter.grad is not None for parameter in block.parameters())
