"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

Each token is computed by the k of E experts that a router scores highest, and by a shared expert if
there is one (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; Dai et al. 2024,
https://arxiv.org/abs/2401.06066):

    p = softmax(x·G)
    chosen = the k largest of p + b
    y = shared(x) + Σ over chosen  pₑ/Σp · expertₑ(x)

Experts have no capacity, so no token is dropped. There are two ways to keep experts evenly used,
which can be combined. Both follow `load` f, each expert's share of all choices in the global batch
of the *last* step:

- `bias_rate` u: b ← b + u·sign(1/E - f) after each step, without a loss (Wang et al. 2024,
  https://arxiv.org/abs/2408.15664; DeepSeek-V3). b decides who is chosen, not how much an expert
  counts.
- `balance_weight` α: the loss gains α times the mean over layers of E·Σₑ fₑ·Pₑ, P the mean of p
  over tokens (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equation 4). In the paper f is
  the batch's own. But f has no gradient, it only weighs that of P, and the batch's own f is not
  known before its last micro-batch on the last worker has been routed. With the f of the last step
  the loss is a mean over tokens, like any other: the same however the batch is divided.

Attention, norms and shapes are those of gpt.py; E experts have the hidden width F.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.errors import UserError
from app.models import gpt
from app.models.cross_entropy import cross_entropy, linear_cross_entropy
from app.models.gpt import NORM_EPS, Attention
from app.models.grouped_linear import by_expert, grouped_linear
from app.models.linear import product_dtype

TENSOR_PLAN = {
    **{key: style for key, style in gpt.TENSOR_PLAN.items() if ".mlp." not in key},
    "blocks.*.mlp.router.gate": "colwise_gather",
    "blocks.*.mlp.experts": "experts",
    "blocks.*.mlp.shared.gate": "colwise",
    "blocks.*.mlp.shared.up": "colwise",
    "blocks.*.mlp.shared.down": "rowwise",
}
"""How tensor parallelism splits a MixtureGPT (strategies/tensor/plan.py).

The entries of `shared` are for models with a shared expert.
"""

OPTIONS = ("n_experts", "top_k", "d_expert", "d_shared", "balance_weight", "bias_rate")
"""Arguments of MixtureGPT that GPT does not have."""


class Router(nn.Module):
    """Chooses the experts of each token.

    Args:
        d_model: D.
        n_experts: E.
        top_k: k.
        bias_rate: u, the step of the bias; 0 for none.

    Attributes:
        bias: (E,), b.
        load: (E,), each expert's share of the choices in the last step's global batch.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, d_model: int, n_experts: int, top_k: int, bias_rate: float) -> None:
        super().__init__()
        self.top_k = top_k
        self.bias_rate = bias_rate
        self.gate = gpt.uninitialized(nn.Linear, d_model, n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.full((n_experts,), 1 / n_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens (…, D).

        Returns:
            (the scores before softmax (…, E), weights (…, k), experts (…, k), int64)
        """
        logits = self.gate(x)
        scores = logits.float().softmax(-1)
        index = (scores + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    def balance(self, logits: Tensor) -> Tensor:
        """E·Σ f·P, 0-dimensional; 1 if either is even."""
        mean_scores = logits.float().softmax(-1).flatten(0, -2).mean(0)
        return self.load.numel() * (self.load * mean_scores).sum()

    @torch.no_grad()
    def update(self, load: Tensor) -> None:
        """Adapt to a step; strategies/expert/router.py calls it.

        Args:
            load: (E,), each expert's share of the choices in the step's global batch.
        """
        self.bias.add_(torch.sign(1 / load.numel() - load), alpha=self.bias_rate)
        self.load.copy_(load)


class Experts(nn.Module):
    """E SwiGLU feed-forwards, each for the tokens that chose it.

    Args:
        d_model: D.
        n_experts: E.
        d_expert: F.
    """

    def __init__(self, d_model: int, n_experts: int, d_expert: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, d_expert, d_model))
        self.up = nn.Parameter(torch.empty(n_experts, d_expert, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_expert))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute tokens (…, D), given the experts and weights (…, k) of each; None weighs 1."""
        dtype = product_dtype(x)
        gate = self.gate.to(dtype)
        up = self.up.to(dtype)
        down = self.down.to(dtype)

        def compute(rows: Tensor, ends: Tensor) -> Tensor:
            hidden = F.silu(grouped_linear(rows, gate, ends)) * grouped_linear(rows, up, ends)
            return grouped_linear(hidden, down, ends)

        return by_expert(compute, x, index=index, weights=weights, experts=gate.size(0))


class Mixture(nn.Module):
    """A router, its experts, and perhaps a shared one: (B, T, D) to (B, T, D) and the balance.

    Args:
        d_model: D.
        n_experts: E.
        top_k: k.
        d_expert: F.
        d_shared: The hidden width of the shared expert; 0 for none.
        bias_rate: u, the step of the router's bias.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int,
        top_k: int,
        d_expert: int,
        d_shared: int,
        bias_rate: float,
    ) -> None:
        super().__init__()
        self.router = Router(d_model, n_experts, top_k, bias_rate)
        self.experts = Experts(d_model, n_experts, d_expert)
        self.shared = gpt.FeedForward(d_model, d_shared) if d_shared else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        logits, weights, index = self.router(x_BTD)
        y_BTD = self.experts(x_BTD, index, weights)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, self.router.balance(logits)


class Block(nn.Module):
    """Attention, then the mixture, each on the normalized input and added to it.

    (B, T, D) to (B, T, D). The routers' balances are added up on the way, so that the last stage of
    a pipeline has their sum.
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float, mlp: Mixture) -> None:
        super().__init__()
        self.attn_norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.attn = Attention(d_model, n_heads, dropout)
        self.mlp_norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, balance: Tensor, rotary_2TK: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD), rotary_2TK))
        y_BTD, block_balance = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + self.dropout(y_BTD), balance + block_balance


class MixtureGPT(nn.Module):
    """Token numbers (B, T), int64, to the logits of each next token (B, T, V).

    If it is also called with the next tokens (B, T), it returns the loss to train: their mean loss
    and the balance.

    Args:
        vocab_size: V.
        d_model: D.
        n_layers: The number of blocks.
        n_heads: H.
        n_experts: E.
        top_k: k.
        d_expert: F; None for the width of a GPT's feed-forward, divided by k.
        d_shared: The hidden width of the shared expert, 0 for none; None for the same as d_expert's
            default.
        balance_weight: α, the weight of the balance in the loss; 0 for none.
        bias_rate: u, the step of the routers' biases; 0 for none.
        tie_weights: Whether the head uses the embedding's table.
        dropout: The probability of dropping a number.
        residual_in_fp32: As for a GPT.
        fused_projections: As for a GPT.

    Raises:
        UserError: The width cannot be split into heads of an even size, or top_k is not possible.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        d_model: int = 256,
        n_layers: int = 4,
        n_heads: int = 4,
        n_experts: int = 8,
        top_k: int = 2,
        d_expert: int | None = None,
        d_shared: int | None = None,
        balance_weight: float = 0.01,
        bias_rate: float = 0.001,
        tie_weights: bool = False,
        dropout: float = 0.0,
        residual_in_fp32: bool = True,
        fused_projections: bool = False,
    ) -> None:
        super().__init__()
        if d_model % n_heads or (d_model // n_heads) % 2:
            raise UserError(
                f"d_model {d_model} cannot be split into {n_heads} heads of an even size"
            )
        if not 1 <= top_k <= n_experts:
            raise UserError(
                f"top_k is {top_k}, but there are {n_experts} experts to choose from: "
                f"write 1 to {n_experts}"
            )
        default_width = 64 * math.ceil(8 * d_model / 3 / 64 / top_k)
        self.tied = tie_weights
        self.balance_weight = balance_weight
        self.residual_in_fp32 = residual_in_fp32
        self.head_dim = d_model // n_heads
        self.embed = gpt.uninitialized(nn.Embedding, vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleDict()
        for i in range(n_layers):
            mixture = Mixture(
                d_model,
                n_experts=n_experts,
                top_k=top_k,
                d_expert=d_expert or default_width,
                d_shared=default_width if d_shared is None else d_shared,
                bias_rate=bias_rate,
            )
            self.blocks[str(i)] = Block(d_model, n_heads, dropout, mixture)
        self.norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.head = gpt.uninitialized(nn.Linear, d_model, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.removesuffix(".weight").endswith(("attn.out", ".down"))
                nn.init.normal_(parameter, std=gpt.init_std(n_layers, ends_branch=ends_branch))
        for module in self.modules():
            if isinstance(module, (Attention, gpt.FeedForward)):
                module.fused = fused_projections
        self.tie_weights()

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        linear: bool = False,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits, or the loss.

        Args:
            tokens_BT: The tokens.
            targets_BT: The next tokens, for the loss.
            linear: Whether the loss is computed without ever holding all logits, which needs
                `has_own_head`.
            position_ids: (1, T), the places of the tokens in their sequence; 0 to T-1 by default.
        """
        x_BTD = self.dropout(self.embed(tokens_BT))
        balance = x_BTD.new_zeros((), dtype=torch.float32)
        if not self.residual_in_fp32:
            x_BTD = x_BTD.to(product_dtype(x_BTD))
        rotary_2TK = gpt.rotary_table(tokens_BT, self.head_dim, position_ids)
        for block in self.blocks.values():
            x_BTD, balance = block(x_BTD, balance, rotary_2TK)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD)
        if linear:
            loss = linear_cross_entropy(x_BTD, self.head.weight, targets_BT)
        else:
            loss = cross_entropy(self.head(x_BTD).flatten(0, 1), targets_BT.flatten())
        return loss + self.balance_weight / len(self.blocks) * balance

    @property
    def has_own_head(self) -> bool:
        """Whether the head is a whole linear layer beside the rest of the model."""
        return gpt.has_plain_head(self, self.head)

    def tie_weights(self) -> None:
        """With tie_weights=True, let the head use the embedding's table (Press and Wolf 2017)."""
        if self.tied:
            self.head.weight = self.embed.weight
