"""Layouts from names, degrees and options, and what is refused before any process starts."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.parity.rows import MIXTURES, ROWS
from strategies import activation_checkpointing
from strategies.context.apply import METHODS
from strategies.one_process import (
    first_gpu_of_worker,
    gpus_of_worker,
    require_copyable,
    spread_notes,
)
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
        (
            "hsdp",
            16,
            {"devices_per_node": 8, "tp": 2},
            "hsdp+tensor (dp_replicate 2 × dp_shard 4 × tp 2)",
        ),
        ("ddp_model_parallel", 3, {}, "ddp_model_parallel (dp_replicate 3)"),
        ("ddp+pipeline", 4, {"pp": 2}, "ddp+pipeline (pp 2 × dp_replicate 2)"),
        ("auto", 8, {"pp": 2, "tp": 2}, "ddp+tensor+pipeline (pp 2 × dp_replicate 2 × tp 2)"),
    ],
)
def test_a_name_and_degrees_choose_a_layout(
    name: str, workers: int, degrees: dict[str, Any], expected: str
) -> None:
    assert str(choose(name, workers, **degrees)) == expected


def test_the_options_offer_the_context_methods_and_schedules_that_exist() -> None:
    assert set(CONTEXT_METHODS) == set(METHODS)
    assert set(PIPELINE_SCHEDULES) == set(SCHEDULES)


FSDP_TENSOR = choose("fsdp", 4, tp=2)
DP = choose("dp", 1)
DDP = choose("ddp", 2)
DEEPSPEED = choose("deepspeed", 2)
TWO_STAGES = choose("pipeline", 2)
FOUR_STAGES = choose("pipeline", 4)
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
        (
            ["12 data-parallel", "write 1, 2, 4, 12"],
            "hsdp+context",
            12,
            {"dp_shard": 2, "cp": 2, "ep": 6},
        ),
    ],
)
def test_a_wrong_name_or_degree_is_refused(
    words: list[str], name: str, workers: int, degrees: dict[str, Any]
) -> None:
    assert_refused(words, choose, name, workers, **degrees)


@pytest.mark.parametrize(
    ("layout", "options", "facts", "words"),
    [
        (
            choose("ddp", 4),
            {},
            {"global_batch_size": 3},
            ["train.global_batch_size is 3", "at least 4"],
        ),
        (
            FSDP_TENSOR,
            {},
            {"sequence_length": 7},
            ["parallel.tp is 2", "7", "sequence_parallel=false"],
        ),
        (
            FSDP_TENSOR,
            {"async_tp": True, "sequence_parallel": False},
            {},
            ["parallel.async_tp", "sequence"],
        ),
        (choose("pipeline", 1), {}, {}, ["pipeline", "parallel.pp=2"]),
        (
            DDP,
            {"precision": "half"},
            {},
            ["train.precision is 'half': write fp32, bf16, fp16, fp8"],
        ),
        (DDP, {"weight_dtype": "bf16"}, {}, ["train.weight_dtype=bf16", "train.precision=bf16"]),
        (DDP, {"activation_checkpointing": "some"}, {}, ["activation_checkpointing", "selective"]),
        (DDP, {"offload": True}, {}, ["parallel.offload", "fsdp"]),
        (DDP, {"bucket_mb": 0.0}, {}, ["parallel.bucket_mb"]),
        (
            DP,
            {"reduce_dtype": "bf16"},
            {},
            ["parallel.reduce_dtype=bf16", "float32", "strategy=ddp"],
        ),
        (DEEPSPEED, {"reduce_dtype": "bf16"}, {}, ["communication_data_type"]),
        (DEEPSPEED, {"precision": "fp16"}, {}, ["train.precision=fp16"]),
        (DEEPSPEED, {"deepspeed": {"train_batch_size": 8}}, {}, ["sets train_batch_size"]),
        (
            DEEPSPEED,
            {"deepspeed": {"zero_optimization": {"stage": 0}}},
            {},
            ["stage 0: write 1, 2 or 3"],
        ),
        (
            TWO_STAGES,
            {},
            {"blocks": 0},
            ["no repeating blocks: have", "name", "write strategy=fsdp"],
        ),
        (TWO_STAGES, {}, {"blocks": 1}, ["only 1 repeating block: have", "write strategy=fsdp"]),
        (
            TWO_STAGES,
            INTERLEAVED | {"chunks": 3},
            {"blocks": 4},
            ["2 with 3 chunks each", "4 repeating", "parallel.chunks"],
        ),
        (
            FOUR_STAGES,
            {"schedule": "zb_h2"},
            {"micro_batches": 4},
            ["at least 7 micro-batches", "are 4", "schedule=zb_h1"],
        ),
        (FOUR_STAGES, {"schedule": "zb_h2"}, {"micro_batches": 3}, ["are 3", "schedule=1f1b"]),
        (TWO_STAGES, {"chunks": 0}, {}, ["parallel.chunks is 0: write at least 1"]),
        (
            TWO_STAGES,
            {"schedule": "zbv", "chunks": 3},
            {},
            ["zbv has 2 chunks per stage, not 3: leave parallel.chunks out"],
        ),
        (FOUR_STAGES, INTERLEAVED, {"micro_batches": 6}, ["groups of 4", "has 6", "=1f1b"]),
        (
            TWO_STAGES,
            INTERLEAVED | {"chunks": 1},
            {},
            ["several chunks per stage: write parallel.chunks=2"],
        ),
        (
            TWO_STAGES,
            {"chunks": 2},
            {},
            ["one chunk per stage, but parallel.chunks is 2", "interleaved_1f1b"],
        ),
        (TWO_STAGES, {"schedule": "1F1B"}, {}, ["parallel.schedule is '1F1B': did you mean 1f1b?"]),
        (
            TWO_STAGES,
            {"stages": (1, 2, 3)},
            {"blocks": 6},
            ["names 3 parts", "has 2: write 2 numbers"],
        ),
        (
            TWO_STAGES,
            {"stages": (1, 2)},
            {"blocks": 6},
            ["adds up to 3 blocks, but the model has 6"],
        ),
        (TWO_STAGES, {"offload": True}, {}, ["parallel.offload"]),
        (
            choose("context", 2),
            {"compile": True, "activation_checkpointing": "selective"},
            {},
            ["checkpointing=full"],
        ),
        (DP, {"precision": "fp8"}, {}, ["fp8 does not work with strategy dp"]),
        (DEEPSPEED, {"precision": "fp8"}, {}, ["fp8 does not work with strategy deepspeed"]),
    ],
)
def test_options_that_do_not_fit_a_layout_are_refused(
    layout: Layout, options: dict[str, Any], facts: dict[str, int], words: list[str]
) -> None:
    assert_refused(words, check, layout, Options(**options), **facts)


def test_options_that_fit_a_layout_are_accepted() -> None:
    check(FSDP_TENSOR, Options(), heads=4, global_batch_size=2, sequence_length=8, blocks=1)
    for schedule in ("gpipe", "1f1b"):
        check(FOUR_STAGES, Options(schedule=schedule), micro_batches=1)
    check(TWO_STAGES, Options(schedule="zbv", chunks=1), micro_batches=2)


def test_every_strategy_has_a_row_in_the_parity_matrix() -> None:
    """deepspeed has tests of its own."""
    parts = {part for row in (*ROWS, *MIXTURES) for part in row.layout.parts}
    assert parts | {"single", "deepspeed"} == set(STRATEGIES) | {"tensor"}


def test_ranks_have_the_coordinates_and_the_data_of_their_layout() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=3, tp=2, pp=2)
    last = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 0, "tp": 1}
    assert dims.coordinates(23) == last
    data_ranks_of_a_stage = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [dims.data_rank(rank) for rank in range(24)] == data_ranks_of_a_stage * 2


def test_ranks_that_share_a_sequence_replicate_or_shard_parameters() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
    assert str(dims) == "pp 2 × dp_replicate 2 × dp_shard 2 × cp 2 × tp 2, ep 4"
    assert dims.world_size == 32
    assert dims.dp == 4
    assert dims.dp_cp == 8
    data_ranks = [dims.data_rank(rank) for rank in range(16)]
    assert data_ranks == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert dims.peers("cp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert dims.peers("tp")[0] == [0, 1]
    seed_ranks = [dims.seed_rank(rank) for rank in range(0, 32, 2)]
    assert seed_ranks == [0, 1, 2, 3, 4, 5, 6, 7] * 2, "other tokens, other random numbers"

    sharded = dims.for_parameters(sharded=True)
    assert str(sharded) == "pp 2 × dp_replicate 2 × dp_shard 4 × tp 2, ep 4"
    assert [sharded.coordinates(rank)["dp_shard"] for rank in (0, 2, 4, 6)] == [0, 1, 2, 3]
    replicated = ParallelDims(dp_replicate=2, cp=2).for_parameters(sharded=False)
    assert str(replicated) == "dp_replicate 4"


def test_the_workers_that_hold_the_same_experts_are_the_rest_of_the_layout() -> None:
    copies = ParallelDims(dp_replicate=4, dp_shard=2, cp=2, tp=2, ep=8)
    stages = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
    cases = [
        (stages, "pp 2 × dp_replicate 2 × tp 2"),
        (copies, "dp_replicate 2 × tp 2"),
        (replace(copies, ep=2), "dp_replicate 4 × dp_shard 2 × tp 2"),
    ]
    for dims, expected in cases:
        assert str(dims.for_parameters(sharded=True).for_experts()) == expected


def test_idle_devices_are_reported() -> None:
    cpu = torch.device("cpu")
    gpus = [torch.device("cuda", i) for i in range(3)]
    assert "CPU" in spread_notes("dp", [cpu, cpu], 2)[0]
    assert "nothing is spread" in spread_notes("dp", gpus[:1], 1)[0]
    assert "1 of 3 GPUs idle" in spread_notes("model_parallel", gpus, 2)[0]
    assert spread_notes("model_parallel", gpus, 3) == ()


def test_dp_refuses_replaced_forwards_which_read_the_first_gpus_parameters() -> None:
    model = PlainGPT()
    require_copyable(model)
    activation_checkpointing.apply(model, ["blocks.0", "blocks.1"], "every_2")
    words = ["of blocks.0,", "train.activation_checkpointing", "strategy=ddp"]
    assert_refused(words, require_copyable, model)
    block = model.blocks[0]
    copied_block = block._replicate_for_data_parallel()
    assert copied_block.forward is block.forward, "torch's copies now have their own forward"
    mixture_model = mixture()
    experts = mixture_model.get_submodule("blocks.0.mlp.experts")
    experts.forward = print  # type: ignore[method-assign]
    words = ["mixtures of experts, as blocks.0.mlp.experts", "strategy=ddp"]
    assert_refused(words, require_copyable, mixture_model)


@pytest.mark.parametrize(
    ("first_gpu", "rank", "workers", "visible", "expected"),
    [
        (0, 0, 1, 4, [0, 1, 2, 3]),  # a single process
        (0, 0, 2, 4, [0, 1]),  # torchrun: every process sees all GPUs
        (2, 1, 2, 4, [2, 3]),
        (0, 1, 1, 2, [0, 1]),  # an actor sees only its own GPUs, without LOCAL_WORLD_SIZE
        (0, 1, 2, 2, [0, 1]),  # the same with LOCAL_WORLD_SIZE
        (1, 1, 2, 4, [1]),  # a device that is not the first of a share
        (0, 0, 4, 2, [0, 1]),  # four tasks that see two GPUs of their own each
        (0, 3, 4, 2, [0, 1]),
    ],
)
def test_each_worker_has_its_own_gpus(
    first_gpu: int, rank: int, workers: int, visible: int, expected: list[int]
) -> None:
    gpus = gpus_of_worker(first_gpu=first_gpu, rank=rank, workers=workers, visible=visible)
    assert gpus == expected


def test_each_worker_begins_on_the_first_of_its_gpus() -> None:
    for rank, visible in itertools.product((0, 1), (2, 4, 5)):
        first_gpu = first_gpu_of_worker(True, rank, 2, visible)
        gpus = gpus_of_worker(first_gpu=first_gpu, rank=rank, workers=2, visible=visible)
        assert gpus[0] == first_gpu
        assert first_gpu < visible
    assert [first_gpu_of_worker(False, rank, 4, 8) for rank in range(4)] == [0, 1, 2, 3]
    for several, workers, visible in itertools.product((False, True), (4, 8), (1, 2, 3)):
        for rank in range(workers):
            assert first_gpu_of_worker(several, rank, workers, visible) < visible
