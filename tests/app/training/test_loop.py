"""Unit tests of the parts of the training loop; GPUs are names in the catalogue, none is used."""

import gc
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.config import OptimizerConfig, ScheduleConfig, TrainConfig
from app.console.terminal import progress_line
from app.data.randomness import mix, seed_step
from app.errors import NonFiniteError, UserError
from app.models.mixture import MixtureGPT
from app.tasks.language import LanguageModelling
from app.training import flops, loop
from app.training.events import StepsDone
from app.training.flops import (
    Utilization,
    multiplied_parameters,
    peak_flops,
    sample_flops,
    transformer_flops,
)
from app.training.job import Place
from app.training.noise_scale import Estimate, NoiseScale
from app.training.optimizer import LossScale, build_optimizer, learning_rate
from app.training.process import configure_torch, garbage_waits
from app.training.step_sync import StepSync
from strategies.parallelize import Options, choose, parallelize
from tests.app.kit import logged, training_of
from tests.chain import config
from tests.pool import run_distributed
from tests.tasks import Plain, Points

H100 = "NVIDIA H100 80GB HBM3"
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "warmup", "final", "expected"),
    [
        ("constant", 4, 0.0, {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0}),
        ("linear", 0, 0.0, {0: 2.0, 5: 1.0, 10: 0.0}),
        ("cosine", 0, 0.0, {0: 2.0, 5: 1.0, 10: 0.0}),
        ("linear", 0, 0.25, {10: 0.5}),
        ("cosine", 3, 0.1, {10: 0.2}),
    ],
)
def test_learning_rates(name: str, warmup: int, final: float, expected: dict[int, float]) -> None:
    schedule = ScheduleConfig(name, warmup, final)
    rates = {
        step: learning_rate(OptimizerConfig(lr=2.0), schedule, step, steps=11) for step in expected
    }
    assert rates == pytest.approx(expected)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("scaling", "factor", "small_batch_factor"),
    [("none", 1.0, 1.0), ("linear", 4.0, 0.25), ("sqrt", 2.0, 0.5)],
)
def test_learning_rate_follows_the_batch(
    scaling: str, factor: float, small_batch_factor: float
) -> None:
    optimizer = OptimizerConfig(lr=0.1, lr_scaling=scaling, lr_batch_size=64)
    constant = ScheduleConfig(warmup_steps=10)
    rate = learning_rate(optimizer, constant, 50, steps=100, batch_size=256)
    assert rate == pytest.approx(0.1 * factor)
    # Goyal et al.: warm-up begins at the unscaled rate.
    warmup_start = 0.1 if factor > 1 else 0.0
    rate = learning_rate(optimizer, constant, 0, steps=100, batch_size=256)
    assert rate == pytest.approx(warmup_start + (0.1 * factor - warmup_start) / 10)
    rate = learning_rate(optimizer, ScheduleConfig(), 5, steps=100, batch_size=16)
    assert rate == pytest.approx(0.1 * small_batch_factor)
    rate = learning_rate(optimizer, constant, 50, steps=100)
    assert rate == pytest.approx(0.1), "without a batch size the rate is not scaled"


@pytest.mark.pure
def test_optimizers_learn_and_do_not_decay_biases_and_norms() -> None:
    for name in ("adamw", "adam", "sgd", "torch.optim:RMSprop"):
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.1), [weight])
        for _ in range(20):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        assert weight.abs().max() < 0.9
    with pytest.raises(UserError, match="math:sqrt"):
        build_optimizer(OptimizerConfig(name="math:sqrt"), [weight])
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), model.parameters())
    decayed, not_decayed = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4)]
    assert decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in not_decayed["params"]) and not_decayed["weight_decay"] == 0.0


@pytest.mark.pure
def test_randomness_depends_on_seed_step_and_data_rank() -> None:
    numbers = []
    for key in [(0, 1, 0), (0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]:
        seed_step(key[0], key[1], data_rank=key[2], device=CPU)
        numbers.append(torch.rand(1).item())
    assert numbers[0] == numbers[1] and len(set(numbers)) == 4
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500


@pytest.mark.pure
def test_loss_scale_skips_recovers_and_gives_up() -> None:
    scale = LossScale(enabled=True, growth_interval=3)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), scale.scale)
    scale.unscale_([weight])
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
    scale_before = scale.scale
    assert not scale.accepts(torch.tensor(math.inf), 1)
    assert scale.scale == scale_before / 2
    assert all(scale.accepts(torch.tensor(1.0), step) for step in (2, 3, 4))
    assert scale.scale == scale_before
    restored = LossScale(enabled=True)
    restored.load_state(scale.state())
    assert (restored.scale, restored.good_steps) == (scale.scale, scale.good_steps)
    with pytest.raises(NonFiniteError, match="step 7"):
        for _ in range(100):
            restored.accepts(torch.tensor(math.nan), 7)


def _agree(rank: int) -> None:
    sync = StepSync(1, first_step=1)
    assert sync.is_due(1)
    sync.add(torch.tensor(1.0 + rank))
    sync.log(1, {"lr": 0.1}, torch.tensor(7.0))
    sync.add(torch.tensor(9.0))
    agreed = sync.agree(2, stop=rank == 1, save=False)
    assert (agreed.stop, agreed.save) == (True, False) and 3 <= sync.next_step <= 2 + 200
    (logged,) = agreed.logged
    assert (logged.step, logged.loss, logged.grad_norm) == (1, 3.0, 7.0)
    assert logged.learning_rates == {"lr": 0.1}
    for loss in (1.0, math.nan if rank == 1 else 1.0, 1.0):
        sync.add(torch.tensor(loss))
    with pytest.raises(NonFiniteError, match="loss was not finite at step 4 on rank 1;"):
        sync.agree(5, stop=False, save=False)
    sync = StepSync(1, first_step=1)
    sync.add(torch.tensor(1.0))
    sync.log(1, {"lr": 0.1}, torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match="gradient was not finite at step 1 on ranks 0, 1;"):
        sync.agree(1, stop=False, save=False)


@pytest.mark.alone
def test_two_ranks_agree_on_losses_flags_and_non_finite_values() -> None:
    run_distributed(_agree, 2)


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.pure
def test_torch_is_configured_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = SimpleNamespace()
    calls = list[Any]()
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    configure_torch(TrainConfig(matmul_precision="high"), CPU)
    assert not calls and not vars(cudnn)
    configure_torch(TrainConfig(), GPU)
    assert calls == ["highest"]
    assert vars(cudnn) == {"allow_tf32": False, "benchmark": True}, "not torch's defaults"
    configure_torch(TrainConfig(matmul_precision="high", deterministic=True), GPU)
    assert calls[1:] == [True, "high"] and vars(cudnn) == {"allow_tf32": True, "benchmark": False}
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class Littering(Points):
    """Each step leaves a reference cycle behind."""

    nodes: ClassVar[list[weakref.ref[Node]]] = []
    alive: ClassVar[list[int]] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            assert not gc.isenabled()
            # Enough new objects for Python to start a collection, were it enabled.
            assert [[] for _ in range(2000)]
            self.alive.append(sum(node() is not None for node in self.nodes))
            self.nodes.append(weakref.ref(Node()))
        return super().loss(model, batch)


@pytest.mark.pure
def test_a_run_collects_garbage_between_steps_only(tmp_path: Path) -> None:
    """After a run, failed or not, collection is as it was before."""
    run_config = config(f"task={__name__}:Littering", "train.steps=8", "train.eval_every=2")
    training, _ = training_of(run_config, tmp_path)
    assert training.run()["step"] == 8 and gc.isenabled()
    alive = type(training.task).alive  # type: ignore[attr-defined]
    assert len(alive) == 8 and 0 < max(alive) <= 2, "every second step ends with a collection"
    gc.unfreeze()
    for frozen_before in (False, True):
        with pytest.raises(KeyError), garbage_waits():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            raise KeyError
        assert gc.isenabled() and (gc.get_freeze_count() > 0) == frozen_before
        gc.freeze()


# --- the gradient noise scale; measured in a run: launchers/test_resume.py ------------------------

DIM = 40
SAMPLES = 36_000
BATCH = 240


class Line(nn.Module):
    """A model whose gradient at one sample is that sample.

    The gradient's mean and covariance are those of the data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def samples() -> Tensor:
    """Gaussian samples of shape (SAMPLES, DIM) whose variance grows along the features."""
    generator = torch.Generator().manual_seed(0)
    return 0.35 + torch.linspace(0.2, 2.0, DIM) * torch.randn(SAMPLES, DIM, generator=generator)


def measure(
    rank: int, world: int, strategy: str, micro_batches: int
) -> tuple[float, float, float, bool]:
    """The noise scale with its bounds, and whether measuring left the gradients as they are."""
    parallel = parallelize(Line, choose(strategy, world), Options(), device=CPU)
    noise = NoiseScale(parallel, 1, BATCH)
    noise.estimate = Estimate(window=10_000)
    data = samples()
    share = BATCH // world
    gradients_equal = True
    for step in range(SAMPLES // BATCH):
        share_of_batch = data[step * BATCH + rank * share : step * BATCH + (rank + 1) * share]
        parts = list(share_of_batch.chunk(micro_batches))
        # As in the loop, DDP's first step is an ordinary one.
        passes: Any = parallel if step == 0 and world > 1 else noise
        passes.forward_backward(
            parts, [len(p) / BATCH for p in parts], lambda model, batch: model(batch).mean()
        )
        if passes is noise:
            gradient = next(iter(parallel.parameters())).grad
            batch_gradient = (
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            )
            expected = data[step * BATCH : (step + 1) * BATCH].mean(0)
            gradients_equal = gradients_equal and torch.allclose(
                batch_gradient, expected, rtol=1e-4, atol=1e-5
            )
        for parameter in parallel.parameters():
            parameter.grad = None
    noise.values()
    return (*noise.estimate.value(), gradients_equal)  # type: ignore[misc]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "world", "micro_batches"),
    [("single", 1, 7), ("ddp", 2, 1), pytest.param("fsdp", 2, 2, marks=pytest.mark.slow)],
)
def test_noise_within_five_percent_of_the_closed_form(
    strategy: str, world: int, micro_batches: int
) -> None:
    results = run_distributed(measure, world, world, strategy, micro_batches)
    data = samples().double()
    expected = float(data.var(0).sum() / data.mean(0).square().sum())
    for value, low, high, gradients_equal in results:
        assert abs(value / expected - 1) < 0.05, (value, expected)
        assert low < expected < high
        assert (high - low) < 0.4 * expected, "the interval is narrow enough to be useful"
        assert gradients_equal, "a measured step leaves the same gradients"
    assert len({result[0] for result in results}) == 1, "every worker reports the same value"


@pytest.mark.pure
@pytest.mark.parametrize("ratio", [0.25, 1, 80])
def test_the_noise_scales_interval_contains_it_as_often_as_it_says(ratio: float) -> None:
    """Also where it is far above the batch, and the interval says no more than "at least"."""
    generator = np.random.default_rng(1)
    noise_scale = ratio * BATCH
    trials = 200
    contained = 0
    one_sided = 0
    for _ in range(trials):
        estimate = Estimate()
        for _ in range(30):
            deviation = math.sqrt(noise_scale / 50 / (BATCH / 2))
            halves = generator.normal(size=(2, 50)) * deviation
            halves[:, 0] += 1
            estimate.add(
                small=float((halves**2).sum(axis=1).mean()),
                large=float((halves.mean(axis=0) ** 2).sum()),
                inverse_small=2 / BATCH,
                batch_size=BATCH,
            )
        interval = estimate.value()
        if interval is None:  # no ratio above 0 agrees with what was measured
            continue
        contained += interval.low <= noise_scale <= interval.high
        one_sided += math.isinf(interval.high)
    assert 0.9 * trials <= contained <= 0.99 * trials
    assert one_sided > trials / 2 if ratio == 80 else one_sided == 0


@pytest.mark.pure
def test_there_is_no_noise_scale_for_few_values_or_without_signal() -> None:
    estimate = Estimate()
    for count, signal in ((4, 1.5), (20, 0.1)):  # too few values; then a gradient of noise alone
        for _ in range(count):
            estimate.add(small=2.0, large=signal, inverse_small=1 / 4, batch_size=8)
        assert estimate.value() is None
    parallel = parallelize(Line, choose("single", 1), Options(), device=CPU)
    assert NoiseScale.of(parallel, 10, 1) is None and NoiseScale.of(parallel, 10, 2) is not None


# --- MFU ------------------------------------------------------------------------------------------


class ReadsValues(Points):
    """Its loss reads values, which meta tensors do not have."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * float(batch[0].sum())


@pytest.mark.pure
@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_for_transformers_agrees_with_a_count(tied: bool, own_cache: Path) -> None:
    task = LanguageModelling(
        data="python", d_model=64, n_layers=3, n_heads=2, sequence_length=128, tie_weights=tied
    )
    with torch.device("meta"):
        model = task.build_model()
    parameters = sum(p.numel() for p in model.parameters())
    embedding = 0 if tied else 256 * 64
    assert multiplied_parameters(model) == parameters - embedding
    by_formula = sample_flops(task)
    counted = flops._count_flops(task, model)
    assert by_formula == pytest.approx(counted, rel=0.005), "all but the weights of norms"
    assert by_formula == 128 * transformer_flops(multiplied_parameters(model), 3, 64, 128)


@pytest.mark.pure
def test_two_thirds_of_frozen_parameters_count_also_of_experts() -> None:
    with torch.device("meta"):
        model = MixtureGPT(256, d_model=64, n_layers=2, n_heads=2, n_experts=8, top_k=2)
    trained = multiplied_parameters(model)
    frozen = multiplied_parameters(model.requires_grad_(False))
    assert frozen == pytest.approx(trained * 2 / 3, rel=1e-3)


@pytest.mark.pure
def test_any_other_model_is_counted_on_meta() -> None:
    weights = 2 * 16 + 16 * 4
    assert sample_flops(Plain()) == 6 * weights - 2 * 2 * 16, (
        "the first layer's input has no gradient"
    )
    assert sample_flops(ReadsValues()) is None


@pytest.mark.pure
def test_the_peak_is_that_of_the_catalogue_for_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert peak_flops(H100, "bf16") == peak_flops(H100, "fp8") == 989.4e12
    for precision, peak in (("highest", 67e12), ("high", 494.7e12)):
        monkeypatch.setattr(
            torch, "get_float32_matmul_precision", lambda precision=precision: precision
        )
        assert peak_flops(H100, "fp32") == peak
    assert peak_flops("Imaginary RTX 9090", "bf16") is None


@pytest.mark.pure
def test_where_mfu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(
        rank: int, device: torch.device, name: str = H100, strategy: str = "ddp"
    ) -> Utilization | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        place = Place(rank=rank, world_size=8, local_rank=0, device=device)
        return Utilization.of(Plain(), choose(strategy, 8), place, precision="bf16")

    ddp = utilization(0, GPU)
    assert ddp is not None and ddp.gpus == 8
    assert ddp.mfu(8 * ddp.peak / ddp.flops) == 1.0
    monkeypatch.setattr(flops, "worker_devices", lambda device: [device, device])
    model_parallel = utilization(0, GPU, strategy="ddp_model_parallel")
    assert model_parallel is not None and model_parallel.gpus == 16
    assert utilization(1, GPU) is None, "only rank 0 reports it"
    assert utilization(0, CPU) is None
    assert utilization(0, GPU, "Imaginary RTX 9090") is None


@pytest.mark.pure
def test_the_loop_logs_the_bytes_of_activations_that_go_to_the_host(tmp_path: Path) -> None:
    """Of the first of two layers, which saves its input: 2 numbers for each of 256 samples."""
    words = ("task=tests.tasks:Plain", "train.steps=3", "train.global_batch_size=256")
    for is_moving in (True, False):
        run_config = config(*words, f"train.activation_offloading={is_moving}")
        training, events = training_of(run_config, tmp_path / str(is_moving))
        training.run()
        name = "train/activation_bytes_to_host"
        moved = [event.values[name] for event in logged(events, name)]
        assert set(moved) == ({256 * 2 * 4.0} if is_moving else set())


@pytest.mark.pure
def test_the_loop_logs_and_shows_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utilization = Utilization(flops=2e6, peak=1e12, gpus=4)
    monkeypatch.setattr(loop.Utilization, "of", lambda *_, **__: utilization)
    run_config = config("task=tests.tasks:Plain", "train.steps=3", "train.log_every=1")
    training, events = training_of(run_config, tmp_path)
    training.run()
    rates = [event.values for event in logged(events, "train/samples_per_second")]
    assert rates
    for values in rates:
        rate = values["train/samples_per_second"]
        assert values["train/samples_per_second_per_gpu"] == rate / 4
        assert values["train/mfu"] == pytest.approx(rate * 2e6 / 4e12)
    *_, last = [event for event in events if isinstance(event, StepsDone)]
    assert "per GPU, MFU " in progress_line(last, {})
    assert "MFU" not in progress_line(replace(last, mfu=None), {})


@pytest.mark.pure
def test_the_progress_line_shows_rate_mfu_and_the_last_evaluation() -> None:
    done = StepsDone(
        step=120,
        steps=500,
        loss=0.2314,
        loss_step=120,
        rate=1204.0,
        unit="tokens",
        gpus=8,
        mfu=0.4123,
        seconds_left=41.0,
        seconds_per_step=0.1,
        memory_bytes=310_000_000,
    )
    begin, speed, end = "step 120/500  loss 0.2314", "mean 1,204 tokens/s", "0:41 left"
    assert progress_line(done, {}) == f"{begin}  {speed}  MFU 41.2%  {end}"
    assert (
        progress_line(replace(done, mfu=None), {}) == f"{begin}  {speed}  {end}  310 MB per worker"
    )
    held_out = {"loss": 0.25, "accuracy": 0.9}
    earlier = replace(done, loss_step=100, mfu=None)
    assert progress_line(earlier, {}) == f"{begin} (step 100)  {speed}  {end}"
    assert progress_line(earlier, held_out) == f"{begin}  held out 0.2500  {speed}  {end}"
    assert progress_line(done, held_out) == f"{begin}  held out 0.2500  {speed}  {end}"
    long = replace(
        done, step=123_456, steps=1_000_000, loss_step=123_450, rate=1_234_567.0, seconds_left=1e6
    )
    for event in (done, long, replace(long, loss=None), replace(long, mfu=None)):
        for evaluated in ({}, held_out):
            line = progress_line(event, evaluated)
            assert len(line) < 80 and " left" in line and "tokens/s" in line, (
                "what matters fits 80 columns"
            )


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_of_this_machine_has_a_peak() -> None:
    place = Place(rank=0, world_size=1, local_rank=0, device=GPU)
    utilization = Utilization.of(Plain(), choose("single", 1), place, precision="bf16")
    assert utilization is not None and utilization.gpus == 1 and utilization.peak > 1e13
