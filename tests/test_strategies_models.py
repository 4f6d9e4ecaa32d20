"""Small plain models, written as somebody would who never heard of strategies, and trials over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.parity import Trial

VOCABULARY, WIDTH, HEADS, SEQUENCE, BATCH = 30, 16, 4, 8, 8

GPT_PLAN = {
    "embed": "embedding",
    "blocks.*.norm1": "sequence",
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.norm2": "sequence",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "sequence",
    "head": "head",
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """Sizes are odd on purpose: neither the vocabulary nor the hidden width divides evenly by 2 and 4."""

    def __init__(self, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


def language_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def gpt_trial(tied: bool = False, plan: bool = True, **changes: Any) -> Trial:
    return Trial(
        build=seeded(lambda: PlainGPT(tied)),
        loss=language_loss,
        batch=language_batch,
        tensor_plan=GPT_PLAN if plan else None,
        **changes,
    )
