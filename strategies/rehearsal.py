"""One step of a model on one process, watched: its traits (traits.py).

One small step is run before any worker starts, with real numbers where that is quick and on the meta device where it is
not. What it does is seen in three ways: a mode that sees every call of torch knows which tensors are computed with, and
by which module's forward; the versions and values of parameters and buffers say what forward has changed; and where
gradients arrive says what they can come back through. On the meta device everything is seen but what depends on
numbers: whether a change depends on the data, and whether two samples take different ways through the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from strategies.blocks import separable
from strategies.state import BATCH_NORMS
from strategies.traits import Observation, Trait
from strategies.tree import tree_leaves

Loss = Callable[[nn.Module, Any], Tensor]


def observe(
    build: Callable[[], nn.Module],
    find_blocks: Callable[[nn.Module], list[str]],
    loss: Loss,
    batches: Sequence[Any],
    seed: Callable[[int], None] = lambda number: None,
) -> list[Observation]:
    """Takes a step's forward and backward on each batch, and says what was seen.

    Every batch but the first is run forward only, to compare the way that it takes through the model.

    Args:
        build: gives the model, the same whenever it is called, where the batches are: on the CPU or on meta.
        find_blocks: the names of its repeating blocks.
        loss: (model, batch) → the mean loss, 0-dimensional.
        batches: at least one, as `loss` takes them.
        seed: is called with the number of the batch before its forward, and seeds the generators that it draws from.
    """
    watches = []
    for number, batch in enumerate(batches):
        with _Hooks() as hooks:
            module = build().train()
        watch = _Watch(module, find_blocks(module), hooks)
        seed(number)
        watch.step(loss, batch, backward=number == 0)
        watches.append(watch)
    return [
        *watches[0].observations(),
        *_changed(
            [watch.changes for watch in watches],
            alike=Trait.CHANGES_PARAMETERS,
            by_data=Trait.CHANGES_PARAMETERS_BY_DATA,
        ),
        *_changed(
            [watch.changed_buffers for watch in watches],
            alike=Trait.CHANGES_BUFFERS,
            by_data=Trait.CHANGES_BUFFERS_BY_DATA,
        ),
        *_varying([watch.route for watch in watches]),
    ]


@dataclass
class _Route:
    """The modules that a batch was given to, in order, and the parameters that were computed with."""

    calls: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


class _Hooks(TorchFunctionMode):
    """Notes the hooks that are put on gradients, of tensors and of modules, while it is the current mode."""

    def __init__(self) -> None:
        super().__init__()
        self.of_tensors: list[tuple[Tensor, Callable[..., Any]]] = []
        self.after_accumulation: list[Tensor] = []
        self.of_modules: list[tuple[nn.Module, Callable[..., Any]]] = []

    def __enter__(self) -> _Hooks:
        super().__enter__()
        self._registering = {name: getattr(nn.Module, name) for name in _MODULE_HOOKS}
        for name, register in self._registering.items():
            setattr(nn.Module, name, self._noting(register))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, register in self._registering.items():
            setattr(nn.Module, name, register)
        super().__exit__(*error)

    def _noting(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.of_modules.append((module, hook))
            return register(module, hook, *args, **kwargs)

        return registered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "register_hook":
            self.of_tensors.append((args[0], args[1]))
        elif name == "register_post_accumulate_grad_hook":
            self.after_accumulation.append(args[0])
        return func(*args, **(kwargs or {}))


_MODULE_HOOKS = ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")


class _Watch(TorchFunctionMode):
    """Sees every call of torch while it is the current mode, and which of the model's modules are running."""

    def __init__(self, module: nn.Module, blocks: Sequence[str], hooks: _Hooks) -> None:
        super().__init__()
        self.module = module
        self.blocks = frozenset(blocks)
        self.hooks = hooks
        self.backward_hooks = list(hooks.of_modules)
        self.modules = {id(part): name for name, part in module.named_modules()}
        self.named = dict(module.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.owners: dict[int, set[str]] = {}
        """Of each parameter the modules that hold it; more than one where it is tied."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
        self.separable = frozenset(separable(module, list(blocks)))
        self.running: list[str] = []
        self.route = _Route()
        self.reads_outside: list[str] = []
        self.activation_hooks: list[str] = []
        self.block_reads: list[str] = []
        self.listed: list[str] = []
        self.gradients_taken: list[str] = []
        self.changed_inputs: list[str] = []
        self.changed_outputs: list[str] = []
        self.without_graph: list[str] = []
        """Blocks that have run without gradients."""
        self.changes: dict[str, Tensor] = {}
        """Parameters that forward has changed, as they are then."""
        self.buffers = dict(_buffers_of_others_than_batch_norm(module))
        self.changed_buffers: dict[str, Tensor] = {}
        self.written: set[str] = set()
        """Parameters that a call of torch wrote into, or into whose `data`."""
        self.requires_grad_changed: list[str] = []
        self.unused: list[str] = []
        self.without_gradient: list[str] = []
        self._outputs: list[tuple[str, Tensor]] = []
        """What blocks put out and a gradient can come back to, by block."""
        self._used: set[int] = set()
        """Of those, what anything was computed from, by identity."""
        self._reached: set[int] = set()
        """Of those, what a gradient came back to, by identity."""
        self._listed_parameters: set[int] = set()
        self._same_memory: dict[int, tuple[str, Tensor]] = {}
        """Other tensors in a parameter's memory, by identity: its name, and the tensor, so that it stays."""
        self._inputs: list[list[tuple[Tensor, Tensor]]] = []
        """Of the blocks that are running, what each was given, and a copy of it."""
        self._written_inputs: set[int] = set()

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Any, *, backward: bool) -> None:
        """Runs the loss, and its backward, while watching."""
        before = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        buffers_before = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}
        hooked = _unique_modules(self.backward_hooks)
        handles = [part.register_full_backward_hook(self._module_gradients) for part in hooked]
        with self._module_hooks(), self._listing_seen(), self.hooks, self:
            value = loss(self.module, batch)
        self.changes = {
            name: parameter.detach().clone()
            for name, parameter in self.named.items()
            if name in self.written or _differ(parameter, before[name])
        }
        self.changed_buffers = {
            name: buffer.detach().clone()
            for name, buffer in _buffers_of_others_than_batch_norm(self.module)
            if name in buffers_before and _differ(buffer, buffers_before[name])
        }
        if backward and isinstance(value, Tensor) and value.requires_grad:
            for _, output in self._outputs:
                output.register_hook(functools.partial(self._gradient_reached, id(output)))
            value.sum().backward()
            cut = self._used - self._reached
            self.without_gradient = [name for name, output in self._outputs if id(output) in cut]
            self.unused = [name for name, p in self.named.items() if p.requires_grad and p.grad is None]
        self._outputs.clear()
        for handle in handles:
            handle.remove()

    def _module_gradients(self, module: nn.Module, inward: Any, outward: Any) -> None:
        """Of a module with hooks on its backward, whether they change gradients by more than a linear function."""
        for hook in [hook for owner, hook in self.backward_hooks if owner is module]:
            for at, gradient in enumerate(inward):
                if gradient is None:
                    continue
                changed = _of_one_gradient(hook, module, inward, outward, at)
                if not _is_linear(changed, gradient):
                    self.activation_hooks.append(self.modules[id(module)] or "the model")
                    return

    def _gradient_reached(self, output: int, gradient: Tensor) -> None:
        self._reached.add(output)

    def observations(self) -> list[Observation]:
        """What this step alone shows."""
        seen = [
            (Trait.LOSS_READS_PARAMETERS, self.reads_outside),
            (Trait.LISTS_PARAMETERS, self.listed),
            (Trait.BLOCK_READ_FROM_OUTSIDE, self.block_reads),
            (Trait.REPLACES_PARAMETERS, self._replaced()),
            (Trait.CHANGES_REQUIRES_GRAD, self.requires_grad_changed),
            (Trait.UNUSED_PARAMETERS, self.unused),
            (Trait.ACTIVATION_HOOK, self.activation_hooks),
            (Trait.BACKWARD_HOOK, [self.modules.get(id(part), "a module") for part, _ in self.backward_hooks]),
            (Trait.CUTS_GRAPH, self.without_gradient),
            (Trait.CHANGES_INPUT, self.changed_inputs),
            (Trait.CHANGES_OUTPUT, self.changed_outputs),
            (Trait.RUNS_WITHOUT_GRADIENT, [name for name in self.without_graph if self._is_trained(name)]),
            (Trait.RECURRENT, self._recurrent()),
            (Trait.GRADIENT_IN_LOSS, self.gradients_taken),
        ]
        by_hooks: dict[Trait, list[str]] = {}
        for tensor, hook in self.hooks.of_tensors:
            if (name := self.names.get(id(tensor))) is not None:
                linear = _is_linear(hook, tensor)
                trait = Trait.LINEAR_GRADIENT_HOOK if linear else Trait.GRADIENT_HOOK
                by_hooks.setdefault(trait, []).append(name)
        for tensor in self.hooks.after_accumulation:
            by_hooks.setdefault(Trait.GRADIENT_HOOK, []).append(self.names.get(id(tensor), "a parameter"))
        return [Observation(trait, _unique(names)) for trait, names in [*seen, *by_hooks.items()] if names]

    def _recurrent(self) -> list[str]:
        """Recurrent layers in blocks."""
        return [
            name
            for name, part in self.module.named_modules()
            if isinstance(part, nn.RNNBase) and any(f"{name}.".startswith(f"{block}.") for block in self.blocks)
        ]

    def _replaced(self) -> list[str]:
        """Parameters that are not the model's any more."""
        now = {id(parameter) for parameter in self.module.parameters()}
        return [name for name, parameter in self.named.items() if id(parameter) not in now]

    # --- modules ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _module_hooks(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        name = self.modules.get(id(module))
        if name is None:
            return
        self.running.append(name)
        if name in self.blocks:
            self.route.calls.append(name)
            if not torch.is_grad_enabled():
                self.without_graph.append(name)
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self._inputs.append([(t, t.detach().clone()) for t in tensors if t.requires_grad])

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.modules.get(id(module))
        if name is None or not self.running or self.running[-1] != name:
            return
        self.running.pop()
        if name in self.blocks:
            for tensor, copy in self._inputs.pop():
                if id(tensor) in self._written_inputs or _differ(tensor, copy):
                    self.changed_inputs.append(name)
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._outputs += [(name, leaf) for leaf in leaves if leaf.requires_grad]

    # --- what is computed with --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listing_seen(self) -> Iterator[None]:
        """While this lasts, going through the parameters of the model or of a part of it is noted."""
        listing = nn.Module.named_parameters

        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name, parameter in listing(module, *args, **kwargs):
                if id(module) in self.modules:
                    self._listed_parameters.add(id(parameter))
                yield name, parameter

        nn.Module.named_parameters = noted  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.named_parameters = listing  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{name} {getattr(func.__self__, '__name__', '')}"
        where = (self.running[-1] or "the model") if self.running else "the loss"
        if name in ("requires_grad_", "__set__ requires_grad") and id(args[0]) in self.names:
            self.requires_grad_changed.append(self.names[id(args[0])])
        for tensor in _written(name, args, kwargs or {}):
            self._write(tensor)
        if name in _SAME_MEMORY and (parameter := self._parameter_of(args[0])) is not None:
            self._same_memory[id(answer)] = (parameter, answer)
        if func in _TAKES_GRADIENT or name == "_make_dual":
            self.gradients_taken.append(where)
        elif name == "register_hook" and id(args[0]) not in self.names and not _is_linear(args[1], args[0]):
            self.activation_hooks.append(where)
        elif _computes(name, answer):
            for leaf in tree_leaves((args, kwargs or {})):
                if id(leaf) in self.names:
                    self._read(leaf)
                elif any(leaf is output for _, output in self._outputs):
                    self._used.add(id(leaf))
        return answer

    def _parameter_of(self, tensor: Any) -> str | None:
        """The parameter that a tensor is, or whose memory it is in."""
        name, _ = self._same_memory.get(id(tensor), (None, None))
        return self.names.get(id(tensor), name)

    def _write(self, tensor: Tensor) -> None:
        if (name := self._parameter_of(tensor)) is not None:
            self.written.add(name)
        if any(tensor is given for inputs in self._inputs for given, _ in inputs):
            self._written_inputs.add(id(tensor))
            return
        self.changed_outputs += [name for name, output in self._outputs if output is tensor]

    def _is_trained(self, block: str) -> bool:
        """Whether a gradient has come to the block's parameters."""
        return any(p.grad is not None for p in self.module.get_submodule(block).parameters())

    def _read(self, parameter: Tensor) -> None:
        name = self.names[id(parameter)]
        self.route.parameters.add(name)
        reader = self.running[-1] if self.running else None
        if id(parameter) in self._listed_parameters and reader not in self.owners[id(parameter)]:
            self.listed.append(name)
        if reader is None:
            self.reads_outside.append(name)
        block = next((block for block in self.separable if name.startswith(f"{block}.")), None)
        if block is not None and block not in self.running:
            self.block_reads.append(name)


_TAKES_GRADIENT = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SHAPES_ALONE = {"requires_grad_", "type_as", "expand_as", "view_as", "reshape_as", "register_hook"}
"""Calls that answer with a tensor and use of the other argument its shape or type alone, or none of its numbers."""
_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that have its numbers."""
_SAME_MEMORY = {"__get__ data", "detach", "view", "flatten", "t", "__get__ T", "__getitem__", "select", "narrow"}
"""Calls that answer with a tensor in the memory of the first argument."""
_ONLY_NAMED_SO = {"requires_grad_", "share_memory_", "rename_", "retains_grad_"}
"""Calls whose names end as those do that write into their first argument."""
_ANSWERS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"}
"""Calls that answer with numbers of Python's or NumPy's."""


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of torch writes into, as far as its name and arguments say."""
    in_place = name.endswith("_") and not name.endswith("__") and name not in _ONLY_NAMED_SO
    by_operator = name in ("__setitem__", "__set__ data") or (name.startswith("__i") and name in _OPERATORS)
    targets: list[Any] = []
    if in_place or by_operator or kwargs.get("inplace"):
        targets.append(args[0])
    if name in ("embedding", "embedding_bag"):
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        targets.append(args[1] if max_norm is not None else None)
    targets.append(kwargs.get("out"))
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]


_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have other numbers; on meta they have none."""
    if one.is_meta or one.shape != other.shape:
        return False
    return not torch.equal(one.detach().nan_to_num(), other.nan_to_num())


def _computes(name: str, answer: Any) -> bool:
    """Whether a call of torch uses its arguments' numbers, rather than their shapes and types."""
    if name.startswith(("__get__", "__set__")):
        return name.partition(" ")[2] in _ATTRIBUTES
    if name in _ANSWERS:
        return True
    if name in _SHAPES_ALONE or name.endswith("_like") or name.startswith("new_"):
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(answer))


def _is_linear(hook: Callable[[Tensor], Tensor | None], tensor: Tensor) -> bool:
    """Whether a hook of a sum of gradients gives the sum of what it gives of each."""
    if tensor.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    shape, dtype = tensor.shape, tensor.dtype
    one, other = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))

    def changed(gradient: Tensor) -> Tensor:
        replaced = hook(gradient.clone())
        return gradient if replaced is None else replaced

    try:
        return torch.allclose(changed(one) + changed(other), changed(one + other), rtol=1e-4, atol=1e-5)
    except Exception:  # a hook that reads what a real step has left somewhere
        return False


def _of_one_gradient(
    hook: Callable[..., Any], module: nn.Module, inward: tuple[Any, ...], outward: tuple[Any, ...], at: int
) -> Callable[[Tensor], Tensor | None]:
    """A module's backward hook as a function of the gradient of one of its inputs."""

    def changed(gradient: Tensor) -> Tensor | None:
        replaced = hook(module, (*inward[:at], gradient, *inward[at + 1 :]), outward)
        return replaced if replaced is None or isinstance(replaced, Tensor) else replaced[at]

    return changed


def _changed(by_batch: list[dict[str, Tensor]], *, alike: Trait, by_data: Trait) -> list[Observation]:
    """Tensors that forward has changed, told apart by whether every batch changes them to the same.

    Args:
        by_batch: for each batch, what was changed, with its new values.
        alike: the trait of a change that is the same for every batch.
        by_data: the trait of one that is not, or of which that is not known.
    """
    names = _unique(name for changes in by_batch for name in changes)

    def depends(name: str) -> bool:
        values = [changes.get(name) for changes in by_batch]
        first = values[0]
        if len(values) == 1 or first is None or first.is_meta:
            return True
        return any(value is None or not torch.equal(value, first) for value in values)

    dependent = tuple(name for name in names if depends(name))
    others = tuple(name for name in names if name not in dependent)
    return [Observation(trait, where) for trait, where in ((by_data, dependent), (alike, others)) if where]


def _buffers_of_others_than_batch_norm(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by name. (What batch normalisation keeps of a batch has a note of its own: state.py.)"""
    for path, owner in module.named_modules():
        if not isinstance(owner, BATCH_NORMS):
            for name, buffer in owner.named_buffers(recurse=False):
                yield f"{path}.{name}".lstrip("."), buffer


def _varying(routes: list[_Route]) -> list[Observation]:
    """Blocks that not all batches call equally often or in the same order, and parameters that not all use."""
    observations = []
    if any(route.calls != routes[0].calls for route in routes):
        counts = [Counter(route.calls) for route in routes]
        names = sorted({name for count in counts for name in count})
        uneven = [name for name in names if len({count[name] for count in counts}) > 1]
        observations.append(Observation(Trait.CALLS_VARY, tuple(uneven or names)))
    used = [route.parameters for route in routes]
    if sometimes := set[str]().union(*used) - used[0].intersection(*used):
        observations.append(Observation(Trait.PARAMETERS_VARY, tuple(sorted(sometimes))))
    return observations


def _unique_modules(hooked: list[tuple[nn.Module, Callable[..., Any]]]) -> list[nn.Module]:
    return list({id(module): module for module, _ in hooked}.values())


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
