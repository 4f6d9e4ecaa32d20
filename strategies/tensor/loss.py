"""The loss over a vocabulary that is split over workers, without ever gathering the logits.

With V words over R workers, each holds (N, V/R) logits. With m the largest logit of a row over all workers,

    s = Σᵣ Σ_{j of r} exp(lⱼ - m)      t = l_target - m, known to one worker      loss = log s - t
    ∂loss/∂lⱼ = exp(lⱼ - m)/s - [j = target]                                      on each worker alone

so 3·N numbers are all-reduced instead of N·V gathered: for V = 128,000 that is the difference between kilobytes and
gigabytes. Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, §3.

It is computed in float32 from logits that may have 16 bits, rows by rows, and again in backward from the logits, the
rows' m and s: what is kept is the logits, and no float32 number for each of them, of which there would be four at once.

The head returns `VocabularyLogits`, a tensor that knows that it is split. `F.cross_entropy` of it is the above; views,
casts and slices of rows leave it split; anything else gathers first, and is right too, at a higher cost. So a task's
loss is plain PyTorch and gets a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.tensor.ops import Peers, gather_features
from strategies.tree import tree_map

CHUNK_NUMBERS = 1 << 24
"""Of logits that are float32 at once: 64 MiB, large enough to fill a GPU."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_NOTHING = torch.empty(0, device="meta")  # under a fake mode no tensor made there could be of another class


class VocabularyLogits(Tensor):
    """Logits (…, V) of which this worker holds the columns `peers.bounds(V)` in `local`; itself without storage.

    dtype: of the logits; `local` has 16 bits still where they were made float32, as losses do, and nothing needs that.
    """

    local: Tensor
    peers: Peers
    vocabulary: int
    meta: Tensor

    @staticmethod
    def __new__(
        cls, local: Tensor, peers: Peers, vocabulary: int, dtype: torch.dtype | None = None
    ) -> VocabularyLogits:
        meta = torch.empty((*local.shape[:-1], vocabulary), dtype=dtype or local.dtype, device="meta")
        self = _NOTHING.as_subclass(cls)
        self.local, self.peers, self.vocabulary, self.meta = local, peers, vocabulary, meta
        return self

    def gathered(self) -> Tensor:
        return gather_features(self.local, self.peers, self.vocabulary).to(self.meta.dtype)

    def own(self) -> Tensor:
        """This worker's columns, in the logits' type from here on."""
        self.local = self.local.to(self.meta.dtype)
        return self.local

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__repr__":  # on one rank perhaps: no collective
            return f"VocabularyLogits(…, {args[0].vocabulary})"
        if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        if args and isinstance(args[0], VocabularyLogits):
            logits = args[0]
            if name in _ATTRIBUTES or func in _GETTERS:
                return func(logits.meta, *args[1:], **kwargs)
            if logits.local.dtype in SIXTEEN_BITS and _makes_float32(name, args[1:], kwargs):
                return VocabularyLogits(logits.local, logits.peers, logits.vocabulary, torch.float32)
            if name in _ROWWISE and (own := _own_arguments(name, logits, args[1:], kwargs)) is not None:
                local = func(logits.local, *own, **kwargs)
                dtype = local.dtype if name in _CASTS else logits.meta.dtype
                return VocabularyLogits(local, logits.peers, logits.vocabulary, dtype)
            if func in _OF_LOCAL:
                return func(logits.local, *args[1:], **kwargs)
            if name in _HOOKS:
                return func(logits.own(), *args[1:], **kwargs)
        args, kwargs = tree_map(lambda x: x.gathered() if isinstance(x, VocabularyLogits) else x, (tuple(args), kwargs))
        return func(*args, **kwargs)


_ATTRIBUTES = frozenset(
    {"size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "ndimension", "nelement"}
)
_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "is_sparse"))
_LOCAL_NAMES = ("device", "is_cuda", "is_cpu", "is_mps", "is_meta", "requires_grad", "grad_fn", "is_leaf")
_OF_LOCAL = frozenset(getattr(Tensor, name).__get__ for name in _LOCAL_NAMES)
_HOOKS = frozenset({"register_hook", "retain_grad", "backward"})
_CASTS = frozenset({"float", "to", "double", "half", "bfloat16"})
_ROWWISE = _CASTS | {"contiguous", "clone", "view", "reshape", "flatten", "__getitem__"}


def _makes_float32(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call changes logits to float32, and does nothing else."""
    return not kwargs and ((name == "float" and not args) or (name == "to" and args == (torch.float32,)))


def _own_arguments(name: str, logits: VocabularyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments that do to the local columns what `args` do to all; None if the last dimension is not left alone."""
    if name in ("view", "reshape"):
        if kwargs or not args or isinstance(args[0], torch.dtype):
            return None
        shape = tuple(args[0]) if isinstance(args[0], (tuple, list, torch.Size)) else args
        rows = logits.numel() // logits.vocabulary
        last_whole = shape[-1] == logits.vocabulary or (shape[-1] == -1 and math.prod(shape[:-1]) == rows)
        return (*shape[:-1], logits.local.size(-1)) if last_whole else None
    if name == "flatten":
        end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
        return args if end % logits.dim() != logits.dim() - 1 else None
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if not all(isinstance(i, (slice, int)) or i is Ellipsis for i in index):
            return None
        if Ellipsis in index:
            return args if index[-1] is Ellipsis or index[-1] == slice(None) else None
        return args if len(index) < logits.dim() or index[-1] == slice(None) else None
    if name == "to":
        wanted = (*args, *kwargs.values())
        return args if all(isinstance(value, (torch.dtype, bool)) for value in wanted) else None
    return args


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As F.cross_entropy; None where only the gathered logits will do."""
    plain = isinstance(target, Tensor) and not isinstance(target, VocabularyLogits) and not target.is_floating_point()
    if not isinstance(input, VocabularyLogits) or not plain or input.dim() != 2 or target.dim() != 1:
        return None
    if weight is not None or size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    counted = target != ignore_index
    losses = _SplitCrossEntropy.apply(
        input.local, target.where(counted, 0), counted, input.peers, input.vocabulary, label_smoothing
    )
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """(N, V/R) logits, (N,) targets, (N,) whether each counts → (N,) losses, float32 (float64 of float64)."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, counted: Tensor, peers: Peers, vocabulary: int, smoothing: float
    ) -> Tensor:
        wide = torch.promote_types(local.dtype, torch.float32)
        start, end = peers.bounds(vocabulary)
        lowest = local.new_full((local.size(0),), -torch.inf)
        largest = peers.all_reduce((local.amax(1) if end > start else lowest).to(wide), "max")
        mine = (target >= start) & (target < end)
        column = (target - start).where(mine, 0).unsqueeze(1)
        sums = local.new_zeros((3, local.size(0)), dtype=wide)  # of exponentials, at the target, of logits; less m each
        for some in _chunks(local) if end > start else ():
            shifted = local[some] - largest[some, None]
            sums[1, some] = shifted.gather(1, column[some]).squeeze(1) * mine[some]
            if smoothing:
                sums[2, some] = shifted.sum(1)
            sums[0, some] = shifted.exp_().sum(1)
        sums = peers.all_reduce(sums)
        losses = sums[0].log() - (1 - smoothing) * sums[1] - smoothing * sums[2] / vocabulary
        ctx.save_for_backward(local, largest, sums[0], column, mine, counted)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses * counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        local, largest, exponentials, column, mine, counted = ctx.saved_tensors
        to_local = torch.empty_like(local)
        at_target = -(1 - ctx.smoothing) * mine.unsqueeze(1).to(largest.dtype)
        weight = (gradient * counted).unsqueeze(1)
        for some in _chunks(local) if local.size(1) else ():
            slope = (local[some] - largest[some, None]).exp_().div_(exponentials[some, None])
            if ctx.smoothing:
                slope -= ctx.smoothing / ctx.vocabulary
            to_local[some] = slope.scatter_add_(1, column[some], at_target[some]).mul_(weight[some])
        return to_local, None, None, None, None, None


def _chunks(local: Tensor) -> Iterator[slice]:
    """Rows whose logits are few enough to be float32 at once."""
    rows = max(1, CHUNK_NUMBERS // local.size(1))
    return (slice(start, start + rows) for start in range(0, local.size(0), rows))
