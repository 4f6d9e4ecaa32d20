"""What is known and refused before a worker starts: layouts, batches and models that cannot work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from app.config import Config
from app.config_io import load_config
from app.job import strategy_options
from app.run.prepare import default_micro_batch_size, prepare, read_task
from strategies.layout import LayoutError, check, choose

INTERLEAVED = ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.chunks=2", "train.micro_batch_size=6"]


def config(*more: str) -> Config:
    return load_config([], ["task=tests.chain:Chain", "train.steps=5", "train.global_batch_size=16", *more])


@pytest.mark.parametrize(
    ("share", "stages", "schedule", "size"),
    [
        (32, 2, "1f1b", 4),  # 8 micro-batches
        (12, 2, "1f1b", 2),  # 6: 8 would be uneven
        (12, 4, "interleaved_1f1b", 1),  # 12, a multiple of 4
        (3, 4, "1f1b", 1),  # fewer than stages: the schedule has its say
        (17, 2, "1f1b", 2),  # 9, the last one smaller
    ],
)
def test_micro_batches_that_nobody_decided(share: int, stages: int, schedule: str, size: int) -> None:
    assert default_micro_batch_size(share, stages, schedule) == size


@pytest.mark.parametrize(
    ("batch", "said"),
    [(16, []), (2, ["computes one sample per step"]), (10_000, ["but the data has"])],
)
def test_remarks_on_the_batch(batch: int, said: list[str]) -> None:
    wanted = config("strategy=ddp", f"train.global_batch_size={batch}")
    notes = prepare(wanted, read_task(wanted), 2, devices_per_node=None).notes
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["parallel.pp=5"], "parallel.pp is 5, but the model has only 4 blocks: write at most 4"),
        (INTERLEAVED, "in groups of 2, one per stage, but a step has 3: .*parallel.schedule=1f1b, which takes any"),
        (["parallel.pp=2", "parallel.schedule=zb_h2", "train.micro_batch_size=8"], "needs at least 3.*=zb_h1"),
        (["parallel.pp=2", "parallel.stages=[1,2]"], "adds up to 3 blocks, but the model has 4"),
    ],
)
def test_pipelines_that_cannot_work(more: list[str], said: str) -> None:
    wanted = config("strategy=pipeline", *more)
    with pytest.raises(LayoutError, match=said):
        prepare(wanted, read_task(wanted), wanted.parallel.pp or 1, devices_per_node=None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task_args.what=empty", "strategy=ddp"], "Sequential has no parameters"),
        (["task_args.what=misnamed", "strategy=fsdp"], r"names the block 'bloks.1'.*did you mean blocks.1"),
        (["task_args.what=fork", "strategy=tensor"], r"'blocks.\*.upp' matches no module of Net"),
        (["task_args.what=iterator", "strategy=pipeline", "parallel.pp=2"], "blocks.1 returns a list_iterator, which"),
        (["task_args.what=fork", "strategy=pipeline", "parallel.pp=2"], "blocks.1 does not use what blocks.0 puts out"),
        (["strategy=pipeline", "parallel.pp=2", "parallel.schedule=zbv", "task_args.what=misnamed"], "names the block"),
    ],
)
def test_models_that_do_not_fit_the_layout_are_known_before_a_worker_starts(more: list[str], said: str) -> None:
    wanted = config("task=tests.chain:Wrong", *more)
    with pytest.raises(LayoutError, match=said):
        prepare(wanted, read_task(wanted), 2, devices_per_node=None)


def test_a_deepspeed_file_is_read_before_a_worker_starts(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}))
    wanted = config(f"parallel.deepspeed={file}", "strategy=ddp")
    layout = dataclasses.replace(choose("ddp", 2), name="deepspeed")
    with pytest.raises(LayoutError, match="the DeepSpeed configuration sets optimizer, which the experiment decides"):
        check(layout, strategy_options(wanted))
