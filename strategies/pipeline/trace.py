"""What a model does with a batch, found by running its own code once without data.

No model is rewritten or annotated for this. The modules of a model are of three kinds:

- *Blocks* repeat, and are what is divided among stages.
- The *modules around them* neither contain a block nor are in one: embeddings, norms, heads.
- Modules that *contain blocks* (a decoder, a container, the model itself) are plain code that every
  stage runs.

A trace lists the calls of blocks and of the modules around them, in order, with what each one's
inputs were made from, how much it computes, and what it returns. From this, the partition knows
what to balance, and each stage knows which tensors it will be sent, including those that skip ahead
of blocks.

Placeholders (placeholder.py) stand for whatever other stages compute, and for what the code
computes from that. Everything that depends on the batch alone, such as masks, positions and rotary
tables, is computed for real on every stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from strategies.dims import LayoutError
from strategies.pipeline.placeholder import (
    CallOutput,
    KeptTensor,
    ParameterValue,
    PlaceholderTensor,
    Source,
    hide_parameter,
    placeholders_like,
    sources_of,
)
from strategies.state import tensor_attributes
from strategies.torch_internals import OperationMode
from strategies.tree import clone_tensors, tree_leaves

FLOPS_PER_ELEMENT = 50.0
"""What reading or writing one number outside of matrix products costs, in floating-point
operations. On two CPU cores, a float32 product does about 50 in the time of one such access."""
_ERRORS_OF_THE_COPY = (LookupError, AttributeError, TypeError, NameError)
"""Errors of code that looks in the copy for what a hook or closure has put into the original."""


@dataclass(kw_only=True)
class Call:
    """One call of a block, or of a module around the blocks.

    Args:
        name: The module's path, with #1, #2 … from its second call on.
        path: The module's path.
        is_block: Whether the module is a block.
        uses: What its inputs were made from.
        output: What it returned, with placeholders for tensors.
        assumed_because: Why it could not run without data, in which case `output` is assumed to be
            like its first input; "" if it could.
        cost: The time of one forward and backward, in floating-point operations of a matrix
            product that takes as long.
    """

    name: str
    path: str
    is_block: bool
    uses: frozenset[Source]
    output: Any = None
    assumed_because: str = ""
    cost: float = 0.0


@dataclass
class Trace:
    """What one forward of a model does.

    Args:
        calls: In order.
        last_uses: What the code after the last call uses, in the model and the loss function.
        last_cost: The cost of that code.
    """

    calls: list[Call] = field(default_factory=list)
    last_uses: frozenset[Source] = frozenset()
    last_cost: float = 0.0

    @property
    def blocks(self) -> list[Call]:
        """The calls of blocks."""
        return [call for call in self.calls if call.is_block]


class Tracer:
    """A copy of a model without data, whose code can be run."""

    def __init__(self, module: nn.Module, blocks: list[str], device: torch.device) -> None:
        """Replace the parameters of a model by placeholders.

        Args:
            module: The model, with parameters on meta; it is changed.
            blocks: The names of its blocks.
            device: The device that its tensors say they are on.
        """
        self.device = device
        canonical = {id(p): name for name, p in module.named_parameters()}
        all_names = module.named_parameters(remove_duplicate=False)
        self.canonical_name = {name: canonical[id(p)] for name, p in all_names}
        """Every name of a parameter → the first name that it has."""
        self.parameter_sizes = {name: p.numel() for name, p in module.named_parameters()}
        self.state_names = frozenset(module.state_dict())
        self.parameters_of = {
            path: [canonical[id(p)] for p in module.get_submodule(path).parameters()]
            for path in traced_modules(module, blocks)
        }
        """The parameters of each module that is traced, by the module's path."""
        self._module = module
        self._blocks = frozenset(blocks)
        self._count = _OperationCount()
        self._trace: Trace | None = None
        """The trace in progress."""
        self._calls_of: dict[str, int] = {}
        """How often each module has been called, by its path."""
        self._used_sources: set[Source] = set()
        """What has been computed with since the last call."""
        self._kept_tensors: set[Source] = set()
        """What modules have put into attributes."""
        self._has_block_twice = False

        remember_in_evaluation(module)
        for owner in list(module.modules()):
            self._replace_tensors(owner, canonical)
        for path in self.parameters_of:
            child = module.get_submodule(path)
            child.forward = self._traced(path, child.forward)

    def _replace_tensors(self, owner: nn.Module, canonical: dict[int, str]) -> None:
        """Replace parameters by placeholders, and give buffers values, which code may read."""
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(parameters):
            source = ParameterValue(canonical[id(parameter)])
            placeholder = PlaceholderTensor.like(parameter, [source], self.device)
            hide_parameter(owner, name, placeholder)
        buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
        for name, buffer in list(buffers):
            if buffer.is_meta:
                setattr(owner, name, torch.zeros_like(buffer, device=self.device))
            else:
                setattr(owner, name, buffer.to(self.device))
        for name, value in tensor_attributes(owner):
            if value.is_meta:
                setattr(owner, name, torch.zeros_like(value, device=self.device))

    def trace(
        self,
        function: Callable[[nn.Module, Any], object],
        batch: Any,
        training: bool = True,
    ) -> Trace:
        """Run `function(model, batch)` without data.

        Args:
            function: The loss, or another function of the model and a batch.
            batch: A batch; the model is given a copy, which it may change in place.
            training: Whether the model is in training mode.

        Raises:
            LayoutError: The model cannot be divided into a chain of stages.
        """
        self._module.train(training)
        trace = Trace()
        self._trace = trace
        self._calls_of = {}
        self._kept_tensors = set()
        self._has_block_twice = False
        with _OperationCount() as self._count, torch.no_grad():
            with PlaceholderTensor.recorded_sources() as self._used_sources:
                try:
                    function(self._module, clone_tensors(batch))
                except Exception as error:
                    if not self._all_were_called():
                        raise
                    # After the last call everything is on one stage, where code may read values.
                    # There it continues. What it would have used after the error is not known, and
                    # if a hook or closure is the reason, it may be anything.
                    if isinstance(error, _ERRORS_OF_THE_COPY):
                        self._used_sources |= self._kept_tensors
                        self._used_sources |= {CallOutput(call.name) for call in trace.calls}
            trace.last_cost = self._count.take()
        trace.last_uses = frozenset(self._used_sources)
        self._trace = None
        if not trace.blocks:
            raise LayoutError(
                "the loss function calls none of the model's blocks, so no pipeline can be made"
            )
        return trace

    def _all_were_called(self) -> bool:
        """Whether every traced module that has parameters has been called, and no block twice."""
        paths = [path for path, parameters in self.parameters_of.items() if parameters]
        return not self._has_block_twice and all(self._calls_of.get(path) for path in paths)

    def _traced(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module's forward that adds its calls to the trace in progress."""

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            if self._trace is None:
                return forward(*args, **kwargs)
            call = self._begin_call(self._trace, path, sources_of((args, kwargs)))
            module = self._module.get_submodule(path)
            kept_before = _kept_tensors(module)
            output = _run_without_data(call, forward, args=args, kwargs=kwargs)
            self._note_kept_tensors(call, module, kept_before)
            # What the module itself has computed with was not used by the code around it.
            self._used_sources.clear()
            weights = sum(self.parameter_sizes[name] for name in self.parameters_of[path])
            call.cost += self._count.take() + 2 * FLOPS_PER_ELEMENT * weights
            if call.is_block:
                _require_tensors(path, output)
            if call.is_block or self.parameters_of[path] or sources_of(output):
                # Another stage computes all of the output of a block or a module with parameters.
                output = placeholders_like(output, [CallOutput(call.name)], self.device)
                call.output = output
            self._trace.calls.append(call)
            return output

        return traced_forward

    def _begin_call(self, trace: Trace, path: str, uses: frozenset[Source]) -> Call:
        calls_before = self._calls_of.get(path, 0)
        self._calls_of[path] = calls_before + 1
        call = Call(
            name=call_name(path, calls_before),
            path=path,
            is_block=path in self._blocks,
            uses=uses,
        )
        if call.is_block and calls_before:
            self._has_block_twice = True
            raise LayoutError(
                f"the model calls its block {path} twice in one forward, or the task calls the "
                "model twice, so its blocks do not form a chain: write strategy=fsdp"
            )
        # The cost of the code between two calls counts with the first of them.
        before = trace.calls[-1] if trace.calls else call
        before.cost += self._count.take()
        return call

    def _note_kept_tensors(
        self, call: Call, module: nn.Module, before: dict[tuple[nn.Module, str], Tensor]
    ) -> None:
        """Make each tensor that a call has put into an attribute a source of its own."""
        for (owner, attribute), value in _kept_tensors(module).items():
            if before.get((owner, attribute)) is not value:
                source = KeptTensor(call.name, attribute)
                vars(owner)[attribute] = PlaceholderTensor.like(value, [source], self.device)
                self._kept_tensors.add(source)


def _run_without_data(
    call: Call, forward: Callable[..., Any], *, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The output of a module.

    The code of a block may read values, as a router of experts does, because a block is on one
    stage. Here there are none. The block is then assumed to return one tensor like its first input,
    which stage.py checks when the block runs.
    """
    try:
        return forward(*args, **kwargs)
    except Exception as error:
        leaves = tree_leaves((args, kwargs))
        first_tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if not call.is_block or first_tensor is None:
            raise
        lines = str(error).strip().splitlines()
        call.assumed_because = lines[0] if lines else type(error).__name__
        return first_tensor


def _kept_tensors(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Tensors among the plain attributes of a module and the modules in it."""
    return {
        (owner, name): value
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, Tensor)
    }


def remember_in_evaluation(module: nn.Module) -> None:
    """Let a model repeat its last answer in evaluation, in place, if it gets the same tensors.

    Metrics may call the model once for the loss and once more for another figure, and a block can
    be called once only. In training the answer is not repeated, since dropout draws anew.
    """
    forward = module.forward
    last: list[tuple[list[Any], Any]] = []  # of the arguments' leaves and the output, at most one

    def forward_once(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not module.training and last:
            last_leaves, last_output = last[0]
            if len(last_leaves) == len(leaves) and all(map(_is_same, last_leaves, leaves)):
                return last_output
        last.clear()
        output = forward(*args, **kwargs)
        if not module.training:
            last.append((leaves, output))
        return output

    module.forward = forward_once


def _is_same(a: object, b: object) -> bool:
    return a is b


def call_name(path: str, calls_before: int) -> str:
    """The name of a module's call, after `calls_before` others in the same forward."""
    return f"{path}#{calls_before}" if calls_before else path


def path_of_call(name: str) -> str:
    """The path of the module that the call of that name calls."""
    return name.partition("#")[0]


def traced_modules(module: nn.Module, blocks: list[str]) -> list[str]:
    """The paths of blocks and of the modules around them: the outermost that contain no block."""
    containers: set[str] = set()
    for block in blocks:
        parents = block.split(".")[:-1]
        containers |= {".".join(parents[:depth]) for depth in range(len(parents) + 1)}

    def is_around_blocks(path: str) -> bool:
        return path not in containers and path.rpartition(".")[0] in containers

    return [path for path, _ in module.named_modules() if path in blocks or is_around_blocks(path)]


def _require_tensors(path: str, output: Any) -> None:
    """Raises LayoutError unless the output of a block can be sent."""
    leaves = tree_leaves(output)
    sendable = (Tensor, int, float, str, bool, type(None))
    others = [leaf for leaf in leaves if not isinstance(leaf, sendable)]
    if others or not any(isinstance(leaf, Tensor) for leaf in leaves):
        kind = type(others[0] if others else output).__name__
        raise LayoutError(
            f"the block {path} returns a {kind}, which cannot be sent to the next stage: let it "
            "return a tensor, or a tuple or dict of tensors"
        )


class _OperationCount(OperationMode):  # type: ignore[misc]
    """Counts operations: those of matrix products, and one for each number that others write.

    Backward takes twice as many as forward and is counted with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._total = 0.0

    def __enter__(self) -> _OperationCount:
        super().__enter__()
        return self

    def take(self) -> float:
        """The operations since the last call."""
        total = self._total
        self._total = 0.0
        return total

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            # A formula raises if it does not know this way to call its operation. Such an operation
            # is counted as one without a formula.
            with contextlib.suppress(Exception):
                self._total += 3 * formula(*args, **kwargs, out_val=output)
                return output
        if not getattr(func, "is_view", False):
            written = sum(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self._total += 3 * FLOPS_PER_ELEMENT * written
        return output
