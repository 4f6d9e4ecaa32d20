"""float8: its rounding, its products beside float32's, the layers that use it, and refusals.

torch's CPU has the same product as its GPUs, slowly; what only a GPU can show is marked.
"""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from app.models.gpt import GPT
from experiments.parity import curves
from experiments.parity.curves import Trial
from strategies import precision
from strategies.parallelize import Options, choose
from strategies.precision import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    Float8Linear,
    Float8Product,
    Product,
    multiply,
    quantise,
)
from tests.pool import run_distributed
from tests.strategies.models import assert_refused, language_loss, random, seeded

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LAYOUTS = ("fsdp", "tensor", "pipeline")
PRODUCTS = {"trireme.float8_product.default", "aten.mm.default", "aten.addmm.default"}


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (random(*shape, seed=sum(shape)) * scale).bfloat16()


def _float8_product(left: Tensor, right: Tensor, device: torch.device = CPU) -> Tensor:
    """left · rightᵀ, multiplied on the device."""
    left8, left_scale = quantise(left, FORWARD_DTYPE)
    right8, right_scale = quantise(right, FORWARD_DTYPE)
    product = multiply(
        left8.to(device),
        right8.to(device),
        left_scale=left_scale.to(device),
        right_scale=right_scale.to(device),
    )
    return product.cpu()


def _cpu_multiplies() -> bool:
    try:
        _float8_product(torch.ones(16, 16), torch.ones(16, 16))
    except NotImplementedError:
        return False
    return True


needs_cpu_product = pytest.mark.skipif(
    not _cpu_multiplies(),
    reason="this torch's float8 product is for GPUs only (2.13: CPUs)",
)


@pytest.mark.pure
def test_a_tensor_is_scaled_to_the_whole_range_and_comes_back_rounded() -> None:
    for dtype, scale in ((FORWARD_DTYPE, 1e-6), (GRADIENT_DTYPE, 3e4)):
        x = _random(64, 32, scale=scale)
        x8, x_scale = quantise(x, dtype)
        restored = x8.float() * x_scale
        assert x8.float().abs().max() == torch.finfo(dtype).max
        is_normal = x.float().abs() > x.abs().max() / 1000  # smaller ones are subnormal in e4m3
        relative_errors = (restored - x.float()).abs()[is_normal] / x.float().abs()[is_normal]
        assert relative_errors.max() <= torch.finfo(dtype).eps / 2 * 1.001
        assert restored.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)
    zeros8, zeros_scale = quantise(torch.zeros(16, 16), FORWARD_DTYPE)
    assert not zeros8.float().any()
    assert zeros_scale.isfinite()


@pytest.mark.pure
@needs_cpu_product
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_product_of_a_number_that_is_not_finite_is_not_finite(bad: float) -> None:
    x = _random(16, 16)
    x[3, 4] = bad
    assert not _float8_product(x, _random(16, 16)).isfinite().all()


def _float8_and_plain_layer() -> tuple[Float8Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    layer = copy.deepcopy(plain)
    assert precision.use_float8(layer, []) == ()
    assert isinstance(layer, Float8Linear)
    return layer, plain


@pytest.mark.pure
@needs_cpu_product
def test_a_layer_rounds_to_float8_and_only_forward_adds_up_fast() -> None:
    results = []
    with mock.patch.object(F, "scaled_mm", wraps=F.scaled_mm) as scaled_mm:
        for module in _float8_and_plain_layer():
            x = _random(4, 8, 64).float().requires_grad_()
            y = module(x)
            (y.float() * _random(4, 8, 48, scale=1e-5).float()).sum().backward()
            results.append([y, x.grad, module.weight.grad, module.bias.grad])
    float8_results, plain_results = results
    tolerances = (0.05, 0.08, 0.08, 0.02)
    for float8, plain, tolerance in zip(float8_results, plain_results, tolerances):
        assert float8.shape == plain.shape
        error = (float8.float() - plain.float()).norm() / plain.float().norm()
        assert 0 < error < tolerance  # without an error it would not have been float8
    assert float8_results[2].dtype == torch.float32
    fast = [call.kwargs["use_fast_accum"] for call in scaled_mm.call_args_list]
    assert fast == [True, False, False]


@pytest.mark.pure
@needs_cpu_product
def test_a_layer_split_by_columns_has_the_gradients_of_a_whole_layer() -> None:
    """tensor/layers.py computes gradients from the products, after gathering the input again.

    float8's own backward computes them from the float8 tensors that its forward saved.
    """
    x = _random(2, 16, 64)
    weight = _random(48, 64)
    gradient = _random(2, 16, 48, scale=1e-5)
    for product, tolerance in ((Float8Product, 0.0), (Product, 0.08)):
        x_leaf = x.clone().requires_grad_()
        weight_leaf = weight.clone().requires_grad_()
        Float8Product.forward(x_leaf, weight_leaf, None).backward(gradient)
        pairs = (
            (product.input_gradient(gradient, weight), x_leaf.grad),
            (product.weight_gradient(gradient, x), weight_leaf.grad),
        )
        for actual, expected in pairs:
            assert actual.shape == expected.shape
            assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.pure
@needs_cpu_product
def test_forward_and_backward_are_compiled_whole() -> None:
    """Otherwise backward runs operation by operation, twice as slow as in bfloat16.

    That was seen on an H100 with torch 2.11, whose compiler cannot look into `scaled_mm`.
    """
    layer, _ = _float8_and_plain_layer()
    graphs: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append({str(node.target) for node in calls})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(_random(32, 64).requires_grad_()).sum().backward()
    assert [names & PRODUCTS for names in graphs] == [{"trireme.float8_product.default"}] * 2


@pytest.mark.pure
def test_rows_that_16_does_not_divide_are_computed_in_bfloat16() -> None:
    layer, plain = _float8_and_plain_layer()
    x = _random(3, 5, 64)
    weight = plain.weight.bfloat16()
    gradient = _random(3, 5, 48)
    assert torch.equal(layer(x), F.linear(x, weight, plain.bias.bfloat16()))
    assert layer(x[:0]).shape == (0, 5, 48)
    weight_gradient = Float8Product.weight_gradient(gradient, x)
    assert torch.equal(weight_gradient, Product.weight_gradient(gradient, x))
    assert torch.equal(Float8Product.input_gradient(gradient, weight), gradient @ weight)


@pytest.mark.pure
def test_only_layers_of_blocks_whose_sizes_16_divides_are_float8() -> None:
    blocks = []
    for _ in range(2):
        blocks.append(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.Linear(20, 32)))
    model = nn.ModuleDict({"blocks": nn.Sequential(*blocks), "head": nn.Linear(32, 64)})
    names = list(model.state_dict())
    (note,) = precision.use_float8(model, ["blocks.0", "blocks.1"])
    assert note.startswith("4 of the blocks' 6 linear layers compute in bfloat16")
    float8_layers = [
        name for name, module in model.named_modules() if isinstance(module, Float8Linear)
    ]
    assert float8_layers == ["blocks.0.0", "blocks.1.0"]
    assert list(model.state_dict()) == names
    odd_layer = nn.Linear(20, 20)
    words = ["no linear layer whose sizes 16 divide"]
    assert_refused(words, precision.use_float8, odd_layer, [])


@pytest.mark.pure
def test_fp8_is_refused_without_gpus_and_on_gpus_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_refused(["needs GPUs, but the workers have none"], precision.require_float8, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert_refused(["8.9 or newer", "but NVIDIA A100 has 8.0"], precision.require_float8, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    precision.require_float8(CUDA)


def _losses(rank: int, strategy: str, workers: int, kind: str, steps: int) -> list[float]:
    """Losses of a small GPT, with recomputation, on the CPU (refused only because it is slow)."""
    tokens = torch.arange(4 * 17).view(4, 17) * 7 % 32
    trial = Trial(
        build=seeded(lambda: GPT(32, d_model=32, n_layers=2, n_heads=2)),
        loss=language_loss,
        batch=lambda step: (tokens[:, :-1], tokens[:, 1:]),
    )
    options = Options(precision=kind, activation_checkpointing="selective")
    with mock.patch.object(precision, "require_float8"):
        parallel = curves.parallelize_trial(trial, choose(strategy, workers), options, CPU)
    has_float8 = any(
        isinstance(module, Float8Linear) or vars(module).get("_product") is Float8Product
        for module in parallel.inner.modules()
    )
    assert has_float8 == (kind == "fp8")
    optimizer = trial.optimizer(parallel.parameters())
    losses, *_ = curves.run_steps(trial, parallel, optimizer, range(steps))
    return losses


@pytest.mark.alone
@pytest.mark.slow
@needs_cpu_product
def test_a_gpt_trains_in_fp8_as_in_bf16_and_over_workers_as_on_one() -> None:
    bf16 = _losses(0, "single", 1, "bf16", 12)
    fp8 = _losses(0, "single", 1, "fp8", 12)
    assert bf16[-1] < 0.3 * bf16[0]
    pairs = [(fp8, bf16)]
    for strategy in LAYOUTS:
        losses_by_rank = run_distributed(_losses, 2, strategy, 2, "fp8", 6)
        pairs.append((losses_by_rank[0], fp8[:6]))
    for losses, expected in pairs:
        assert losses != expected
        assert losses[0] == pytest.approx(expected[0], rel=1e-2)
        assert losses[-1] == pytest.approx(expected[-1], abs=0.15 * expected[0])


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_product_is_that_of_the_rounded_numbers() -> None:
    if torch.cuda.get_device_capability() < precision.MINIMUM_CAPABILITY:
        pytest.skip("no GPU with float8")
    for dtype in (FORWARD_DTYPE, GRADIENT_DTYPE):
        left, left_scale = quantise(_random(64, 256), dtype)
        right, right_scale = quantise(_random(128, 256), FORWARD_DTYPE)
        expected = (left.float() * left_scale) @ (right.float() * right_scale).t()
        product = multiply(
            left.cuda(),
            right.cuda(),
            left_scale=left_scale.cuda(),
            right_scale=right_scale.cuda(),
        )
        torch.testing.assert_close(product.float().cpu(), expected, rtol=2**-7, atol=1e-2)
