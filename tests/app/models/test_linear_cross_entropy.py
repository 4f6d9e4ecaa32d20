"""The loss that never holds all logits: equal to the plain one alone, in the task, and under every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.data.loader import fetch
from app.models.gpt import GPT
from app.models.linear_cross_entropy import CHUNKS, linear_cross_entropy
from app.tasks.language import LanguageModelling
from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from strategies.layout import Layout
from strategies.parallelize import Options, choose
from tests.pool import run_distributed

CPU = torch.device("cpu")
Loss = Callable[..., Tensor]


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    return F.cross_entropy(
        F.linear(hidden, weight).flatten(0, -2).float(), targets.flatten(), ignore_index=ignore_index
    )


def _example(tokens: int, dtype: torch.dtype = torch.float32, words: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, 24, generator=made).to(dtype).requires_grad_()
    weight = torch.randn(words, 24, generator=made).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, words, (1, tokens), generator=made)


def _all(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """(loss, gradient of hidden, gradient of weight), for a gradient of 3 that comes in."""
    value = loss(hidden, weight, targets, **more)
    return (value.detach(), *torch.autograd.grad(value * 3.0, (hidden, weight)))


@pytest.mark.parametrize("tokens", [1, 5, 8, 37, 64])
def test_in_float32_loss_and_gradients_are_the_plain_ones(tokens: int) -> None:
    for found, expected in zip(_all(linear_cross_entropy, *_example(tokens)), _all(_plain, *_example(tokens))):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_plain_one() -> None:
    exact = _all(_plain, *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in _example(64)))
    found, plain = (_all(loss, *_example(64, torch.bfloat16)) for loss in (linear_cross_entropy, _plain))
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == torch.bfloat16
    for one, other, truth in zip(found, plain, exact):
        scale = truth.abs().max()
        error, usual = ((each.double() - truth).abs().max() / scale for each in (one, other))
        assert error <= 1.5 * usual + 1e-3, (error, usual)


def test_under_autocast_float32_parameters_get_float32_gradients() -> None:
    results = []
    for loss in (linear_cross_entropy, _plain):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(_all(loss, *_example(40)))
    for found, expected in zip(*results):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ignored", [-100, 7])
def test_targets_to_ignore_count_for_nothing(ignored: int) -> None:
    hidden, weight, targets = _example(37)
    targets[0, [0, 3, 4, 5, 6, 7, 8, 36]] = ignored  # a whole chunk among them
    for found, expected in zip(
        _all(linear_cross_entropy, hidden, weight, targets, ignore_index=ignored),
        _all(_plain, hidden, weight, targets, ignore_index=ignored),
    ):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())
    assert linear_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()


def test_a_second_backward_is_an_error_and_no_wrong_gradient() -> None:
    loss = linear_cross_entropy(*_example(9))
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_float16_goes_the_plain_way() -> None:
    hidden, weight, targets = _example(16, torch.float16)
    assert torch.equal(linear_cross_entropy(hidden, weight, targets), _plain(hidden, weight, targets))


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor made under it has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


def test_no_more_than_an_eighth_of_the_logits_is_ever_held() -> None:
    most = {}
    for loss in (linear_cross_entropy, _plain):
        hidden, weight, targets = _example(8 * 64)
        with _Largest() as largest:
            loss(hidden, weight, targets).backward()
        most[loss] = largest.numbers
    assert most[_plain] == 8 * 64 * 300
    assert most[linear_cross_entropy] == 8 * 64 * 300 // CHUNKS


# --- in the task ------------------------------------------------------------------------------------------------


def _task(folder: str, linear: bool | None, tied: bool = True) -> LanguageModelling:
    text = Path(folder) / "text.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(4000)))
    return LanguageModelling(
        data=str(text), sequence_length=16, d_model=32, n_layers=2, n_heads=2, tie_weights=tied, linear_loss=linear
    )


def _trial(folder: str, linear: bool, tied: bool, steps: int) -> Trial:
    task = _task(folder, linear, tied)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return task.build_model()

    def batch(step: int) -> Any:
        return fetch(task.train_data(), [(8 * step + i, 8 * step + i) for i in range(8)])

    return Trial(build, task.loss, batch, steps, 2, 0.5, task.blocks, task.tensor_plan, 2)


def _train(
    _: int, name: str, workers: int, folder: str, linear: bool, tied: bool, options: dict[str, Any]
) -> tuple[Curve, int]:
    """The curve, and how many micro-batches' losses the model gave."""
    layout = choose(name, workers) if workers > 1 else Layout("single")
    with mock.patch("app.models.gpt.linear_cross_entropy", wraps=linear_cross_entropy) as called:
        curve = curves.train(_trial(folder, linear, tied, 4), layout, Options(**options), CPU)
    return curve, called.call_count


ROWS = [("ddp", {}, 8), ("fsdp", {}, 8), ("tensor", {}, 0), ("pipeline", {"schedule": "zb_h1"}, 0)]


@pytest.mark.parametrize(("name", "options", "losses"), ROWS, ids=[name for name, *_ in ROWS])
def test_a_layout_trains_the_same_with_it_asked_for(
    tmp_path: Path, name: str, options: dict[str, Any], losses: int
) -> None:
    for tied in (False, True):
        truth, none = _train(0, "single", 1, str(tmp_path), False, tied, {})
        found, given = run_distributed(_train, 2, name, 2, str(tmp_path), True, tied, options)[0]
        assert (none, given) == (0, losses)
        differs = curves.difference(truth, found)
        assert differs.loss <= 5e-6 and differs.norm <= 5e-5 and differs.weights <= 1e-3, (name, differs)


def test_it_serves_where_it_is_asked_for_and_only_a_head_of_its_own(tmp_path: Path) -> None:
    batch = fetch(_task(str(tmp_path), None).train_data(), [(0, 0)])

    def used(task: LanguageModelling, model: nn.Module) -> bool:
        return "LinearCrossEntropy" in str(_names(task.loss(model, batch)))

    asked, left = _task(str(tmp_path), True), _task(str(tmp_path), None)
    model = asked.build_model()
    assert isinstance(model, GPT) and used(asked, model) and not used(left, model)
    torch.testing.assert_close(asked.loss(model, batch), left.loss(model, batch), rtol=1e-6, atol=0)
    model.head.register_forward_pre_hook(lambda *_: None)  # as one that is moved to another device has
    assert not used(asked, model)
    other = asked.build_model()
    other.head.forward = other.head.forward  # as pipelines and tensor parallelism take it over
    assert not used(asked, other)


def _names(loss: Tensor) -> list[str]:
    """Of the nodes that lead to a loss, the nearest few."""
    nodes, found = [loss.grad_fn], []
    for _ in range(3):
        found += [node.name() for node in nodes if node is not None]
        nodes = [parent for node in nodes if node is not None for parent, _ in node.next_functions]
    return found
