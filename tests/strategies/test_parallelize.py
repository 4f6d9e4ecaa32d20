"""A task may use its model as on one device, and what does not fit its layout is refused.

A loss may call methods and parts of the model, and call it several times. The model may have
parameters without dimensions, float32 masks, and other layers in every step. A refusal is one
sentence that names what does not fit, on every rank.
"""

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
from strategies import activation_checkpointing
from strategies.blocks import find_blocks
from strategies.parallelize import LayoutError, Options, choose, parallelize
from strategies.tensor.plan import make_plan
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import (
    CPU,
    DDP,
    FSDP,
    GPT_PLAN,
    TENSOR,
    VOCABULARY,
    PlainGPT,
    assert_refused,
    classifier_loss,
    mlp,
    seeded,
)


class ScaledClassifier(nn.Module):
    """A classifier of tokens whose logits have a temperature, as CLIP's have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(3)})
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def encode(self, tokens: Tensor) -> Tensor:
        float32_mask = (tokens > 3).float().unsqueeze(-1)
        x = self.embed(tokens) * float32_mask
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return self.norm(x).mean(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens)) * self.scale.exp()


def _loss_by_methods(model: Any, batch: Any) -> Tensor:
    tokens, targets = batch
    logits = model.head(model.encode(tokens)) * model.scale.exp()
    return F.cross_entropy(logits.float(), targets)


def _loss_of_two_calls(model: Any, batch: Any) -> Tensor:
    tokens, _ = batch
    difference = model(tokens) - model(tokens.flip(1)).detach()
    return difference.square().mean() + classifier_loss(model, batch)


def _metrics(model: Any, batch: Any) -> dict[str, Tensor]:
    tokens, targets = batch
    accuracy = (model(tokens).argmax(-1) == targets).float().mean()
    return {"loss": classifier_loss(model, batch), "accuracy": accuracy}


def _token_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 12, (16, 5), generator=generator)
    targets = torch.randint(0, 4, (16,), generator=generator)
    return tokens, targets


def _optimizer_of_two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    tensors = [p for p in parameters if p.dim() > 0]
    scalars = [p for p in parameters if p.dim() == 0]
    return torch.optim.AdamW([{"params": tensors}, {"params": scalars}], lr=0.02)


def _trial(loss: Any) -> Trial:
    return Trial(
        build=seeded(ScaledClassifier),
        loss=loss,
        batch=_token_batch,
        steps=2,
        micro_batches=2,
        optimizer=_optimizer_of_two_groups,
    )


def _train_each(rank: int, row: Row, cases: list[tuple[Any, str]]) -> list[Curve]:
    """The curve of each (loss, precision)."""
    return [
        curves.train(_trial(loss), row.layout, Options(precision=precision), CPU)
        for loss, precision in cases
    ]


@functools.cache
def _curve_of_one_device(loss: Any, precision: str) -> Curve:
    return curves.train(_trial(loss), SINGLE.layout, Options(precision=precision), CPU)


FLOAT32_CASES = [
    (classifier_loss, "fp32"),
    (_loss_by_methods, "fp32"),
    (_loss_of_two_calls, "fp32"),
]
ALL_CASES = [*FLOAT32_CASES, (classifier_loss, "bf16"), (_loss_by_methods, "bf16")]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("row", "cases"),
    [
        (DDP, ALL_CASES),
        (FSDP, ALL_CASES),
        pytest.param(Row("zero2", 2), FLOAT32_CASES, marks=pytest.mark.slow),
        (Row("fsdp+pipeline", 4, {"pp": 2}), FLOAT32_CASES[:1]),
    ],
    ids=lambda value: str(value) if isinstance(value, Row) else "",
)
def test_the_model_is_used_as_on_one_device(row: Row, cases: list[tuple[Any, str]]) -> None:
    curves_of_row = run_distributed(_train_each, row.workers, row, cases)[0]
    for case, curve in zip(cases, curves_of_row, strict=True):
        _, precision = case
        expected = _curve_of_one_device(*case)
        difference = curves.difference(expected, curve)
        if precision == "fp32":
            assert difference.within(1e-5), (case, difference)
        else:
            assert difference.loss < 0.05, (case, difference)
        assert expected.weights["scale"] != 0.5, "the scalar has learnt"


def _evaluate(rank: int, row: Row) -> list[dict[str, Tensor] | None]:
    """The metrics of a large and of a small batch."""
    parallel = curves.parallelize_trial(_trial(classifier_loss), row.layout, Options(), CPU)
    parallel.module.eval()
    tokens, targets = _token_batch(0)
    return [parallel.forward(_metrics, (tokens[:size], targets[:size])) for size in (16, 8)]


@pytest.mark.alone
def test_metrics_may_call_the_model_again_in_a_pipeline() -> None:
    *_, metrics_of_last_stage = run_distributed(_evaluate, 2, Row("pipeline", 2))
    torch.testing.assert_close(metrics_of_last_stage, _evaluate(0, SINGLE))


class AlternatingLayers(nn.Module):
    """Uses another layer in every step, and one layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.idle = nn.Linear(7, 3)
        self.ways = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, way = inputs
        return self.ways[int(way[0])](torch.tanh(self.stem(x)))


def _train_alternating(rank: int, row: Row) -> Curve:
    def batch(step: int) -> Any:
        x, targets = models.vector_batch(step)
        way = torch.full((len(x),), step % 2)
        return (x, way), targets

    trial = Trial(
        build=seeded(AlternatingLayers),
        loss=classifier_loss,
        batch=batch,
        steps=6,
        micro_batches=2,
        clip=0.5,
    )
    return curves.train(trial, row.layout, Options(find_unused_parameters=True), CPU)


@pytest.mark.alone
def test_a_step_may_leave_parameters_unused_if_ddp_searches_for_them() -> None:
    curve = run_distributed(_train_alternating, 2, DDP)[0]
    difference = curves.difference(_train_alternating(0, SINGLE), curve)
    assert difference.within(1e-5), difference


def _model_with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 6), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))


def _train_without_moving(rank: int, row: Row) -> Curve:
    trial = Trial(
        build=seeded(_model_with_batch_norm),
        loss=classifier_loss,
        batch=models.image_batch,
        steps=3,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
    )
    return curves.train(trial, row.layout, Options(), CPU)


@pytest.mark.alone
@pytest.mark.parametrize("row", [DDP, FSDP], ids=str)
def test_a_note_says_that_batch_norm_counts_the_batches_of_rank_0(row: Row) -> None:
    curve = run_distributed(_train_without_moving, 2, row)[0]
    (note,) = curve.notes
    assert "BatchNorm2d" in note
    assert "rank 0" in note
    single_model = seeded(_model_with_batch_norm)()
    for step in range(3):
        images, _ = models.image_batch(step)
        single_model(images.chunk(2)[0])
    name = "1.running_mean"
    torch.testing.assert_close(curve.weights[name], single_model.state_dict()[name])
    assert curve.weights["1.num_batches_tracked"] == 3


def _gradient_of_penalty(mode: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients, and buffers afterwards, of a loss that differentiates a block with batch norm."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh())
    model = nn.Sequential(block, nn.Linear(7, 1))
    activation_checkpointing.apply(model, ["0"], mode)
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, dict(model.named_buffers())


@pytest.mark.pure
def test_a_block_with_batch_norm_is_recomputed_for_both_gradients_of_a_penalty() -> None:
    torch.testing.assert_close(_gradient_of_penalty("full"), _gradient_of_penalty("none"))


# --- what does not fit ----------------------------------------------------------------------------


def _partly_used() -> nn.Module:
    model = nn.Linear(7, 3)
    model.idle = nn.Linear(7, 3)
    model.also_idle = nn.Linear(7, 3)
    return model


def _frozen() -> nn.Module:
    return nn.Linear(7, 3).requires_grad_(False)


class HeadsInShape(nn.Module):
    """Attention as many write it: the shapes in forward name the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.q = nn.Linear(12, 12)
        self.out = nn.Linear(12, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        by_head = self.q(self.embed(tokens)).view(*tokens.shape, 3, 4).transpose(1, 2)
        return self.out(by_head.flatten(2).reshape(*tokens.shape, -1))


PLAN_WITHOUT_NORM = {key: style for key, style in GPT_PLAN.items() if key != "norm"}
"""The norm sees a part of the sequence, so that its gradient differs between workers."""
HEADS_PLAN = {"q": "colwise", "out": "rowwise"}
NO_ERROR = "no error"


def _error_of_a_step(
    rank: int, row: Row, make: Callable[[], nn.Module], plan: dict[str, str] | None
) -> str:
    """Take a step with accumulation.

    Returns:
        The refusal, or NO_ERROR.
    """

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        return module(inputs).square().mean()

    try:
        parallel = parallelize(seeded(make), row.layout, device=CPU, tensor_plan=plan)
        x = torch.randn(4, 7) if plan is None else torch.randint(0, VOCABULARY, (2, 8))
        parallel.forward_backward([x, x], [0.5, 0.5], loss)
        parallel.grad_norm_(None)
    except LayoutError as error:
        return str(error)
    return NO_ERROR


@pytest.mark.alone
@pytest.mark.parametrize(
    ("row", "make", "plan", "pattern"),
    [
        (
            DDP,
            _partly_used,
            None,
            "idle.weight and 3 more, .*fsdp.*parallel.find_unused_parameters=true",
        ),
        (Row("ddp+tensor", 4, {"tp": 2}), _partly_used, None, "idle.*fsdp"),
        (FSDP, _partly_used, None, NO_ERROR),
        (TENSOR, _partly_used, None, NO_ERROR),
        (SINGLE, _frozen, None, "requires_grad=False"),
        (TENSOR, PlainGPT, PLAN_WITHOUT_NORM, r"norm\..*sequence or partial"),
        (TENSOR, HeadsInShape, HEADS_PLAN, "parallel.tp=2.*divides the attention heads"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_worker_refuses_a_model_that_does_not_fit(
    row: Row, make: Callable[[], nn.Module], plan: dict[str, str] | None, pattern: str
) -> None:
    if row.workers == 1:
        messages = [_error_of_a_step(0, row, make, plan)]
    else:
        messages = run_distributed(_error_of_a_step, row.workers, row, make, plan)
    for message in messages:
        assert re.search(pattern, message), message
        assert "\n" not in message


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
def test_a_tensor_plan_that_does_not_fit_is_refused(
    change: dict[str, str], words: list[str]
) -> None:
    assert_refused(words, make_plan, PlainGPT(tied=True), GPT_PLAN | change, True)


@pytest.mark.pure
def test_a_tied_embedding_outside_the_plan_is_split_with_its_head() -> None:
    plan = make_plan(PlainGPT(tied=True), {"head": "colwise_rep"}, True)
    assert plan.dims == {"embed.weight": 0, "head.weight": 0}
    assert plan.styles["embed"] == "embedding"
    assert plan.styles["head"] == "colwise_gather"


@pytest.mark.pure
def test_unknown_or_nested_blocks_and_unknown_compile_backends_are_refused() -> None:
    words = ["'blocks.2'", "did you mean"]
    assert_refused(words, find_blocks, PlainGPT(), ["blocks.0", "blocks.2"])
    words = ["'blocks.0.q', which is inside the block 'blocks.0'"]
    assert_refused(words, find_blocks, PlainGPT(), ["blocks.0", "blocks.0.q"])
    options = Options(compile=True, compile_backend="fast")
    assert_refused(["aot_eager"], parallelize, mlp, choose("single", 1), options, device=CPU)


@pytest.mark.pure
def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    parallel = parallelize(seeded(mlp), choose("single", 1), device=CPU)
    state = parallel.model_state()
    without_bias = {name: tensor for name, tensor in state.items() if name != "0.bias"}
    cases = [
        ("lacks '0.bias'", without_bias),
        ("has unknown 'extra'", state | {"extra": torch.zeros(1)}),
        (
            "0.bias is (2,) in the state and (13,) in the model",
            state | {"0.bias": torch.zeros(2)},
        ),
    ]
    for sentence, other_state in cases:
        assert_refused([sentence], parallel.load_model_state, other_state)
    sgd = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(parallel.parameters())
    sgd_state = parallel.optimizer_state(sgd)
    assert_refused(["does not fit '0.weight'"], parallel.load_optimizer_state, adam, sgd_state)


# --- compiled blocks ------------------------------------------------------------------------------


def _count_graphs(rank: int, row: Row, options: Options) -> int:
    """How many graphs the compiler gets in two steps."""
    trial = Trial(
        build=seeded(lambda: GPT(VOCABULARY, d_model=256, n_layers=2)),  # a block has 3 MiB
        loss=models.language_loss,
        batch=models.language_batch,
        steps=2,
    )
    graphs: list[torch.fx.GraphModule] = []
    torch_compile = torch.compile

    def record_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile_and_record(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        return torch_compile(function, backend=record_graph)

    with mock.patch.object(torch, "compile", compile_and_record):
        curves.train(trial, row.layout, options, CPU)
    return len(graphs)


@pytest.mark.slow
@pytest.mark.alone
def test_buckets_of_ddp_do_not_split_the_graph_of_a_block() -> None:
    options = Options(compile=True, bucket_mb=1.0)
    graphs_of_single = _count_graphs(0, SINGLE, options)
    torch.compiler.reset()
    graphs_by_rank = run_distributed(_count_graphs, DDP.workers, DDP, options)
    assert graphs_by_rank == [graphs_of_single] * DDP.workers
