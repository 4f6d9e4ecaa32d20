"""A stage: the model's own code on one worker, which computes only some of its blocks.

A stage runs the loss function and the model as they are. The blocks of other stages, and the
modules around them, do not compute there. Such a module returns its output if that was sent to this
stage, and otherwise a placeholder (placeholder.py). After its last block a stage leaves the model's
code by an exception. So every stage has whatever the code computes from the batch, such as masks
and positions, and no model has to be rewritten or annotated.

Modules and parameters keep their names. The parameters of other stages are not in memory. A
parameter that several stages use, such as an embedding that is also the head's matrix, is on each
of them, and its gradients are added up (grad_sync.py).

The model is divided into *parts* of consecutive blocks: one for each stage, or several, which are
the stage's chunks.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from strategies.dims import LayoutError
from strategies.pipeline.interface import PipelineStage, Placeholders, Signature, TimedBlock
from strategies.pipeline.placeholder import (
    CallOutput,
    KeptTensor,
    ParameterValue,
    PlaceholderTensor,
    Source,
    hide_parameter,
)
from strategies.pipeline.trace import (
    Trace,
    Tracer,
    call_name,
    path_of_call,
    remember_in_evaluation,
    traced_modules,
)
from strategies.tree import clone_tensors, tree_leaves, tree_map

T = TypeVar("T")


class _PartDone(BaseException):
    """Leaves the model's code after the part's last block; no `except Exception` catches it."""


# --- who computes what ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """Which part of a pipeline computes what.

    Args:
        sizes: Number of blocks of each part.
        part_of: The name of each call → the part that does it.
        last_blocks: The last block of each part.
        sends: For each part but the last, the calls whose outputs it sends to the next, in order.
        owners: The name of each parameter → the parts that use it.
    """

    sizes: tuple[int, ...]
    part_of: dict[str, int]
    last_blocks: tuple[str, ...]
    sends: tuple[tuple[str, ...], ...]
    owners: dict[str, frozenset[int]]

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.sizes)


def assign_stages(tracer: Tracer, trace: Trace, sizes: tuple[int, ...]) -> StageAssignment:
    """Give every call of a trace to a part.

    A module around the blocks goes with the block that follows it, and after the last block with
    that one.

    Args:
        tracer: Made the trace.
        trace: One forward of the model, whose blocks form a chain.
        sizes: Number of blocks of each part.

    Raises:
        LayoutError: Parts share what cannot be sent.
    """
    part_of, last_blocks = _assign_calls(trace, sizes)
    final_part = len(sizes) - 1
    last_user: dict[str, int] = {}  # call → the last part that needs its output
    owners: dict[str, set[int]] = {name: set() for name in tracer.parameter_sizes}

    def use(sources: Iterable[Source], part: int) -> None:
        for source in sources:
            match source:
                case ParameterValue(name):
                    owners[name].add(part)
                case KeptTensor():
                    _require_same_part(source, part_of, part)
                case CallOutput(call):
                    last_user[call] = max(last_user.get(call, 0), part)

    for call in trace.calls:
        use(call.uses, part_of[call.name])
        for name in tracer.parameters_of[call.path]:
            owners[name].add(part_of[call.name])
    use(trace.last_uses, final_part)

    def is_sent_by(part: int, call: str) -> bool:
        """Whether the call's output is there after the part, and a later part needs it."""
        return part_of[call] <= part < last_user.get(call, -1)

    sends = tuple(
        tuple(call.name for call in trace.calls if is_sent_by(part, call.name))
        for part in range(final_part)
    )
    return StageAssignment(
        sizes=sizes,
        part_of=part_of,
        last_blocks=last_blocks,
        sends=sends,
        # A parameter that no forward uses has to be somewhere: it is on the first part.
        owners={name: frozenset(parts or {0}) for name, parts in owners.items()},
    )


def _assign_calls(trace: Trace, sizes: tuple[int, ...]) -> tuple[dict[str, int], tuple[str, ...]]:
    """(call → part, the last block of each part)."""
    final_part = len(sizes) - 1
    ends = list(itertools.accumulate(sizes))
    part_of: dict[str, int] = {}
    last_blocks: list[str] = []
    part = 0
    blocks = 0
    for call in trace.calls:
        part_of[call.name] = part
        if call.is_block:
            blocks += 1
            if blocks == ends[part]:
                last_blocks.append(call.name)
                part = min(part + 1, final_part)
    return part_of, tuple(last_blocks)


def _require_same_part(kept: KeptTensor, part_of: dict[str, int], part: int) -> None:
    """Raises LayoutError if a tensor in a module's attribute is read where the module is not."""
    if part_of[kept.call] != part:
        raise LayoutError(
            f"{kept.call} leaves the tensor {kept.attribute} in an attribute, which is read on "
            "another stage of the pipeline: let it return the tensor from forward, or write "
            "strategy=fsdp"
        )


def require_chain(trace: Trace, blocks: list[str]) -> None:
    """Check that the blocks follow one another.

    Raises:
        LayoutError: A block is not called, or its input was not made from the output of the block
            before it.
    """
    called = [call.path for call in trace.blocks]
    unused = [name for name in blocks if name not in called]
    if unused:
        raise LayoutError(
            f"the model never calls its block {unused[0]}, so its blocks do not form a chain: name "
            "those it calls"
        )
    ancestors: dict[str, frozenset[str]] = {}  # call → all calls that its input was made from
    previous_block = ""
    for call in trace.calls:
        inputs = {source.call for source in call.uses if isinstance(source, CallOutput)}
        further = (ancestors.get(name, frozenset()) for name in inputs)
        ancestors[call.name] = frozenset(inputs).union(*further)
        if not call.is_block:
            continue
        if previous_block and previous_block not in ancestors[call.name]:
            used_blocks = [name for name in called if name in ancestors[call.name]]
            fork = f"after {used_blocks[-1]}" if used_blocks else "at its input"
            raise LayoutError(
                f"the model's blocks do not form a chain: {call.path} does not use the output of "
                f"{previous_block}, it branches {fork}: name blocks that follow each other, or "
                "write strategy=fsdp"
            )
        previous_block = call.name


def remove_other_parts(
    module: nn.Module,
    blocks: list[str],
    *,
    assignment: StageAssignment,
    tracer: Tracer,
    parts: frozenset[int],
) -> None:
    """Take what other stages hold out of a model, in place.

    Args:
        module: The model.
        blocks: The names of its blocks.
        assignment: Which part holds what.
        tracer: Has traced the model.
        parts: The parts that stay.
    """
    for path, owner in list(module.named_modules()):
        own_parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(own_parameters):
            canonical = tracer.canonical_name[f"{path}.{name}".lstrip(".")]
            if not assignment.owners[canonical] & parts:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                hide_parameter(owner, name, PlaceholderTensor.like(empty, [], tracer.device))
    for path in traced_modules(module, blocks):
        if _is_here(path, assignment, tracer=tracer, parts=parts):
            continue
        for owner in module.get_submodule(path).modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                delattr(owner, name)
                setattr(owner, name, PlaceholderTensor.like(buffer, [], tracer.device))


def _is_here(
    path: str, assignment: StageAssignment, *, tracer: Tracer, parts: frozenset[int]
) -> bool:
    """Whether a stage with these parts keeps a module's buffers.

    Modules without parameters run on every stage. A module that is never called is on the stage of
    the first part.
    """
    calling = {part for name, part in assignment.part_of.items() if path_of_call(name) == path}
    if not tracer.parameters_of[path]:
        return True
    return bool((calling or {0}) & parts)


# --- running a part -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Forward:
    """One forward of one part.

    Args:
        part: The part.
        received: The outputs of other parts' calls that were sent to it.
        placeholders: The outputs of all calls, without data.
        sends: The calls whose outputs the part sends on.
        outputs: Those of them that the part has done so far.
        calls: How often each module has been called, by its path.
        timed_block: Times each of the part's blocks.
    """

    part: int
    received: dict[str, Any]
    placeholders: Placeholders
    sends: tuple[str, ...]
    timed_block: TimedBlock
    outputs: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class Stage(PipelineStage):
    """A model on one worker, and the running of its parts; PipelineStage says what methods do."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[str],
        *,
        assignment: StageAssignment,
        tracer: Tracer,
        parts: Iterable[int],
    ) -> None:
        """Let the modules of other parts do nothing, in place.

        Args:
            module: The model, without what other stages hold.
            blocks: The names of the whole model's blocks.
            assignment: Which part computes what.
            tracer: Traces the model for further kinds of batches.
            parts: The parts that this stage holds.
        """
        self._module = module
        self._assignment = assignment
        self._tracer = tracer
        self._parts = frozenset(parts)
        self._placeholders: dict[Signature, Placeholders] = {}
        self._assumed: dict[str, str] = {}
        """Blocks that are assumed to return one tensor → why."""
        self._forward: _Forward | None = None
        """The forward in progress."""
        remember_in_evaluation(module)
        # The fast path of nn.MultiheadAttention would read parameters of other stages' layers.
        torch.backends.mha.set_fastpath_enabled(False)
        for path in traced_modules(module, blocks):
            child = module.get_submodule(path)
            child.forward = self._in_its_part(
                path,
                child.forward,
                has_parameters=bool(tracer.parameters_of[path]),
                is_block=path in blocks,
            )

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def parts(self) -> frozenset[int]:
        return self._parts

    @property
    def state_names(self) -> frozenset[str]:
        return self._tracer.state_names

    def last_block(self, part: int) -> str:
        return self._assignment.last_blocks[part]

    def signature(self, batch: object) -> Signature:
        leaves = tree_leaves(batch)
        shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        return (*shapes, self._module.training, torch.is_grad_enabled())

    def placeholders(
        self, signature: Signature, function: Callable[[nn.Module, Any], object], batch: Any
    ) -> Placeholders:
        if signature not in self._placeholders:
            trace = self._tracer.trace(function, batch, self._module.training)
            names = [call.name for call in trace.calls]
            unknown = [name for name in names if name not in self._assignment.part_of]
            if unknown:
                raise LayoutError(
                    f"the model calls {unknown[0]} for this batch, which it did not for the first "
                    "one: a pipeline needs the same calls in every forward"
                )
            for call in trace.calls:
                if call.assumed_because:
                    self._assumed[call.name] = call.assumed_because
            self._placeholders[signature] = {call.name: call.output for call in trace.calls}
        return self._placeholders[signature]

    def run(
        self,
        part: int,
        function: Callable[[nn.Module, Any], T],
        batch: Any,
        *,
        placeholders: Placeholders,
        inputs: list[Tensor],
        timed_block: TimedBlock,
    ) -> tuple[T | None, list[Tensor]]:
        is_last = part == self._assignment.parts - 1
        if len(self._parts) > 1:
            # Each part runs the model's code from its beginning, which may change the batch in
            # place.
            batch = clone_tensors(batch)
        received_calls = self._assignment.sends[part - 1] if part > 0 else ()
        sends = () if is_last else self._assignment.sends[part]
        forward = _Forward(
            part=part,
            received=_as_returned(received_calls, placeholders, inputs),
            placeholders=placeholders,
            sends=sends,
            timed_block=timed_block,
        )
        self._forward = forward
        answer: T | None = None
        try:
            answer = function(self._module, batch)
        except _PartDone:
            pass
        finally:
            self._forward = None
        if not is_last and answer is not None:
            raise LayoutError(
                f"the model did not call its block {self.last_block(part)} for this batch: a "
                "pipeline needs the same calls in every forward"
            )
        outputs = [forward.outputs.get(name, forward.received.get(name)) for name in sends]
        return answer, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def _in_its_part(
        self, path: str, forward: Callable[..., Any], *, has_parameters: bool, is_block: bool
    ) -> Callable[..., Any]:
        """A module's forward that does nothing in other parts than the module's own."""

        def forward_in_part(*args: Any, **kwargs: Any) -> Any:
            current = self._forward
            if current is None:
                return forward(*args, **kwargs)
            calls_before = current.calls.get(path, 0)
            current.calls[path] = calls_before + 1
            name = call_name(path, calls_before)
            if name in current.received:
                return current.received[name]
            is_in_part = self._assignment.part_of.get(name) == current.part
            if has_parameters and not is_in_part:
                return self._placeholder(current, name)
            if not is_in_part:
                return forward(*args, **kwargs)
            timed = current.timed_block(name) if is_block else contextlib.nullcontext()
            with timed:
                output = forward(*args, **kwargs)
            self._finish_call(current, name, output)
            return output

        return forward_in_part

    def _placeholder(self, current: _Forward, name: str) -> Any:
        """What another part's call returns, without data.

        Raises:
            LayoutError: The call was not traced, because code before it read values.
        """
        if name not in current.placeholders:
            raise LayoutError(
                f"the model calls {name} after code that reads values of tensors, which only the "
                "last stage of a pipeline has: write strategy=fsdp"
            )
        return current.placeholders[name]

    def _finish_call(self, current: _Forward, name: str, output: Any) -> None:
        if name in self._assumed:
            self._require_one_tensor(name, output)
        if name in current.sends:
            current.outputs[name] = output
        is_last_part = current.part == self._assignment.parts - 1
        if name == self.last_block(current.part) and not is_last_part:
            raise _PartDone

    def _require_one_tensor(self, name: str, output: Any) -> None:
        """Raises LayoutError unless a block returns what it was assumed to return."""
        if not isinstance(output, Tensor):
            raise LayoutError(
                f"the block {name} reads values of tensors ({self._assumed[name]}), so it was "
                "assumed to return one tensor like its first input, but it returns a "
                f"{type(output).__name__}: let it return one tensor, or write strategy=fsdp"
            )


def _as_returned(
    calls: Iterable[str], placeholders: Placeholders, tensors: Iterable[Tensor]
) -> dict[str, Any]:
    """Tensors that were sent, in the structures that the modules returned, by call."""
    remaining = iter(tensors)

    def next_tensor(leaf: object) -> object:
        return next(remaining) if isinstance(leaf, Tensor) else leaf

    return {call: tree_map(next_tensor, placeholders[call]) for call in calls}
