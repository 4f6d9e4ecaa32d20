"""The pieces: where models begin, norms, communication, blocks, recomputation, state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.flop_counter import FlopCounterMode

from experiments.parity import curves
from strategies.blocks import find_blocks, separable
from strategies.channels_last import use_channels_last
from strategies.clip import PIECE, GradNorm
from strategies.parallelize import Options, choose, parallelize
from strategies.torch_internals import OperationMode
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import CPU, PlainGPT, SmallResNet, gpt_trial, mlp, random, seeded

SINGLE = choose("single", 1)


class NotOnMeta(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = float(torch.linspace(0.1, 0.9, 3)[1].item())


def _begin(_: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    parallel = parallelize(seeded(NotOnMeta), choose("fsdp", 2), device=CPU)
    return parallel.full_model_state(), parallel.notes


@pytest.mark.alone
def test_a_model_that_cannot_be_built_on_meta_is_built_everywhere_and_that_is_said() -> None:
    """It begins bit for bit as on one device; rank 0 alone has whole weights."""
    (weights, notes), (nothing, _) = run_distributed(_begin, 2)
    torch.testing.assert_close(weights, dict(seeded(NotOnMeta)().state_dict()), rtol=0, atol=0)
    assert len(notes) == 1 and "meta" in notes[0] and nothing == {}


class Watch(OperationMode):
    """Every operation's name, with the bytes of the plain tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        plain = isinstance(out, Tensor) and not out.is_meta and type(out) is Tensor
        self.seen.append((str(func), out.untyped_storage().nbytes() if plain else 0))
        return out


def _largest_tensor(rank: int) -> int:
    """The largest storage that this rank makes while a sharded model starts."""
    wide = seeded(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10))))
    with Watch() as watch:
        parallelize(wide, choose("fsdp", 4), device=CPU)
    return max(size for _, size in watch.seen)


@pytest.mark.alone
def test_no_rank_but_the_first_holds_more_than_one_whole_tensor() -> None:
    assert max(run_distributed(_largest_tensor, 4)[1:]) == 64 * 64 * 4


def _reductions(_: int) -> dict[str, list[int]]:
    """Of gradients in a step of one and of two micro-batches."""
    found: dict[str, list[int]] = {"fsdp": [], "zero1": [], "zero2": []}
    for name in found:
        for micro_batches in (1, 2):
            trial = gpt_trial(micro_batches=micro_batches, layers=2)
            parallel = parallelize(trial.build, choose(name, 2), device=CPU)
            with Watch() as watch:
                curves.run_steps(trial, parallel, trial.optimizer(parallel.parameters()), range(1))
            found[name].append(sum("reduce_scatter" in each for each, _ in watch.seen))
    return found


@pytest.mark.alone
def test_accumulation_communicates_once_per_step_but_for_zero2() -> None:
    found = run_distributed(_reductions, 2)[0]
    once = found["fsdp"][0]
    assert once > 0 and found == {"fsdp": [once, once], "zero1": [once, once], "zero2": [once, 2 * once]}


# --- the gradient's norm ------------------------------------------------------------------------------------------


def _norm(gradients: list[Tensor], bound: float | None = None) -> float:
    parameters = [nn.Parameter(torch.empty_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    return GradNorm(parameters, CPU)(bound).item()


def _exact(gradients: list[Tensor]) -> float:
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()


@pytest.mark.pure
def test_the_norm_is_right_to_float32_rounding_whatever_the_size_and_a_longer_gradient_is_scaled_to_the_bound() -> None:
    """torch's own would be off by 1e-5 and more."""
    for numbers in (1, PIECE + 1, 1 << 22):
        gradients = [random(numbers), random(60, 50).t(), random(PIECE).bfloat16()]
        assert _norm(gradients) == pytest.approx(_exact(gradients), rel=3e-6)
    assert _norm(gradients[:1], bound=0.5) > 0.5 and _exact(gradients[:1]) == pytest.approx(0.5, rel=3e-6)


def _poisoned(rank: int) -> tuple[float, bool]:
    parallel = parallelize(seeded(PlainGPT), choose("fsdp", 4, tp=2), device=CPU, tensor_plan=models.GPT_PLAN)
    parallel.forward_backward([models.language_batch(0)], [1.0], models.language_loss)
    gradients = [p.grad.to_local() for p in parallel.parameters()]  # type: ignore[union-attr]
    if rank == 3:
        next(g for g in gradients if g.numel()).view(-1)[0] = float("inf")
    before = [g.clone() for g in gradients]
    norm = float(parallel.grad_norm_(None))
    return norm, all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, gradients))


@pytest.mark.alone
def test_one_bad_gradient_on_one_rank_is_seen_by_all_and_without_a_bound_gradients_stay_as_they_are() -> None:
    assert run_distributed(_poisoned, 4) == [(float("inf"), True)] * 4


def _norm_of_terms(rank: int) -> tuple[float, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([1.0, 3.0 * rank]), mesh, [Partial()])
    return GradNorm([parameter], CPU)(0.5).item(), parameter.grad.full_tensor().tolist()


@pytest.mark.alone
def test_a_gradient_that_is_still_a_sum_over_ranks_is_measured_whole() -> None:
    """As torch 2.11 leaves those of a norm whose input is split over the sequence."""
    norm = 13**0.5
    for found in run_distributed(_norm_of_terms, 2):
        assert found == (pytest.approx(norm), pytest.approx([0.5 * 2 / norm, 0.5 * 3 / norm], rel=1e-5))


# --- blocks, recomputation, images --------------------------------------------------------------------------------


@pytest.mark.pure
def test_blocks_are_found_and_those_that_share_a_weight_stay_together() -> None:
    chain = nn.ModuleDict({"a": nn.ModuleDict({"x": PlainGPT()}), "b": nn.ModuleDict({"x": PlainGPT()})})
    for model, blocks in (
        (PlainGPT(), ["blocks.0", "blocks.1"]),
        (SmallResNet(), ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
        (mlp(), ["0", "2", "4"]),
        (nn.Linear(2, 2), []),
        (chain, ["a.x", "b.x"]),
    ):
        assert find_blocks(model) == blocks
    tied = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    tied[2].weight = tied[0].weight  # type: ignore[union-attr]
    assert separable(tied, ["0", "1", "2"]) == ["1"]


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.pure
@pytest.mark.parametrize(("mode", "products"), [("none", 1), ("selective", 1), ("every_2", 1.25), ("full", 1.5)])
def test_recomputation_repeats_forward_but_for_kept_matrix_products(mode: str, products: float) -> None:
    options = Options(activation_checkpointing=mode)
    parallel = parallelize(lambda: nn.Sequential(Layer(4, 4), Layer(4, 4)), SINGLE, options, device=CPU)
    loss = parallel.module(torch.randn(3, 4, requires_grad=True)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == products * 2 * 2 * (2 * 3 * 4 * 4)  # two layers, two products each


@pytest.mark.pure
@pytest.mark.parametrize(("norm", "with_weights"), [("GroupNorm", True), ("BatchNorm2d", True), ("BatchNorm2d", False)])
def test_channels_come_last_in_images_and_weights_but_beside_group_norm(norm: str, with_weights: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(1, 4) if norm == "GroupNorm" else nn.BatchNorm2d(4))
    use_channels_last(model, with_weights=with_weights)
    model[0].register_forward_pre_hook(lambda _, args: laid_out.append(args[0].stride(1) == 1))
    laid_out: list[bool] = []
    model(torch.randn(1, 2, 5, 5))
    last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert (laid_out, last) == ([norm != "GroupNorm"], norm != "GroupNorm" and with_weights)


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.pure
def test_optimizer_state_before_the_first_step_is_that_of_no_step() -> None:
    """Asking for it moves nothing, and training on from it is training from the start."""
    trial = models.ZOO["mlp"]
    truth = curves.train(trial, SINGLE, Options(), CPU)
    parallel = parallelize(trial.build, SINGLE, device=CPU)
    optimizer = trial.optimizer(parallel.parameters())
    kept = copy.deepcopy(parallel.optimizer_state(optimizer))
    parallel.load_optimizer_state(optimizer, kept)
    losses, _ = curves.run_steps(trial, parallel, optimizer, range(trial.steps))
    assert losses == truth.losses
    assert set(kept["state"]) == {name for name, _ in parallel.named_parameters()} and kept["groups"] == {}


@pytest.mark.pure
def test_what_an_optimizer_itself_counts_is_kept_and_hyperparameters_are_not() -> None:
    parallel = parallelize(seeded(mlp), SINGLE, device=CPU)
    first, second = (torch.optim.SGD(parallel.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    first.param_groups[0]["k"] = 7
    kept = parallel.optimizer_state(first)
    parallel.load_optimizer_state(second, kept)
    assert kept["groups"] == {"0": {"k": 7}}
    assert second.param_groups[0]["k"] == 7 and second.param_groups[0]["lr"] == 0.2
