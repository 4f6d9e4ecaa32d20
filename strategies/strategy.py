"""The record by which a strategy is known to the rest of the program.

Every strategy declares one `Strategy` in its own file; registry.py collects them. Code that needs
to know something about a strategy reads its record and never compares names: `layout.py` reads
which degrees it chooses and what it combines with, `parallelize.py` calls `apply`, and the planner
adds up `cost` and `collectives`.

**Costs.** `cost(size, step)` gives the memory of the rank that holds most, `collectives(unit,
step)` what a rank communicates for one unit of the model, and when. Activations, and how much
communication overlaps with computation, are up to the planner.

**Models.** `cannot_keep` lists what a model may do on one device, but not under this strategy
(traits.py). rehearsal/ finds out what a model does.

**Applying.** `apply(setup)` puts a data-parallel strategy on `setup.module`, to which tensor
parallelism, recomputation and compilation have already been applied. It calls `setup.load()`
exactly once, which allocates the parameters and fills in their initial values. A sharded strategy
first shards the module on the meta device, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from strategies.costs import Collective, Cost, RankSize, StepShape, UnitSize, replicated
from strategies.dims import MODEL_DEGREES, Degree, Layout
from strategies.options import PRECISIONS, Options
from strategies.traits import Trait

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from strategies.mixtures import SplitExperts
    from strategies.parallel import Parallel

T = TypeVar("T")

MicroStep = Callable[[bool], AbstractContextManager[Any]]
"""Returns the context for forward and backward of a micro-batch.

Its argument says whether it is the last micro-batch of the step, in which gradients are
communicated.
"""

_NO_CONTEXT = contextlib.nullcontext()


def no_communication(last: bool) -> AbstractContextManager[Any]:
    """The MicroStep of a strategy that does not communicate gradients."""
    return _NO_CONTEXT


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a strategy's `apply` works on.

    Args:
        strategy: The record whose `apply` is called; several records may share one function.
        module: The model, with its plain names.
        layout: The layout that is being applied.
        options: How the layout behaves.
        device: This worker's device.
        blocks: Names of the model's repeating blocks.
        load: Allocates the parameters and fills in their initial values; called exactly once.
        mesh: The workers that hold the same slices of the model and differ in their data,
            (replicate ×) shard. None: this worker is the only one.
        group: The same workers as a process group.
        experts: Experts that are split over the data-parallel workers, if any are.
    """

    strategy: Strategy
    module: nn.Module
    layout: Layout
    options: Options
    device: torch.device
    blocks: list[str]
    load: Callable[[], None]
    mesh: DeviceMesh | None = None
    group: ProcessGroup | None = None
    experts: SplitExperts | None = None


@dataclass(frozen=True)
class Applied:
    """What a strategy's `apply` returns.

    Args:
        module: What the step calls. `setup.module` still has the plain names.
        micro_step: The context for forward and backward of a micro-batch.
        is_whole_step: Whether `module` is called with a function and a batch, as `WholeStep` is,
            instead of as the model.
        casts: Whether it casts to 16 bits itself, so that forward needs no autocast.
        notes: Remarks for the user, one sentence each.
        make_parallel: Makes the `Parallel`, where a strategy has a class of its own.
    """

    module: nn.Module
    _: KW_ONLY
    micro_step: MicroStep = no_communication
    is_whole_step: bool = False
    casts: bool = False
    notes: tuple[str, ...] = ()
    make_parallel: Callable[..., Parallel] | None = None


def no_collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """The collectives of a strategy that does not communicate parameters or gradients."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One name that a user may write, and what belongs to it."""

    name: str
    summary: str
    """What it does, in a few words."""
    cost: Callable[[RankSize, StepShape], Cost] = replicated
    """Bytes on the rank that holds most."""
    collectives: Callable[[UnitSize, StepShape], tuple[Collective, ...]] = no_collectives
    """What a rank communicates for the parameters of one unit in one step."""
    apply: Callable[[Setup], Applied] | None = None
    """None: parallelize.py applies it wherever its degree is more than 1."""
    degrees: tuple[Degree, ...] = ()
    """The degrees of ParallelDims that this strategy chooses."""
    combines_with: tuple[Degree, ...] = ()
    """The degrees that may be written beside its own, or chosen by another name after a plus."""
    is_sharded: bool = False
    """Whether a data-parallel worker keeps only a shard of what it trains."""
    one_process: bool = False
    """Whether it runs in one process, and so with one worker."""
    several_devices: bool = False
    """Whether one worker uses several devices."""
    plannable: bool = True
    """Whether the planner considers it."""
    averages_gradients: bool = False
    """Whether every data-parallel worker has whole gradients, which are averaged."""
    required_package: str = ""
    """A Python package that Trireme does not install by itself."""
    precisions: tuple[str, ...] = PRECISIONS
    """Values of train.precision that work with it."""
    check_options: Callable[[Options], object] | None = None
    """Raises LayoutError for options that only this strategy refuses."""
    reduce_dtype_refusal: str = ""
    """Why parallel.reduce_dtype does not work with it, and what to write; "": it works."""
    reshard_after_forward: bool | None = None
    """The default of parallel.reshard_after_forward; None: memory decides."""
    reduce_scatter_each_microbatch: bool | None = None
    """The default of parallel.accumulate_sharded; None: memory decides."""
    cannot_keep: frozenset[Trait] = frozenset()
    """What a model may do on one device and that would train another model here (traits.py)."""
    alias_of: str = ""
    """The name that it is another word for."""

    @property
    def splits_model(self) -> bool:
        """Whether it splits the model or a sample, and so goes with a data-parallel strategy."""
        return bool(set(MODEL_DEGREES) & set(self.degrees))

    def reshards_after_forward(self, configured: bool | None, by_memory: T) -> bool | T:
        """Whether gathered parameters are freed after forward.

        Args:
            configured: parallel.reshard_after_forward; None: not written.
            by_memory: The answer where neither the user nor the strategy decides: whether gathered
                parameters take too much of the device's memory to be kept.
        """
        choice = self.reshard_after_forward if configured is None else configured
        return by_memory if choice is None else choice

    def reduces_each_microbatch(self, configured: bool | None, by_memory: T) -> bool | T:
        """Whether every micro-batch's gradients are reduced, instead of those of the whole step.

        Args:
            configured: parallel.accumulate_sharded; None: not written.
            by_memory: The answer where neither the user nor the strategy decides: whether whole
                gradients take too much of the device's memory to wait for the last micro-batch.
        """
        choice = self.reduce_scatter_each_microbatch if configured is None else configured
        return by_memory if choice is None else choice
