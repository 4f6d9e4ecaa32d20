"""What the planner reads from a model holds at batch sizes and degrees that it did not trace."""

import itertools
import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import Dataset, TensorDataset

from app.config.io import load_config
from app.data.loader import fetch
from app.errors import UserError
from app.models import cross_entropy
from app.planner import read as reading
from app.planner import recorder, trace
from app.planner.advice import predict
from app.planner.device import device_named
from app.planner.machine import cpus
from app.planner.model_costs import ModelCosts, Moments, PartCosts
from app.planner.part_costs import part_costs
from app.planner.read import AUTOCAST, CAST, PLAIN, Reader
from app.planner.work import Work, variant_of
from app.tasks import language, load_task
from app.tasks.base import Task
from strategies import activation_checkpointing, row_chunks
from strategies.costs import ParameterSize
from strategies.layout import choose

GPT = {"data": "python", "sequence_length": 64, "d_model": 64, "n_layers": 2, "n_heads": 4}
DIGITS = {"data": "digits", "model": "resnet"}
VALUES = {"saved", "kept", "boundary", "crossing", "sent", "collectives"}
VALUES |= {"moved_forward", "attention_backward", "operations_forward"}


class Values(Task):
    """A chain of layers whose code may read values of tensors, which meta tensors do not have.

    Args:
        reads_values_in: Where values are read: "building" the model, its "loss", or nowhere.
    """

    def __init__(self, reads_values_in: str = "") -> None:
        self.reads_values_in = reads_values_in

    def build_model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
        if self.reads_values_in == "building":
            float(torch.ones(1).sum())  # fails on meta
        return nn.Sequential(*layers)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(8, 16), torch.randn(8, 16))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        if self.reads_values_in == "loss" and float(outputs.detach().sum()) > 1e9:
            return outputs.sum()
        return F.mse_loss(outputs, batch[1])


def _gpt(**changes: Any) -> Task:
    return load_task("language_modelling", GPT | changes)


@pytest.fixture(scope="module")
def gpt() -> Reader:
    return Reader(_gpt())


def test_costs_at_other_batches_and_degrees_match_a_trace_of_those(
    gpt: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are extrapolated, so some tolerance is left.

    Which temporary is the largest may change with the batch size. Split layers save a gathered
    copy, which unsplit layers need not, so one and several workers are not quite on one line.
    """
    costs = gpt.costs(AUTOCAST)
    monkeypatch.setattr(reading, "BATCHES", (6, 8))
    traced = Reader(_gpt())
    traced.tp = 4
    expected_costs = traced.costs(AUTOCAST)
    assert costs.order == expected_costs.order
    for (name, part), (batch, tp) in itertools.product(costs.parts.items(), ((8, 1), (6, 4))):
        values = part.at(batch, tp)
        expected_values = expected_costs.parts[name].at(batch, tp)
        working_bytes = expected_costs.parts[name].working_bytes(batch, tp)
        assert part.working_bytes(batch, tp) == pytest.approx(working_bytes, rel=0.01), (name, tp)
        # A split embedding runs other operations than an unsplit one.
        is_skipped = tp > 1 and not name.startswith("block")
        for value in set() if is_skipped else VALUES:
            tolerance = 1e-3 if tp == 1 else 0.05
            expected = pytest.approx(expected_values[value], rel=tolerance, abs=4096)
            assert values[value] == expected, (name, value, batch, tp)


def test_stages_exchange_16_bits_where_products_have_16_bits(gpt: Reader) -> None:
    for precision, inner_bytes, sent_bytes in ((PLAIN, 4, 4), (AUTOCAST, 4, 2), (CAST, 2, 2)):
        block = gpt.costs(precision).parts["block0"].at(8, 1)
        elements = 8 * 64 * 64
        assert block["boundary"] == pytest.approx(elements * inner_bytes), precision
        assert block["crossing"] == pytest.approx(elements * sent_bytes), precision


def test_the_products_of_all_parts_are_the_models_flops(gpt: Reader) -> None:
    costs = gpt.costs(PLAIN)
    assert gpt.tp == 2 and not gpt.note, "split logits are read under fake tensors too"
    flops = sum(
        2 * part.products_at(phase, 3, 1).prod(axis=1).sum() * costs.counts[name]
        for name, part in costs.parts.items()
        for phase in ("forward", "backward")
    )
    matrices = sum(
        p.numel for p in gpt.size.parameters if len(p.shape) == 2 and "embed" not in p.name
    )
    assert flops == pytest.approx(6 * 3 * 64 * matrices, rel=1e-6)


def test_each_expert_reads_its_own_weights() -> None:
    product = recorder._product(torch.empty(64, 16, 1408), "bmm", 2.0 * 64 * 16 * 1408 * 2048)
    assert product == (16, 1408, 2048, 64)
    gpu = device_named("a100-80gb")
    seconds = gpu.product_seconds(np.array([[*product, 1.0]]), "bf16", 2)
    assert seconds * gpu.bandwidth == pytest.approx(2 * 64 * (1408 * 2048 + 16 * 1408 + 16 * 2048))


def test_a_small_product_with_a_long_inner_dimension_is_split_between_processors() -> None:
    gpu = device_named("a100-80gb")

    def share(m: float, n: float, k: float, slices: float) -> float:
        tiles = m * n * slices
        return k / (k + slices * gpu.k_half) * tiles / (tiles + gpu.mn_half)

    for m, n, k in ((256.0, 64.0, 4096.0), (256.0, 4096.0, 4096.0), (4096.0, 4096.0, 32768.0)):
        reached = gpu.product_share(m, n, k)
        tried = [share(m, n, k, slices) for slices in (1, 2, 4, 8, 16, 32, 64, 128)]
        assert reached >= max(tried) - 1e-9, "no number of slices is faster"
    assert gpu.product_share(256.0, 64.0, 4096.0) > 5 * share(256.0, 64.0, 4096.0, 1)
    large = (65536.0, 16384.0, 4096.0)
    assert gpu.product_share(*large) == pytest.approx(share(*large, 1)), "it has enough tiles"


def test_what_is_moved_of_experts_weights_is_split_with_them() -> None:
    """A worker moves its own experts' parameters, and all of the others and of the rows."""
    coefficients = np.array([8e9, 1e9, 0, 0, 0, 0])  # of parameters, and of a sample
    moved = {f"{kind}moved_backward": coefficients for kind in ("", "fused_")}
    none = np.zeros((0, 4, 6))
    part = PartCosts(
        values=moved,
        products={"forward": none, "backward": none},
        repeats={"forward": np.zeros(0), "backward": np.zeros(0)},
        moments=Moments(np.zeros((1, 6)), np.zeros(1)),
    )
    sizes = (ParameterSize("experts", (8, 3), is_expert=True), ParameterSize("router", (8,)))
    model = ModelCosts({"block0": part}, ["block0"], {"block0": sizes})
    gpu = replace(device_named("h100-80gb"), kernel=0.0)  # sending tokens has kernels of its own

    def moved_bytes(ep: int) -> float:
        variant = variant_of(is_sharded=True, tp=1, pp=1, precision="bf16")
        work = Work(2.0, 2, 1, "bf16", variant, "none", ep=ep)
        (block,) = part_costs(model, work, gpu, compiles_blocks=False)
        return block.backward_seconds * gpu.bandwidth

    assert moved_bytes(1) == pytest.approx(8e9 + 2e9)
    assert moved_bytes(4) == pytest.approx(8e9 / 4 + 6e9 / 4 + 2e9), "24 of 32 are experts'"


def test_the_loss_of_a_split_vocabulary_has_three_times_its_logits(gpt: Reader) -> None:
    loss = gpt.costs(PLAIN).parts["after"]
    logits = 4 * 64 * 256 // 2 * 4
    alive = loss.working_bytes(4, 2) + loss.at(4, 2)["saved"]
    alive -= 4 * 64 * 64 * 4  # the gathered input
    assert 3 * logits <= alive < 4 * logits, (
        "the logits, their gradient and one chunk of it in float32, which is all of this size"
    )


def test_on_a_gpu_a_chunk_of_a_loss_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a chunk's logits and their gradient, in 16 bits, and no float32 copies of them."""
    _call_every_vocabulary_large(monkeypatch)
    task = _gpt(sequence_length=128, vocab_size=4096, linear_loss=True)
    working = {}
    for on_gpu in (True, False):
        part = Reader(task, on_gpu=on_gpu, splits=False).costs(CAST).parts["after"]
        working[on_gpu] = part.working_bytes(64, 1) - part.working_bytes(32, 1)
    logits = 32 * 128 * 4096 / 8
    rows = 32 * 128 * 64  # hidden states and gradients, a few bytes for each number
    assert 4 * logits <= working[True] < 4 * logits + 12 * rows
    assert 8 * logits <= working[False] < 12 * logits + 12 * rows


class Gated(nn.Module):
    """A gated layer: compiled, it saves its activation only where the inputs are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(256, 64, bias=False)
        self.gate = nn.Linear(64, 256, bias=False)
        self.up = nn.Linear(64, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out(F.silu(self.gate(h)) * self.up(h))


class Normed(nn.Module):
    """RMSNorm before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(x))


def test_rms_norm_saves_on_a_cpu_what_torch_does_and_less_on_a_gpu() -> None:
    x = torch.randn(8, 32, 64, requires_grad=True)
    block = Normed()
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = block(x)  # alive, so that no storage is used twice

    def traced(on_gpu: bool) -> float:
        model = nn.Sequential(nn.Linear(64, 64), Normed())
        trace_of = trace.watch(model, ["1"], lambda model: model(x).square().mean(), on_gpu=on_gpu)
        return trace_of.parts["block0"].values["saved"]

    assert kept.shape == x.shape and traced(False) == sum(saved.values())
    assert traced(True) < traced(False) - 8 * 32 * 64 * 4 / 2


@pytest.mark.slow
def test_compiled_blocks_save_what_torchs_partitioner_does() -> None:
    x = torch.randn(8, 32, 64, requires_grad=True)
    saved = dict[int, int]()
    block = Gated()
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    compiled = torch.compile(block, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x)
    traced = trace.watch(
        nn.Sequential(nn.Linear(64, 64), Gated()), ["1"], lambda model: model(x).square().mean()
    )
    values = traced.parts["block0"].values
    assert values["fusible"] >= 8 * 32 * 256 * 4
    assert values["saved"] - values["fusible"] == pytest.approx(sum(saved.values()), rel=0.01)


def _peak(task: Task, batch: int, mode: str) -> float:
    """Peak bytes of a real forward and backward pass, as torch's memory tracker counts them."""
    torch.manual_seed(0)
    model = task.build_model()
    activation_checkpointing.apply(model, task.blocks(model) or [], mode)
    batch_data = fetch(task.train_data(), [(i, i) for i in range(batch)])
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        task.loss(model, batch_data).backward()
    peak = tracker.get_tracker_snapshot("peak")
    total = 0
    for bytes_by_kind in peak.values():
        total += sum(size for kind, size in bytes_by_kind.items() if str(kind) != "Total")
    return float(total)


@pytest.mark.parametrize("name", ["gpt", pytest.param("digits", marks=pytest.mark.slow)])
def test_activations_are_within_a_tenth_of_a_real_step(name: str, gpt: Reader) -> None:
    reader = gpt if name == "gpt" else Reader(load_task("image_classification", DIGITS))
    for mode in ("none", "full", "selective"):
        config = load_config(
            [], ["train.global_batch_size=16", f"train.activation_checkpointing={mode}"]
        )
        memory = predict(config, reader.task, choose("single", 1), cpus(1), reader).memory
        kinds = ("activations", "gradients", "parameters", "buffers")
        total = sum(memory[kind] for kind in kinds)
        assert total == pytest.approx(_peak(reader.task, 16, mode), rel=0.10), mode


def test_models_the_meta_device_cannot_run_are_read_with_fake_tensors_or_for_real(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        message = "looks at values, so planning has to run the model for real"
        with pytest.raises(UserError, match=message):
            Reader(Values("loss")).costs(PLAIN)
    plain = Reader(Values()).costs().parts["block0"].at(4, 1)
    for reads_values_in, note in (
        ("", ""),
        ("building", "meta"),
        ("loss", "looks at values"),
        ("no fake tensors", ""),
    ):
        if reads_values_in == "no fake tensors":
            monkeypatch.setattr(reading, "fake_mode", lambda: None)
        reader = Reader(Values(reads_values_in))
        block = reader.costs().parts["block0"].at(4, 1)
        assert block["saved"] == plain["saved"] > 0
        assert block["moved_backward"] == plain["moved_backward"] > 0
        assert note in reader.note and bool(reader.note) == bool(note)


def test_a_large_model_is_read_without_its_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = Reader(_gpt(d_model=32768, n_layers=2, n_heads=64))
    assert large.costs(CAST).order and large.parameters > 16e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6, (
        "a gigabyte, in kilobytes"
    )


VOCABULARY = 256


def _call_every_vocabulary_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be computed in chunks."""
    for module in (cross_entropy, language):
        monkeypatch.setattr(module, "LARGE_VOCABULARY", VOCABULARY)


class CostsOfAllChunks(recorder.CostRecorder):
    """Leaves out no chunk of a loss."""

    def __init__(self, module: nn.Module, *, on_gpu: bool, is_fake: bool) -> None:
        super().__init__(module, on_gpu=on_gpu, is_fake=False)


@pytest.mark.parametrize("whole_model", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_chunk_of_a_loss_is_traced_for_all_equal_ones(
    whole_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the last layer's input, and that of logits, in 8 and more chunks."""
    _call_every_vocabulary_large(monkeypatch)
    monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", 20 * VOCABULARY)
    task = _gpt(sequence_length=101)

    def read() -> dict[str, PartCosts]:
        reader = Reader(task, on_gpu=True, splits=False)
        return reader.costs(CAST, whole_model=whole_model).parts

    calls: list[int] = []
    chunk_loss = cross_entropy._chunk_loss

    def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(logits))
        return chunk_loss(logits, targets)

    monkeypatch.setattr(cross_entropy, "_chunk_loss", counted)
    parts = read()
    calls_of_some = len(calls)
    monkeypatch.setattr(trace, "CostRecorder", CostsOfAllChunks)
    all_parts = read()
    assert calls_of_some < (len(calls) - calls_of_some) / 2
    for name, part in all_parts.items():
        working_bytes = pytest.approx(part.working_bytes(8, 1), rel=1e-4)
        assert parts[name].working_bytes(8, 1) == working_bytes
        for phase in ("forward", "backward"):
            expected = part.products_at(phase, 8, 1)
            assert parts[name].products_at(phase, 8, 1) == pytest.approx(expected)
        for value, expected_value in part.at(8, 1).items():
            if not value.startswith("fused_"):
                # The loss of the chunk before is alive in the others: 4 bytes.
                read_value = parts[name].at(8, 1)[value]
                assert read_value == pytest.approx(expected_value, rel=1e-4), value


def test_a_fused_loss_reads_and_writes_each_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of chunks is, though they share the memory of the logits."""
    _call_every_vocabulary_large(monkeypatch)
    task = _gpt(sequence_length=128)
    moved = []
    for rows in (1 << 20, 64):
        monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", rows * VOCABULARY)
        reader = Reader(task, on_gpu=True, splits=False)
        moved.append(reader.costs(CAST).parts["after"].at(8, 1)["fused_moved_forward"])
    assert moved[0] <= moved[1] <= 1.5 * moved[0]
    assert moved[0] > 2 * 2 * 8 * 128 * VOCABULARY


class Powers(nn.Module):
    """A feed-forward layer with GPT-2's activation, whose operations are written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = 0.8 * (up + 0.04 * torch.pow(up, 3.0))
        return self.down(0.5 * up * (1.0 + torch.tanh(inner)))


def test_a_gpus_autocast_computes_powers_in_float32_and_a_cpus_does_not() -> None:
    rows, width = 32, 64

    def saved(on_gpu: bool) -> float:
        model = nn.Sequential(nn.Linear(width, width), Powers(width))
        x = torch.randn(rows, width)

        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x).float().square().mean()

        values = trace.watch(model, ["1"], loss, on_gpu=on_gpu).parts["block0"].values
        return values["saved"] - values["copies"]

    hidden = rows * 4 * width
    # A CPU keeps five results in 16 bits. A GPU keeps the power's operand, tanh and 1 + tanh in
    # float32, then half of `up` and the operand of `down` in 16 bits.
    inputs = 2 * rows * width
    assert saved(False) == inputs + 5 * 2 * hidden
    assert saved(True) == inputs + (3 * 4 + 2 * 2) * hidden
