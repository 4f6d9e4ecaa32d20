"""What a model may do on one device that not every layout can keep, and the message that says so.

A strategy keeps its promise, the same training as on one device, for models that read their
parameters where they belong, change them only in the optimizer, and call the same modules for every
sample. Most models do. A model that does otherwise trains a *different* model under some layouts,
without an error: a pipeline's worker does not have the other stages' parameters, so it cannot
penalise them; a shard loses what forward wrote into the gathered weight; and a hook stays behind on
the parameter that a sharded one replaced.

Each such behaviour is a *trait*. rehearsal/ observes a model's traits in one small step, each
strategy's record lists those that it cannot keep (`Strategy.cannot_keep`), and `require_kept`
compares the two. Its message says what the model does, where, and what to write instead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from strategies.dims import Layout, LayoutError
from strategies.options import Options


class Trait(enum.Enum):
    """Something that a model or its loss does, and that some layout cannot keep."""

    LOSS_READS_PARAMETERS = "the loss computes with parameters outside of the model's forward"
    LISTS_PARAMETERS = "the step goes through the model's parameters and computes with them"
    BLOCK_READ_FROM_OUTSIDE = "a block's parameter is used while the block's forward is not running"
    CHANGES_PARAMETERS = "forward changes parameters, always in the same way"
    CHANGES_PARAMETERS_EACH_TIME = "forward changes parameters further each time it is called"
    CHANGES_PARAMETERS_BY_DATA = "forward changes parameters in a way that depends on the samples"
    REPLACES_PARAMETERS = "forward puts other parameters in place of the model's"
    CHANGES_REQUIRES_GRAD = "forward changes which parameters are trained"
    CHANGES_BUFFERS = "forward changes buffers, always in the same way"
    CHANGES_BUFFERS_BY_DATA = "forward changes buffers in a way that depends on the samples"
    LINEAR_GRADIENT_HOOK = "a hook on a parameter replaces its gradient by a linear function of it"
    GRADIENT_HOOK = "a hook on a parameter sees or changes its gradient in another way"
    ACTIVATION_HOOK = (
        "a hook on an activation changes its gradient by more than a linear function of it"
    )
    BACKWARD_HOOK = "a module has a hook on its backward"
    CUTS_GRAPH = "no gradient comes back through the output of a block"
    CHANGES_INPUT = "a block changes its input in place"
    CHANGES_DATA = "code that is recomputed changes, in place, an input that has no gradient"
    CHANGES_OUTPUT = "the code after a block changes the block's output in place"
    GRADIENT_PAST_OUTPUT = "a block gets a gradient, but not through its output"
    RUNS_WITHOUT_GRADIENT = "a block runs without gradients and once more in backward"
    USED_BY_REENTRANT_CHECKPOINTS = "a reentrant checkpoint and other code use the same parameter"
    RECURRENT = "a block has a recurrent layer"
    NORMALISES_OVER_BATCH = "a layer normalises over the samples of a batch"
    GRADIENT_IN_LOSS = "the loss takes a gradient itself"
    FUNCTIONAL_CALL = "the loss calls the model with other parameters than the model's own"
    CALLED_TWICE = "a block is called twice in one step"
    CALLS_VARY = (
        "another sample, or another random number, takes another way through the model's blocks"
    )
    VARIES_BY_CALL = "the same batch takes another way through the model when it comes again"
    OUTPUT_VARIES_BY_CALL = (
        "code that is recomputed returns other values for the same input when it is called again"
    )
    BRANCHES_ON_DATA = (
        "a value in the batch decides which blocks are called or which parameters are used"
    )
    UNUSED_PARAMETERS = "parameters that are to be trained get no gradient"
    PARAMETERS_VARY = "another sample, or another random number, uses other parameters"


CHANGING_OR_HOOKED = frozenset(
    {
        Trait.CHANGES_PARAMETERS,
        Trait.CHANGES_PARAMETERS_BY_DATA,
        Trait.REPLACES_PARAMETERS,
        Trait.LINEAR_GRADIENT_HOOK,
        Trait.GRADIENT_HOOK,
    }
)
"""The traits that a layout cannot keep if it replaces the model's parameters by others."""

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
    Trait.CHANGES_PARAMETERS_EACH_TIME: (
        "forward changes {where} each time that it is called",
        "change parameters after the optimizer's step, not in forward",
    ),
    Trait.CHANGES_PARAMETERS_BY_DATA: (
        "forward changes {where} in a way that depends on the samples it is given",
        "change parameters after the optimizer's step, not in forward",
    ),
    Trait.REPLACES_PARAMETERS: (
        "forward puts another parameter in place of {where}, which the optimizer does not know",
        "write into the parameter after the optimizer's step, or keep what forward computes in a "
        "plain attribute",
    ),
    Trait.CHANGES_REQUIRES_GRAD: (
        "forward changes requires_grad of {where}",
        "decide in build_model what is trained, or multiply by zero what is not to be",
    ),
    Trait.CHANGES_BUFFERS: ("forward changes the buffer {where}", ""),
    Trait.CHANGES_BUFFERS_BY_DATA: (
        "forward changes the buffer {where} in a way that depends on the samples it is given",
        "",
    ),
    Trait.LINEAR_GRADIENT_HOOK: (
        "{where} has a hook that changes its gradient",
        "set requires_grad to False for what is not to be trained, or multiply the parameter by "
        "its mask in forward",
    ),
    Trait.GRADIENT_HOOK: (
        "{where} has a hook that sees or changes its gradient before it is averaged over the "
        "workers",
        "clip by train.clip_norm, or leave the hook out",
    ),
    Trait.ACTIVATION_HOOK: (
        "{where} puts a hook on an activation that changes its gradient in a way that depends on "
        "how many samples a batch has",
        "clip by train.clip_norm, or leave the hook out",
    ),
    Trait.BACKWARD_HOOK: (
        "{where} has a hook on its backward (register_full_backward_hook)",
        "put the hook on a tensor in forward instead (x.register_hook)",
    ),
    Trait.CUTS_GRAPH: (
        "no gradient comes back to {where}, because what follows detaches its output",
        "set requires_grad to False for the parameters before it, so that they are not in the "
        "optimizer",
    ),
    Trait.CHANGES_INPUT: (
        "{where} changes its input in place",
        "write x = x + y instead of x += y, and inplace=False where a block begins with it",
    ),
    Trait.CHANGES_DATA: (
        "{where} changes in place what it is given",
        "write x = x * 2 instead of x *= 2",
    ),
    Trait.CHANGES_OUTPUT: (
        "the code after {where} changes its output in place",
        "write x = x + y instead of x += y",
    ),
    Trait.GRADIENT_PAST_OUTPUT: (
        "{where} gets its gradient through a tensor that it keeps in an attribute, and none "
        "through its output",
        "let the block return what the loss needs of it",
    ),
    Trait.RUNS_WITHOUT_GRADIENT: (
        "{where} is recomputed by a reentrant checkpoint",
        "write checkpoint(…, use_reentrant=False), or train.activation_checkpointing=full and no "
        "checkpoint",
    ),
    Trait.USED_BY_REENTRANT_CHECKPOINTS: (
        "{where} is used in a reentrant checkpoint, which says that its gradient is complete, and "
        "outside of it or in another one too",
        "write checkpoint(…, use_reentrant=False), or train.activation_checkpointing=full and no "
        "checkpoint",
    ),
    Trait.RECURRENT: (
        "{where} is a recurrent layer, which writes into what selective recomputation keeps",
        "",
    ),
    Trait.NORMALISES_OVER_BATCH: ("{where} normalises over the samples of a batch", ""),
    Trait.GRADIENT_IN_LOSS: (
        "{where} takes a gradient inside of forward or of the loss (torch.autograd.grad, "
        "torch.func)",
        "",
    ),
    Trait.FUNCTIONAL_CALL: (
        "the loss calls the model by torch.func.functional_call, with other parameters",
        "call the model itself",
    ),
    Trait.CALLED_TWICE: (
        "{where} is called twice in one forward, or the task calls the model twice",
        "",
    ),
    Trait.CALLS_VARY: (
        "{where} is called for some samples or random numbers and not for others",
        "call every block in every forward, and multiply what is to be left out by zero",
    ),
    Trait.VARIES_BY_CALL: (
        "{where} is used in some calls of the model and not in others, for the same batch",
        "call every block in every forward, and multiply what is to be left out by zero",
    ),
    Trait.OUTPUT_VARIES_BY_CALL: (
        "{where} returns other values for the same input when it is called again",
        "count calls outside of what is recomputed",
    ),
    Trait.BRANCHES_ON_DATA: (
        "a value in the batch decides whether {where} is used",
        "",
    ),
    Trait.UNUSED_PARAMETERS: (
        "the loss does not depend on {where}, whose gradient cannot be averaged",
        "set its requires_grad to False, or, with ddp alone, write "
        "parallel.find_unused_parameters=true",
    ),
    Trait.PARAMETERS_VARY: (
        "{where} is used for some samples or random numbers and not for others",
        "multiply by zero what is not to be used, or, with ddp alone, write "
        "parallel.find_unused_parameters=true",
    ),
}
"""What a model with the trait does, and what to write instead; "" where nothing can be."""


@dataclass(frozen=True)
class Observation:
    """A trait, and where it was observed: names of parameters or modules, in order."""

    trait: Trait
    names: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What the model does, without a full stop."""
        others = f" (and {len(self.names) - 1} more)" if len(self.names) > 1 else ""
        return _SENTENCES[self.trait][0].format(where=f"{self.names[0]}{others}")

    @property
    def instead(self) -> str:
        """How to write the model so that every layout keeps it; "" if there is no such way."""
        return _SENTENCES[self.trait][1]


class Record(Protocol):
    """The part of a strategy's record that is needed here; strategy.py documents it."""

    @property
    def name(self) -> str: ...
    @property
    def cannot_keep(self) -> frozenset[Trait]: ...
    @property
    def averages_gradients(self) -> bool: ...
    @property
    def splits_model(self) -> bool: ...


# --- what a layout cannot keep --------------------------------------------------------------------

_BROKEN_BY_RECOMPUTATION = {
    Trait.CHANGES_INPUT,
    Trait.CHANGES_DATA,
    Trait.CHANGES_PARAMETERS,
    Trait.CHANGES_PARAMETERS_BY_DATA,
    Trait.CHANGES_BUFFERS,
    Trait.CHANGES_BUFFERS_BY_DATA,
    Trait.VARIES_BY_CALL,
    Trait.OUTPUT_VARIES_BY_CALL,
}
"""What a block does a second time when it is recomputed."""
_BROKEN_BY_SELECTIVE_RECOMPUTATION = {Trait.RECURRENT, Trait.GRADIENT_IN_LOSS}
"""What selective recomputation does not allow.

It keeps results for one backward, in which nothing may write into them.
"""
_BROKEN_BY_MICRO_BATCHES = {
    Trait.CHANGES_PARAMETERS_EACH_TIME,
    Trait.CHANGES_PARAMETERS_BY_DATA,
    Trait.CHANGES_REQUIRES_GRAD,
    Trait.VARIES_BY_CALL,
    Trait.GRADIENT_HOOK,
    Trait.ACTIVATION_HOOK,
}
"""What trains another model if a step runs forward and backward for each of its micro-batches."""
_KEPT_IF_PARAMETERS_MAY_BE_UNUSED = {
    Trait.PARAMETERS_VARY,
    Trait.UNUSED_PARAMETERS,
    Trait.VARIES_BY_CALL,
}
"""What a strategy that averages gradients keeps if a step may leave parameters out.

It also keeps them if there is nothing to average.
"""


def broken_by(
    records: Iterable[Record],
    options: Options,
    observations: Sequence[Observation],
    *,
    data_workers: int,
    micro_batches: int = 1,
) -> list[Observation]:
    """The observations that a layout made of these strategies cannot keep.

    Args:
        records: The strategies that the layout combines.
        options: How the layout behaves; recomputing a block, for instance, has conditions of its
            own.
        observations: What was observed of the model.
        data_workers: Workers with samples of their own; with one, nothing is averaged.
        micro_batches: Micro-batches per step of a worker.
    """
    cannot_keep: set[Trait] = set()
    for record in records:
        may_leave_out = record.averages_gradients and options.find_unused_parameters
        averages_nothing = data_workers == 1 and not record.splits_model
        if may_leave_out or averages_nothing:
            cannot_keep |= record.cannot_keep - _KEPT_IF_PARAMETERS_MAY_BE_UNUSED
        else:
            cannot_keep |= record.cannot_keep
    if options.activation_checkpointing != "none":
        cannot_keep |= _BROKEN_BY_RECOMPUTATION
    if options.activation_checkpointing == "selective":
        cannot_keep |= _BROKEN_BY_SELECTIVE_RECOMPUTATION
    if micro_batches > 1:
        cannot_keep |= _BROKEN_BY_MICRO_BATCHES
    return [observation for observation in observations if observation.trait in cannot_keep]


def require_kept(
    layout: Layout,
    records: Sequence[Record],
    options: Options,
    observations: Sequence[Observation],
    alternatives: Sequence[Record],
    micro_batches: int = 1,
) -> None:
    """Checks that a layout trains a model as one device would.

    Args:
        layout: What to train under.
        records: Its strategies.
        options: How it behaves.
        observations: What was observed of the model.
        alternatives: Strategies that the message may recommend, the best first. It names the first
            that keeps all observations.
        micro_batches: Micro-batches per step of a worker.

    Raises:
        LayoutError: The layout cannot keep an observation; the message is about the first one.
    """
    without_recomputation = replace(options, activation_checkpointing="none")
    data_workers = layout.dims.dp_cp
    broken = broken_by(records, without_recomputation, observations, data_workers=data_workers)
    if broken:
        kept_by = [
            record.name
            for record in alternatives
            if not broken_by([record], options, observations, data_workers=layout.dims.world_size)
        ]
        advice = (
            f"write strategy={kept_by[0]}" if kept_by else "write strategy=single and workers=1"
        )
        reason = f"strategy {layout.name} cannot train such a model as one device would"
        raise _error(broken[0], observations, reason=reason, advice=advice)

    broken = broken_by(
        records,
        without_recomputation,
        observations,
        data_workers=data_workers,
        micro_batches=micro_batches,
    )
    if broken:
        reason = f"the {micro_batches} micro-batches of a step each run forward and backward"
        advice = "leave train.micro_batch_size out"
        raise _error(broken[0], observations, reason=reason, advice=advice)

    broken = broken_by(records, options, observations, data_workers=data_workers)
    if broken:
        mode = options.activation_checkpointing
        reason = f"train.activation_checkpointing={mode} runs forward twice"
        if _cause(broken[0], observations).trait in _BROKEN_BY_SELECTIVE_RECOMPUTATION:
            advice = "write train.activation_checkpointing=full"
            raise _error(
                broken[0],
                observations,
                reason=reason,
                advice=advice,
                with_change_of_model=False,
            )
        advice = "write train.activation_checkpointing=none"
        raise _error(broken[0], observations, reason=reason, advice=advice)


def _error(
    broken: Observation,
    observations: Sequence[Observation],
    *,
    reason: str,
    advice: str,
    with_change_of_model: bool = True,
) -> LayoutError:
    cause = _cause(broken, observations)
    instead = ""
    if cause.instead and with_change_of_model:
        instead = f", or change the model: {cause.instead}"
    return LayoutError(f"{cause.sentence}, and {reason}: {advice}{instead}")


def _cause(observation: Observation, observations: Sequence[Observation]) -> Observation:
    """The observation from which another one follows, or that one itself.

    A block's parameters may be used from outside because the loss reads them.
    """
    if observation.trait is not Trait.BLOCK_READ_FROM_OUTSIDE:
        return observation
    for other in observations:
        reads_parameters = other.trait in (Trait.LOSS_READS_PARAMETERS, Trait.LISTS_PARAMETERS)
        if reads_parameters and set(observation.names) <= set(other.names):
            return other
    return observation
