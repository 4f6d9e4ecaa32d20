"""The one place that knows the order in which parallelisms are applied to a model, and why.

1. **tensor** comes first: its plan matches modules by name, before anything changes what modules
   do. In a **pipeline** the blocks of other stages are then taken out. **Experts** are split over
   data-parallel workers. **float8** follows, because it changes the layers that are not split, and
   **context**, so that what is recomputed or compiled attends across workers.
2. **activation checkpointing** goes inside everything that communicates parameters, so that a
   recomputation in backward uses the parameters that were gathered once, and around the split
   layers, so that they are recomputed as they ran.
3. **compile** what is now a block's whole forward, but none of the sharding's hooks around it.
4. **activation offloading** goes around what is compiled, because it moves what this saves.
5. **shard or replicate** last, over the parameters that the steps before have left: the
   data-parallel strategy's `apply`. (A pipeline does this itself, because it gathers and reduces
   once per step; then its stages are connected.)

The caller builds the optimizer after that, over `Parallel.parameters()`.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from strategies import activation_checkpointing, activation_offloading, precision, registry, state
from strategies.blocks import compile_blocks, find_blocks
from strategies.channels_last import use_channels_last
from strategies.context.apply import Context, ContextPlan, require_positions
from strategies.dims import Layout, LayoutError, ParallelDims, submesh
from strategies.expert import apply as expert_parallel
from strategies.frozen import narrowed
from strategies.layout import check, choose
from strategies.options import Options
from strategies.parallel import Parallel
from strategies.pipeline.apply import Division, Example
from strategies.pipeline.schedules import SPLIT
from strategies.strategy import Setup
from strategies.tensor import apply as tensor_parallel
from strategies.tensor.apply import SplitLayers
from strategies.tensor.randomness import SplitRandomness

__all__ = [
    "Example",
    "Layout",
    "LayoutError",
    "Options",
    "Parallel",
    "ParallelDims",
    "check",
    "choose",
    "parallelize",
]

T = TypeVar("T")

Blocks = list[str] | Callable[[nn.Module], list[str] | None] | None
TensorPlan = dict[str, str] | Callable[[nn.Module], dict[str, str] | None] | None
ContextPlanFor = ContextPlan | Callable[[nn.Module], ContextPlan | None] | None


def parallelize(
    build: Callable[[], nn.Module],
    layout: Layout,
    options: Options | None = None,
    *,
    device: torch.device,
    blocks: Blocks = None,
    tensor_plan: TensorPlan = None,
    context_plan: ContextPlanFor = None,
    example: Example | None = None,
) -> Parallel:
    """Builds a model and applies a layout to it; collective over all ranks.

    Args:
        build: Returns the model with the same weights whenever it is called, on any rank. It must
            work under torch.device("meta").
        layout: What to apply.
        options: How the layout behaves.
        device: This worker's device.
        blocks: Names of the model's repeating blocks, or a function from the model to them. None:
            they are searched for.
        tensor_plan: How tensor parallelism splits the model, or a function from the model to that.
            None: every linear and every embedding layer is split by itself.
        context_plan: How the model learns the positions of its tokens, or a function from the model
            to that. None: as `position_ids`.
        example: (loss, micro-batch) as for Parallel.forward_backward. A pipeline needs it: it runs
            them to learn what the model does. One row is enough.

    Raises:
        LayoutError: The model does not fit the layout.
    """
    options = options or Options()
    check(layout, options)
    build = narrowed(build, options.precision, options.weight_dtype)
    strategy = registry.data_strategy(layout, offload=options.offload)
    dims = layout.dims.for_parameters(strategy.is_sharded)

    # A split model is built on meta, split, and then filled from rank 0's model, tensor by tensor.
    # Any other model is built on every rank.
    on_meta = dims.tp * dims.pp * dims.ep > 1 or strategy.is_sharded
    module, build_notes = _build(build, on_meta=on_meta, device=device)
    names = find_blocks(module, _resolve(blocks, module))
    if dims.ep > 1:
        expert_parallel.require(module, dims.ep)
    division = None
    if dims.pp > 1:
        division = Division(
            module, names, layout=layout, options=options, device=device, example=example
        )
    has_mesh = dims.world_size > 1 or strategy.is_sharded
    mesh = dims.build_mesh(device.type) if has_mesh else None

    # Step 1 of this file's docstring: layers are split, and blocks of other stages taken out.
    split = None
    if mesh is not None and dims.tp > 1:
        split = tensor_parallel.apply(
            module,
            submesh(mesh, "tp"),
            _resolve(tensor_plan, module),
            options,
            splits_backward=options.schedule in SPLIT,
            shares_narrow_weights=dims.pp > 1 and not strategy.is_sharded,
            ep=dims.ep,
        )
    if division is not None:
        names = division.keep_own_parts(module, options)
    experts = None
    if dims.ep > 1:
        experts = expert_parallel.apply(module, dims, strategy.is_sharded, device.type)
    float8_notes: tuple[str, ...] = ()
    if options.precision == "fp8":
        precision.require_float8(device)
        float8_notes = precision.use_float8(module, names)

    # The end of step 1 and steps 2 and 3 replace the forwards of blocks.
    context = _wrap_forwards(
        module,
        names,
        layout=layout,
        options=options,
        device=device,
        context_plan=context_plan,
        split=split,
        is_pipeline=division is not None,
    )
    # Step 4 goes around these forwards.
    moved = None
    if options.activation_offloading:
        moved = activation_offloading.apply(module, names, device, is_pipeline=division is not None)

    applies_casts = strategy.is_sharded and division is None
    if options.weight_dtype != "fp32" and not applies_casts:
        precision.cast_calls(module, options.precision, options.float_output)

    # Step 5 is the data-parallel strategy's, which calls `load` once, when it needs the weights.
    def load() -> None:
        if not on_meta:
            module.to(device)
            return
        state.allocate(module, device, offload=options.offload)
        source = build() if dist.get_rank() == 0 else None
        state.broadcast_weights(module, source, device, is_partial=division is not None)

    group = dims.data_group(mesh) if mesh is not None else None
    data_mesh = None
    if mesh is not None:
        if group is not None:
            data_mesh = dims.data_mesh(mesh)
        elif strategy.is_sharded:  # the only worker, whose state is in host memory
            data_mesh = mesh
    setup = Setup(
        strategy=strategy,
        module=module,
        layout=layout,
        options=options,
        device=device,
        blocks=names,
        load=load,
        mesh=data_mesh,
        group=group,
        experts=experts,
    )
    notes = (
        *build_notes,
        *_async_tp_notes(split, options),
        *state.batch_norm_notes(module, layout),
        *float8_notes,
    )
    if division is not None and mesh is not None:
        parallel: Parallel = division.connect(
            setup, mesh, split=split, notes=notes, context=context
        )
    else:
        parallel = _apply_data_strategy(setup, split=split, notes=notes, context=context)
    parallel.moved = moved
    return parallel


def _build(
    build: Callable[[], nn.Module], *, on_meta: bool, device: torch.device
) -> tuple[nn.Module, tuple[str, ...]]:
    """The module, with dense parameters and gradients, and remarks for the user."""
    note = ""
    if on_meta:
        module, note = state.build_on_meta(build)
    else:
        module = build()
    state.require_trainable_parameters(module)
    state.make_parameters_dense(module)
    gradient_notes = state.make_gradients_dense(module)
    if device.type == "cuda":
        use_channels_last(module, with_weights=not on_meta)
    return module, (*([note] if note else []), *gradient_notes)


def _wrap_forwards(
    module: nn.Module,
    names: list[str],
    *,
    layout: Layout,
    options: Options,
    device: torch.device,
    context_plan: ContextPlanFor,
    split: SplitLayers | None,
    is_pipeline: bool,
) -> Context | None:
    """Replaces the forwards of the blocks, innermost first: attention, recomputation, compilation.

    Args:
        module: The model, whose layers are already split.
        names: Names of its blocks.
        layout: The layout that is being applied.
        options: How the layout behaves.
        device: This worker's device.
        context_plan: See `parallelize`.
        split: The layers that tensor parallelism has split, if any.
        is_pipeline: Whether the module is a stage of a pipeline.

    Returns:
        The context parallelism, if the layout has any.
    """
    # torch 2.13 cannot trace the recomputation of a block that holds DTensors, as those of a
    # pipeline's stage may, nor of one that attends across workers: the compiler would leave the
    # recomputation out. Such blocks are compiled first, and then recomputed as a whole.
    compiles_first = split is not None or is_pipeline or layout.dims.cp > 1
    if options.compile and split is not None:
        for name in names or [""]:
            block = module.get_submodule(name)
            block.forward = split.forget_traced(block.forward)
    if options.compile and compiles_first:
        compile_blocks(module, names, options.compile_backend)
    if split is not None:
        randomness = SplitRandomness(split.plan, split.peers, receives_activations=is_pipeline)
        if options.compile:
            randomness.around_compiled(module, names, device)
        else:
            randomness.follow(module, names)
    context = None
    if layout.dims.cp > 1:
        positions = _resolve(context_plan, module)
        require_positions(module, positions)
        context = Context(layout.dims, options, positions)
        context.install(module, names)
    if split is not None and options.activation_checkpointing != "none":
        for name in names or [""]:
            block = module.get_submodule(name)
            block.forward = split.share_within(block.forward)
    activation_checkpointing.apply(module, names, options.activation_checkpointing)
    if options.compile and not compiles_first:
        compile_blocks(module, names, options.compile_backend)
    return context


def _async_tp_notes(split: SplitLayers | None, options: Options) -> tuple[str, ...]:
    """A remark for the user if asynchronous tensor parallelism does nothing."""
    if split is None or not options.async_tp or split.overlaps:
        return ()
    if not split.plan.splits_sequence:
        return (
            "parallel.async_tp does nothing, because the model is not split along its sequence",
        )
    return (f"parallel.async_tp does nothing in parallel.schedule={options.schedule}",)


def _apply_data_strategy(
    setup: Setup,
    *,
    split: SplitLayers | None,
    notes: tuple[str, ...],
    context: Context | None,
) -> Parallel:
    """Shards or replicates the module, without a pipeline."""
    strategy = setup.strategy
    assert strategy.apply is not None, f"{strategy.name} is applied by its degree"
    applied = strategy.apply(setup)
    step = applied.micro_step
    if split is not None:
        step = tensor_parallel.GradientSums(setup.module, split).micro_step(step)
    autocast = precision.autocast(
        setup.options.precision, setup.device.type, setup.options.weight_dtype
    )
    make_parallel = applied.make_parallel or Parallel
    return make_parallel(
        applied.module,
        setup.layout,
        setup.device,
        inner=setup.module,
        group=setup.group,
        micro_step=step,
        autocast=contextlib.nullcontext if applied.casts else autocast,
        notes=(*notes, *applied.notes),
        is_whole_step=applied.is_whole_step,
        context=context,
    )


def _resolve(value: T | Callable[[nn.Module], T | None] | None, module: nn.Module) -> T | None:
    """A value, or what a function from the model returns."""
    return value(module) if callable(value) else value
