"""A GPT as the benchmarks of one GPU train it: its shapes, and its training written by hand in plain PyTorch.

By hand means as torchtitan has it: float32 parameters under autocast, each block compiled, scaled dot product
attention, fused AdamW, the loss over all logits compiled, gradients clipped, tokens already on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.models.gpt import GPT
from app.training.flops import transformer_flops


@dataclass(frozen=True)
class Shape:
    """A GPT, and how many sequences of how many tokens a step takes: `batch` at once, so many times."""

    d_model: int
    n_layers: int
    n_heads: int
    sequence_length: int
    batch: int
    micro_batches: int = 1
    vocab_size: int = 50304

    def model(self) -> dict[str, int]:
        return {"d_model": self.d_model, "n_layers": self.n_layers, "n_heads": self.n_heads}

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.micro_batches * self.sequence_length

    def flops(self, parameters: int) -> float:
        """Of a step, forward and backward; parameters: without the embedding."""
        return self.tokens * transformer_flops(parameters, self.n_layers, self.d_model, self.sequence_length)


SHAPES = {
    "124m": Shape(768, 12, 12, 1024, 32),
    "1.3b": Shape(2048, 24, 16, 2048, 8, micro_batches=2),
    "tiny": Shape(64, 2, 2, 64, 4, vocab_size=256),
}

NARROW, FUSED = {"residual_in_fp32": False}, {"fused_projections": True}
OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "residual_in_fp32=false": NARROW,
    "fused_projections=true": FUSED,
    "both": NARROW | FUSED,
}
"""Of a GPT: what makes its steps faster in bf16 and is not so by default, as it rounds differently."""


class ByHand:
    """One step at a time; `tokens`: (samples, T + 1), int64, on the device."""

    def __init__(self, shape: Shape, tokens: torch.Tensor, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.shape, self.tokens, self.device = shape, tokens, tokens.device
        with torch.device(self.device):
            self.model = GPT(vocab_size=shape.vocab_size, **shape.model())  # type: ignore[arg-type]
        self.loss: Callable[..., torch.Tensor] = lambda logits, targets: F.cross_entropy(logits.float(), targets)
        if compiled:
            for block in self.model.blocks.values():
                block.compile()
            self.loss = torch.compile(self.loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        self.done = 0

    def advance(self) -> None:
        for _ in range(self.shape.micro_batches):
            begin = self.done * self.shape.batch % (len(self.tokens) - self.shape.batch)
            rows = self.tokens[begin : begin + self.shape.batch]
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(rows[:, :-1])
                loss = self.loss(logits.flatten(0, 1), rows[:, 1:].flatten())
            del logits
            (loss / self.shape.micro_batches).backward()
            self.done += 1
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
