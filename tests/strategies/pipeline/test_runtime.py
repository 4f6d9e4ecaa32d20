"""What a stage holds while it works, counted in memory; blocks that turn out to be other than they were taken for."""

import functools
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.parity import curves
from strategies import activation_checkpointing
from strategies.blocks import find_blocks
from strategies.grad_sync import local
from strategies.parallelize import Options, choose
from strategies.pipeline.apply import plan_stages
from strategies.pipeline.simulate import alive_by_formula
from strategies.pipeline.stage import Stage
from strategies.pipeline.weight_grad import DeferredWeightGrad, finish
from tests.pool import run_distributed
from tests.strategies.models import HEADS, WIDTH, Block, assert_refused, gpt_trial, language_batch, language_loss
from tests.strategies.pipeline.test_parity import ALL
from tests.strategies.pipeline.test_trace import Experts

CPU = torch.device("cpu")


def _counted(work: Any, kept: list[StorageWeakRef], held: list[int], *given: Any) -> None:
    work(*given)
    held.append(sum(not each.expired() for each in kept))


def _held(rank: int) -> list[tuple[float, int]]:
    """By schedule the most micro-batches, once for each chunk, that are in memory after an instruction: counted by what
    a layer in each block keeps, and by formula."""
    found, (tokens, targets) = [], language_batch(0)
    for options in ALL:
        parallel: Any = curves.begin(gpt_trial(layers=4), choose("pipeline", 2), Options(**options), CPU)
        runtime, kept, held = parallel.runtime, list[StorageWeakRef](), list[int]()
        for path, module in parallel.inner.named_modules():
            if path.endswith("norm1"):
                module.register_forward_hook(lambda _, __, y, to=kept: to.append(StorageWeakRef(y.untyped_storage())))
        for name in ("_forward", "_backward", "_weights"):
            setattr(runtime, name, functools.partial(_counted, getattr(runtime, name), kept, held))
        parallel.forward_backward([(tokens[:1], targets[:1])] * 4, [1 / 4] * 4, language_loss)
        assert not runtime.alive and not runtime.left and held[-1] == 0
        found.append((max(held) / (4 // runtime.placement.parts), alive_by_formula(parallel.schedule(4), rank)))
    return found


def test_activations_in_memory_are_as_many_as_the_formula_says() -> None:
    for rank, answer in enumerate(run_distributed(_held, 2)):
        for given, (held, formula) in zip(ALL, answer):
            assert held == formula, (given["schedule"], rank)


class Casts(TorchDispatchMode):
    """How often a matrix in float32 is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].dtype == torch.float32:
            self.times[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def _types(_: int, name: str, workers: int, options: dict[str, Any]) -> tuple[int, dict[str, set[Any]]]:
    """The most that a parameter is cast in a step; the types of what is sent in training and in evaluation, of what
    blocks take in, of gathered matrices and of their gradients."""
    parallel: Any = curves.begin(gpt_trial(layers=4), choose(name, workers, pp=2), Options(**options), CPU)
    batch, found, send, sync = language_batch(0), defaultdict(set), parallel.runtime.comm.send, parallel.runtime.sync

    def sending(kind: str, stage: int, tensors: list[Tensor], key: Any = None) -> None:
        found["sent"].update((kind, tensor.dtype) for tensor in tensors if key is not None)
        send(kind, stage, tensors, key)

    def done(chunk: int, kept: Any = sync and sync.chunk_done) -> None:
        matrices = [p for p in sync.unsharded.values() if p.dim() > 1]
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


@pytest.mark.parametrize(
    ("name", "workers", "wire", "options"),
    [
        ("pipeline", 2, torch.float32, {}),
        ("pipeline", 2, torch.bfloat16, {"precision": "bf16"}),
        ("tensor+pipeline", 4, torch.bfloat16, {"precision": "bf16"}),
        ("fsdp+pipeline", 4, torch.bfloat16, {"precision": "bf16", "reduce_dtype": "fp32"}),
        ("fsdp+pipeline", 4, torch.bfloat16, {"precision": "bf16", "reduce_dtype": "bf16"}),
    ],
    ids=str,
)
def test_weights_are_cast_once_and_what_crosses_has_the_type_of_arithmetic_and_is_float32_again(
    name: str, workers: int, wire: torch.dtype, options: dict[str, Any]
) -> None:
    answers = run_distributed(_types, workers, name, workers, options)
    for rank, (casts, found) in enumerate(answers):
        first = rank < workers // 2
        assert found["trained"] == {("F" if first else "B", wire)}
        assert found["sent"] == ({("F", torch.float32)} if first else set()), "nothing tells an activation from a mask"
        assert found["taken"] == {torch.float32}
        if "fsdp" not in name:
            assert casts == (wire != torch.float32), "not once for each micro-batch in flight"
        else:
            reduced = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["reduce_dtype"]]
            assert casts <= 1 and found["gathered"] == {wire} and found["gradients"] == {reduced}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_of_matrices_wait_for_the_second_half_of_backward(recompute: str) -> None:
    """That they are then those of one backward: test_parity.py."""
    block, later = Block(WIDTH, HEADS), DeferredWeightGrad()
    later.wrap(block)
    activation_checkpointing.apply(block, [], recompute)
    y = block(torch.randn(2, 5, WIDTH, requires_grad=True))
    later.waiting = []
    y.square().sum().backward()
    for parameter in block.parameters():
        assert (parameter.grad is None) == (parameter.dim() > 1)
    finish(later.waiting)
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_a_block_that_returns_other_than_it_was_taken_to_is_named() -> None:
    model, batch = Experts(), language_batch(0)
    first, forward = model.blocks[0], model.blocks[0].forward
    first.forward = lambda x: (forward(x), x)  # type: ignore[assignment]
    blocks = find_blocks(model)
    tracer, _, assignment = plan_stages(model, blocks, Options(), 2, (language_loss, batch), CPU)
    stage = Stage(model, blocks, assignment, tracer, [0])
    placeholders = stage.placeholders(stage.signature(batch), language_loss, batch)
    words = ["the block blocks.0 looks at numbers (", "but it returns a tuple: let it"]
    assert_refused(words, stage.run, 0, language_loss, batch, placeholders, [])
