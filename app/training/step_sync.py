"""What all ranks agree on, in one small collective about once a second instead of one per step.

Between two agreements each rank only keeps references to the losses of its steps: it computes
nothing and does not wait for the device. In an agreement the ranks add up the logged losses and the
flags "asked to stop", "save now" and "a value was not finite". When the next one is due follows
from the agreed seconds per step, so that every rank computes the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from app.checkpoint.ranks import Ranks
from app.errors import NonFiniteError
from strategies.torch_internals import failed_groups

PERIOD_SECONDS = 1.0
MAX_STEPS = 200  # between two agreements, so that a rank keeps few references
NEVER = 2**62


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """The metrics of one logged step, the same on every rank.

    `loss`, `items` and `losses` are summed over ranks in an agreement; the others are the same on
    every rank anyway.
    """

    step: int
    time: float
    """Unix seconds."""
    learning_rates: dict[str, float]
    """By name: "lr" is that of the first parameter group; the others are those that differ."""
    loss: float
    """The mean over the global batch."""
    grad_norm: float | None
    """None if it was not computed."""
    items: float
    """Items of the global batch; if there are none, the loss is unknown and not 0."""
    losses: dict[str, float]
    """What the task's loss has logged, by name."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks agreed on after a step."""

    step: int
    """The newest step."""
    steps: int
    """Steps since the agreement before."""
    stop: bool
    """Whether any rank was asked to stop."""
    save: bool
    """Whether any rank wants a checkpoint now."""
    seconds: float
    """Seconds in the steps since the agreement before, including waiting for data. What happens
    between an agreement and the next step (evaluation, checkpoints, waiting) does not count."""
    seconds_per_step: float
    items: float
    """Items of all steps since the agreement before, over all ranks."""
    logged: list[LoggedStep]
    """The logged steps since the agreement before."""


@dataclass(kw_only=True)
class _PendingStep:
    """A logged step of this rank, whose values may still be on the device."""

    step: int
    position: int
    """Its place among the steps since the last agreement."""
    time: float
    learning_rates: dict[str, float]
    grad_norm: torch.Tensor | None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class _NonFinite:
    """The first step of a rank with a value that is not finite."""

    step: int
    """NEVER if all values are finite."""
    is_gradient: bool
    """Whether the loss of that step is finite, and only its gradient is not."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What a rank has to add up in an agreement; afterwards, the sums over all ranks.

    Truth values are 0 or 1, so that their sums say on how many ranks they hold.
    """

    stop: float
    save: float
    non_finite: float
    has_task_losses: float
    """Whether the task's loss has logged something."""
    seconds: float
    items: float
    logged_losses: list[float]
    """Of each logged step."""
    logged_items: list[float]
    """Of each logged step."""

    def to_numbers(self) -> list[float]:
        """All of them in one list."""
        return [
            self.stop,
            self.save,
            self.non_finite,
            self.has_task_losses,
            self.seconds,
            self.items,
            *self.logged_losses,
            *self.logged_items,
        ]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> _Sums:
        """What `to_numbers` has made a list of."""
        stop, save, non_finite, has_task_losses, seconds, items, *per_step = numbers
        logged_steps = len(per_step) // 2
        return cls(
            stop=stop,
            save=save,
            non_finite=non_finite,
            has_task_losses=has_task_losses,
            seconds=seconds,
            items=items,
            logged_losses=per_step[:logged_steps],
            logged_items=per_step[logged_steps:],
        )


class StepSync:
    """Collects what steps leave; every rank calls `agree` after the same steps.

    Args:
        loss_copies: The number of ranks whose losses are averaged to one share of the loss:
            tensor-parallel peers, and those that share a sequence.
        first_step: The first step of this start. The ranks agree after it, which shows how long a
            step takes.
        data_copies: The number of ranks with the same share of the global batch: the above, and
            the stages of a pipeline.
    """

    def __init__(self, loss_copies: int, first_step: int, data_copies: int = 1) -> None:
        self.loss_copies = loss_copies
        self.data_copies = data_copies
        self.first_step = first_step
        self.next_step = first_step
        """The step after which the next agreement is due."""
        self._ranks = Ranks()
        self._last_step = first_step - 1
        self._started = time.perf_counter()
        self._losses: list[torch.Tensor] = []
        """Of each step this rank's part of the loss over the global batch, 0-dimensional."""
        self._items: list[float] = []
        """Of each step the items in this rank's share of the global batch."""
        self._logged: list[_PendingStep] = []

    def add(self, loss: torch.Tensor, items: float = 0.0) -> None:
        """Add a step.

        Args:
            loss: This rank's part of the mean loss over the global batch, 0-dimensional.
            items: Items in this rank's share of the global batch.
        """
        self._losses.append(loss)
        self._items.append(items)

    def log(
        self,
        step: int,
        learning_rates: dict[str, float],
        grad_norm: torch.Tensor | None,
        losses: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Mark the step that was added last as logged.

        Args:
            step: The step.
            learning_rates: By name.
            grad_norm: The norm of the gradient, 0-dimensional; None if it was not computed.
            losses: This rank's parts of what the task's loss has logged, by name.
        """
        self._logged.append(
            _PendingStep(
                step=step,
                position=len(self._losses) - 1,
                time=time.time(),
                learning_rates=learning_rates,
                grad_norm=grad_norm,
                losses=losses or {},
            )
        )

    def restart_clock(self) -> None:
        """The next step begins now; the time since the last agreement was not training."""
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside is not training."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def is_due(self, step: int) -> bool:
        """Whether the ranks agree after this step."""
        return step >= self.next_step

    def agree(
        self, step: int, *, stop: bool, save: bool, may_be_infinite: bool = False
    ) -> Agreement:
        """Exchange losses and flags with all ranks.

        Args:
            step: The step just taken.
            stop: Whether this rank was asked to stop.
            save: Whether this rank wants a checkpoint now.
            may_be_infinite: Whether values that are not finite are no error, as in fp16.

        Raises:
            NonFiniteError: On every rank: a loss or gradient was not finite. The message names the
                first such step and its ranks.
            DistBackendError: A collective has failed, so that its results mean nothing.
        """
        losses = torch.stack(self._losses).double().cpu()
        grad_norms = self._grad_norms()
        failed = failed_groups()
        if failed:
            raise dist.DistBackendError(
                f"NCCL communicator was aborted: a collective of group {failed[0]} has failed"
            )
        non_finite = self._first_non_finite(losses, grad_norms)
        sums = self._sum_over_ranks(
            _Sums(
                stop=float(stop),
                save=float(save),
                non_finite=float(non_finite.step < NEVER and not may_be_infinite),
                has_task_losses=float(any(pending.losses for pending in self._logged)),
                seconds=time.perf_counter() - self._started,
                items=sum(self._items),
                logged_losses=[losses[pending.position].item() for pending in self._logged],
                logged_items=[self._items[pending.position] for pending in self._logged],
            )
        )
        if sums.non_finite > 0:
            self._raise_non_finite(non_finite)
        seconds = sums.seconds / self._ranks.size
        steps = step - self._last_step
        agreement = Agreement(
            step=step,
            steps=steps,
            stop=sums.stop > 0,
            save=sums.save > 0,
            seconds=seconds,
            seconds_per_step=seconds / steps,
            items=sums.items / self.data_copies,
            logged=self._logged_steps(sums, grad_norms),
        )
        self._start_window(step, agreement.seconds_per_step)
        return agreement

    def _logged_steps(self, sums: _Sums, grad_norms: list[float | None]) -> list[LoggedStep]:
        """The logged steps over all ranks; collective if a rank's loss has logged something."""
        task_losses: list[dict[str, float]] = [{} for _ in self._logged]
        if sums.has_task_losses > 0:
            task_losses = self._task_losses()
        return [
            LoggedStep(
                step=pending.step,
                time=pending.time,
                learning_rates=pending.learning_rates,
                loss=sums.logged_losses[number] / self.loss_copies,
                grad_norm=grad_norms[number],
                items=sums.logged_items[number] / self.data_copies,
                losses=task_losses[number],
            )
            for number, pending in enumerate(self._logged)
        ]

    def _start_window(self, step: int, seconds_per_step: float) -> None:
        steps = 1
        if step > self.first_step:  # the first step is not typical: it compiles and allocates
            steps = round(PERIOD_SECONDS / max(seconds_per_step, 1e-9))
        self.next_step = step + min(MAX_STEPS, max(1, steps))
        self._last_step = step
        self._started = time.perf_counter()
        self._losses = []
        self._items = []
        self._logged = []

    def _sum_over_ranks(self, local: _Sums) -> _Sums:
        """The sums over all ranks of what each has, in one collective."""
        numbers = torch.tensor(local.to_numbers(), dtype=torch.float64)
        if self._ranks.distributed:
            dist.all_reduce(numbers)
        return _Sums.from_numbers(numbers.tolist())

    def _task_losses(self) -> list[dict[str, float]]:
        """What the task's loss has logged, over all ranks, by logged step; a rank may have none."""
        local = [
            {name: float(loss) for name, loss in pending.losses.items()} for pending in self._logged
        ]
        totals: list[dict[str, float]] = [{} for _ in self._logged]
        for losses_of_rank in self._ranks.all_gather(local):
            for total, losses in zip(totals, losses_of_rank, strict=True):
                for name, loss in losses.items():
                    total[name] = total.get(name, 0.0) + loss / self.loss_copies
        return totals

    def _grad_norms(self) -> list[float | None]:
        """The norms of the logged steps, copied from the device at once."""
        norms = [pending.grad_norm for pending in self._logged if pending.grad_norm is not None]
        values = iter(torch.stack(norms).double().tolist() if norms else [])
        return [None if pending.grad_norm is None else next(values) for pending in self._logged]

    def _first_non_finite(self, losses: torch.Tensor, grad_norms: list[float | None]) -> _NonFinite:
        is_bad = ~torch.isfinite(losses)
        loss_step = NEVER
        if is_bad.any():
            loss_step = self._last_step + 1 + int(is_bad.nonzero()[0])
        gradient_step = NEVER
        for pending, norm in zip(self._logged, grad_norms, strict=True):
            if norm is not None and not math.isfinite(norm):
                gradient_step = min(gradient_step, pending.step)
        return _NonFinite(min(loss_step, gradient_step), is_gradient=loss_step > gradient_step)

    def _raise_non_finite(self, local: _NonFinite) -> None:
        by_rank = self._ranks.all_gather(local)
        first = min(by_rank)
        ranks = [str(rank) for rank, each in enumerate(by_rank) if each == first]
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
        value = "gradient" if first.is_gradient else "loss"
        raise NonFiniteError(
            f"the {value} was not finite at step {first.step} on {where}; the last good checkpoint "
            "is intact: try a lower optimizer.lr, a longer schedule.warmup_steps, "
            "train.clip_norm=1.0, or look at the data of that step; where targets are masked, a "
            "part of a batch may have none: let the task's `items` count those that are not"
        )
