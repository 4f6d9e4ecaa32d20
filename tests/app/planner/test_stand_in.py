"""Plans without data, and what is remembered of a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config_io import load_config
from app.errors import UserError
from app.planner import read
from app.planner.machine import cpus
from app.planner.plan import Plan, make_plan
from app.planner.stand_in import plan_experiment
from app.tasks import load_task
from tests.app.planner.conftest import EXPERIMENT, gpus

pytestmark = pytest.mark.pure
BERT = (
    "{model: bert, kind: KIND, config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, CONFIG}, DATA}"
)
T5 = "{model: t5, tokenizer: bytes, config: {d_model: 32, num_layers: 2, num_heads: 2}, data: no.csv}"
VIT = "{model: vit, data: no.npz, config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, CONFIG}}"


def _planned(*overrides: str) -> Plan:
    config = load_config([], ["train.global_batch_size=8", *overrides])
    return plan_experiment(config, gpus(2), frozenset())


def test_the_same_model_is_planned_without_its_data(tmp_path: Path, own_cache: Path) -> None:
    np.zeros(6000, np.uint16).tofile(tmp_path / "there.bin")

    def planned(name: str) -> Plan:
        sizes = "vocab_size: 1000, sequence_length: 64, d_model: 64, n_layers: 2, n_heads: 2"
        return _planned("task=language_modelling", f"task_args={{data: {tmp_path}/{name}, {sizes}}}")

    there, away = planned("there.bin"), planned("away.bin")
    assert [row.memory for row in there.rows] == [row.memory for row in away.rows]
    assert [row.seconds for row in there.rows] == [row.seconds for row in away.rows]
    assert "made-up samples" in away.reader.note and not there.reader.note
    assert (
        away.layout(away.rows[0])["energy_kwh_per_run"] is None is not there.layout(there.rows[0])["energy_kwh_per_run"]
    )


@pytest.mark.parametrize(
    ("task", "args"),
    [
        (
            "huggingface",
            BERT.replace("KIND", "sequence_classification")
            .replace("CONFIG", "num_labels: 5")
            .replace("DATA", "data: no.csv, tokenizer: bytes"),
        ),
        pytest.param("huggingface", T5, marks=pytest.mark.slow),
        pytest.param(
            "huggingface", VIT.replace("CONFIG", "num_labels: 3, image_size: 32, patch_size: 8"), marks=pytest.mark.slow
        ),
    ],
)
def test_every_kind_of_transformers_model_is(task: str, args: str, own_cache: Path) -> None:
    plan = _planned(f"task={task}", f"task_args={args}")
    assert plan.best is not None and "made-up samples" in plan.reader.note


@pytest.mark.parametrize(
    ("task", "args", "said"),
    [
        ("language_modelling", "{d_model: 64}", "task_args.vocab_size"),
        ("language_modelling", "{data: no.bin}", "task_args.vocab_size"),
        (
            "huggingface",
            BERT.replace("KIND", "causal_lm").replace("CONFIG", "is_decoder: true").replace(", DATA", ""),
            "config.vocab_size",
        ),
        (
            "huggingface",
            BERT.replace("KIND", "sequence_classification").replace(", CONFIG", "").replace("DATA", "data: no.csv"),
            "config.num_labels",
        ),
        ("image_classification", "{data: no.npz}", "no.npz"),
        ("tabular", "{target: price}", "a few samples"),
    ],
)
def test_what_data_decide_is_asked_for_in_a_sentence(task: str, args: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        _planned(f"task={task}", f"task_args={args}")
    assert len(str(raised.value)) < 300


def test_a_model_is_read_once_and_again_when_it_or_the_file_changes(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[int] = []
    watch = read.watch
    monkeypatch.setattr(read, "watch", lambda *given: traced.append(1) or watch(*given))

    def planned(*overrides: str) -> tuple[int, Any]:
        traced.clear()
        config = load_config([EXPERIMENT], overrides)
        plan = make_plan(config, load_task(config.task, config.task_args), cpus(2))
        return len(traced), [row.seconds for row in plan.rows]

    first = planned()
    assert first[0] and planned() == (0, first[1])
    assert planned("task_args.dropout=0.1")[0]
    for file in own_cache.glob("trireme/reading-*.json"):
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
    assert planned() == first and planned() == (0, first[1])
