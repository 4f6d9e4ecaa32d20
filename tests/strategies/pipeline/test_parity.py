"""A pipeline trains what one device trains: every schedule, alone and combined, any chain; what a stage holds and sends
meanwhile."""

import functools
import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from strategies import activation_checkpointing
from strategies.grad_sync import local
from strategies.layout import Layout
from strategies.parallelize import Options, choose
from strategies.pipeline.schedules import SCHEDULES
from strategies.pipeline.simulate import activations_by_formula
from strategies.pipeline.weight_grad import DeferredWeightGrad, finish
from strategies.torch_internals import OperationMode
from tests.pool import run_distributed
from tests.strategies.models import BF16, CPU, HEADS, WIDTH, Block, gpt_trial, language_batch, language_loss, slow
from tests.strategies.pipeline.test_trace import CHAINS, chain_trial

TOLERANCE = 5e-6
ALL: list[dict[str, Any]] = [{"schedule": name, "chunks": 2 if name == "interleaved_1f1b" else 1} for name in SCHEDULES]
"""Every schedule."""
IN_CHUNKS = [given for given in ALL if given["schedule"] in ("interleaved_1f1b", "zbv")]
ZB_H1 = {"schedule": "zb_h1"}
OTHERWISE = [ZB_H1 | {"activation_checkpointing": "selective"}, ZB_H1 | {"precision": "bf16"}]
"""With whole recomputation: tests/strategies/test_parity.py."""
OF_CHAINS = list(zip(CHAINS, itertools.cycle(({}, ZB_H1))))
OVER_FOUR = [("skips", {}), ("t5", ZB_H1)]
"""A value skips ahead of several stages."""


def _trial(name: str = "") -> Trial:
    """Of a chain, or a GPT with tied embeddings; with accumulation and clipping."""
    return chain_trial(name) if name else gpt_trial(tied=True, layers=4, micro_batches=4, clip=0.5, steps=2)


@functools.cache
def _truth(name: str) -> Curve:
    return curves.train(_trial(name), Layout("single"), Options(), CPU)


def _train(_: int, name: str, workers: int, pp: int, asked: list[Any]) -> list[Curve]:
    """The curve of each trial under its options, in one set of processes."""
    layout = choose(name, workers, pp=pp)
    return [curves.train(_trial(trial), layout, Options(**options), CPU) for trial, options in asked]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "workers", "pp", "asked"),
    [
        pytest.param("pipeline", 2, 2, [("", options) for options in OTHERWISE], id="halves"),
        slow("fsdp+pipeline", 4, 2, [("", options) for options in IN_CHUNKS], id="sharded chunks"),
        pytest.param("pipeline", 2, 2, OF_CHAINS, id="chains"),
        slow("pipeline", 4, 4, OVER_FOUR, id="chains of 4"),
    ],
)
def test_halves_sharded_chunks_and_any_chain_without_hints(name: str, workers: int, pp: int, asked: list[Any]) -> None:
    """A step of every schedule: below; more are rows of tests/strategies/test_parity.py, and of `trireme parity`."""
    answers = run_distributed(_train, workers, name, workers, pp, asked, timeout=240)
    for curve, (trial, options) in zip(answers[0], asked):
        found = curves.difference(_truth(trial), curve)
        if "precision" in options:
            assert 1e-6 < found.loss < 3e-3, "computed in 16 bits, and not far off"
        else:
            assert found.loss <= TOLERANCE and found.weights <= 1e-3, (trial, options, found)
            assert trial or found.norm <= 10 * TOLERANCE, (options, found)


# --- one step, looked at closely ----------------------------------------------------------------------------------

ROWS = [2, 2, 2, 1]
"""Of the micro-batches: the last is smaller."""
WEIGHTS = [n / sum(ROWS) for n in ROWS]


def _batches() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 30, (2, n, 8), generator=generator)) for n in ROWS]


def _one_step(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    parallel = curves.parallelize_trial(_trial(), choose("pipeline", 2), Options(**options), CPU)
    batches, losses = _batches(), []
    for _ in range(2):  # shapes are new in the first step, known in the second
        parallel.inner.zero_grad()
        losses.append(float(parallel.forward_backward(batches, WEIGHTS, language_loss, scale=4.0)))
    return {
        "losses": losses if parallel.has_loss else [],
        "gradients": {name: p.grad.clone() for name, p in parallel.named_parameters() if p.grad is not None},
        "spans": parallel.profile(lambda: parallel.forward_backward(batches, WEIGHTS, language_loss)),
        "evaluated": [parallel.forward(lambda model, batch: model(batch[0]), batch) for batch in batches],
        "own": sum(p.numel() for p in parallel.parameters()),
        "names": set(parallel.model_state()),
    }


@pytest.mark.alone
@pytest.mark.parametrize("options", ALL, ids=str)
def test_every_schedule_with_a_smaller_last_micro_batch_evaluation_and_a_profile(options: dict[str, Any]) -> None:
    stages, model, batches = run_distributed(_one_step, 2, options), _trial().build(), _batches()
    total = sum(weight * language_loss(model, batch) for weight, batch in zip(WEIGHTS, batches))
    (4.0 * total).backward()
    whole, seen = dict(model.named_parameters()), set()
    for stage in stages:
        for name, gradient in stage["gradients"].items():
            torch.testing.assert_close(gradient, whole[name].grad, rtol=1e-4, atol=1e-6, msg=name)
            seen.add(name)
    assert seen == whole.keys(), "the tied table under its first name, on both stages"
    assert set.union(*(stage["names"] for stage in stages)) == set(model.state_dict())
    assert all(stage["own"] < 0.75 * sum(p.numel() for p in whole.values()) for stage in stages)
    last = 0 if options["schedule"] == "zbv" else 1  # folded, the first stage computes the loss
    assert stages[last]["losses"] == [pytest.approx(total.item(), rel=1e-6)] * 2 and not stages[1 - last]["losses"]
    for rank, stage in enumerate(stages):
        kinds = Counter(span.kind for span in stage["spans"])
        assert kinds["F"] == kinds["B"] == 4 * (1 + (options in IN_CHUNKS))
        assert kinds["REDUCE"] == 1 and kinds["SEND"] and kinds["RECV"]
        assert all(span.stage == rank and span.start <= span.end for span in stage["spans"])
        assert all(a.end <= b.start for a, b in itertools.pairwise(stage["spans"]))
    for batch, found in zip(batches, stages[last]["evaluated"]):
        torch.testing.assert_close(found, model(batch[0]).detach(), rtol=1e-5, atol=1e-5)
    assert stages[1 - last]["evaluated"] == [None] * 4


# --- what is held, and as which type --------------------------------------------------------------------------------


def _counted(work: Any, kept: list[StorageWeakRef], held: list[int], *args: Any, **kwargs: Any) -> None:
    work(*args, **kwargs)
    held.append(sum(not each.expired() for each in kept))


def _held(rank: int) -> list[tuple[float, int]]:
    """By schedule the most micro-batches, once for each chunk, that are in memory after an instruction: counted by what
    a layer in each block keeps, and by formula."""
    found, (tokens, targets) = [], language_batch(0)
    for options in ALL:
        parallel: Any = curves.parallelize_trial(_trial(), choose("pipeline", 2), Options(**options), CPU)
        runtime, kept, held = parallel.runtime, list[StorageWeakRef](), list[int]()
        for path, module in parallel.inner.named_modules():
            if path.endswith("norm1"):
                module.register_forward_hook(lambda _, __, y, to=kept: to.append(StorageWeakRef(y.untyped_storage())))
        for name in ("_forward", "_backward", "_weight_gradients"):
            setattr(runtime, name, functools.partial(_counted, getattr(runtime, name), kept, held))
        parallel.forward_backward([(tokens[:1], targets[:1])] * 4, [1 / 4] * 4, language_loss)
        assert not runtime.in_flight and not runtime.deferred_work and held[-1] == 0
        numbers = {"stages": 2, "micro_batches": 4, "chunks": runtime.placement.chunks, "stage": rank}
        formula = activations_by_formula(options["schedule"], **numbers)
        found.append((max(held) / (4 // runtime.placement.parts), formula))
    return found


@pytest.mark.alone
def test_activations_in_memory_are_as_many_as_the_formula_says() -> None:
    for rank, answer in enumerate(run_distributed(_held, 2)):
        for given, (held, formula) in zip(ALL, answer):
            assert held == formula, (given["schedule"], rank)


class Casts(OperationMode):
    """How often a matrix in float32 is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].dtype == torch.float32:
            self.times[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def _types(_: int, name: str, workers: int, options: dict[str, Any]) -> tuple[int, dict[str, set[Any]]]:
    """The most that a parameter is cast in a step; the types of what is sent in training and in evaluation, of what
    blocks take in, of gathered matrices and of their gradients."""
    parallel: Any = curves.parallelize_trial(_trial(), choose(name, workers, pp=2), Options(**options), CPU)
    batch, found, send, sync = language_batch(0), defaultdict(set), parallel.runtime.comm.send, parallel.runtime.sync

    def sending(kind: str, stage: int, tensors: list[Tensor], message: Any = None) -> None:
        found["sent"].update((kind, tensor.dtype) for tensor in tensors if message is not None)
        send(kind, stage, tensors, message)

    def done(chunk: int, kept: Any = sync and sync.chunk_done) -> None:
        matrices = [p for p in sync._unsharded.values() if p.dim() > 1]
        found["gathered"].update(p.dtype for p in matrices)
        found["gradients"].update(p.grad.dtype for p in matrices if p.grad is not None)
        kept(chunk)

    parallel.runtime.comm.send = sending
    if sync:
        sync.chunk_done = done
    for path, module in parallel.inner.named_modules():
        if path.rpartition(".")[0] == "blocks":
            module.register_forward_pre_hook(lambda _, inputs: found["taken"].add(inputs[0].dtype))
    for _ in range(2):  # shapes are new in the first step, known in the second
        with Casts() as casts:
            parallel.forward_backward([batch] * 4, [1 / 4] * 4, language_loss)
    own = {local(p).data_ptr() for p in parallel.inner.parameters()}
    found["trained"] = found.pop("sent")
    parallel.forward(language_loss, batch)
    return max((times for at, times in casts.times.items() if at in own), default=0), found


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "workers", "options", "reduced"),
    [
        ("pipeline", 2, {}, None),
        ("pipeline", 2, BF16, None),
        ("pipeline", 2, BF16 | ZB_H1, None),
        slow("pipeline", 2, BF16 | ZB_H1 | {"activation_checkpointing": "full"}, None),
        slow("tensor+pipeline", 4, BF16, None),
        slow("tensor+pipeline", 4, BF16 | ZB_H1, None),
        slow("fsdp+pipeline", 4, BF16 | {"reduce_dtype": "fp32"}, torch.float32),
        ("fsdp+pipeline", 4, BF16 | {"reduce_dtype": "bf16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_weights_are_cast_once_and_what_crosses_has_the_type_of_arithmetic_and_is_float32_again(
    name: str, workers: int, options: dict[str, Any], reduced: torch.dtype | None
) -> None:
    wire = torch.bfloat16 if options else torch.float32
    for rank, (casts, found) in enumerate(run_distributed(_types, workers, name, workers, options)):
        first = rank < workers // 2
        assert found["trained"] == {("F" if first else "B", wire)}
        assert found["sent"] == ({("F", torch.float32)} if first else set()), "nothing tells an activation from a mask"
        assert found["taken"] == {torch.float32}
        if reduced is None:
            assert casts == len(options.keys() & BF16), "not once for each micro-batch in flight"
        else:
            assert casts <= 1 and found["gathered"] == {wire} and found["gradients"] == {reduced}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_matrices_wait_for_the_second_half_of_backward(recompute: str) -> None:
    """That they are then those of one backward: above."""
    block, later = Block(WIDTH, HEADS), DeferredWeightGrad()
    later.wrap(block)
    activation_checkpointing.apply(block, [], recompute)
    y = block(torch.randn(2, 5, WIDTH, requires_grad=True))
    work: list[Any] = []
    with later.deferring_to(work):
        y.square().sum().backward()
    for parameter in block.parameters():
        assert (parameter.grad is None) == (parameter.dim() > 1)
    finish(work)
    assert all(parameter.grad is not None for parameter in block.parameters())
