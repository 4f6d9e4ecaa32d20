"""What all ranks agree on, in one small collective about every second instead of one per step.

Between two synchronisations each rank only keeps references to its step losses: no arithmetic, no wait for the device.
At one, the logged losses are summed over the ranks, and with them the flags "asked to stop", "save now" and "a value
was not finite". The distance to the next one follows from the agreed step time, so every rank computes the same.
"""

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
MAX_STEPS = 200
"""Between two synchronisations, so that few references are held."""
NEVER = 2**62


@dataclass(frozen=True)
class LoggedStep:
    """The metrics of one logged step, the same on every rank."""

    step: int
    time: float
    learning_rates: dict[str, float]
    """By name: "lr" is the first parameter group's; others where they differ."""
    loss: float
    grad_norm: float | None
    items: float = 0.0
    """How many the global batch had; of a step without one the loss is unknown, not 0."""
    losses: dict[str, float] = field(default_factory=dict)  # further ones, by name


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on after `step`."""

    step: int
    steps: int
    """Since the agreement before."""
    stop: bool
    save: bool
    seconds: float
    """Of training since the agreement before: the time in steps, waiting for data included. What happens between one
    agreement and the next step (evaluation, checkpoints, waiting for the storage) is not in it."""
    seconds_per_step: float
    items: float
    """Of all steps since the agreement before, over all ranks."""
    logged: list[LoggedStep] = field(default_factory=list)


class StepSync:
    """Collects what steps leave behind; `agree` is called by every rank after the same steps.

    loss_copies: over how many ranks a loss is the mean (tensor-parallel peers, and those of one sequence).
    data_copies: how many ranks have the same share of the global batch (those, and the stages of a pipeline).
    """

    def __init__(self, loss_copies: int, first_step: int, data_copies: int = 1) -> None:
        self.ranks, self.loss_copies, self.data_copies = Ranks(), loss_copies, data_copies
        self.first_step = self.next_step = first_step  # the first step tells how long one takes
        self.last_step = first_step - 1
        self.started = time.perf_counter()
        self.losses: list[torch.Tensor] = []  # one 0-d tensor per step: this rank's part of the global loss
        self.items: list[float] = []  # of each step, in this rank's share of the global batch
        self.logged: list[tuple[int, float, dict[str, float], torch.Tensor | None]] = []
        self.named: list[dict[str, torch.Tensor]] = []  # of the logged steps, this rank's parts of further losses

    def add(self, loss: torch.Tensor, items: float = 0.0) -> None:
        self.losses.append(loss)
        self.items.append(items)

    def log(
        self,
        step: int,
        learning_rates: dict[str, float],
        grad_norm: torch.Tensor | None,
        named: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.logged.append((step, time.time(), learning_rates, grad_norm))
        self.named.append(named or {})

    def restart_clock(self) -> None:
        """The next step begins now: what came after the last agreement was no training."""
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is not the steps' time."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def due(self, step: int) -> bool:
        return step >= self.next_step

    def agree(self, step: int, *, stop: bool, save: bool, may_be_infinite: bool = False) -> Agreement:
        """Exchanges losses and flags over all ranks, and starts a new window.

        Raises:
            NonFiniteError: on every rank, naming the first step and the ranks whose loss or gradient was not finite.
            DistBackendError: a collective has failed, so that what came of it means nothing.
        """
        losses = torch.stack(self.losses).double().cpu()
        norms = self._norms()
        if failed := failed_groups():
            raise dist.DistBackendError(f"NCCL communicator was aborted: a collective of group {failed[0]} has failed")
        bad_step = self._first_non_finite(losses, norms)
        bad = bad_step[0] < NEVER and not may_be_infinite
        elapsed = time.perf_counter() - self.started
        at = [entry[0] - self.last_step - 1 for entry in self.logged]
        logged_losses = [losses[i].item() for i in at]
        logged_items = [self.items[i] for i in at]
        flags = [float(flag) for flag in (stop, save, bad, any(self.named))]
        measured = [elapsed, sum(self.items)]
        sums = torch.tensor([*flags, *measured, *logged_losses, *logged_items], dtype=torch.float64)
        if self.ranks.distributed:
            dist.all_reduce(sums)
        if sums[2] > 0:
            self._raise_non_finite(bad_step)
        seconds = sums[4].item() / self.ranks.size
        steps = step - self.last_step
        seconds_per_step = seconds / steps
        items = sums[5].item() / self.data_copies
        named = self._named() if sums[3] > 0 else [{} for _ in self.logged]
        first = 6
        all_losses = sums[first : first + len(self.logged)]
        all_items = sums[first + len(self.logged) :]
        logged = [
            LoggedStep(number, when, rates, loss / self.loss_copies, norm, count / self.data_copies, more)
            for (number, when, rates, _), loss, norm, count, more in zip(
                self.logged, all_losses.tolist(), norms, all_items.tolist(), named
            )
        ]
        ahead = round(PERIOD_SECONDS / max(seconds_per_step, 1e-9)) if step > self.first_step else 1
        self.next_step = step + min(MAX_STEPS, max(1, ahead))
        self.last_step, self.started = step, time.perf_counter()
        self.losses, self.items, self.logged, self.named = [], [], [], []
        return Agreement(
            step=step,
            steps=steps,
            stop=bool(sums[0] > 0),
            save=bool(sums[1] > 0),
            seconds=seconds,
            seconds_per_step=seconds_per_step,
            items=items,
            logged=logged,
        )

    def _named(self) -> list[dict[str, float]]:
        """Further losses of the logged steps, over all ranks; a rank may have none."""
        mine = [{name: float(value) for name, value in each.items()} for each in self.named]
        found = []
        for parts in zip(*self.ranks.all(mine), strict=True):
            total: dict[str, float] = {}
            for name, value in (pair for part in parts for pair in part.items()):
                total[name] = total.get(name, 0.0) + value / self.loss_copies
            found.append(total)
        return found

    def _norms(self) -> list[float | None]:
        """Of the logged steps, copied from the device at once."""
        known = [norm for *_, norm in self.logged if norm is not None]
        values = iter(torch.stack(known).double().tolist() if known else [])
        return [None if norm is None else next(values) for *_, norm in self.logged]

    def _first_non_finite(self, losses: torch.Tensor, norms: list[float | None]) -> tuple[int, bool]:
        """The first step with a value that is not finite (else NEVER), and whether only its gradient is that."""
        finite = torch.isfinite(losses)
        in_loss = NEVER if finite.all() else self.last_step + 1 + int((~finite).nonzero()[0])
        bad = [entry[0] for entry, norm in zip(self.logged, norms) if norm is not None and not math.isfinite(norm)]
        in_gradient = min(bad, default=NEVER)
        return min(in_loss, in_gradient), in_loss > in_gradient

    def _raise_non_finite(self, mine: tuple[int, bool]) -> None:
        found = self.ranks.all(mine)
        step, gradient_only = first = min(found)
        ranks = [rank for rank, theirs in enumerate(found) if theirs == first]
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        raise NonFiniteError(
            f"the {'gradient' if gradient_only else 'loss'} was not finite at step {step} on {where}; the last good "
            "checkpoint is intact: try a lower optimizer.lr, a longer schedule.warmup_steps, train.clip_norm=1.0, "
            "or look at the data of that step; where targets are masked, a part of a batch may have none: let the "
            "task's `items` count those that are not"
        )
