"""The collectives inside a layer that is split over workers, each with its conjugate for backward.

These are the operators of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, figure 3; along the
sequence: Korthikanti et al. 2022, arXiv 2205.05198, figure 5). Where forward copies, backward sums,
and the other way round:

    operator             forward                          backward
    enter       (f)      the input as it is               all-reduce
      from parts of the sequence:
                         all-gather along the sequence    reduce-scatter
    leave       (g)      all-reduce                       the gradient as it is
      to parts of the sequence:
                         reduce-scatter                   all-gather along the sequence
    gather_features      all-gather the last dimension    keep the worker's own part
    split_sequence       keep the worker's own part       all-gather along the sequence

Activations are (…, sequence, features). The parts of a dimension are those of torch.chunk: equal,
rounded up, and the last ones smaller.

Collectives join and cut tensors along their first dimension, and the sequence is another one if
there are several samples. Between the two orders of rows,

    stacked     (R · samples, sequence / R, features): the parts of the workers one after another
    in order    (samples, sequence, features)

is a copy, unless there is only one sample. A matrix product works on rows in any order. So a layer
whose output rows are shorter than its input rows reorders them after the product, and one whose
output rows are longer reorders them before it (layers.py).

A tensor of which workers have different parts is *marked* as split; one that is the same on all
workers is marked as replicated. randomness.py reads the marks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError
from strategies.torch_internals import all_gather_into, functional_collectives

_collectives = functional_collectives()

MARK = "is_split_over_peers"
"""The attribute that marks a tensor as split."""


def mark_split(x: Tensor) -> Tensor:
    """The tensor, marked as one of which workers have different parts."""
    if not torch.compiler.is_compiling():
        setattr(x, MARK, True)
    return x


def mark_replicated(x: Tensor) -> Tensor:
    """The tensor, marked as one that is the same on all workers."""
    if not torch.compiler.is_compiling():
        setattr(x, MARK, False)
    return x


# --- workers --------------------------------------------------------------------------------------


class Peers:
    """The workers that a layer is split over, and this worker's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size: int = group.size()
        self.rank: int = group.rank()

    def bounds(self, length: int) -> tuple[int, int]:
        """The first and one-past-last index of this worker's part of a dimension."""
        part = -(-length // self.size)
        return min(length, part * self.rank), min(length, part * (self.rank + 1))

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This worker's part of a tensor along `dim`, as a view."""
        start, end = self.bounds(x.size(dim))
        return x.narrow(dim, start, end - start)

    def require_divides(self, length: int) -> None:
        """Check that a sequence can be split into equal parts.

        Raises:
            LayoutError: It cannot.
        """
        if length % self.size:
            raise LayoutError(
                f"parallel.tp is {self.size}, which does not divide the sequence of {length}: "
                "choose a length it divides, or write parallel.sequence_parallel=false"
            )

    def own_choices(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """The choices of this worker's experts, if each worker has `experts` experts of its own.

        The host waits for the device, because the result's length is not known before.

        Args:
            chosen: (choices,) the expert that each choice is, of all workers' experts.
            experts: Number of experts on each worker.

        Returns:
            The positions of this worker's choices in `chosen`, and which of its experts each is.
        """
        local = chosen - self.rank * experts
        positions = ((local >= 0) & (local < experts)).nonzero().squeeze(1)
        return positions, local.index_select(0, positions)

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """The sum or the maximum ("max") over all workers."""
        return _collectives.all_reduce(x.contiguous(), operation, self.group)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        """The parts of all workers along `dim`, which is `length` long in all."""
        part = -(-length // self.size)
        if x.size(dim) < part:
            # The last parts are smaller, and the collective needs equal ones.
            padding = list(x.shape)
            padding[dim] = part - x.size(dim)
            x = torch.cat([x, x.new_zeros(padding)], dim)
        return self._joined(_collectives.all_gather(x.contiguous(), self.group), dim, length)

    def start_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Start `all_gather` of equal parts.

        Returns:
            A function that waits for it and returns the whole tensor.
        """
        x = x.contiguous()
        stacked = x.new_empty((self.size * x.size(0), *x.shape[1:]))
        work = all_gather_into(stacked, x, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return self._joined(stacked, dim, self.size * x.size(dim))

        return finish

    def _joined(self, stacked: Tensor, dim: int, length: int) -> Tensor:
        """Parts that were gathered along dimension 0, joined along `dim` without their padding."""
        if dim % stacked.dim() == 0 and stacked.size(0) == length:
            return stacked
        if stacked.dim() == 3 and stacked.size(0) == self.size and dim == -2:
            return stacked.view(1, -1, stacked.size(2))[:, :length]
        joined = torch.cat(stacked.chunk(self.size, 0), dim)
        if joined.size(dim) == length:
            return joined
        # A copy, because the model may write into it, which autograd refuses for a view.
        return joined.narrow(dim, 0, length).clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This worker's part along the first dimension of the sum over all workers."""
        self.require_divides(x.size(0))
        return _collectives.reduce_scatter(x.contiguous(), self.group)

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `all_reduce`; returns a function that waits for the sum."""
        return _collectives.start_all_reduce(x.contiguous(), self.group)

    def start_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `reduce_scatter`; returns a function that waits for this worker's part."""
        return _collectives.start_reduce_scatter(x.contiguous(), self.group)

    # --- the order of rows ------------------------------------------------------------------------

    def stack(self, x: Tensor) -> Tensor:
        """(samples, …, S, D) → (R · samples, …, S/R, D): the parts one after another."""
        if x.dim() < 3:
            return x
        self.require_divides(x.size(-2))
        parts = torch.unflatten(x, -2, (self.size, x.size(-2) // self.size))
        return parts.movedim(-3, 0).flatten(0, 1)

    def unstack(self, x: Tensor) -> Tensor:
        """The reverse of `stack`."""
        if x.dim() < 3:
            return x
        parts = torch.unflatten(x, 0, (self.size, x.size(0) // self.size))
        return parts.movedim(0, -3).flatten(-3, -2)


class ShapePeers(Peers):
    """Peers without processes, for models without storage.

    Every collective returns a tensor of the right shape, and counts what it would send.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self.current_part: Callable[[], str] = str
        """Names the part of the model that is at work."""
        self.sent_bytes: dict[str, float] = defaultdict(float)
        """Bytes that one worker sends by ring algorithms, by part of the model."""
        self.calls: dict[str, int] = defaultdict(int)
        """Number of collectives, by part of the model."""
        self.regathered_bytes: dict[str, float] = defaultdict(float)
        """Bytes that need not be kept because backward gathers again, by part of the model."""
        self.sent_beside_bytes: dict[str, float] = defaultdict(float)
        """Of `sent_bytes`, what backward sends while it multiplies for a weight's gradient."""
        self.rearranged_bytes: dict[str, float] = defaultdict(float)
        """Read and written to change the order of rows of several samples, by part of the model."""

    def _count(self, whole: Tensor, rounds: int) -> None:
        """Count a collective.

        Args:
            whole: The whole tensor, of which a ring sends (size - 1) / size in a round.
            rounds: 2 for an all-reduce, which is a reduce-scatter and an all-gather.
        """
        part = self.current_part()
        self.sent_bytes[part] += self._ring_bytes(whole, rounds)
        self.calls[part] += 1

    def _ring_bytes(self, whole: Tensor, rounds: int) -> float:
        return rounds * whole.numel() * whole.element_size() * (self.size - 1) / self.size

    def own_choices(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        # Each worker's experts are assumed to be chosen equally often.
        positions = torch.arange(-(-chosen.numel() // self.size), device=chosen.device)
        return positions, chosen.index_select(0, positions) % experts

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        self._count(x, rounds=2)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        whole = x.new_empty(shape)
        self._count(whole, rounds=1)
        return whole

    def start_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        whole = self.all_gather(x, dim, self.size * x.size(dim))
        self.regathered_bytes[self.current_part()] += whole.nbytes - x.nbytes
        return lambda: whole

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count(x, rounds=1)
        return x.new_empty((x.size(0) // self.size, *x.shape[1:]))

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        total = self.all_reduce(x)
        self.sent_beside_bytes[self.current_part()] += self._ring_bytes(x, rounds=2)
        return lambda: total

    def start_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        part = self.reduce_scatter(x)
        self.sent_beside_bytes[self.current_part()] += self._ring_bytes(x, rounds=1)
        return lambda: part

    def stack(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            return x
        self.require_divides(x.size(-2))
        shape = (self.size * x.size(0), *x.shape[1:-2], x.size(-2) // self.size, x.size(-1))
        return _Rearranged.apply(x, shape, self)

    def unstack(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            return x
        shape = (x.size(0) // self.size, *x.shape[1:-2], self.size * x.size(-2), x.size(-1))
        return _Rearranged.apply(x, shape, self)


class _Rearranged(torch.autograd.Function):
    """A tensor without storage of another shape; counts the copy, and that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], peers: ShapePeers) -> Tensor:
        ctx.shape = x.shape
        ctx.peers = peers
        peers.rearranged_bytes[peers.current_part()] += 2 * x.nbytes
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.peers.rearranged_bytes[ctx.peers.current_part()] += 2 * gradient.nbytes
        return gradient.new_empty(ctx.shape), None, None


# --- operators ------------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """The input of a split layer as it is; backward sums the gradients of all workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return mark_replicated(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_reduce(gradient), None


class Leave(torch.autograd.Function):
    """The sum over all workers; backward passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return mark_replicated(peers.all_reduce(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """All-gather; backward keeps this worker's part of the gradient.

    With `sums_gradients` the workers' gradients differ, and backward takes the part of their sum;
    along the first dimension only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers, dim: int, length: int, sums_gradients: bool
    ) -> Tensor:
        ctx.peers = peers
        ctx.dim = dim
        ctx.sums_gradients = sums_gradients
        return mark_replicated(peers.all_gather(x, dim, length))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.sums_gradients:
            part = ctx.peers.reduce_scatter(gradient)
        else:
            part = ctx.peers.part(gradient, ctx.dim).contiguous()
        return part, None, None, None, None


class Split(torch.autograd.Function):
    """This worker's part; backward gathers the gradient.

    With `sums` the workers' tensors differ, and forward takes the part of their sum; along the
    first dimension only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int, sums: bool) -> Tensor:
        ctx.peers = peers
        ctx.dim = dim
        ctx.length = x.size(dim)
        return peers.reduce_scatter(x) if sums else peers.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.all_gather(gradient, ctx.dim, ctx.length), None, None, None


def enter(x: Tensor, peers: Peers) -> Tensor:
    """A tensor that is the same on all workers, each of which computes a term of its gradient."""
    return Enter.apply(x, peers)


def leave(x: Tensor, peers: Peers) -> Tensor:
    """The sum over workers of a tensor of which each has computed a term."""
    return Leave.apply(x, peers)


def gather_sequence(x: Tensor, peers: Peers) -> Tensor:
    """This worker's part of the sequence → (…, sequence, features), for a split layer."""
    return mark_replicated(peers.unstack(gather_stacked(x, peers)))


def gather_stacked(x: Tensor, peers: Peers) -> Tensor:
    """As `gather_sequence`, but stacked."""
    return Gather.apply(x, peers, 0, x.size(0) * peers.size, True)


def scatter_sequence(x: Tensor, peers: Peers) -> Tensor:
    """(…, sequence, features), a term of each worker → this worker's part of the sum."""
    return scatter_stacked(peers.stack(x), peers)


def scatter_stacked(x: Tensor, peers: Peers) -> Tensor:
    """As `scatter_sequence`, of a stacked tensor."""
    return mark_split(Split.apply(x, peers, 0, True))


def gather_features(x: Tensor, peers: Peers, length: int) -> Tensor:
    """(…, features / R) of every worker → (…, features), which is `length`."""
    return Gather.apply(x, peers, -1, length, False)


def split_sequence(x: Tensor, peers: Peers) -> Tensor:
    """(…, sequence, features), the same on all workers → this worker's part of the sequence."""
    peers.require_divides(x.size(-2))
    return mark_split(Split.apply(x, peers, -2, False))


# --- gathering again ------------------------------------------------------------------------------

StartGather = Callable[[Tensor], Callable[[], Tensor]]
"""Starts gathering, from this worker's part; returns a function that waits for the whole tensor."""


class GatherSource(NamedTuple):
    """What a gathered tensor can be gathered from again.

    Args:
        own_part: This worker's part of it.
        start_gather: Starts gathering the parts of all.
    """

    own_part: Tensor
    start_gather: StartGather


def set_gather_source(x: Tensor, own_part: Tensor, start_gather: StartGather) -> None:
    """Note on a gathered tensor what it can be gathered from again."""
    x.gather_source = GatherSource(own_part, start_gather)  # type: ignore[attr-defined]


def gather_source(x: Tensor, weight: Tensor) -> GatherSource | None:
    """What the input of a layer can be gathered from again for the gradient of the layer's weight.

    Returns:
        None if the input was not gathered or is to be kept, or the weight needs no gradient.
    """
    needs_gradient = weight.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() or not needs_gradient:
        return None
    return getattr(x, "gather_source", None)


# --- parts of parameters --------------------------------------------------------------------------


def set_parameter(part: Tensor, parameter: Tensor | None) -> None:
    """Note on a worker's part of a parameter which parameter it is a part of.

    Backward in two halves (pipeline/weight_grad.py) adds the gradient to that parameter.
    """
    part.of_parameter = parameter  # type: ignore[attr-defined]


def parameter_of(part: Tensor) -> Tensor | None:
    """The parameter that a tensor is noted to be a part of."""
    return getattr(part, "of_parameter", None)
