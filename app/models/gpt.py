"""A decoder-only transformer.

It has pre-norm blocks (Radford et al. 2019), rotary position embeddings (Su et al. 2021), RMSNorm
(Zhang and Sennrich 2019), a SwiGLU feed-forward (Shazeer 2020) and no biases in the linear layers:
the shape of LLaMA.

Shapes: B sequences in the batch, T tokens, D model width, H heads of size K, V vocabulary. The
number of heads is read off the projections' output, so that a block with only some of the heads
works unchanged.
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
INIT_STD = 0.02
"""Of GPT-2's weights (Radford et al. 2019)."""
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


def uninitialized(kind: type[nn.Module], *sizes: int, **options: Any) -> Any:
    """A layer with arbitrary weights, for a model that draws all of them itself.

    torch would draw each of them once before, on one thread, which takes as long again (18 s for
    1.3 B parameters). torch.nn.utils.skip_init does the same on a pretended device, for which torch
    imports its compiler: three seconds of a processor, in processes that do nothing else with it.

    Args:
        kind: nn.Linear or nn.Embedding.
        sizes: Its sizes.
        options: More of its arguments.
    """
    layer = _UNDRAWN[kind](*sizes, **options)
    layer.__class__ = kind
    return layer


class _UndrawnLinear(nn.Linear):
    def reset_parameters(self) -> None:
        """Leaves the weights as they are."""


class _UndrawnEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the weights as they are."""


_UNDRAWN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _UndrawnLinear,
    nn.Embedding: _UndrawnEmbedding,
}
"""By a kind of layer, the same whose new weights are not drawn."""


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, T, D) to (B, T, D).

    Args:
        d_model: D.
        n_heads: H.
        dropout: The probability of dropping an attention weight.

    Attributes:
        fused: Whether q, k and v are one operation (linear.py).
        kv_cache: While text is generated, the keys and values (B, H, T, K) of the tokens so far;
            after the first call each call has one token. None if they are not kept.
    """

    fused = False
    kv_cache: list[Tensor] | None = None

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = d_model // n_heads
        self.dropout = dropout
        self.q = uninitialized(nn.Linear, d_model, d_model, bias=False)
        self.k = uninitialized(nn.Linear, d_model, d_model, bias=False)
        self.v = uninitialized(nn.Linear, d_model, d_model, bias=False)
        self.out = uninitialized(nn.Linear, d_model, d_model, bias=False)

    def forward(self, x_BTD: Tensor, rotary_2TK: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = linears(x_BTD, (self.q, self.k, self.v), self.fused)
        q_BTHK = q_BTD.unflatten(-1, (-1, self.head_dim))
        k_BTHK = k_BTD.unflatten(-1, (-1, self.head_dim))
        v_BTHK = v_BTD.unflatten(-1, (-1, self.head_dim))
        # Rotated before heads and tokens are transposed, so that none of the three is copied:
        # attention's kernels read and write heads where they are.
        q_BHTK = apply_rotary(q_BTHK, rotary_2TK).transpose(1, 2)
        k_BHTK = apply_rotary(k_BTHK, rotary_2TK).transpose(1, 2)
        v_BHTK = v_BTHK.transpose(1, 2)
        is_causal = not self.kv_cache  # a single token may attend to all cached ones
        if self.kv_cache is not None:
            if self.kv_cache:
                cached_k_BHTK, cached_v_BHTK = self.kv_cache
                k_BHTK = torch.cat([cached_k_BHTK, k_BHTK], 2)
                v_BHTK = torch.cat([cached_v_BHTK, v_BHTK], 2)
            self.kv_cache = [k_BHTK, v_BHTK]
        attended_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(attended_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), (B, T, D) to (B, T, D).

    Args:
        d_model: D.
        d_hidden: The width of gate and up.

    Attributes:
        fused: Whether gate and up are one operation (linear.py).
    """

    fused = False

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.gate = uninitialized(nn.Linear, d_model, d_hidden, bias=False)
        self.up = uninitialized(nn.Linear, d_model, d_hidden, bias=False)
        self.down = uninitialized(nn.Linear, d_hidden, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = linears(x_BTD, (self.gate, self.up), self.fused)
        return self.down(F.silu(gate) * up)


class RMSNorm(nn.RMSNorm):
    """RMSNorm with the weight cast to the input's type.

    torch has one kernel for equal types, and several operations for different ones. The result is
    of the input's type too. On a GPU, autocast of torch 2.12 and newer would compute and return
    float32, so that 16 bits would not stay 16 bits from block to block.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._normalize(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalized input and added to it.

    (B, T, D) to (B, T, D).
    """

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

    If it is also called with the next tokens (B, T), it returns the mean loss, without ever holding
    all logits; that needs `has_own_head`.

    Args:
        vocab_size: V.
        d_model: D.
        n_layers: The number of blocks.
        n_heads: H.
        d_hidden: The width of the feed-forward; None for two thirds of 4·D.
        tie_weights: Whether the head uses the embedding's table.
        dropout: The probability of dropping a number.
        residual_in_fp32: If False, what flows between blocks has 16 bits under autocast too, as it
            always has if all parameters are cast.
        fused_projections: Whether linear layers of one input are one operation (linear.py).

    Raises:
        UserError: The width cannot be split into heads of an even size.
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
                f"d_model {d_model} cannot be split into {n_heads} heads of an even size "
                "(rotary embeddings turn pairs of numbers); "
                f"write a multiple of {2 * n_heads}"
            )
        if not d_hidden:
            # Two thirds of the usual 4·D, because SwiGLU has three matrices; rounded up so that tp
            # divides it.
            d_hidden = 64 * math.ceil(8 * d_model / 3 / 64)
        self.tied = tie_weights
        self.residual_in_fp32 = residual_in_fp32
        self.head_dim = d_model // n_heads
        self.embed = uninitialized(nn.Embedding, vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleDict(
            {str(i): Block(d_model, n_heads, d_hidden, dropout) for i in range(n_layers)}
        )
        self.norm = RMSNorm(d_model, eps=NORM_EPS)
        self.head = uninitialized(nn.Linear, d_model, vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_branch = name.endswith(("attn.out", "mlp.down"))
                nn.init.normal_(module.weight, std=init_std(n_layers, ends_branch=ends_branch))
            elif isinstance(module, (Attention, FeedForward)):
                module.fused = fused_projections
        self.tie_weights()

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits, or the mean loss.

        Args:
            tokens_BT: The tokens.
            targets_BT: The next tokens, for the loss.
            position_ids: (1, T), the places of the tokens in their sequence; 0 to T-1 by default.
        """
        x_BTD = self.dropout(self.embed(tokens_BT))
        if not self.residual_in_fp32:
            x_BTD = x_BTD.to(product_dtype(x_BTD))
        rotary_2TK = rotary_table(tokens_BT, self.head_dim, position_ids)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, rotary_2TK)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD)
        return linear_cross_entropy(x_BTD, self.head.weight, targets_BT)

    @property
    def has_own_head(self) -> bool:
        """Whether the head is a whole linear layer beside the rest of the model."""
        return has_plain_head(self, self.head)

    def tie_weights(self) -> None:
        """With tie_weights=True, let the head use the embedding's table (Press and Wolf 2017)."""
        if self.tied:
            self.head.weight = self.embed.weight


def has_plain_head(model: nn.Module, head: nn.Module) -> bool:
    """Whether a model's head is a whole linear layer beside the rest of the model.

    It is not if it is split over workers, belongs to a pipeline, or is on another device.
    """
    devices = {parameter.device for parameter in model.parameters()}
    return is_plain(head) and len(devices) == 1


def init_std(n_layers: int, *, ends_branch: bool) -> float:
    """The standard deviation of a weight: GPT-2's, smaller by √(2·layers) at a branch's end."""
    return INIT_STD / math.sqrt(2 * n_layers) if ends_branch else INIT_STD


def rotary_table(tokens_BT: Tensor, head_dim: int, position_ids: Tensor | None = None) -> Tensor:
    """The cosines and sines by which the halves of a head are rotated, (2, T, K/2), float32.

    It is made once in a forward, for all blocks. If each block made it, a compiled block would
    compute a power, a cosine and a sine for every number of q and k, an eighth of a step of 1.3 B
    parameters on an H100 (experiments/LOG.md). It is not a buffer, because a buffer would be lost
    when a model that was built on meta is materialized.

    Args:
        tokens_BT: Only the number of tokens and the device matter.
        head_dim: K.
        position_ids: (1, T), the places of the tokens in their sequence; 0 to T-1 by default.
    """
    half = head_dim // 2
    exponents = torch.arange(half, device=tokens_BT.device, dtype=torch.float32) / half
    if position_ids is None:
        positions = torch.arange(tokens_BT.size(1), device=tokens_BT.device, dtype=torch.float32)
    else:
        positions = position_ids[0].float()
    angles_TK = torch.outer(positions, ROTARY_BASE**-exponents)
    return torch.stack([angles_TK.cos(), angles_TK.sin()])


def apply_rotary(x_BTHK: Tensor, rotary_2TK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of a head's numbers by an angle that grows with the position.

    Args:
        x_BTHK: Queries or keys.
        rotary_2TK: From `rotary_table`.
    """
    cos, sin = rotary_2TK.to(x_BTHK.dtype).unsqueeze(2)  # (T, 1, K/2), the same for all heads
    return _Rotation.apply(x_BTHK, cos, sin)  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """A rotation whose backward rotates the gradient back, and keeps nothing but the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


@one_kernel
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
