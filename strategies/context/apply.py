"""Context parallelism: one sequence over several workers.

Everything in a transformer but attention looks at one token at a time. So each of C workers takes
T/C tokens of every sequence. The model's own code runs on them unchanged, and only
`F.scaled_dot_product_attention` is replaced, by a function in which tokens of different workers
meet (ring.py, allgather.py, ulysses.py). Activations fall as 1/C, and so does arithmetic.

Three things depend on the place of a token in its sequence:

- *Batches.* Every tensor along the sequence is cut: inputs, labels and masks alike.
- *Positions.* The model is called with the places of its tokens as `position_ids`, from which it
  makes rotary tables or looks up embeddings. A model that takes them in another way says so in a
  `ContextPlan`.
- *The loss* is a mean over the worker's own labels. If the micro-batch has n labels, of which this
  worker has nᵣ, each worker multiplies its mean by C·nᵣ/n. The average over the C workers is then
  the mean over all n. Labels that do not count (-100) are not among them.

For parameters the C workers are further data-parallel ones: replicas, or shards (dims.py). Dropout
in attention is refused, because it cannot be the same on any number of workers. So is a mask, which
the model has made of its own part.

Choose it if the activations of one sequence do not fit on a device, and before tensor parallelism
across nodes: it sends keys and values instead of all activations.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.context import allgather, ring, ulysses
from strategies.context.attention import ATTENTION, ContextMethod, register_group
from strategies.dims import LayoutError, ParallelDims, group_of_this_rank
from strategies.options import Options
from strategies.strategy import Strategy
from strategies.traits import Trait
from strategies.tree import tree_leaves, tree_map
from strategies.zero_weight import has_no_weight

T = TypeVar("T")
METHODS: dict[str, ContextMethod] = {
    "ring": ring.METHOD,
    "allgather": allgather.METHOD,
    "ulysses": ulysses.METHOD,
}
"""The values of `parallel.context`."""
IGNORED_LABEL = -100
"""A label that does not count, as in torch's cross entropy."""
_groups_of_losses: list[dist.ProcessGroup] = []
"""The workers of the split sequence whose loss this process computes at the moment, if any."""


def _check(options: Options) -> None:
    # torch 2.13 fails while it compiles both.
    if options.compile and options.activation_checkpointing == "selective":
        raise LayoutError(
            "train.compile with parallel.cp cannot recompute blocks in part: write "
            "train.activation_checkpointing=full or none, or train.compile=false"
        )


STRATEGY = Strategy(
    name="context",
    summary="each sequence split over workers",
    degrees=("cp",),
    combines_with=("dp_replicate", "dp_shard", "tp", "pp", "ep"),
    check_options=_check,
    # The workers of one sequence have different tokens, and meet in every attention.
    cannot_keep=frozenset(
        {
            Trait.CHANGES_PARAMETERS_BY_DATA,
            Trait.GRADIENT_HOOK,
            Trait.ACTIVATION_HOOK,
            Trait.GRADIENT_IN_LOSS,
            Trait.CALLS_VARY,
            Trait.PARAMETERS_VARY,
            Trait.VARIES_BY_CALL,
        }
    ),
)

TakePart = Callable[[Tensor, int], Tensor]
"""(tensor, dimension) → this worker's part of the tensor along that dimension."""


def _as_position_ids(places: Tensor) -> dict[str, Any]:
    return {"position_ids": places}


@dataclass(frozen=True)
class ContextPlan:
    """Where a model and its batches have their sequence.

    Args:
        keywords: The places of this worker's tokens, int64 (1, T/C) → the keyword arguments that
            pass them to the model.
        cut: (batch, a function that takes this worker's part of a tensor along a dimension) → this
            worker's batch. None: dimension 1 of every tensor that has one as long as the first.
        labels: Batch → how many labels its loss is the mean of, 0-dimensional. None: the number of
            entries of the last tensor along the sequence that are not -100.
    """

    keywords: Callable[[Tensor], dict[str, Any]] = _as_position_ids
    cut: Callable[[Any, TakePart], Any] | None = None
    labels: Callable[[Any], Tensor] | None = None


# --- checks and choices before a process starts ---------------------------------------------------


def choose_method(
    method: str, *, heads: int | None, dims: ParallelDims, workers_per_node: int | None
) -> str:
    """The method that `parallel.context` means.

    auto is ulysses within a node if cp · tp divides the heads, and ring otherwise.

    Args:
        method: `parallel.context`.
        heads: The model's; None if they are not known, which makes it ring.
        dims: The degrees.
        workers_per_node: None if the number is not known, which makes it ring.
    """
    if method != "auto":
        return method
    workers = dims.cp * dims.tp
    is_within_node = workers_per_node is not None and workers <= workers_per_node
    divides_heads = heads is not None and heads > 0 and heads % workers == 0
    return "ulysses" if is_within_node and divides_heads else "ring"


def check_length(length: int, cp: int, method: str) -> None:
    """Check that a sequence can be cut.

    Args:
        length: Number of tokens.
        cp: Number of workers.
        method: A key of METHODS.

    Raises:
        LayoutError: It cannot be; the sentence names the nearest lengths that can.
    """
    pieces = 2 * cp if METHODS[method].is_zigzag else cp
    if length % pieces:
        below = length - length % pieces
        above = below + pieces
        nearest = f"{below} or {above}" if below else f"{above}"
        raise LayoutError(
            f"a sequence of {length} tokens cannot be split over parallel.cp={cp}, for which "
            f"{method} cuts it into {pieces} equal pieces: write a sequence length of {nearest}"
        )


def require_positions(module: nn.Module, plan: ContextPlan | None) -> None:
    """Check that the model can be given the places of its tokens.

    Raises:
        LayoutError: It has no `position_ids` and there is no plan.
    """
    arguments = inspect.signature(module.forward).parameters
    if plan is None and "position_ids" not in arguments:
        raise LayoutError(
            f"the model {type(module).__name__} cannot be told where in the sequence its tokens "
            "are, so parallel.cp cannot split it: give its forward a parameter position_ids, or "
            "the task a context_plan (strategies/context/apply.py)"
        )


@torch.no_grad()
def mean_over_sequence(part: Tensor) -> Tensor:
    """The mean over the workers of a sequence, without a gradient.

    It is for a loss that is not a mean over tokens. If sequences are not split, it returns the
    tensor detached.

    Args:
        part: What each worker has computed for its equal part of the tokens.
    """
    if not _groups_of_losses:
        return part.detach()
    group = _groups_of_losses[-1]
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return total / group.size()


def sum_over_sequence(part: Tensor) -> Tensor:
    """The sum over the workers of a sequence, through which gradients flow.

    It is for a loss of whole sequences, which each worker then computes alike. If sequences are not
    split, it returns the tensor itself.

    Args:
        part: What each worker has computed for its own tokens.
    """
    if not _groups_of_losses:
        return part
    total: Tensor = _SequenceSum.apply(part, _groups_of_losses[-1])
    return total


class _SequenceSum(torch.autograd.Function):
    """The sum of a tensor over the workers of a sequence, each of which has the same loss of it.

    The gradient is then the same on all C workers. It is multiplied by C, because the gradients of
    parameters are averaged over the workers, of which each has those of its own tokens only.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.workers = group.size()
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.workers, None


# --- splitting sequences --------------------------------------------------------------------------


@runtime_checkable
class SplitTensor(Protocol):
    """A tensor that tensor parallelism has split, and whose memory is all in `local`."""

    local: Tensor

    def with_local(self, local: Tensor) -> Any:
        """The same tensor with another part of this worker."""


class Context:
    """Splits every sequence over workers, of which this is one."""

    def __init__(self, dims: ParallelDims, options: Options, plan: ContextPlan | None) -> None:
        """Make the groups; collective over all workers.

        Args:
            dims: The degrees.
            options: `context` is the method.
            plan: Where the sequence is; None: where most models have it.
        """
        group = group_of_this_rank(dims.peers("cp"))
        assert group is not None, "every worker has a part of a sequence"
        self.group = group
        self._workers = dims.cp
        self._plan = plan or ContextPlan()
        self._group_number = register_group(group)
        self._method_name = choose_method(
            options.context, heads=None, dims=dims, workers_per_node=None
        )
        self._method = METHODS[self._method_name]
        self._length = 0
        """Number of tokens of a whole sequence of the current batch."""
        self._has_attended = False
        self._has_told_places = False
        self._is_active = False
        """Whether torch's attention is replaced at the moment."""
        self._has_labels: Tensor | None = None
        """Whether any label counts of the batch whose loss is computed, 0-dimensional; None outside
        of a loss."""
        # One object, by which compiled code recognises it.
        self._attention = self._attend
        self._references: list[tuple[dict[str, Any], str]] = []

    def install(self, module: nn.Module, blocks: list[str]) -> None:
        """Tell a model the places of its tokens and let it attend across workers, in place.

        Each block is changed by itself, because one that is recomputed runs in backward: the loss
        function is over by then, and on a GPU it is in another thread.
        """
        self._references = _references_to_attention()
        for name in blocks or [""]:
            block = module.get_submodule(name)
            block.forward = self._attending(block.forward)
        module.register_forward_pre_hook(self._add_places, with_kwargs=True)
        module.register_forward_hook(self._gate_output)

    def _attending(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function in which torch's attention is attention across workers."""

        @functools.wraps(function)
        def attending_function(*args: Any, **kwargs: Any) -> T:
            if self._is_active:
                return function(*args, **kwargs)
            self._is_active = True
            _groups_of_losses.append(self.group)
            self._refer_to(self._attention)
            try:
                return function(*args, **kwargs)
            finally:
                self._refer_to(ATTENTION)
                self._is_active = False
                _groups_of_losses.pop()

        return attending_function

    def _refer_to(self, attention: Callable[..., Tensor]) -> None:
        """Put a function where torch's attention was.

        torch's own `context_parallel` does so too. A TorchFunctionMode would see every other
        function as well, hundreds in a step.
        """
        for namespace, name in self._references:
            namespace[name] = attention

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention` of this worker's part, with its arguments.

        Raises:
            LayoutError: It is not attention of a sequence to itself that can be split.
        """
        if getattr(query, "is_placeholder", False):
            # A pipeline runs the model without data, to trace it.
            return ATTENTION(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        self._has_attended = True
        _require_splittable(query, key, attn_mask=attn_mask, dropout_p=dropout_p)
        device_type = query.device.type
        if torch.is_autocast_enabled(device_type):
            # Autocast casts the arguments of torch's own attention.
            dtype = torch.get_autocast_dtype(device_type)
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        return self._method.attention(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale or 1 / math.sqrt(query.size(-1)),
            group=self._group_number,
        )

    def _add_places(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._has_told_places = True
        leaves = tree_leaves((args, kwargs))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        whole = torch.arange(self._length, device=device).unsqueeze(0)
        return args, {**self._plan.keywords(self._take_part(whole, 1)), **kwargs}

    def _gate_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Make the gradient of the model's output zero if no label counts.

        The mean over no labels is nan, and so may be its gradient.
        """
        has_labels = self._has_labels
        if has_labels is None:
            return None

        def gate(leaf: Any) -> Any:
            if isinstance(leaf, SplitTensor):
                return leaf.with_local(gate(leaf.local))
            is_output = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() > 0
            return _GradientGate.apply(leaf, has_labels) if is_output else leaf

        return tree_map(gate, output)

    # --- batches and losses -----------------------------------------------------------------------

    def split(
        self, batches: Sequence[Any], weights: Sequence[float | Tensor]
    ) -> tuple[list[Any], list[float | Tensor]]:
        """Cut micro-batches to this worker's tokens.

        Args:
            batches: The micro-batches.
            weights: The weight of each.

        Returns:
            This worker's parts, and weights with which the average over the C workers is right.

        Raises:
            LayoutError: A sequence cannot be cut.
        """
        parts: list[Any] = []
        part_weights: list[float | Tensor] = []
        for batch, weight in zip(batches, weights):
            part, share = self._cut(batch)
            parts.append(part)
            part_weights.append(weight if has_no_weight(weight) else weight * share)
        return parts, part_weights

    def _cut(self, batch: Any) -> tuple[Any, Tensor]:
        """(this worker's tokens, C·nᵣ/n)."""
        tensors = _tensors_with_sequence(batch)
        if not tensors:
            raise LayoutError(
                "parallel.cp splits sequences, but the batch has no tensor with a second dimension"
            )
        if self._plan.cut is not None:
            part = self._plan.cut(batch, self._take_part)
        else:
            length = tensors[0].size(1)
            self._set_length(length)

            def take(leaf: Any) -> Any:
                is_along = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.size(1) == length
                return self._take_part(leaf, 1) if is_along else leaf

            part = tree_map(take, batch)
        share = self._workers * self._count_labels(part) / self._count_labels(batch).clamp(min=1)
        return part, share

    def _count_labels(self, batch: Any) -> Tensor:
        """The number of labels that count, 0-dimensional."""
        if self._plan.labels is not None:
            return self._plan.labels(batch)
        labels = _tensors_with_sequence(batch)[-1]
        return (labels != IGNORED_LABEL).sum()

    def loss_of_part(self, loss: Callable[[nn.Module, Any], Tensor]) -> Callable[..., Tensor]:
        """The loss of a batch that has been cut; 0 if none of its labels counts."""

        def part_loss(module: nn.Module, batch: Any) -> Tensor:
            has_labels = self._count_labels(batch) > 0
            self._has_labels = has_labels
            try:
                value = self._attending(loss)(module, batch)
            finally:
                self._has_labels = None
            self._require_attention()
            return torch.where(has_labels, value, 0.0)

        return part_loss

    def averaged(self, function: Callable[[nn.Module, Any], T]) -> Callable[..., T]:
        """A function for evaluation whose average over the C workers is that of the whole batch.

        Args:
            function: (model, batch) → means over the batch.
        """

        def part_function(module: nn.Module, batch: Any) -> T:
            part, share = self._cut(batch)
            means = self._attending(function)(module, part)

            def term(mean: Any) -> Any:
                if not isinstance(mean, Tensor):
                    return mean
                return torch.where(share > 0, mean * share, 0.0)

            return tree_map(term, means)

        return part_function

    def _set_length(self, length: int) -> None:
        check_length(length, self._workers, self._method_name)
        self._length = length

    def _take_part(self, tensor: Tensor, dim: int) -> Tensor:
        """This worker's part of a tensor whose dimension `dim` is the sequence."""
        self._set_length(tensor.size(dim))
        rank = self.group.rank()
        if not self._method.is_zigzag:
            return tensor.chunk(self._workers, dim)[rank].contiguous()
        pieces = tensor.chunk(2 * self._workers, dim)
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim)

    def _require_attention(self) -> None:
        """Raises LayoutError if the loss did not use the model in a way that was split."""
        if not self._has_told_places:
            raise LayoutError(
                "the loss calls parts of the model and not the model itself, so parallel.cp cannot "
                "tell it where its tokens are: call the model, or leave parallel.cp out"
            )
        if not self._has_attended:
            raise LayoutError(
                "the model's attention is not F.scaled_dot_product_attention, so parallel.cp "
                "cannot split it: use that, or leave parallel.cp out"
            )


def _tensors_with_sequence(batch: Any) -> list[Tensor]:
    """The tensors of a batch that have a second dimension."""
    leaves = tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]


class _GradientGate(torch.autograd.Function):
    """The identity, whose gradient is zero unless `is_open`.

    That is a boolean on the device, for which no host waits.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, is_open: Tensor) -> Tensor:
        ctx.save_for_backward(is_open)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (is_open,) = ctx.saved_tensors
        zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        return torch.where(is_open, gradient, zero), None


def _references_to_attention() -> list[tuple[dict[str, Any], str]]:
    """Where loaded modules refer to torch's attention: (namespace, name).

    These are `F` and whatever has imported the function from there, but not torch itself nor this
    package.
    """
    excluded = ("torch.", __package__ or "")
    modules = [F]
    modules += [
        module for name, module in list(sys.modules.items()) if not name.startswith(excluded)
    ]
    references: list[tuple[dict[str, Any], str]] = []
    for module in modules:
        namespace: dict[str, Any] = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            if value is ATTENTION:
                references.append((namespace, name))
    return references


def _require_splittable(
    query: Tensor, key: Tensor, *, attn_mask: Tensor | None, dropout_p: float
) -> None:
    """Raises LayoutError unless this is attention that can be split."""
    reason = ""
    if attn_mask is not None:
        reason = "gives attention a mask, which it has made of its own part of the sequence alone"
    elif dropout_p:
        reason = (
            f"drops attention with probability {dropout_p:g}, which no split of a sequence can "
            "repeat"
        )
    elif query.dim() != 4 or query.size(2) != key.size(2):
        reason = (
            "attends from one sequence to another, or to tensors that are not (batch, heads, "
            "tokens, numbers)"
        )
    if reason:
        raise LayoutError(
            f"the model {reason}: parallel.cp cannot split it; leave parallel.cp out, or write "
            "parallel.tp"
        )
