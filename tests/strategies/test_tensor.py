"""Tensor parallelism: along the sequence it keeps nothing whole for backward and gathers it again once; pieces travel
beside products; the loss over a vocabulary that is split."""

import itertools
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from strategies import torch_internals
from strategies.context.apply import Context
from strategies.layout import choose
from strategies.options import Options
from strategies.parallelize import parallelize
from strategies.passing import Passing
from strategies.precision import Product
from strategies.tensor import loss, ops, overlap
from strategies.tensor.apply import one_part
from strategies.tensor.loss import VocabularyLogits
from tests.pool import run_distributed
from tests.strategies.models import COMPILED, CPU, GPT_PLAN, WIDTH, PlainGPT, gpt_trial, random, saved, stored

BATCH, SEQUENCE, LAYERS = 2, 64, 2
BESIDE = {"async_tp": True}


def _kept(rank: int, changes: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes kept for backward, how often something was gathered along the sequence in it, and the gradients."""
    trial, layout, options = gpt_trial(layers=LAYERS), choose("tensor", 2), Options(**changes)
    parallel = parallelize(trial.build, layout, options, device=CPU, tensor_plan=trial.tensor_plan)
    tokens, kept = torch.randint(0, 8, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)), list[Tensor]()

    def loss(model: Any, batch: Any) -> Tensor:
        with saved() as found:
            value = model(batch).square().mean()
        kept.extend(found)
        return value

    start_gather = ops.Peers.start_gather
    with mock.patch.object(ops.Peers, "start_gather", autospec=True, side_effect=start_gather) as gathered:
        parallel.forward_backward([tokens], [1.0], loss)
    gradients = {name: p.grad.full_tensor() for name, p in parallel.module.named_parameters()}
    return stored(kept, parallel.parameters()), gathered.call_count, gradients


def _kept_and_whole(rank: int, changes: dict[str, Any]) -> tuple[Any, Any]:
    """And the same where inputs are kept whole, not compiled."""
    found = _kept(rank, changes)
    with mock.patch.object(ops, "gather_source", lambda x, weight: None):
        return found, _kept(rank, {} if changes in (COMPILED, BESIDE) else changes)


@pytest.mark.alone
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, COMPILED, BESIDE], ids=str)
def test_backward_gathers_inputs_again_instead_of_keeping_them(changes: dict[str, Any]) -> None:
    (kept, gathered, gradients), (whole, never, expected) = run_distributed(_kept_and_whole, 2, changes)[0]
    inputs = 2 * LAYERS + 1  # queries, keys and values share one; the head
    assert gathered == (1 if changes == COMPILED else inputs)  # the compiler's own are not counted
    assert never == 0
    of_input = BATCH * SEQUENCE * WIDTH * (2 if "precision" in changes else 4)
    assert whole - kept == inputs * of_input / 2
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.alone
def test_where_blocks_are_recomputed_nothing_is_gathered_a_third_time() -> None:
    assert run_distributed(_kept, 2, {"activation_checkpointing": "full"})[0][1] == 0


@pytest.mark.pure
def test_a_supposed_worker_sends_what_a_true_one_does() -> None:
    module = PlainGPT(layers=LAYERS)
    peers, _ = one_part(module, GPT_PLAN, 2)
    module(torch.randint(0, 8, (BATCH, SEQUENCE))).square().mean().backward()
    both_ways = 1 + LAYERS * 4 + 1  # the embedding's sum; in a block two inputs and two sums; the head's input
    columns, again = 1, 2 * LAYERS + 1  # the head's output, which backward does not send
    assert sum(peers.calls.values()) == 2 * both_ways + columns + again


def _beside(rank: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Columns and rows beside their products, forward and backward: what happened; results; what they should be."""
    happened: list[str] = []

    class Noted(Passing):
        def __init__(self, tensors: list[Tensor], *rest: Any) -> None:
            happened.append(f"send {sum(t.nbytes for t in tensors)}")
            super().__init__(tensors, *rest)

        def arrived(self) -> list[Tensor]:
            happened.append("wait")
            return super().arrived()

    class Multiplying:
        def __getattr__(self, name: str) -> Any:
            happened.extend(["multiply"] * (name in ("forward", "input_gradient")))
            return getattr(Product, name)

    peers, product = ops.Peers(dist.group.WORLD), cast(Any, Multiplying())  # type: ignore[arg-type]
    x, up, down, of_y = random(2, 8, 6), random(12, 6, seed=1), random(6, 12, seed=2), random(2, 8, 6, seed=3)
    own, a, b = (peers.part(t, dim).clone().requires_grad_() for t, dim in ((x, 1), (up, 0), (down, 1)))
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    with mock.patch.object(overlap, "Passing", Noted):
        gathered, h = overlap.columns(
            own,
            a,
            None,
            group=peers.group,
            product=product,
            start_gather=lambda part: peers.start_gather(part, 1),
        )
        y = overlap.rows(h + 0.0 * gathered.sum(), b, group=peers.group, product=product)
        y.backward(peers.part(of_y, 1))
    expected = whole[0] @ whole[1].T @ whole[2].T
    expected.backward(of_y)
    cuts = zip([expected, *(t.grad for t in whole)], (1, 1, 0, 1))
    return happened, [y, own.grad, a.grad, b.grad], [peers.part(t, dim) for t, dim in cuts]  # type: ignore[list-item]


@pytest.mark.alone
def test_pieces_travel_while_others_are_multiplied() -> None:
    pieces = 4
    sent = f"send {2 * 8 // pieces * 6 * 4}"
    gather = [sent, "multiply", "wait"] * (pieces - 1) + ["multiply"]
    scatter = ["multiply"] + [sent, "multiply", "wait"] * (pieces - 1)
    for happened, found, expected in run_distributed(_beside, pieces):
        assert happened == gather + scatter + gather + scatter
        torch.testing.assert_close(found, expected)


REDUCTIONS: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}]
USES: dict[str, Any] = {
    "view": lambda x: x.view(-1, 7),
    "reshape": lambda x: x.reshape(6, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "shifted": lambda x: x[:, :-1],
    "shifted_dots": lambda x: x[..., :-1, :].contiguous(),
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: F.softmax(x, -1),
    "transposed": lambda x: x.transpose(1, 2),
    "scaled": lambda x: x / 2,
}
GATHERED = ("argmax", "softmax", "transposed", "scaled")


def _split_logits(rank: int) -> None:
    peers = ops.Peers(dist.group.WORLD)  # type: ignore[arg-type]
    loss.CHUNK_NUMBERS = 4  # two rows of two words
    for vocabulary, arguments in itertools.product((7, 3), REDUCTIONS):
        torch.manual_seed(3)
        whole = (5 * torch.randn(6, vocabulary)).requires_grad_()
        target = torch.randint(0, vocabulary, (6,))
        target[2] = -100
        local = peers.part(whole.detach(), -1).clone().requires_grad_()
        expected = F.cross_entropy(whole, target, **arguments)
        found = F.cross_entropy(VocabularyLogits(local, peers, vocabulary), target, **arguments)
        assert type(found) is Tensor and found.shape == expected.shape
        weights = torch.arange(1.0, 7.0) if found.dim() else 1.0
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        off = (found - expected).abs().max() + (local.grad - peers.part(whole.grad, -1)).abs().sum()
        assert off < 1e-5, (vocabulary, arguments)
    whole = torch.arange(42.0).reshape(2, 3, 7)
    split = VocabularyLogits(peers.part(whole, -1), peers, 7)
    for name, use in USES.items():
        value = use(split)
        assert isinstance(value, VocabularyLogits) == (name not in GATHERED), name
        torch.testing.assert_close(value if name in GATHERED else value.gathered(), use(whole), msg=name)
    narrow = VocabularyLogits(peers.part(whole.bfloat16(), -1), peers, 7)
    for name, use in USES.items():
        value = use(narrow.float())
        assert value.dtype == use(whole).dtype and value.shape == use(whole).shape, name
        torch.testing.assert_close(value if name in GATHERED else value.gathered(), use(whole.bfloat16().float()))


@pytest.mark.alone
def test_cross_entropy_and_any_other_use_of_split_logits_are_right() -> None:
    """3 words over 4 workers leave one with none; one target is ignored."""
    run_distributed(_split_logits, 4)


class Wide(torch_internals.OperationMode):  # type: ignore[misc]
    """The most numbers that a float32 tensor had, of those that operations under it made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor) and each.dtype == torch.float32 and not each.is_meta:
                self.most = max(self.most, each.numel())
        return made


def _wide_numbers(rank: int) -> tuple[int, int]:
    """Of the loss of split logits of 16 bits and its backward: the largest float32 tensor, and bytes kept between."""
    peers = ops.Peers(dist.group.WORLD)  # type: ignore[arg-type]
    loss.CHUNK_NUMBERS = 1024
    local = random(64, 512, seed=rank).bfloat16().requires_grad_()
    with Wide() as wide:
        with saved() as kept:
            value = F.cross_entropy(VocabularyLogits(local, peers, 1024).float(), torch.arange(64))
        value.backward()
    assert local.grad is not None and local.grad.dtype == local.dtype and value.dtype == torch.float32
    return wide.most, stored(kept, [local])


@pytest.mark.alone
def test_split_logits_are_float32_a_few_rows_at_a_time() -> None:
    """64 rows of 512 words were 128 KiB each time that all were float32."""
    for most, kept in run_distributed(_wide_numbers, 2):
        assert most <= 1024 and kept < 4096


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.pure
def test_split_logits_of_a_part_of_a_sequence_have_no_gradient_where_no_label_counts(
    counts: bool,
) -> None:
    """With tp and cp both. That the row trains as one device does: test_parity.py."""
    local = random(4, 8).requires_grad_()
    split = VocabularyLogits(local * 2, ops.ShapePeers(2), 16)
    gated = Context._gate_output(
        cast(Any, SimpleNamespace(_has_labels=torch.tensor(counts))), nn.Linear(1, 1), (), split
    )
    assert isinstance(gated, VocabularyLogits) and gated.shape == split.shape
    gated.local.sum().backward()
    torch.testing.assert_close(local.grad, torch.full_like(local, 2.0 * counts))
