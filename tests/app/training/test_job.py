"""The options that strategies get from the configuration."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from app.config.io import documentation, load_config
from app.errors import UserError
from app.training.job import strategy_options
from strategies.options import Options

pytestmark = pytest.mark.pure

WRITTEN: dict[str, tuple[str, Any]] = {
    "train.precision": ("bf16", "bf16"),
    "train.weight_dtype": ("bf16", "bf16"),
    "train.compile": ("true", True),
    "train.compile_backend": ("aot_eager", "aot_eager"),
    "train.activation_checkpointing": ("every_2", "every_2"),
    "train.activation_offloading": ("true", True),
    "parallel.reduce_dtype": ("bf16", "bf16"),
    "parallel.bucket_mb": ("4.5", 4.5),
    "parallel.find_unused_parameters": ("true", True),
    "parallel.offload": ("true", True),
    "parallel.reshard_after_forward": ("false", False),
    "parallel.accumulate_sharded": ("true", True),
    "parallel.sequence_parallel": ("false", False),
    "parallel.async_tp": ("true", True),
    "parallel.loss_parallel": ("false", False),
    "parallel.context": ("allgather", "allgather"),
    "parallel.schedule": ("zbv", "zbv"),
    "parallel.chunks": ("3", 3),
    "parallel.stages": ("[2,1]", (2, 1)),
}
"""For each key of an option: its text, and the value that strategies get."""


def test_strategies_get_the_defaults_where_nothing_is_written() -> None:
    assert strategy_options(load_config([])) == Options()


@pytest.mark.parametrize("key", WRITTEN)
def test_each_key_sets_the_option_of_its_name_and_no_other(key: str) -> None:
    written, expected = WRITTEN[key]
    # Weights in 16 bits need products in 16 bits.
    beside = ["train.precision=bf16"] if key == "train.weight_dtype" else []
    options = strategy_options(load_config([], [f"{key}={written}", *beside]))
    others = strategy_options(load_config([], beside))
    assert options == replace(others, **{key.partition(".")[2]: expected})
    assert options != others


def test_every_option_but_those_of_a_task_is_a_key_of_the_configuration() -> None:
    tried = {key.partition(".")[2] for key in WRITTEN} | {"deepspeed"}
    assert tried == {option.name for option in fields(Options)} - {"float_output"}


def test_an_option_is_documented_where_it_has_its_default() -> None:
    docs = documentation()
    assert docs["parallel.context"].startswith(
        "With cp: how tokens attend to those of other workers"
    )
    assert docs["train.compile"] == "Compile each block with torch.compile."
    assert docs["parallel.tp"].endswith("(tensor parallelism).")
    assert docs["parallel.deepspeed"].startswith(
        "With strategy deepspeed: path of a DeepSpeed JSON"
    )


def test_a_deepspeed_file_is_read_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    config = load_config([], [f"parallel.deepspeed={file}"])
    assert strategy_options(config) == Options(deepspeed={"zero_optimization": {"stage": 1}})
    for text, sentence in (("{", "cannot be read as JSON"), ("[1]", "holds no JSON object")):
        file.write_text(text)
        with pytest.raises(UserError, match=sentence):
            strategy_options(config)
