"""Cross-entropy over a vocabulary that is split over workers, without gathering the logits.

With N tokens and V words over R workers, each worker holds (N, V/R) logits. Let m be the largest
logit of a token over all workers. Then

    s = Σᵣ Σ_{j of r} exp(lⱼ - m)       t = l_target - m, which one worker knows
    loss = log s - t                    ∂loss/∂lⱼ = exp(lⱼ - m)/s - [j = target]

Each worker computes the gradients of its own logits. So 4·N numbers are all-reduced (m, s, t and,
for label smoothing, the sum of the logits) instead of N·V gathered: with V = 128,000, that is the
difference between kilobytes and gigabytes. Shoeybi et al. 2019, arXiv 1909.08053, §3.

Logits may have 16 bits, and the loss is computed in float32, some rows at a time. Backward computes
it again from the logits and each token's m and s. So only the logits are kept, and never four
float32 numbers for each of them at once.

The head returns `VocabularyLogits`, a tensor that knows that it is split. `F.cross_entropy` of it
is the above. Views, casts and slices of rows leave it split. Anything else gathers it first, which
is right too, at a higher cost. So a task's loss is plain PyTorch and returns a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.row_chunks import row_chunks
from strategies.tensor.ops import Peers, gather_features
from strategies.tree import tree_map

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_EMPTY = torch.empty(0, device="meta")
"""What instances are made from. It exists before any fake mode, under which it would be a fake
tensor, which cannot become one of another class."""


class VocabularyLogits(Tensor):
    """Logits (…, V) that are split over workers along the vocabulary.

    The tensor itself has no storage. The dtype that it claims may be float32 while `local` still
    has 16 bits: losses cast logits to float32, and here nothing needs that.
    """

    local: Tensor
    """This worker's columns, those in `peers.bounds(vocabulary)`."""
    peers: Peers
    """The workers."""
    vocabulary: int
    """V."""
    meta: Tensor
    """The whole logits on the meta device, with the shape and dtype that are claimed."""

    @staticmethod
    def __new__(
        cls, local: Tensor, peers: Peers, vocabulary: int, dtype: torch.dtype | None = None
    ) -> VocabularyLogits:
        """Make logits from a worker's columns; `dtype` is the one to claim, by default theirs."""
        shape = (*local.shape[:-1], vocabulary)
        self = _EMPTY.as_subclass(cls)
        self.local = local
        self.peers = peers
        self.vocabulary = vocabulary
        self.meta = torch.empty(shape, dtype=dtype or local.dtype, device="meta")
        return self

    def gathered(self) -> Tensor:
        """The whole logits as a plain tensor."""
        whole = gather_features(self.local, self.peers, self.vocabulary)
        return whole.to(self.meta.dtype)

    def with_local(self, local: Tensor) -> VocabularyLogits:
        """The same logits with other columns of this worker."""
        return VocabularyLogits(local, self.peers, self.vocabulary, dtype=self.meta.dtype)

    def cast_local(self) -> Tensor:
        """This worker's columns, which have the claimed dtype from now on."""
        self.local = self.local.to(self.meta.dtype)
        return self.local

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__repr__":
            # One rank alone may print it, so nothing is gathered.
            return f"VocabularyLogits(…, {args[0].vocabulary})"
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        if args and isinstance(args[0], VocabularyLogits):
            result = _without_gathering(func, name, args[0], args=args[1:], kwargs=kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(_gathered, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _gathered(value: object) -> object:
    return value.gathered() if isinstance(value, VocabularyLogits) else value


# --- functions that need not gather ---------------------------------------------------------------


def _getters(*names: str) -> frozenset[object]:
    """The functions that `__torch_function__` gets for attributes of a tensor."""
    return frozenset(getattr(Tensor, name).__get__ for name in names)


_ASK_SHAPE = frozenset(
    {
        "size",
        "dim",
        "numel",
        "is_floating_point",
        "is_complex",
        "__len__",
        "ndimension",
        "nelement",
    }
)
"""Methods that ask for the shape or type of the whole logits."""
_SHAPE_GETTERS = _getters("shape", "dtype", "ndim", "layout", "is_sparse")
"""Attributes that do."""
_LOCAL_GETTERS = _getters(
    "device", "is_cuda", "is_cpu", "is_mps", "is_meta", "requires_grad", "grad_fn", "is_leaf"
)
"""Attributes that the columns of this worker have."""
_GRADIENT_METHODS = frozenset({"register_hook", "retain_grad", "backward"})
_CASTS = frozenset({"float", "to", "double", "half", "bfloat16"})
_ROWWISE = _CASTS | {"contiguous", "clone", "view", "reshape", "flatten", "__getitem__"}
"""Methods that leave logits split, if their arguments leave the last dimension alone."""


def _without_gathering(
    func: Callable[..., Any],
    name: str,
    logits: VocabularyLogits,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of a function of split logits; NotImplemented if they have to be gathered.

    Args:
        func: The function.
        name: Its name.
        logits: Its first argument.
        args: Its other arguments.
        kwargs: Its keyword arguments.
    """
    if name in _ASK_SHAPE or func in _SHAPE_GETTERS:
        return func(logits.meta, *args, **kwargs)
    if func in _LOCAL_GETTERS:
        return func(logits.local, *args, **kwargs)
    if name in _GRADIENT_METHODS:
        return func(logits.cast_local(), *args, **kwargs)
    if logits.local.dtype in _SIXTEEN_BITS and _casts_to_float32(name, args, kwargs):
        dtype = torch.float32
        return VocabularyLogits(logits.local, logits.peers, logits.vocabulary, dtype=dtype)
    if name in _ROWWISE:
        local_args = _arguments_for_columns(name, logits, args=args, kwargs=kwargs)
        if local_args is not None:
            local = func(logits.local, *local_args, **kwargs)
            dtype = local.dtype if name in _CASTS else logits.meta.dtype
            return VocabularyLogits(local, logits.peers, logits.vocabulary, dtype=dtype)
    return NotImplemented


def _casts_to_float32(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call casts logits to float32 and does nothing else."""
    if kwargs:
        return False
    return (name == "float" and not args) or (name == "to" and args == (torch.float32,))


def _arguments_for_columns(
    name: str, logits: VocabularyLogits, *, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Arguments with which a method does to the columns what `args` do to the whole logits.

    Returns:
        None if they do not leave the last dimension alone.
    """
    if name in ("view", "reshape"):
        return _shape_for_columns(logits, args, kwargs)
    if name == "flatten":
        end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
        keeps_last = end % logits.dim() != logits.dim() - 1
        return args if keeps_last else None
    if name == "__getitem__":
        return args if _leaves_vocabulary(args[0], logits.dim()) else None
    if name == "to":
        values = (*args, *kwargs.values())
        is_cast = all(isinstance(value, (torch.dtype, bool)) for value in values)
        return args if is_cast else None
    return args


def _shape_for_columns(
    logits: VocabularyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """The shape that `view` and `reshape` give to the columns; None if they change the last dim."""
    if kwargs or not args or isinstance(args[0], torch.dtype):
        return None
    shape = tuple(args[0]) if isinstance(args[0], (tuple, list, torch.Size)) else args
    *row_shape, width = shape
    rows = logits.numel() // logits.vocabulary
    keeps_last = width == logits.vocabulary or (width == -1 and math.prod(row_shape) == rows)
    return (*row_shape, logits.local.size(-1)) if keeps_last else None


def _leaves_vocabulary(index: Any, dims: int) -> bool:
    """Whether an index selects rows only."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (slice, int)) or part is Ellipsis for part in parts):
        return False
    takes_all_words = parts[-1] == slice(None)
    if Ellipsis in parts:
        return takes_all_words or parts[-1] is Ellipsis
    return takes_all_words or len(parts) < dims


# --- the loss -------------------------------------------------------------------------------------


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
    """As F.cross_entropy, whose arguments these are; None if only gathered logits will do."""
    if not isinstance(input, VocabularyLogits) or isinstance(target, VocabularyLogits):
        return None
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    if input.dim() != 2 or target.dim() != 1:
        return None
    if weight is not None or size_average is not None or reduce is not None:
        return None
    if reduction not in ("mean", "sum", "none"):
        return None
    counted = target != ignore_index
    losses = _SplitCrossEntropy.apply(
        input.local,
        target.where(counted, 0),
        counted,
        input.peers,
        input.vocabulary,
        label_smoothing,
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / counted.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """(N, V/R) logits, (N,) targets, (N,) whether each counts → (N,) losses.

    The losses are float32, or float64 for float64 logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        counted: Tensor,
        peers: Peers,
        vocabulary: int,
        smoothing: float,
    ) -> Tensor:
        tokens = local.size(0)
        wide = torch.promote_types(local.dtype, torch.float32)
        start, end = peers.bounds(vocabulary)
        # With few words, the last workers have none.
        has_words = end > start
        own_largest = local.amax(1) if has_words else local.new_full((tokens,), -torch.inf)
        largest = peers.all_reduce(own_largest.to(wide), "max")
        is_own = (target >= start) & (target < end)
        column = (target - start).where(is_own, 0).unsqueeze(1)
        # For each token, of its logits less m: the sum of exponentials, the one at the target, the
        # sum. One tensor, for one all-reduce.
        sums = local.new_zeros((3, tokens), dtype=wide)
        exponentials, at_target, of_logits = sums
        for rows in row_chunks(*local.shape) if has_words else ():
            shifted = local[rows] - largest[rows, None]
            at_target[rows] = shifted.gather(1, column[rows]).squeeze(1) * is_own[rows]
            if smoothing:
                of_logits[rows] = shifted.sum(1)
            exponentials[rows] = shifted.exp_().sum(1)
            del shifted  # before that of the next chunk is made
        exponentials, at_target, of_logits = peers.all_reduce(sums)
        losses = (
            exponentials.log() - (1 - smoothing) * at_target - smoothing * of_logits / vocabulary
        )
        ctx.save_for_backward(local, largest, exponentials, column, is_own, counted)
        ctx.smoothing = smoothing
        ctx.vocabulary = vocabulary
        return losses * counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        local, largest, exponentials, column, is_own, counted = ctx.saved_tensors
        of_local = torch.empty_like(local)
        at_target = -(1 - ctx.smoothing) * is_own.unsqueeze(1).to(largest.dtype)
        factor = (gradient * counted).unsqueeze(1)
        for rows in row_chunks(*local.shape) if local.size(1) else ():
            slope = (local[rows] - largest[rows, None]).exp_().div_(exponentials[rows, None])
            if ctx.smoothing:
                slope -= ctx.smoothing / ctx.vocabulary
            slope.scatter_add_(1, column[rows], at_target[rows])
            of_local[rows] = slope.mul_(factor[rows])
            del slope
        return of_local, None, None, None, None, None
