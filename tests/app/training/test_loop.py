"""The parts of the training loop, each by itself. The GPUs here are names in the catalogue: nothing runs on one."""

import gc
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

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
from app.training.flops import Utilization, multiplied_parameters, peak_flops, sample_flops, transformer_flops
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
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    rates = {step: learning_rate(OptimizerConfig(lr=2.0), schedule, step, steps=11) for step in expected}
    assert rates == pytest.approx(expected)


@pytest.mark.pure
@pytest.mark.parametrize(("scaling", "factor", "less"), [("none", 1.0, 1.0), ("linear", 4.0, 0.25), ("sqrt", 2.0, 0.5)])
def test_learning_rate_follows_the_batch(scaling: str, factor: float, less: float) -> None:
    optimizer = OptimizerConfig(lr=0.1, lr_scaling=scaling, lr_batch_size=64)
    constant = ScheduleConfig(warmup_steps=10)
    assert learning_rate(optimizer, constant, 50, steps=100, batch_size=256) == pytest.approx(0.1 * factor)
    bottom = 0.1 if factor > 1 else 0.0  # Goyal et al.: from the unscaled rate up
    assert learning_rate(optimizer, constant, 0, steps=100, batch_size=256) == pytest.approx(
        bottom + (0.1 * factor - bottom) / 10
    )
    assert learning_rate(optimizer, ScheduleConfig(), 5, steps=100, batch_size=16) == pytest.approx(0.1 * less)
    assert learning_rate(optimizer, constant, 50, steps=100) == pytest.approx(0.1), "without a batch size: as written"


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
    decayed, others = build_optimizer(OptimizerConfig(weight_decay=0.1), model.parameters()).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4)] and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in others["params"]) and others["weight_decay"] == 0.0


@pytest.mark.pure
def test_randomness_depends_on_seed_step_and_data_rank() -> None:
    drawn = []
    for key in [(0, 1, 0), (0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]:
        seed_step(key[0], key[1], data_rank=key[2], device=CPU)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4
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
    again = LossScale(enabled=True)
    again.load_state(scale.state())
    assert (again.scale, again.good_steps) == (scale.scale, scale.good_steps)
    with pytest.raises(NonFiniteError, match="step 7"):
        for _ in range(100):
            again.accepts(torch.tensor(math.nan), 7)


def _agree(rank: int) -> None:
    sync = StepSync(1, first_step=1)
    assert sync.is_due(1)
    sync.add(torch.tensor(1.0 + rank))
    sync.log(1, {"lr": 0.1}, torch.tensor(7.0))
    sync.add(torch.tensor(9.0))
    agreed = sync.agree(2, stop=rank == 1, save=False)
    assert (agreed.stop, agreed.save) == (True, False) and 3 <= sync.next_step <= 2 + 200
    assert [(e.step, e.loss, e.grad_norm, e.learning_rates) for e in agreed.logged] == [(1, 3.0, 7.0, {"lr": 0.1})]
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
def test_two_ranks_agree_on_losses_flags_and_what_is_not_finite() -> None:
    run_distributed(_agree, 2)


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.pure
def test_torch_is_set_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, calls = SimpleNamespace(), list[Any]()
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    configure_torch(TrainConfig(matmul_precision="high"), CPU)
    assert not calls and not vars(cudnn)
    configure_torch(TrainConfig(), GPU)
    assert calls == ["highest"] and vars(cudnn) == {"allow_tf32": False, "benchmark": True}, "torch's own differ"
    configure_torch(TrainConfig(matmul_precision="high", deterministic=True), GPU)
    assert calls[1:] == [True, "high"] and vars(cudnn) == {"allow_tf32": True, "benchmark": False}
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Node:
    """Refers to itself, so that counting references does not free it."""

    def __init__(self) -> None:
        self.itself = self


class Littering(Points):
    """Each step leaves a cycle behind."""

    left: ClassVar[list[weakref.ref[Node]]] = []
    alive: ClassVar[list[int]] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            assert not gc.isenabled() and [[] for _ in range(2000)]  # more than enough for Python's collector to run
            self.alive.append(sum(node() is not None for node in self.left))
            self.left.append(weakref.ref(Node()))
        return super().loss(model, batch)


@pytest.mark.pure
def test_a_run_collects_garbage_between_steps_and_not_in_them_also_where_it_fails(tmp_path: Path) -> None:
    training, _ = training_of(config(f"task={__name__}:Littering", "train.steps=8", "train.eval_every=2"), tmp_path)
    assert training.run()["step"] == 8 and gc.isenabled()
    alive = type(training.task).alive  # type: ignore[attr-defined]
    assert len(alive) == 8 and 0 < max(alive) <= 2, "at every second step there is a boundary"
    gc.unfreeze()
    for frozen_before in (False, True):
        with pytest.raises(KeyError), garbage_waits():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            raise KeyError
        assert gc.isenabled() and (gc.get_freeze_count() > 0) == frozen_before
        gc.freeze()


# --- the gradient noise scale; measured in a run: launchers/test_resume.py -----------------------------------------

DIM, SAMPLES, BATCH = 40, 36_000, 240


class Line(nn.Module):
    """Its gradient at one sample is that sample: mean and covariance of the gradient are those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def samples() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return 0.35 + torch.linspace(0.2, 2.0, DIM) * torch.randn(SAMPLES, DIM, generator=draw)


def measure(rank: int, world: int, strategy: str, micro_batches: int) -> tuple[float, float, float, bool]:
    parallel = parallelize(Line, choose(strategy, world), Options(), device=CPU)
    noise = NoiseScale(parallel, 1, BATCH)
    noise.estimate = Estimate(window=10_000)
    data, share, same = samples(), BATCH // world, True
    for step in range(SAMPLES // BATCH):
        mine = data[step * BATCH + rank * share : step * BATCH + (rank + 1) * share]
        parts = list(mine.chunk(micro_batches))
        passes: Any = parallel if step == 0 and world > 1 else noise  # as the loop does: DDP sees a whole step first
        passes.forward_backward(parts, [len(p) / BATCH for p in parts], lambda model, batch: model(batch).mean())
        if passes is noise:
            gradient = next(iter(parallel.parameters())).grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            right = data[step * BATCH : (step + 1) * BATCH].mean(0)
            same = same and torch.allclose(whole, right, rtol=1e-4, atol=1e-5)
        for parameter in parallel.parameters():
            parameter.grad = None
    noise.values()
    return (*noise.estimate.value(), same)  # type: ignore[misc]


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "world", "micro_batches"), [("single", 1, 7), ("ddp", 2, 1), ("fsdp", 2, 2)])
def test_noise_within_five_percent_of_the_closed_form(strategy: str, world: int, micro_batches: int) -> None:
    results = run_distributed(measure, world, world, strategy, micro_batches)
    data = samples().double()
    true = float(data.var(0).sum() / data.mean(0).square().sum())
    for value, low, high, same in results:
        assert abs(value / true - 1) < 0.05, (value, true)
        assert low < true < high and (high - low) < 0.4 * true, "the spread holds the truth, and says something"
        assert same, "a measured step leaves the same gradients"
    assert len({result[0] for result in results}) == 1, "every worker says the same"


@pytest.mark.pure
def test_no_noise_without_enough_or_without_signal() -> None:
    estimate = Estimate()
    for count, signal in ((4, 1.5), (20, 0.1)):  # then the batch's gradient is all noise
        for _ in range(count):
            estimate.add(small=2.0, large=signal, inverse_small=1 / 4, batch_size=8)
        assert estimate.value() is None
    parallel = parallelize(Line, choose("single", 1), Options(), device=CPU)
    assert NoiseScale.of(parallel, 10, 1) is None and NoiseScale.of(parallel, 10, 2) is not None


# --- MFU --------------------------------------------------------------------------------------------------------------


class Looks(Points):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * float(batch[0].sum())


@pytest.mark.pure
@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_formula_is_what_is_counted_of_it(tied: bool, own_cache: Path) -> None:
    task = LanguageModelling(data="python", d_model=64, n_layers=3, n_heads=2, sequence_length=128, tie_weights=tied)
    with torch.device("meta"):
        model = task.build_model()
    assert multiplied_parameters(model) == sum(p.numel() for p in model.parameters()) - (0 if tied else 256 * 64)
    by_formula = sample_flops(task)
    assert by_formula == pytest.approx(flops._count_flops(task, model), rel=0.005), "but for the norms' weights"
    assert by_formula == 128 * transformer_flops(multiplied_parameters(model), 3, 64, 128)


@pytest.mark.pure
def test_two_thirds_of_frozen_parameters_count_and_so_do_frozen_experts() -> None:
    with torch.device("meta"):
        model = MixtureGPT(256, d_model=64, n_layers=2, n_heads=2, n_experts=8, top_k=2)
    trained = multiplied_parameters(model)
    assert multiplied_parameters(model.requires_grad_(False)) == pytest.approx(trained * 2 / 3, rel=1e-3)


@pytest.mark.pure
def test_any_other_model_is_counted_on_meta() -> None:
    weights = 2 * 16 + 16 * 4
    assert sample_flops(Plain()) == 6 * weights - 2 * 2 * 16, "the first layer's input has no gradient"
    assert sample_flops(Looks()) is None


@pytest.mark.pure
def test_the_peak_is_the_catalogues_at_what_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(H100, "bf16") == peak_flops(H100, "fp8") == 989.4e12
    for precision, peak in (("highest", 67e12), ("high", 494.7e12)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda now=precision: now)
        assert peak_flops(H100, "fp32") == peak
    assert peak_flops("Imaginary RTX 9090", "bf16") is None


@pytest.mark.pure
def test_where_mfu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(rank: int, device: torch.device, name: str = H100, strategy: str = "ddp") -> Utilization | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return Utilization.of(
            Plain(), choose(strategy, 8), Place(rank=rank, world_size=8, local_rank=0, device=device), precision="bf16"
        )

    known = utilization(0, GPU)
    assert known is not None and known.gpus == 8 and known.mfu(8 * known.peak / known.flops) == 1.0
    monkeypatch.setattr(flops, "worker_devices", lambda device: [device, device])
    several = utilization(0, GPU, strategy="ddp_model_parallel")
    assert several is not None and several.gpus == 16
    assert utilization(1, GPU) is utilization(0, CPU) is utilization(0, GPU, "Imaginary RTX 9090") is None


@pytest.mark.pure
def test_the_loop_logs_and_shows_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Utilization, "of", lambda *_, **__: Utilization(flops=2e6, peak=1e12, gpus=4))
    training, events = training_of(config("task=tests.tasks:Plain", "train.steps=3", "train.log_every=1"), tmp_path)
    training.run()
    rates = [event.values for event in logged(events, "train/samples_per_second")]
    assert rates
    for values in rates:
        rate = values["train/samples_per_second"]
        assert values["train/samples_per_second_per_gpu"] == rate / 4
        assert values["train/mfu"] == pytest.approx(rate * 2e6 / 4e12)
    *_, last = [event for event in events if isinstance(event, StepsDone)]
    assert "per GPU, MFU " in progress_line(last, {}) and "MFU" not in progress_line(replace(last, mfu=None), {})
    shown = StepsDone(
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
    assert progress_line(shown, {}) == f"{begin}  {speed}  MFU 41.2%  {end}"
    assert progress_line(replace(shown, mfu=None), {}) == f"{begin}  {speed}  {end}  310 MB per worker"
    held_out = {"loss": 0.25, "accuracy": 0.9}
    earlier = replace(shown, loss_step=100, mfu=None)
    assert progress_line(earlier, {}) == f"{begin} (step 100)  {speed}  {end}"
    assert progress_line(earlier, held_out) == f"{begin}  held out 0.2500  {speed}  {end}"
    assert progress_line(shown, held_out) == f"{begin}  held out 0.2500  {speed}  {end}"
    long = replace(shown, step=123_456, steps=1_000_000, loss_step=123_450, rate=1_234_567.0, seconds_left=1e6)
    for event in (shown, long, replace(long, loss=None), replace(long, mfu=None)):
        for evaluated in ({}, held_out):
            line = progress_line(event, evaluated)
            assert len(line) < 80 and " left" in line and "tokens/s" in line, "what matters fits 80 columns"


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_that_is_here_has_a_peak() -> None:
    here = Utilization.of(
        Plain(), choose("single", 1), Place(rank=0, world_size=1, local_rank=0, device=GPU), precision="bf16"
    )
    assert here is not None and here.gpus == 1 and here.peak > 1e13
