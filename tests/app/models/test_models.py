"""Models: shapes, construction on meta, the same start from the same seed, and what parallelism relies on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.feedforward import CNN, MLP, ResNet
from app.models.gpt import GPT, rotated
from strategies import activation_checkpointing, precision
from strategies.blocks import find_blocks
from tests.strategies.models import random

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


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_gradients(name: str) -> None:
    build, inputs, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    outputs = model(inputs)
    if isinstance(model, ResNet):  # blocks that keep the shape start as the identity
        x = random(2, 8, 6, 6).relu()
        assert name == "resnet50 large" or torch.equal(model.blocks["0"](x), x)
    assert outputs.shape == shape and outputs.isfinite().all()
    outputs.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_and_the_same_state_give_the_same_model(name: str) -> None:
    build, inputs, _ = MODELS[name]
    models = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        models.append(build().eval())
    model = models[0]
    pairs = [[torch.equal(a, b) for a, b in zip(model.state_dict().values(), m.state_dict().values())] for m in models]
    assert all(pairs[2]) and not all(pairs[1]), "weights come from the global generator"
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


def test_rotary_attention_depends_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 1, 12, 8) for _ in range(2))
    turned_q, turned_k = rotated(q, k)
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in range(-4, 5):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1], atol=1e-5)
    assert (scores.diagonal(0)[0] - scores.diagonal(3)[0]).abs() > 1e-3
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.7), (34, 21.8), (50, 25.6)])
def test_resnets_have_the_size_of_the_paper(depth: int, millions: float) -> None:
    with torch.device("meta"):
        model = ResNet(3, 224, 1000, depth=depth)
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=[pytest.mark.slow] * (mode != ("selective" if kind == "fp8" else "none")))
        for kind in ("fp32", "bf16", "bf16 options", "fp8")
        for mode in ("none", "full", "selective")
    ],
)
def test_a_block_of_a_gpt_is_compiled_as_one_graph(kind: str, mode: str) -> None:
    """Forward and backward, as strategies/parallelize.py puts things on it: a break would launch what lies between two
    graphs operation by operation."""
    kind, options = kind.split()[0], "options" in kind
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
