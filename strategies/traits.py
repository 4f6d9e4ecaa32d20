"""What a model may do on one device that not every layout can keep, and the sentence that says so.

A strategy keeps its promise, the same training as on one device, for models that read their parameters where they
belong, change them in the optimizer alone, and call the same modules for every sample. Most do. A model that does
otherwise trains a *different* model under some layouts, without an error: a worker of a pipeline has no other stage's
parameters to penalise, a shard forgets what forward wrote into the gathered weight, and a hook on a parameter stays
behind on the parameter that a sharded one replaced. Each such thing is a *trait*; rehearsal.py finds a model's in one
small step, each strategy's record says which it cannot keep (`Strategy.cannot_keep`), and `require_kept` compares the
two and says in one sentence what the model does, where, and what to write instead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from strategies.dims import Layout, LayoutError, Options


class Trait(enum.Enum):
    """Something that a model or its loss does and that some layout cannot keep."""

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
    ACTIVATION_HOOK = "a hook on an activation changes its gradient by more than a linear function of it"
    BACKWARD_HOOK = "a module has a hook on its backward"
    CUTS_GRAPH = "no gradient comes back through the output of a block"
    CHANGES_INPUT = "a block changes its input in place"
    CHANGES_DATA = "what is recomputed changes an input in place that has no gradient"
    CHANGES_OUTPUT = "the code after a block changes the block's output in place"
    GRADIENT_PAST_OUTPUT = "a block gets a gradient, but not through its output"
    RUNS_WITHOUT_GRADIENT = "a block runs without gradients and once more in backward"
    USED_BY_REENTRANT_CHECKPOINTS = "several reentrant checkpoints use the same parameter"
    RECURRENT = "a block has a recurrent layer"
    NORMALISES_OVER_BATCH = "a layer normalises over the samples of a batch"
    GRADIENT_IN_LOSS = "the loss takes a gradient itself"
    FUNCTIONAL_CALL = "the loss calls the model with parameters that it gives it"
    CALLS_VARY = "another sample, or another random number, takes another way through the model's blocks"
    VARIES_BY_CALL = "the same batch takes another way through the model when it comes again"
    ANSWERS_OTHERWISE = "what is recomputed puts out other numbers for the same input when it is called again"
    BRANCHES_ON_DATA = "a number of the batch decides which blocks are called or which parameters are used"
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
        "write into the parameter after the optimizer's step, or keep what forward computes in a plain attribute",
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
        "set requires_grad to False for what is not to be trained, or multiply the parameter by its mask in forward",
    ),
    Trait.GRADIENT_HOOK: (
        "{where} has a hook that sees or changes its gradient before it is averaged over the workers",
        "clip by train.clip_norm, or leave the hook out",
    ),
    Trait.ACTIVATION_HOOK: (
        "{where} puts a hook on an activation that changes its gradient in a way that depends on how many samples a "
        "batch has",
        "clip by train.clip_norm, or leave the hook out",
    ),
    Trait.BACKWARD_HOOK: (
        "{where} has a hook on its backward (register_full_backward_hook)",
        "put the hook on a tensor in forward instead (x.register_hook)",
    ),
    Trait.CUTS_GRAPH: (
        "no gradient comes back to {where}, because what follows detaches its output",
        "set requires_grad to False for the parameters before it, so that they are not in the optimizer",
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
        "{where} gets its gradient from what it has left in an attribute, and none through its output",
        "let the block return what the loss needs of it",
    ),
    Trait.RUNS_WITHOUT_GRADIENT: (
        "{where} is recomputed by a reentrant checkpoint",
        "write checkpoint(…, use_reentrant=False), or train.activation_checkpointing=full and no checkpoint",
    ),
    Trait.USED_BY_REENTRANT_CHECKPOINTS: (
        "{where} is used in several reentrant checkpoints, each of which says that its gradient is complete",
        "write checkpoint(…, use_reentrant=False), or train.activation_checkpointing=full and no checkpoint",
    ),
    Trait.RECURRENT: (
        "{where} is a recurrent layer, which writes into what selective recomputation keeps",
        "",
    ),
    Trait.NORMALISES_OVER_BATCH: ("{where} normalises over the samples of a batch", ""),
    Trait.GRADIENT_IN_LOSS: (
        "{where} takes a gradient inside of forward or of the loss (torch.autograd.grad, torch.func)",
        "",
    ),
    Trait.FUNCTIONAL_CALL: (
        "the loss calls the model by torch.func.functional_call, with parameters that it gives it",
        "call the model itself",
    ),
    Trait.CALLS_VARY: (
        "{where} is called for some samples or random numbers and not for others",
        "call every block in every forward, and multiply what is to be left out by zero",
    ),
    Trait.VARIES_BY_CALL: (
        "{where} is used in some calls of the model and not in others, for the same batch",
        "call every block in every forward, and multiply what is to be left out by zero",
    ),
    Trait.ANSWERS_OTHERWISE: (
        "{where} puts out other numbers for the same input when it is called again",
        "count calls outside of what is recomputed",
    ),
    Trait.BRANCHES_ON_DATA: (
        "a number of the batch decides whether {where} is used",
        "",
    ),
    Trait.UNUSED_PARAMETERS: (
        "the loss does not depend on {where}, whose gradient cannot be averaged",
        "set its requires_grad to False, or, with ddp alone, write parallel.find_unused_parameters=true",
    ),
    Trait.PARAMETERS_VARY: (
        "{where} is used for some samples or random numbers and not for others",
        "multiply by zero what is not to be used, or, with ddp alone, write parallel.find_unused_parameters=true",
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
        others = f" (and {len(self.names) - 1} more)" if len(self.names) > 1 else ""
        return _SENTENCES[self.trait][0].format(where=f"{self.names[0]}{others}")

    @property
    def instead(self) -> str:
        """How to write the model so that every layout keeps it; "" where there is no such way."""
        return _SENTENCES[self.trait][1]


class Record(Protocol):
    """What is asked of a strategy here; strategy.py says what each is."""

    @property
    def name(self) -> str: ...
    @property
    def cannot_keep(self) -> frozenset[Trait]: ...
    @property
    def averages(self) -> bool: ...
    @property
    def splits_model(self) -> bool: ...


# --- what a layout cannot keep ----------------------------------------------------------------------------------------


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
        records: the strategies that the layout combines.
        options: recomputing a block, for instance, has conditions of its own.
        observations: of the model.
        data_workers: workers with samples of their own; with one, nothing is averaged.
        micro_batches: of one worker's share of a step.
    """
    cannot_keep = set[Trait]()
    for record in records:
        may_leave_out = record.averages and options.find_unused_parameters
        is_alone = data_workers == 1 and not record.splits_model
        cannot_keep |= record.cannot_keep - (_LEFT_OUT if may_leave_out or is_alone else set())
    if options.activation_checkpointing != "none":
        cannot_keep |= _CHANGED_TWICE
    if options.activation_checkpointing == "selective":
        cannot_keep |= _NOT_SELECTIVELY
    if micro_batches > 1:
        cannot_keep |= _ONCE_A_STEP
    return [observation for observation in observations if observation.trait in cannot_keep]


_CHANGED_TWICE = {
    Trait.CHANGES_INPUT,
    Trait.CHANGES_DATA,
    Trait.CHANGES_PARAMETERS,
    Trait.CHANGES_PARAMETERS_BY_DATA,
    Trait.CHANGES_BUFFERS,
    Trait.CHANGES_BUFFERS_BY_DATA,
    Trait.VARIES_BY_CALL,
    Trait.ANSWERS_OTHERWISE,
}
"""What a block does a second time where it is recomputed."""
_NOT_SELECTIVELY = {Trait.RECURRENT, Trait.GRADIENT_IN_LOSS}
"""What selective recomputation does not bear: it keeps results for one backward, in which nothing writes into them."""
_ONCE_A_STEP = {
    Trait.CHANGES_PARAMETERS_EACH_TIME,
    Trait.CHANGES_PARAMETERS_BY_DATA,
    Trait.CHANGES_REQUIRES_GRAD,
    Trait.VARIES_BY_CALL,
    Trait.GRADIENT_HOOK,
    Trait.ACTIVATION_HOOK,
}
"""What is another training where a step calls forward and backward for each of its micro-batches."""
_LEFT_OUT = {Trait.PARAMETERS_VARY, Trait.UNUSED_PARAMETERS, Trait.VARIES_BY_CALL}
"""What a strategy that averages gradients keeps if a step may leave parameters out, or there is nothing to average."""


def require_kept(
    layout: Layout,
    records: Sequence[Record],
    options: Options,
    observations: Sequence[Observation],
    alternatives: Sequence[Record],
    micro_batches: int = 1,
) -> None:
    """Raises LayoutError, one sentence, for the first observation that the layout cannot keep.

    Args:
        layout: what is to be trained under.
        records: its strategies.
        options: how they behave.
        observations: of the model.
        alternatives: strategies to name instead, the best first; the first that keeps all observations is named.
        micro_batches: of one worker's share of a step.
    """
    whole = replace(options, activation_checkpointing="none")
    workers = layout.dims.dp_cp
    by_strategy = broken_by(records, whole, observations, data_workers=workers)
    by_parts = broken_by(records, whole, observations, data_workers=workers, micro_batches=micro_batches)
    by_recomputing = broken_by(records, options, observations, data_workers=workers)
    broken = by_strategy or by_parts or by_recomputing
    if not broken:
        return
    shown = _cause(broken[0], observations)
    if by_strategy:
        what = f"strategy {layout.name} cannot train such a model as one device would"
        keeping = [
            record.name
            for record in alternatives
            if not broken_by([record], options, observations, data_workers=layout.dims.world_size)
        ]
        advice = f"write strategy={keeping[0]}" if keeping else "write strategy=single and workers=1"
    elif by_parts:
        what = f"the {micro_batches} micro-batches of a step each run forward and backward"
        advice = "leave train.micro_batch_size out"
    else:
        what = f"train.activation_checkpointing={options.activation_checkpointing} runs forward twice"
        advice = "write train.activation_checkpointing=none"
    instead = f", or change the model: {shown.instead}" if shown.instead else ""
    if not by_strategy and not by_parts and shown.trait in _NOT_SELECTIVELY:
        advice, instead = "write train.activation_checkpointing=full", ""  # which is no change of the model
    raise LayoutError(f"{shown.sentence}, and {what}: {advice}{instead}")


def _cause(observation: Observation, observations: Sequence[Observation]) -> Observation:
    """What a person should be told instead, where one observation follows from another: a block's parameters are used
    from outside because the loss reads them."""
    if observation.trait is Trait.BLOCK_READ_FROM_OUTSIDE:
        for other in observations:
            reads = other.trait in (Trait.LOSS_READS_PARAMETERS, Trait.LISTS_PARAMETERS)
            if reads and set(observation.names) <= set(other.names):
                return other
    return observation
