"""Values that a configuration leaves open are decided once; resolving again changes nothing."""

import dataclasses
from typing import Any

import pytest

from app.config.io import flatten, load_config, to_dict
from app.config.layout_requirement import Requirement
from app.errors import UserError
from app.run.prepare import read_task
from app.run.resolve import Resolved, default_micro_batch_size, resolve, with_batches
from tests.chain import config

pytestmark = pytest.mark.pure

GPT = ["task=language_modelling", "task_args={data: strategies/fsdp.py, n_layers: 1, d_model: 96}"]
CONTEXT = [*GPT, "strategy=context", "parallel.cp=2"]


def resolved(overrides: list[str]) -> tuple[Resolved, dict[str, Any]]:
    """The resolution of a configuration, and the values that differ from the written ones."""
    written = config(*overrides)
    task = read_task(written)
    values_before = flatten(to_dict(written))

    def resolve_once(run_config: Any) -> Resolved:
        return resolve(
            run_config, task, 2, devices_per_node=2, is_kept=lambda layout, options: True
        )

    resolution = resolve_once(written)
    assert flatten(to_dict(written)) == values_before, "the written configuration is not changed"
    repeated = resolve_once(resolution.config)
    assert (repeated.config, repeated.layout) == (resolution.config, resolution.layout)
    values_after = flatten(to_dict(resolution.config))
    return resolution, {
        key: value for key, value in values_after.items() if value != values_before.get(key)
    }


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["strategy=ddp"], {}),
        (["strategy=pipeline", "train.global_batch_size=12"], {"train.micro_batch_size": 2}),
        (["strategy=pipeline", "train.micro_batch_size=3"], {}),
        (CONTEXT, {"parallel.context": "ulysses"}),
        ([*CONTEXT, "task_args.n_heads=3"], {"parallel.context": "ring"}),
        ([*CONTEXT, "parallel.context=ring"], {}),
    ],
)
def test_only_values_that_are_left_open_are_decided(
    overrides: list[str], values: dict[str, Any]
) -> None:
    resolution, changed = resolved(overrides)
    assert changed == values
    assert bool(resolution.notes) == ("train.micro_batch_size" in values)


def test_the_planner_decides_for_auto_and_says_why() -> None:
    resolution, changed = resolved(["strategy=auto"])
    assert changed["train.micro_batch_size"]
    assert resolution.notes[0].startswith("strategy auto is ")
    assert resolution.prediction is not None


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).train.steps = 7  # type: ignore[misc]


def test_micro_batches_fill_a_pipeline_and_are_equal_where_possible() -> None:
    assert default_micro_batch_size(12, 2, "1f1b") == 2, "6 micro-batches; 8 would be uneven"
    assert default_micro_batch_size(12, 4, "interleaved_1f1b") == 1, "12, a multiple of 4 stages"
    assert default_micro_batch_size(3, 4, "1f1b") == 1, "fewer than stages, which is noted later"
    assert default_micro_batch_size(17, 2, "1f1b") == 2, "9 micro-batches, the last one smaller"


def test_batches_that_are_left_behind_need_not_be_shared() -> None:
    written = config("strategy=ddp", "train.batch_schedule=[[0,2],[40,8],[80,16]]")
    task = read_task(written)

    def layout(requirement: Requirement) -> str:
        resolution = resolve(
            written,
            task,
            4,
            devices_per_node=None,
            is_kept=lambda layout, options: True,
            requirement=requirement,
        )
        assert resolution.config.train.batches.batches == [2, 8, 16], "steps are counted by it"
        return str(resolution.layout)

    with pytest.raises(UserError, match="has a batch of 2, which does not divide by the 4"):
        layout(Requirement())
    assert layout(Requirement(batches=(8, 16))) == "ddp (dp_replicate 4)"
    planned = with_batches(written, (8, 16)).train
    assert (planned.batches.batches, planned.global_batch_size) == ([8, 16], 16)
    assert with_batches(written, (8,)).train.global_batch_size == 8
