"""One step of a model on one process, watched: what the model does that not every layout can keep.

A strategy keeps its promise, the same training as on one device, for models that read their parameters where they
belong, change them in the optimizer alone, and call the same modules for every sample. Most do. A model that does
otherwise trains a *different* model under some layouts, without an error: a worker of a pipeline has no other stage's
parameters to penalise, a shard forgets what forward wrote into the gathered weight, and a hook on a parameter stays
behind on the parameter that a sharded one replaced. So one small step is run before any worker starts, on one process,
with real numbers where that is quick and on the meta device where it is not, and what it does is noted as *traits*.
Each strategy's record says which traits it cannot keep (`Strategy.cannot_keep`); `require_kept` compares the two and
says in one sentence what the model does, where, and what to write instead.

On the meta device everything is seen but what depends on numbers: whether a change depends on the data, and whether
two samples take different ways through the model.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from strategies.blocks import separable
from strategies.dims import Layout, LayoutError, Options
from strategies.torch_internals import gradient_hooks, version_of
from strategies.tree import tree_leaves

if TYPE_CHECKING:
    from strategies.strategy import Strategy

Loss = Callable[[nn.Module, Any], Tensor]


class Trait(enum.Enum):
    """Something that a model or its loss does and that some layout cannot keep."""

    LOSS_READS_PARAMETERS = "the loss computes with parameters outside of the model's forward"
    LISTS_PARAMETERS = "the step goes through the model's parameters and computes with them"
    BLOCK_READ_FROM_OUTSIDE = "a block's parameter is used while the block's forward is not running"
    CHANGES_PARAMETERS = "forward changes parameters, always in the same way"
    CHANGES_PARAMETERS_BY_DATA = "forward changes parameters in a way that depends on the samples"
    LINEAR_GRADIENT_HOOK = "a hook on a parameter replaces its gradient by a linear function of it"
    GRADIENT_HOOK = "a hook on a parameter sees or changes its gradient in another way"
    CUTS_GRAPH = "no gradient comes back through the output of a block"
    CHANGES_INPUT = "a block changes its input in place"
    GRADIENT_IN_LOSS = "the loss takes a gradient itself"
    CALLS_VARY = "another sample, or another random number, takes another way through the model's blocks"
    PARAMETERS_VARY = "another sample, or another random number, uses other parameters"


CHANGING_OR_HOOKED = frozenset(
    {
        Trait.CHANGES_PARAMETERS,
        Trait.CHANGES_PARAMETERS_BY_DATA,
        Trait.LINEAR_GRADIENT_HOOK,
        Trait.GRADIENT_HOOK,
    }
)
"""What no layout keeps that replaces the model's parameters by others."""

_SENTENCES: dict[Trait, tuple[str, str]] = {
    Trait.LOSS_READS_PARAMETERS: (
        "the loss reads {where} outside of the model's forward",
        "for a penalty on all weights there is optimizer.weight_decay",
    ),
    Trait.LISTS_PARAMETERS: (
        "forward or the loss goes through the model's parameters and computes with {where}",
        "for a penalty on all weights there is optimizer.weight_decay",
    ),
    Trait.BLOCK_READ_FROM_OUTSIDE: (
        "{where} is used while the forward of its block is not running",
        "call the block itself, or use its parameters inside its forward",
    ),
    Trait.CHANGES_PARAMETERS: (
        "forward changes {where}",
        "keep what forward changes in buffers",
    ),
    Trait.CHANGES_PARAMETERS_BY_DATA: (
        "forward changes {where} in a way that depends on the samples it is given",
        "change parameters after the optimizer's step, not in forward",
    ),
    Trait.LINEAR_GRADIENT_HOOK: (
        "{where} has a hook that changes its gradient",
        "set requires_grad to False for what is not to be trained, or multiply the parameter by its mask in forward",
    ),
    Trait.GRADIENT_HOOK: (
        "{where} has a hook that sees or changes its gradient before it is averaged over the workers",
        "clip by train.clip_norm, or leave the hook out",
    ),
    Trait.CUTS_GRAPH: (
        "no gradient comes back to {where}, because what follows detaches its output",
        "set requires_grad to False for the parameters before it, so that they are not in the optimizer",
    ),
    Trait.CHANGES_INPUT: (
        "{where} changes its input in place",
        "write x = x + y instead of x += y, and inplace=False where a block begins with it",
    ),
    Trait.GRADIENT_IN_LOSS: (
        "{where} takes a gradient inside of forward or of the loss (torch.autograd.grad, torch.func)",
        "",
    ),
    Trait.CALLS_VARY: (
        "{where} is called for some samples or random numbers and not for others",
        "call every block in every forward, and multiply what is to be left out by zero",
    ),
    Trait.PARAMETERS_VARY: (
        "{where} is used for some samples or random numbers and not for others",
        "write parallel.find_unused_parameters=true",
    ),
}
"""Of each trait what the model does, and what to write instead of it."""


@dataclass(frozen=True)
class Observation:
    """A trait, and where it was seen: names of parameters or modules, in order."""

    trait: Trait
    names: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What the model does, without a full stop."""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return _SENTENCES[self.trait][0].format(where=f"{self.names[0]}{others}")

    @property
    def instead(self) -> str:
        """How to write the model so that every layout keeps it; "" where there is no such way."""
        return _SENTENCES[self.trait][1]


# --- what a layout cannot keep ----------------------------------------------------------------------------------------


def broken_by(
    records: Iterable[Strategy], options: Options, observations: Sequence[Observation], *, data_workers: int
) -> list[Observation]:
    """The observations that a layout made of these strategies cannot keep.

    Args:
        records: the strategies that the layout combines.
        options: recomputing a block, for instance, has conditions of its own.
        observations: of the model.
        data_workers: workers with samples of their own; with one, nothing is averaged.
    """
    cannot_keep = frozenset[Trait]().union(*(record.cannot_keep for record in records))
    if options.activation_checkpointing != "none":
        cannot_keep |= {Trait.CHANGES_INPUT, Trait.CHANGES_PARAMETERS, Trait.CHANGES_PARAMETERS_BY_DATA}
    if options.find_unused_parameters or data_workers == 1:
        cannot_keep -= {Trait.PARAMETERS_VARY}
    return [observation for observation in observations if observation.trait in cannot_keep]


def require_kept(
    layout: Layout,
    records: Sequence[Strategy],
    options: Options,
    observations: Sequence[Observation],
    alternatives: Sequence[Strategy],
) -> None:
    """Raises LayoutError, one sentence, for the first observation that the layout cannot keep.

    Args:
        layout: what is to be trained under.
        records: its strategies.
        options: how they behave.
        observations: of the model.
        alternatives: strategies to name instead, the best first; the first that keeps all observations is named.
    """
    broken = broken_by(records, options, observations, data_workers=layout.dims.dp_cp)
    if not broken:
        return
    by_recomputing = not broken_by(records, Options(), broken, data_workers=layout.dims.dp_cp)
    if by_recomputing:
        what = f"train.activation_checkpointing={options.activation_checkpointing} runs forward twice"
        advice = "write train.activation_checkpointing=none"
    else:
        what = f"strategy {layout.name} cannot train such a model as one device would"
        keeping = [
            record.name
            for record in alternatives
            if not broken_by([record], options, observations, data_workers=layout.dims.world_size)
        ]
        advice = f"write strategy={keeping[0]}" if keeping else "write strategy=single and workers=1"
    instead = f", or change the model: {broken[0].instead}" if broken[0].instead else ""
    raise LayoutError(f"{broken[0].sentence}, and {what}: {advice}{instead}")


# --- watching ---------------------------------------------------------------------------------------------------------


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
        module = build().train()
        watch = _Watch(module, find_blocks(module))
        seed(number)
        watch.step(loss, batch, backward=number == 0)
        watches.append(watch)
    return [
        *watches[0].observations(),
        *_changed_parameters([watch.changes for watch in watches]),
        *_varying([watch.route for watch in watches]),
    ]


@dataclass
class _Route:
    """The modules that a batch was given to, in order, and the parameters that were computed with."""

    calls: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


class _Watch(TorchFunctionMode):
    """Sees every call of torch while it is the current mode, and which of the model's modules are running."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.module, self.blocks = module, frozenset(blocks)
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
        self.block_reads: list[str] = []
        self.listed: list[str] = []
        self.gradients_taken: list[str] = []
        self.changed_inputs: list[str] = []
        self.changes: dict[str, Tensor] = {}
        self.assigned: set[str] = set()
        """Parameters to whose `data` something was assigned."""
        self.without_gradient: list[str] = []
        self._outputs: list[tuple[str, Tensor]] = []
        """What blocks put out and a gradient can come back to, by block."""
        self._used: set[int] = set()
        """Of those, what anything was computed from, by identity."""
        self._reached: set[int] = set()
        """Of those, what a gradient came back to, by identity."""
        self._listed_parameters: set[int] = set()
        self._data: dict[str, list[tuple[Tensor, int]]] = {}
        """Of each parameter its `data` as it was read, which has a version of its own."""
        self._inputs: list[list[tuple[Tensor, int]]] = []

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Any, *, backward: bool) -> None:
        """Runs the loss, and its backward, while watching."""
        before = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        versions = {name: version_of(parameter) for name, parameter in self.named.items()}
        with self._module_hooks(), self._listing_seen(), self:
            value = loss(self.module, batch)
        self.changes = {
            name: parameter.detach().clone()
            for name, parameter in self.named.items()
            if version_of(parameter) != versions[name]
            or name in self.assigned
            or any(version_of(data) != version for data, version in self._data.get(name, ()))
            or not (parameter.is_meta or torch.equal(parameter, before[name]))
        }
        if backward and isinstance(value, Tensor) and value.requires_grad:
            for _, output in self._outputs:
                output.register_hook(functools.partial(self._gradient_reached, id(output)))
            value.sum().backward()
            cut = self._used - self._reached
            self.without_gradient = [name for name, output in self._outputs if id(output) in cut]
        self._outputs.clear()

    def _gradient_reached(self, output: int, gradient: Tensor) -> None:
        self._reached.add(output)

    def observations(self) -> list[Observation]:
        """What this step alone shows."""
        seen = [
            (Trait.LOSS_READS_PARAMETERS, self.reads_outside),
            (Trait.LISTS_PARAMETERS, self.listed),
            (Trait.BLOCK_READ_FROM_OUTSIDE, self.block_reads),
            (Trait.CUTS_GRAPH, self.without_gradient),
            (Trait.CHANGES_INPUT, self.changed_inputs),
            (Trait.GRADIENT_IN_LOSS, self.gradients_taken),
        ]
        by_hooks: dict[Trait, list[str]] = {}
        for name, parameter in self.named.items():
            for trait in _hook_traits(parameter):
                by_hooks.setdefault(trait, []).append(name)
        return [Observation(trait, _unique(names)) for trait, names in [*seen, *by_hooks.items()] if names]

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
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self._inputs.append([(tensor, version_of(tensor)) for tensor in tensors if tensor.requires_grad])

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.modules.get(id(module))
        if name is None or not self.running or self.running[-1] != name:
            return
        self.running.pop()
        if name in self.blocks:
            if any(version_of(tensor) != version for tensor, version in self._inputs.pop()):
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

        nn.Module.named_parameters = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.named_parameters = listing  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{name} {getattr(func.__self__, '__name__', '')}"
            self._data_access(name, args[0], answer)
        if func in _TAKES_GRADIENT or name == "_make_dual":
            self.gradients_taken.append(self.running[-1] or "the model" if self.running else "the loss")
        elif _computes(name, answer):
            for leaf in tree_leaves((args, kwargs or {})):
                if id(leaf) in self.names:
                    self._read(leaf)
                elif any(leaf is output for _, output in self._outputs):
                    self._used.add(id(leaf))
        return answer

    def _data_access(self, name: str, tensor: Any, answer: Any) -> None:
        parameter = self.names.get(id(tensor))
        if parameter is None:
            return
        if name == "__get__ data":
            self._data.setdefault(parameter, []).append((answer, version_of(answer)))
        elif name == "__set__ data":
            self.assigned.add(parameter)

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
_ANSWERS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"}
"""Calls that answer with numbers of Python's or NumPy's."""


def _computes(name: str, answer: Any) -> bool:
    """Whether a call of torch uses its arguments' numbers, rather than their shapes and types."""
    if name.startswith(("__get__", "__set__")):
        return name.partition(" ")[2] in _ATTRIBUTES
    if name in _ANSWERS:
        return True
    if name in _SHAPES_ALONE or name.endswith("_like") or name.startswith("new_"):
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(answer))


def _hook_traits(parameter: nn.Parameter) -> Iterator[Trait]:
    """What a parameter's hooks on its gradient are."""
    on_gradient, after_accumulation = gradient_hooks(parameter)
    if after_accumulation:
        yield Trait.GRADIENT_HOOK
    for hook in on_gradient:
        yield Trait.LINEAR_GRADIENT_HOOK if _is_linear(hook, parameter) else Trait.GRADIENT_HOOK


def _is_linear(hook: Callable[[Tensor], Tensor | None], parameter: nn.Parameter) -> bool:
    """Whether a hook of a sum of gradients gives the sum of what it gives of each."""
    if parameter.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    shape, dtype = parameter.shape, parameter.dtype
    one, other = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))

    def changed(gradient: Tensor) -> Tensor:
        replaced = hook(gradient.clone())
        return gradient if replaced is None else replaced

    try:
        return torch.allclose(changed(one) + changed(other), changed(one + other), rtol=1e-4, atol=1e-5)
    except Exception:  # a hook that reads what a real step has left somewhere
        return False


def _changed_parameters(by_batch: list[dict[str, Tensor]]) -> list[Observation]:
    """Parameters that forward has changed, and whether alike for every batch."""
    names = _unique(name for changes in by_batch for name in changes)

    def depends(name: str) -> bool:
        values = [changes.get(name) for changes in by_batch]
        first = values[0]
        return any(value is None or first is None or not torch.equal(value, first) for value in values)

    if not names:
        return []
    on_meta = any(value.is_meta for changes in by_batch for value in changes.values())
    by_data = tuple(name for name in names if on_meta or len(by_batch) == 1 or depends(name))
    alike = tuple(name for name in names if name not in by_data)
    found = [(Trait.CHANGES_PARAMETERS_BY_DATA, by_data), (Trait.CHANGES_PARAMETERS, alike)]
    return [Observation(trait, where) for trait, where in found if where]


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


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
