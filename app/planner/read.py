"""Reads what the model of a task costs; nothing here knows a model by name.

The model is built on `meta` and traced under fake tensors (trace.py) with two sizes of the
micro-batch and, if it can be split, as one of t tensor-parallel workers for one or two values of t.
So a few traces of distinct blocks give the costs of all sizes and degrees (fitting.py). A model
that cannot be built on `meta`, or whose code looks at values, is run for real, once, on the CPU;
`Reader.note` says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.data.loader import fetch, length, map_tensors, rows, tensors
from app.errors import UserError
from app.planner.fitting import Key, fit_part
from app.planner.model_costs import ModelCosts
from app.planner.part_trace import AFTER, BEFORE, Trace
from app.planner.skeleton import replace_by_fakes, share_equal_blocks
from app.planner.trace import watch
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.items import count_items
from strategies.blocks import find_blocks, separable
from strategies.context.apply import require_positions
from strategies.costs import EIGHT_BIT_BLOCK, ParameterSize, model_size
from strategies.dims import LayoutError
from strategies.expert.exchange import exchanged_bytes
from strategies.frozen import narrow, narrow_parameters
from strategies.mixtures import find_mixtures
from strategies.module_copy import copy_module
from strategies.options import Options
from strategies.tensor.apply import one_part
from strategies.tensor.plan import Plan, make_plan
from strategies.torch_internals import fake_mode

BATCHES = (2, 4)
"""The sizes of the micro-batch that are traced."""
PLAIN, CAST, AUTOCAST = "plain", "cast", "autocast"
"""How precision is reached: float32, all numbers in 16 bits (if sharded), or torch.autocast."""
MEMORY_SHARE = 0.8
"""Share of the host's free memory for a model that is run for real; activations come on top."""


class Variant(NamedTuple):
    """Which computation of a model is read.

    Args:
        casting: How precision is reached: PLAIN, CAST or AUTOCAST.
        whole_model: Whether a device has the whole model, or gathers it. On a GPU the task may then
            compute its loss in another way.
    """

    casting: str
    whole_model: bool


class Reader:
    """Reads the model of one task: its structure at once, its costs when they are needed.

    Args:
        task: The task.
        on_gpu: Whether the model is to run on GPUs.
        sequence_parallel: Whether tensor parallelism splits the sequence outside of products.
        loss_parallel: Whether it splits the loss.
        splits: Whether tensor parallelism is considered; False saves two of three traces.
        weight_dtype: The type in which weights are kept: fp32, or bf16 where products have 16 bits.
        block: The most numbers that share a scale in the state of adamw8bit.

    Attributes:
        note: What the user should know of how the model was read.
        samples: The number of training samples; None for a stream.
        items_per_sample: Items of the task's unit, such as tokens, in a sample.
        sample_bytes: Bytes of a sample, as the device gets it.
        sequence_length: Tokens of a sample; None if it is not a sequence.
        heads: The number of attention heads; None if the task does not say.
        blocks: The number of repeating blocks.
        splits_sequence: Whether context parallelism can split the model.
        size: The parameters and buffers.
        parameters: The number of numbers in the parameters.
        mixtures: The mixtures of experts.
        exchanged_numel: Numbers of a sample that mixtures would send to experts and back.
        tp: The degree for which the split model is traced; 0 if it cannot be split.

    Raises:
        UserError: The model has no parameters.
    """

    def __init__(
        self,
        task: Task,
        *,
        on_gpu: bool = False,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        splits: bool = True,
        weight_dtype: str = Options.weight_dtype,
        block: int = EIGHT_BIT_BLOCK,
    ) -> None:
        self.task = task
        self.note = ""
        self._on_gpu = on_gpu
        self._sequence_parallel = sequence_parallel
        self._loss_parallel = loss_parallel
        self._weight_dtype = weight_dtype
        self.compiles_loss = on_gpu and task.compiles_loss
        self._runs_for_real = fake_mode() is None
        self._costs: dict[str, ModelCosts] = {}

        data = task.train_data()
        self.samples = length(data)
        self._batches = _batches_of(data, self.samples)
        example = self._batches[BATCHES[0]]
        example_rows = rows(example)
        self.items_per_sample = count_items(task, example) / example_rows
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors(example)) / example_rows
        self.sequence_length: int | None = getattr(task, "sequence_length", None)
        self.heads = task.heads()

        structure = self._build_structure()
        self._block_names = find_blocks(structure, task.blocks(structure))
        self.blocks = len(self._block_names)
        tensor_plan = self._tensor_plan(structure)
        self.splits_sequence = self._can_split_sequence(structure)
        self.size = model_size(
            structure,
            separable(structure, self._block_names),
            tensor_plan.dims if tensor_plan else {},
            narrow_parameters(structure, weight_dtype),
            block,
        )
        self.parameters = sum(parameter.numel for parameter in self.size.parameters)
        if not self.parameters:
            raise UserError("the task's model has no parameters, so there is nothing to plan")
        self.mixtures = find_mixtures(structure)
        self.exchanged_numel = self._numbers_for_experts()
        self.tp = 0
        if splits and tensor_plan and tensor_plan.dims:
            degrees = (degree for degree in (2, 3, 5, 7) if self._can_split_heads(degree))
            self.tp = next(degrees, 0)
        self._skeleton = structure
        if not self._runs_for_real:
            styles = tensor_plan.styles if tensor_plan else {}
            share_equal_blocks(structure, self._block_names, styles)

    def costs(self, casting: str = PLAIN, *, whole_model: bool = False) -> ModelCosts:
        """The costs of the model's parts.

        Args:
            casting: How precision is reached: PLAIN, CAST or AUTOCAST.
            whole_model: Whether a device has the whole model.
        """
        if whole_model and self._whole_model_reader is not None:
            return self._whole_model_reader.costs(casting)
        if casting not in self._costs:
            self._costs[casting] = self._read(casting)
        return self._costs[casting]

    def _tensor_plan(self, structure: nn.Module) -> Plan | None:
        """How tensor parallelism splits the model; None if it cannot."""
        try:
            return make_plan(structure, self.task.tensor_plan(structure), self._sequence_parallel)
        except LayoutError:
            return None

    def _can_split_sequence(self, structure: nn.Module) -> bool:
        """Whether context parallelism can split the model."""
        try:
            require_positions(structure, self.task.context_plan(structure))
        except (LayoutError, UserError):
            return False
        return True

    def _can_split_heads(self, degree: int) -> bool:
        return self.heads is None or self.heads % degree == 0

    def _numbers_for_experts(self) -> float:
        """Numbers of a sample that mixtures would send to experts and back."""
        tokens = int(self.task.tokens_per_sample or self.sequence_length or 1)
        return sum(
            exchanged_bytes(tokens, mixture.top_k, mixture.width, 1) for mixture in self.mixtures
        )

    @functools.cached_property
    def _whole_model_reader(self) -> Reader | None:
        """Reads what a GPU with the whole model computes; None if it is nothing else."""
        gpu_task = self.task.on_gpu() if self._on_gpu else None
        if gpu_task is None:
            return None
        reader = copy.copy(self)
        reader.task = gpu_task
        reader.tp = 0
        reader._costs = {}
        return reader

    def _build_structure(self) -> nn.Module:
        try:
            with torch.device("meta"):
                return build_model(self.task)
        except UserError:
            raise
        except Exception as error:
            self._runs_for_real = True
            self.note = (
                f"the model cannot be built on the meta device ({_first_line(error)}): "
                "built and run for real"
            )
            return build_model(self.task)

    # --- tracing --------------------------------------------------------------------------------

    def _read(self, casting: str) -> ModelCosts:
        traces = self._traces(casting)
        unsplit = traces[min(traces)]
        parts = {}
        for name in unsplit.parts:
            of_part = {
                key: trace.parts[name] for key, trace in traces.items() if name in trace.parts
            }
            parts[name] = fit_part(of_part)
        return ModelCosts(parts, unsplit.order, self._parameters_by_part(unsplit, casting))

    def _traces(self, casting: str) -> dict[Key, Trace]:
        traces = {(batch, 1): self._trace_unsplit(batch, casting) for batch in BATCHES}
        split_traces = {}
        degrees = [tp for tp in (self.tp, 2 * self.tp) if tp and self._can_split_heads(tp)]
        try:
            for tp in degrees:
                for batch in BATCHES:
                    split_traces[batch, tp] = self._trace(batch, tp, casting)
        except Exception as error:
            self.tp = 0
            if not self.note:
                self.note = f"tensor parallelism is left out: {_first_line(error)}"
            return traces
        return traces | split_traces

    def _trace_unsplit(self, batch: int, casting: str) -> Trace:
        if not self._runs_for_real:
            try:
                return self._trace(batch, 1, casting)
            except Exception as error:
                self._runs_for_real = True
                self.note = (
                    f"the model's code looks at values ({_first_line(error)}): "
                    "run for real, once, on the CPU"
                )
        # Parameters, gradients, and the original parameters of a 16-bit copy.
        bytes_of_number = 8 if casting == CAST else 12
        _require_memory(self.parameters * bytes_of_number)
        return self._trace(batch, 1, casting)

    def _trace(self, batch: int, tp: int, casting: str) -> Trace:
        fake = None if self._runs_for_real else fake_mode()
        module = self._make_module(casting, fake).train()
        peers = None
        if tp > 1:
            peers, _ = one_part(
                module,
                self.task.tensor_plan(module),
                tp,
                sequence_parallel=self._sequence_parallel,
                loss_parallel=self._loss_parallel,
            )
        values = self._batches[batch]
        if casting == CAST:
            values = _cast(values, torch.bfloat16)
            if self.task.float_output:
                module.register_forward_hook(lambda _, __, output: _cast(output, torch.float32))
        if fake is not None:
            values = map_tensors(fake.from_tensor, values)

        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casting == AUTOCAST):
                return self.task.loss(model, values)

        with fake or contextlib.nullcontext():
            return watch(
                module,
                self._block_names,
                loss,
                peers,
                on_gpu=self._on_gpu,
                is_fake=fake is not None,
            )

    def _make_module(self, casting: str, fake: Any) -> nn.Module:
        """A new module for a trace: with real parameters, or with fake ones of the same shapes.

        Args:
            casting: How precision is reached.
            fake: The mode that makes fake tensors; None for real ones.
        """
        dtype = torch.bfloat16 if casting == CAST else None
        precision = "fp32" if casting == PLAIN else "bf16"
        if fake is None:
            module = build_model(self.task).to(dtype=dtype)
            narrow(module, precision, self._weight_dtype)
            return module
        module = copy_module(self._skeleton)
        narrow(module, precision, self._weight_dtype)
        replace_by_fakes(module, dtype, fake)
        return module

    def _parameters_by_part(
        self, trace: Trace, casting: str
    ) -> dict[str, tuple[ParameterSize, ...]]:
        """The parameters of one part of each kind.

        A parameter outside of blocks belongs to the part before them if it is listed before the
        first block's parameters, otherwise to the part after them. With a precision of 16 bits
        frozen matrices are kept in it, and all weights where that is configured.
        """
        kinds: dict[str, str] = {}  # block → part
        if len(trace.order) == len(self._block_names):
            kinds = dict(zip(self._block_names, trace.order))
        first_block = {kind: block for block, kind in reversed(kinds.items())}
        parameters: dict[str, list[ParameterSize]] = {name: [] for name in trace.parts}
        outside = _first_present(parameters, BEFORE)
        for parameter in self.size.parameters:
            if parameter.narrows and casting != PLAIN:
                parameter = replace(parameter, itemsize=2)
            blocks = (name for name in kinds if parameter.name.startswith(name + "."))
            block = next(blocks, None)
            if block is None:
                parameters[outside].append(parameter)
                continue
            outside = _first_present(parameters, AFTER, BEFORE)
            if first_block[kinds[block]] == block:
                parameters[kinds[block]].append(parameter)
        return {name: tuple(of_part) for name, of_part in parameters.items()}


def _batches_of(data: Any, samples: int | None) -> dict[int, Any]:
    """A micro-batch of each size that is traced.

    Args:
        data: The training samples. Those that know their longest sample give batches of one shape,
            the one that memory must suffice for.
        samples: The number of samples; None for a stream.
    """
    longest = getattr(data, "longest_sample", None)
    batches = {}
    for batch in BATCHES:
        if longest is None:
            picks = [(i % (samples or BATCHES[-1]), i) for i in range(batch)]
        else:
            picks = [(longest, i) for i in range(batch)]
        batches[batch] = fetch(data, picks)
    return batches


def _first_present(parts: Mapping[str, object], *names: str) -> str:
    """The first of the names that there is, or the first part if there is none of them."""
    return next((name for name in names if name in parts), next(iter(parts)))


def _require_memory(needed: float) -> None:
    """Check that this host has the memory to run a model for real.

    Raises:
        UserError: It has not.
    """
    import psutil

    free = psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        raise UserError(
            "the model's code looks at values, so planning has to run the model for real, and that "
            f"takes {needed / 2**30:.1f} GiB and its activations; {free / 2**30:.1f} GiB are free: "
            "plan it on a larger machine, or plan the same model with fewer layers"
        )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with its floating tensors in another type."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tree)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
