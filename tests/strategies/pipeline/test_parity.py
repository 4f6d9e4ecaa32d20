"""A pipeline trains what one device trains: every schedule, combinations, and any chain of blocks.

Also what a stage holds and sends meanwhile.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from strategies import activation_checkpointing
from strategies.dims import named_mesh
from strategies.grad_sync import ShardedGradients, local, shard_without_hooks
from strategies.layout import Layout
from strategies.parallelize import Options, choose
from strategies.pipeline.schedules import SCHEDULES
from strategies.pipeline.simulate import Span, activations_by_formula
from strategies.pipeline.weight_grad import DeferredWeightGrad, finish
from strategies.torch_internals import OperationMode
from tests.pool import run_distributed
from tests.strategies.models import (
    BF16,
    CPU,
    HEADS,
    WIDTH,
    Block,
    gpt_trial,
    language_batch,
    language_loss,
    slow,
)
from tests.strategies.pipeline.test_trace import CHAINS, chain_trial

TOLERANCE = 5e-6


def _options_of_schedule(schedule: str) -> dict[str, Any]:
    return {"schedule": schedule, "chunks": 2 if schedule == "interleaved_1f1b" else 1}


ALL_SCHEDULES = [_options_of_schedule(schedule) for schedule in SCHEDULES]
UNLIKE = ("interleaved_1f1b", "zbv")
"""Schedules with two stages on a worker, and with backward in two parts in a fold.

tests/strategies/test_parity.py trains with others, and tests/strategies/pipeline/test_schedules.py
looks at the order of each.
"""
SEVERAL_CHUNKS = [_options_of_schedule(schedule) for schedule in ("interleaved_1f1b", "zbv")]
ZB_H1 = {"schedule": "zb_h1"}

Case = tuple[str, dict[str, Any]]
"""The name of a chain ("" for a GPT), and options."""
SPLIT_BACKWARD_CASES: list[Case] = [
    ("", ZB_H1 | {"activation_checkpointing": "selective"}),
    ("", ZB_H1 | {"precision": "bf16"}),
]
"""tests/strategies/test_parity.py has full recomputation."""
CHAIN_CASES: list[Case] = list(zip(CHAINS, itertools.cycle(({}, ZB_H1))))
SKIPPING_CASES: list[Case] = [("skips", {}), ("t5", ZB_H1)]
"""Over four stages values skip several of them."""


def _trial(chain: str = "") -> Trial:
    """A chain, or a GPT with tied embeddings; with accumulation and clipping."""
    if chain:
        return chain_trial(chain)
    return gpt_trial(tied=True, layers=4, micro_batches=4, clip=0.5, steps=2)


@functools.cache
def _single_device_curve(chain: str) -> Curve:
    return curves.train(_trial(chain), Layout("single"), Options(), CPU)


def _train_each(rank: int, strategy: str, workers: int, pp: int, cases: list[Case]) -> list[Curve]:
    layout = choose(strategy, workers, pp=pp)
    return [
        curves.train(_trial(chain), layout, Options(**options), CPU) for chain, options in cases
    ]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "workers", "pp", "cases"),
    [
        slow("pipeline", 2, 2, SPLIT_BACKWARD_CASES, id="split backward"),
        slow("fsdp+pipeline", 4, 2, [("", o) for o in SEVERAL_CHUNKS], id="sharded chunks"),
        pytest.param("pipeline", 2, 2, CHAIN_CASES[:3], id="chains"),
        slow("pipeline", 2, 2, CHAIN_CASES[3:], id="more chains"),
        slow("pipeline", 4, 4, SKIPPING_CASES, id="chains of 4"),
    ],
)
def test_a_pipeline_trains_the_same_model(
    strategy: str, workers: int, pp: int, cases: list[Case]
) -> None:
    """tests/strategies/test_parity.py and `trireme parity` have more rows."""
    results = run_distributed(_train_each, workers, strategy, workers, pp, cases, timeout=240)
    for curve, (chain, options) in zip(results[0], cases):
        difference = curves.difference(_single_device_curve(chain), curve)
        if "precision" in options:
            assert 1e-6 < difference.loss < 3e-3
            continue
        assert difference.loss <= TOLERANCE, (chain, options, difference)
        assert difference.weights <= 1e-3, (chain, options, difference)
        if not chain:
            assert difference.norm <= 10 * TOLERANCE, (options, difference)


# --- one step -------------------------------------------------------------------------------------

ROWS = [2, 2, 2, 1]
"""Of the micro-batches: the last one is smaller."""
WEIGHTS = [rows / sum(ROWS) for rows in ROWS]


def _micro_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 30, (2, rows, 8), generator=generator)) for rows in ROWS]


@dataclass
class StageResult:
    """What a stage has after a few steps.

    Attributes:
        losses: The loss of each step; [] on a stage without the loss.
        gradients: The gradients of its parameters.
        spans: What it did in a profiled step.
        logits: The output of each micro-batch in an evaluation; None on a stage without it.
        numel: The number of its parameters' elements.
        state_names: The names in its state.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    spans: list[Span]
    logits: list[Tensor | None]
    numel: int
    state_names: set[str]


def _run_stage(rank: int, options: dict[str, Any]) -> StageResult:
    layout = choose("pipeline", 2)
    parallel: Any = curves.parallelize_trial(_trial(), layout, Options(**options), CPU)
    batches = _micro_batches()
    losses = []
    for _ in range(2):  # stages learn shapes in the first step and know them in the second
        parallel.inner.zero_grad()
        loss = parallel.forward_backward(batches, WEIGHTS, language_loss, scale=4.0)
        losses.append(float(loss))
    gradients = {}
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return StageResult(
        losses=losses if parallel.has_loss else [],
        gradients=gradients,
        spans=parallel.profile(lambda: parallel.forward_backward(batches, WEIGHTS, language_loss)),
        logits=[parallel.forward(lambda model, batch: model(batch[0]), batch) for batch in batches],
        numel=sum(p.numel() for p in parallel.parameters()),
        state_names=set(parallel.model_state()),
    )


@pytest.mark.alone
@pytest.mark.parametrize(
    "options",
    [options if options["schedule"] in UNLIKE else slow(options) for options in ALL_SCHEDULES],
    ids=str,
)
def test_one_step_of_every_schedule_with_a_smaller_last_micro_batch(
    options: dict[str, Any],
) -> None:
    stages = run_distributed(_run_stage, 2, options)
    model = _trial().build()
    batches = _micro_batches()
    losses = [language_loss(model, batch) for batch in batches]
    total = torch.stack([w * loss for w, loss in zip(WEIGHTS, losses)]).sum()
    (4.0 * total).backward()

    _check_parameters_of_stages(stages, model)
    # A folded pipeline computes the loss on its first stage.
    with_loss, without_loss = stages if options["schedule"] == "zbv" else reversed(stages)
    assert with_loss.losses == [pytest.approx(total.item(), rel=1e-6)] * 2
    assert without_loss.losses == []
    assert without_loss.logits == [None] * len(batches)
    for batch, logits in zip(batches, with_loss.logits):
        expected = model(batch[0]).detach()
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    chunks = 2 if options in SEVERAL_CHUNKS else 1
    for rank, stage in enumerate(stages):
        _check_spans(stage.spans, stage=rank, chunks=chunks)


def _check_parameters_of_stages(stages: list[StageResult], model: nn.Module) -> None:
    """Compare gradients with those of the whole model, which each stage has a part of."""
    parameters = dict(model.named_parameters())
    names = set()
    for stage in stages:
        for name, gradient in stage.gradients.items():
            expected = parameters[name].grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=name)
            names.add(name)
        assert stage.numel < 0.75 * sum(p.numel() for p in parameters.values())
    assert names == parameters.keys(), "both stages have the tied weight under its first name"
    assert set.union(*(stage.state_names for stage in stages)) == set(model.state_dict())


def _check_spans(spans: list[Span], *, stage: int, chunks: int) -> None:
    """Check that a profile has everything that a stage does, in order."""
    kinds = Counter(span.kind for span in spans)
    assert kinds["F"] == kinds["B"] == len(ROWS) * chunks
    assert kinds["REDUCE"] == 1
    assert kinds["SEND"] > 0
    assert kinds["RECV"] > 0
    for span in spans:
        assert span.stage == stage
        assert span.start <= span.end
    blocks = [span for span in spans if span.kind == "BLOCK"]
    assert blocks
    for block in blocks:
        (forward,) = (
            span
            for span in spans
            if span.kind == "F" and span.start <= block.start and block.end <= span.end
        )
        assert (forward.micro_batch, forward.chunk) == (block.micro_batch, block.chunk)
    for span, next_span in itertools.pairwise(span for span in spans if span.kind != "BLOCK"):
        assert span.end <= next_span.start


# --- what a stage holds ---------------------------------------------------------------------------


class ActivationCounter:
    """Counts the activations of one layer in each block that are in memory.

    Args:
        parallel: A pipeline, whose blocks have a layer norm1.
    """

    def __init__(self, parallel: Any) -> None:
        self.counts: list[int] = []
        """After each instruction of the schedule."""
        self._storages: list[StorageWeakRef] = []
        for path, module in parallel.inner.named_modules():
            if path.endswith("norm1"):
                module.register_forward_hook(self._remember)
        for name in ("_forward", "_backward", "_weight_gradients"):
            instruction = getattr(parallel.runtime, name)
            counted = functools.partial(self._run_and_count, instruction)
            setattr(parallel.runtime, name, counted)

    def _remember(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._storages.append(StorageWeakRef(output.untyped_storage()))

    def _run_and_count(self, instruction: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        instruction(*args, **kwargs)
        self.counts.append(sum(not storage.expired() for storage in self._storages))


def _most_activations(rank: int, schedules: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """For each schedule, the most activations in memory, each of one micro-batch and chunk.

    Returns:
        (counted, by formula).
    """
    results = []
    tokens, targets = language_batch(0)
    micro_batches = [(tokens[:1], targets[:1])] * 4
    for options in schedules:
        layout = choose("pipeline", 2)
        parallel: Any = curves.parallelize_trial(_trial(), layout, Options(**options), CPU)
        runtime = parallel.runtime
        counter = ActivationCounter(parallel)
        parallel.forward_backward(micro_batches, [1 / 4] * 4, language_loss)
        assert not runtime.in_flight
        assert not runtime.deferred_work
        assert counter.counts[-1] == 0
        blocks_per_chunk = 4 // runtime.placement.parts
        by_formula = activations_by_formula(
            options["schedule"],
            stages=2,
            micro_batches=4,
            chunks=runtime.placement.chunks,
            stage=rank,
        )
        results.append((max(counter.counts) / blocks_per_chunk, by_formula))
    return results


@pytest.mark.alone
@pytest.mark.parametrize(
    "schedules",
    [
        [options for options in ALL_SCHEDULES if options["schedule"] in UNLIKE],
        slow([options for options in ALL_SCHEDULES if options["schedule"] not in UNLIKE]),
    ],
    ids=["unlike", "others"],
)
def test_each_stage_holds_as_many_activations_as_the_formula_says(
    schedules: list[dict[str, Any]],
) -> None:
    for rank, results in enumerate(run_distributed(_most_activations, 2, schedules)):
        for options, (counted, by_formula) in zip(schedules, results, strict=True):
            assert counted == by_formula, (options["schedule"], rank)


# --- types ----------------------------------------------------------------------------------------


class CastCounter(OperationMode):
    """Counts how often each float32 matrix is cast, by the address of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            source = args[0]
            if source.dim() == 2 and source.dtype == torch.float32:
                self.counts[source.data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Types:
    """The types that a stage uses.

    Attributes:
        casts: How often the parameter that is cast most often is cast in a step.
        sent_in_training: (F or B, the type) of what it sends.
        sent_in_evaluation: The same in an evaluation.
        block_inputs: What its blocks get.
        gathered: Gathered matrices, if they are sharded.
        gradients: Their gradients.
    """

    casts: int = 0
    sent_in_training: set[tuple[str, torch.dtype]] = field(default_factory=set)
    sent_in_evaluation: set[tuple[str, torch.dtype]] = field(default_factory=set)
    block_inputs: set[torch.dtype] = field(default_factory=set)
    gathered: set[torch.dtype] = field(default_factory=set)
    gradients: set[torch.dtype] = field(default_factory=set)


def _types_of_stage(rank: int, strategy: str, workers: int, options: dict[str, Any]) -> Types:
    layout = choose(strategy, workers, pp=2)
    parallel: Any = curves.parallelize_trial(_trial(), layout, Options(**options), CPU)
    types = Types()
    sent = _record_sent_types(parallel.runtime.comm)
    if parallel.runtime.sync is not None:
        _record_gathered_types(parallel.runtime.sync, types)
    for path, module in parallel.inner.named_modules():
        parent, _, _ = path.rpartition(".")
        if parent == "blocks":
            module.register_forward_pre_hook(
                lambda _, inputs: types.block_inputs.add(inputs[0].dtype)
            )
    batch = language_batch(0)
    for _ in range(2):  # stages learn shapes in the first step and know them in the second
        with CastCounter() as casts:
            parallel.forward_backward([batch] * 4, [1 / 4] * 4, language_loss)
    addresses = {local(p).data_ptr() for p in parallel.inner.parameters()}
    types.casts = max((casts.counts[address] for address in addresses), default=0)
    types.sent_in_training = set(sent)
    sent.clear()
    parallel.forward(language_loss, batch)
    types.sent_in_evaluation = sent
    return types


def _record_sent_types(comm: Any) -> set[tuple[str, torch.dtype]]:
    """(F or B, the type) of all tensors that are sent from now on."""
    sent = set()
    send = comm.send

    def recorded_send(kind: str, stage: int, tensors: list[Tensor], message: Any = None) -> None:
        if message is not None:
            for tensor in tensors:
                sent.add((kind, tensor.dtype))
        send(kind, stage, tensors, message)

    comm.send = recorded_send
    return sent


def _record_gathered_types(sync: Any, types: Types) -> None:
    """Record the types of gathered matrices when a chunk is done, and of gradients when sent."""
    chunk_done = sync.chunk_done
    send = sync._send

    def recorded_chunk_done(chunk: int) -> None:
        for parameter in sync._unsharded.values():
            if parameter.dim() > 1:
                types.gathered.add(parameter.dtype)
        chunk_done(chunk)

    def recorded_send(bucket: list[str]) -> None:
        for name in bucket:
            gradient = sync._unsharded[name].grad
            if gradient is not None and gradient.dim() > 1:
                types.gradients.add(gradient.dtype)
        send(bucket)

    sync.chunk_done = recorded_chunk_done
    sync._send = recorded_send


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "workers", "options", "reduced"),
    [
        slow("pipeline", 2, {}, None),
        slow("pipeline", 2, BF16, None),
        ("pipeline", 2, BF16 | ZB_H1, None),
        slow("pipeline", 2, BF16 | ZB_H1 | {"activation_checkpointing": "full"}, None),
        slow("tensor+pipeline", 4, BF16, None),
        slow("tensor+pipeline", 4, BF16 | ZB_H1, None),
        slow("fsdp+pipeline", 4, BF16 | {"reduce_dtype": "fp32"}, torch.float32),
        slow("fsdp+pipeline", 4, BF16 | {"reduce_dtype": "bf16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_weights_are_cast_once_a_step_and_activations_cross_in_16_bits(
    strategy: str, workers: int, options: dict[str, Any], reduced: torch.dtype | None
) -> None:
    """Blocks get activations in float32 again."""
    compute_dtype = torch.bfloat16 if options else torch.float32
    results = run_distributed(_types_of_stage, workers, strategy, workers, options)
    for rank, types in enumerate(results):
        is_first_stage = rank < workers // 2
        assert types.sent_in_training == {("F" if is_first_stage else "B", compute_dtype)}
        # In an evaluation a stage does not know which tensors are activations.
        expected = {("F", torch.float32)} if is_first_stage else set()
        assert types.sent_in_evaluation == expected
        assert types.block_inputs == {torch.float32}
        if reduced is None:
            assert types.casts == (1 if "precision" in options else 0)
        else:
            assert types.casts <= 1
            assert types.gathered == {compute_dtype}
            assert types.gradients == {reduced}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_matrices_wait_for_the_second_half_of_backward(recompute: str) -> None:
    block = Block(WIDTH, HEADS)
    deferred = DeferredWeightGrad()
    deferred.wrap(block)
    activation_checkpointing.apply(block, [], recompute)
    y = block(torch.randn(2, 5, WIDTH, requires_grad=True))
    work: list[Any] = []
    with deferred.deferring_to(work):
        y.square().sum().backward()
    for parameter in block.parameters():
        is_matrix = parameter.dim() > 1
        assert (parameter.grad is None) == is_matrix
    finish(work)
    for parameter in block.parameters():
        assert parameter.grad is not None


def _record_sharded_stage(rank: int) -> tuple[list[list[bool]], list[int], float]:
    """A step of a stage of three sharded blocks, each of which is a bucket.

    Returns:
        Which blocks are gathered when each is called; how many buckets have been sent when backward
        leaves each block; and the largest error of gradients.
    """
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    stage = nn.Sequential(*blocks)
    weights = [block.weight.detach().clone() for block in blocks]
    for weight in weights:
        dist.broadcast(weight, 0)
    with torch.no_grad():
        for block, weight in zip(blocks, weights):
            block.weight.copy_(weight)
    mesh = named_mesh("cpu", {"dp_shard": 2})
    units = shard_without_hooks([*blocks, stage], mesh, placement=lambda _: Shard(0))
    by_chunk = {0: list(stage.named_parameters())}
    sync = ShardedGradients(stage, units, by_chunk, mesh=mesh, options=Options(bucket_mb=0))
    gathered: list[list[bool]] = []
    sent: list[int] = []

    def note_backward(_: Tensor) -> None:
        sent.append(len(sync._sent))

    def note_forward(_: nn.Module, args: tuple[Tensor]) -> None:
        gathered.append([not isinstance(block.weight, DTensor) for block in blocks])
        args[0].register_hook(note_backward)

    for block in blocks:
        block.register_forward_pre_hook(note_forward)
    x = torch.randn(2, 4, requires_grad=True)
    sync.gather()
    y = stage(x)
    sync.last_backward(0)
    y.square().sum().backward()
    sync.chunk_done(0)
    sync.finish()

    expected = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    errors = []
    for layer, weight in zip(expected, weights):
        layer.weight = nn.Parameter(weight)  # type: ignore[assignment]
    expected(x.detach()).square().sum().backward()
    for layer, block in zip(expected, blocks):
        mean = torch.as_tensor(layer.weight.grad)
        dist.all_reduce(mean)
        difference = cast(DTensor, block.weight.grad).full_tensor() - mean / 2
        errors.append(float(difference.abs().max()))
    return gathered, sent, max(errors)


@pytest.mark.alone
def test_a_sharded_stage_gathers_and_scatters_block_by_block() -> None:
    for gathered, sent, error in run_distributed(_record_sharded_stage, 2):
        assert gathered == [[True, False, False], [True, True, False], [True, True, True]]
        assert sent[:2] == [1, 2], "backward leaves the last block first"
        assert error < 1e-6
