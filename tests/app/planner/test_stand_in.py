"""Plans of mixtures of experts, and plans without data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config.io import load_config
from app.errors import UserError
from app.planner import read
from app.planner.layouts import Space, enumerate_layouts
from app.planner.output import families
from app.planner.plan import Plan, make_plan
from app.planner.stand_in import plan_experiment
from app.tasks import load_task
from app.training.flops import multiplied_parameters
from strategies.expert.exchange import exchanged_bytes
from tests.app.planner.conftest import gpus
from tests.running import ROOT

pytestmark = pytest.mark.pure
MIXTURE = str(ROOT / "experiments" / "mixture.yaml")
SMALL = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2"
BERT = f"model: bert, kind: sequence_classification, data: no.csv, tokenizer: bytes, config: {{{SMALL}"
T5 = "model: t5, tokenizer: bytes, config: {d_model: 32, num_layers: 2, num_heads: 2}, data: no.csv"
VIT = f"model: vit, data: no.npz, config: {{{SMALL}, num_labels: 3, image_size: 32, patch_size: 8}}"


@pytest.mark.slow
def test_split_experts_take_less_memory_and_time_to_send_tokens() -> None:
    args = ("d_model=512", "n_layers=2", "mixture.n_experts=16", "sequence_length=512")
    fixed = {"train.precision": "bf16", "train.activation_checkpointing": "none", "parallel.tp": 1, "parallel.pp": 1}
    changes = [f"{key}={value}" for key, value in fixed.items()]
    config, given = load_config((MIXTURE,), [*(f"task_args.{arg}" for arg in args), *changes]), frozenset(fixed)
    reader = read.Reader(load_task(config.task, config.task_args))
    plan = make_plan(config, reader.task, gpus(8), fixed_keys=given, reader=reader)
    found = (row for row in plan.rows if row.candidate.dims.dp_replicate == 8 and row.candidate.micro_batch == 1)
    rows = {row.candidate.dims.ep: row for row in found}
    assert set(rows) == {1, 2, 4, 8}
    held = sum(p.bytes for p in reader.size.parameters if p.is_expert)
    assert rows[1].memory["parameters"] - rows[8].memory["parameters"] == held - held // 8
    assert rows[1].seconds["expert"] == 0 < rows[2].seconds["expert"] < rows[8].seconds["expert"]
    assert reader.exchanged_numel == 2 * exchanged_bytes(512, 2, 512, 1)
    again = plan.estimator.estimate(rows[4].candidate._replace(checkpointing="full"))
    assert 1.3 < again.seconds["expert"] / rows[4].seconds["expert"] <= 1.5, "recomputing exchanges again"
    assert families(plan)["context"].startswith("of 512 tokens a worker would have fewer than 4,096")
    with torch.device("meta"):
        model: Any = reader.task.build_model()
    matrices, experts = reader.parameters - model.embed.weight.numel(), held // 4
    assert multiplied_parameters(model) == matrices - experts * 14 // 16, "two of sixteen work on a token"


def test_workers_that_experts_are_split_over_by_tp_and_ep_get_equally_many() -> None:
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
    ways = {(found.dims.tp, found.dims.ep) for found in enumerate_layouts(space, {})}
    assert ways == {(1, 1), (1, 2), (2, 1)}


def _planned(task: str, args: str, precision: str = "fp32") -> Plan:
    changes = ["train.global_batch_size=8", f"train.precision={precision}", f"task={task}", f"task_args={{{args}}}"]
    return plan_experiment(load_config([], changes), gpus(2), frozenset({"train.precision"}))


def test_the_same_model_is_planned_without_its_data(tmp_path: Path, own_cache: Path) -> None:
    np.zeros(6000, np.uint16).tofile(tmp_path / "there.bin")
    args = "vocab_size: 1000, sequence_length: 64, d_model: 64, n_layers: 2, n_heads: 2, data: "
    there, away = (_planned("language_modelling", args + str(tmp_path / name)) for name in ("there.bin", "away.bin"))
    assert [(row.memory, row.seconds) for row in there.rows] == [(row.memory, row.seconds) for row in away.rows]
    assert "made-up samples" in away.reader.note and not there.reader.note
    energy, unknown = (plan.layout(plan.rows[0])["energy_kwh_per_run"] for plan in (there, away))
    assert unknown is None is not energy


@pytest.mark.slow
@pytest.mark.parametrize("args", [BERT + ", num_labels: 5}", T5, VIT])
def test_every_kind_of_transformers_model_is(args: str, own_cache: Path) -> None:
    plan = _planned("huggingface", args, "bf16")
    assert plan.best is not None and "made-up samples" in plan.reader.note


@pytest.mark.parametrize(
    ("task", "args", "said"),
    [
        ("language_modelling", "d_model: 64", "task_args.vocab_size"),
        ("language_modelling", "data: no.bin", "task_args.vocab_size"),
        ("huggingface", f"model: bert, kind: causal_lm, config: {{{SMALL}, is_decoder: true}}", "config.vocab_size"),
        ("huggingface", BERT + "}", "config.num_labels"),
        ("image_classification", "data: no.npz", "no.npz"),
        ("tabular", "target: price", "a few samples"),
    ],
)
def test_what_data_decide_is_asked_for_in_a_sentence(task: str, args: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        _planned(task, args)
    assert len(str(raised.value)) < 300


LLAMA = f"model: llama, data: no.bin, sequence_length: 64, config: {{{SMALL}, intermediate_size: 64, vocab_size: 99}}"


@pytest.mark.parametrize(
    "more",
    [
        "lora: {r: 4}, pretrained: true",
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ("lora: {r: 4}", "pretrained: true", "lora: {r: 4, targets: [q_proj]}")
        ),
    ],
)
def test_weights_that_an_experiment_begins_from_need_not_be_there(more: str, own_cache: Path) -> None:
    plan = _planned("huggingface", f"{LLAMA}, {more}", "bf16")
    assert plan.best is not None and plan.reader.note.startswith("task_args.model has no weights here")
    trained = [p for p in plan.reader.size.parameters if p.trainable]
    assert (len(trained) < len(plan.reader.size.parameters)) == ("lora" in more)
    assert ("adapters" in plan.best.unmeasured) == ("lora" in more)
    whole = _planned("huggingface", LLAMA, "bf16")
    frozen = sum(p.numel for p in plan.reader.size.parameters if not p.trainable)
    assert frozen in (0, whole.reader.parameters), "every weight of the model's configuration"
    with pytest.raises(UserError, match=r"weights"):
        config = load_config([], ["task=huggingface", f"task_args={{{LLAMA}, {more}}}"])
        plan_experiment(config, gpus(2), frozenset(), needs_data="--max-batch")


OF_EXPERTS = f"data: no.bin, sequence_length: 64, config: {{{SMALL}, vocab_size: 99"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "experts"),
    [
        (
            "model: gpt_oss, "
            + OF_EXPERTS
            + ", intermediate_size: 32, num_key_value_heads: 2, head_dim: 16, num_local_experts: 4}",
            4,
        ),
        ("model: qwen3_moe, " + OF_EXPERTS + ", moe_intermediate_size: 32, head_dim: 16, num_experts: 8}", 8),
        ("model: nemotron, " + OF_EXPERTS + ", num_key_value_heads: 2, intermediate_size: 64}", 0),
        ("model: starcoder2, " + OF_EXPERTS + ", intermediate_size: 64}", 0),
    ],
)
def test_models_of_the_library_are_read_without_their_numbers(args: str, experts: int, own_cache: Path) -> None:
    for precision in ("fp32", "bf16"):
        plan = _planned("huggingface", args, precision)
        assert plan.best is not None and "looks at values" not in plan.reader.note
        assert [found.count for found in plan.reader.mixtures] == [experts] * 2 * bool(experts)
        assert ("a mixture of experts" in plan.best.unmeasured) == bool(experts)
