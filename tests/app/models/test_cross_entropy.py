"""Losses that never hold float32 copies of all logits are equal to the plain one.

In every layout: test_models.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.models import cross_entropy as losses
from app.models import one_kernel
from app.models.cross_entropy import CHUNKS, cross_entropy, linear_cross_entropy
from strategies import row_chunks

pytestmark = pytest.mark.pure

WORDS = 9000
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss by torch's own functions."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2).float(), targets.flatten())


def of_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss by `cross_entropy`, which gets all logits."""
    return cross_entropy(F.linear(hidden, weight).flatten(0, -2), targets.flatten())


def example(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states, weights and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, 24, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, WORDS, (1, tokens), generator=generator)


def all_of(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The loss, and the gradients of hidden states and weights for an incoming gradient of 3."""
    value = loss(hidden, weight, targets)
    return (value.detach(), *torch.autograd.grad(value * 3.0, (hidden, weight)))


OURS = pytest.mark.parametrize("loss", [of_logits, linear_cross_entropy])
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
)


@OURS
@pytest.mark.parametrize("tokens", [1, 37, 64])
@DEVICES
def test_the_loss_and_its_gradients_are_those_of_the_plain_loss(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, tokens: int, device: str
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", 10 * WORDS)
    tolerance = 2e-6 if device == "cpu" else 1e-5
    inputs = [
        tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        for tensor in example(tokens)
    ]
    results = all_of(loss, *inputs)
    for result, expected in zip(results, all_of(plain, *example(tokens))):
        assert result.dtype == expected.dtype
        absolute = tolerance * expected.abs().max().item()
        torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=absolute)


@OURS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@DEVICES
def test_in_16_bits_the_error_is_no_larger_than_that_of_the_plain_loss(
    loss: Loss, dtype: torch.dtype, device: str
) -> None:
    hidden, weight, targets = example(64)
    in_float64 = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = all_of(plain, *in_float64, targets)
    inputs = [
        tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        for tensor in example(64, dtype)
    ]
    results = [tensor.cpu() for tensor in all_of(loss, *inputs)]
    plain_results = [tensor.cpu() for tensor in all_of(plain, *inputs)]
    assert results[0].dtype == torch.float32 and results[1].dtype == results[2].dtype == dtype
    for result, plain_result, exact_result in zip(results, plain_results, exact):
        scale = exact_result.abs().max()
        error = (result.double() - exact_result).abs().max() / scale
        plain_error = (plain_result.double() - exact_result).abs().max() / scale
        assert error <= 1.5 * plain_error + 1e-3, (error, plain_error)


@OURS
def test_a_second_backward_fails_and_without_gradients_inputs_are_kept(loss: Loss) -> None:
    value = loss(*example(9))
    (2 * value).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        value.backward()
    with torch.no_grad():
        assert loss(*example(9)).item() == pytest.approx(plain(*example(9)).item(), rel=1e-6)
        logits = torch.ones(5, WORDS)
        cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    assert torch.equal(logits, torch.ones(5, WORDS))
    small = cross_entropy(torch.randn(5, 256, requires_grad=True), torch.zeros(5, dtype=torch.long))
    assert "NllLoss" in type(small.grad_fn).__name__, "a small vocabulary is left to torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_compiled_for_a_gpu_as_one_graph_with_equal_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(12, WORDS, generator=generator)).to(dtype)
    logits[:, 7] = -torch.inf  # an impossible word
    targets = torch.randint(8, WORDS, (12,), generator=generator)
    loss, slope = losses.eager_chunk_loss(logits, targets)
    compiled = torch.compile(losses.fusible_chunk_loss, fullgraph=True, backend="aot_eager")
    for rows in (12, 11, 5):  # the last chunk may be smaller
        compiled_loss, compiled_slope = compiled(logits[:rows], targets[:rows])
        assert compiled_slope.dtype == dtype and compiled_loss.dtype == torch.float32
        assert torch.equal(compiled_slope, slope[:rows].to(dtype))
    fusible_loss, _ = losses.fusible_chunk_loss(logits, targets)
    assert fusible_loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_on_a_gpu_without_a_c_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(one_kernel, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").touch(0o755)
    for path, generation, can_compile in (
        (tmp_path, 9, True),
        (tmp_path, 6, False),
        (tmp_path / "none", 9, False),
    ):
        monkeypatch.setenv("PATH", str(path))
        capability = (generation, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, fixed=capability: fixed)
        assert one_kernel.compiles.__wrapped__(torch.device("cuda", 0)) == can_compile


def test_no_chunk_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_sizes: list[int] = []
    chunk_loss = losses._chunk_loss

    def record_size(logits: Tensor, column: Tensor) -> Any:
        chunk_sizes.append(logits.numel())
        return chunk_loss(logits, column)

    monkeypatch.setattr(losses, "_chunk_loss", record_size)
    monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", 10 * WORDS)
    linear_cross_entropy(*example(8 * 16))
    assert chunk_sizes == [8 * 16 * WORDS // CHUNKS] * CHUNKS
    chunk_sizes.clear()
    of_logits(*example(40))
    assert chunk_sizes == [10 * WORDS] * 4


@pytest.mark.parametrize(
    "last", [lambda y: y, torch.tanh, lambda y: y.view(2, -1, WORDS).flatten(0, 1) * 2, torch.exp]
)
def test_logits_are_overwritten_only_where_no_backward_needs_them(
    last: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    targets = torch.arange(6)
    grads = []
    for loss in (cross_entropy, F.cross_entropy):
        weight = torch.linspace(-0.1, 0.1, WORDS).unsqueeze(1).repeat(1, 8).requires_grad_()
        loss(last(F.linear(x, weight)), targets).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-8)
