"""A decoder-only transformer.

Pre-norm blocks (Radford et al. 2019), rotary position embeddings (Su et al. 2021), RMSNorm (Zhang and Sennrich
2019), a SwiGLU feed-forward (Shazeer 2020), no biases in the linear layers: the shape of LLaMA.

Shapes: B sequences in the batch, T tokens, D model width, H heads of size K, V vocabulary. The number of heads is read
off the projections' output, so a block works unchanged when it holds only some of the heads.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.errors import UserError
from app.models.cross_entropy import linear_cross_entropy
from app.models.linear import is_plain, linears, product_dtype
from app.models.one_kernel import one_kernel

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
TENSOR_PLAN = {
    "embed": "embedding",
    "blocks.*.attn_norm": "sequence",
    "blocks.*.attn.q": "colwise",
    "blocks.*.attn.k": "colwise",
    "blocks.*.attn.v": "colwise",
    "blocks.*.attn.out": "rowwise",
    "blocks.*.mlp_norm": "sequence",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "norm": "sequence",
    "head": "head",
}
"""How tensor parallelism splits a GPT (strategies/tensor/plan.py)."""


def undrawn(kind: type[nn.Module], *sizes: int, **options: Any) -> Any:
    """A layer with arbitrary weights, for a model that draws them all itself: torch would draw each of them once
    before, on one thread, which takes as long again (18 s of 1.3 B parameters)."""
    return nn.utils.skip_init(kind, *sizes, device=torch.get_default_device(), **options)


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, T, D) to (B, T, D)."""

    fused = False
    kept: list[Tensor] | None = None
    """While a text is made, keys and values (B, H, T, K) of the tokens before; after the first call one is given at a
    time. None: they are not kept."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = d_model // n_heads
        self.dropout = dropout
        self.q, self.k, self.v, self.out = (undrawn(nn.Linear, d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor, rotary_2TK: Tensor) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = (
            projected.unflatten(-1, (-1, self.head_dim))
            for projected in linears(x_BTD, (self.q, self.k, self.v), self.fused)
        )
        # Turned before heads and tokens change places, so that the three are never copied: attention's kernels read
        # and write heads where they are.
        q_BHTK, k_BHTK = (rotated(each, rotary_2TK).transpose(1, 2) for each in (q_BTHK, k_BTHK))
        v_BHTK = v_BTHK.transpose(1, 2)
        causal = not self.kept
        if self.kept is not None:
            now = (k_BHTK, v_BHTK)
            k_BHTK, v_BHTK = self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, now)] or [*now]
        dropout = self.dropout if self.training else 0.0
        attended_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=causal, dropout_p=dropout)
        return self.out(attended_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), (B, T, D) to (B, T, D)."""

    fused = False

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.gate = undrawn(nn.Linear, d_model, d_hidden, bias=False)
        self.up = undrawn(nn.Linear, d_model, d_hidden, bias=False)
        self.down = undrawn(nn.Linear, d_hidden, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = linears(x_BTD, (self.gate, self.up), self.fused)
        return self.down(F.silu(gate) * up)


class RMSNorm(nn.RMSNorm):
    """With a weight of the input's type: torch has one kernel for that, and several where the types differ.

    The result is of that type too. On a GPU autocast of torch 2.12 and newer would compute it in float32 and give
    float32 out, so that 16 bits would not stay 16 bits from block to block.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._normalised(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._normalised(x)

    def _normalised(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised input and added to it: (B, T, D) to (B, T, D)."""

    def __init__(self, d_model: int, n_heads: int, d_hidden: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(d_model, eps=NORM_EPS)
        self.attn = Attention(d_model, n_heads, dropout)
        self.mlp_norm = RMSNorm(d_model, eps=NORM_EPS)
        self.mlp = FeedForward(d_model, d_hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, rotary_2TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD), rotary_2TK))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    """Token numbers (B, T), int64, to the logits of each next token (B, T, V).

    Called with the next tokens (B, T) too, where `has_own_head`: to the mean loss, without ever holding all logits.

    residual_in_fp32: False: under autocast what flows between blocks is 16 bits, too, as it always is where all
    parameters are cast. fused_projections: linear layers of one input as one operation (linear.py). position_ids: where
    in their sequence the tokens are, (1, T); 0 to T-1 by default.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        d_model: int = 256,
        n_layers: int = 4,
        n_heads: int = 4,
        d_hidden: int | None = None,
        tie_weights: bool = False,
        dropout: float = 0.0,
        residual_in_fp32: bool = True,
        fused_projections: bool = False,
    ) -> None:
        super().__init__()
        if d_model % n_heads or (d_model // n_heads) % 2:
            raise UserError(
                f"d_model {d_model} cannot be split into {n_heads} heads of an even size (rotary embeddings turn "
                f"pairs of numbers); write a multiple of {2 * n_heads}"
            )
        # Two thirds of the usual 4·D, since SwiGLU has three matrices; rounded up so that tp divides it.
        d_hidden = d_hidden or 64 * math.ceil(8 * d_model / 3 / 64)
        self.tied, self.residual_in_fp32, self.head_dim = tie_weights, residual_in_fp32, d_model // n_heads
        self.embed = undrawn(nn.Embedding, vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleDict({str(i): Block(d_model, n_heads, d_hidden, dropout) for i in range(n_layers)})
        self.norm = RMSNorm(d_model, eps=NORM_EPS)
        self.head = undrawn(nn.Linear, d_model, vocab_size, bias=False)
        for name, module in self.named_modules():  # GPT-2's: smaller by √(2·layers) where a residual branch ends
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_branch = name.endswith(("attn.out", "mlp.down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * n_layers) if ends_branch else 0.02)
            elif isinstance(module, (Attention, FeedForward)):
                module.fused = fused_projections
        self.tie_weights()

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        x_BTD = self.dropout(self.embed(tokens_BT))
        if not self.residual_in_fp32:
            x_BTD = x_BTD.to(product_dtype(x_BTD))
        rotary_2TK = rotary(tokens_BT, self.head_dim, position_ids)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, rotary_2TK)
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD) if targets_BT is None else linear_cross_entropy(x_BTD, self.head.weight, targets_BT)

    @property
    def has_own_head(self) -> bool:
        """Whether the head is a whole linear layer here: not split over workers, a pipeline's, or on another device."""
        return is_plain(self.head) and len({parameter.device for parameter in self.parameters()}) == 1

    def tie_weights(self) -> None:
        """With tie_weights=True: let the head use the embedding's table (Press and Wolf 2017)."""
        if self.tied:
            self.head.weight = self.embed.weight


def rotary(tokens_BT: Tensor, head_dim: int, position_ids: Tensor | None = None) -> Tensor:
    """The cosines and sines by which the halves of a head are turned, (2, T, K/2), float32.

    Made once in a forward, for all blocks: where a block made them itself, a compiled one would compute a power, a
    cosine and a sine again for every number of q and k that it turns, an eighth of a step of 1.3 B parameters on an
    H100 (experiments/LOG.md). They are not kept: a buffer would be lost when a model built on meta is materialised.

    Args:
        tokens_BT: of which only the number of tokens and the device matter.
        head_dim: K.
        position_ids: where in their sequence the tokens are, (1, T); 0 to T-1 by default.
    """
    half = head_dim // 2
    exponents = torch.arange(half, device=tokens_BT.device, dtype=torch.float32) / half
    if position_ids is None:
        positions = torch.arange(tokens_BT.size(1), device=tokens_BT.device, dtype=torch.float32)
    else:
        positions = position_ids[0].float()
    angles_TK = torch.outer(positions, ROTARY_BASE**-exponents)
    return torch.stack([angles_TK.cos(), angles_TK.sin()])


def rotated(x_BTHK: Tensor, rotary_2TK: Tensor) -> Tensor:
    """Turns each pair (i, i + K/2) of a head's numbers by an angle that grows with the token's position."""
    cos, sin = rotary_2TK.to(x_BTHK.dtype).unsqueeze(2)  # (T, 1, K/2), alike for all heads
    return _Rotation.apply(x_BTHK, cos, sin)  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """The same where the model is not compiled. Backward turns the gradient the other way, and nothing but the angles
    is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, -sin), None, None


@one_kernel
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
