"""Tensor parallelism along the sequence keeps nothing whole for backward, and gathers it again once."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from strategies.dims import Options
from strategies.layout import choose
from strategies.parallelize import parallelize
from strategies.tensor import ops
from strategies.tensor.apply import one_part
from tests.pool import run_distributed
from tests.strategies.models import GPT_PLAN, WIDTH, PlainGPT, gpt_trial, saved, stored

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
        return found, _kept(rank, {} if changes == COMPILED else changes)


COMPILED = {"compile": True, "compile_backend": "aot_eager"}


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, COMPILED], ids=str)
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
