"""Activation offloading: the same bits beside every strategy, what is moved, and what stays."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from experiments.parity.curves import Curve, parallelize_trial, run_steps, train
from experiments.parity.rows import SINGLE, Row
from strategies import activation_checkpointing, activation_offloading
from strategies.activation_offloading import ON_DEVICE, SMALLEST_BYTES, Moved, moved_blocks
from strategies.layout import check
from strategies.parallelize import Options
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import (
    BATCH,
    COMPILED,
    CPU,
    DDP,
    FSDP,
    SEQUENCE,
    TENSOR,
    WIDTH,
    PlainGPT,
    assert_refused,
    saved_for_backward,
    seeded,
    slow,
)

LAYERS = 5
"""Enough for tensors that leave and return: with three, the last two blocks' never leave."""
BLOCKS = [f"blocks.{number}" for number in range(LAYERS)]
INPUT_BYTES = 4 * BATCH * SEQUENCE * WIDTH
TOKENS = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % models.VOCABULARY


@contextmanager
def _everything_moved() -> Iterator[None]:
    """Also moves the smallest tensors."""
    with mock.patch.dict(SMALLEST_BYTES, {"cpu": 1}):
        yield


def _model() -> nn.Module:
    return seeded(lambda: PlainGPT(layers=LAYERS))()


def _gradients(model: nn.Module, *, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(TOKENS).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.pure
@pytest.mark.parametrize("mode", ["none", "full", "selective", "every_2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bits_and_what_is_moved_is_counted(
    mode: str, autocast: bool
) -> None:
    kept = _model()
    activation_checkpointing.apply(kept, BLOCKS, mode)
    expected = _gradients(kept, autocast=autocast)
    model = _model()
    activation_checkpointing.apply(model, BLOCKS, mode)
    moved = activation_offloading.apply(model, BLOCKS, CPU)
    for one, other in zip(expected, _gradients(model, autocast=autocast), strict=True):
        assert torch.equal(one, other)
    if mode in ("full", "selective"):  # a block's input, which has float32
        assert moved == Moved(tensors=LAYERS - 1, bytes=(LAYERS - 1) * INPUT_BYTES)
    else:
        assert moved.bytes > (LAYERS - 1) * INPUT_BYTES * (4 if mode == "none" else 2)
    counted = moved.bytes
    with torch.no_grad():
        model(TOKENS)
    assert moved.bytes == counted, "an evaluation saves nothing"


@pytest.mark.pure
@pytest.mark.parametrize("autocast", [False, True])
def test_all_that_a_block_saves_is_moved_once_but_its_weights(autocast: bool) -> None:
    block = _model().get_submodule("blocks.0")
    x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    weights = list(block.parameters())
    transposed = {tuple(weight.shape[::-1]) for weight in weights if weight.dim() == 2}
    with saved_for_backward() as tensors, torch.autocast("cpu", torch.bfloat16, autocast):
        block(x)
    addresses_of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
    copies = [t for t in tensors if t.dtype == torch.bfloat16 and tuple(t.shape) in transposed]
    assert bool(copies) == autocast
    addresses_of_weights |= {copy.untyped_storage().data_ptr() for copy in copies}
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in addresses_of_weights}
    with _everything_moved(), torch.autocast("cpu", torch.bfloat16, autocast):
        moved = activation_offloading.apply(block, [], CPU)
        block(x)
    assert moved == Moved(tensors=len(sizes), bytes=sum(sizes.values()))


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[activation_offloading._Storage]:
    """The storages that are moved, as long as somebody has them."""
    moved: weakref.WeakSet[activation_offloading._Storage] = weakref.WeakSet()
    make = activation_offloading._Storage.__init__

    def noted(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        moved.add(self)

    monkeypatch.setattr(activation_offloading._Storage, "__init__", noted)
    return moved


@pytest.mark.pure
def test_two_blocks_at_most_have_theirs_on_the_device(
    storages: weakref.WeakSet[activation_offloading._Storage],
) -> None:
    model = _model()
    most_by_block: list[int] = []

    def on_device() -> int:
        return sum(storage.is_on_device for storage in storages)

    def note(*_: Any) -> None:
        most_by_block.append(on_device())

    with _everything_moved():
        moved = activation_offloading.apply(model, BLOCKS, CPU)
        for name in BLOCKS:
            model.get_submodule(name).down.register_forward_hook(note)
            model.get_submodule(name).register_full_backward_hook(note)
        loss = model(TOKENS).sum()
        tensors_of_block = moved.tensors // (LAYERS - 1)
        loss.backward()
    assert len(most_by_block) == 2 * LAYERS
    assert max(most_by_block) <= ON_DEVICE * tensors_of_block
    assert on_device() == 0, "backward has freed all of them"


class _KeepsViews(torch.autograd.Function):
    """Saves views of its input, and checks in backward that they are the same views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        views = (x.t(), x[:, ::2], x[1:], x.expand(3, *x.shape), x.view(torch.int32))
        ctx.save_for_backward(*views)
        ctx.strides = [view.stride() for view in views]
        ctx.numbers = [view.clone() for view in views]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        views = ctx.saved_tensors
        assert [view.stride() for view in views] == ctx.strides
        assert all(torch.equal(*pair) for pair in zip(views, ctx.numbers, strict=True))
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1
        return gradient


class _Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _KeepsViews.apply(x)


@pytest.mark.pure
def test_views_come_back_as_views_of_one_storage() -> None:
    model = nn.Sequential(*[_Views() for _ in range(4)])
    with _everything_moved():
        moved = activation_offloading.apply(model, ["0", "1", "2", "3"], CPU)
        x = torch.randn(6, 4, requires_grad=True)
        model(x).sum().backward()
    assert moved == Moved(tensors=3, bytes=3 * 6 * 4 * 4)
    assert x.grad is not None and x.grad.eq(1).all()


class _Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


@pytest.mark.pure
def test_an_argument_that_blocks_share_is_not_copied_for_each() -> None:
    model = nn.ModuleList([_Masked() for _ in range(5)])
    x = torch.randn(16, 16, requires_grad=True)
    mask = torch.rand(16, 16)
    with _everything_moved():
        moved = activation_offloading.apply(model, ["0", "1", "2", "3", "4"], CPU)
        y = x
        for block in model:
            y = block(y, mask=mask)
        y.sum().backward()
    assert moved.tensors == 1, "the first block could not know"
    assert x.grad is not None and torch.allclose(x.grad, mask.pow(5))


@pytest.mark.pure
def test_a_loss_may_take_gradients_itself_and_use_a_graph_twice() -> None:
    kept = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS)])
    model = copy.deepcopy(kept)
    moved = activation_offloading.apply(model, [str(number) for number in range(LAYERS)], CPU)
    for each in (kept, model):
        x = torch.linspace(-1, 1, 32 * 16).view(32, 16).requires_grad_()
        y = each(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + gradient.square().sum()).backward()
    for one, other in zip(kept.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert moved.tensors > 0


@pytest.mark.pure
def test_the_last_block_stays_but_in_a_pipeline() -> None:
    assert [moved_blocks(count, is_pipeline=False) for count in (1, 2, 8)] == [1, 1, 7]
    assert [moved_blocks(count, is_pipeline=True) for count in (1, 2, 8)] == [1, 2, 8]
    for is_pipeline in (False, True):
        model = _model()
        activation_checkpointing.apply(model, BLOCKS, "full")
        moved = activation_offloading.apply(model, BLOCKS, CPU, is_pipeline=is_pipeline)
        _gradients(model)
        assert moved.tensors == moved_blocks(LAYERS, is_pipeline=is_pipeline)


@pytest.mark.pure
def test_deepspeed_is_refused_in_a_sentence() -> None:
    words = ["activation_offloading", "deepspeed", "strategy=fsdp"]
    layout = Row("deepspeed", 2).layout
    assert_refused(words, check, layout, Options(activation_offloading=True))


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_two_blocks_and_computes_the_same_bits() -> None:
    device = torch.device("cuda")
    layers = 12
    names = [str(number) for number in range(layers)]
    x = torch.randn(4096, 1024, device=device)  # 16 MiB

    def step(is_moving: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
            for _ in range(layers)
        ]
        model = nn.Sequential(*blocks).to(device)
        if is_moving:
            activation_offloading.apply(model, names, device)
        for _ in range(3):  # so that memory that was freed too early is used again
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            peak = torch.cuda.max_memory_allocated() - before
        return [parameter.grad.cpu() for parameter in model.parameters()], peak  # type: ignore

    expected, kept_bytes = step(is_moving=False)
    gradients, moved_bytes = step(is_moving=True)
    for one, other in zip(expected, gradients, strict=True):
        assert torch.equal(one, other)
    assert moved_bytes < 0.6 * kept_bytes


# --- beside strategies ----------------------------------------------------------------------------


def _train_both(rank: int, row: Row, values: dict[str, Any]) -> tuple[Curve, Curve, Moved]:
    """A row's curve without and with offloading, and what was moved."""
    make_trial = models.mixture_trial if row.layout.dims.ep > 1 else models.gpt_trial
    trial, kept_options = row.adapt(replace(make_trial(), steps=2), Options(**values))
    kept = train(trial, row.layout, kept_options, CPU)
    options = replace(kept_options, activation_offloading=True)
    parallel = parallelize_trial(trial, row.layout, options, CPU)
    optimizer = parallel.prepare_optimizer(trial.optimizer(parallel.parameters()))
    losses, norms = run_steps(trial, parallel, optimizer, range(trial.steps))
    assert parallel.moved is not None
    offloaded = Curve(losses=losses, norms=norms, weights=parallel.full_model_state())
    return kept, offloaded, parallel.moved


ACCUMULATED = Row("fsdp", 2, micro_batches=2)
PIPELINE = Row("pipeline", 2, {"pp": 2}, micro_batches=4)
ZERO_BUBBLE = Row("pipeline", 2, {"pp": 2}, options={"schedule": "zbv"}, micro_batches=4)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("row", "values"),
    [
        (SINGLE, {}),
        slow(SINGLE, COMPILED),
        (SINGLE, {"precision": "bf16"} | COMPILED),
        (Row("model_parallel", 1), {}),
        (DDP, {"activation_checkpointing": "full"}),
        slow(FSDP, {"precision": "bf16"}),
        (ACCUMULATED, {"offload": True}),
        slow(TENSOR, {}),
        slow(Row("context", 2), {}),
        slow(Row("ddp+expert", 2, {"ep": 2}), {}),
        slow(PIPELINE, {"activation_checkpointing": "selective"}),
        (ZERO_BUBBLE, {}),
        slow(Row("hsdp", 4, {"dp_shard": 2}), {}),
        slow(Row("zero1", 2), {}),
        slow(Row("zero2", 2), {}),
        slow(Row("fsdp+tensor", 4, {"tp": 2}), COMPILED),
        slow(Row("fsdp+tensor+pipeline", 8, {"tp": 2, "pp": 2}), {}),
        slow(Row("fsdp+expert", 2, {"ep": 2}), {"precision": "bf16"}),
        slow(Row("fsdp+expert", 4, {"ep": 2}), {}),
    ],
    ids=str,
)
def test_a_row_has_the_same_curve_to_the_bit(row: Row, values: dict[str, Any]) -> None:
    if row.workers == 1:
        results = [_train_both(0, row, values)]
    else:
        results = run_distributed(_train_both, row.workers, row, values)
    kept, offloaded, _ = results[0]
    assert kept.losses == offloaded.losses and kept.norms == offloaded.norms
    for name, weight in kept.weights.items():
        assert torch.equal(weight, offloaded.weights[name]), name
    assert all(moved.bytes > 0 for _, _, moved in results)
