"""A stage: the model's own code, of which this worker computes some consecutive blocks.

A stage runs the loss function and the model as they are. Blocks and modules that other stages own do nothing there:
one whose output was sent here returns it, any other returns a placeholder (trace.py), and after the last block of
its own a stage leaves the model's code by an exception. So masks, positions and whatever else the code makes of the
batch are there on every stage, and no model is rewritten or annotated.

Modules keep their names, and parameters theirs; those of other stages are not in memory. A parameter that several
stages use (an embedding that is the head's matrix too) is on each of them; the gradients are added (grad_sync.py).

The model is divided into *parts*, consecutive blocks each: one per stage, or several (the stage's chunks).
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies.dims import LayoutError
from strategies.parallel import Loss
from strategies.pipeline.trace import (
    LEFT,
    PlaceholderTensor,
    Trace,
    Tracer,
    hide,
    numbered,
    remember_in_evaluation,
    traced_modules,
)
from strategies.tree import tree_leaves, tree_map


class _PartDone(BaseException):
    """Leaves the model's code, because what follows is another stage's. (No model's `except` catches it.)"""


@dataclass(frozen=True)
class StageAssignment:
    """Which part of the pipeline does what. sizes: blocks per part."""

    sizes: tuple[int, ...]
    part_of: dict[str, int]
    """Call → part."""
    last: tuple[str, ...]
    """Each part's last block."""
    sends: tuple[tuple[str, ...], ...]
    """Calls whose outputs go from each part to the next, in order."""
    owners: dict[str, frozenset[int]]
    """Parameter → the parts that use it."""

    @property
    def parts(self) -> int:
        return len(self.sizes)


def assign(tracer: Tracer, trace: Trace, sizes: tuple[int, ...]) -> StageAssignment:
    """Gives every call to a part: blocks as `sizes` says; what is around them goes with the block that follows, what
    follows the last block with it."""
    ends = list(itertools.accumulate(sizes))
    part_of: dict[str, int] = {}
    last: list[str] = []
    part = done = 0
    for call in trace.calls:
        part_of[call.name] = part
        if call.is_block:
            done += 1
            if done == ends[part]:
                last.append(call.name)
                part = min(part + 1, len(sizes) - 1)
    final = len(sizes) - 1
    reach: dict[str, int] = {}  # call → the last part that needs its output
    owners: dict[str, set[int]] = {name: set() for name in tracer.sizes}
    for uses, part in [*((call.uses, part_of[call.name]) for call in trace.calls), (trace.last_uses, final)]:
        for source in uses:
            if source.startswith("="):
                owners[source[1:]].add(part)
            elif source.startswith(LEFT):
                _require_one_part(source, part_of, part)
            else:
                reach[source] = max(reach.get(source, 0), part)
    for call in trace.calls:
        for name in tracer.held[call.path]:
            owners[name].add(part_of[call.name])
    sends = tuple(
        tuple(call.name for call in trace.calls if part_of[call.name] <= part < reach.get(call.name, -1))
        for part in range(final)
    )
    # What no forward uses has to be somewhere: with the first part.
    used = {name: frozenset(parts or {0}) for name, parts in owners.items()}
    return StageAssignment(sizes, part_of, tuple(last), sends, used)


def _require_one_part(source: str, part_of: dict[str, int], part: int) -> None:
    """Raises LayoutError if what a module has left in an attribute is read where the module is not."""
    call, attribute = source.removeprefix(LEFT).split(" ")
    if part_of[call] != part:
        raise LayoutError(
            f"{call} leaves the tensor {attribute} in an attribute, which is read on another stage of "
            "the pipeline: let it return the tensor from forward, or write strategy=fsdp"
        )


def require_chain(trace: Trace, blocks: list[str]) -> None:
    """Raises LayoutError unless every block's input was made from the block's before it; all blocks are called."""
    called = [call.path for call in trace.blocks]
    unused = [name for name in blocks if name not in called]
    if unused:
        raise LayoutError(
            f"the model never calls its block {unused[0]}, so its blocks do not form a chain: name those it calls"
        )
    behind: dict[str, frozenset[str]] = {}
    before = ""
    for call in trace.calls:
        behind[call.name] = call.uses.union(*(behind.get(source, frozenset()) for source in call.uses))
        if call.is_block:
            if before and before not in behind[call.name]:
                seen = [name for name in called if name in behind[call.name]]
                fork = f"after {seen[-1]}" if seen else "at its input"
                raise LayoutError(
                    f"the model's blocks do not form a chain: {call.path} does not use what {before} puts out, it "
                    f"branches {fork}: name blocks that follow each other, or write strategy=fsdp"
                )
            before = call.name


def keep_own(
    module: nn.Module, blocks: list[str], assignment: StageAssignment, tracer: Tracer, own: frozenset[int]
) -> None:
    """Takes out of the module, in place, the parameters of other parts, and the buffers of their modules."""
    for path, owner in list(module.named_modules()):
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if not assignment.owners[tracer.canonical[f"{path}.{name}".lstrip(".")]] & own:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                hide(owner, name, PlaceholderTensor.make(empty, [], tracer.place))
    for path in traced_modules(module, blocks):
        called = {part for name, part in assignment.part_of.items() if name.partition("#")[0] == path}
        if not tracer.held[path] or called & own or not (called or 0 not in own):
            continue
        for owner in module.get_submodule(path).modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                delattr(owner, name)
                setattr(owner, name, PlaceholderTensor.make(buffer, [], tracer.place))


@dataclass
class _Forward:
    """One forward of one part: what came in and what goes out, by call."""

    part: int
    received: dict[str, Any]
    placeholders: dict[str, Any]
    sends: tuple[str, ...]
    made: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


class Stage:
    """The model on one worker, and the running of its parts."""

    def __init__(
        self, module: nn.Module, blocks: list[str], assignment: StageAssignment, tracer: Tracer, own: Iterable[int]
    ) -> None:
        self.module, self.assignment, self.tracer = module, assignment, tracer
        self.own = frozenset(own)
        self.traced: dict[Any, dict[str, Any]] = {}
        self.assumed: dict[str, str] = {}
        self._forward: _Forward | None = None
        remember_in_evaluation(module)
        torch.backends.mha.set_fastpath_enabled(False)  # it would read the parameters of layers of other stages
        for path in traced_modules(module, blocks):
            child = module.get_submodule(path)
            child.forward = self._in_its_part(path, child.forward, bool(tracer.held[path]))

    def signature(self, batch: Any) -> Any:
        """Batches with the same one have the same shapes everywhere in the model."""
        leaves = [(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return (*leaves, self.module.training, torch.is_grad_enabled())

    def placeholders(self, signature: Any, loss: Loss, batch: Any) -> dict[str, Any]:
        """Every call's output for batches of this signature, without numbers."""
        if signature not in self.traced:
            trace = self.tracer.trace(loss, batch, self.module.training)
            strange = [call.name for call in trace.calls if call.name not in self.assignment.part_of]
            if strange:
                raise LayoutError(
                    f"the model calls {strange[0]} for this batch, which it did not for the first one: a pipeline "
                    "needs the same calls in every forward"
                )
            self.assumed |= {call.name: call.assumed for call in trace.calls if call.assumed}
            self.traced[signature] = {call.name: call.output for call in trace.calls}
        return self.traced[signature]

    def run(
        self, part: int, loss: Loss, batch: Any, placeholders: dict[str, Any], arrived: list[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """Forward of one part: (the loss function's answer, None but for the last part; the tensors to send on).

        arrived: the tensors that the part before sent, in order.
        """
        is_last = part == self.assignment.parts - 1
        if len(self.own) > 1:
            # Each part runs the model's code from its beginning, which may change the batch in place.
            batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        tensors = iter(arrived)
        received = {  # in the structures that the modules returned
            name: tree_map(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, placeholders[name])
            for name in (self.assignment.sends[part - 1] if part else ())
        }
        sends = () if is_last else self.assignment.sends[part]
        forward = self._forward = _Forward(part, received, placeholders, sends)
        answer = None
        try:
            answer = loss(self.module, batch)
        except _PartDone:
            pass
        finally:
            self._forward = None
        if not is_last and answer is not None:
            raise LayoutError(
                f"the model did not call its block {self.assignment.last[part]} for this batch: a pipeline needs the "
                "same calls in every forward"
            )
        leaves = tree_leaves([forward.made.get(name, received.get(name)) for name in sends])
        return answer, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _in_its_part(self, path: str, module_forward: Callable[..., Any], holds: bool) -> Callable[..., Any]:
        part_of, last = self.assignment.part_of, self.assignment.last

        def call(*args: Any, **kwargs: Any) -> Any:
            forward = self._forward
            if forward is None:
                return module_forward(*args, **kwargs)
            seen = forward.seen.get(path, 0)
            forward.seen[path] = seen + 1
            name = numbered(path, seen)
            if name in forward.received:
                return forward.received[name]
            own = part_of.get(name) == forward.part
            if holds and not own:
                return forward.placeholders[name]
            output = module_forward(*args, **kwargs)
            if own:
                if name in self.assumed:
                    self._require_assumed(name, output)
                if name in forward.sends:
                    forward.made[name] = output
                if name == last[forward.part] and forward.part < self.assignment.parts - 1:
                    raise _PartDone
            return output

        return call

    def _require_assumed(self, name: str, output: Any) -> None:
        """Raises LayoutError unless a block that could not be looked at without numbers returns what it was taken to:
        one tensor."""
        if not isinstance(output, Tensor):
            raise LayoutError(
                f"the block {name} looks at numbers ({self.assumed[name]}), so it was taken to return one tensor as it "
                f"is given, but it returns a {type(output).__name__}: let it return one tensor, or write strategy=fsdp"
            )
