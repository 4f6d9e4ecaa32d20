"""What a stage holds while it works, counted in memory; blocks that turn out to be other than they were taken for."""

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.parity import curves
from strategies import activation_checkpointing
from strategies.blocks import find_blocks
from strategies.parallelize import Options, choose
from strategies.pipeline.apply import plan_stages
from strategies.pipeline.simulate import alive_by_formula
from strategies.pipeline.stage import Stage
from strategies.pipeline.weight_grad import DeferredWeightGrad, finish
from tests.pool import run_distributed
from tests.strategies.models import HEADS, WIDTH, Block, assert_refused, gpt_trial, language_batch, language_loss
from tests.strategies.pipeline.test_parity import ALL, some
from tests.strategies.pipeline.test_trace import Experts

CPU = torch.device("cpu")


class Watch:
    """Which micro-batches, once for each chunk, some input of a block is in memory of after an instruction."""

    def __init__(self, parallel: Any) -> None:
        self.runtime, self.most = parallel.runtime, 0
        self.tensors: dict[tuple[int, int], list[StorageWeakRef]] = {}
        self.now: tuple[int, int] | None = None
        for name, index in (("_forward", 1), ("_backward", 1), ("_weights", 0)):
            setattr(self.runtime, name, self._around(getattr(self.runtime, name), index, name == "_forward"))
        for path, module in parallel.inner.named_modules():
            if path.rpartition(".")[0] == "blocks":
                module.register_forward_pre_hook(functools.partial(self._note, path))

    def _around(self, method: Any, index: int, forward: bool) -> Any:
        def around(*args: Any) -> None:
            op, part = args[index : index + 2]
            self.now = (part, op.micro) if forward else None
            method(*args)
            if forward:
                self._add(self.runtime.alive[part, op.micro].outputs)
            held = [key for key, found in self.tensors.items() if any(not ref.expired() for ref in found)]
            self.most = max(self.most, len(held))

        return around

    def _note(self, path: str, _: nn.Module, inputs: Any) -> None:
        if self.now is not None and self.runtime.stage.assignment.part_of[path] == self.now[0]:
            self._add(inputs)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        """What one part puts out and the next of the same stage takes in is one tensor: the first one's."""
        assert self.now is not None
        others = {
            ref.cdata for key, refs in self.tensors.items() if key != self.now for ref in refs if not ref.expired()
        }
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.tensors.setdefault(self.now, []).extend(ref for ref in refs if ref.cdata not in others)


def _held(rank: int, stages: int, all_options: list[dict[str, Any]]) -> list[tuple[int, int]]:
    found, micros = [], 2 * stages
    for options in all_options:
        parallel: Any = curves.begin(gpt_trial(layers=2 * stages), choose("pipeline", stages), Options(**options), CPU)
        tokens, targets = language_batch(0)
        batches = [(tokens[:1], targets[:1])] * micros
        watch = Watch(parallel)
        parallel.forward_backward(batches, [1 / micros] * micros, language_loss)
        formula = alive_by_formula(parallel.schedule(micros), rank)
        found.append((watch.most, formula))
    return found


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_activations_in_memory_are_as_many_as_the_formula_says(stages: int) -> None:
    options = ALL if stages == 2 else some("1f1b", "interleaved_1f1b", "zbv")
    for rank, answer in enumerate(run_distributed(_held, stages, stages, options)):
        for given, (held, formula) in zip(options, answer):
            assert held == formula, (given["schedule"], rank)


def _sent(_: int, options: dict[str, Any]) -> tuple[set[Any], set[Any], list[Any]]:
    """What went from stage to stage in training, in evaluation; and what blocks then took in."""
    parallel: Any = curves.begin(gpt_trial(layers=4), choose("pipeline", 2), Options(**options), CPU)
    batch, sent, taken = language_batch(0), set[Any](), list[Any]()
    send = parallel.runtime.comm.send

    def watched(kind: str, stage: int, tensors: list[Tensor], key: Any = None) -> None:
        sent.update((kind, tensor.dtype) for tensor in tensors if key is not None)
        send(kind, stage, tensors, key)

    parallel.runtime.comm.send = watched
    for name, module in parallel.inner.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].dtype))
    for _ in range(2):  # shapes are new in the first step, known in the second
        parallel.forward_backward([batch] * 4, [1 / 4] * 4, language_loss)
    trained, evaluated = set(sent), sent
    evaluated.clear()
    parallel.forward(language_loss, batch)
    return trained, evaluated, taken


class Casts(TorchDispatchMode):
    """How often a matrix in float32 is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].dtype == torch.float32:
            self.times[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def _casts(_: int, name: str, workers: int, options: dict[str, Any]) -> tuple[int, set[Any], set[Any]]:
    """The most that a parameter is cast in a step; the types of gathered parameters and of their gradients."""
    parallel: Any = curves.begin(gpt_trial(layers=4), choose(name, workers, pp=2), Options(**options), CPU)
    sync = parallel.runtime.sync
    kept, gradients, parameters = sync.chunk_done if sync else None, set[Any](), set[Any]()

    def done(chunk: int) -> None:
        matrices = [p for p in sync.unsharded.values() if p.dim() > 1]
        parameters.update(p.dtype for p in matrices)
        gradients.update(p.grad.dtype for p in matrices if p.grad is not None)
        kept(chunk)

    if sync:
        sync.chunk_done = done
    own = {p.data_ptr() for p in parallel.inner.parameters()}
    with Casts() as casts:
        parallel.forward_backward([language_batch(0)] * 4, [1 / 4] * 4, language_loss)
    return max((times for at, times in casts.times.items() if at in own), default=0), parameters, gradients


def test_a_step_casts_each_weight_once_and_gathers_it_in_the_type_of_arithmetic() -> None:
    for times, _, _ in run_distributed(_casts, 2, "pipeline", 2, {"precision": "bf16"}):
        assert times == 1, "not once for each micro-batch in flight"
    for reduce, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        options = {"precision": "bf16", "reduce_dtype": reduce}
        for times, parameters, gradients in run_distributed(_casts, 4, "fsdp+pipeline", 4, options):
            assert times <= 1 and parameters == {torch.bfloat16} and gradients == {kind}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_activations_and_gradients_cross_in_the_type_of_arithmetic_and_are_float32_again(precision: str) -> None:
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    (trained0, evaluated0, taken0), (trained1, _, taken1) = run_distributed(_sent, 2, {"precision": precision})
    assert trained0 == {("F", wire)} and trained1 == {("B", wire)}
    assert evaluated0 == {("F", torch.float32)}, "without gradients nothing tells an activation from a mask"
    assert set(taken0 + taken1) == {torch.float32}


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
