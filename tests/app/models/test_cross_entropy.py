"""Losses that never hold float32 copies of all logits: equal to the plain one. (In every layout: test_models.py.)"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.models import cross_entropy as losses
from app.models import one_kernel
from app.models.cross_entropy import CHUNKS, cross_entropy, linear_cross_entropy

pytestmark = pytest.mark.pure

WORDS = 9000
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2).float(), targets.flatten())


def of_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(F.linear(hidden, weight).flatten(0, -2), targets.flatten())


def example(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, 24, generator=made).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, 24, generator=made).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, WORDS, (1, tokens), generator=made)


def all_of(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """(loss, gradient of hidden, gradient of weight), for a gradient of 3 that comes in."""
    value = loss(hidden, weight, targets)
    return (value.detach(), *torch.autograd.grad(value * 3.0, (hidden, weight)))


OURS = pytest.mark.parametrize("loss", [of_logits, linear_cross_entropy])
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])


@OURS
@pytest.mark.parametrize("tokens", [1, 37, 64])
@DEVICES
def test_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, loss: Loss, tokens: int, device: str) -> None:
    monkeypatch.setattr(losses, "CHUNK_NUMBERS", 10 * WORDS)
    near = 2e-6 if device == "cpu" else 1e-5
    found = all_of(loss, *(t.detach().to(device).requires_grad_(t.requires_grad) for t in example(tokens)))
    for one, expected in zip(found, all_of(plain, *example(tokens))):
        assert one.dtype == expected.dtype
        torch.testing.assert_close(one.cpu(), expected, rtol=near, atol=near * expected.abs().max().item())


@OURS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@DEVICES
def test_in_16_bits_it_is_as_near_to_the_truth_as_the_plain_one(loss: Loss, dtype: torch.dtype, device: str) -> None:
    exact = all_of(plain, *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in example(64)))
    given = [t.detach().to(device).requires_grad_(t.requires_grad) for t in example(64, dtype)]
    found, usual = ([t.cpu() for t in all_of(each, *given)] for each in (loss, plain))
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    for one, other, truth in zip(found, usual, exact):
        error, least = ((each.double() - truth).abs().max() / truth.abs().max() for each in (one, other))
        assert error <= 1.5 * least + 1e-3, (error, least)


@OURS
def test_a_second_backward_is_an_error_and_without_gradients_nothing_is_written(loss: Loss) -> None:
    value = loss(*example(9))
    (2 * value).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        value.backward()
    with torch.no_grad():
        assert loss(*example(9)).item() == pytest.approx(plain(*example(9)).item(), rel=1e-6)
        cross_entropy(logits := torch.ones(5, WORDS), torch.zeros(5, dtype=torch.long))
    assert torch.equal(logits, torch.ones(5, WORDS))
    small = cross_entropy(torch.randn(5, 256, requires_grad=True), torch.zeros(5, dtype=torch.long))
    assert "NllLoss" in type(small.grad_fn).__name__, "a small vocabulary is left to torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_for_a_gpu_is_one_graph_with_the_same_numbers(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(12, WORDS, generator=made)).to(dtype)
    logits[:, 7] = -torch.inf  # a word that is ruled out
    targets = torch.randint(8, WORDS, (12,), generator=made)
    loss, slope = losses.eager_chunk_loss(logits, targets)
    compiled = torch.compile(losses.fusible_chunk_loss, fullgraph=True, backend="aot_eager")
    for rows in (12, 11, 5):  # the last chunk may be smaller
        one, s = compiled(logits[:rows], targets[:rows])
        assert s.dtype == dtype and one.dtype == torch.float32
        assert torch.equal(s, slope[:rows].to(dtype))
    assert losses.fusible_chunk_loss(logits, targets)[0].item() == pytest.approx(loss.item(), rel=1e-6)


def test_on_a_gpu_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(one_kernel, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").touch(0o755)
    for path, generation, able in ((tmp_path, 9, True), (tmp_path, 6, False), (tmp_path / "none", 9, False)):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=generation: (found, 0))
        assert one_kernel.compiles.__wrapped__(torch.device("cuda", 0)) == able


def test_no_chunk_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = losses._chunk_loss
    monkeypatch.setattr(
        losses, "_chunk_loss", lambda logits, column: seen.append(logits.numel()) or real(logits, column)
    )
    monkeypatch.setattr(losses, "CHUNK_NUMBERS", 10 * WORDS)
    linear_cross_entropy(*example(8 * 16))
    assert seen == [8 * 16 * WORDS // CHUNKS] * CHUNKS
    seen.clear()
    of_logits(*example(40))
    assert seen == [10 * WORDS] * 4


@pytest.mark.parametrize("last", [lambda y: y, torch.tanh, lambda y: y.view(2, -1, WORDS).flatten(0, 1) * 2, torch.exp])
def test_logits_are_written_over_only_where_no_backward_needs_them(last: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(6, 8), torch.arange(6)
    grads = []
    for loss in (cross_entropy, F.cross_entropy):
        weight = torch.linspace(-0.1, 0.1, WORDS).unsqueeze(1).repeat(1, 8).requires_grad_()
        loss(last(F.linear(x, weight)), targets).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-8)
