"""The same training as an expert would write it by hand, for torchrun: the measure of ours.

Nothing of Trireme but the model's class and the arrays. DDP with a static graph and gradients as bucket views, a fused
optimizer, data in memory and indexed by a permutation, no synchronisation but for the loss that is logged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from app.data.loader import fetch
from app.models.cnn import CNN
from app.models.gpt import GPT

LOG_EVERY = 10


class Plain:
    """A training that is advanced one step at a time."""

    def __init__(self, build: Any, inputs: torch.Tensor, targets: torch.Tensor, *, batch: int, lr: float, steps: int):
        torch.manual_seed(0)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(build(), static_graph=True, gradient_as_bucket_view=True)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.inputs, self.targets, self.batch, self.lr, self.steps = inputs, targets, batch, lr, steps
        self.done = 0
        self.indices = self._indices()

    def _indices(self) -> Iterator[torch.Tensor]:
        share = self.batch // self.world
        generator = torch.Generator().manual_seed(0)
        while True:
            for part in torch.randperm(len(self.inputs), generator=generator).split(self.batch):
                if len(part) == self.batch:
                    yield part[self.rank * share : (self.rank + 1) * share]

    def advance(self) -> None:
        index = next(self.indices)
        rate = self.lr * (1 + math.cos(math.pi * self.done / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        logits = self.model(self.inputs[index])
        loss = F.cross_entropy(logits.flatten(0, -2), self.targets[index].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        if self.done % LOG_EVERY == 0:
            value = loss.detach().clone()
            dist.all_reduce(value)
            value.item()


def mnist(steps: int) -> Plain:
    from app.tasks.vision import ImageClassification

    inputs, targets = fetch(ImageClassification(data="mnist").train_data(), [(i, i) for i in range(4000)])
    return Plain(lambda: CNN(1, 28, 28, 10), inputs, targets, batch=64, lr=2e-3, steps=steps)


def gpt(steps: int) -> Plain:
    from app.tasks.language import LanguageModelling

    task = LanguageModelling(data="python", sequence_length=128, d_model=128, n_layers=4, n_heads=4)
    inputs, targets = fetch(task.train_data(), [(i, i) for i in range(4096)])
    build = lambda: GPT(vocab_size=256, d_model=128, n_layers=4, n_heads=4)  # noqa: E731
    return Plain(build, inputs, targets, batch=16, lr=1e-3, steps=steps)


MODELS = {"mnist": mnist, "gpt": gpt}


def main(name: str, steps: int) -> None:
    """A whole program, as the `start` benchmark runs it: prints the Unix time at which the first step was done."""
    dist.init_process_group("gloo")
    training = MODELS[name](steps)
    training.advance()
    if training.rank == 0:
        print(f"first step done at {time.time()}", flush=True)
    for _ in range(steps - 1):
        training.advance()
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(sys.argv[1], int(sys.argv[2]))
