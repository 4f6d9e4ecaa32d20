"""Small plain models, written as somebody would who never heard of strategies, trials over them, what rows of tests ask
for, refusals, bytes."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models import gpt
from app.models.gpt import GPT
from app.models.mixture import TENSOR_PLAN as MIXTURE_PLAN
from app.models.mixture import MixtureGPT
from experiments.parity.curves import Trial
from experiments.parity.rows import MIXTURES, MIXTURES_OF_MORE_DIMENSIONS, ROWS, Row
from strategies.context.apply import ContextPlan
from strategies.layout import LayoutError

VOCABULARY, WIDTH, HEADS, SEQUENCE, BATCH = 30, 16, 4, 8, 8

CPU = torch.device("cpu")
DDP, FSDP, TENSOR = (Row(name, 2) for name in ("ddp", "fsdp", "tensor"))
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
BF16 = {"precision": "bf16"}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

GPT_PLAN = {"embed": "embedding", "norm": "sequence", "head": "head"}
for _style, _names in (("sequence", "norm1 norm2"), ("colwise", "q k v up"), ("rowwise", "out down")):
    GPT_PLAN |= {f"blocks.*.{_name}": _style for _name in _names.split()}


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


def assert_refused(words: list[str], function: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """The call ends in one sentence that has all these words."""
    with pytest.raises(LayoutError) as caught:
        function(*arguments, **named)
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said


@contextlib.contextmanager
def saved() -> Iterator[list[Tensor]]:
    """What is kept for backward of what is computed under it."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        yield kept


def stored(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages behind these tensors' local parts, but for those behind others."""
    own, others = ([getattr(t, "_local_tensor", t) for t in some] for some in (tensors, but))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if t.numel()}
    return sum(size for place, size in sizes.items() if place not in {t.untyped_storage().data_ptr() for t in others})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def gpt_trial(tied: bool = False, plan: bool = True, layers: int = 4, **changes: Any) -> Trial:
    return Trial(
        build=seeded(lambda: PlainGPT(tied, layers)),
        loss=language_loss,
        batch=language_batch,
        tensor_plan=GPT_PLAN if plan else None,
        context_plan=ContextPlan(lambda places: {}),  # it has no positions
        **changes,
    )


EXPERTS, TOP_K, EXPERT_WIDTH, MIXTURE_LAYERS = 8, 2, 16, 2


def mixture() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": EXPERT_WIDTH, "n_heads": 4, "n_layers": MIXTURE_LAYERS, "d_expert": 24}
    return MixtureGPT(32, **sizes, n_experts=EXPERTS, top_k=TOP_K, balance_weight=0.1, bias_rate=0.01)


def mixture_trial(**changes: Any) -> Trial:
    return Trial(
        seeded(mixture), lambda model, batch: model(*batch), language_batch, tensor_plan=MIXTURE_PLAN, **changes
    )


def masked_batch(step: int) -> tuple[Tensor, Tensor]:
    """In every second sequence only the first labels count, which in any order are one worker's."""
    tokens = torch.randint(0, 29, (BATCH, 33), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[1::2, 5:] = -100
    targets[::2, 20:23] = -100
    return tokens[:, :-1], targets


def masked_trial(**changes: Any) -> Trial:
    """Its rotary embeddings turn by the place in the sequence, and its loss is the mean of the labels that count."""
    return Trial(
        seeded(lambda: GPT(29, d_model=16, n_layers=2, n_heads=4, tie_weights=True)),
        language_loss,
        masked_batch,
        items=lambda batch: (batch[1] >= 0).sum(),
        tensor_plan=gpt.TENSOR_PLAN,
        heads=4,
        **changes,
    )


class FunctionalTie(nn.Module):
    """Reads its embedding's table with its own hands, and owns a bare parameter and tensors in every place a module can
    keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(SEQUENCE, WIDTH))
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)
        self.register_buffer("count", torch.arange(3))
        self.plain = torch.randn(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.table + self.plain * self.count[1]
        x = self.layers(x + self.position[: tokens.shape[1]])
        return F.linear(x, self.embed.weight)


class Recurrent(nn.Module):
    """An LSTM keeps a second list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.GroupNorm(2, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Stages of blocks, as torchvision has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3))


def vector_batch(step: int) -> tuple[Tensor, Tensor]:
    x = random(BATCH, 7, seed=2000 + step)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long()


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    x = random(BATCH, 3, 6, 6, seed=3000 + step)
    return x, x.mean((2, 3)).argmax(1)


def classifier_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32, use_cache=False))


def llama_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())


ZOO: dict[str, Trial] = {
    "functional tie": Trial(seeded(FunctionalTie), language_loss, language_batch, steps=2),
    "recurrent": Trial(seeded(Recurrent), language_loss, language_batch, steps=2),
    "residual": Trial(seeded(SmallResNet), classifier_loss, image_batch, steps=2),
    "mlp": Trial(seeded(mlp), classifier_loss, vector_batch, steps=2),
}
"""Models by people who never read our docs."""
LLAMA = Trial(seeded(llama), llama_loss, language_batch, steps=2)

LIKE_OTHERS = ("zero1+tensor", "zero2+tensor", "zero1+context", "zero2+context", "zero3")
LIKE_OTHERS += ("zero1+expert", "zero2+expert", "hsdp+expert", "ddp+tensor+expert", "tensor+pipeline")
LIKE_OTHERS += ("fsdp+tensor+expert", "fsdp+pipeline+expert", "ddp+pipeline+expert")
LIKE_OTHERS += ("pipeline+context", "tensor+context")
"""They differ from ddp's and fsdp's in what zero1 and zero2 do alone, or put together what others try in pairs."""
FIRST = {row.name: row for row in reversed((*ROWS, *MIXTURES)) if row.name not in LIKE_OTHERS}.values()
WIDER = ("pipeline (pp 4) zb_h2", "context (cp 4) ring")
EVERY = [
    pytest.param(row, id=str(row), marks=[pytest.mark.slow] * (row not in FIRST and str(row) not in WIDER))
    for row in (*ROWS, *MIXTURES, *MIXTURES_OF_MORE_DIMENSIONS)
]
"""All rows; slow are those that take another one's way."""
