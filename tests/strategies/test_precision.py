"""float8: its numbers, its products against float32, which layers have it, and where it is refused. torch's CPU has the
same product as its GPUs, slowly; what only a GPU can show is marked."""

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
from strategies.precision import FORWARD, GRADIENT, Float8Linear, Float8Product, Product, multiply, quantise
from tests.pool import run_distributed
from tests.strategies.models import assert_refused, language_loss, random, seeded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYOUTS = ("fsdp", "tensor", "pipeline")
PRODUCTS = {"trireme.float8_product.default", "aten.mm.default", "aten.addmm.default"}


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (random(*shape, seed=sum(shape)) * scale).bfloat16()


def _cpu_multiplies() -> bool:
    one = quantise(torch.ones(16, 16), FORWARD)[0]
    try:
        multiply(one, torch.ones(()), one, torch.ones(()))
    except NotImplementedError:
        return False
    return True


product = pytest.mark.skipif(not _cpu_multiplies(), reason="this torch's float8 product is for GPUs only (2.13: CPUs)")


@pytest.mark.pure
def test_a_tensor_of_any_size_fills_the_type_and_comes_back_to_its_rounding() -> None:
    for dtype, scale in ((FORWARD, 1e-6), (GRADIENT, 3e4)):
        x = _random(64, 32, scale=scale)
        x8, inverse = quantise(x, dtype)
        back = x8.float() * inverse
        assert x8.float().abs().max() == torch.finfo(dtype).max
        large = x.float().abs() > x.abs().max() / 1000  # smaller ones are subnormal in e4m3
        assert ((back - x.float()).abs()[large] / x.float().abs()[large]).max() <= torch.finfo(dtype).eps / 2 * 1.001
        assert back.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)
    x8, inverse = quantise(torch.zeros(16, 16), FORWARD)
    assert not x8.float().any() and inverse.isfinite()


@pytest.mark.pure
@product
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = _random(16, 16)
    x[3, 4] = bad
    assert not multiply(*quantise(x, FORWARD), *quantise(_random(16, 16), FORWARD)).isfinite().all()


def _layer() -> tuple[Float8Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    layer = copy.deepcopy(plain)
    assert precision.use_float8(layer, []) == () and isinstance(layer, Float8Linear)
    return layer, plain


@pytest.mark.pure
@product
def test_a_layer_and_its_gradients_are_the_plain_ones_to_float8_rounding_and_forward_alone_adds_up_fast() -> None:
    results = []
    with mock.patch.object(F, "scaled_mm", wraps=F.scaled_mm) as called:
        for module in _layer():
            x = _random(4, 8, 64).float().requires_grad_()
            y = module(x)
            (y.float() * _random(4, 8, 48, scale=1e-5).float()).sum().backward()
            results.append([y, x.grad, module.weight.grad, module.bias.grad])
    for found, expected, most in zip(*results, (0.05, 0.08, 0.08, 0.02)):
        assert found.shape == expected.shape
        off = (found.float() - expected.float()).norm() / expected.float().norm()
        assert 0 < off < most  # 0: it would not have been float8 at all
    assert results[0][2].dtype == torch.float32
    assert [call.kwargs["use_fast_accum"] for call in called.call_args_list] == [True, False, False]


@pytest.mark.pure
@product
def test_a_layer_split_by_columns_that_gathers_its_input_again_has_the_same_gradients() -> None:
    """tensor/ops.py computes them from the products by themselves, as float8's own backward does from what it saved."""
    x, weight, gradient = _random(2, 16, 64), _random(48, 64), _random(2, 16, 48, scale=1e-5)
    for product, most in ((Float8Product, 0.0), (Product, 0.08)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        Float8Product.forward(a, b, None).backward(gradient)
        for found, expected in ((product.of_input(gradient, weight), a.grad), (product.of_weight(gradient, x), b.grad)):
            assert found.shape == expected.shape and (found - expected).norm() <= most * expected.norm()


@pytest.mark.pure
@product
def test_forward_and_backward_are_compiled_whole() -> None:
    """Else backward runs operation by operation, twice as slow as in bfloat16 (seen on an H100 with torch 2.11)."""
    layer, _ = _layer()
    graphs: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(_random(32, 64).requires_grad_()).sum().backward()
    assert [names & PRODUCTS for names in graphs] == [{"trireme.float8_product.default"}] * 2


@pytest.mark.pure
def test_rows_that_16_does_not_divide_are_computed_in_bfloat16() -> None:
    layer, plain = _layer()
    x, weight, gradient = _random(3, 5, 64), plain.weight.bfloat16(), _random(3, 5, 48)
    assert torch.equal(layer(x), F.linear(x, weight, plain.bias.bfloat16())) and layer(x[:0]).shape == (0, 5, 48)
    assert torch.equal(Float8Product.of_weight(gradient, x), Product.of_weight(gradient, x))
    assert torch.equal(Float8Product.of_input(gradient, weight), gradient @ weight)


@pytest.mark.pure
def test_layers_of_blocks_whose_sizes_16_divides_are_chosen_and_no_others() -> None:
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.Linear(20, 32)) for _ in "ab"))
    model = nn.ModuleDict({"blocks": chain, "head": nn.Linear(32, 64)})
    names = list(model.state_dict())
    (note,) = precision.use_float8(model, ["blocks.0", "blocks.1"])
    assert note.startswith("4 of the blocks' 6 linear layers compute in bfloat16")
    assert [name for name, m in model.named_modules() if isinstance(m, Float8Linear)] == ["blocks.0.0", "blocks.1.0"]
    assert list(model.state_dict()) == names
    assert_refused(["no linear layer whose sizes 16 divide"], precision.use_float8, nn.Linear(20, 20), [])


@pytest.mark.pure
def test_it_is_refused_without_a_gpu_and_on_one_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(["needs GPUs, but the workers have none"], precision.require_float8, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    found = [(8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found.pop(0))
    assert_refused(["8.9 or newer", "but NVIDIA A100 has 8.0"], precision.require_float8, CUDA)
    precision.require_float8(CUDA)


def _losses(_: int, name: str, workers: int, kind: str, steps: int) -> list[float]:
    """With recomputation. On the CPU, which is refused only because it is slow."""
    tokens = torch.arange(4 * 17).view(4, 17) * 7 % 32
    build = seeded(lambda: GPT(32, d_model=32, n_layers=2, n_heads=2))
    trial = Trial(build, language_loss, lambda _: (tokens[:, :-1], tokens[:, 1:]))
    options = Options(precision=kind, activation_checkpointing="selective")
    with mock.patch.object(precision, "require_float8"):
        parallel = curves.parallelize_trial(trial, choose(name, workers), options, CPU)
    has = (isinstance(m, Float8Linear) or vars(m).get("_product") is Float8Product for m in parallel.inner.modules())
    assert any(has) == (kind == "fp8")
    return curves.run_steps(trial, parallel, trial.optimizer(parallel.parameters()), range(steps))[0]


@pytest.mark.alone
@pytest.mark.slow
@product
def test_a_gpt_trains_in_it_as_in_bf16_and_over_workers_as_on_one() -> None:
    wide, narrow = (_losses(0, "single", 1, kind, 12) for kind in ("bf16", "fp8"))
    assert wide[-1] < 0.3 * wide[0]
    found = [(narrow, wide), *((run_distributed(_losses, 2, name, 2, "fp8", 6)[0], narrow[:6]) for name in LAYOUTS)]
    for losses, expected in found:
        assert losses != expected
        assert losses[0] == pytest.approx(expected[0], rel=1e-2)
        assert losses[-1] == pytest.approx(expected[-1], abs=0.15 * expected[0])


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_product_is_that_of_the_rounded_numbers() -> None:
    if torch.cuda.get_device_capability() < precision.LEAST:
        pytest.skip("no GPU with float8")
    for dtype in (FORWARD, GRADIENT):
        a8, a_inverse = quantise(_random(64, 256), dtype)
        b8, b_inverse = quantise(_random(128, 256), FORWARD)
        expected = (a8.float() * a_inverse) @ (b8.float() * b_inverse).t()
        product = multiply(a8.cuda(), a_inverse.cuda(), b8.cuda(), b_inverse.cuda())
        torch.testing.assert_close(product.float().cpu(), expected, rtol=2**-7, atol=1e-2)
