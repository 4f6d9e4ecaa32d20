"""What a configuration leaves open is decided once: resolving what was resolved changes nothing."""

import dataclasses
from typing import Any

import pytest

from app.config.io import flatten, load_config, to_dict
from app.run.prepare import read_task
from app.run.resolve import Resolved, default_micro_batch_size, resolve
from tests.chain import config

pytestmark = pytest.mark.pure

GPT = ["task=language_modelling", "task_args={data: strategies/fsdp.py, n_layers: 1, d_model: 96}"]
CONTEXT = [*GPT, "strategy=context", "parallel.cp=2"]


def resolved(words: list[str]) -> tuple[Resolved, dict[str, Any]]:
    """What is resolved, and which values of the configuration differ from those that were written."""
    written = config(*words)
    task = read_task(written)
    before = flatten(to_dict(written))

    def once(asked: Any) -> Resolved:
        return resolve(asked, task, 2, devices_per_node=2, is_kept=lambda layout, options: True)

    found = once(written)
    assert flatten(to_dict(written)) == before, "what was written stays as it is"
    again = once(found.config)
    assert (again.config, again.layout) == (found.config, found.layout)
    after = flatten(to_dict(found.config))
    return found, {key: value for key, value in after.items() if value != before.get(key)}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["strategy=ddp"], {}),
        (["strategy=pipeline", "train.global_batch_size=12"], {"train.micro_batch_size": 2}),
        (["strategy=pipeline", "train.micro_batch_size=3"], {}),
        (CONTEXT, {"parallel.context": "ulysses"}),
        ([*CONTEXT, "task_args.n_heads=3"], {"parallel.context": "ring"}),
        ([*CONTEXT, "parallel.context=ring"], {}),
    ],
)
def test_what_is_left_open_is_decided_and_nothing_else(words: list[str], values: dict[str, Any]) -> None:
    found, changed = resolved(words)
    assert changed == values
    assert bool(found.notes) == ("train.micro_batch_size" in values)


def test_the_planner_decides_for_auto_and_says_why() -> None:
    found, changed = resolved(["strategy=auto"])
    assert changed["train.micro_batch_size"]
    assert found.notes[0].startswith("strategy auto is ")
    assert found.prediction is not None


def test_nobody_can_change_a_configuration() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).train.steps = 7  # type: ignore[misc]


def test_micro_batches_fill_a_pipeline_and_are_equal_where_that_is_possible() -> None:
    assert default_micro_batch_size(12, 2, "1f1b") == 2, "6: 8 would be uneven"
    assert default_micro_batch_size(12, 4, "interleaved_1f1b") == 1, "12, a multiple of 4"
    assert default_micro_batch_size(3, 4, "1f1b") == 1, "fewer than stages: the schedule has its say"
    assert default_micro_batch_size(17, 2, "1f1b") == 2, "9, the last one smaller"
