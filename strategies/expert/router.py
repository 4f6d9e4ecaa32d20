"""How evenly experts are used: counted where they are called, given to routers, and reported.

The experts of every mixture are called with the choices (…, k), so these can be counted without any
change to the model. Over a global batch,

    load fₑ = choices of expert e / all choices

is summed over micro-batches and data-parallel workers, once per step. A router that balances its
experts by their load has a method `update(load)`, which is called after each step of the optimizer.
It adapts the bias of DeepSeek-V3, or the weights of the balance loss (app/models/mixture.py). All
workers sum the same whole numbers, so their routers stay equal under any layout. A block that is
recomputed counts all its tokens twice, which does not change the shares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.mixtures import Mixture


@runtime_checkable
class BalancingRouter(Protocol):
    """A router that balances by the load of its experts."""

    def update(self, load: Tensor) -> None:
        """Take (experts,) shares of all choices, which sum to 1."""


@dataclass(frozen=True)
class _Counts:
    """What was counted of one mixture, in one tensor for one all-reduce.

    Args:
        values: (experts + 2,) float64: the choices of each expert, the number of tokens, and the
            sum over tokens of the entropy of the router's probabilities.
    """

    values: Tensor

    @classmethod
    def of(cls, chosen: Tensor, logits: Tensor, experts: int) -> "_Counts":
        """Count one call of a mixture.

        Args:
            chosen: (choices,), the expert of each.
            logits: (…, experts) of the router.
            experts: Number of experts.
        """
        choices = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
        choices.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=choices.dtype))
        log_probabilities = logits.float().log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum()
        tokens = choices.new_full((1,), log_probabilities.numel() // experts)
        return cls(torch.cat([choices, tokens, entropy.to(choices.dtype).view(1)]))

    @property
    def choices(self) -> Tensor:
        """The choices of each expert."""
        return self.values[:-2]


class RouterLoad:
    """Counts how often each expert of this worker's mixtures is chosen."""

    def __init__(self, mixtures: list[Mixture], group: dist.ProcessGroup | None) -> None:
        """Count in the forwards of the mixtures.

        Args:
            mixtures: The mixtures.
            group: The workers that a batch is spread over; None if this is the only one.
        """
        self._mixtures = mixtures
        self._group = group
        self._counts: list[_Counts | None] = [None] * len(mixtures)
        """Of each mixture, since the last update."""
        self._last_step: list[_Counts] = []
        """The same of the last step, over all workers."""
        self._logits: dict[int, Tensor] = {}
        """What the router of a mixture has returned, until its experts are called."""
        for number, mixture in enumerate(mixtures):
            if mixture.router is not None:
                mixture.router.register_forward_hook(self._note_logits(number))
            mixture.experts.register_forward_pre_hook(self._count_choices(number))

    def _note_logits(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(router: nn.Module, args: Any, output: Any) -> None:
            if router.training and torch.is_grad_enabled():
                self._logits[number] = output[0].detach()

        return hook

    def _count_choices(self, number: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def hook(experts: nn.Module, args: tuple[Any, ...]) -> None:
            logits = self._logits.pop(number, None)
            index = args[1]
            if logits is None or not isinstance(index, Tensor):
                return
            counts = _Counts.of(index.flatten(), logits, self._mixtures[number].count)
            before = self._counts[number]
            if before is not None:
                counts = _Counts(before.values + counts.values)
            self._counts[number] = counts

        return hook

    @torch.no_grad()
    def update(self) -> None:
        """Give routers the load of the step that has ended. Collective over the workers."""
        counts = [each for each in self._counts if each is not None]
        if len(counts) < len(self._mixtures):
            return
        device = counts[0].values.device
        flat = torch.cat([each.values.to(device) for each in counts])
        if self._group is not None:
            dist.all_reduce(flat, group=self._group)
        sizes = [len(each.values) for each in counts]
        self._last_step = [_Counts(values) for values in flat.split(sizes)]
        self._counts = [None] * len(self._mixtures)
        for mixture, totals in zip(self._mixtures, self._last_step):
            if isinstance(mixture.router, BalancingRouter):
                load = totals.choices / totals.choices.sum()
                mixture.router.update(load.float())

    def metrics(self) -> dict[str, list[float]]:
        """Figures of the last step, by mixture.

        Returns:
            For each mixture, each expert's load times their number, which is 1 if all are chosen
            equally often; then the router's entropy as a share of the largest possible; then the
            share of choices that no expert has computed.
        """
        metrics: dict[str, list[float]] = {}
        for mixture, totals in zip(self._mixtures, self._last_step):
            *choices, tokens, entropy = totals.values.tolist()
            all_choices = sum(choices)
            load = [mixture.count * number / all_choices for number in choices]
            largest_entropy = torch.tensor(float(mixture.count)).log().item()
            entropy_share = entropy / tokens / largest_entropy
            dropped_share = 1 - all_choices / (tokens * mixture.top_k)
            metrics[mixture.name] = [*load, entropy_share, dropped_share]
        return metrics
