"""What all ranks agree on, in one small collective about every second instead of one per step.

Between two synchronisations each rank only keeps references to its step losses: no arithmetic, no wait for the device.
At one, the logged losses are summed over the ranks, and with them the flags "asked to stop", "save now" and "a value
was not finite". The distance to the next one follows from the agreed step time, so every rank computes the same.
"""

import math
import time
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
    learning_rate: float
    loss: float
    grad_norm: float | None
    losses: dict[str, float] = field(default_factory=dict)  # further ones, by name


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on after `step`."""

    step: int
    stop: bool
    save: bool
    seconds_per_step: float
    logged: list[LoggedStep] = field(default_factory=list)


class StepSync:
    """Collects what steps leave behind; `agree` is called by every rank after the same steps.

    loss_copies: over how many ranks a loss is the mean (tensor-parallel peers, and those of one sequence).
    """

    def __init__(self, loss_copies: int, first_step: int) -> None:
        self.ranks, self.loss_copies = Ranks(), loss_copies
        self.first_step = self.next_step = first_step  # the first step tells how long one takes
        self.last_step = first_step - 1
        self.started = time.perf_counter()
        self.losses: list[torch.Tensor] = []  # one 0-d tensor per step: this rank's part of the global loss
        self.logged: list[tuple[int, float, float, torch.Tensor | None]] = []
        self.named: list[dict[str, torch.Tensor]] = []  # of the logged steps, this rank's parts of further losses

    def add(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)

    def log(
        self, step: int, rate: float, grad_norm: torch.Tensor | None, named: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.logged.append((step, time.time(), rate, grad_norm))
        self.named.append(named or {})

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
        logged_losses = [losses[entry[0] - self.last_step - 1].item() for entry in self.logged]
        flags = [float(flag) for flag in (stop, save, bad, any(self.named))]
        sums = torch.tensor([*flags, elapsed, *logged_losses], dtype=torch.float64)
        if self.ranks.distributed:
            dist.all_reduce(sums)
        if sums[2] > 0:
            self._raise_non_finite(bad_step)
        seconds_per_step = sums[4].item() / self.ranks.size / (step - self.last_step)
        named = self._named() if sums[3] > 0 else [{} for _ in self.logged]
        logged = [
            LoggedStep(at, when, rate, loss / self.loss_copies, norm, more)
            for (at, when, rate, _), loss, norm, more in zip(self.logged, sums[5:].tolist(), norms, named)
        ]
        ahead = round(PERIOD_SECONDS / max(seconds_per_step, 1e-9)) if step > self.first_step else 1
        self.next_step = step + min(MAX_STEPS, max(1, ahead))
        self.last_step, self.started = step, time.perf_counter()
        self.losses, self.logged, self.named = [], [], []
        return Agreement(step, bool(sums[0] > 0), bool(sums[1] > 0), seconds_per_step, logged)

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
            "or look at the data of that step"
        )
