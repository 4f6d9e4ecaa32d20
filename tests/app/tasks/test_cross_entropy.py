"""The loss over a large vocabulary: equal to the plain one, and without float32 copies of all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.planner.trace import watch
from app.tasks import cross_entropy as module
from app.tasks.cross_entropy import cross_entropy

WORDS = 9000


def _example(dtype: torch.dtype, count: int = 37) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(count, WORDS, generator=made)).to(dtype)
    return logits, torch.randint(0, WORDS, (count,), generator=made)


def _both(logits: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient) of ours and of the plain one in float32."""
    ours, plain = logits.clone().requires_grad_(), logits.float().clone().requires_grad_()
    one, other = cross_entropy(ours, targets), F.cross_entropy(plain, targets)
    (one * scale).backward()
    (other * scale).backward()
    assert ours.grad is not None and plain.grad is not None
    return one.detach(), ours.grad, other.detach(), plain.grad


@pytest.mark.parametrize("numbers", [1 << 24, 10 * WORDS, 1])
def test_in_float32_loss_and_gradient_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", numbers)  # one chunk, four of which the last is short, one per row
    loss, gradient, expected, slope = _both(*_example(torch.float32), scale=3.0)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_get_a_float32_loss_and_their_own_gradient(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 10 * WORDS)
    loss, gradient, expected, slope = _both(*_example(dtype), scale=1024.0)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, slope.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_a_small_vocabulary_is_left_to_torch() -> None:
    logits = torch.randn(5, 256, requires_grad=True)
    assert "NllLoss" in type(cross_entropy(logits, torch.zeros(5, dtype=torch.long)).grad_fn).__name__
    many = torch.randn(5, WORDS, requires_grad=True)
    assert "Chunked" in type(cross_entropy(many, torch.zeros(5, dtype=torch.long)).grad_fn).__name__


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, WORDS, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_memory_is_that_of_the_logits() -> None:
    """What the watcher sees at the worst moment: logits, over which their gradient goes, a chunk twice in float32."""
    count = 20_000
    logits_bytes, chunk_bytes = 2 * count * WORDS, 4 * module.CHUNK_NUMBERS
    with FakeTensorMode(allow_non_fake_inputs=True):
        head, x = _Head(), torch.randn(count, 8, dtype=torch.bfloat16)
        targets = torch.zeros(count, dtype=torch.long)
        trace = watch(head, [], lambda model: cross_entropy(model(x), targets))
    part = trace.parts["before"].values
    assert logits_bytes <= part["saved"] <= 1.02 * logits_bytes
    assert part["saved"] + part["extra"] <= 1.02 * logits_bytes + 2.2 * chunk_bytes
    assert part["forward_extra"] <= 1.02 * logits_bytes + 2.2 * chunk_bytes


@pytest.mark.parametrize("last", [lambda y: y, torch.tanh, lambda y: y.view(2, -1, WORDS).flatten(0, 1) * 2, torch.exp])
def test_logits_are_written_over_only_where_nobody_needs_them(last: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(6, 8), torch.arange(6)
    grads = []
    for loss in (cross_entropy, F.cross_entropy):
        head = nn.Linear(8, WORDS)
        nn.init.ones_(head.weight), nn.init.zeros_(head.bias)
        with torch.no_grad():
            head.weight.mul_(torch.linspace(-0.1, 0.1, WORDS).unsqueeze(1))
        loss(last(head(x)), targets).backward()
        assert head.weight.grad is not None
        grads.append(head.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-8)


def test_a_second_backward_is_an_error_and_no_wrong_gradient() -> None:
    head = nn.Linear(8, WORDS)
    loss = cross_entropy(head(torch.randn(6, 8)), torch.arange(6))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
