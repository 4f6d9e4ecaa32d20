"""Losses that couple the samples of a batch: every part of it sees the rows of the global batch.

Contrastive losses, triplets mined within a batch and the like are not sums over samples. The global
batch has P parts: the micro-batches of all data-parallel workers. Let x₁ … x_P be the rows that the
parts give to `BatchGather`, and G = (x₁, …, x_P) the gathered rows. A step minimises

    J = Σₚ wₚ · Lₚ(θ; G)          Σₚ wₚ = 1

A task may compute the whole loss in every part (all Lₚ are equal), or the loss of a part's own
anchors against G. Either way J is the loss of one device with the whole batch, and so is its
gradient:

    dJ/dθ = Σₚ [ wₚ · ∂Lₚ/∂θ  +  (∂J/∂xₚ)ᵀ · dxₚ/dθ ]

    ∂J/∂G = Σ_q w_q · ∂L_q/∂G, of which ∂J/∂xₚ are the rows of part p

**One micro-batch per worker**: rows travel in forward (an all-gather over the data-parallel
workers) and their gradients in backward (a reduce-scatter, which sums over q). There is no other
cost.

**Several micro-batches per worker**: ∂J/∂xₚ needs the losses of all parts, and so the rows of all
parts, before the first backward. Each micro-batch is computed three times, with the same random
numbers and buffers each time. Only the last pass goes backward through the model, so that only one
micro-batch's activations exist at a time:

    pass  computes                                                      with
    1     xₚ without gradients; then G is gathered                      a forward
    2     Lₚ(θ; G) with G as leaves: w_q · ∂L_q/∂G, added up and then   a forward, and the loss's
          reduce-scattered                                              backward
    3     Lₚ(θ; G) with a constant G, plus a term that is 0 and whose   a forward and a backward
          gradient for xₚ is ∂J/∂xₚ

That is two forwards more, two thirds of a step's arithmetic. Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", https://arxiv.org/abs/2101.06983.
(Their loss is separate from the model, so that they do not need the second forward. Here the loss
is any function of a model and a batch.)

Workers that share samples (tensor parallelism) each gather over their own data-parallel group, and
all get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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

ROW_TOLERANCE = 1e-2
"""How much the rows of two forwards of one micro-batch may differ, relative to their norm.

The difference is rounding, in 16 bits.
"""


class Randomness(Protocol):
    """The random generators that a loss may draw from."""

    def state(self) -> Any:
        """The state of all generators."""

    def restore(self, state: Any) -> None:
        """Set all generators to an earlier state."""


# --- over data-parallel workers -------------------------------------------------------------------


class _AllGather(torch.autograd.Function):
    """(n, …) of every worker → (workers · n, …), in the workers' order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """(workers · n, …) → this worker's (n, …) of the sum over workers."""

    @staticmethod
    def forward(ctx: Any, gathered: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scattered(gathered, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(gradient, ctx.group), None


def _all_gathered(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all workers of a group; without a group, this worker's."""
    if group is None:
        return rows
    if rows.is_complex():
        return torch.view_as_complex(_all_gathered(torch.view_as_real(rows), group))
    sent = rows.contiguous()
    if rows.dtype == torch.bool:
        sent = sent.to(torch.uint8)
    gathered = sent.new_empty((group.size() * sent.size(0), *sent.shape[1:]))
    all_gather_into(gathered, sent, group=group)
    return gathered.to(rows.dtype)


def _reduce_scattered(gathered: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This worker's rows of the sum over a group; without a group, all rows."""
    if group is None:
        return gathered
    if gathered.is_complex():
        return torch.view_as_complex(_reduce_scattered(torch.view_as_real(gathered), group))
    # In float32 a sum over many workers is rounded to 16 bits only once.
    sent = gathered.to(_sum_dtype(gathered.dtype)).contiguous()
    shard = sent.new_empty((sent.size(0) // group.size(), *sent.shape[1:]))
    work = reduce_scatter(shard.view(-1), sent.view(-1), group)
    if work is not None:
        work.wait()
    return shard.to(gathered.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _ZeroOf(torch.autograd.Function):
    """0, as a function of x.

    It makes backward reach x on every worker, whether or not the worker's loss depends on x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.zeros((), dtype=x.real.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x)


class _ZeroWithGradient(torch.autograd.Function):
    """0, as a function of x whose gradient is the one that it is called with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=x.real.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


# --- what a call of gather does in each pass ------------------------------------------------------


@dataclass(kw_only=True)
class _Pass:
    """One forward of a micro-batch, and what the loss's calls of gather do meanwhile.

    Attributes:
        samples: Number of samples in the micro-batch.
        total: Number of samples in the global batch.
        calls: How often gather has been called.
        zeros: Terms to add to the loss.
    """

    samples: int
    total: int
    calls: int = field(default=0, init=False)
    zeros: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, x: object) -> Tensor:
        rows = _as_plain(x)
        if not isinstance(rows, Tensor) or rows.dim() == 0 or rows.size(0) != self.samples:
            if isinstance(rows, Tensor):
                description = f"a tensor of shape {tuple(rows.shape)}"
            else:
                description = f"a {type(rows).__name__}"
            raise LayoutError(
                f"self.gather got {description} from a batch of {self.samples} samples: give it a "
                "tensor with one row a sample, (samples, …), and several views of the samples one "
                "by one"
            )
        gathered = self.gather(rows)
        self.calls += 1
        return gathered

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of the global batch, in this call's place."""
        raise NotImplementedError

    def _rows_of_call(self, gathered: list[Tensor]) -> Tensor:
        """The gathered rows of this call.

        Raises:
            LayoutError: The loss has called gather less often in the first pass.
        """
        if self.calls >= len(gathered):
            raise LayoutError(
                f"the loss calls self.gather {len(gathered)} times in one forward of a micro-batch "
                "and more often in another: call it equally often in each"
            )
        return gathered[self.calls]


def _as_plain(x: Any) -> Any:
    """A tensor that a layout has split, whole and of torch's own class."""
    if isinstance(x, VocabularyLogits):
        return x.gathered()
    return x.full_tensor() if isinstance(x, DTensor) else x


@dataclass(kw_only=True)
class _OnlyPass(_Pass):
    """The forward of a worker's only micro-batch: backward goes through the gathering.

    Attributes:
        group: The data-parallel workers; None for one worker.
        require_same_rows: Checks that all workers gather rows of one shape in a call.
    """

    group: dist.ProcessGroup | None
    require_same_rows: Callable[[int, Tensor], None]

    def gather(self, rows: Tensor) -> Tensor:
        if self.group is None:
            return rows
        self.require_same_rows(self.calls, rows)
        gathered = _AllGather.apply(rows, self.group)
        if gathered.requires_grad:
            self.zeros.append(_ZeroOf.apply(gathered))
        return gathered


@dataclass(kw_only=True)
class _RowsPass(_Pass):
    """Pass 1: keeps the rows.

    The loss gets the micro-batch's own rows, repeated to the size of the global batch.

    Attributes:
        rows: The rows of each call.
    """

    rows: list[Tensor] = field(default_factory=list, init=False)

    def gather(self, rows: Tensor) -> Tensor:
        self.rows.append(rows.detach())
        return rows.detach()[torch.arange(self.total, device=rows.device) % self.samples]


@dataclass(kw_only=True)
class _LossGradientPass(_Pass):
    """Pass 2: the gathered rows are leaves, so that the loss has a gradient for them.

    Attributes:
        gathered: The gathered rows of each call.
        expected_rows: The micro-batch's rows of pass 1; empty if they need not be compared.
        leaves: The leaf of each call; None if its rows need no gradient.
    """

    gathered: list[Tensor]
    expected_rows: list[Tensor]
    leaves: list[Tensor | None] = field(default_factory=list, init=False)

    def gather(self, rows: Tensor) -> Tensor:
        gathered = self._rows_of_call(self.gathered).detach()
        if self.expected_rows:
            self._require_equal(rows.detach(), self.expected_rows[self.calls])
        if rows.requires_grad:
            gathered.requires_grad_()
            self.leaves.append(gathered)
            self.zeros.append(_ZeroOf.apply(gathered))
        else:
            self.leaves.append(None)
        return gathered.clone()  # the loss may change it in place

    def _require_equal(self, rows: Tensor, expected: Tensor) -> None:
        """Check that this forward has computed the rows of pass 1."""
        is_equal = torch.equal(rows, expected)
        is_rounded = rows.is_floating_point() or rows.is_complex()
        if not is_equal and is_rounded and rows.shape == expected.shape:
            is_equal = bool((rows - expected).norm() <= ROW_TOLERANCE * expected.norm())
        if not is_equal:
            raise LayoutError(
                "self.gather got other rows from a second forward of the same micro-batch (its "
                f"call {self.calls + 1}): with several micro-batches, the rows must depend on the "
                "model and the batch alone, not on rows that were gathered before, nor on a random "
                "generator of the task's own; gather only such rows, or leave "
                "train.micro_batch_size out"
            )


@dataclass(kw_only=True)
class _ModelGradientPass(_Pass):
    """Pass 3: the gathered rows are constant, and the gradients of the rows are known.

    Attributes:
        gathered: The gathered rows of each call.
        row_gradients: The gradient of this micro-batch's rows in each call; None if they need none.
    """

    gathered: list[Tensor]
    row_gradients: list[Tensor | None]

    def gather(self, rows: Tensor) -> Tensor:
        gathered = self._rows_of_call(self.gathered)
        gradient = self.row_gradients[self.calls]
        if gradient is not None and rows.requires_grad:
            self.zeros.append(_ZeroWithGradient.apply(rows, gradient))
        return gathered.clone()


# --- a step ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _MicroBatch:
    """A micro-batch of a step.

    Attributes:
        batch: Its samples.
        samples: Their number.
        weight: Its share of the global batch.
        factor: What its loss is multiplied by before backward.
        random_state: The random generators at its first forward.
        rows: What it gathers in each call; known after pass 1.
    """

    batch: Any
    samples: int
    weight: float | Tensor
    factor: float | Tensor
    random_state: Any = None
    rows: list[Tensor] = field(default_factory=list)


class _RowKind(NamedTuple):
    """The shape of a row, and the name of its type."""

    shape: tuple[int, ...]
    dtype: str


class BatchGather:
    """Gathers for the losses of one worker, and computes the steps of these losses.

    Args:
        parallel: The model under its layout, which is neither a pipeline nor splits sequences.
        count_samples: A micro-batch → the number of its samples.
        randomness: The generators that the loss may draw from.
        without_logging: Makes a context for forwards that must not log anything.
    """

    def __init__(
        self,
        parallel: Parallel,
        *,
        count_samples: Callable[[Any], int],
        randomness: Randomness,
        without_logging: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.parallel = parallel
        self.count_samples = count_samples
        self.randomness = randomness
        self.without_logging = without_logging
        self.group = parallel.group if parallel.layout.dims.dp > 1 else None
        self._pass: _Pass | None = None
        """The forward that is running."""
        self._loss_number = 0
        """The loss whose step is running."""
        self._row_kinds: dict[tuple[int, int], _RowKind] = {}
        """What all workers gather, by loss and call."""
        self._compared_losses: set[int] = set()
        """Losses whose rows have been compared between two forwards."""

    @property
    def is_active(self) -> bool:
        """Whether a loss is being computed that may gather."""
        return self._pass is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Gather the rows of the global batch.

        Args:
            x: (n, …), one row for each sample of the micro-batch.
        """
        assert self._pass is not None, "gathers within its own steps only"
        return self._pass(x)

    def count_calls(self, batch: Any, loss: Loss) -> int:
        """How often a loss gathers.

        It is computed once, without gradients. Generators and buffers are restored afterwards.
        """
        random_state = self.randomness.state()
        buffers = self._copy_buffers()
        rows = self._collect_rows(batch, loss, total=self.count_samples(batch))
        self.randomness.restore(random_state)
        self._restore_buffers(buffers)
        return len(rows)

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
        *,
        number: int = 0,
    ) -> Tensor:
        """Do what `Parallel.forward_backward` does, for a loss that gathers.

        Args:
            batches: This worker's micro-batches.
            weights: Each micro-batch's share of the global batch.
            loss: (module, micro-batch) → the loss, 0-dimensional.
            scale: Factor of the gradients.
            number: Which of a step's losses it is.

        Returns:
            This worker's Σ weight · loss, detached, 0-dimensional.

        Raises:
            LayoutError: The loss gathers rows that cannot be gathered.
        """
        self._loss_number = number
        workers = self.parallel.layout.dims.dp
        micro_batches = []
        for batch, weight in zip(batches, weights, strict=True):
            micro_batch = _MicroBatch(
                batch=batch,
                samples=self.count_samples(batch),
                weight=weight,
                factor=weight * workers * scale,
            )
            micro_batches.append(micro_batch)
        total = sum(micro_batch.samples for micro_batch in micro_batches) * workers
        if len(micro_batches) == 1:
            return self._step_of_one(micro_batches[0], loss, total=total)
        return self._step_of_several(micro_batches, loss, total=total)

    def _step_of_one(self, micro_batch: _MicroBatch, loss: Loss, *, total: int) -> Tensor:
        only_pass = _OnlyPass(
            samples=micro_batch.samples,
            total=total,
            group=self.group,
            require_same_rows=self._require_same_rows,
        )
        return self._backward(micro_batch, loss, only_pass, is_last=True)

    def _step_of_several(
        self, micro_batches: list[_MicroBatch], loss: Loss, *, total: int
    ) -> Tensor:
        buffers = self._copy_buffers()
        for micro_batch in micro_batches:
            micro_batch.random_state = self.randomness.state()
            micro_batch.rows = self._collect_rows(micro_batch.batch, loss, total=total)
        gathered = self._gather_rows(micro_batches)
        self._restore_buffers(buffers)
        row_gradients = self._row_gradients(micro_batches, loss, gathered, total=total)
        self._restore_buffers(buffers)
        step_loss: Tensor | None = None
        for i, micro_batch in enumerate(micro_batches):
            self.randomness.restore(micro_batch.random_state)
            model_gradient_pass = _ModelGradientPass(
                samples=micro_batch.samples,
                total=total,
                gathered=gathered,
                row_gradients=row_gradients[i],
            )
            is_last = i == len(micro_batches) - 1
            part = self._backward(micro_batch, loss, model_gradient_pass, is_last=is_last)
            step_loss = part if step_loss is None else step_loss + part
        assert step_loss is not None, "a step has at least one micro-batch"
        return step_loss

    # --- pass 1: rows -----------------------------------------------------------------------------

    def _collect_rows(self, batch: Any, loss: Loss, *, total: int) -> list[Tensor]:
        """What a micro-batch gathers in each call."""
        rows_pass = _RowsPass(samples=self.count_samples(batch), total=total)
        with self.without_logging(), torch.no_grad():
            self._forward_before_last(batch, loss, rows_pass)
        return rows_pass.rows

    def _gather_rows(self, micro_batches: list[_MicroBatch]) -> list[Tensor]:
        """The rows of the global batch in each call."""
        call_counts = [len(micro_batch.rows) for micro_batch in micro_batches]
        if len(set(call_counts)) > 1:
            raise LayoutError(
                f"the loss calls self.gather {min(call_counts)} times for one micro-batch and "
                f"{max(call_counts)} times for another: call it equally often for each"
            )
        gathered = []
        for call in range(call_counts[0]):
            parts = [micro_batch.rows[call] for micro_batch in micro_batches]
            for part in parts:
                if _row_kind(part) != _row_kind(parts[0]):
                    raise _different_rows(parts[0], _row_kind(part))
            self._require_same_rows(call, parts[0])
            gathered.append(_all_gathered(torch.cat(parts), self.group))
        return gathered

    def _require_same_rows(self, call: int, rows: Tensor) -> None:
        """Check that all workers gather rows of one shape and type.

        Workers ask one another in a call's first step. Later a worker's own rows must stay the
        same.

        Args:
            call: The number of the loss's call of gather.
            rows: This worker's rows.

        Raises:
            LayoutError: Rows differ.
        """
        kind = _row_kind(rows)
        key = (self._loss_number, call)
        if key not in self._row_kinds:
            kinds: list[Any] = [kind]
            if self.group is not None:
                kinds = [None] * self.group.size()
                dist.all_gather_object(kinds, kind, group=self.group)
            first_kind = kinds[0]
            self._row_kinds[key] = first_kind
            other_kind = next((k for k in kinds if k != first_kind), None)
            if other_kind is not None:
                raise _different_rows(rows, first_kind if other_kind == kind else other_kind)
        if self._row_kinds[key] != kind:
            raise _different_rows(rows, self._row_kinds[key])

    # --- pass 2: the gradients of the loss for what was gathered ----------------------------------

    def _row_gradients(
        self, micro_batches: list[_MicroBatch], loss: Loss, gathered: list[Tensor], *, total: int
    ) -> list[list[Tensor | None]]:
        """The gradients of rows, by micro-batch and call.

        They are those of the step's whole loss: J times the number of workers and the scale. None
        if the rows of a call need no gradient.
        """
        must_compare = self._loss_number not in self._compared_losses
        self._compared_losses.add(self._loss_number)
        sums: list[Tensor | None] = [None] * len(gathered)
        for micro_batch in micro_batches:
            self.randomness.restore(micro_batch.random_state)
            loss_gradient_pass = _LossGradientPass(
                samples=micro_batch.samples,
                total=total,
                gathered=gathered,
                expected_rows=micro_batch.rows if must_compare else [],
            )
            connected_loss = _connected(loss, loss_gradient_pass, micro_batch.weight)
            with self.without_logging():
                value = self._forward_before_last(
                    micro_batch.batch, connected_loss, loss_gradient_pass
                )
            _add_leaf_gradients(sums, value * micro_batch.factor, loss_gradient_pass.leaves)
        sizes = [micro_batch.samples for micro_batch in micro_batches]
        by_call: list[Sequence[Tensor | None]] = []
        for gradient_sum, rows in zip(sums, gathered):
            if gradient_sum is None:
                by_call.append([None] * len(micro_batches))
            else:
                shard = _reduce_scattered(gradient_sum, self.group).to(rows.dtype)
                by_call.append(shard.split(sizes))
        return [[parts[i] for parts in by_call] for i in range(len(micro_batches))]

    # --- pass 3, or the only one ------------------------------------------------------------------

    def _backward(
        self, micro_batch: _MicroBatch, loss: Loss, forward_pass: _Pass, *, is_last: bool
    ) -> Tensor:
        """Forward and backward of a micro-batch.

        Args:
            micro_batch: The micro-batch.
            loss: Its loss.
            forward_pass: What gather does.
            is_last: Whether it is the step's last micro-batch.

        Returns:
            weight · loss, detached.
        """
        connected_loss = _connected(loss, forward_pass, micro_batch.weight)
        with self.parallel.micro_step(last=is_last):
            value = self._forward(micro_batch.batch, connected_loss, forward_pass)
            require_loss(value)
            (value * micro_batch.factor).backward()
        return value.detach() * micro_batch.weight

    def _forward_before_last(self, batch: Any, loss: Loss, forward_pass: _Pass) -> Tensor:
        """A forward that is repeated later.

        It gets a copy of the batch, because the model may change the batch in place.
        """
        batch = clone_tensors(batch)
        with self.parallel.micro_step(last=False):
            return self._forward(batch, loss, forward_pass)

    def _forward(self, batch: Any, loss: Loss, forward_pass: _Pass) -> Tensor:
        with self._running(forward_pass), self.parallel.autocast():
            return _as_plain(self.parallel.call(loss, batch))

    @contextmanager
    def _running(self, forward_pass: _Pass) -> Iterator[None]:
        """While this lasts, calls of gather go to a pass."""
        self._pass = forward_pass
        try:
            yield
        finally:
            self._pass = None

    # --- what forwards change ---------------------------------------------------------------------

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers, such as running statistics.

        Every forward of a micro-batch must start with the same buffers.
        """
        buffers = self.parallel.inner.named_buffers()
        return {name: buffer.detach().clone() for name, buffer in buffers}

    @torch.no_grad()
    def _restore_buffers(self, copies: dict[str, Tensor]) -> None:
        for name, buffer in self.parallel.inner.named_buffers():
            if name in copies:
                buffer.copy_(copies[name])


def _connected(loss: Loss, forward_pass: _Pass, weight: float | Tensor) -> Loss:
    """A loss whose backward reaches the gathered rows on every worker.

    It has to, since sharded parameters are gathered and freed around backward, and gradients of
    rows travel in it. The loss of a micro-batch without items, whose mean may be nan, is 0.

    Args:
        loss: The task's loss.
        forward_pass: The forward in which it is computed.
        weight: The micro-batch's share of the global batch.
    """

    def connected_loss(module: nn.Module, batch: Any) -> Tensor:
        value = loss(module, batch)
        if _is_empty(weight):
            # Zeros lead backward to the rows, without the gradient of a loss that may be nan.
            has_zeros = bool(forward_pass.zeros)
            value = torch.zeros_like(value) if has_zeros else torch.nan_to_num(value) * 0.0
        for zero in forward_pass.zeros:
            value = value + zero.to(value)
        return value

    return connected_loss


def _is_empty(weight: float | Tensor) -> bool:
    """Whether a micro-batch has no items. For a weight on a GPU the host waits."""
    return not bool(weight)


def _add_leaf_gradients(
    sums: list[Tensor | None], value: Tensor, leaves: list[Tensor | None]
) -> None:
    """Add the gradients of a loss for the gathered rows to sums, in place.

    Args:
        sums: The sum of each call; None before the first gradient.
        value: The loss.
        leaves: The gathered rows of each call; None if they need no gradient.
    """
    calls = [call for call, leaf in enumerate(leaves) if leaf is not None]
    if not calls:
        return
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    for call, leaf, gradient in zip(calls, wanted, gradients):
        total = sums[call]
        if total is None:
            total = torch.zeros_like(leaf, dtype=_sum_dtype(leaf.dtype))
            sums[call] = total
        if gradient is not None:
            total.add_(gradient)


def _row_kind(rows: Tensor) -> _RowKind:
    return _RowKind(shape=tuple(rows.shape[1:]), dtype=str(rows.dtype))


def _different_rows(rows: Tensor, other: _RowKind) -> LayoutError:
    """The refusal of rows of two shapes or types."""
    kind = _row_kind(rows)
    return LayoutError(
        f"self.gather got rows of shape {kind.shape}, {kind.dtype}, where another part of the "
        f"batch gave {other.shape}, {other.dtype}: pool or pad them to one shape before they are "
        "gathered"
    )
