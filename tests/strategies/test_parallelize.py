"""A task may use its model as on one device: methods and parts of it, several calls, scalars, masks of float32, other
layers in every step. What does not fit its layout gets one sentence that names it, on every rank."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.gpt import GPT
from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from experiments.parity.rows import SINGLE, Row
from strategies.blocks import find_blocks
from strategies.parallelize import LayoutError, Options, choose, parallelize
from strategies.tensor.plan import make_plan
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import CPU, DDP, FSDP, GPT_PLAN, TENSOR, VOCABULARY, PlainGPT, assert_refused, mlp, seeded


class Two(nn.Module):
    """Two towers with a temperature, as CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(3)})
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * (tokens > 3).float()[..., None]  # float32, whatever the embedding is
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return self.norm(x).mean(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens)) * self.scale.exp()


def by_method(model: Any, batch: Any) -> Tensor:
    x = model.encode(batch[0])
    return F.cross_entropy((model.head(x) * model.scale.exp()).float(), batch[1])


def twice(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - model(batch[0].flip(1)).detach()).square().mean() + models.classifier_loss(model, batch)


def figures(model: Any, batch: Any) -> dict[str, Tensor]:
    right = (model(batch[0]).argmax(-1) == batch[1]).float().mean()
    return {"loss": models.classifier_loss(model, batch), "right": right}


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 12, (16, 5), generator=generator), torch.randint(0, 4, (16,), generator=generator)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The scalar is in a group of its own."""
    own = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in own if bool(p.dim()) == some]} for some in (True, False)], lr=0.02)


def _trial(loss: Any) -> Trial:
    return Trial(seeded(Two), loss, _batch, steps=2, micro_batches=2, optimizer=_optimizer)


def _train(_: int, row: Row, asked: list[Any]) -> list[Curve]:
    return [curves.train(_trial(loss), row.layout, Options(precision=kind), CPU) for loss, kind in asked]


WHOLE = [(loss, "fp32") for loss in (models.classifier_loss, by_method, twice)]
NARROW = [(loss, "bf16") for loss in (models.classifier_loss, by_method)]
SHARDED_STAGES = Row("fsdp+pipeline", 4, {"pp": 2})


@pytest.mark.alone
@pytest.mark.parametrize(
    ("row", "asked"),
    [(DDP, WHOLE + NARROW), (FSDP, WHOLE + NARROW), (Row("zero2", 2), WHOLE), (SHARDED_STAGES, WHOLE[:1])],
    ids=lambda value: str(value) if isinstance(value, Row) else "",
)
def test_the_model_is_used_as_on_one_device(row: Row, asked: list[Any]) -> None:
    found = run_distributed(_train, row.workers, row, asked)[0]
    for (loss, kind), curve, truth in zip(asked, found, _train(0, SINGLE, asked), strict=True):
        differs = curves.difference(truth, curve)
        assert differs.within(1e-5) if kind == "fp32" else differs.loss < 0.05, (loss, differs)
        assert truth.weights["scale"] != 0.5, "the scalar has learnt"


def _evaluated(_: int, row: Row) -> list[dict[str, Tensor] | None]:
    parallel = curves.parallelize_trial(_trial(models.classifier_loss), row.layout, Options(), CPU)
    parallel.module.eval()
    return [parallel.forward(figures, (tokens[:n], targets[:n])) for n in (16, 8) for tokens, targets in (_batch(0),)]


@pytest.mark.alone
def test_metrics_may_call_the_model_again_in_a_pipeline() -> None:
    *_, last = run_distributed(_evaluated, 2, Row("pipeline", 2))
    torch.testing.assert_close(last, _evaluated(0, SINGLE))


class Changing(nn.Module):
    """Uses another layer in every step, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.idle = nn.Linear(7, 7), nn.Linear(7, 3)
        self.ways = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, which = inputs
        return self.ways[int(which[0])](torch.tanh(self.stem(x)))


def _changing(_: int, row: Row) -> Curve:
    def batch(step: int) -> Any:
        x, y = models.vector_batch(step)
        return (x, torch.full((len(x),), step % 2)), y

    trial = Trial(seeded(Changing), models.classifier_loss, batch, steps=6, micro_batches=2, clip=0.5)
    return curves.train(trial, row.layout, Options(find_unused_parameters=True), CPU)


@pytest.mark.alone
def test_a_step_may_leave_parameters_out_where_they_are_looked_for() -> None:
    found = curves.difference(_changing(0, SINGLE), run_distributed(_changing, 2, DDP)[0])
    assert found.within(1e-5), found


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 6), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))


def _batch_norm(_: int, row: Row) -> Curve:
    """Of steps that move no weight."""
    still = functools.partial(torch.optim.SGD, lr=0.0)
    trial = Trial(seeded(normed), models.classifier_loss, models.image_batch, steps=3, optimizer=still)
    return curves.train(trial, row.layout, Options(), CPU)


@pytest.mark.alone
@pytest.mark.parametrize("row", [DDP, FSDP], ids=str)
def test_batch_norm_under_a_split_batch_is_said_aloud(row: Row) -> None:
    """And its running statistics are those of rank 0's batches, as the sentence says."""
    found = run_distributed(_batch_norm, 2, row)[0]
    assert len(found.notes) == 1 and "BatchNorm2d" in found.notes[0] and "rank 0" in found.notes[0]
    alone = seeded(normed)()
    for step in range(3):
        alone(models.image_batch(step)[0].chunk(2)[0])
    torch.testing.assert_close(found.weights["1.running_mean"], alone.state_dict()["1.running_mean"])
    assert found.weights["1.num_batches_tracked"] == 3


# --- what does not fit ------------------------------------------------------------------------------------------------


def partly_used() -> nn.Module:
    model = nn.Linear(7, 3)
    model.idle, model.idler = nn.Linear(7, 3), nn.Linear(7, 3)
    return model


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


@pytest.mark.alone
@pytest.mark.parametrize(
    ("row", "make", "plan", "words"),
    [
        (DDP, partly_used, None, "idle.weight and 3 more, .*fsdp.*parallel.find_unused_parameters=true"),
        (Row("ddp+tensor", 4, {"tp": 2}), partly_used, None, "idle.*fsdp"),
        (FSDP, partly_used, None, "no error"),
        (TENSOR, partly_used, None, "no error"),
        (SINGLE, lambda: nn.Linear(7, 3).requires_grad_(False), None, "requires_grad=False"),
        (TENSOR, PlainGPT, FORGETS_NORM, r"norm\..*sequence or partial"),
        (TENSOR, CountsHeads, SPLITS_HEADS, "parallel.tp=2.*divides the attention heads"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_model_that_does_not_fit_is_named_by_every_worker(row: Row, make: Any, plan: Any, words: str) -> None:
    args = (row, make, plan)
    for message in [_message(0, *args)] if row.workers == 1 else run_distributed(_message, row.workers, *args):
        assert re.search(words, message) and "\n" not in message


@pytest.mark.pure
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block.*.q": "colwise"}, ["matches no module", "did you mean"]),
        ({"blocks.*.q": "colwize"}, ["colwize", "did you mean colwise"]),
        ({"norm": "colwise"}, ["norm", "Linear", "LayerNorm"]),
        ({"*.q": "colwise"}, ["matches no module"]),  # a star is one component
        ({"embed": "replicate"}, ["sequence modules", "split"]),
        ({"head": "rowwise"}, ["head.weight and embed.weight are one tied weight"]),
    ],
)
def test_a_plan_that_does_not_fit(change: dict[str, str], words: list[str]) -> None:
    assert_refused(words, make_plan, PlainGPT(tied=True), GPT_PLAN | change, True)


@pytest.mark.pure
def test_a_tied_embedding_outside_the_plan_is_split_with_its_head() -> None:
    plan = make_plan(PlainGPT(tied=True), {"head": "colwise_rep"}, True)
    assert plan.dims == {"embed.weight": 0, "head.weight": 0}
    assert plan.styles["embed"] == "embedding" and plan.styles["head"] == "colwise_gather"


@pytest.mark.pure
def test_no_such_block_or_compile_backend() -> None:
    assert_refused(["'blocks.2'", "did you mean"], find_blocks, PlainGPT(), ["blocks.0", "blocks.2"])
    inside = "'blocks.0.q', which is inside the block 'blocks.0'"
    assert_refused([inside], find_blocks, PlainGPT(), ["blocks.0", "blocks.0.q"])
    options = Options(compile=True, compile_backend="fast")
    assert_refused(["aot_eager"], parallelize, mlp, choose("single", 1), options, device=CPU)


@pytest.mark.pure
def test_state_of_another_model_or_optimizer() -> None:
    parallel = parallelize(seeded(mlp), choose("single", 1), device=CPU)
    state = parallel.model_state()
    for words, given in (
        ("lacks '0.bias'", {name: tensor for name, tensor in state.items() if name != "0.bias"}),
        ("has unknown 'extra'", state | {"extra": torch.zeros(1)}),
        ("0.bias is (2,) in the state and (13,) in the model", state | {"0.bias": torch.zeros(2)}),
    ):
        assert_refused([words], parallel.load_model_state, given)
    sgd = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(parallel.parameters())
    assert_refused(["does not fit '0.weight'"], parallel.load_optimizer_state, adam, parallel.optimizer_state(sgd))


def _graphs(_: int, row: Row, options: Options) -> int:
    """How many graphs the compiler is given in two steps."""
    build = seeded(lambda: GPT(VOCABULARY, d_model=256, n_layers=2))  # a block takes 3 MiB
    trial = Trial(build, models.language_loss, models.language_batch, steps=2)
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile

    def compile_with(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile_and_count(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        return compiled(function, backend=compile_with)

    with mock.patch.object(torch, "compile", compile_and_count):
        curves.train(trial, row.layout, options, CPU)
    return len(graphs)


@pytest.mark.alone
def test_buckets_of_ddp_cut_no_block_into_several_graphs() -> None:
    options = Options(compile=True, bucket_mb=1.0)
    alone = _graphs(0, SINGLE, options)
    torch.compiler.reset()
    assert run_distributed(_graphs, DDP.workers, DDP, options) == [alone] * DDP.workers
