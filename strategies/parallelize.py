"""The one place that knows the order in which parallelisms are put on a model, and why.

1. **tensor** first: its plan matches modules by name, before anything changes what modules do; in a **pipeline** the
   blocks of other stages are then taken out, and **experts** split over data-parallel workers; then **float8**, whose
   layers are those that are not split, and **context**, so that what is recomputed or compiled attends across workers;
2. **activation checkpointing** inside everything that communicates parameters, so that what is recomputed in backward
   uses the parameters that were gathered once, and around the split layers, so that they are recomputed as they ran;
3. **compile** what is now a block's whole forward, but no hook of the sharding around it;
4. **shard or replicate** last, over parameters as the steps before left them: the data strategy's `apply`. (A pipeline
   has its own, because it gathers and reduces once per step; then its stages are connected.)

The optimizer is built by the caller after that, over `Parallel.parameters()`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies import activation_checkpointing, precision, registry, state
from strategies.blocks import compile_blocks, find_blocks
from strategies.channels_last import use_channels_last
from strategies.context.apply import Context, ContextPlan, require_positions
from strategies.dims import Layout, LayoutError, ParallelDims, submesh
from strategies.expert import apply as expert_parallel
from strategies.layout import check, choose
from strategies.options import Options
from strategies.parallel import Parallel
from strategies.pipeline.apply import Division, Example
from strategies.pipeline.schedules import SPLIT
from strategies.strategy import Setup
from strategies.tensor import apply as tensor_parallel
from strategies.tensor.randomness import SplitRandomness

__all__ = ["Example", "Layout", "LayoutError", "Options", "Parallel", "ParallelDims", "check", "choose", "parallelize"]

Blocks = list[str] | Callable[[nn.Module], list[str] | None] | None
Plan = dict[str, str] | Callable[[nn.Module], dict[str, str] | None] | None
Places = ContextPlan | Callable[[nn.Module], ContextPlan | None] | None


def parallelize(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options | None = None,
    *,
    device: torch.device,
    blocks: Blocks = None,
    tensor_plan: Plan = None,
    context_plan: Places = None,
    example: Example | None = None,
) -> Parallel:
    """Builds the model and puts `layout` on it; collective over all ranks.

    build: gives the same weights whenever it is called, on any rank, and works under torch.device("meta").
    blocks, tensor_plan: for this model, or functions that answer for it; None: found, and every linear and embedding
    layer split by itself. context_plan: likewise; None: places of tokens are given as `position_ids`.
    example: (loss, micro-batch), as for Parallel.forward_backward; a pipeline needs it, because it learns from running
    them what the model does. The micro-batch may be of one row.

    Raises:
        LayoutError: one sentence; a model that does not fit the layout.
    """
    options = options or Options()
    check(layout, options)
    strategy = registry.data_strategy(layout)
    dims = layout.dims.for_parameters(strategy.is_sharded)
    # Split models are built on meta, split, then filled from rank 0's, tensor by tensor; others every rank builds.
    on_meta = dims.tp * dims.pp * dims.ep > 1 or strategy.is_sharded
    module, note = state.structure(build) if on_meta else (build(), "")
    state.require_parameters(module)
    state.make_dense(module)
    dense = state.make_gradients_dense(module)
    if device.type == "cuda":
        use_channels_last(module, with_weights=not on_meta)
    names = find_blocks(module, _answer(blocks, module))
    if dims.ep > 1:
        expert_parallel.require(module, dims.ep)
    division = None
    if dims.pp > 1:
        division = Division(module, names, layout=layout, options=options, device=device, example=example)
    mesh = dims.build_mesh(device.type) if dims.world_size > 1 else None
    split = None
    if mesh is not None and dims.tp > 1:
        split = tensor_parallel.apply(
            module,
            submesh(mesh, "tp"),
            _answer(tensor_plan, module),
            options,
            splits_backward=options.schedule in SPLIT,
            shares_narrow_weights=dims.pp > 1 and not strategy.is_sharded,
            ep=dims.ep,
        )
    if division is not None:
        names = division.keep_own_parts(module, options)
    experts = expert_parallel.apply(module, dims, strategy.is_sharded, device.type) if dims.ep > 1 else None
    narrowed: tuple[str, ...] = ()
    if options.precision == "fp8":
        precision.require_float8(device)
        narrowed = precision.use_float8(module, names)
    # torch 2.13 cannot trace recomputing a block that holds DTensors, as those of a pipeline's stage may, nor one whose
    # attention goes across workers: within it the compiler would forget that.
    first = split is not None or division is not None or layout.dims.cp > 1
    if options.compile and first:
        compile_blocks(module, names, options.compile_backend)
    if split is not None:
        randomness = SplitRandomness(split.plan, split.peers, receives_activations=division is not None)
        if options.compile:
            randomness.around_compiled(module, names, device)
        else:
            randomness.follow(module, names)
    context = None
    if layout.dims.cp > 1:
        places = _answer(context_plan, module)
        require_positions(module, places)
        context = Context(layout.dims, options, places)
        context.install(module, names)
    activation_checkpointing.apply(module, names, options.activation_checkpointing)
    if options.compile and not first:
        compile_blocks(module, names, options.compile_backend)

    def load() -> None:
        if on_meta:
            state.materialise(module, device, options.offload)
            source = build() if dist.get_rank() == 0 else None
            state.fill(module, source, device, partly=division is not None)
        else:
            module.to(device)

    group = dims.data_group(mesh) if mesh is not None else None
    data_mesh = dims.data_mesh(mesh) if mesh is not None and group is not None else None
    setup = Setup(strategy, module, layout, options, device, names, load, data_mesh, group, experts)
    if split is not None and options.async_tp and not split.overlaps:
        note = f"{note}; " * bool(note) + f"parallel.async_tp does nothing in parallel.schedule={options.schedule}"
    notes = (*([note] if note else []), *dense, *state.batch_norm_notes(module, layout))
    if division is not None and mesh is not None:
        return division.connect(setup, mesh, split=split, notes=notes, context=context)
    assert strategy.apply is not None, f"{strategy.name} is put on by its degree"
    applied = strategy.apply(setup)
    step = applied.micro_step
    if split is not None:
        step = tensor_parallel.GradientSums(module, split).micro_step(step)
    return (applied.parallel or Parallel)(
        applied.module,
        layout,
        device,
        inner=module,
        group=group,
        micro_step=step,
        autocast=contextlib.nullcontext if applied.casts else precision.autocast(options.precision, device.type),
        notes=(*notes, *applied.notes, *narrowed),
        whole=applied.whole,
        context=context,
    )


def _answer(asked: Any, module: nn.Module) -> Any:
    return asked(module) if callable(asked) else asked
