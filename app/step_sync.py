"""What all ranks must agree on, in one small collective about every second instead of one per step.

Between two pulses each rank only keeps references to its step losses: no arithmetic, no synchronisation. At a pulse
the logged losses are summed over the ranks, and with them the flags "asked to stop", "time to save" and "a value was
not finite". How many steps the next pulse is away is computed from the agreed step time, so every rank knows it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from app.errors import NonFiniteError
from strategies.cpu_collectives.shared_memory import shared_sum

PERIOD_SECONDS = 1.0
MOST_STEPS = 200  # so that a window of references stays small


@dataclass
class Logged:
    """One logged step, after the ranks have agreed on it."""

    step: int
    time: float
    learning_rate: float
    loss: float
    grad_norm: float | None


@dataclass
class Agreement:
    step: int
    stop: bool
    save: bool
    seconds_per_step: float
    logged: list[Logged] = field(default_factory=list)


class Pulse:
    """Collects what steps leave behind; `agree` is called by every rank at the same steps."""

    def __init__(self, rank: int, world_size: int, copies: int, first_step: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.copies = copies  # ranks that hold the same loss (tensor-parallel peers)
        self.next_step = first_step  # the first step is always a pulse: news comes early, and the step time is learnt
        self.last_step = first_step - 1
        self.started = time.perf_counter()
        self.values: list[torch.Tensor] = []  # one 0-d tensor per step: the rank's part of the global loss
        self.first_step = first_step
        self.logged: list[tuple[int, float, float, torch.Tensor | None]] = []
        self.shared = shared_sum(None, torch.device("cpu")) if world_size > 1 else None

    def add(self, loss: torch.Tensor) -> None:
        self.values.append(loss)

    def log(self, step: int, learning_rate: float, grad_norm: torch.Tensor | None) -> None:
        self.logged.append((step, time.time(), learning_rate, grad_norm))

    def due(self, step: int) -> bool:
        return step >= self.next_step

    def agree(self, step: int, *, stop: bool, save: bool, may_be_infinite: bool = False) -> Agreement:
        """Exchanges the window's values and flags over all ranks, and starts a new window.

        Raises:
            NonFiniteError: on every rank, naming the first step and the rank whose loss or gradient was not finite.
        """
        losses = torch.stack(self.values).double().cpu()
        norms = self._norms()
        finite = torch.isfinite(losses)
        bad_norms = [
            entry[0] for entry, norm in zip(self.logged, norms) if norm is not None and not math.isfinite(norm)
        ]
        bad = bool(not finite.all() or bad_norms) and not may_be_infinite
        elapsed = time.perf_counter() - self.started
        values = losses.tolist()
        wanted = [values[entry[0] - self.last_step - 1] for entry in self.logged]
        sums = torch.tensor([float(stop), float(save), float(bad), elapsed, *wanted], dtype=torch.float64)
        if self.shared is not None:  # gloo takes milliseconds where its threads and training's share the cores
            self.shared.sum_(sums)
        elif self.world_size > 1:
            dist.all_reduce(sums)
        if sums[2] > 0:
            self._raise_non_finite(finite, bad_norms)
        seconds_per_step = sums[3].item() / self.world_size / (step - self.last_step)
        agreement = Agreement(step, bool(sums[0] > 0), bool(sums[1] > 0), seconds_per_step)
        for (at, when, rate, _), loss, norm in zip(self.logged, sums[4:].tolist(), norms):
            agreement.logged.append(Logged(at, when, rate, loss / self.copies, norm))
        ahead = round(PERIOD_SECONDS / max(seconds_per_step, 1e-9)) if step > self.first_step else 1
        self.next_step = step + min(MOST_STEPS, max(1, ahead))
        self.last_step, self.started = step, time.perf_counter()
        self.values, self.logged = [], []
        return agreement

    def _norms(self) -> list[float | None]:
        """Of the logged steps, copied from the device at once."""
        known = [norm for *_, norm in self.logged if norm is not None]
        values = iter(torch.stack(known).double().tolist() if known else [])
        return [None if norm is None else next(values) for *_, norm in self.logged]

    def _raise_non_finite(self, finite: torch.Tensor, bad_norms: list[int]) -> None:
        never = 2**62
        in_loss = self.last_step + 1 + int((~finite).nonzero()[0]) if not finite.all() else never
        in_gradient = min(bad_norms, default=never)
        found = [(min(in_loss, in_gradient), in_loss > in_gradient, self.rank)]
        if self.world_size > 1:
            everyone: list = [None] * self.world_size
            dist.all_gather_object(everyone, found[0])
            found = everyone
        step, gradient_only, rank = min(found)
        ranks = [r for s, g, r in found if (s, g) == (step, gradient_only)]
        where = f"rank {rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
        raise NonFiniteError(
            f"the {'gradient' if gradient_only else 'loss'} was not finite at step {step} on {where}; the last good "
            "checkpoint is intact: try a lower optimizer.lr, a longer schedule.warmup_steps, train.clip_norm=1.0, "
            "or look at the data of that step"
        )
