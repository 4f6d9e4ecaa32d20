"""Reads what a task's own model costs, whatever the model: nothing here knows one by name.

The model is built on `meta` and watched under fake tensors (trace.py) at two sizes of the micro-batch and, if it can be
split, as one of t tensor-parallel workers for one or two values of t. Every cost is then

    cost(b, t) = c0 + c1·b + (c2 + c3·b) / t + (c4 + c5·b)·[t > 1]        b samples in the micro-batch

exactly in b for nearly all models, within a few per cent in t. The last term is what only split layers do, such as
gathering their input; it needs two values of t. So a few traces of unlike blocks give all sizes and degrees. A model
that cannot be built on `meta`, or whose code looks at values, is run for real, once, on the CPU; and `note` says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.data.loader import fetch, length, map_tensors, rows, tensors
from app.errors import UserError
from app.planner.model_costs import ModelCosts, PartCosts, basis
from app.planner.trace import AFTER, BEFORE, PartTrace, Trace, alike, watch
from app.tasks.base import Task
from app.tasks.build import build_model
from strategies.blocks import find_blocks, separable
from strategies.context.apply import require_positions
from strategies.costs import ParameterSize, model_size
from strategies.dims import LayoutError
from strategies.expert.exchange import exchanged_bytes
from strategies.mixtures import find_mixtures
from strategies.tensor.apply import one_part
from strategies.tensor.plan import make_plan
from strategies.torch_internals import fake_mode

BATCHES = (2, 4)
PLAIN, CAST, AUTOCAST = "plain", "cast", "autocast"
"""How precision is had: float32; every number 16 bits (sharded strategies); torch.autocast (the others)."""
WHOLE = ", whole"
"""Behind one of these: what a device computes that has the whole model, as the task says it for a GPU."""
ROOM = 0.8
"""Share of the host's free memory that a model may take which must be run for real; activations come on top."""


class Reader:
    """Reads one task's model, each way of having precision when it is first asked for."""

    def __init__(
        self,
        task: Task,
        *,
        on_gpu: bool = False,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        splits: bool = True,
    ) -> None:
        """Reads the structure; what it costs is read when it is first asked for.

        Args:
            task: Whose model is read.
            on_gpu: Whether it is for GPUs.
            sequence_parallel: Whether tensor parallelism splits the sequence outside of products.
            loss_parallel: Whether it splits the loss.
            splits: Whether tensor parallelism is looked at; False saves two of three traces.
        """
        self.task, self.note, self.on_gpu = task, "", on_gpu
        self.parallel_options = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        self.compiles_loss = on_gpu and task.compiles_loss
        self._real = fake_mode() is None
        self._costs: dict[str, ModelCosts] = {}
        data = task.train_data()
        self.samples = length(data)
        self.batches = {b: fetch(data, [(i % (self.samples or BATCHES[-1]), i) for i in range(b)]) for b in BATCHES}
        first = self.batches[BATCHES[0]]
        self.items_per_sample = float(torch.as_tensor(task.items(first)).item()) / rows(first)
        self.sample_bytes = sum(t.nbytes for t in tensors(first)) / rows(first)
        self.sequence_length: int | None = getattr(task, "sequence_length", None)
        self.heads = task.heads()
        structure = self._structure()
        self._names = find_blocks(structure, task.blocks(structure))
        self.blocks = len(self._names)
        try:
            plan = make_plan(structure, task.tensor_plan(structure), sequence_parallel)
            split, styles = plan.dims, plan.styles
        except LayoutError:
            split, styles = {}, {}
        try:
            require_positions(structure, task.context_plan(structure))
            self.splits_sequence = True
        except (LayoutError, UserError):
            self.splits_sequence = False
        self.size = model_size(structure, separable(structure, self._names), split)
        self.mixtures = find_mixtures(structure)
        tokens = self.sequence_length or 1
        self.exchanged = sum(exchanged_bytes(tokens, found.top_k, found.width, 1) for found in self.mixtures)
        """Numbers of a sample's rows that mixtures would send to experts and back, where they are split."""
        self.parameters = sum(p.numel for p in self.size.parameters)
        self._skeleton = structure if self._real else _alike_shared(structure, self._names, styles)
        self.tp = next((t for t in (2, 3, 5, 7) if split and splits and not (self.heads or t) % t), 0)
        """The degree that the model is split by to be watched; 0: it cannot be split."""
        if not self.parameters:
            raise UserError("the task's model has no parameters, so there is nothing to plan")

    def costs(self, way: str = PLAIN) -> ModelCosts:
        """way: PLAIN, CAST or AUTOCAST, maybe with WHOLE."""
        if way.endswith(WHOLE):
            return (self._of_whole or self).costs(way.removesuffix(WHOLE))
        if way not in self._costs:
            self._costs[way] = self._read(way)
        return self._costs[way]

    def _read(self, way: str) -> ModelCosts:
        """The costs; reading them may find out `tp`, `note`, and whether the model is run for real."""
        traces = self._traces(way)
        first = traces[min(traces)]
        parts = {
            name: _fitted({k: t.parts[name] for k, t in traces.items() if name in t.parts}) for name in first.parts
        }
        return ModelCosts(parts, first.order, self._by_part(first))

    @functools.cached_property
    def _of_whole(self) -> Reader | None:
        """Reads what a GPU computes that has the whole model; None: nothing else than this one reads."""
        other = self.task.on_gpu() if self.on_gpu else None
        if other is None:
            return None
        reader = copy.copy(self)
        reader.task, reader.tp, reader._costs = other, 0, {}
        return reader

    def _by_part(self, trace: Trace) -> dict[str, tuple[ParameterSize, ...]]:
        """The parameters of one part of each kind; one outside of blocks is before or after by where it stands."""
        kinds = dict(zip(self._names, trace.order)) if len(trace.order) == len(self._names) else {}
        first = {kind: block for block, kind in reversed(kinds.items())}
        found: dict[str, list[ParameterSize]] = {name: [] for name in trace.parts}
        side = BEFORE
        for parameter in self.size.parameters:
            block = next((name for name in kinds if parameter.name.startswith(name + ".")), None)
            if block is None:
                found[side if side in found else BEFORE if BEFORE in found else next(iter(found))].append(parameter)
                continue
            side = AFTER
            if first[kinds[block]] == block:
                found[kinds[block]].append(parameter)
        return {name: tuple(own) for name, own in found.items()}

    def _structure(self) -> nn.Module:
        try:
            with torch.device("meta"):
                return build_model(self.task)
        except UserError:
            raise
        except Exception as error:
            self._real = True
            self.note = f"the model cannot be built on the meta device ({_first_line(error)}): built and run for real"
            return build_model(self.task)

    def _traces(self, way: str) -> dict[tuple[int, int], Trace]:
        """By (batch, tp)."""
        found = {(batch, 1): self._trace(batch, way) for batch in BATCHES}
        degrees = [t for t in (self.tp, 2 * self.tp) if t and not (self.heads or t) % t]
        try:
            return found | {(batch, t): self._traced(batch, t, way) for t in degrees for batch in BATCHES}
        except Exception as error:
            self.tp = 0
            self.note = self.note or f"tensor parallelism is left out: {_first_line(error)}"
            return found

    def _trace(self, batch: int, way: str) -> Trace:
        if not self._real:
            try:
                return self._traced(batch, 1, way)
            except Exception as error:
                self._real = True
                self.note = f"the model's code looks at values ({_first_line(error)}): run for real, once, on the CPU"
        _require_room(self.parameters * (8 if way == CAST else 12))
        return self._traced(batch, 1, way)

    def _traced(self, batch: int, tp: int, way: str) -> Trace:
        fake = None if self._real else fake_mode()
        module, values = self._module(way, fake).train(), self.batches[batch]
        peers = one_part(module, self.task.tensor_plan(module), tp, **self.parallel_options)[0] if tp > 1 else None
        if way == CAST:
            values = _cast(values, torch.bfloat16)
            if self.task.float_output:
                module.register_forward_hook(lambda _, __, output: _cast(output, torch.float32))
        if fake is not None:
            values = map_tensors(fake.from_tensor, values)

        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == AUTOCAST):
                return self.task.loss(model, values)

        with fake or contextlib.nullcontext():
            return watch(module, self._names, loss, peers)

    def _module(self, way: str, fake: Any) -> nn.Module:
        dtype = torch.bfloat16 if way == CAST else None
        if fake is None:
            return build_model(self.task).to(dtype=dtype)
        module, made = copy.deepcopy(self._skeleton), dict[Tensor, Tensor]()
        for owner in module.modules():
            own = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
            for name, old in own:  # one that is used in two places stays one
                if old not in made:
                    kind = dtype if dtype and old.is_floating_point() else old.dtype
                    with fake:
                        empty = torch.empty(old.shape, dtype=kind)
                    made[old] = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
                setattr(owner, name, made[old])
        return module


def _alike_shared(module: nn.Module, blocks: list[str], styles: dict[str, str]) -> nn.Module:
    """The module with one block in the place of all that are alike and split alike by the tensor plan's `styles`: of
    eighty only one or two are built and split again."""
    first: dict[Any, nn.Module] = {}
    for name in blocks:
        block, (parent, _, own) = module.get_submodule(name), name.rpartition(".")
        kind = alike(block), styles.get(name)  # what is in it is split alike where it is alike
        setattr(module.get_submodule(parent), own, first.setdefault(kind, block))
    return module


def _require_room(needed: float) -> None:
    """Raises UserError if this host has no room to run the model for real."""
    import psutil

    free = psutil.virtual_memory().available
    if needed > ROOM * free:
        raise UserError(
            "the model's code looks at values, so planning has to run the model for real, and that takes "
            f"{needed / 2**30:.1f} GiB and its activations; {free / 2**30:.1f} GiB are free: plan it on a larger "
            "machine, or plan the same model with fewer layers"
        )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"


def _fitted(traces: dict[tuple[int, int], PartTrace]) -> PartCosts:
    """One part's costs from its traces by (batch, tp): of two batches, with tp = 1 and maybe one or two more."""
    names = {name for trace in traces.values() for name in trace.values}
    values = {name: _coefficients({key: trace.values[name] for key, trace in traces.items()}) for name in names}
    products, times = {}, {}
    for phase in ("forward", "backward"):
        lists = {key: trace.products[phase] for key, trace in traces.items()}
        if len({len(own) for own in lists.values()}) > 1:  # as if all work were split evenly
            lists = {key: own for key, own in lists.items() if key[1] == 1}
        unlike: Counter[tuple[float, ...]] = Counter()
        for i in range(min(map(len, lists.values()))):
            sizes = [_coefficients({key: float(own[i][side]) for key, own in lists.items()}) for side in range(4)]
            unlike[tuple(np.round(np.concatenate(sizes), 4))] += 1
        products[phase] = np.array(list(unlike), float).reshape(-1, 4, 6)
        times[phase] = np.array(list(unlike.values()), float)
    return PartCosts(values, products, times)


def _coefficients(values: dict[tuple[int, int], float]) -> np.ndarray:
    """c0 … c5 from values at (batch, tp); what was not traced is 0."""
    known = 2 * len({tp for _, tp in values})
    equations = np.array([basis(*key)[:known] for key in values])
    found = np.zeros(6)
    found[:known] = np.linalg.lstsq(equations, np.array(list(values.values())), rcond=None)[0]
    return found
