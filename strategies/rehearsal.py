"""One step of a model on one process, watched: its traits (traits.py).

One small step is run before any worker starts, with real numbers where that is quick and on the
meta device where it is not. What it does is seen in three ways: a mode that sees every call of
torch knows which tensors are computed with, and by which module's forward; the versions and values
of parameters and buffers say what forward has changed; and where gradients arrive says what they
can come back through. On the meta device everything is seen but what depends on numbers: whether a
change depends on the data, and whether two samples take different ways through the model.

A branch that most samples take alike is not found by comparing samples. So each number of a batch
that Python asks for (`if x.sum() > 0`) is answered otherwise in a run of its own, and the way that
this run takes is compared too. And a model that counts its calls in Python is found by calling it
again.
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
from strategies.state import BATCH_NORMS
from strategies.traits import Observation, Trait
from strategies.tree import tree_leaves, tree_map

Loss = Callable[[nn.Module, Any], Tensor]


def observe(
    build: Callable[[], nn.Module],
    find_blocks: Callable[[nn.Module], list[str]],
    loss: Loss,
    batches: Sequence[Any],
    seed: Callable[[int], None] = lambda number: None,
    *,
    other_answers: int = 12,
) -> list[Observation]:
    """Takes a step's forward and backward on each batch, and says what was seen.

    Every batch but the first is run forward only, to compare the way that it takes through the
    model.

    Args:
        build: gives the model, the same whenever it is called, where the batches are: on the CPU or
            on meta.
        find_blocks: the names of its repeating blocks.
        loss: (model, batch) → the mean loss, 0-dimensional.
        batches: at least one, as `loss` takes them.
        seed: is called with the number of the batch before its forward, and seeds the generators
            that it draws from.
        other_answers: runs in which one number of the batch is answered otherwise, at most.
    """

    def watched(number: int, answers: _Answers, *, backward: bool = False) -> _Watch:
        with _Hooks() as hooks:
            module = build().train()
        watch = _Watch(module, find_blocks(module), hooks, answers)
        seed(number)
        watch.step(loss, batches[number], backward=backward)
        return watch

    watches = [watched(number, _Answers(), backward=number == 0) for number in range(len(batches))]
    first = watches[0]
    routes = [watch.route for watch in watches]
    other_routes = []
    for otherwise in first.answers.others(other_answers):
        with contextlib.suppress(
            Exception
        ):  # the code after the branch need not bear the other answer
            other_routes.append(watched(0, otherwise).route)
    for extreme in first.answers.extremes():
        with contextlib.suppress(Exception):
            routes.append(watched(0, extreme).route)
    again = _called_again(first, loss, batches[0], lambda: seed(0))
    return [
        *first.observations(),
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
        *_varying([*routes, *other_routes]),
        *_branching([first.route, *other_routes]),
        *again,
    ]


CALLS_AGAIN = 3
"""How often the model is called again, to see whether it counts its calls."""
STEP_SIZE = 0.05
"""By which parameters are moved between two calls, as an optimizer would."""


def _called_again(
    first: _Watch, loss: Loss, batch: Any, seed: Callable[[], None]
) -> list[Observation]:
    """What the same model does otherwise with the same batch when it is called again.

    Where its code raises, because it can be called once alone, nothing is said.
    """

    def called() -> _Watch:
        watch = _Watch(first.module, sorted(first.blocks), _Hooks(), _Answers())
        seed()
        watch.step(loss, batch, backward=False)
        return watch

    routes = [first.route]
    answers = [first.part_answers]
    moved: list[str] = []
    with contextlib.suppress(Exception):
        for _ in range(CALLS_AGAIN):
            watch = called()
            routes.append(watch.route)
            answers.append(watch.part_answers)
        if first.changes:
            _move(first.module)
            called()
            moved = called().moved  # what is only kept within bounds is there since the call before
    seen = [
        (Trait.VARIES_BY_CALL, _differences(routes)),
        (Trait.ANSWERS_OTHERWISE, _unique(_answering_otherwise(answers))),
        (Trait.CHANGES_PARAMETERS_EACH_TIME, _unique(moved)),
    ]
    return [Observation(trait, names) for trait, names in seen if names]


def _answering_otherwise(calls: list[list[_PartAnswer]]) -> Iterator[str]:
    """The parts that were given the same in several calls of the model and put out something else."""
    for several in zip(*calls, strict=False):
        first = several[0]
        for other in several[1:]:
            is_same = (other.name, other.given) == (first.name, first.given)
            if is_same and not _nearly_equal(
                torch.tensor(other.put_out), torch.tensor(first.put_out)
            ):
                yield first.name or "the model"


def _move(module: nn.Module) -> None:
    """Moves what is trained a little, as the optimizer does between two steps."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(step, alpha=STEP_SIZE)


@dataclass(frozen=True)
class _PartAnswer:
    """What a part that would be recomputed was given and put out: of each tensor the sum of its numbers."""

    name: str
    given: tuple[float, ...]
    put_out: tuple[float, ...]


@dataclass
class _Route:
    """The modules that a batch was given to, in order, and the parameters that were computed with."""

    calls: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


MOST_QUESTIONS = 200
"""That a forward may ask on the meta device, where a loop that waits for numbers would not end."""
FAR = 1000.0
"""A float that is beyond what numbers are compared with, and small enough to be a size."""


@dataclass
class _Answers:
    """The numbers of tensors that Python asks for (`bool(x)`, `x.item()`): which depend on the batch, and one of them
    answered otherwise.

    Args:
        otherwise: the number of the question, among those about the batch, that gets another
            answer, and that answer.
        drawn: what a single number that is drawn evenly from 0 to below 1 is said to be, or the
            nearest below it; None: what it is.
    """

    otherwise: tuple[int, Any] | None = None
    drawn: float | None = None
    draws: bool = False
    """Whether such a number was drawn, by which layers are dropped."""
    asked: int = 0
    about_data: list[Any] = field(default_factory=list)
    """The answers that depend on the batch, in order."""
    made_up: bool = False
    """Whether any answer was, because a tensor had no numbers."""

    def answer(
        self, func: Callable[..., Any], tensor: Tensor, name: str, args: Any, *, is_data: bool
    ) -> Any:
        """What Python is told."""
        self.asked += 1
        if tensor.is_meta:
            if self.asked > MOST_QUESTIONS:
                raise RuntimeError("a loop waits for numbers, which the meta device has none of")
            self.made_up = True
            value = _without_numbers(name, tensor)
        else:
            value = func(*args)
        if not is_data:
            return value
        number = len(self.about_data)
        self.about_data.append(value)
        if self.otherwise is not None and self.otherwise[0] == number:
            return type(value)(self.otherwise[1])
        return value

    def draw(self, number: Tensor) -> None:
        """Notes a single number that was drawn, and writes another in its place."""
        self.draws = True
        if self.drawn is not None:
            number.fill_(min(self.drawn, 1 - torch.finfo(number.dtype).eps))

    def extremes(self) -> list[_Answers]:
        """The same with all that is drawn as small and as large as can be: what is never so decided is never done."""
        return [_Answers(drawn=0.0), _Answers(drawn=1.0)] if self.draws else []

    def others(self, most: int) -> list[_Answers]:
        """The same with one answer another one; of more than `most` questions some, from first to last."""
        other = [
            (number, value)
            for number, given in enumerate(self.about_data)
            for value in _other_values(given)
        ]
        step = max(1, -(-len(other) // most))
        return [_Answers(otherwise) for otherwise in other[::step]]


def _without_numbers(name: str, tensor: Tensor) -> Any:
    """What a tensor without numbers is said to have: nothing, so that checks pass and loops end."""
    is_truth = name in ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")
    if is_truth or (name == "item" and tensor.dtype == torch.bool):
        return False
    is_float = name == "__float__" or (name == "item" and tensor.is_floating_point())
    return 0.0 if is_float else 0


def _other_values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (1 - value,) if value in (0, 1) else (0, value + 1)
    return (FAR, -FAR) if isinstance(value, float) else ()


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
        def registered(
            module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
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


_MODULE_HOOKS = (
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


class _Watch(TorchFunctionMode):
    """Sees every call of torch while it is the current mode, and which of the model's modules are running."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[str], hooks: _Hooks, answers: _Answers
    ) -> None:
        super().__init__()
        self.module = module
        self.answers = answers
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
        self.functional_calls: list[str] = []
        self.changed_inputs: list[str] = []
        self.changed_data: list[str] = []
        """The same of inputs without a gradient, of what would be recomputed: blocks, or else the whole model."""
        self.part_answers: list[_PartAnswer] = []
        self.recomputed = self.blocks or frozenset({""})
        self.changed_outputs: list[str] = []
        self.without_graph: list[str] = []
        """Blocks that have run without gradients, once for each time."""
        self.read_without_graph: dict[str, set[int]] = {}
        """Of each parameter in which of these calls it was used."""
        self.run_in_backward: set[str] = set()
        """Blocks that have run in backward, as checkpoints do."""
        self.changes: dict[str, Tensor] = {}
        """Parameters that forward has changed, as they are then."""
        self.moved: list[str] = []
        """Of those, the ones that are others now, by more than rounding."""
        self.buffers = dict(_buffers_of_others_than_batch_norm(module))
        self.changed_buffers: dict[str, Tensor] = {}
        self.written: set[str] = set()
        """Parameters that a call of torch wrote into, or into whose `data`."""
        self.requires_grad_changed: list[str] = []
        self.unused: list[str] = []
        self.without_gradient: list[str] = []
        self.past_output: list[str] = []
        """Blocks whose parameters get a gradient, and none of whose outputs does."""
        self._outputs: list[tuple[str, Tensor]] = []
        """What blocks put out and a gradient can come back to, by block."""
        self._used: set[int] = set()
        """Of those, what anything was computed from, by identity."""
        self._reached: set[int] = set()
        """Of those, what a gradient came back to, by identity."""
        self._listed_parameters: set[int] = set()
        self._same_memory: dict[int, tuple[str, Tensor]] = {}
        """Other tensors in a parameter's memory, by identity: its name, and the tensor, so that it stays."""
        self._inputs: list[tuple[nn.Module, list[tuple[Tensor, Tensor]]]] = []
        """Of the parts that are running and would be recomputed, what each was given, and a copy of it."""
        self._written_inputs: set[int] = set()
        self._looks_itself = False
        """Whether it is not the model that calls torch now."""
        self._from_batch: dict[int, Tensor] = {}
        """The batch's tensors and what was computed from them, by identity; kept, so that no identity comes twice."""

    # --- a step -----------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Any, *, backward: bool) -> None:
        """Runs the loss, and its backward, while watching. The batch stays as it is, whatever the model does to it."""
        batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        before = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        self._from_batch = {
            id(leaf): leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)
        }
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
        self.moved = [
            name for name, value in self.changes.items() if not _nearly_equal(value, before[name])
        ]
        self.changed_buffers = {
            name: buffer.detach().clone()
            for name, buffer in _buffers_of_others_than_batch_norm(self.module)
            if name in buffers_before and _differ(buffer, buffers_before[name])
        }
        if backward and isinstance(value, Tensor) and value.requires_grad:
            for _, output in self._outputs:
                output.register_hook(functools.partial(self._gradient_reached, id(output)))
            running_again = register_module_forward_pre_hook(self._begins_in_backward)
            try:
                value.sum().backward()
            finally:
                running_again.remove()
            cut = self._used - self._reached
            self.without_gradient = [name for name, output in self._outputs if id(output) in cut]
            reached = {name for name, output in self._outputs if id(output) in self._reached}
            run = _unique(name for name, _ in self._outputs)
            self.past_output = [
                name for name in run if name not in reached and self._is_trained(name)
            ]
            self.unused = [
                name for name, p in self.named.items() if p.requires_grad and p.grad is None
            ]
        self._outputs.clear()
        self._from_batch.clear()
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
            (
                Trait.BACKWARD_HOOK,
                [self.modules.get(id(part), "a module") for part, _ in self.backward_hooks],
            ),
            (Trait.CUTS_GRAPH, self.without_gradient),
            (Trait.GRADIENT_PAST_OUTPUT, self.past_output),
            (Trait.NORMALISES_OVER_BATCH, self._normalising()),
            (Trait.CHANGES_INPUT, self.changed_inputs),
            (Trait.CHANGES_DATA, self.changed_data),
            (Trait.CHANGES_OUTPUT, self.changed_outputs),
            (
                Trait.RUNS_WITHOUT_GRADIENT,
                [name for name in self.without_graph if name in self.run_in_backward],
            ),
            (Trait.USED_BY_REENTRANT_CHECKPOINTS, self._used_by_reentrant_checkpoints()),
            (Trait.RECURRENT, self._recurrent()),
            (Trait.GRADIENT_IN_LOSS, self.gradients_taken),
            (Trait.FUNCTIONAL_CALL, self.functional_calls),
        ]
        by_hooks: dict[Trait, list[str]] = {}
        for tensor, hook in self.hooks.of_tensors:
            if (name := self.names.get(id(tensor))) is not None:
                linear = _is_linear(hook, tensor)
                trait = Trait.LINEAR_GRADIENT_HOOK if linear else Trait.GRADIENT_HOOK
                by_hooks.setdefault(trait, []).append(name)
        for tensor in self.hooks.after_accumulation:
            by_hooks.setdefault(Trait.GRADIENT_HOOK, []).append(
                self.names.get(id(tensor), "a parameter")
            )
        untold = _OF_THE_OTHER_WAY if self.answers.made_up else frozenset[Trait]()
        return [
            Observation(trait, _unique(names))
            for trait, names in [*seen, *by_hooks.items()]
            if names and trait not in untold
        ]

    def _recurrent(self) -> list[str]:
        """Recurrent layers in blocks."""
        return [
            name
            for name, part in self.module.named_modules()
            if isinstance(part, (nn.RNNBase, nn.RNNCellBase))
            and any(f"{name}.".startswith(f"{block}.") for block in self.blocks)
        ]

    def _used_by_reentrant_checkpoints(self) -> list[str]:
        again = [
            number for number, name in enumerate(self.without_graph) if name in self.run_in_backward
        ]
        return [
            name
            for name, calls in self.read_without_graph.items()
            if len(calls.intersection(again)) > 1
        ]

    def _normalising(self) -> list[str]:
        return [
            name
            for name, part in self.module.named_modules()
            if isinstance(part, BATCH_NORMS) and part.training
        ]

    def _replaced(self) -> list[str]:
        """Parameters that are not the model's any more."""
        now = {id(parameter) for parameter in self.module.parameters()}
        return [name for name, parameter in self.named.items() if id(parameter) not in now]

    # --- modules ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _module_hooks(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        for name in self.recomputed:
            part = self.module.get_submodule(name)
            handles.append(part.register_forward_pre_hook(self._is_given, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        name = self.modules.get(id(module))
        if name is None:
            return
        if module is self.module and any(
            f.f_code.co_name == "functional_call" for f, _ in traceback.walk_stack(None)
        ):
            self.functional_calls.append("the model")
        self.running.append(name)
        if name in self.blocks:
            self.route.calls.append(name)
            if not torch.is_grad_enabled():
                self.without_graph.append(name)

    def _is_given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._looks_itself = True
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._inputs.append((module, [(tensor, tensor.detach().clone()) for tensor in tensors]))
        self._looks_itself = False

    def _compare_inputs(self, module: nn.Module, name: str, output: Any) -> None:
        """What a part that ends was given, with what that is now; and notes what it puts out."""
        if not self._inputs or self._inputs[-1][0] is not module:  # a hook before ours has raised
            return
        self._looks_itself = True
        _, inputs = self._inputs.pop()
        for tensor, copy in inputs:
            if id(tensor) in self._written_inputs or _differ(tensor, copy):
                changed = (
                    self.changed_inputs if tensor.requires_grad and name else self.changed_data
                )
                changed.append(name or "the model")
        put_out = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.part_answers.append(
            _PartAnswer(name, _sums(copy for _, copy in inputs), _sums(put_out))
        )
        self._looks_itself = False

    def _begins_in_backward(self, module: nn.Module, args: Any) -> None:
        if (name := self.modules.get(id(module))) in self.blocks:
            self.run_in_backward.add(str(name))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.modules.get(id(module))
        if name is None or not self.running or self.running[-1] != name:
            return
        self.running.pop()
        if any(
            id(leaf) in self._from_batch for leaf in tree_leaves(args)
        ):  # through functions that are not torch's
            self._from_batch.update(
                {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
            )
        if name in self.recomputed:
            self._compare_inputs(module, name, output)
        if name in self.blocks:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._outputs += [(name, leaf) for leaf in leaves if leaf.requires_grad]

    # --- what is computed with --------------------------------------------------------------------

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
        if self._looks_itself:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        leaves = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        is_data = any(id(leaf) in self._from_batch for leaf in leaves)
        if name in _QUESTIONS and not kwargs and leaves:
            answer = self.answers.answer(func, leaves[0], name, args, is_data=is_data)
        else:
            answer = func(*args, **(kwargs or {}))
        if name == "rand" and answer.numel() == 1:
            self.answers.draw(answer)
        if is_data:
            for leaf in tree_leaves(answer):
                if isinstance(leaf, Tensor):
                    self._from_batch[id(leaf)] = leaf
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
        elif (
            name == "register_hook"
            and id(args[0]) not in self.names
            and not _is_linear(args[1], args[0])
        ):
            self.activation_hooks.append(where)
        elif _computes(name, answer):
            for leaf in leaves:
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
        if any(tensor is given for _, inputs in self._inputs for given, _ in inputs):
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
        if (
            self.without_graph
            and self.without_graph[-1] in self.running
            and not torch.is_grad_enabled()
        ):
            self.read_without_graph.setdefault(name, set()).add(len(self.without_graph) - 1)
        if id(parameter) in self._listed_parameters and reader not in self.owners[id(parameter)]:
            self.listed.append(name)
        if reader is None:
            self.reads_outside.append(name)
        block = next((block for block in self.separable if name.startswith(f"{block}.")), None)
        if block is not None and block not in self.running:
            self.block_reads.append(name)


_OF_THE_OTHER_WAY = frozenset({Trait.UNUSED_PARAMETERS, Trait.CUTS_GRAPH})
"""What may be true of the way alone that a made-up answer leads to."""
_TAKES_GRADIENT = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SHAPES_ALONE = {"requires_grad_", "type_as", "expand_as", "view_as", "reshape_as", "register_hook"}
"""Calls that answer with a tensor and use of the other argument its shape or type alone, or none of its numbers."""
_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that have its numbers."""
_SAME_MEMORY = {
    "__get__ data",
    "detach",
    "view",
    "flatten",
    "t",
    "__get__ T",
    "__getitem__",
    "select",
    "narrow",
}
"""Calls that answer with a tensor in the memory of the first argument."""
_ONLY_NAMED_SO = {"requires_grad_", "share_memory_", "rename_", "retains_grad_"}
"""Calls whose names end as those do that write into their first argument."""
_QUESTIONS = {
    "__bool__",
    "is_nonzero",
    "equal",
    "allclose",
    "__contains__",
    "item",
    "__int__",
    "__index__",
    "__float__",
}
"""Calls by which Python asks for one number, to decide by it."""
_ANSWERS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "__array__",
}
"""Calls that answer with numbers of Python's or NumPy's."""


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of torch writes into, as far as its name and arguments say."""
    in_place = name.endswith("_") and not name.endswith("__") and name not in _ONLY_NAMED_SO
    by_operator = name in ("__setitem__", "__set__ data") or (
        name.startswith("__i") and name in _OPERATORS
    )
    targets: list[Any] = []
    if in_place or by_operator or kwargs.get("inplace"):
        targets.append(args[0])
    if name in ("embedding", "embedding_bag"):
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        targets.append(args[1] if max_norm is not None else None)
    targets.append(kwargs.get("out"))
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]


_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _sums(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Of each tensor that has real numbers the sum of their sizes."""
    real = (tensor.detach() for tensor in tensors if not tensor.is_meta)
    return tuple(
        float((tensor.abs() if tensor.is_complex() else tensor).double().abs().sum())
        for tensor in real
    )


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
        return torch.allclose(
            changed(one) + changed(other), changed(one + other), rtol=1e-4, atol=1e-5
        )
    except Exception:  # a hook that reads what a real step has left somewhere
        return False


def _of_one_gradient(
    hook: Callable[..., Any],
    module: nn.Module,
    inward: tuple[Any, ...],
    outward: tuple[Any, ...],
    at: int,
) -> Callable[[Tensor], Tensor | None]:
    """A module's backward hook as a function of the gradient of one of its inputs."""

    def changed(gradient: Tensor) -> Tensor | None:
        replaced = hook(module, (*inward[:at], gradient, *inward[at + 1 :]), outward)
        return replaced if replaced is None or isinstance(replaced, Tensor) else replaced[at]

    return changed


def _changed(
    by_batch: list[dict[str, Tensor]], *, alike: Trait, by_data: Trait
) -> list[Observation]:
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
    return [
        Observation(trait, where)
        for trait, where in ((by_data, dependent), (alike, others))
        if where
    ]


def _buffers_of_others_than_batch_norm(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by name. (What batch normalisation keeps of a batch has a note of its own: state.py.)"""
    for path, owner in module.named_modules():
        if not isinstance(owner, BATCH_NORMS):
            for name, buffer in owner.named_buffers(recurse=False):
                yield f"{path}.{name}".lstrip("."), buffer


def _branching(routes: list[_Route]) -> list[Observation]:
    """Whether a number of the batch decides which way is taken."""
    different = _differences(routes)
    return [Observation(Trait.BRANCHES_ON_DATA, different)] if different else []


def _differences(routes: list[_Route]) -> tuple[str, ...]:
    """The blocks or parameters of routes that are not the same; () where they are."""
    return next((observation.names for observation in _varying(routes)), ())


def _nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two are equal but for rounding; on meta they have no numbers."""
    if one.is_meta:
        return True
    rtol = 1e-2 if one.element_size() < 4 else 1e-5
    return torch.allclose(one, other, rtol=rtol, atol=rtol * 0.1, equal_nan=True)


def _varying(routes: list[_Route]) -> list[Observation]:
    """Blocks that not all batches call equally often or in the same order, and parameters that not all use."""
    observations: list[Observation] = []
    if not routes:
        return observations
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
