"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

Each token is computed by the k of E experts that a router scores highest, and by a shared expert if there is one
(Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; Dai et al. 2024, https://arxiv.org/abs/2401.06066):

    p = softmax(x·G)     chosen = the k largest of p + b     y = shared(x) + Σ over chosen  pₑ/Σp · expertₑ(x)

No expert has a capacity, so no token is dropped. Two ways to keep experts evenly used, together or alone; both go by
`load` f, the share of all choices that each expert had in the *last* step's global batch:

- `bias_rate` u: b ← b + u·sign(1/E - f) after each step, without a loss (Wang et al. 2024,
  https://arxiv.org/abs/2408.15664; DeepSeek-V3). b decides who is chosen, not how much an expert counts.
- `balance_weight` α: the loss gains α times the mean over layers of E·Σₑ fₑ·Pₑ, P the mean of p over tokens (Fedus et
  al. 2021, https://arxiv.org/abs/2101.03961, equation 4). There f is the batch's own; but f has no gradient, it only
  weighs P's, and the batch's own is not known before its last micro-batch on the last worker has been routed. With the
  last step's the loss is a mean over tokens, like any other: the same however the batch is divided.

Attention, norms and shapes are those of gpt.py; E experts of hidden width F.
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

TENSOR_PLAN = {key: value for key, value in gpt.TENSOR_PLAN.items() if ".mlp." not in key} | {
    "blocks.*.mlp.router.gate": "colwise_gather",
    "blocks.*.mlp.experts": "experts",
    "blocks.*.mlp.shared.gate": "colwise",
    "blocks.*.mlp.shared.up": "colwise",
    "blocks.*.mlp.shared.down": "rowwise",
}
"""How tensor parallelism splits a MixtureGPT (strategies/tensor/plan.py), with `shared` where it has one."""

OPTIONS = ("n_experts", "top_k", "d_expert", "d_shared", "balance_weight", "bias_rate")
"""Arguments of MixtureGPT that a GPT has not."""


class Router(nn.Module):
    """(…, D) → the scores' logarithms before softmax (…, E), weights (…, k), which experts (…, k) int64."""

    bias: Tensor
    load: Tensor

    def __init__(self, d_model: int, n_experts: int, top_k: int, bias_rate: float) -> None:
        super().__init__()
        self.top_k, self.bias_rate = top_k, bias_rate
        self.gate = gpt.undrawn(nn.Linear, d_model, n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.full((n_experts,), 1 / n_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        scores = logits.float().softmax(-1)
        index = (scores + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    def balance(self, logits: Tensor) -> Tensor:
        """E·Σ f·P, 0-dimensional; 1 where either is even."""
        mean = logits.float().softmax(-1).flatten(0, -2).mean(0)
        return self.load.numel() * (self.load * mean).sum()

    @torch.no_grad()
    def update(self, load: Tensor) -> None:
        """After a step. load: (E,), each expert's share of the choices in its global batch."""
        self.bias.add_(torch.sign(1 / load.numel() - load), alpha=self.bias_rate)
        self.load.copy_(load)


class Experts(nn.Module):
    """E SwiGLU feed-forwards: (…, D), weights and indices (…, k) of each token's experts → (…, D)."""

    def __init__(self, d_model: int, n_experts: int, d_expert: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(n_experts, d_expert, d_model)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_expert))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
        gate, up, down = (t.to(product_dtype(x)) for t in (self.gate, self.up, self.down))

        def compute(rows: Tensor, ends: Tensor) -> Tensor:
            hidden = F.silu(grouped_linear(rows, gate, ends)) * grouped_linear(rows, up, ends)
            return grouped_linear(hidden, down, ends)

        return by_expert(compute, x, index, weights, gate.size(0))


class Mixture(nn.Module):
    """A router, its experts, and a shared one: (B, T, D) to (B, T, D) and the router's balance."""

    def __init__(
        self, d_model: int, n_experts: int, top_k: int, d_expert: int, d_shared: int, bias_rate: float
    ) -> None:
        super().__init__()
        self.router = Router(d_model, n_experts, top_k, bias_rate)
        self.experts = Experts(d_model, n_experts, d_expert)
        self.shared = gpt.FeedForward(d_model, d_shared) if d_shared else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        logits, weights, index = self.router(x_BTD)
        y_BTD = self.experts(x_BTD, index, weights)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), self.router.balance(logits)


class Block(nn.Module):
    """Attention, then the mixture, each on the normalised input and added to it: (B, T, D) to (B, T, D). The routers'
    balances are added up on the way, so that a pipeline's last stage has the sum."""

    def __init__(self, d_model: int, n_heads: int, dropout: float, mlp: Mixture) -> None:
        super().__init__()
        self.attn_norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.attn = Attention(d_model, n_heads, dropout)
        self.mlp_norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, balance: Tensor, rotary_2TK: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD), rotary_2TK))
        y_BTD, own = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + self.dropout(y_BTD), balance + own


class MixtureGPT(nn.Module):
    """Token numbers (B, T), int64, to the logits of each next token (B, T, V).

    Otherwise as a GPT, but for what it answers when it is called with the next tokens (B, T) too: the loss that is
    trained, their mean and the balance's; linear: without ever holding all logits, where `has_own_head`. n_experts: E.
    top_k: k. d_expert: F; d_shared: of the shared expert, 0 for none (both default to a GPT's feed-forward over k).
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
            raise UserError(f"d_model {d_model} cannot be split into {n_heads} heads of an even size")
        if not 1 <= top_k <= n_experts:
            raise UserError(
                f"top_k is {top_k}, but there are {n_experts} experts to choose from: write 1 to {n_experts}"
            )
        usual = 64 * math.ceil(8 * d_model / 3 / 64 / top_k)
        d_expert, d_shared = d_expert or usual, usual if d_shared is None else d_shared
        self.tied, self.balance_weight, self.residual_in_fp32 = tie_weights, balance_weight, residual_in_fp32
        self.head_dim = d_model // n_heads
        self.embed = gpt.undrawn(nn.Embedding, vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleDict(
            {
                str(i): Block(
                    d_model, n_heads, dropout, Mixture(d_model, n_experts, top_k, d_expert, d_shared, bias_rate)
                )
                for i in range(n_layers)
            }
        )
        self.norm = gpt.RMSNorm(d_model, eps=NORM_EPS)
        self.head = gpt.undrawn(nn.Linear, d_model, vocab_size, bias=False)
        for name, parameter in self.named_parameters():  # as in gpt.py
            if parameter.dim() > 1:
                ends_branch = name.rsplit(".weight", 1)[0].endswith(("attn.out", ".down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layers) if ends_branch else 0.02)
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
        x_BTD = self.dropout(self.embed(tokens_BT))
        balance = x_BTD.new_zeros((), dtype=torch.float32)
        if not self.residual_in_fp32:
            x_BTD = x_BTD.to(product_dtype(x_BTD))
        rotary_2TK = gpt.rotary(tokens_BT, self.head_dim, position_ids)
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
        """Whether the head is a whole linear layer here, as GPT.has_own_head."""
        return gpt.GPT.has_own_head.fget(self)  # type: ignore[attr-defined]

    def tie_weights(self) -> None:
        """With tie_weights=True: let the head use the embedding's table (Press and Wolf 2017)."""
        if self.tied:
            self.head.weight = self.embed.weight
