"""What is counted for MFU, and where it is told; the GPU is a name in the catalogue, nothing runs on one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app import flops, loop
from app.console import progress_line
from app.flops import Utilization, multiplied, peak_flops, sample_flops, transformer_flops
from app.job import Place
from app.tasks import load_task
from experiments.benchmarks.gpt import SHAPES
from strategies.layout import choose
from tests.app.kit import training_of
from tests.chain import config
from tests.tasks import Plain, Points

H100 = "NVIDIA H100 80GB HBM3"
GPT = {"data": "python", "d_model": 64, "n_layers": 3, "n_heads": 2, "sequence_length": 128}


class Looks(Points):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * float(batch[0].sum())


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_formula_is_what_is_counted_of_it(tied: bool, own_cache: Path) -> None:
    task = load_task("language_modelling", GPT | {"tie_weights": tied})
    with torch.device("meta"):
        model = task.build_model()
    assert multiplied(model) == sum(p.numel() for p in model.parameters()) - (0 if tied else 256 * 64)
    told = sample_flops(task)
    assert told == pytest.approx(flops._counted(task, model), rel=0.005), "but for the norms' weights"
    assert told == 128 * transformer_flops(multiplied(model), 3, 64, 128)


def test_any_other_model_is_counted_on_meta() -> None:
    weights = 2 * 16 + 16 * 4
    assert sample_flops(Plain()) == 6 * weights - 2 * 2 * 16, "the first layer's input has no gradient"
    assert sample_flops(Looks()) is None


def test_the_benchmark_counts_the_same() -> None:
    shape = SHAPES["tiny"]
    wanted = transformer_flops(1000, shape.n_layers, shape.d_model, shape.sequence_length)
    assert shape.flops(1000) == shape.tokens * wanted and transformer_flops(10, 1, 2, 4) == 60 + 96


def test_the_peak_is_the_catalogues_at_what_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(H100, "bf16") == peak_flops(H100, "fp8") == 989.4e12
    for precision, peak in (("highest", 67e12), ("high", 494.7e12)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda now=precision: now)
        assert peak_flops(H100, "fp32") == peak
    assert peak_flops("Imaginary RTX 9090", "bf16") is None


def test_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(rank: int, device: str, name: str = H100, strategy: str = "ddp") -> Utilization | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        place = Place(rank, 8, 0, torch.device(device))
        return Utilization.of(Plain(), choose(strategy, 8), place, "bf16")

    known = found(0, "cuda:0")
    assert known is not None and known.gpus == 8 and known.mfu(8 * known.peak / known.flops) == 1.0
    monkeypatch.setattr(flops, "own_devices", lambda device: [device, device])
    several = found(0, "cuda:0", strategy="ddp_model_parallel")
    assert several is not None and several.gpus == 16
    assert found(1, "cuda:0") is found(0, "cpu") is found(0, "cuda:0", "Imaginary RTX 9090") is None


def test_the_loop_logs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Utilization, "of", lambda *_: Utilization(flops=2e6, peak=1e12, gpus=4))
    training, events = training_of(config("task=tests.tasks:Plain", "train.steps=3", "train.log_every=1"), tmp_path)
    training.run()
    logged = [event["values"] for event in events if event["type"] == "metrics"]
    rates = [values for values in logged if "train/samples_per_second" in values]
    assert rates
    for values in rates:
        rate = values["train/samples_per_second"]
        assert values["train/samples_per_second_per_gpu"] == rate / 4
        assert values["train/mfu"] == pytest.approx(rate * 2e6 / 4e12)
    *_, last = [event for event in events if event["type"] == "progress"]
    assert "per GPU, MFU " in progress_line(last) and "MFU" not in progress_line(last | {"mfu": None})


def test_the_line_that_is_shown() -> None:
    event = {"step": 120, "steps": 500, "loss": 0.2314, "rate": 1204.0, "unit": "tokens", "seconds_left": 41.0}
    shown = progress_line(event | {"memory_bytes": 310e6, "gpus": 8, "mfu": 0.4123})
    assert shown == ("step 120/500  loss 0.2314  1,204 tokens/s  150 per GPU, MFU 41.2%  0:41 left  310 MB per worker")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_that_is_here_has_a_peak() -> None:
    place = Place(0, 1, 0, torch.device("cuda", 0))
    found = Utilization.of(Plain(), choose("single", 1), place, "bf16")
    assert found is not None and found.gpus == 1 and found.peak > 1e13
