"""How evenly experts are used: counted where tokens choose, told to routers after each step, and reported.

Every mixture's experts are called with the choices (…, k), so counting needs nothing of the model. In a global batch

    load fₑ = choices of expert e / all choices        summed over micro-batches and data-parallel workers, once a step

A router that balances by it has `update(load)`, called after each optimizer step: the bias of DeepSeek-V3 and the
weights of the balance loss (app/models/mixture.py). All workers sum the same whole numbers, so they stay alike whatever
the layout. Recomputing a block counts its tokens twice, all of them, which leaves their shares as they are.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.mixtures import Mixture


class RouterLoad:
    """The mixtures of this worker. group: over whose workers a batch is spread; None: this one alone."""

    def __init__(self, mixtures: list[Mixture], group: dist.ProcessGroup | None) -> None:
        self.mixtures, self.group = mixtures, group
        self.counted: list[Tensor | None] = [None] * len(mixtures)
        """Of each mixture, choices by expert since the last update, and at the end tokens and their summed entropy."""
        self.last: list[Tensor] = []
        """The same of the last step, over all workers."""
        self.logits: dict[int, Tensor] = {}
        for place, found in enumerate(mixtures):
            if found.router is not None:
                found.router.register_forward_hook(self._routed(place))
            found.experts.register_forward_pre_hook(self._chosen(place))

    def _routed(self, place: int) -> Any:
        def hook(router: nn.Module, args: Any, output: Any) -> None:
            if router.training and torch.is_grad_enabled():
                self.logits[place] = output[0].detach()

        return hook

    def _chosen(self, place: int) -> Any:
        count = self.mixtures[place].count

        @torch.no_grad()
        def hook(experts: nn.Module, args: Any) -> None:
            logits = self.logits.pop(place, None)
            if logits is None or not isinstance(args[1], Tensor):
                return
            chosen = args[1].flatten()
            choices = torch.zeros(count, dtype=torch.float64, device=chosen.device)
            choices.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=choices.dtype))
            logarithms = logits.float().log_softmax(-1)
            tokens, entropy = logarithms.numel() // count, -(logarithms.exp() * logarithms).sum()
            found = torch.cat([choices, choices.new_full((1,), tokens), entropy.to(choices.dtype).view(1)])
            before = self.counted[place]
            self.counted[place] = found if before is None else before + found

        return hook

    @torch.no_grad()
    def update(self) -> None:
        """After a step; collective over `group`."""
        counted = [found for found in self.counted if found is not None]
        if len(counted) < len(self.mixtures):
            return
        flat = torch.cat([found.to(counted[0].device) for found in counted])
        if self.group is not None:
            dist.all_reduce(flat, group=self.group)
        self.last, self.counted = list(flat.split([len(found) for found in counted])), [None] * len(counted)
        for found, sums in zip(self.mixtures, self.last):
            if found.router is not None and hasattr(found.router, "update"):
                choices = sums[: found.count]
                found.router.update((choices / choices.sum()).float())  # type: ignore[operator]

    def metrics(self) -> dict[str, list[float]]:
        """Of the last step, by mixture: each expert's load times their number (1 where all have as much); at the end
        the router's entropy as a share of the largest, and the share of choices that no expert computed."""
        found = {}
        for mixture, sums in zip(self.mixtures, self.last):
            *choices, tokens, entropy = sums.tolist()
            most = torch.tensor(float(mixture.count)).log().item()
            load = [mixture.count * each / sum(choices) for each in choices]
            found[mixture.name] = [*load, entropy / tokens / most, 1 - sum(choices) / (tokens * mixture.top_k)]
        return found
