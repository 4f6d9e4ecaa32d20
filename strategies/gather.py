"""Losses that couple the samples of a batch: the rows of the whole global batch, for every part of it.

Contrastive losses, triplets mined within a batch and the like are no sum over samples: with x₁ …
x_P what the P parts of a global batch (micro-batches of data-parallel workers) give to
`BatchGather`, and G = (x₁, …, x_P),

    J = Σₚ wₚ · Lₚ(θ; G)          Σₚ wₚ = 1

A task may compute the whole loss in every part (all Lₚ are equal) or the loss of a part's own
anchors against G: J is the loss of one device with the whole batch either way, and so is

    dJ/dθ = Σₚ [ wₚ · ∂Lₚ/∂θ  +  (∂J/∂xₚ)ᵀ · dxₚ/dθ ]          ∂J/∂xₚ = Σ_q w_q · ∂L_q/∂G, of which
    part p has its rows

**One micro-batch a worker**: rows travel in forward (an all-gather over the data-parallel workers),
their gradients in backward (a reduce-scatter, which sums over q). That is all it costs.

**Several**: ∂J/∂xₚ needs all parts' losses, and so all parts' rows, before the first backward. Each
micro-batch is computed three times, with the same random numbers and buffers each time, and only
the last time goes backward through the model, so that no more than one micro-batch's activations
exist at a time:

    1. without gradients: xₚ; then G is gathered                                           forward
    2. Lₚ(θ; G) with G as leaves: w_q · ∂L_q/∂G, added up, then reduce-scattered           forward,
       backward of the loss
    3. Lₚ(θ; G) with G constant, and a term that is 0 with the gradient ∂J/∂xₚ             forward,
       backward

Two forwards more than without, two thirds of a step's arithmetic. Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", https://arxiv.org/abs/2101.06983 (there
the loss is apart from the model, so that the second forward is not needed; here it is any function
of a model and a batch).

Workers that share samples (tensor parallelism) each gather over their own data-parallel group and
get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.collectives import reduce_scatter
from strategies.dims import LayoutError
from strategies.parallel import Loss, Parallel, require_loss
from strategies.tensor.loss import VocabularyLogits
from strategies.torch_internals import all_gather_into
from strategies.tree import clone_tensors

LIKE = 1e-2
"""How far apart, relative to their norm, the rows of two forwards of one micro-batch may be: rounding, in 16 bits."""


class Randomness(Protocol):
    """The random generators that a loss may draw from."""

    def state(self) -> Any:
        """What brings them back to where they are."""

    def restore(self, state: Any) -> None:
        """Brings them back."""


# --- over data-parallel workers -------------------------------------------------------------------


class _AllGather(torch.autograd.Function):
    """(n, …) of every worker → (workers · n, …), in the workers' order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """(workers · n, …) → the worker's (n, …) of the sum over workers."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(gradient, ctx.group), None


def _gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return own
    if own.is_complex():
        return torch.view_as_complex(_gathered(torch.view_as_real(own), group))
    sent = own.contiguous()
    if own.dtype == torch.bool:
        sent = sent.to(torch.uint8)
    whole = sent.new_empty((group.size() * sent.size(0), *sent.shape[1:]))
    all_gather_into(whole, sent, group=group)
    return whole.to(own.dtype)


def _own_sum(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return whole
    if whole.is_complex():
        return torch.view_as_complex(_own_sum(torch.view_as_real(whole), group))
    is_narrow = whole.dtype in (torch.float16, torch.bfloat16)
    sent = (
        whole.float() if is_narrow else whole
    ).contiguous()  # sums of many workers' are rounded once
    own = sent.new_empty((sent.size(0) // group.size(), *sent.shape[1:]))
    if (work := reduce_scatter(own.view(-1), sent.view(-1), group)) is not None:
        work.wait()
    return own.to(whole.dtype)


class _StaysInGraph(torch.autograd.Function):
    """0 of x, so that backward reaches x on this worker as on the others, whatever its loss depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.zeros((), dtype=x.real.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x)


class _HasGradient(torch.autograd.Function):
    """0 of x, of which backward says that x has this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=x.real.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


# --- what a call of gather does, pass by pass -----------------------------------------------------


def _as_plain(x: Any) -> Tensor:
    """What a model under a layout gives, whole and of torch's own class."""
    if isinstance(x, VocabularyLogits):
        return x.gathered()
    return x.full_tensor() if isinstance(x, DTensor) else x


@dataclass
class _Pass:
    """One forward of a micro-batch of `samples` samples, of `total` in the global batch."""

    samples: int
    total: int

    def __post_init__(self) -> None:
        self.calls = 0
        self.zeros: list[Tensor] = []
        """To be added to the loss."""

    def __call__(self, x: Any) -> Tensor:
        x = _as_plain(x)
        if not isinstance(x, Tensor) or x.dim() == 0 or x.size(0) != self.samples:
            given = (
                f"a tensor of shape {tuple(x.shape)}"
                if isinstance(x, Tensor)
                else f"a {type(x).__name__}"
            )
            raise LayoutError(
                f"self.gather got {given} from a batch of {self.samples} samples: give it a tensor "
                "with one row a sample, (samples, …), and several views of the samples one by one"
            )
        whole = self.gather(x)
        self.calls += 1
        return whole

    def gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass
class _AtOnce(_Pass):
    """The worker's only micro-batch: rows travel in forward, gradients in backward."""

    group: dist.ProcessGroup | None
    agree: Callable[[int, Tensor], None]

    def gather(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        self.agree(self.calls, x)
        whole = _AllGather.apply(x, self.group)
        if whole.requires_grad:
            self.zeros.append(_StaysInGraph.apply(whole))
        return whole


@dataclass
class _Collecting(_Pass):
    """Keeps rows. What is answered stands for the whole batch: this part's own samples, again and again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[Tensor] = []

    def gather(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach())
        return x.detach()[torch.arange(self.total, device=x.device) % self.samples]


@dataclass
class _WithLeaves(_Pass):
    """Answers with the whole batch, whose gradient is asked for where that of the rows would be."""

    wholes: list[Tensor]
    expected: list[Tensor]
    """The rows that this micro-batch gave before; empty: not compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.leaves: list[Tensor | None] = []

    def gather(self, x: Tensor) -> Tensor:
        _require_call(self.calls, self.wholes)
        if self.expected:
            self._require_same(x.detach(), self.expected[self.calls])
        whole = self.wholes[self.calls].detach()
        if not x.requires_grad:
            self.leaves.append(None)
            return whole.clone()
        self.leaves.append(whole.requires_grad_())
        self.zeros.append(_StaysInGraph.apply(whole))
        return whole.clone()  # which a loss may change in place

    def _require_same(self, x: Tensor, before: Tensor) -> None:
        is_same = torch.equal(x, before)
        if not is_same and (x.is_floating_point() or x.is_complex()) and x.shape == before.shape:
            is_same = bool((x - before).norm() <= LIKE * before.norm())
        if not is_same:
            raise LayoutError(
                "self.gather got other rows from a second forward of the same micro-batch (its "
                f"call {self.calls + 1}): with several micro-batches it is for what depends on the "
                "model and the batch alone, not on what was gathered before, nor on a random "
                "generator of the task's own; gather only such rows, or leave "
                "train.micro_batch_size out"
            )


@dataclass
class _WithGradients(_Pass):
    """Answers with the whole batch, a constant; the rows' gradients are known."""

    wholes: list[Tensor]
    gradients: list[Tensor | None]

    def gather(self, x: Tensor) -> Tensor:
        _require_call(self.calls, self.wholes)
        gradient = self.gradients[self.calls]
        if gradient is not None and x.requires_grad:
            self.zeros.append(_HasGradient.apply(x, gradient))
        return self.wholes[self.calls].clone()


def _require_call(number: int, wholes: list[Tensor]) -> None:
    if number >= len(wholes):
        raise LayoutError(
            f"the loss calls self.gather {len(wholes)} times in one forward of a micro-batch and "
            "more often in another: call it equally often in each"
        )


# --- a step ---------------------------------------------------------------------------------------


class BatchGather:
    """What gathers for the loss of one worker, and computes its steps.

    Args:
        parallel: the model under its layout; not a pipeline's, nor one whose sequences are split.
        samples: a micro-batch → how many samples it has.
        randomness: what the loss may draw from.
        collecting: put around forwards that are not the one that counts, in which nothing is to be
            logged.
    """

    def __init__(
        self,
        parallel: Parallel,
        samples: Callable[[Any], int],
        randomness: Randomness,
        collecting: Callable[[], Any],
    ) -> None:
        self.parallel, self.samples, self.randomness = parallel, samples, randomness
        self.collecting = collecting
        self.group = parallel.group if parallel.layout.dims.dp > 1 else None
        self.current: _Pass | None = None
        self._agreed: dict[tuple[int, int], tuple[Any, ...]] = {}
        """By loss and call: shape and type of a row."""
        self._compared: set[int] = set()
        """Losses of which two forwards have been compared."""
        self._number = 0

    @property
    def is_active(self) -> bool:
        """Whether a loss is being computed that may call it."""
        return self.current is not None

    def __call__(self, x: Tensor) -> Tensor:
        """(n, …), one row for each sample of the micro-batch → the rows of the whole global batch."""
        assert self.current is not None, "gathers within its own steps only"
        return self.current(x)

    def calls(self, batch: Any, loss: Loss) -> int:
        """How often the loss gathers: computed without gradients, and nothing remembers it."""
        state, buffers = self.randomness.state(), self._buffers()
        collected = self._collect(batch, loss, self.samples(batch))
        self.randomness.restore(state)
        self._restore(buffers)
        return collected.calls

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
        *,
        number: int = 0,
    ) -> Tensor:
        """As Parallel.forward_backward, for a loss that gathers. number: which loss it is, of a step's several.

        Raises:
            LayoutError: rows that cannot be gathered.
        """
        self._number = number
        total = sum(self.samples(batch) for batch in batches) * self.parallel.layout.dims.dp
        factors = [weight * self.parallel.layout.dims.dp * scale for weight in weights]
        if len(batches) == 1:
            only = _AtOnce(self.samples(batches[0]), total, self.group, self._agree)
            return self._backward(batches[0], loss, only, weights[0], factors[0], last=True)
        states, collected, buffers = [], [], self._buffers()
        for batch in batches:
            states.append(self.randomness.state())
            collected.append(self._collect(batch, loss, total))
        wholes = self._wholes(collected)
        self._restore(buffers)
        gradients = self._gradients(
            batches, weights, factors, loss, total, states, collected, wholes
        )
        self._restore(buffers)
        found: Tensor | None = None
        for i, batch in enumerate(batches):
            self.randomness.restore(states[i])
            part = _WithGradients(self.samples(batch), total, wholes, gradients[i])
            value = self._backward(
                batch, loss, part, weights[i], factors[i], last=i == len(batches) - 1
            )
            found = value if found is None else found + value
        assert found is not None
        return found

    # --- 1: rows ----------------------------------------------------------------------------------

    def _collect(self, batch: Any, loss: Loss, total: int) -> _Collecting:
        collecting = _Collecting(self.samples(batch), total)
        with self.collecting(), torch.no_grad():
            self._computed(batch, loss, collecting, last=False)
        return collecting

    def _wholes(self, collected: list[_Collecting]) -> list[Tensor]:
        """By call the rows of the global batch."""
        calls = [len(each.kept) for each in collected]
        if len(set(calls)) > 1:
            raise LayoutError(
                f"the loss calls self.gather {min(calls)} times for one micro-batch and "
                f"{max(calls)} times for another: call it equally often for each"
            )
        wholes = []
        for call in range(calls[0]):
            rows = [each.kept[call] for each in collected]
            odd = next(
                (r for r in rows if r.shape[1:] != rows[0].shape[1:] or r.dtype != rows[0].dtype),
                None,
            )
            if odd is not None:
                raise _differ(rows[0], _row(odd))
            self._agree(call, rows[0])
            wholes.append(_gathered(torch.cat(rows), self.group))
        return wholes

    def _agree(self, call: int, x: Tensor) -> None:
        """Whether all workers give rows of one shape: asked once, and from then on it stays that one."""
        key = (self._number, call)
        if key not in self._agreed:
            every: list[Any] = [_row(x)]
            if self.group is not None:
                every = [None] * self.group.size()
                dist.all_gather_object(every, _row(x), group=self.group)
            self._agreed[key] = every[0]
            other = next((row for row in every if row != every[0]), None)
            if other is not None:
                raise _differ(x, other if other != _row(x) else every[0])
        if self._agreed[key] != _row(x):
            raise _differ(x, self._agreed[key])

    # --- 2: the gradients of the loss of what was gathered ----------------------------------------

    def _gradients(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | Tensor],
        factors: Sequence[float | Tensor],
        loss: Loss,
        total: int,
        states: list[Any],
        collected: list[_Collecting],
        wholes: list[Tensor],
    ) -> list[list[Tensor | None]]:
        """By micro-batch and call."""
        sums: list[Tensor | None] = [None] * len(wholes)
        is_first = self._number not in self._compared
        self._compared.add(self._number)
        for i, batch in enumerate(batches):
            self.randomness.restore(states[i])
            expected = collected[i].kept if is_first else []
            part = _WithLeaves(self.samples(batch), total, wholes, expected)
            with self.collecting():
                value = self._computed(batch, _connected(loss, part, weights[i]), part, last=False)
            differentiable = [call for call, leaf in enumerate(part.leaves) if leaf is not None]
            for call in differentiable:
                if sums[call] is None:
                    sums[call] = torch.zeros_like(wholes[call], dtype=_wide(wholes[call].dtype))
            if not differentiable:
                continue
            leaves = [part.leaves[call] for call in differentiable]
            for call, gradient in zip(
                differentiable,
                torch.autograd.grad(value * factors[i], leaves, allow_unused=True),  # type: ignore[arg-type]
            ):
                total_gradient = sums[call]
                if gradient is not None and total_gradient is not None:
                    total_gradient.add_(gradient)
        sizes = [self.samples(batch) for batch in batches]
        own: list[Sequence[Tensor | None]] = [
            [None] * len(batches)
            if gradient is None
            else _own_sum(gradient, self.group).to(whole.dtype).split(sizes)
            for gradient, whole in zip(sums, wholes)
        ]
        return [[parts[i] for parts in own] for i in range(len(batches))]

    # --- 3, and the only forward ------------------------------------------------------------------

    def _backward(
        self,
        batch: Any,
        loss: Loss,
        part: _Pass,
        weight: float | Tensor,
        factor: float | Tensor,
        *,
        last: bool,
    ) -> Tensor:
        """Forward and backward; weight · loss, detached."""
        with self.parallel.micro_step(last=last):
            value = self._called(batch, _connected(loss, part, weight), part)
            require_loss(value)
            (value * factor).backward()
        return value.detach() * weight

    def _computed(self, batch: Any, loss: Loss, part: _Pass, *, last: bool) -> Tensor:
        """A forward before the one that counts, so on a copy of the batch, which the model may change in place."""
        batch = clone_tensors(batch)
        with self.parallel.micro_step(last=last):
            return self._called(batch, loss, part)

    def _called(self, batch: Any, loss: Loss, part: _Pass) -> Tensor:
        with self._gathering(part), self.parallel.autocast():
            return _as_plain(self.parallel.call(loss, batch))

    @contextmanager
    def _gathering(self, part: _Pass) -> Iterator[None]:
        self.current = part
        try:
            yield
        finally:
            self.current = None

    # --- what forwards change ---------------------------------------------------------------------

    def _buffers(self) -> dict[str, Tensor]:
        """Copies: running statistics, say, of which every forward must find the same."""
        return {
            name: buffer.detach().clone() for name, buffer in self.parallel.inner.named_buffers()
        }

    @torch.no_grad()
    def _restore(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in self.parallel.inner.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def _connected(loss: Loss, part: _Pass, weight: float | Tensor) -> Loss:
    """The loss, whose backward reaches what was gathered on every worker alike: sharded parameters are gathered and
    freed around it, and rows travel. One of no items, whose mean may be nan, is 0."""

    def connected(module: nn.Module, batch: Any) -> Tensor:
        value = loss(module, batch)
        if _is_nothing(weight):
            value = torch.zeros_like(value) if part.zeros else torch.nan_to_num(value) * 0.0
        for zero in part.zeros:
            value = value + zero.to(value)
        return value

    return connected


def _row(x: Tensor) -> tuple[Any, ...]:
    return (*x.shape[1:], str(x.dtype))


def _differ(x: Tensor, other: tuple[Any, ...]) -> LayoutError:
    *sizes, dtype = other
    return LayoutError(
        f"self.gather got rows of shape {tuple(x.shape[1:])}, {x.dtype}, where another part of the "
        f"batch gave {tuple(sizes)}, {dtype}: pool or pad them to one shape before they are "
        "gathered"
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _is_nothing(weight: float | Tensor) -> bool:
    """Whether a part has no items. (The host waits where that is known to the device only.)"""
    return not bool(weight)
