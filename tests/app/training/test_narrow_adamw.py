"""Moments and weights in bfloat16: right on average, and the same under every layout."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from app.config import OptimizerConfig
from app.tasks.huggingface.quantized import without_warnings_of_torchao
from app.training import narrow_adamw
from app.training.narrow_adamw import NarrowAdamW
from app.training.optimizer import build_optimizer
from app.training.stochastic import random_bits, rounded, salt
from experiments.parity.curves import Curve, difference, parallelize_trial, run_steps
from strategies.costs import ITEMSIZES, model_size, optimizer_bytes, rank_size, unit_size
from strategies.frozen import narrow, narrow_parameters
from strategies.parallelize import Options, choose
from tests.pool import run_distributed
from tests.strategies.models import gpt_trial

CPU = torch.device("cpu")
STEPS = 4
BF16 = torch.bfloat16
LAYOUTS = {"ddp": None, "fsdp": None, "zero1": None, "tensor": None, "pipeline": 2}
"""And their numbers of stages."""


def _nearest(value: Tensor, bits: Tensor) -> Tensor:
    return value.to(BF16)


def _bits(step: int, shape: tuple[int, ...], name: str = "a.weight") -> Tensor:
    places = [torch.arange(size, dtype=torch.int32) for size in shape]
    number = torch.tensor(salt(0, name, "weight"), dtype=torch.int32)
    return random_bits(number, torch.tensor(float(step)), places)


# --- rounding ---


@pytest.mark.pure
def test_rounding_is_right_in_the_mean_and_never_more_than_one_number_off() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-130, 120, (64, 32), generator=generator).float()
    values = torch.randn(64, 32, generator=generator) * torch.exp2(exponents)
    below = (values.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    steps = 4000
    total = torch.zeros(values.shape, dtype=torch.float64)
    for step in range(steps):
        result = rounded(values, _bits(step, (64, 32))).float()
        assert ((result == below) | (result == above)).all()
        total += result.double()
    gap = (above - below).double()
    probability = (values - below).double() / gap
    error = (total / steps - values.double()) / gap
    deviation = (probability * (1 - probability) / steps).sqrt()
    scores = (error / deviation)[deviation > 0]
    assert scores.abs().max() < 5.0  # of 2,048 numbers
    assert abs(float(scores.mean())) < 5 / len(scores) ** 0.5
    assert 0.9 < float(scores.std()) < 1.1


@pytest.mark.pure
def test_numbers_of_16_bits_and_those_that_are_not_finite_stay_as_they_are() -> None:
    special = [0.0, -0.0, 1.0, -1.5, 2.0**-133, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor([*special, torch.finfo(BF16).max])
    for step in range(50):
        result = rounded(values, _bits(step, (len(values),)))
        assert torch.equal(result.float().nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.pure
def test_random_bits_are_even_and_unlike_in_every_way_that_they_may_be_asked() -> None:
    shape = (64, 256)
    first = _bits(3, shape)
    others = [_bits(4, shape), _bits(3, shape, "b.weight"), first.roll(1, 0), first.roll(1, 1)]
    count = first.numel()
    for bit, other in itertools.product(range(16), [torch.zeros_like(first), *others]):
        differing = ((first ^ other) >> bit & 1).double().mean()
        assert abs(float(differing) - 0.5) < 5 * 0.5 / count**0.5
    part = [torch.arange(16, 48, dtype=torch.int32), torch.arange(5, 9, dtype=torch.int32)]
    number = torch.tensor(salt(0, "a.weight", "weight"), dtype=torch.int32)
    assert torch.equal(random_bits(number, torch.tensor(3.0), part), first[16:48, 5:9])


# --- one device ---


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 512), (3, 8, 256), (256,), ())
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.pure
def test_the_arithmetic_is_that_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rounds moments to the nearest; here weights too."""
    with without_warnings_of_torchao():
        from torchao.optim import _AdamW

    values: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    theirs = _parameters(BF16)
    with torch.compiler.set_stance("force_eager"):
        expected = _step(theirs, _AdamW(theirs, lr=torch.tensor(1e-2), **values))
    ours = _parameters(BF16)
    monkeypatch.setattr(narrow_adamw, "rounded", _nearest)
    for one, other in zip(
        expected, _step(ours, NarrowAdamW(ours, lr=1e-2, state_dtype=BF16, **values)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.pure
def test_pieces_and_a_compiled_step_have_the_numbers_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = _parameters(BF16)
    expected = _step(at_once, NarrowAdamW(at_once, state_dtype=BF16))
    with monkeypatch.context() as changed:
        changed.setattr(narrow_adamw, "PIECE", 1500)
        parts = _parameters(BF16)
        for one, other in zip(
            expected, _step(parts, NarrowAdamW(parts, state_dtype=BF16)), strict=True
        ):
            assert torch.equal(one, other)
    compiled = torch.compile(
        narrow_adamw.update_piece, fullgraph=True, dynamic=True, backend="eager"
    )
    monkeypatch.setattr(narrow_adamw, "update_piece", compiled)
    parameters = _parameters(BF16)
    for one, other in zip(
        expected, _step(parameters, NarrowAdamW(parameters, state_dtype=BF16)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "weights", "state", "most"),
    [
        ("adamw", "fp32", "bf16", 12),
        ("adamw", "bf16", "fp32", 12),
        ("adamw", "bf16", "bf16", 8),
        ("adamw8bit", "bf16", "fp32", 6.1),
    ],
)
def test_memory_is_counted_to_the_byte(name: str, weights: str, state: str, most: float) -> None:
    model = nn.Sequential(nn.Linear(512, 256), nn.LayerNorm(256), nn.Linear(256, 32))
    narrow(model, "bf16", weights)
    parameters = list(model.parameters())
    config = OptimizerConfig(name=name, state_dtype=state)
    optimizer = build_optimizer(config, parameters, weight_dtype=weights)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for values in optimizer.state.values() for value in values.values()]
    state_bytes = sum(tensor.nbytes for tensor in tensors)
    sizes = model_size(model, narrow=narrow_parameters(model, weights)).parameters
    size = rank_size([unit_size(sizes, 1)])
    assert state_bytes == optimizer_bytes(
        size.gradients,
        size.tensors,
        name,
        eight_bit_state=size.eight_bit_state,
        state_scale=ITEMSIZES[state] / ITEMSIZES[weights],
    )
    assert size.parameters == sum(parameter.nbytes for parameter in parameters)
    count = sum(parameter.numel() for parameter in parameters)
    assert (state_bytes + size.parameters + size.gradients) / count < most + 0.1


# --- real data ---


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def _loss_at_the_end(weights: str, state: str, *, seed: int = 0) -> float:
    """The mean loss over the last steps of training on digits at a small rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    narrow(model, "bf16", weights)
    images, labels = _digits()
    config = OptimizerConfig(lr=1e-4, state_dtype=state)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    optimizer = build_optimizer(
        config, model.parameters(), names=names, weight_dtype=weights, seed=seed
    )
    order = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(200):
        chosen = torch.randint(len(images), (128,), generator=order)
        with torch.autocast("cpu", dtype=BF16):
            logits = model(images[chosen])
        loss = F.cross_entropy(logits.float(), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


@pytest.mark.slow
def test_digits_are_learnt_as_in_float32_where_the_nearest_number_would_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rate is a hundredth of the usual one, as when a trained model is trained on."""
    exact = _loss_at_the_end("fp32", "fp32")
    for weights, state in (("fp32", "bf16"), ("bf16", "bf16")):
        assert _loss_at_the_end(weights, state) == pytest.approx(exact, rel=5e-3), (weights, state)
    monkeypatch.setattr(narrow_adamw, "rounded", _nearest)
    learnt = math.log(10) - exact
    assert math.log(10) - _loss_at_the_end("bf16", "fp32") < 0.5 * learnt


# --- layouts ---


def _curve(
    strategy: str,
    workers: int,
    *,
    weights: str = "fp32",
    state: str = "bf16",
    steps: range = range(STEPS),
    load: str = "",
    save: str = "",
    pp: int | None = None,
) -> Curve:
    """A curve, as curves.train gives it, with an optimizer that knows the parameters' names."""
    trial = replace(gpt_trial(layers=2), steps=STEPS, micro_batches=2)
    options = Options(precision="fp32" if weights == "fp32" else "bf16", weight_dtype=weights)
    parallel = parallelize_trial(trial, choose(strategy, workers, pp=pp), options, CPU)
    config = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.01, state_dtype=state)
    names: dict[Tensor, str] = {p: name for name, p in parallel.named_parameters()}
    built = build_optimizer(config, parallel.parameters(), names=names, weight_dtype=weights)
    optimizer = parallel.prepare_optimizer(built)
    is_alone = not dist.is_initialized()

    def stored() -> dict[str, Any]:
        return {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}

    if load:
        values = stored()
        dcp.load(values, checkpoint_id=load, no_dist=is_alone)
        parallel.load_model_state(values["model"])
        parallel.load_optimizer_state(optimizer, values["optimizer"])
    losses, norms = run_steps(trial, parallel, optimizer, steps)
    if save:
        dcp.save(stored(), checkpoint_id=save, no_dist=is_alone)
    return Curve(losses=losses, norms=norms, weights=parallel.full_model_state())


def _curves(rank: int, weights: str, folder: str, layouts: list[str]) -> dict[str, Curve]:
    """The curve of each layout, and those of the halves of a run of the first one."""
    curves = {layout: _curve(layout, 2, weights=weights, pp=LAYOUTS[layout]) for layout in layouts}
    half = STEPS // 2
    save = f"{folder}/half"
    curves["first"] = _curve(layouts[0], 2, weights=weights, steps=range(half), save=save)
    curves["second"] = _curve(layouts[0], 2, weights=weights, steps=range(half, STEPS), load=save)
    return curves


TOLERANCES = {"fp32": 2e-4, "bf16": 5e-3}
"""By the type of weights: of the loss relative to one device's."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("weights", "layouts"),
    [
        ("bf16", ["fsdp", "tensor", "pipeline"]),
        # Each worker has whole weights, as one device has, or whole gradients.
        pytest.param("bf16", ["ddp", "zero1"], marks=pytest.mark.slow),
        pytest.param("fp32", ["fsdp"], marks=pytest.mark.slow),
        pytest.param("fp32", [*LAYOUTS], marks=pytest.mark.slow),
    ],
)
def test_every_layout_rounds_alike_and_continues_to_the_bit(
    weights: str, layouts: list[str], tmp_path: Path
) -> None:
    single = _curve("single", 1, weights=weights)
    curves = run_distributed(_curves, 2, weights, str(tmp_path), layouts)[0]
    for layout in layouts:
        distance = difference(single, curves[layout])
        assert distance.within(TOLERANCES[weights]), f"{layout}: {distance}"
    undisturbed = curves[layouts[0]]
    assert curves["first"].losses + curves["second"].losses == undisturbed.losses
    for name, weight in curves["second"].weights.items():
        assert torch.equal(weight, undisturbed.weights[name]), name
    half = STEPS // 2
    resumed = _curve(
        "single", 1, weights=weights, steps=range(half, STEPS), load=f"{tmp_path}/half"
    )
    both = Curve(curves["first"].losses + resumed.losses, undisturbed.norms, resumed.weights)
    assert difference(single, both).within(TOLERANCES[weights])
