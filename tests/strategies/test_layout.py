"""Names, degrees and options to layouts: pure functions, each mistake one sentence, before any process starts."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.parity.rows import MIXTURES, ROWS
from strategies import activation_checkpointing
from strategies.context.apply import METHODS
from strategies.one_process import first_gpu_of_worker, gpus_of_worker, require_copyable, spread_notes
from strategies.options import CONTEXT_METHODS, PIPELINE_SCHEDULES
from strategies.parallelize import Layout, Options, ParallelDims, check, choose
from strategies.pipeline.schedules import SCHEDULES
from strategies.registry import STRATEGIES
from tests.strategies.models import PlainGPT, assert_refused, mixture


@pytest.mark.parametrize(
    ("name", "workers", "degrees", "expected"),
    [
        ("auto", 1, {}, "single (1 worker)"),
        ("auto", 4, {}, "ddp (dp_replicate 4)"),
        ("auto", 8, {"tp": 2}, "ddp+tensor (dp_replicate 4 × tp 2)"),
        ("auto", 8, {"dp_shard": 8}, "fsdp (dp_shard 8)"),
        ("auto", 8, {"dp_shard": 2}, "hsdp (dp_replicate 4 × dp_shard 2)"),
        ("fsdp", 4, {"dp_replicate": 2}, "fsdp (dp_replicate 2 × dp_shard 2)"),
        ("tensor+fsdp", 4, {"tp": 2}, "fsdp+tensor (dp_shard 2 × tp 2)"),
        ("hsdp", 16, {"devices_per_node": 8, "tp": 2}, "hsdp+tensor (dp_replicate 2 × dp_shard 4 × tp 2)"),
        ("ddp_model_parallel", 3, {}, "ddp_model_parallel (dp_replicate 3)"),
        ("ddp+pipeline", 4, {"pp": 2}, "ddp+pipeline (pp 2 × dp_replicate 2)"),
        ("auto", 8, {"pp": 2, "tp": 2}, "ddp+tensor+pipeline (pp 2 × dp_replicate 2 × tp 2)"),
    ],
)
def test_choose(name: str, workers: int, degrees: dict[str, Any], expected: str) -> None:
    assert str(choose(name, workers, **degrees)) == expected


def test_what_may_be_written_for_context_and_schedule_is_what_there_is() -> None:
    assert set(CONTEXT_METHODS) == set(METHODS)
    assert set(PIPELINE_SCHEDULES) == set(SCHEDULES)


NO_FP8 = (("dp", 1), ("deepspeed", 2))
FSDP_TENSOR, DP, DDP, DEEPSPEED = choose("fsdp", 4, tp=2), choose("dp", 1), choose("ddp", 2), choose("deepspeed", 2)
TWO, FOUR = choose("pipeline", 2), choose("pipeline", 4)
INTERLEAVED = {"schedule": "interleaved_1f1b", "chunks": 2}


@pytest.mark.parametrize(
    ("words", "name", "workers", "degrees"),
    [
        (["'dpp'", "did you mean ddp?"], "dpp", 2, {}),  # rather than dp
        (["3", "4 workers", "workers=3"], "ddp", 4, {"dp_replicate": 3}),
        (["tp 3", "4 workers"], "tensor", 4, {"tp": 3}),
        (["2 workers", "single is one device: write workers=1, or strategy=ddp"], "single", 2, {}),
        (["parallel.dp_shard=2", "strategy=auto"], "ddp", 4, {"dp_shard": 2}),
        (["parallel.tp=2"], "single", 1, {"tp": 2}),
        (["parallel.dp_shard", "divisor of 4"], "hsdp", 4, {}),
        (["parallel.dp_shard or parallel.tp"], "fsdp+tensor", 4, {}),
        (["does not combine"], "ddp+fsdp", 4, {}),
        (["does not combine: write one of ddp, fsdp, hsdp, then"], "zero1+pipeline", 4, {"pp": 2}),
        (["parallel.tp is 0"], "fsdp", 4, {"tp": 0}),
        (["parallel.tp is True"], "fsdp", 4, {"tp": True}),
        (["0 workers"], "ddp", 0, {}),
        (["ddp+expert"], "expert", 2, {"ep": 2}),
        (["parallel.ep is 3", "4 data-parallel workers", "write 1, 2, 4"], "fsdp", 4, {"ep": 3}),
        (["12 data-parallel", "write 1, 2, 4, 12"], "hsdp+context", 12, {"dp_shard": 2, "cp": 2, "ep": 6}),
    ],
)
def test_choose_refuses_in_one_sentence(words: list[str], name: str, workers: int, degrees: dict[str, Any]) -> None:
    assert_refused(words, choose, name, workers, **degrees)


@pytest.mark.parametrize(
    ("layout", "options", "facts", "words"),
    [
        (choose("ddp", 4), {}, {"global_batch_size": 3}, ["train.global_batch_size is 3", "at least 4"]),
        (FSDP_TENSOR, {}, {"sequence_length": 7}, ["parallel.tp is 2", "7", "sequence_parallel=false"]),
        (FSDP_TENSOR, {"async_tp": True, "sequence_parallel": False}, {}, ["parallel.async_tp", "sequence"]),
        (choose("pipeline", 1), {}, {}, ["pipeline", "parallel.pp=2"]),
        (DDP, {"precision": "half"}, {}, ["train.precision is 'half': write fp32, bf16, fp16, fp8"]),
        (DDP, {"activation_checkpointing": "some"}, {}, ["activation_checkpointing", "selective"]),
        (DDP, {"offload": True}, {}, ["parallel.offload", "fsdp"]),
        (DDP, {"bucket_mb": 0.0}, {}, ["parallel.bucket_mb"]),
        (DP, {"reduce_dtype": "bf16"}, {}, ["parallel.reduce_dtype=bf16", "float32", "strategy=ddp"]),
        (DEEPSPEED, {"reduce_dtype": "bf16"}, {}, ["communication_data_type"]),
        (DEEPSPEED, {"precision": "fp16"}, {}, ["train.precision=fp16"]),
        (DEEPSPEED, {"deepspeed": {"train_batch_size": 8}}, {}, ["sets train_batch_size"]),
        (DEEPSPEED, {"deepspeed": {"zero_optimization": {"stage": 0}}}, {}, ["stage 0: write 1, 2 or 3"]),
        (TWO, {}, {"blocks": 0}, ["no repeating blocks, too few", "name", "strategy=fsdp"]),
        (TWO, INTERLEAVED | {"chunks": 3}, {"blocks": 4}, ["2 with 3 chunks each", "4 repeating", "parallel.chunks"]),
        (FOUR, {"schedule": "zb_h2"}, {"micro_batches": 4}, ["at least 7 micro-batches", "are 4", "schedule=zb_h1"]),
        (FOUR, {"schedule": "zb_h2"}, {"micro_batches": 3}, ["are 3", "schedule=1f1b"]),
        (TWO, {"chunks": 0}, {}, ["parallel.chunks is 0: write at least 1"]),
        (TWO, {"schedule": "zbv", "chunks": 3}, {}, ["zbv has 2 chunks per stage, not 3: leave parallel.chunks out"]),
        (FOUR, INTERLEAVED, {"micro_batches": 6}, ["groups of 4", "has 6", "=1f1b"]),
        (TWO, INTERLEAVED | {"chunks": 1}, {}, ["several chunks per stage: write parallel.chunks=2"]),
        (TWO, {"chunks": 2}, {}, ["one chunk per stage, but parallel.chunks is 2", "interleaved_1f1b"]),
        (TWO, {"schedule": "1F1B"}, {}, ["parallel.schedule is '1F1B': did you mean 1f1b?"]),
        (TWO, {"stages": (1, 2, 3)}, {"blocks": 6}, ["names 3 parts", "has 2: write 2 numbers"]),
        (TWO, {"stages": (1, 2)}, {"blocks": 6}, ["adds up to 3 blocks, but the model has 6"]),
        (TWO, {"offload": True}, {}, ["parallel.offload"]),
        (choose("context", 2), {"compile": True, "activation_checkpointing": "selective"}, {}, ["checkpointing=full"]),
        *((choose(*at), {"precision": "fp8"}, {}, [f"fp8 does not work with strategy {at[0]}"]) for at in NO_FP8),
    ],
)
def test_check_refuses_in_one_sentence(
    layout: Layout, options: dict[str, Any], facts: dict[str, int], words: list[str]
) -> None:
    assert_refused(words, check, layout, Options(**options), **facts)


def test_check_accepts_what_fits() -> None:
    check(FSDP_TENSOR, Options(), heads=4, global_batch_size=2, sequence_length=8, blocks=1)
    for given in ({"schedule": "gpipe"}, {"schedule": "1f1b"}):
        check(FOUR, Options(**given), micro_batches=1)
    check(TWO, Options(schedule="zbv", chunks=1), micro_batches=2)


def test_every_name_has_a_row() -> None:
    """A name without a row in the parity matrix is a bug. deepspeed has tests of its own."""
    rows = {part for row in (*ROWS, *MIXTURES) for part in row.layout.parts}
    assert rows | {"single", "deepspeed"} == set(STRATEGIES) | {"tensor"}


def test_ranks_of_one_sequence_share_samples_and_are_further_data_parallel_workers_for_parameters() -> None:
    odd = ParallelDims(dp_replicate=2, dp_shard=3, tp=2, pp=2)
    assert odd.coordinates(23) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 0, "tp": 1}
    assert [odd.data_rank(rank) for rank in range(24)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 2
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
    assert dims.world_size == 32 and dims.dp == 4 and dims.dp_cp == 8
    assert [dims.data_rank(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert dims.peers("cp")[:3] == [[0, 2], [1, 3], [4, 6]] and dims.peers("tp")[0] == [0, 1]
    assert str(dims) == "pp 2 × dp_replicate 2 × dp_shard 2 × cp 2 × tp 2, ep 4"
    assert str(dims.for_parameters(sharded=True)) == "pp 2 × dp_replicate 2 × dp_shard 4 × tp 2, ep 4"
    assert [dims.for_parameters(sharded=True).coordinates(rank)["dp_shard"] for rank in (0, 2, 4, 6)] == [0, 1, 2, 3]
    assert str(ParallelDims(dp_replicate=2, cp=2).for_parameters(sharded=False)) == "dp_replicate 4"
    assert [dims.seed_rank(rank) for rank in range(0, 32, 2)] == [*range(8)] * 2, "of other tokens other numbers"
    copies = ParallelDims(dp_replicate=4, dp_shard=2, cp=2, tp=2, ep=8)
    of_experts = [each.for_parameters(sharded=True).for_experts() for each in (dims, copies, replace(copies, ep=2))]
    assert list(map(str, of_experts)) == [
        "pp 2 × dp_replicate 2 × tp 2", "dp_replicate 2 × tp 2", "dp_replicate 4 × dp_shard 2 × tp 2"
    ]  # fmt: skip


def test_idle_devices_are_said_aloud() -> None:
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", i) for i in range(3)]
    assert "CPU" in spread_notes("dp", [cpu, cpu], 2)[0]
    assert "nothing is spread" in spread_notes("dp", gpus[:1], 1)[0]
    assert "1 of 3 GPUs idle" in spread_notes("model_parallel", gpus, 2)[0]
    assert spread_notes("model_parallel", gpus, 3) == ()


def test_dp_refuses_what_its_copies_would_compute_with_the_first_gpus_parameters() -> None:
    model = PlainGPT()
    require_copyable(model)
    activation_checkpointing.apply(model, ["blocks.0", "blocks.1"], "every_2")
    assert_refused(["of blocks.0,", "train.activation_checkpointing", "strategy=ddp"], require_copyable, model)
    block = model.blocks[0]
    assert block._replicate_for_data_parallel().forward is block.forward, "torch's copies have a forward of their own"
    of_experts = mixture()
    of_experts.get_submodule("blocks.0.mlp.experts").forward = print  # type: ignore[method-assign]
    assert_refused(["mixtures of experts, as blocks.0.mlp.experts", "strategy=ddp"], require_copyable, of_experts)


def test_each_worker_has_its_own_gpus_and_begins_on_the_first() -> None:
    def share(first_gpu: int, rank: int, workers: int, visible: int) -> list[int]:
        return gpus_of_worker(first_gpu=first_gpu, rank=rank, workers=workers, visible=visible)

    assert share(0, 0, 1, 4) == [0, 1, 2, 3]  # one process
    assert share(0, 0, 2, 4) == [0, 1] and share(2, 1, 2, 4) == [2, 3]  # torchrun: everybody sees all
    assert share(0, 1, 1, 2) == [0, 1]  # an actor sees its own only, and LOCAL_WORLD_SIZE is not set
    assert share(0, 1, 2, 2) == [0, 1]  # the same, and it is
    assert share(1, 1, 2, 4) == [1]  # a device that is not the first of a share
    assert share(0, 0, 4, 2) == share(0, 3, 4, 2) == [0, 1]  # four tasks that see two of their own each
    for rank, visible in itertools.product((0, 1), (2, 4, 5)):
        first = first_gpu_of_worker(True, rank, 2, visible)
        assert share(first, rank, 2, visible)[0] == first < visible
    assert [first_gpu_of_worker(False, rank, 4, 8) for rank in range(4)] == [0, 1, 2, 3]
    for several, workers, visible in itertools.product((False, True), (4, 8), (1, 2, 3)):
        assert all(first_gpu_of_worker(several, rank, workers, visible) < visible for rank in range(workers))
