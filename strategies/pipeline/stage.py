"""A stage: the model's own code, of which this worker computes some consecutive blocks.

A stage runs the loss function and the model as they are. Blocks and modules that other stages own do nothing there:
one whose output was sent here returns it, any other returns an absent tensor (absent.py), and after the last block of
its own a stage leaves the model's code by an exception. So masks, positions and whatever else the code makes of the
batch are there on every stage, and no model is traced, rewritten or annotated.

Modules keep their names, and parameters theirs; those of other stages are not in memory. A parameter that several
stages use (an embedding that is the head's matrix too) is on each of them; the gradients are added (reduce.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from strategies.dims import LayoutError
from strategies.pipeline.placeholder import Absent
from strategies.pipeline.trace import Loss, Skeleton, Survey, hide, numbered, surroundings


class _Left(BaseException):
    """The model's code has been left, because what follows is another stage's. (No model's `except` catches it.)"""


@dataclass(frozen=True)
class Deal:
    """Which part of the pipeline does what. sizes: blocks per part."""

    sizes: tuple[int, ...]
    part_of: dict[str, int]
    """Call → part."""
    last: tuple[str, ...]
    """Each part's last block."""
    travels: tuple[tuple[str, ...], ...]
    """Calls whose outputs go from each part to the next, in order."""
    owners: dict[str, frozenset[int]]
    """Parameter → the parts that use it."""

    @property
    def parts(self) -> int:
        return len(self.sizes)


def deal(skeleton: Skeleton, survey: Survey, sizes: tuple[int, ...]) -> Deal:
    """Gives every call to a part: blocks as `sizes` says; what is around them goes with the block that follows, what
    follows the last block with it."""
    ends = list(itertools.accumulate(sizes))
    part_of: dict[str, int] = {}
    last: list[str] = []
    part = done = 0
    for call in survey.calls:
        part_of[call.name] = part
        if call.block:
            done += 1
            if done == ends[part]:
                last.append(call.name)
                part = min(part + 1, len(sizes) - 1)
    final = len(sizes) - 1
    needs = [(call.uses, part_of[call.name]) for call in survey.calls] + [(survey.last_uses, final)]
    reach: dict[str, int] = {}  # call → the last part that needs its output
    owners: dict[str, set[int]] = {name: set() for name in skeleton.sizes}
    for uses, part in needs:
        for source in uses:
            if source.startswith("="):
                owners[source[1:]].add(part)
            else:
                reach[source] = max(reach.get(source, 0), part)
    for call in survey.calls:
        for name in skeleton.held[call.path]:
            owners[name].add(part_of[call.name])
    order = [call.name for call in survey.calls]
    travels = tuple(
        tuple(name for name in order if part_of[name] <= part < reach.get(name, -1)) for part in range(final)
    )
    # What no forward uses has to be somewhere: with the first part.
    settled = {name: frozenset(parts or {0}) for name, parts in owners.items()}
    return Deal(sizes, part_of, tuple(last), travels, settled)


def keep_parts(module: nn.Module, blocks: list[str], given: Deal, skeleton: Skeleton, own: frozenset[int]) -> None:
    """Takes out of the module, in place, the parameters of other parts, and the buffers of their modules."""
    present = {name for name, parts in given.owners.items() if parts & own}
    for owner_path, owner in list(module.named_modules()):
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            canonical = skeleton.slots[f"{owner_path}.{name}".lstrip(".")]
            if canonical not in present:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                hide(owner, name, Absent.make(empty, [], skeleton.place))
    for path in surroundings(module, blocks):
        called = {part for name, part in given.part_of.items() if name.partition("#")[0] == path}
        if not skeleton.held[path] or called & own or not (called or 0 not in own):
            continue
        for owner in module.get_submodule(path).modules():
            for name, buffer in list(owner._buffers.items()):
                if buffer is not None:
                    del owner._buffers[name]
                    owner.__dict__[name] = Absent.make(buffer, [], skeleton.place)


@dataclass
class Passage:
    """One forward of one part: what came in and what goes out, both in the order in which it travels."""

    part: int
    received: dict[str, Any]
    outputs: dict[str, Any]
    sends: tuple[str, ...]
    made: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


class Stage:
    """The model on one worker, and the running of its parts."""

    def __init__(
        self, module: nn.Module, blocks: list[str], given: Deal, skeleton: Skeleton, own: Iterable[int]
    ) -> None:
        self.module, self.deal, self.skeleton = module, given, skeleton
        self.own = frozenset(own)
        self.surveys: dict[Any, dict[str, Any]] = {}
        self.assumed: dict[str, str] = {}
        self.clock: Callable[[], float] | None = None
        """Set to have `taken` filled: seconds of every call of this worker's parts, forward, one for each time."""
        self.taken: dict[str, list[float]] = {}
        self._passage: Passage | None = None
        torch.backends.mha.set_fastpath_enabled(False)  # it would read the parameters of layers that are elsewhere
        for path in surroundings(module, blocks):
            child = module.get_submodule(path)
            child.forward = self._standing_in(path, child.forward, bool(skeleton.held[path]))

    def signature(self, batch: Any) -> Any:
        """Batches with the same one have the same shapes everywhere in the model."""
        leaves = [(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return (*leaves, self.module.training, torch.is_grad_enabled())

    def outputs(self, signature: Any, loss: Loss, batch: Any) -> dict[str, Any]:
        """Every call's absent output for batches of this signature."""
        found = self.surveys.get(signature)
        if found is None:
            survey = self.skeleton.survey(loss, batch, self.module.training)
            found = survey.outputs()
            self.assumed |= survey.assumed()
            strange = [name for name in found if name not in self.deal.part_of]
            if strange:
                raise LayoutError(
                    f"the model calls {strange[0]} for this batch, which it did not for the first one: a pipeline "
                    "needs the same calls in every forward"
                )
            self.surveys[signature] = found
        return found

    def run(
        self, part: int, loss: Loss, batch: Any, outputs: dict[str, Any], arrived: list[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """Forward of one part: (the loss function's answer, None but for the last part; the tensors to send on).

        arrived: the tensors that the part before sent, in order.
        """
        before = self.deal.travels[part - 1] if part else ()
        sends = self.deal.travels[part] if part < self.deal.parts - 1 else ()
        received = _unpacked(before, outputs, arrived)
        passage = self._passage = Passage(part, received, outputs, sends)
        answer = None
        try:
            answer = loss(self.module, batch)
        except _Left:
            pass
        finally:
            self._passage = None
        if part < self.deal.parts - 1 and answer is not None:
            raise LayoutError(
                f"the model did not call its block {self.deal.last[part]} for this batch: a pipeline needs the same "
                "calls in every forward"
            )
        return answer, _packed([passage.made.get(name, received.get(name)) for name in sends])

    def _standing_in(self, path: str, forward: Callable[..., Any], holds: bool) -> Callable[..., Any]:
        part_of, last = self.deal.part_of, self.deal.last

        def standing_in(*args: Any, **kwargs: Any) -> Any:
            passage = self._passage
            if passage is None:
                return forward(*args, **kwargs)
            seen = passage.seen.get(path, 0)
            passage.seen[path] = seen + 1
            name = numbered(path, seen)
            if name in passage.received:
                return passage.received[name]
            own = part_of.get(name) == passage.part
            if holds and not own:
                return passage.outputs[name]
            output = self._timed(name, forward, args, kwargs) if own and self.clock else forward(*args, **kwargs)
            if own:
                if name in self.assumed:
                    self._require_assumed(name, output, passage.outputs[name])
                if name in passage.sends:
                    passage.made[name] = output
                if name == last[passage.part] and passage.part < self.deal.parts - 1:
                    raise _Left
            return output

        return standing_in

    def _require_assumed(self, name: str, output: Any, assumed: Any) -> None:
        """Raises LayoutError unless a block that could not be looked at without numbers returns what it was taken to:
        one tensor."""
        if tree_structure(output) != tree_structure(assumed):
            raise LayoutError(
                f"the block {name} looks at numbers ({self.assumed[name]}), so it was taken to return one tensor as it "
                f"is given, but it returns a {type(output).__name__}: let it return one tensor, or write strategy=fsdp"
            )

    def _timed(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self.clock is not None
        began = self.clock()
        output = forward(*args, **kwargs)
        self.taken.setdefault(name, []).append(self.clock() - began)
        return output


def _packed(values: list[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _unpacked(names: tuple[str, ...], outputs: dict[str, Any], arrived: list[Tensor]) -> dict[str, Any]:
    """The tensors that arrived in the structures that the modules returned."""
    tensors = iter(arrived)
    values = {}
    for name in names:
        leaves, structure = tree_flatten(outputs[name])
        filled = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values[name] = tree_unflatten(filled, structure)
    return values
