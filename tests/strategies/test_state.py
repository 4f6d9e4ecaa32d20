"""Parts of a strategy: where models start, norms, communication, blocks, recomputation, state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.flop_counter import FlopCounterMode

from app import checkpoint
from experiments.parity import curves
from strategies.blocks import find_blocks, separable
from strategies.channels_last import use_channels_last
from strategies.clip import PIECE, GradNorm
from strategies.parallelize import Options, choose, parallelize
from strategies.torch_internals import OperationMode
from tests.app.checkpoint.kit import save
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import CPU, PlainGPT, SmallResNet, gpt_trial, mlp, random, seeded

SINGLE = choose("single", 1)


# --- where models start ---------------------------------------------------------------------------


class NotOnMeta(nn.Linear):
    """Reads a tensor's number while it is built."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = float(torch.linspace(0.1, 0.9, 3)[1].item())


def _initial_state(rank: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    parallel = parallelize(seeded(NotOnMeta), choose("fsdp", 2), device=CPU)
    return parallel.full_model_state(), parallel.notes


@pytest.mark.alone
def test_a_model_that_cannot_be_built_on_meta_starts_with_the_same_weights() -> None:
    (weights, notes), (weights_of_rank_1, _) = run_distributed(_initial_state, 2)
    expected = dict(seeded(NotOnMeta)().state_dict())
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    (note,) = notes
    assert "meta" in note
    assert weights_of_rank_1 == {}


class OperationRecorder(OperationMode):
    """Records the name of every operation, and the bytes of the plain tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        size = 0
        if type(result) is Tensor and not result.is_meta:
            size = result.untyped_storage().nbytes()
        self.operations.append((str(func), size))
        return result


def _largest_storage_at_start(rank: int) -> int:
    """The bytes of the largest storage that a rank makes while a sharded model starts."""
    build = seeded(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10))))
    with OperationRecorder() as recorder:
        parallelize(build, choose("fsdp", 4), device=CPU)
    return max(size for _, size in recorder.operations)


@pytest.mark.alone
def test_only_rank_0_has_more_than_one_whole_tensor() -> None:
    _, *sizes_of_other_ranks = run_distributed(_largest_storage_at_start, 4)
    assert max(sizes_of_other_ranks) == 64 * 64 * 4


# --- communication --------------------------------------------------------------------------------


def _count_reduce_scatters(rank: int) -> dict[str, list[int]]:
    """By strategy, in a step of one and in a step of two micro-batches."""
    counts = {}
    for strategy in ("fsdp", "zero1", "zero2"):
        counts[strategy] = []
        for micro_batches in (1, 2):
            trial = gpt_trial(micro_batches=micro_batches, layers=2)
            parallel = parallelize(trial.build, choose(strategy, 2), device=CPU)
            optimizer = trial.optimizer(parallel.parameters())
            with OperationRecorder() as recorder:
                curves.run_steps(trial, parallel, optimizer, range(1))
            names = [name for name, _ in recorder.operations]
            counts[strategy].append(sum("reduce_scatter" in name for name in names))
    return counts


@pytest.mark.alone
def test_only_zero2_communicates_for_each_micro_batch() -> None:
    counts = run_distributed(_count_reduce_scatters, 2)[0]
    once = counts["fsdp"][0]
    assert once > 0
    assert counts == {"fsdp": [once, once], "zero1": [once, once], "zero2": [once, 2 * once]}


# --- the norm of gradients ------------------------------------------------------------------------


def _grad_norm(gradients: list[Tensor], clip: float | None = None) -> float:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.empty_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return GradNorm(parameters, CPU)(clip).item()


def _exact_norm(gradients: list[Tensor]) -> float:
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
    return squares.sum().sqrt().item()


@pytest.mark.pure
@pytest.mark.parametrize("numel", [1, PIECE + 1, 1 << 22])
def test_the_norm_is_right_to_float32_rounding_at_any_size(numel: int) -> None:
    """torch's own would differ by 1e-5 and more."""
    gradients = [random(numel), random(60, 50).t(), random(PIECE).bfloat16()]
    assert _grad_norm(gradients) == pytest.approx(_exact_norm(gradients), rel=3e-6)


@pytest.mark.pure
def test_a_gradient_that_is_longer_than_the_clip_is_scaled_to_it() -> None:
    gradients = [random(1 << 22)]
    assert _grad_norm(gradients, clip=0.5) > 0.5
    assert _exact_norm(gradients) == pytest.approx(0.5, rel=3e-6)


def _norm_with_inf(rank: int) -> tuple[float, bool]:
    """The norm if one number of one rank is inf, and whether gradients have stayed the same."""
    parallel = parallelize(
        seeded(PlainGPT), choose("fsdp", 4, tp=2), device=CPU, tensor_plan=models.GPT_PLAN
    )
    parallel.forward_backward([models.language_batch(0)], [1.0], models.language_loss)
    gradients = [p.grad.to_local() for p in parallel.parameters()]  # type: ignore[union-attr]
    if rank == 3:
        next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = float("inf")
    copies = [gradient.clone() for gradient in gradients]
    norm = float(parallel.grad_norm_(None))
    pairs = zip(copies, gradients)
    return norm, all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@pytest.mark.alone
def test_all_ranks_see_an_inf_of_one_and_without_a_clip_nothing_is_scaled() -> None:
    assert run_distributed(_norm_with_inf, 4) == [(float("inf"), True)] * 4


def _norm_of_partial_sums(rank: int) -> tuple[float, list[float]]:
    """The norm of a gradient that is a sum over ranks, and the clipped gradient."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([1.0, 3.0 * rank]), mesh, [Partial()])
    norm = GradNorm([parameter], CPU)(0.5).item()
    return norm, parameter.grad.full_tensor().tolist()


@pytest.mark.alone
def test_the_norm_of_a_gradient_that_is_a_sum_over_ranks_is_that_of_the_sum() -> None:
    """torch 2.11 leaves such a gradient of a norm whose input is split over the sequence."""
    expected_norm = (2**2 + 3**2) ** 0.5
    expected_gradient = [0.5 * 2 / expected_norm, 0.5 * 3 / expected_norm]
    for norm, gradient in run_distributed(_norm_of_partial_sums, 2):
        assert norm == pytest.approx(expected_norm)
        assert gradient == pytest.approx(expected_gradient, rel=1e-5)


# --- blocks, recomputation, images ----------------------------------------------------------------


def _gpt_towers() -> nn.Module:
    towers = {name: nn.ModuleDict({"x": PlainGPT()}) for name in ("a", "b")}
    return nn.ModuleDict(towers)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (PlainGPT(), ["blocks.0", "blocks.1"]),
        (SmallResNet(), ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
        (mlp(), ["0", "2", "4"]),
        (nn.Linear(2, 2), []),
        (_gpt_towers(), ["a.x", "b.x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repeating_blocks_are_found(model: nn.Module, blocks: list[str]) -> None:
    assert find_blocks(model) == blocks


@pytest.mark.pure
def test_blocks_that_share_a_weight_are_not_separable() -> None:
    first, middle, last = (nn.Linear(3, 3) for _ in range(3))
    last.weight = first.weight
    assert separable(nn.Sequential(first, middle, last), ["0", "1", "2"]) == ["1"]


class TanhLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("mode", "expected"), [("none", 1), ("selective", 1), ("every_2", 1.25), ("full", 1.5)]
)
def test_recomputation_repeats_products_that_are_not_kept(mode: str, expected: float) -> None:
    """Expected: backward's operations, in units of those without recomputation."""
    parallel = parallelize(
        lambda: nn.Sequential(TanhLinear(4, 4), TanhLinear(4, 4)),
        SINGLE,
        Options(activation_checkpointing=mode),
        device=CPU,
    )
    loss = parallel.module(torch.randn(3, 4, requires_grad=True)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    layers = 2
    products_per_layer = 2
    flops_per_product = 2 * 3 * 4 * 4
    assert counter.get_total_flops() == expected * layers * products_per_layer * flops_per_product


@pytest.mark.pure
@pytest.mark.parametrize(
    ("norm", "with_weights", "images_change", "weights_change"),
    [
        (nn.GroupNorm(1, 4), True, False, False),
        (nn.BatchNorm2d(4), True, True, True),
        (nn.BatchNorm2d(4), False, True, False),
    ],
    ids=["group norm", "batch norm", "batch norm without weights"],
)
def test_channels_come_last_in_images_and_weights_unless_beside_group_norm(
    norm: nn.Module, with_weights: bool, images_change: bool, weights_change: bool
) -> None:
    convolution = nn.Conv2d(2, 4, 3)
    model = nn.Sequential(convolution, norm)
    use_channels_last(model, with_weights=with_weights)
    channel_strides = []
    convolution.register_forward_pre_hook(lambda _, args: channel_strides.append(args[0].stride(1)))
    model(torch.randn(1, 2, 5, 5))
    assert [stride == 1 for stride in channel_strides] == [images_change]
    is_last = convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert is_last == weights_change


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.pure
def test_the_optimizer_state_before_the_first_step_is_that_of_no_step() -> None:
    """Asking for it moves nothing, and a training that loads it is one from the start."""
    trial = models.ZOO["mlp"]
    expected = curves.train(trial, SINGLE, Options(), CPU)
    parallel = parallelize(trial.build, SINGLE, device=CPU)
    optimizer = trial.optimizer(parallel.parameters())
    state = copy.deepcopy(parallel.optimizer_state(optimizer))
    parallel.load_optimizer_state(optimizer, state)
    losses, _ = curves.run_steps(trial, parallel, optimizer, range(trial.steps))
    assert losses == expected.losses
    assert set(state["state"]) == {name for name, _ in parallel.named_parameters()}
    assert state["groups"] == {}


@pytest.mark.pure
def test_the_optimizer_state_has_its_own_counters_but_no_hyperparameters() -> None:
    parallel = parallelize(seeded(mlp), SINGLE, device=CPU)
    saved = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    loaded = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
    saved.param_groups[0]["k"] = 7
    state = parallel.optimizer_state(saved)
    parallel.load_optimizer_state(loaded, state)
    assert state["groups"] == {"0": {"k": 7}}
    assert loaded.param_groups[0]["k"] == 7
    assert loaded.param_groups[0]["lr"] == 0.2


@pytest.mark.pure
def test_the_options_of_an_optimizer_of_ones_own_are_those_of_the_new_start(tmp_path: Path) -> None:
    class Estimating(torch.optim.Optimizer):
        """Has an option, and estimates a distance d, as Prodigy does."""

        def __init__(self, params: Any, k: float) -> None:
            super().__init__(params, {"lr": 0.1, "k": k, "d": 1e-6})

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["d"] *= 10

    parallel = parallelize(seeded(mlp), SINGLE, device=CPU)
    saved = Estimating(parallel.parameters(), k=0.5)
    saved.step()
    save(tmp_path, 1, state={"optimizer": parallel.optimizer_state(saved)})
    loaded = Estimating(parallel.parameters(), k=0.9)
    # A checkpoint is read into what the new optimizer has, and no further.
    state = {"optimizer": parallel.optimizer_state(loaded)}
    checkpoint.load(checkpoint.find(str(tmp_path)), state)
    parallel.load_optimizer_state(loaded, state["optimizer"])
    assert loaded.param_groups[0]["k"] == 0.9
    assert loaded.param_groups[0]["d"] == saved.param_groups[0]["d"] == pytest.approx(1e-5)
