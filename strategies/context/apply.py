"""Context parallelism: one sequence over several workers.

Everything in a transformer but attention looks at one token at a time. So a worker of C takes T/C tokens of every
sequence, the model's own code runs on them unchanged, and only `F.scaled_dot_product_attention` is another function:
one in which tokens meet across workers (ring.py, allgather.py, ulysses.py). Activations fall as 1/C, arithmetic too.

What has to know its place in the sequence is told it:

- *batches*: every tensor along the sequence is cut, inputs, labels and masks alike, into the parts of `order`;
- *positions*: the model is called with the places of its tokens as `position_ids`, from which it makes its rotary
  tables or looks up embeddings. A model that has another way says so in a `ContextPlan`;
- *the loss* is a mean over the worker's own labels. Of n labels in the micro-batch it has nᵣ, and averaging over C
  workers what each multiplies by C·nᵣ/n gives the mean over all n, labels that do not count (-100) included.

For parameters the C workers are further data-parallel ones: replicas, or shards (dims.py). Dropout in attention cannot
be the same on any number of workers and is refused, and so is a mask that the model has made of its own part.

Choose it when the activations of one sequence do not fit on a device, before tensor parallelism across nodes: it sends
keys and values instead of all activations.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.context import allgather, ring, ulysses
from strategies.context.attention import ATTENTION, number_of
from strategies.dims import LayoutError, ParallelDims, group_of_this_rank
from strategies.options import Options
from strategies.strategy import Strategy
from strategies.traits import Trait
from strategies.tree import tree_leaves, tree_map
from strategies.zero_weight import has_no_weight

METHODS: dict[str, ModuleType] = {"ring": ring, "allgather": allgather, "ulysses": ulysses}
IGNORED = -100
"""A label that does not count, as in torch's cross entropy."""
_LOSSES: list[dist.ProcessGroup] = []
"""The workers of the sequence of which this process computes the loss, if it is split."""


def _check(options: Options) -> None:
    if options.compile and options.activation_checkpointing == "selective":  # torch 2.13 fails while it compiles them
        raise LayoutError(
            "train.compile with parallel.cp cannot recompute blocks in part: write train.activation_checkpointing=full "
            "or none, or train.compile=false"
        )


STRATEGY = Strategy(
    name="context",
    summary="each sequence split over workers",
    degrees=("cp",),
    combines_with=("dp_replicate", "dp_shard", "tp", "pp", "ep"),
    check_options=_check,
    # Workers of one sequence have other tokens, and meet in every attention.
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


@dataclass(frozen=True)
class ContextPlan:
    """Where a model and its batches have their sequence.

    keywords: places of this worker's tokens, int64 (1, T/C) → keyword arguments of the model's forward. cut: (batch,
    part) → this worker's batch, where part(tensor, dim) is its part of a tensor; None: dimension 1 of every tensor
    that has one as long as the first. labels: batch → how many labels its loss is the mean of, 0-d; None: as many as
    the last tensor that is cut has entries other than -100.
    """

    keywords: Callable[[Tensor], dict[str, Any]] = lambda places: {"position_ids": places}
    cut: Callable[[Any, Callable[[Tensor, int], Tensor]], Any] | None = None
    labels: Callable[[Any], Tensor] | None = None


def choose_method(asked: str, heads: int | None, dims: ParallelDims, per_node: int | None) -> str:
    """What parallel.context=auto is: ulysses within a node where cp · tp divides the heads, else ring.

    Args:
        asked: parallel.context, which stays as it is unless it is auto.
        heads: The model's. None: they are not known, so that it is ring.
        dims: The degrees.
        per_node: Workers on a node. None: it is not known, so that it is ring.
    """
    if asked != "auto":
        return asked
    near = per_node is not None and dims.cp * dims.tp <= per_node
    return "ulysses" if near and heads and heads % (dims.cp * dims.tp) == 0 else "ring"


def check_length(length: int, ways: int, method: str) -> None:
    """Raises LayoutError unless a sequence of this many tokens can be cut."""
    pieces = ways * (2 if METHODS[method].ZIGZAG else 1)
    if length % pieces:
        below, above = length - length % pieces, length - length % pieces + pieces
        near = f"{below} or {above}" if below else f"{above}"
        raise LayoutError(
            f"a sequence of {length} tokens cannot be split over parallel.cp={ways}, for which {method} cuts it into "
            f"{pieces} equal pieces: write a sequence length of {near}"
        )


@torch.no_grad()
def mean_over_sequence(part: Tensor) -> Tensor:
    """For a loss that is no mean over tokens: of what each worker of a sequence finds for its equal part of the tokens
    the mean, without a gradient; as given where sequences are whole."""
    if not _LOSSES:
        return part.detach()
    mean = part.detach().clone()
    dist.all_reduce(mean, group=_LOSSES[-1])
    return mean / _LOSSES[-1].size()


def require_positions(module: nn.Module, plan: ContextPlan | None) -> None:
    """Raises LayoutError if nothing says where the model takes the places of its tokens."""
    known = inspect.signature(module.forward).parameters
    if plan is None and "position_ids" not in known:
        raise LayoutError(
            f"the model {type(module).__name__} cannot be told where in the sequence its tokens are, so parallel.cp "
            "cannot split it: give its forward a parameter position_ids, or the task a context_plan "
            "(strategies/context/apply.py)"
        )


@runtime_checkable
class SplitTensor(Protocol):
    """Of a model that is split as well: a tensor of which this worker has a part and nothing else has memory."""

    local: Tensor

    def with_local(self, local: Tensor) -> Any: ...


class Context:
    """This worker's part of every sequence. Collective over all workers."""

    def __init__(self, dims: ParallelDims, options: Options, plan: ContextPlan | None) -> None:
        group = group_of_this_rank(dims.peers("cp"))
        assert group is not None
        self.group, self.ways, self.plan = group, dims.cp, plan or ContextPlan()
        self.number = number_of(group)
        self.name = choose_method(options.context, heads=None, dims=dims, per_node=None)
        self.method = METHODS[self.name]
        self.length = 0
        self.seen = self.told = False
        """Whether the model has attended; whether it has been told the places of its tokens."""
        self.active = False
        self.counts: Tensor | None = None
        """Whether the batch whose loss is computed has a label that counts, 0-d; None outside of a loss."""
        self.attend = self._attend  # one object, by which compiled code knows it again
        self.names: list[tuple[dict[str, Any], str]] = []

    def install(self, module: nn.Module, blocks: list[str]) -> None:
        """Tells the model the places of its tokens, and lets its blocks attend across workers; in place.

        Blocks by themselves, because one that is recomputed runs in backward, where the loss function is over (and on a
        GPU in another thread)."""
        self.names = _names()
        for name in blocks or [""]:
            part = module.get_submodule(name)
            part.forward = self._attending(part.forward)
        module.register_forward_pre_hook(self._with_places, with_kwargs=True)
        module.register_forward_hook(self._gated)

    def _attending(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def attending(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                return forward(*args, **kwargs)
            self.active = True
            _LOSSES.append(self.group)
            self._name(self.attend)
            try:
                return forward(*args, **kwargs)
            finally:
                self._name(ATTENTION)
                self.active = False
                _LOSSES.pop()

        return attending

    def _name(self, function: Callable[..., Tensor]) -> None:
        for names, name in self.names:
            names[name] = function

    def _attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of `F.scaled_dot_product_attention`, as torch's own `context_parallel` has it: a TorchFunctionMode
        would see every other function too, hundreds in a step."""
        if getattr(query, "is_placeholder", False):
            return ATTENTION(query, *args, **kwargs)
        self.seen = True
        return _attend(self.method, self.number, query, *args, **kwargs)

    def _with_places(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.told = True
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return args, {**self.plan.keywords(self.places(device)), **kwargs}

    def _gated(self, _: nn.Module, __: Any, output: Any) -> Any:
        """The model's output, whose gradient is zero where no label counts, even if the loss makes it nan."""
        counts = self.counts
        if counts is None:
            return None

        def gate(leaf: Any) -> Any:
            if isinstance(leaf, SplitTensor):
                return leaf.with_local(gate(leaf.local))
            is_output = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() > 0
            return _GradientGate.apply(leaf, counts) if is_output else leaf

        return tree_map(gate, output)

    def places(self, device: torch.device) -> Tensor:
        """Where in the sequence this worker's tokens are: (1, T/C)."""
        return self._part(torch.arange(self.length, device=device).unsqueeze(0), 1)

    # --- batches and losses -----------------------------------------------------------------------------------------

    def split(self, batches: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Micro-batches cut to this worker's tokens; weights so that their mean over the C workers is right."""
        found = [self.cut(batch) for batch in batches]
        shares = [w if has_no_weight(w) else w * share for w, (_, share) in zip(weights, found)]
        return [batch for batch, _ in found], shares

    def cut(self, batch: Any) -> tuple[Any, Tensor]:
        """(this worker's tokens, C·nᵣ/n).

        Raises:
            LayoutError: a length that cannot be cut."""
        lengths = [leaf.size(1) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        if not lengths:
            raise LayoutError("parallel.cp splits sequences, but the batch has no tensor with a second dimension")
        if self.plan.cut is not None:
            own = self.plan.cut(batch, self._part)
        else:
            self._long(lengths[0])
            own = tree_map(lambda leaf: self._part(leaf, 1) if self._is_along(leaf, lengths[0]) else leaf, batch)
        return own, self.ways * self.labels(own) / self.labels(batch).clamp(min=1)

    def labels(self, batch: Any) -> Tensor:
        """How many labels count."""
        if self.plan.labels is not None:
            return self.plan.labels(batch)
        along = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        return (along[-1] != IGNORED).sum()

    def counted(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of a cut batch; 0 where none of its labels counts, whose mean is nan, and so may its gradient be."""

        def of_own(module: nn.Module, batch: Any) -> Any:
            self.counts = self.labels(batch) > 0
            try:
                value = self._attending(loss)(module, batch)
            finally:
                counts, self.counts = self.counts, None
            self._require_attention()
            return torch.where(counts, value, 0.0)

        return of_own

    def averaged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of an evaluation's means over a whole batch, this worker's terms: their mean over the C workers is right."""

        def of_own(module: nn.Module, batch: Any) -> Any:
            own, share = self.cut(batch)
            found = self._attending(function)(module, own)
            return tree_map(lambda v: torch.where(share > 0, v * share, 0.0) if isinstance(v, Tensor) else v, found)

        return of_own

    def _is_along(self, leaf: Any, length: int) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.size(1) == length

    def _long(self, length: int) -> None:
        check_length(length, self.ways, self.name)
        self.length = length

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        self._long(tensor.size(dim))
        rank = self.group.rank()
        if not self.method.ZIGZAG:
            return tensor.chunk(self.ways, dim)[rank].contiguous()
        pieces = tensor.chunk(2 * self.ways, dim)
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim)

    def _require_attention(self) -> None:
        if not self.told:
            raise LayoutError(
                "the loss calls parts of the model and not the model itself, so parallel.cp cannot tell it where its "
                "tokens are: call the model, or leave parallel.cp out"
            )
        if not self.seen:
            raise LayoutError(
                "the model's attention is not F.scaled_dot_product_attention, so parallel.cp cannot split it: use "
                "that, or leave parallel.cp out"
            )


class _GradientGate(torch.autograd.Function):
    """The identity; its gradient is zero unless `counts`, a device's boolean for which no host waits."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        return torch.where(counts, gradient, torch.zeros((), dtype=gradient.dtype, device=gradient.device)), None


def _names() -> list[tuple[dict[str, Any], str]]:
    """Where loaded modules have torch's attention, and as what: `F`, and whoever imported it from there."""
    own = ("torch.", __package__ or "")
    loaded = (module for name, module in list(sys.modules.items()) if not name.startswith(own))
    spaces = [getattr(module, "__dict__", {}) for module in (F, *loaded)]
    return [(space, name) for space in spaces for name, value in list(space.items()) if value is ATTENTION]


def _attend(
    method: ModuleType,
    group: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of this worker's part."""
    wrong = ""
    if attn_mask is not None:
        wrong = "gives attention a mask, which it has made of its own part of the sequence alone"
    elif dropout_p:
        wrong = f"drops attention with probability {dropout_p:g}, which no split of a sequence can repeat"
    elif query.dim() != 4 or query.size(2) != key.size(2):
        wrong = "attends from one sequence to another, or to tensors that are not (batch, heads, tokens, numbers)"
    if wrong:
        raise LayoutError(
            f"the model {wrong}: parallel.cp cannot split it; leave parallel.cp out, or write parallel.tp"
        )
    if torch.is_autocast_enabled(query.device.type):  # which would cast for the function itself
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return method.attention(query, key, value, is_causal, scale or 1 / math.sqrt(query.size(-1)), group)
