"""A GPT as the benchmarks of one GPU train it: its shapes, and its training written by hand.

By hand means in plain PyTorch, as torchtitan has it: float32 parameters under autocast, each block
compiled, scaled dot product attention, fused AdamW, the loss over all logits compiled, gradients
clipped, tokens already on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.models.gpt import GPT
from app.training.flops import transformer_flops


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT, and what it is trained on in a step.

    Attributes:
        d_model: The width of the model.
        n_layers: The number of blocks.
        n_heads: The number of heads.
        sequence_length: The tokens of a sequence.
        batch: The sequences of a micro-batch.
        micro_batches: The micro-batches of a step.
        vocab_size: The size of the vocabulary.
    """

    d_model: int
    n_layers: int
    n_heads: int
    sequence_length: int
    batch: int
    micro_batches: int = 1
    vocab_size: int = 50304

    def model(self) -> dict[str, int]:
        """The arguments of the model, without its vocabulary."""
        return {"d_model": self.d_model, "n_layers": self.n_layers, "n_heads": self.n_heads}

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.micro_batches * self.sequence_length

    def flops(self, parameters: int) -> float:
        """Floating-point operations of a step, forward and backward.

        Args:
            parameters: The number of parameters without the embedding.
        """
        per_token = transformer_flops(parameters, self.n_layers, self.d_model, self.sequence_length)
        return self.tokens * per_token


SHAPES = {
    "124m": Shape(d_model=768, n_layers=12, n_heads=12, sequence_length=1024, batch=32),
    "1.3b": Shape(
        d_model=2048,
        n_layers=24,
        n_heads=16,
        sequence_length=2048,
        batch=8,
        micro_batches=2,
    ),
    "tiny": Shape(
        d_model=64,
        n_layers=2,
        n_heads=2,
        sequence_length=64,
        batch=4,
        vocab_size=256,
    ),
}

NARROW = {"residual_in_fp32": False}
FUSED = {"fused_projections": True}
OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "residual_in_fp32=false": NARROW,
    "fused_projections=true": FUSED,
    "both": NARROW | FUSED,
}
"""Options of a GPT that make its steps faster in bf16.

They are not the default, because they round differently.
"""


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


class ByHand:
    """A training by hand, which is advanced one step at a time.

    Args:
        shape: What is trained.
        tokens: (samples, T + 1), int64, on the device.
        compiled: Whether blocks and loss are compiled.
    """

    def __init__(self, shape: Shape, tokens: torch.Tensor, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.tokens = tokens
        self.device = tokens.device
        with torch.device(self.device):
            self.model = GPT(vocab_size=shape.vocab_size, **shape.model())  # type: ignore[arg-type]
        self.loss: Callable[..., torch.Tensor] = _cross_entropy
        if compiled:
            for block in self.model.blocks.values():
                block.compile()
            self.loss = torch.compile(_cross_entropy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True
        )
        self.micro_batches_done = 0

    def advance(self) -> None:
        """Trains for one step."""
        shape = self.shape
        for _ in range(shape.micro_batches):
            start = self.micro_batches_done * shape.batch % (len(self.tokens) - shape.batch)
            rows = self.tokens[start : start + shape.batch]
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(rows[:, :-1])
                loss = self.loss(logits.flatten(0, 1), rows[:, 1:].flatten())
            del logits  # backward needs its memory
            (loss / shape.micro_batches).backward()
            self.micro_batches_done += 1
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
