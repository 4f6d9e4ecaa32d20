"""Watches one step of a model, and says which traits it shows.

A mode that sees every call of torch knows which tensors are computed with, and by which module's
forward. Comparing parameters and buffers before and after forward shows what it has changed, and
the gradients that arrive show what they can come back through.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from strategies.blocks import separable
from strategies.rehearsal.hooks import HookRecorder, as_hook_of_one_gradient, is_linear
from strategies.rehearsal.questions import QUESTIONS, Answers
from strategies.rehearsal.torch_calls import (
    SHARES_MEMORY,
    TAKES_GRADIENT,
    call_name,
    computes,
    written_tensors,
)
from strategies.state import BATCH_NORMS
from strategies.traits import Observation, Trait
from strategies.tree import clone_tensors, tree_leaves

Loss = Callable[[nn.Module, Any], Tensor]

_DEPENDS_ON_ROUTE = frozenset({Trait.UNUSED_PARAMETERS, Trait.CUTS_GRAPH, Trait.CALLED_TWICE})
"""Traits that may hold only for the route that a made-up answer leads to."""


@dataclass
class Route:
    """How a batch went through the model."""

    calls: list[str] = field(default_factory=list)
    """The blocks that were called, in order."""
    parameters: set[str] = field(default_factory=set)
    """The parameters that were computed with."""


@dataclass(frozen=True)
class PartCall:
    """One call of a part that would be recomputed.

    Args:
        name: The part.
        inputs: For each tensor that it was given, the sum of the magnitudes of its numbers.
        outputs: The same for each tensor that it returned.
    """

    name: str
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]


@dataclass
class _Evidence:
    """What a step shows, by the names of parameters or modules, for `Watch.observations`."""

    read_outside_forward: list[str] = field(default_factory=list)
    read_outside_block: list[str] = field(default_factory=list)
    read_from_list: list[str] = field(default_factory=list)
    requires_grad_changed: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    """Trained parameters that have no gradient."""
    nonlinear_hooks: list[str] = field(default_factory=list)
    gradients_taken: list[str] = field(default_factory=list)
    functional_calls: list[str] = field(default_factory=list)
    changed_inputs: list[str] = field(default_factory=list)
    """Parts that change an input in place that has a gradient."""
    changed_data: list[str] = field(default_factory=list)
    """Parts that change an input in place that has none."""
    changed_outputs: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    """Blocks whose output is used, and to which no gradient comes back."""
    gradient_past_output: list[str] = field(default_factory=list)
    """Blocks whose parameters get a gradient, though none of their outputs does."""
    calls_without_graph: list[str] = field(default_factory=list)
    """Blocks that have run without gradients, once for each time."""
    read_without_graph: dict[str, set[int]] = field(default_factory=dict)
    """By parameter, in which of these calls it was used."""
    read_with_graph: set[str] = field(default_factory=set)
    """Parameters that were used with gradients."""
    run_in_backward: set[str] = field(default_factory=set)
    """Blocks that have run in backward, as checkpoints do."""


@dataclass
class _StepState:
    """Where a step is, and the tensors in it.

    Tensors are known by their ids, and kept so that no id is reused.
    """

    running: list[str] = field(default_factory=list)
    """The modules that are running, outermost first."""
    is_paused: bool = False
    """Whether calls of torch are those of `Watch`, and not the model's."""
    block_outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """What blocks have returned and a gradient can come back to."""
    used_outputs: set[int] = field(default_factory=set)
    outputs_with_gradient: set[int] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    """Parameters that a call of torch wrote into, or into whose `data`."""
    listed_parameters: set[int] = field(default_factory=set)
    """Parameters that code has gone through as a list."""
    views: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    """Other tensors in a parameter's memory: the parameter's name, and the tensor."""
    part_inputs: list[tuple[nn.Module, list[tuple[Tensor, Tensor]]]] = field(default_factory=list)
    """Of the running parts that would be recomputed, each input and a copy of it."""
    written_inputs: set[int] = field(default_factory=set)
    from_batch: dict[int, Tensor] = field(default_factory=dict)
    """The batch's tensors and what was computed from them."""


class Watch(TorchFunctionMode):
    """Sees every call of torch during one step, and which of the model's modules are running.

    Args:
        module: The model.
        blocks: Names of its repeating blocks.
        hooks: The hooks that were put on it while it was built; notes those of the step, too.
        answers: The answers to Python's questions about the values of tensors.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[str], hooks: HookRecorder, answers: Answers
    ) -> None:
        super().__init__()
        self.module = module
        self.blocks = frozenset(blocks)
        self.hooks = hooks
        self.answers = answers
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(_buffers_outside_batch_norms(module))
        self.module_hooks = list(hooks.module_hooks)
        self.recomputed_parts = self.blocks or frozenset({""})
        """What would be recomputed: the blocks, or else the whole model."""
        self._module_names = {id(part): name for name, part in module.named_modules()}
        self._parameter_names = {id(p): name for name, p in self.parameters.items()}
        self._owners: dict[int, set[str]] = {}
        """By parameter, the modules that hold it; several if it is tied."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
        self._separable_blocks = frozenset(separable(module, list(blocks)))

        self.route = Route()
        self.part_calls: list[PartCall] = []
        self.changed_parameters: dict[str, Tensor] = {}
        """Parameters that forward has changed, with their new values."""
        self.changed_beyond_rounding: list[str] = []
        """Those of them that differ from before by more than rounding."""
        self.changed_buffers: dict[str, Tensor] = {}
        self._evidence = _Evidence()
        self._state = _StepState()

    # --- a step -----------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Any, *, backward: bool) -> None:
        """Computes the loss of a batch, and its backward, while watching.

        The batch is copied, so that it stays the same whatever the model does to it.
        """
        batch = clone_tensors(batch)
        self._state.from_batch = {id(leaf): leaf for leaf in _tensors(batch)}
        parameters_before = {name: p.detach().clone() for name, p in self.parameters.items()}
        buffers_before = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
        handles = []
        for module in {id(module): module for module, _ in self.module_hooks}.values():
            handles.append(module.register_full_backward_hook(self._check_module_hooks))
        with self._module_calls_seen(), self._listing_seen(), self.hooks, self:
            value = loss(self.module, batch)
        self._note_changes(parameters_before, buffers_before)
        if backward and isinstance(value, Tensor) and value.requires_grad:
            self._backward(value)
        self._state.block_outputs.clear()
        self._state.from_batch.clear()
        for handle in handles:
            handle.remove()

    def _note_changes(
        self, parameters_before: dict[str, Tensor], buffers_before: dict[str, Tensor]
    ) -> None:
        for name, parameter in self.parameters.items():
            before = parameters_before[name]
            if name in self._state.written or _differ(parameter, before):
                self.changed_parameters[name] = parameter.detach().clone()
                if not nearly_equal(parameter.detach(), before):
                    self.changed_beyond_rounding.append(name)
        for name, buffer in _buffers_outside_batch_norms(self.module):
            if name in buffers_before and _differ(buffer, buffers_before[name]):
                self.changed_buffers[name] = buffer.detach().clone()

    def _backward(self, value: Tensor) -> None:
        for _, output in self._state.block_outputs:
            output.register_hook(functools.partial(self._note_gradient, id(output)))
        handle = register_module_forward_pre_hook(self._note_run_in_backward)
        try:
            value.sum().backward()
        finally:
            handle.remove()
        cut_off = self._state.used_outputs - self._state.outputs_with_gradient
        self._evidence.cut_off = [
            name for name, output in self._state.block_outputs if id(output) in cut_off
        ]
        with_gradient = {
            name
            for name, output in self._state.block_outputs
            if id(output) in self._state.outputs_with_gradient
        }
        self._evidence.gradient_past_output = [
            name
            for name in unique(name for name, _ in self._state.block_outputs)
            if name not in with_gradient and self._has_parameter_gradient(name)
        ]
        self._evidence.without_gradient = [
            name for name, p in self.parameters.items() if p.requires_grad and p.grad is None
        ]

    def _note_gradient(self, output: int, gradient: Tensor) -> None:
        self._state.outputs_with_gradient.add(output)

    def _has_parameter_gradient(self, block: str) -> bool:
        parameters = self.module.get_submodule(block).parameters()
        return any(parameter.grad is not None for parameter in parameters)

    def _check_module_hooks(
        self, module: nn.Module, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
    ) -> None:
        """Notes a module whose backward hooks change gradients by more than a linear function."""
        hooks = [hook for owner, hook in self.module_hooks if owner is module]
        for hook in hooks:
            for index, gradient in enumerate(grad_inputs):
                if gradient is None:
                    continue
                hook_of_one = as_hook_of_one_gradient(
                    hook,
                    module,
                    grad_inputs=grad_inputs,
                    grad_outputs=grad_outputs,
                    index=index,
                )
                if not is_linear(hook_of_one, gradient):
                    self._evidence.nonlinear_hooks.append(
                        self._module_names[id(module)] or "the model"
                    )
                    return

    # --- what it has shown ------------------------------------------------------------------------

    def observations(self) -> list[Observation]:
        """The traits that this step alone shows."""
        evidence = self._evidence
        by_trait: list[tuple[Trait, Sequence[str]]] = [
            (Trait.LOSS_READS_PARAMETERS, evidence.read_outside_forward),
            (Trait.LISTS_PARAMETERS, evidence.read_from_list),
            (Trait.BLOCK_READ_FROM_OUTSIDE, evidence.read_outside_block),
            (Trait.REPLACES_PARAMETERS, self._replaced_parameters()),
            (Trait.CHANGES_REQUIRES_GRAD, evidence.requires_grad_changed),
            (Trait.UNUSED_PARAMETERS, evidence.without_gradient),
            (Trait.ACTIVATION_HOOK, evidence.nonlinear_hooks),
            (Trait.BACKWARD_HOOK, self._modules_with_backward_hooks()),
            (Trait.CUTS_GRAPH, evidence.cut_off),
            (Trait.GRADIENT_PAST_OUTPUT, evidence.gradient_past_output),
            (Trait.NORMALISES_OVER_BATCH, self._batch_norms()),
            (Trait.CHANGES_INPUT, evidence.changed_inputs),
            (Trait.CHANGES_DATA, evidence.changed_data),
            (Trait.CHANGES_OUTPUT, evidence.changed_outputs),
            (Trait.RUNS_WITHOUT_GRADIENT, self._reentrant_checkpoints()),
            (Trait.USED_BY_REENTRANT_CHECKPOINTS, self._used_by_reentrant_checkpoints()),
            (Trait.RECURRENT, self._recurrent_layers()),
            (Trait.GRADIENT_IN_LOSS, evidence.gradients_taken),
            (Trait.FUNCTIONAL_CALL, evidence.functional_calls),
            (Trait.CALLED_TWICE, self._blocks_called_twice()),
            *self._hooked_parameters().items(),
        ]
        unknown = _DEPENDS_ON_ROUTE if self.answers.is_made_up else frozenset[Trait]()
        return [
            Observation(trait, unique(names))
            for trait, names in by_trait
            if names and trait not in unknown
        ]

    def _hooked_parameters(self) -> dict[Trait, list[str]]:
        by_trait: dict[Trait, list[str]] = {}
        for tensor, hook in self.hooks.tensor_hooks:
            name = self._parameter_names.get(id(tensor))
            if name is not None:
                linear = is_linear(hook, tensor)
                trait = Trait.LINEAR_GRADIENT_HOOK if linear else Trait.GRADIENT_HOOK
                by_trait.setdefault(trait, []).append(name)
        for tensor in self.hooks.hooked_after_accumulation:
            name = self._parameter_names.get(id(tensor), "a parameter")
            by_trait.setdefault(Trait.GRADIENT_HOOK, []).append(name)
        return by_trait

    def _blocks_called_twice(self) -> list[str]:
        return [name for name, calls in Counter(self.route.calls).items() if calls > 1]

    def _modules_with_backward_hooks(self) -> list[str]:
        return [self._module_names.get(id(part), "a module") for part, _ in self.module_hooks]

    def _replaced_parameters(self) -> list[str]:
        """Parameters that are no longer the model's."""
        current = {id(parameter) for parameter in self.module.parameters()}
        return [name for name, p in self.parameters.items() if id(p) not in current]

    def _batch_norms(self) -> list[str]:
        return [
            name
            for name, part in self.module.named_modules()
            if isinstance(part, BATCH_NORMS) and part.training
        ]

    def _recurrent_layers(self) -> list[str]:
        """Recurrent layers that are blocks or in blocks. A model without blocks is one block."""
        names = []
        for name, part in self.module.named_modules():
            is_in_block = not self.blocks or any(
                f"{name}.".startswith(f"{block}.") for block in self.blocks
            )
            if is_in_block and isinstance(part, (nn.RNNBase, nn.RNNCellBase)):
                names.append(name)
        return names

    def _reentrant_checkpoints(self) -> list[str]:
        """Blocks that have run without gradients, and again in backward."""
        evidence = self._evidence
        return [name for name in evidence.calls_without_graph if name in evidence.run_in_backward]

    def _used_by_reentrant_checkpoints(self) -> list[str]:
        """Parameters that a reentrant checkpoint uses, and another one or other code too."""
        evidence = self._evidence
        checkpoint_calls = {
            number
            for number, name in enumerate(evidence.calls_without_graph)
            if name in evidence.run_in_backward
        }
        names = []
        for name, calls in evidence.read_without_graph.items():
            checkpoint_uses = len(calls & checkpoint_calls)
            other_uses = int(name in evidence.read_with_graph)
            if checkpoint_uses and checkpoint_uses + other_uses > 1:
                names.append(name)
        return names

    # --- calls of modules -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _module_calls_seen(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._module_starts),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        for name in self.recomputed_parts:
            part = self.module.get_submodule(name)
            handles.append(part.register_forward_pre_hook(self._copy_inputs, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        name = self._module_names.get(id(module))
        if name is None:
            return
        if module is self.module:
            callers = (frame.f_code.co_name for frame, _ in traceback.walk_stack(None))
            if "functional_call" in callers:
                self._evidence.functional_calls.append("the model")
        self._state.running.append(name)
        if name in self.blocks:
            self.route.calls.append(name)
            if not torch.is_grad_enabled():
                self._evidence.calls_without_graph.append(name)

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._module_names.get(id(module))
        if name is None or not self._state.running or self._state.running[-1] != name:
            return
        self._state.running.pop()
        # The module may have called functions that are not torch's.
        if any(id(leaf) in self._state.from_batch for leaf in tree_leaves(args)):
            self._state.from_batch.update({id(leaf): leaf for leaf in _tensors(output)})
        if name in self.recomputed_parts:
            self._note_part_call(module, name, output)
        if name in self.blocks:
            for leaf in _tensors(output):
                if leaf.requires_grad:
                    self._state.block_outputs.append((name, leaf))

    def _note_run_in_backward(self, module: nn.Module, args: Any) -> None:
        name = self._module_names.get(id(module))
        if name is not None and name in self.blocks:
            self._evidence.run_in_backward.add(name)

    def _copy_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._state.is_paused = True
        inputs = [(tensor, tensor.detach().clone()) for tensor in _tensors((args, kwargs))]
        self._state.part_inputs.append((module, inputs))
        self._state.is_paused = False

    def _note_part_call(self, module: nn.Module, name: str, output: Any) -> None:
        """Notes which inputs the part has changed, and what it was given and has returned."""
        if not self._state.part_inputs or self._state.part_inputs[-1][0] is not module:
            # Another hook has raised before `_copy_inputs` was called.
            return
        self._state.is_paused = True
        _, inputs = self._state.part_inputs.pop()
        for tensor, copy in inputs:
            if id(tensor) in self._state.written_inputs or _differ(tensor, copy):
                if tensor.requires_grad and name:
                    self._evidence.changed_inputs.append(name)
                else:
                    self._evidence.changed_data.append(name or "the model")
        input_sums = _sums(copy for _, copy in inputs)
        self.part_calls.append(PartCall(name, input_sums, _sums(_tensors(output))))
        self._state.is_paused = False

    # --- calls of torch ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listing_seen(self) -> Iterator[None]:
        """Notes code that goes through the parameters of the model, or of a part of it."""
        named_parameters = nn.Module.named_parameters

        def named_parameters_seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name, parameter in named_parameters(module, *args, **kwargs):
                if id(module) in self._module_names:
                    self._state.listed_parameters.add(id(parameter))
                yield name, parameter

        nn.Module.named_parameters = named_parameters_seen  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.named_parameters = named_parameters  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._state.is_paused:
            return func(*args, **kwargs)
        name = call_name(func)
        tensors = _tensors((args, kwargs))
        is_data = any(id(tensor) in self._state.from_batch for tensor in tensors)
        if name in QUESTIONS and not kwargs and tensors:
            answer = self.answers.answer(func, tensors[0], name, args, is_data=is_data)
        else:
            answer = func(*args, **kwargs)
        if name == "rand" and answer.numel() == 1:
            self.answers.note_draw(answer)
        if is_data:
            self._state.from_batch.update({id(leaf): leaf for leaf in _tensors(answer)})
        if name in ("requires_grad_", "__set__ requires_grad"):
            parameter_name = self._parameter_names.get(id(args[0]))
            if parameter_name is not None:
                self._evidence.requires_grad_changed.append(parameter_name)
        for tensor in written_tensors(name, args, kwargs):
            self._note_write(tensor)
        if name in SHARES_MEMORY:
            parameter_name = self._parameter_of(args[0])
            if parameter_name is not None:
                self._state.views[id(answer)] = (parameter_name, answer)

        if func in TAKES_GRADIENT or name == "_make_dual":
            self._evidence.gradients_taken.append(self._current_place())
        elif name == "register_hook" and self._is_nonlinear_activation_hook(*args[:2]):
            self._evidence.nonlinear_hooks.append(self._current_place())
        elif computes(name, answer):
            for tensor in tensors:
                if id(tensor) in self._parameter_names:
                    self._note_parameter_read(tensor)
                elif any(tensor is output for _, output in self._state.block_outputs):
                    self._state.used_outputs.add(id(tensor))
        return answer

    def _current_place(self) -> str:
        """What is running, in words."""
        if not self._state.running:
            return "the loss"
        return self._state.running[-1] or "the model"

    def _is_nonlinear_activation_hook(self, tensor: Tensor, hook: Callable[..., Any]) -> bool:
        return id(tensor) not in self._parameter_names and not is_linear(hook, tensor)

    def _parameter_of(self, tensor: Any) -> str | None:
        """The parameter that a tensor is, or whose memory it is in."""
        name = self._parameter_names.get(id(tensor))
        if name is None and id(tensor) in self._state.views:
            name, _ = self._state.views[id(tensor)]
        return name

    def _note_write(self, tensor: Tensor) -> None:
        parameter_name = self._parameter_of(tensor)
        if parameter_name is not None:
            self._state.written.add(parameter_name)
        for _, inputs in self._state.part_inputs:
            if any(tensor is given for given, _ in inputs):
                self._state.written_inputs.add(id(tensor))
                return
        self._evidence.changed_outputs += [
            name for name, output in self._state.block_outputs if output is tensor
        ]

    def _note_parameter_read(self, parameter: Tensor) -> None:
        name = self._parameter_names[id(parameter)]
        self.route.parameters.add(name)
        reader = self._state.running[-1] if self._state.running else None
        if torch.is_grad_enabled():
            self._evidence.read_with_graph.add(name)
        calls = self._evidence.calls_without_graph
        if calls and calls[-1] in self._state.running and not torch.is_grad_enabled():
            self._evidence.read_without_graph.setdefault(name, set()).add(len(calls) - 1)
        if (
            id(parameter) in self._state.listed_parameters
            and reader not in self._owners[id(parameter)]
        ):
            self._evidence.read_from_list.append(name)
        if reader is None:
            self._evidence.read_outside_forward.append(name)
        for block in self._separable_blocks:
            if name.startswith(f"{block}.") and block not in self._state.running:
                self._evidence.read_outside_block.append(name)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _buffers_outside_batch_norms(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by name; state.py has a remark of its own about those of batch normalisation."""
    for path, owner in module.named_modules():
        if not isinstance(owner, BATCH_NORMS):
            for name, buffer in owner.named_buffers(recurse=False):
                yield f"{path}.{name}".lstrip("."), buffer


def _sums(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """For each tensor that has numbers, the sum of their magnitudes."""
    sums = []
    for tensor in tensors:
        if not tensor.is_meta:
            magnitudes = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
            sums.append(float(magnitudes.double().abs().sum()))
    return tuple(sums)


def _differ(tensor: Tensor, before: Tensor) -> bool:
    """Whether two tensors have different values; on meta they have none."""
    if tensor.is_meta or tensor.shape != before.shape:
        return False
    return not torch.equal(tensor.detach().nan_to_num(), before.nan_to_num())


def nearly_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal except for rounding; True on meta, where they have no data."""
    if tensor.is_meta:
        return True
    rtol = 1e-2 if tensor.element_size() < 4 else 1e-5
    return torch.allclose(tensor, other, rtol=rtol, atol=rtol * 0.1, equal_nan=True)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """The names without repetitions, in order."""
    return tuple(dict.fromkeys(names))
