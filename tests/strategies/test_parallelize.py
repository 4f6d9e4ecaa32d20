"""What a model that does not fit its layout gets: one sentence that names it, on every rank."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.parity import curves
from experiments.parity.rows import Row
from strategies.blocks import find_blocks
from strategies.parallelize import LayoutError, Options, choose, parallelize
from strategies.tensor import plan as tensor_plan
from tests.pool import run_distributed
from tests.strategies.models import (
    GPT_PLAN,
    VOCABULARY,
    PlainGPT,
    assert_refused,
    classifier_loss,
    image_batch,
    mlp,
    seeded,
    vector_batch,
)

CPU = torch.device("cpu")


def partly_used() -> nn.Module:
    model = nn.Linear(7, 3)
    model.idle, model.idler = nn.Linear(7, 3), nn.Linear(7, 3)
    return model


def _message(_: int, row: Row, make: Callable[[], nn.Module], plan: dict[str, str] | None) -> str:
    """Takes one step with accumulation; the sentence it ends with, or "no error"."""
    try:
        parallel = parallelize(seeded(make), row.layout, device=CPU, tensor_plan=plan)
        x = torch.randn(4, 7) if plan is None else torch.randint(0, VOCABULARY, (2, 8))
        parallel.forward_backward([x, x], [0.5, 0.5], lambda module, inputs: module(inputs).square().mean())
        parallel.grad_norm_(None)
    except LayoutError as error:
        return str(error)
    return "no error"


class Changing(nn.Module):
    """Uses another layer in every step, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.idle = nn.Linear(7, 7), nn.Linear(7, 3)
        self.ways = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, which = inputs
        return self.ways[int(which[0])](torch.tanh(self.stem(x)))


def _changing(_: int, row: Row) -> curves.Curve:
    def batch(step: int) -> Any:
        x, y = vector_batch(step)
        return (x, torch.full((len(x),), step % 2)), y

    trial = curves.Trial(seeded(Changing), classifier_loss, batch, steps=6, micro_batches=2, clip=0.5)
    return curves.train(trial, row.layout, Options(find_unused_parameters=True), CPU)


def test_a_step_may_leave_parameters_out_where_they_are_looked_for() -> None:
    found = curves.difference(_changing(0, Row("single", 1)), run_distributed(_changing, 2, Row("ddp", 2))[0])
    assert found.within(1e-5), found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.*.atn.q": "colwise"}, ["'blocks.*.atn.q'", "matches no module"]),
        ({"block.*.q": "colwise"}, ["matches no module", "did you mean"]),
        ({"blocks.*.q": "colwize"}, ["colwize", "did you mean colwise"]),
        ({"norm": "colwise"}, ["norm", "nn.Linear".removeprefix("nn."), "LayerNorm"]),
        ({"*.q": "colwise"}, ["matches no module"]),  # a star is one component
        ({"embed": "replicate"}, ["sequence modules", "split"]),
        ({"head": "rowwise"}, ["head.weight and embed.weight are one tied weight"]),
    ],
)
def test_a_plan_that_does_not_fit(change: dict[str, str], words: list[str]) -> None:
    assert_refused(words, tensor_plan.make_plan, PlainGPT(tied=True), GPT_PLAN | change, True)


def test_a_tied_embedding_outside_the_plan_is_split_with_its_head() -> None:
    plan = tensor_plan.make_plan(PlainGPT(tied=True), {"head": "colwise_rep"}, True)
    assert plan.dims == {"embed.weight": 0, "head.weight": 0}
    assert plan.styles["embed"] == "embedding" and plan.styles["head"] == "colwise_gather"


class CountsHeads(nn.Module):
    """Attention as many write it: the number of heads is in the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.out = nn.Embedding(VOCABULARY, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        q = self.q(self.embed(tokens))
        return self.out(q.view(*tokens.shape, 3, 4).transpose(1, 2).flatten(2).reshape(*tokens.shape, -1))


FORGETS_NORM = {key: value for key, value in GPT_PLAN.items() if key != "norm"}
"""The norm works on a part of the sequence, so its gradient differs between workers."""
SPLITS_HEADS = {"q": "colwise", "out": "rowwise"}


@pytest.mark.parametrize(
    ("row", "make", "plan", "words"),
    [
        (Row("ddp", 2), partly_used, None, "idle.weight and 3 more, .*fsdp.*parallel.find_unused_parameters=true"),
        (Row("ddp+tensor", 4, {"tp": 2}), partly_used, None, "idle.*fsdp"),
        (Row("fsdp", 2), partly_used, None, "no error"),
        (Row("tensor", 2), partly_used, None, "no error"),
        (Row("single", 1), nn.Tanh, None, "Tanh has no parameters.*nothing to train"),
        (Row("single", 1), lambda: nn.Linear(7, 3).requires_grad_(False), None, "requires_grad=False"),
        (Row("tensor", 2), PlainGPT, FORGETS_NORM, r"norm\..*sequence or partial"),
        (Row("tensor", 2), CountsHeads, SPLITS_HEADS, "parallel.tp=2.*divides the attention heads"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_model_that_does_not_fit_is_named_by_every_worker(row: Row, make: Any, plan: Any, words: str) -> None:
    args = (row, make, plan)
    for message in [_message(0, *args)] if row.workers == 1 else run_distributed(_message, row.workers, *args):
        assert re.search(words, message) and "\n" not in message


def test_blocks_are_checked() -> None:
    assert_refused(["'blocks.2'", "did you mean"], find_blocks, PlainGPT(), ["blocks.0", "blocks.2"])
    inside = "'blocks.0.q', which is inside the block 'blocks.0'"
    assert_refused([inside], find_blocks, PlainGPT(), ["blocks.0", "blocks.0.q"])


def test_no_such_compile_backend() -> None:
    options = Options(compile=True, compile_backend="fast")
    assert_refused(["aot_eager"], parallelize, mlp, choose("single", 1), options, device=CPU)


def test_state_of_another_model_or_optimizer() -> None:
    parallel = parallelize(seeded(mlp), choose("single", 1), device=CPU)
    state = parallel.model_state()
    lacking = {name: tensor for name, tensor in state.items() if name != "0.bias"}
    short = "0.bias is (2,) in the state and (13,) in the model"
    assert_refused(["lacks '0.bias'"], parallel.load_model_state, lacking)
    assert_refused(["has unknown 'extra'"], parallel.load_model_state, state | {"extra": torch.zeros(1)})
    assert_refused([short], parallel.load_model_state, state | {"0.bias": torch.zeros(2)})
    sgd = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(parallel.parameters())
    assert_refused(["does not fit '0.weight'"], parallel.load_optimizer_state, adam, parallel.optimizer_state(sgd))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 6), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))


def _batch_norm(_: int, row: Row) -> curves.Curve:
    """Of steps that move no weight."""
    still = functools.partial(torch.optim.SGD, lr=0.0)
    trial = curves.Trial(seeded(normed), classifier_loss, image_batch, steps=3, optimizer=still)
    return curves.train(trial, row.layout, Options(), CPU)


@pytest.mark.parametrize("row", [Row("ddp", 2), Row("fsdp", 2)], ids=str)
def test_batch_norm_under_a_split_batch_is_said_aloud(row: Row) -> None:
    """And its running statistics are those of rank 0's batches, as the sentence says."""
    found = run_distributed(_batch_norm, 2, row)[0]
    assert len(found.notes) == 1 and "BatchNorm2d" in found.notes[0] and "rank 0" in found.notes[0]
    alone = seeded(normed)()
    for step in range(3):
        alone(image_batch(step)[0].chunk(2)[0])
    torch.testing.assert_close(found.weights["1.running_mean"], alone.state_dict()["1.running_mean"])
    assert found.weights["1.num_batches_tracked"] == 3
