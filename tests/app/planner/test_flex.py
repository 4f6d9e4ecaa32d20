"""Plans of models whose attention keeps scores in memory, and of the fused one in place of it."""

import json
from typing import Any

import pytest
from transformers import AttentionInterface, AttentionMaskInterface

from app.config.io import load_config
from app.planner.flex import BLOCK, NAME, computed_keys
from app.planner.machine import Machine, cpus
from app.planner.output import as_json, text
from app.planner.plan import GIB, Plan
from app.planner.stand_in import plan_experiment
from tests.app.planner.conftest import gpus

pytestmark = pytest.mark.pure
LENGTH = 512
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "max_position_embeddings": LENGTH,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FIXED = {
    "train.precision": "bf16",
    "train.activation_checkpointing": "none",
    "train.micro_batch_size": 4,
    "strategy": "fsdp",
    "parallel.tp": 1,
}


def plan_of(machine: Machine, model: str = "gpt_oss", **args: Any) -> Plan:
    """The plan of a small model of that type."""
    config = CONFIG | (MIXTURE if model == "gpt_oss" else {})
    written = {"model": model, "data": "no.bin", "sequence_length": LENGTH, "config": config}
    words = [
        "task=huggingface",
        f"task_args={json.dumps(written | args)}",
        "train.global_batch_size=32",
        *(f"{key}={value}" for key, value in FIXED.items()),
    ]
    return plan_experiment(load_config([], words), machine, frozenset(FIXED))


def test_a_plan_says_both_numbers_where_attention_keeps_scores_in_memory() -> None:
    registered = AttentionInterface()[NAME], AttentionMaskInterface()[NAME]
    plan = plan_of(gpus(8))
    first = plan.rows[0]
    assert plan.fused_attention is not None
    written, fused = plan.fused_attention
    assert written == "task_args.attention=flex_attention"
    heads, layers = CONFIG["num_attention_heads"], CONFIG["num_hidden_layers"]
    scores = 4 * heads * LENGTH**2 * 2  # of a layer's micro-batch, in 16 bits
    assert first.memory_bytes - fused.memory_bytes > layers * scores
    assert fused.step_seconds < first.step_seconds
    sentence = next(line for line in text(plan).splitlines() if "keeps all scores" in line)
    for row in (first, fused):
        assert f"{row.step_seconds:.3g} s a step and {row.memory_bytes / GIB:.3g} GiB" in sentence
    assert as_json(plan, 1)["fused_attention"] == {
        "write": written,
        "step_seconds": fused.step_seconds,
        "memory_bytes": int(fused.memory_bytes),
    }
    as_written = plan_of(gpus(8), attention=NAME)
    assert as_written.rows[0].step_seconds == pytest.approx(fused.step_seconds)
    assert as_written.rows[0].memory_bytes == pytest.approx(fused.memory_bytes)
    assert as_written.fused_attention is None, "it has been chosen"
    assert (AttentionInterface()[NAME], AttentionMaskInterface()[NAME]) == registered


def test_a_plan_says_nothing_of_it_where_there_is_nothing_to_choose() -> None:
    for plan in (plan_of(gpus(8), "llama"), plan_of(cpus(2)), plan_of(gpus(8), attention="eager")):
        assert plan.fused_attention is None
    assert "keeps all scores" not in text(plan)
    assert as_json(plan, 1)["fused_attention"] is None


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, BLOCK, 2 * BLOCK, 100 * BLOCK])
def test_a_kernel_computes_the_blocks_that_a_mask_touches(
    window: int | None, is_causal: bool
) -> None:
    blocks = 64
    touched = 0
    for queries in range(blocks):
        for keys in range(blocks):
            nearest = max(abs(queries - keys) * BLOCK - BLOCK + 1, 0)
            is_seen = window is None or nearest < window
            touched += is_seen and (keys <= queries or not is_causal)
    computed = computed_keys(blocks * BLOCK, window, is_causal=is_causal)
    # At the sequence's ends a window has fewer keys.
    assert computed == pytest.approx(touched / blocks * BLOCK, rel=0.05)
