"""Plans of mixtures of experts, and plans without data."""

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from app.config.io import load_config
from app.errors import UserError
from app.models.grouped_linear import by_expert
from app.planner import read, stand_in
from app.planner.assumptions import apply_assumptions
from app.planner.communication import chosen_share
from app.planner.layouts import Space, enumerate_layouts
from app.planner.output import families
from app.planner.part_on_device import EXCHANGE_OPERATIONS
from app.planner.plan import Plan, make_plan
from app.planner.recorder import FREE
from app.planner.stand_in import plan_experiment
from app.tasks import load_task
from app.training.flops import multiplied_parameters
from strategies.dims import LayoutError
from strategies.expert.exchange import Exchange, exchanged_bytes
from strategies.torch_internals import OperationMode
from tests.app.planner.conftest import gpus
from tests.running import ROOT

pytestmark = pytest.mark.pure
MIXTURE = str(ROOT / "experiments" / "mixture.yaml")
SMALL = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2"
BERT = (
    f"model: bert, kind: sequence_classification, data: no.csv, tokenizer: bytes, config: {{{SMALL}"
)
MASKED = BERT.replace("sequence_classification", "masked_lm") + "}"
TAGS = BERT.replace("sequence_classification", "token_classification") + ", num_labels: 5}"
QUESTIONS = BERT.replace("sequence_classification", "question_answering") + "}"
PREFERENCES = (
    "model: llama, kind: preferences, data: no.jsonl, tokenizer: bytes, "
    f"config: {{{SMALL}, intermediate_size: 64}}"
)
T5 = "model: t5, tokenizer: bytes, config: {d_model: 32, num_layers: 2, num_heads: 2}, data: no.csv"
VIT = f"model: vit, data: no.npz, config: {{{SMALL}, num_labels: 3, image_size: 32, patch_size: 8}}"


@pytest.mark.slow
def test_split_experts_take_less_memory_and_time_to_send_tokens() -> None:
    args = ("d_model=512", "n_layers=2", "mixture.n_experts=16", "sequence_length=512")
    fixed = {
        "train.precision": "bf16",
        "train.activation_checkpointing": "none",
        "parallel.tp": 1,
        "parallel.pp": 1,
    }
    changes = [f"{key}={value}" for key, value in fixed.items()]
    config = load_config((MIXTURE,), [*(f"task_args.{arg}" for arg in args), *changes])
    fixed_keys = frozenset(fixed)
    reader = read.Reader(load_task(config.task, config.task_args))
    plan = make_plan(config, reader.task, gpus(8), fixed_keys=fixed_keys, reader=reader)
    rows = {
        row.candidate.dims.ep: row
        for row in plan.rows
        if row.candidate.dims.dp_replicate == 8 and row.candidate.micro_batch == 1
    }
    assert set(rows) == {1, 2, 4, 8}
    expert_bytes = sum(p.bytes for p in reader.size.parameters if p.is_expert)
    assert (
        rows[1].memory["parameters"] - rows[8].memory["parameters"]
        == expert_bytes - expert_bytes // 8
    )
    assert rows[1].seconds["expert"] == 0 < rows[2].seconds["expert"] < rows[8].seconds["expert"]
    assert reader.exchanged_numel == 2 * exchanged_bytes(512, 2, 512, 1)
    recomputed = plan.estimator.estimate(rows[4].candidate._replace(checkpointing="full"))
    assert 1.3 < recomputed.seconds["expert"] / rows[4].seconds["expert"] <= 1.5, (
        "recomputing exchanges again"
    )
    seconds = {}
    for share in (0.0, 0.5, 1.0):
        device = apply_assumptions(plan.estimator.machine.device, (f"exchange={share}",))
        other = plan.estimator.changed(device, None).estimate(rows[4].candidate)
        seconds[share] = other.seconds["expert"]
    assert seconds[1.0] == rows[4].seconds["expert"] > seconds[0.5] > seconds[0.0]
    assert seconds[0.5] == pytest.approx((seconds[0.0] + seconds[1.0]) / 2), (
        "what is sent is halved, and hops take as long"
    )
    assert families(plan)["context"].startswith(
        "of 512 tokens a worker would have fewer than 4,096"
    )
    with torch.device("meta"):
        model: Any = reader.task.build_model()
    matrices = reader.parameters - model.embed.weight.numel()
    experts = expert_bytes // 4
    assert multiplied_parameters(model) == matrices - experts * 14 // 16, (
        "two of sixteen work on a token"
    )


def test_every_worker_gets_equally_many_experts_under_tp_and_ep() -> None:
    space = Space(
        world=8,
        per_node=8,
        global_batch=32,
        blocks=2,
        heads=4,
        tp_sequence=None,
        splits_layers=True,
        precisions=("fp32",),
        experts=6,
        tp_experts=6,
    )
    degrees = {(candidate.dims.tp, candidate.dims.ep) for candidate in enumerate_layouts(space, {})}
    assert degrees == {(1, 1), (1, 2), (2, 1)}


@pytest.mark.slow
def test_a_split_of_experts_that_is_impossible_is_refused_with_one_that_works() -> None:
    mixture = "model: qwen3_moe, data: no.bin, sequence_length: 64, config: {"
    mixture += f"{SMALL}, vocab_size: 99, moe_intermediate_size: 32, head_dim: 16, num_experts: 4}}"
    for tp, ep, message in (
        (2, 4, r"tp · parallel.ep is 8, .* the 4 experts; .*: write parallel.ep=2$"),
        (1, 8, r"parallel.ep is 8, .* the 4 experts: write one of 1, 2, 4$"),
    ):
        with pytest.raises(LayoutError, match=message):
            _planned("huggingface", mixture, workers=8, dp_replicate=8 // tp, tp=tp, ep=ep)


@pytest.mark.slow
def test_tensor_parallel_workers_send_the_rows_of_their_own_experts_only() -> None:
    """Workers that have different experts do; those that have a part of each send all rows."""
    of_transformers = "model: qwen3_moe, data: no.bin, sequence_length: 64, config: {"
    of_transformers += (
        f"{SMALL}, vocab_size: 99, moe_intermediate_size: 32, head_dim: 16, num_experts: 8}}"
    )
    built_in = (
        "data: no.bin, sequence_length: 64, vocab_size: 99, d_model: 32, n_layers: 2, n_heads: 2"
    )
    built_in += ", mixture: {n_experts: 8}"
    for task, args, share in (
        ("huggingface", of_transformers, 0.5),
        ("language_modelling", built_in, 1.0),
    ):
        sent = {}
        for tp in (1, 2):
            plan = _planned(task, args, "bf16", workers=8, tp=tp, pp=1, ep=2, cp=1)
            candidate = plan.rows[0].candidate
            work = plan.estimator._work(candidate)
            exchange = plan.estimator._expert_exchange(candidate, work)
            sent[tp] = exchange.sent_bytes / candidate.micro_batch
        assert sent[2] / sent[1] == pytest.approx(share)


def test_a_token_goes_once_to_each_group_that_has_any_of_its_experts() -> None:
    """The share is that of all choices of k experts of E."""
    for groups, experts, top_k in ((4, 8, 2), (2, 8, 3), (8, 8, 8), (1, 6, 3)):
        choices = list(itertools.combinations(range(experts), top_k))
        size = experts // groups
        copies = sum(len({expert // size for expert in choice}) for choice in choices)
        expected = copies / len(choices) / top_k
        assert chosen_share(groups, experts, top_k) == pytest.approx(expected)


class _Launches(OperationMode):
    """Counts operations that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        is_in_place = func._schema.name.endswith("_")
        self.count += (is_in_place or not is_view) and func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


def test_sending_tokens_to_experts_launches_as_many_operations_as_are_planned() -> None:
    """Beside those of a mixture that has all of its experts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compute = functools.partial(by_expert, lambda rows, _: rows * 1.0, experts=8)
        exchange = functools.partial(Exchange(dist.group.WORLD, experts=8), compute)
        launches = {}
        for forward in (exchange, compute):
            x = torch.randn(64, 16, requires_grad=True)
            weights = torch.rand(64, 2, requires_grad=True)
            with _Launches() as in_forward:
                y = forward(x, torch.randint(0, 8, (64, 2)), weights)
            with _Launches() as in_backward:
                y.backward(torch.ones_like(y))
            launches[forward] = in_forward.count, in_backward.count
    finally:
        dist.destroy_process_group()
    more = [sent - computing for sent, computing in zip(launches[exchange], launches[compute])]
    assert more == list(EXCHANGE_OPERATIONS.values())


def test_trainers_that_send_a_token_once_or_overlap_sending_exchange_faster() -> None:
    """A token goes to as many workers as have any of its experts, or hides behind computing."""
    args = "data: no.bin, sequence_length: 512, vocab_size: 99, d_model: 256, n_layers: 2"
    args += ", n_heads: 2, mixture: {n_experts: 8, top_k: 2}"
    plan = _planned("language_modelling", args, "bf16", workers=8, tp=1, pp=1, ep=8, cp=1)
    candidate = plan.rows[0].candidate
    links = plan.machine.links
    seconds = {}
    devices = {
        assumption: apply_assumptions(plan.machine.device, (assumption,))
        for assumption in ("dispatch=0", "dispatch=1", "exchange_overlap=0.5")
    }
    # More than --assume takes, as this model computes for less time than it exchanges.
    devices["exchange_overlap=9"] = replace(plan.machine.device, exchange_overlap=9.0)
    for assumption, device in devices.items():
        row = plan.estimator.changed(device, plan.rows[0].stages).estimate(candidate)
        seconds[assumption] = row.seconds
    sent = seconds["dispatch=0"]["expert"] / candidate.micro_batches
    assert sent == pytest.approx(plan.rows[0].seconds["expert"] / candidate.micro_batches)
    hops = links.exchange(0.0, 8, 1)
    once = seconds["dispatch=1"]["expert"] / candidate.micro_batches
    assert once - hops == pytest.approx(chosen_share(8, 8, 2) * (sent - hops))
    half = seconds["exchange_overlap=0.5"]
    hidden = min(half["compute"] / 2, seconds["dispatch=0"]["expert"])
    assert half["expert"] == pytest.approx(seconds["dispatch=0"]["expert"] - hidden)
    assert half["contention"] - seconds["dispatch=0"]["contention"] == pytest.approx(
        hidden * plan.machine.device.contention
    ), "computing beside it is slower"
    assert seconds["exchange_overlap=9"]["expert"] == pytest.approx(0.0, abs=1e-9)


def _planned(
    task: str, args: str, precision: str = "fp32", workers: int = 2, **fixed: object
) -> Plan:
    """The plan of a task on GPUs, without its data; `fixed` is of `parallel`."""
    keys = {f"parallel.{name}": value for name, value in fixed.items()}
    keys["train.precision"] = precision
    changes = [
        "train.global_batch_size=8",
        f"task={task}",
        f"task_args={{{args}}}",
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    return plan_experiment(load_config([], changes), gpus(workers), frozenset(keys))


def test_the_same_model_is_planned_without_its_data(tmp_path: Path, own_cache: Path) -> None:
    np.zeros(6000, np.uint16).tofile(tmp_path / "there.bin")
    args = "vocab_size: 1000, sequence_length: 64, d_model: 64, n_layers: 2, n_heads: 2, data: "
    with_data = _planned("language_modelling", args + str(tmp_path / "there.bin"))
    without_data = _planned("language_modelling", args + str(tmp_path / "missing.bin"))
    expected = [(row.memory, row.seconds) for row in with_data.rows]
    assert [(row.memory, row.seconds) for row in without_data.rows] == expected
    assert "made-up samples" in without_data.reader.note and not with_data.reader.note
    assert with_data.layout(with_data.rows[0])["energy_kwh_per_run"] is not None
    assert without_data.layout(without_data.rows[0])["energy_kwh_per_run"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [BERT + ", num_labels: 5}", T5, VIT, PREFERENCES, MASKED, TAGS, QUESTIONS]
)
def test_every_kind_of_transformers_model_is_planned_without_its_data(
    args: str, own_cache: Path
) -> None:
    plan = _planned("huggingface", args, "bf16")
    assert plan.best is not None and "made-up samples" in plan.reader.note


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("language_modelling", "d_model: 64", "task_args.vocab_size"),
        ("language_modelling", "data: no.bin", "task_args.vocab_size"),
        (
            "huggingface",
            f"model: bert, kind: causal_lm, config: {{{SMALL}, is_decoder: true}}",
            "config.vocab_size",
        ),
        ("huggingface", BERT + "}", "config.num_labels"),
        ("huggingface", "model: wav2vec2, data: no.jsonl", "its lines name files: a few"),
        ("image_classification", "data: no.npz", "no.npz"),
        ("tabular", "target: price", "a few samples"),
    ],
)
def test_a_value_that_only_the_data_tells_is_asked_for_in_one_sentence(
    task: str, args: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        _planned(task, args)
    assert len(str(raised.value)) < 300


LLAMA_SIZES = f"{SMALL}, intermediate_size: 64, vocab_size: 99"
LLAMA = f"model: llama, data: no.bin, sequence_length: 64, config: {{{LLAMA_SIZES}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "lora: {r: 4}, pretrained: true",
        "lora: {r: 4}",
        "pretrained: true",
        "lora: {r: 4, targets: [q_proj]}",
    ],
)
def test_pretrained_weights_need_not_be_there_to_plan_with_them(
    options: str, own_cache: Path
) -> None:
    plan = _planned("huggingface", f"{LLAMA}, {options}", "bf16", tp=1, pp=1)
    assert plan.best is not None
    assert plan.reader.note.startswith("task_args.model has no weights here")
    trained = [p for p in plan.reader.size.parameters if p.trainable]
    assert (len(trained) < len(plan.reader.size.parameters)) == ("lora" in options)
    full = _planned("huggingface", LLAMA, "bf16", tp=1, pp=1)
    frozen = sum(p.numel for p in plan.reader.size.parameters if not p.trainable)
    assert frozen in (0, full.reader.parameters), "every weight of the model's configuration"
    with pytest.raises(UserError, match=r"weights"):
        config = load_config([], ["task=huggingface", f"task_args={{{LLAMA}, {options}}}"])
        plan_experiment(config, gpus(2), frozenset(), needs_data="--max-batch")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantized_adapters_are_planned_from_a_configuration_alone(
    method: str, tmp_path: Path, own_cache: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 99}
    config = AutoConfig.for_model("llama", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    common = "pretrained: true, data: no.bin, sequence_length: 64, tokenizer: bytes"
    quantized = f"lora: {{r: 4, quantize: {method}}}"
    plan = functools.partial(_planned, "huggingface", precision="bf16", tp=1, pp=1, dp_shard=1)
    with_weights = plan(f"model: {tmp_path}/llama, {common}, {quantized}")
    model = f"model: llama, config: {json.dumps(sizes)}"
    without = plan(f"{model}, {common}, {quantized}")
    assert without.reader.note.startswith("task_args.model has no weights here")
    expected = [(row.memory, row.seconds) for row in with_weights.rows]
    assert [(row.memory, row.seconds) for row in without.rows] == expected
    adapters = plan(f"{model}, {common}, lora: {{r: 4}}")
    assert without.best is not None and adapters.best is not None
    frozen = [
        sum(p.bytes for p in plan.reader.size.parameters if not p.trainable)
        + plan.reader.size.buffer_bytes
        for plan in (without, adapters)
    ]
    # Of float32 numbers in layers with adapters 4 or 8 bits are left, with their scales.
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128) * 4
    saved = {"nf4": (0.80, 0.88), "int8": (0.70, 0.75)}[method]
    assert saved[0] < (frozen[1] - frozen[0]) / layers < saved[1]


def test_what_the_hub_has_of_a_model_beside_its_weights_stands_in_for_them(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of such a folder is that of the test before."""
    import huggingface_hub

    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "vocab_size": 99,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    cached = tmp_path / "models--somebody--tiny"
    (cached / "snapshots" / "0123").mkdir(parents=True)
    (cached / "snapshots" / "0123" / "config.json").write_text(json.dumps(llama))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    here = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", here)
    args = "{model: somebody/tiny, pretrained: true, lora: {r: 4}, data: no.bin}"
    config = load_config([], ["task=huggingface", f"task_args={args}"])
    folder = Path(stand_in._folder_instead_of_weights(config))
    written = json.loads((folder / "config.json").read_text())
    assert llama.items() <= written.items()
    assert [path.stat().st_size for path in folder.iterdir() if path.suffix != ".json"] == [0]


GPT_OSS = "intermediate_size: 32, num_key_value_heads: 2, head_dim: 16, num_local_experts: 4"
QWEN3_MOE = "moe_intermediate_size: 32, head_dim: 16, num_experts: 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "experts"),
    [
        ("gpt_oss", GPT_OSS, 4),
        ("qwen3_moe", QWEN3_MOE, 8),
        ("nemotron", "num_key_value_heads: 2, intermediate_size: 64", 0),
        ("starcoder2", "intermediate_size: 64", 0),
    ],
)
def test_models_of_transformers_are_read_without_values(
    model: str, sizes: str, experts: int, own_cache: Path
) -> None:
    config = f"{{{SMALL}, vocab_size: 99, {sizes}}}"
    args = f"model: {model}, data: no.bin, sequence_length: 64, config: {config}"
    for precision in ("fp32", "bf16"):
        plan = _planned("huggingface", args, precision)
        assert plan.best is not None and "looks at values" not in plan.reader.note
        assert [mixture.count for mixture in plan.reader.mixtures] == [experts] * 2 * bool(experts)
