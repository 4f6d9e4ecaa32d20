"""Reads what a task's own model costs, whatever the model: nothing here knows one by name.

The model is built on `meta`, watched under fake tensors (trace.py) at two sizes of the micro-batch and, if it can be
split, as one of two tensor-parallel workers. Every cost is then

    cost(b, t) = c0 + c1·b + (c2 + c3·b) / t          b samples in the micro-batch, t tensor-parallel workers

exactly in b for nearly all models, within a few per cent in t (what is gathered is a copy that t = 1 has not); so
four traces of unlike blocks give all sizes and degrees. If the model cannot be built on `meta` it is built under fake
tensors; if its code looks at values it is run for real, once, on the CPU; and `note` says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

from app.data.loader import fetch, rows
from app.errors import UserError
from app.planner.fitted import Costs, fitted
from app.planner.trace import Trace, watch
from app.tasks.base import Task
from strategies.blocks import find_blocks, separable
from strategies.costs import ModelSize, model_size
from strategies.layout import LayoutError
from strategies.tensor.cost import one_part
from strategies.tensor.plan import make_plan

BATCHES = (2, 4)
PLAIN, CAST, AUTOCAST = "plain", "cast", "autocast"
"""How precision is had: float32; every number 16 bits (sharded strategies); torch.autocast (the others)."""
GPU = " on a GPU"
"""After one of these: the same, with what a GPU's kernels fuse and a CPU's do not."""
ROOM = 0.8
"""Share of the host's free memory that a model may take which must be run for real; activations come on top."""


@dataclass
class ModelRead:
    """All that the planner knows of a model."""

    size: ModelSize
    blocks: list[str]
    heads: int | None
    splittable: bool
    """Whether it can be tensor-parallel."""
    planned: bool
    """Whether by a plan of the task's (fast), or by splitting every linear layer (slow)."""
    sequence_length: int | None
    items_per_sample: float
    unit: str
    sample_bytes: float
    samples: int
    note: str = ""
    costs: dict[str, Costs] = field(default_factory=dict)
    compute_name: str = ""

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in self.size.parameters)


class Reader:
    """Reads one task's model, each way of having precision when it is first asked for."""

    def __init__(
        self,
        task: Task,
        *,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        tensor: bool = True,
    ) -> None:
        self.task = task
        self.parallel_options = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        self.note = ""
        self.real = False
        data = task.train_data()
        self.samples = len(data)  # type: ignore[arg-type]
        self.batches = {b: fetch(data, [(i % self.samples, i) for i in range(b)]) for b in BATCHES}
        structure = self._structure()
        self.blocks = find_blocks(structure, task.blocks(structure))
        plan = task.tensor_plan(structure)
        try:
            self.dims = make_plan(structure, plan, sequence_parallel).dims
        except LayoutError:
            self.dims = {}
        self.tp = next((t for t in (2, 3, 5, 7) if not (task.heads() or t) % t), 0) if self.dims and tensor else 0
        self.model = ModelRead(
            model_size(structure, separable(structure, self.blocks), self.dims),
            self.blocks,
            task.heads(),
            bool(self.tp),
            plan is not None,
            getattr(task, "sequence_length", None),
            float(torch.as_tensor(task.items(self.batches[BATCHES[0]])).item()) / rows(self.batches[BATCHES[0]]),
            task.unit,
            sum(t.numel() * t.element_size() for t in _tensors(self.batches[BATCHES[0]]))
            / rows(self.batches[BATCHES[0]]),
            self.samples,
        )
        if not self.model.size.parameters:
            raise UserError("the task's model has no parameters, so there is nothing to plan")

    def read(self, way: str = PLAIN) -> ModelRead:
        """The model with its costs under `way` (PLAIN, or CAST + GPU, …) among its `costs`."""
        if way not in self.model.costs:
            self.model.costs[way] = self._costs(way)
            self.model.note = self.note
        return self.model

    # --- building -----------------------------------------------------------------------------------------------

    def _structure(self) -> nn.Module:
        try:
            with torch.device("meta"):
                return self.task.build_model()
        except UserError:
            raise
        except Exception as error:
            self.note = f"the model cannot be built on the meta device ({_first_line(error)}): read under fake tensors"
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return self.task.build_model()
            except Exception:
                self.note = f"the model cannot be built without storage ({_first_line(error)}): built and run for real"
                self.real = True
                return self.task.build_model()

    def _costs(self, way: str) -> Costs:
        traces: dict[tuple[int, int], Trace] = {}
        for batch in BATCHES:
            traces[batch, 1] = self._trace(batch, 1, way)
        if self.tp:
            try:
                for batch in BATCHES:
                    traces[batch, self.tp] = self._trace(batch, self.tp, way)
                if not (self.task.heads() or 2 * self.tp) % (2 * self.tp):
                    traces |= {(batch, 2 * self.tp): self._trace(batch, 2 * self.tp, way) for batch in BATCHES}
            except Exception as error:
                self.model.splittable, self.tp = False, 0
                self.note = self.note or f"tensor parallelism is left out: {_first_line(error)}"
                traces = {key: trace for key, trace in traces.items() if key[1] == 1}
        return fitted(traces, self.tp)

    def _trace(self, batch: int, tp: int, way: str) -> Trace:
        if not self.real:
            try:
                return self._traced(batch, tp, way, FakeTensorMode(allow_non_fake_inputs=True))
            except LayoutError:
                raise
            except Exception as error:
                if tp > 1:
                    raise
                self.real = True
                self.note = f"the model's code looks at values ({_first_line(error)}): run for real, once, on the CPU"
        self._require_room(way)
        return self._traced(batch, tp, way, None)

    def _require_room(self, way: str) -> None:
        """Raises UserError if this host has no room to run the model for real."""
        import psutil

        numbers = self.model.parameters
        needed, free = numbers * (4 + (4 if way.startswith(CAST) else 8)), psutil.virtual_memory().available
        if needed > ROOM * free:
            raise UserError(
                "the model's code looks at values, so it must be run for real to be planned, and that takes "
                f"{needed / 2**30:.1f} GiB and its activations where {free / 2**30:.1f} GiB are free: plan it on a "
                "larger machine, or plan the same model with fewer layers"
            )

    def _traced(self, batch: int, tp: int, way: str, mode: FakeTensorMode | None) -> Trace:
        module = self.task.build_model() if mode is None else self._fake(mode, way.removesuffix(GPU))
        module.train()
        peers = None
        if tp > 1:
            peers, _ = one_part(module, self.task.tensor_plan(module), tp, **self.parallel_options)
        values: Any = self.batches[batch]
        gpu, way = way.endswith(GPU), way.removesuffix(GPU)
        if way == CAST:
            if mode is None:
                module.to(torch.bfloat16)
            values = tree_map_only(torch.Tensor, _as_bfloat16, values)
            if self.task.float_output:
                module.register_forward_hook(lambda _, __, output: _as_float(output))
        if mode is not None:
            values = tree_map_only(torch.Tensor, mode.from_tensor, values)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == AUTOCAST)

        def loss(model: nn.Module) -> Tensor:
            with autocast:
                return self.task.loss(model, values)

        with mode or contextlib.nullcontext(), _quietly():
            return watch(module, self.blocks, loss, peers, gpu)

    def _fake(self, mode: FakeTensorMode, way: str) -> nn.Module:
        dtype = torch.bfloat16 if way == CAST else None
        try:
            with torch.device("meta"):
                module = self.task.build_model().to(dtype=dtype)
            with mode:
                module.to_empty(device="cpu")
                getattr(module, "tie_weights", lambda: None)()
                return module
        except Exception:
            with mode:
                return self.task.build_model().to(dtype=dtype)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's log of an operation that fake tensors cannot do: what follows from it is said in a note."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _as_float(output: Any) -> Any:
    return tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, output)


def _as_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _tensors(batch: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_flatten(batch)[0] if isinstance(t, Tensor)]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"


def sized(model: ModelRead, micro_batch: int, way: str = PLAIN, tp: int = 1) -> ModelSize:
    """The model as strategies' cost functions see it, with the activations of one micro-batch read off the model.

    The model must have been read under `way`. tp: activations of one of so many tensor-parallel workers.
    """
    costs = model.costs[way]
    counts = Counter(costs.order)

    def total(name: str, *kinds: str) -> int:
        found = sum(float(costs.parts[kind].at(name, micro_batch, tp)) * counts.get(kind, 1) for kind in kinds)
        return round(found)

    inside = [kind for kind in costs.parts if kind in counts]
    outside = [kind for kind in costs.parts if kind not in counts]
    boundary = max((float(costs.parts[kind].at("boundary", micro_batch, tp)) for kind in inside), default=0.0)
    return dataclasses.replace(
        model.size,
        activation_bytes=total("saved", *costs.parts),
        boundary_bytes=round(boundary),
        kept_bytes=total("kept", *inside) if inside else None,
        outside_bytes=total("saved", *outside),
    )
