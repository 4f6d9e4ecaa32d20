"""What a strategy is to the rest of the program: one record, declared in the strategy's own file.

Code that needs to know something of a strategy asks its record, and never compares names: `layout.py` which degrees it
chooses and what it combines with, `parallelize.py` for `apply`, the planner for `cost` and `collectives`. Records are
collected in registry.py.

**Costs.** `cost(size, step)` is the memory of the rank that holds most, `collectives(unit, step)` what it sends for one
unit of the model, and when. `StepShape.reshard_after_forward` and `reduce_scatter_each_microbatch` are the answers of
`Strategy.reshards` and `Strategy.reduces_each`, which know what the strategy does by itself where the person has not
written it. Activations and the time that overlaps are not a strategy's, but the planner's.

**Models.** `cannot_keep` names what a model may do on one device and not under this strategy (traits.py); what a model
does is found out by rehearsal.py.

**Applying.** `apply(setup)` of a data strategy puts it on `setup.module`, on which tensor parallelism, recomputation
and compilation are already. It calls `setup.load()` once, which gives the parameters memory and their initial values: a
sharded strategy shards on the meta device first, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from strategies.costs import Collective, Cost, Number, RankSize, StepShape, UnitSize, replicated
from strategies.dims import BESIDE_DATA, Layout
from strategies.options import PRECISIONS, Options
from strategies.traits import Trait

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from strategies.mixtures import SplitExperts

MicroStep = Callable[[bool], AbstractContextManager[Any]]
"""Given whether it is the step's last, what to put around forward and backward of a micro-batch."""

_NOTHING = contextlib.nullcontext()


def no_communication(last: bool) -> AbstractContextManager[Any]:
    """The MicroStep of what does not communicate gradients."""
    return _NOTHING


@dataclass(frozen=True)
class Setup:
    """What `apply` is given. mesh, group: of the workers that hold the same slices and differ in their data; None where
    there is one."""

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
    """Those that are split over the data-parallel workers, if any are."""


@dataclass(frozen=True)
class Applied:
    """What `apply` returns. module: what to call (whole: with a function and a batch, as parallel.py's WholeStep);
    setup.module still has the plain names. casts: whether it casts to 16
    bits itself, so that forward needs no autocast. notes: remarks for the user, one sentence each. parallel: makes
    the Parallel, where it is not the plain one."""

    module: nn.Module
    micro_step: MicroStep = no_communication
    casts: bool = False
    notes: tuple[str, ...] = ()
    parallel: Callable[..., Any] | None = None
    whole: bool = False


@dataclass(frozen=True)
class Strategy:
    """One name that a user may write."""

    name: str
    summary: str
    """What it does, in a few words."""
    cost: Callable[[RankSize, StepShape], Cost] = replicated
    """Bytes on the rank that holds most."""
    collectives: Callable[[UnitSize, StepShape], tuple[Collective, ...]] = lambda unit, step: ()
    """What a rank does with others for one unit's parameters in one step."""
    apply: Callable[[Setup], Applied] | None = None
    """None: parallelize.py puts it on wherever its degree is more than 1."""
    degrees: tuple[str, ...] = ()
    """Those of ParallelDims that the name is free to choose."""
    also: tuple[str, ...] = ()
    """Those that may be written beside, or chosen by another name after a plus."""
    is_sharded: bool = False
    """Whether a data-parallel worker keeps a shard only of what it trains."""
    one_process: bool = False
    several_devices: bool = False
    """Whether one worker uses several devices."""
    plannable: bool = True
    """Whether the planner looks at it."""
    averages: bool = False
    """Whether every data-parallel worker has whole gradients, which are averaged."""
    requires: str = ""
    """A Python package that is not among ours."""
    precisions: tuple[str, ...] = PRECISIONS
    check: Callable[[Options], Any] | None = None
    """Raises LayoutError for options that it alone refuses."""
    reduce_dtype: str = ""
    """Why parallel.reduce_dtype is not for it, and what to write; "": it is."""
    reshard_after_forward: bool | None = None
    """Of a sharded one, what it does where parallel.reshard_after_forward is not written; None: memory decides."""
    reduce_scatter_each_microbatch: bool | None = None
    """The same for parallel.accumulate_sharded."""
    cannot_keep: frozenset[Trait] = frozenset()
    """What a model may do on one device and would train another model by under this strategy (traits.py)."""
    alias_of: str = ""

    @property
    def splits_model(self) -> bool:
        """Whether it divides the model or a sample, and so goes with what data-parallel workers do."""
        return bool(set(BESIDE_DATA) & set(self.degrees))

    def reshards(self, asked: bool | None, large: Number) -> Number:
        """Whether gathered parameters are freed after forward. asked: by the configuration. large: whether they take
        too much of the device's free memory to be kept."""
        chosen = self.reshard_after_forward if asked is None else asked
        return large if chosen is None else chosen

    def reduces_each(self, asked: bool | None, large: Number) -> Number:
        """Whether every micro-batch's gradients are reduced. large: whether whole ones take too much memory to wait."""
        chosen = self.reduce_scatter_each_microbatch if asked is None else asked
        return large if chosen is None else chosen
