"""Tensor parallelism along the sequence keeps nothing whole for backward, and gathers it again once."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import Options
from strategies.layout import choose
from strategies.parallelize import parallelize
from strategies.passing import Passing
from strategies.precision import Product
from strategies.tensor import ops, overlap
from strategies.tensor.apply import one_part
from tests.pool import run_distributed
from tests.strategies.models import GPT_PLAN, WIDTH, PlainGPT, gpt_trial, random, saved, stored

BATCH, SEQUENCE, LAYERS = 2, 64, 2


def _kept(rank: int, changes: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes kept for backward, how often something was gathered along the sequence in it, and the gradients."""
    trial, layout, options = gpt_trial(layers=LAYERS), choose("tensor", 2), Options(**changes)
    parallel = parallelize(trial.build, layout, options, device=torch.device("cpu"), tensor_plan=trial.tensor_plan)
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
    with mock.patch.object(ops, "gathered_from", lambda x, weight: None):
        return found, _kept(rank, {} if changes in (COMPILED, BESIDE) else changes)


COMPILED = {"compile": True, "compile_backend": "aot_eager"}
BESIDE = {"async_tp": True}


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


def test_where_blocks_are_recomputed_nothing_is_gathered_a_third_time() -> None:
    assert run_distributed(_kept, 2, {"activation_checkpointing": "full"})[0][1] == 0


def test_a_supposed_worker_sends_what_a_true_one_does() -> None:
    module = PlainGPT(layers=LAYERS)
    peers, _ = one_part(module, GPT_PLAN, 2)
    tokens = torch.randint(0, 8, (BATCH, SEQUENCE))
    module(tokens).square().mean().backward()
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

    class Multiplying(Product):
        @staticmethod
        def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            happened.append("multiply")
            return Product.forward(x, weight, bias)

        @staticmethod
        def of_input(gradient: Tensor, weight: Tensor) -> Tensor:
            happened.append("multiply")
            return Product.of_input(gradient, weight)

    peers = ops.Peers(dist.group.WORLD)  # type: ignore[arg-type]
    x, up, down, of_y = random(2, 8, 6), random(12, 6, seed=1), random(6, 12, seed=2), random(2, 8, 6, seed=3)
    own, a, b = (peers.part(t, dim).clone().requires_grad_() for t, dim in ((x, 1), (up, 0), (down, 1)))
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    with mock.patch.object(overlap, "Passing", Noted):
        gathered, h = overlap.columns(own, a, None, peers.group, Multiplying, lambda t: peers.start_gather(t, 1))
        y = overlap.rows(h + 0.0 * gathered.sum(), b, peers.group, Multiplying)
        y.backward(peers.part(of_y, 1))
    expected = whole[0] @ whole[1].T @ whole[2].T
    expected.backward(of_y)
    cuts = zip([expected, *(t.grad for t in whole)], (1, 1, 0, 1))
    return happened, [y, own.grad, a.grad, b.grad], [peers.part(t, dim) for t, dim in cuts]  # type: ignore[list-item]


def test_pieces_travel_while_others_are_multiplied() -> None:
    pieces = 4
    sent = f"send {2 * 8 // pieces * 6 * 4}"
    gather = [sent, "multiply", "wait"] * (pieces - 1) + ["multiply"]
    scatter = ["multiply"] + [sent, "multiply", "wait"] * (pieces - 1)
    for happened, found, expected in run_distributed(_beside, pieces):
        assert happened == gather + scatter + gather + scatter
        torch.testing.assert_close(found, expected)
