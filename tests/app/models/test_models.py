"""Models: shapes, construction on meta, equal starts from equal seeds, and a GPT's options.

A GPT's options give the same values, or nearly, under every kind of layout.
"""

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


def gpt(**options: Any) -> GPT:
    return GPT(50, **({"d_model": 32, "n_layers": 2, "n_heads": 4} | options))


MODELS: dict[str, tuple[Build, Tensor, tuple[int, ...]]] = {
    "mlp of images": (lambda: MLP(48, 3, hidden=(8,)), random(5, 3, 4, 4), (5, 3)),
    "cnn of small colour images": (
        lambda: CNN(3, 8, 9, 4, widths=(4, 8, 8)),
        random(2, 3, 8, 9),
        (2, 4),
    ),
    "resnet18": (lambda: ResNet(1, 28, 10, width=8), random(2, 1, 28, 28), (2, 10)),
    "resnet50 large": (lambda: ResNet(3, 96, 5, depth=50, width=8), random(2, 3, 96, 96), (2, 5)),
    "gpt": (gpt, tokens(2, 7), (2, 7, 50)),
    "gpt tied": (lambda: gpt(tie_weights=True), tokens(2, 7), (2, 7, 50)),
    "gpt dropout": (lambda: gpt(dropout=0.1, d_hidden=24), tokens(1, 1), (1, 1, 50)),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", MODELS)
def test_equal_seeds_and_states_give_equal_models_with_all_gradients(name: str) -> None:
    build, inputs, shape = MODELS[name]
    model, other_seed, rebuilt = (seeded(build, seed)().eval() for seed in (3, 4, 3))
    assert same_bits(model.state_dict(), rebuilt.state_dict())
    assert not same_bits(model.state_dict(), other_seed.state_dict()), (
        "weights come from the global generator"
    )
    generator_before = torch.get_rng_state()
    with torch.device("meta"):
        copy = build().eval()
    assert torch.equal(generator_before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in copy.parameters())
    if name == "gpt tied":
        assert isinstance(model, GPT) and model.head.weight is model.embed.weight
    copy.to_empty(device="cpu")
    if isinstance(copy, GPT):
        copy.tie_weights()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs), copy(inputs))
    # Each row is computed independently, as micro-batches need (BatchNorm's statistics are fixed).
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
    model = gpt()
    inputs = tokens(4, 16)
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
    q = torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 12, 1, 8)
    k = torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 12, 1, 8)
    turns = rotary_table(torch.zeros(1, 12), 8)
    turned_q = apply_rotary(q, turns)
    turned_k = apply_rotary(k, turns)
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
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.06)


NARROW = {"residual_in_fp32": False}
FUSED = {"fused_projections": True}


def step(
    options: dict[str, Any], dtype: torch.dtype | None
) -> tuple[list[Tensor], set[torch.dtype]]:
    """The loss and gradients of a step, and the types of the blocks' inputs."""
    torch.manual_seed(0)
    model = gpt(**options)
    input_types = set()
    for block in model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: input_types.add(args[0].dtype))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(tokens(3, 9)[:, :-1], tokens(3, 9)[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], input_types


@pytest.mark.pure
@pytest.mark.parametrize("options", [NARROW, FUSED, NARROW | FUSED])
def test_options_change_no_value_in_float32_and_in_16_bits_only_by_rounding(
    options: dict[str, Any],
) -> None:
    plain, plain_types = step({}, None)
    values, input_types = step(options, None)
    assert plain_types == input_types == {torch.float32}
    if options is NARROW:
        assert all(map(torch.equal, plain, values))
    for expected, value in zip(plain, values):
        torch.testing.assert_close(expected, value, rtol=1e-5, atol=1e-7)
    plain, plain_types = step({}, torch.bfloat16)
    values, input_types = step(options, torch.bfloat16)
    assert plain_types == {torch.float32}
    assert input_types == {torch.bfloat16 if "residual_in_fp32" in options else torch.float32}
    for expected, value in zip(plain, values):
        assert (expected - value).norm() <= 0.03 * expected.norm()
        assert expected.dtype == value.dtype


def _values(text: str, options: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "vocab_size": 300,
        "sequence_length": 16,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 2,
        "data": text,
    }
    overrides = [
        "task=language_modelling",
        f"task_args={json.dumps(sizes | options)}",
        "train.global_batch_size=8",
    ]
    return to_dict(load_config([], [*overrides, "train.clip_norm=0.5", "optimizer.lr=0.01"]))


def _trained(
    rank: int, name: str, workers: int, values: Any, options: Any
) -> tuple[Curve, int, int]:
    """Trains three steps in two micro-batches each.

    Returns:
        The curve, the number of losses that the model computed itself, and the number of fused
        backward passes of several layers. (A pipeline runs forward once more to examine it.)
    """
    trial = replace(make_trial(values, steps=3), micro_batches=2)
    with (
        mock.patch.object(
            linear._Linears, "backward", wraps=linear._Linears.backward
        ) as fused_backwards,
        mock.patch(
            "app.models.gpt.linear_cross_entropy", wraps=linear_cross_entropy
        ) as linear_losses,
    ):
        curve = train(trial, choose(name, workers), Options(**options), torch.device("cpu"))
    return curve, linear_losses.call_count, fused_backwards.call_count


@functools.cache
def _alone(text: str, tied: bool, precision: str) -> Curve:
    """The curve of a run on one device without any of the options."""
    task_args = {"linear_loss": False, "tie_weights": tied}
    curve, linear_losses, fused_backwards = _trained(
        0, "single", 1, _values(text, task_args), {"precision": precision}
    )
    assert linear_losses == fused_backwards == 0
    return curve


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of random tokens."""
    path = tmp_path_factory.mktemp("numbers") / "tokens.bin"
    np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16).tofile(path)
    return str(path)


LAYOUTS = [("ddp", {}, True, True), ("fsdp", {"activation_checkpointing": "selective"}, True, True)]
LAYOUTS += [("tensor", {}, False, False), ("pipeline", {"schedule": "zb_h1"}, False, False)]
LAYOUTS += [("pipeline", {}, False, True)]


def _layouts_with_options() -> list[Any]:
    """Every layout with tied weights in 32 bits, and without them in 16: one of both is quick."""
    rows = []
    for number, layout in enumerate(LAYOUTS):
        for is_tied, numbers in ((True, "fp32"), (False, "bf16")):
            marks = [] if is_tied == (number % 2 == 0) else [pytest.mark.slow]
            row_id = f"{layout[0]} {layout[1]} {numbers}"
            rows.append(pytest.param(*layout, is_tied, numbers, marks=marks, id=row_id))
    return rows


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "options", "gives_loss", "fuses", "tied", "precision"), _layouts_with_options()
)
def test_every_layout_trains_the_same_with_all_options(
    name: str,
    options: dict[str, Any],
    gives_loss: bool,
    fuses: bool,
    tied: bool,
    precision: str,
    numbers: str,
) -> None:
    values = _values(numbers, {"linear_loss": True, "tie_weights": tied, **NARROW, **FUSED})
    options = options | {"precision": precision}
    results = run_distributed(_trained, 2, name, 2, values, options)
    curve, linear_losses, fused_backwards = results[0]
    assert linear_losses == (6 if gives_loss else 0) and (fused_backwards > 0) == fuses
    distance = difference(_alone(numbers, tied, precision), curve)
    loss, norm, weights = (5e-6, 5e-5, 1e-3) if precision == "fp32" else (3e-3, 3e-2, 1.0)
    assert distance.loss <= loss and distance.norm <= norm and distance.weights <= weights, distance


BLOCKS = [("bf16", "none", False), ("bf16", "selective", True), ("fp8", "selective", False)]


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode", "options"), BLOCKS)
def test_a_block_of_a_gpt_is_compiled_as_one_graph(kind: str, mode: str, options: bool) -> None:
    """Forward and backward, with the wrappers that strategies/parallelize.py applies.

    After a graph break, the operations between two graphs would be launched one by one.
    """
    model = GPT(50, d_model=32, n_heads=2, dropout=0.1, fused_projections=options)
    names = find_blocks(model)
    if kind == "fp8":
        precision.use_float8(model, names)
    activation_checkpointing.apply(model, names, mode)
    block = model.get_submodule(names[0])
    x = torch.randn(
        2, 8, 32, dtype=torch.bfloat16 if options else torch.float32, requires_grad=True
    )
    turns = rotary_table(torch.zeros(2, 8), 16)
    compiled = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    with precision.autocast(kind, "cpu")():
        compiled(x, turns).float().square().mean().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in block.parameters())
