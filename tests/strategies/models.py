"""Small plain models that know nothing of strategies, trials over them, and rows of tests.

Also what several tests measure and check: refusals, and bytes of tensors.
"""

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

VOCABULARY = 30
WIDTH = 16
HEADS = 4
SEQUENCE = 8
BATCH = 8

CPU = torch.device("cpu")
DDP = Row("ddp", 2)
FSDP = Row("fsdp", 2)
TENSOR = Row("tensor", 2)
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
BF16 = {"precision": "bf16"}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

GPT_PLAN = {
    "embed": "embedding",
    "norm": "sequence",
    "head": "head",
    "blocks.*.norm1": "sequence",
    "blocks.*.norm2": "sequence",
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
}
"""The tensor plan of a PlainGPT."""


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self._by_head(self.q(y))
        k = self._by_head(self.k(y))
        v = self._by_head(self.v(y))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, D / H), whatever part of the heads a worker has."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class PlainGPT(nn.Module):
    """A small GPT. Neither its vocabulary nor its hidden width divides evenly by 2 and 4."""

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


# --- checks and measurements ----------------------------------------------------------------------


def assert_refused(
    words: list[str], function: Callable[..., object], *args: Any, **kwargs: Any
) -> None:
    """Check that a call ends in one sentence with all these words."""
    with pytest.raises(LayoutError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@contextlib.contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps for the backward of what is computed meanwhile."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def storage_bytes(tensors: Iterable[Tensor], excluding: Iterable[Tensor] = ()) -> int:
    """The bytes of the distinct storages behind the local parts of tensors.

    Args:
        tensors: The tensors.
        excluding: Tensors whose storages are not counted.
    """
    excluded = {_local(tensor).untyped_storage().data_ptr() for tensor in excluding}
    sizes = {}
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if _local(tensor).numel() and storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


# --- trials ---------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> Callable[[], nn.Module]:
    """A function that makes the same model in every call."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


def language_batch(step: int) -> tuple[Tensor, Tensor]:
    """Arithmetic sequences of tokens, and what follows each token."""
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
        context_plan=ContextPlan(lambda positions: {}),  # the model has no positions
        **changes,
    )


EXPERTS = 8
TOP_K = 2
EXPERT_WIDTH = 16
MIXTURE_LAYERS = 2


def mixture() -> nn.Module:
    return MixtureGPT(
        32,
        d_model=EXPERT_WIDTH,
        n_heads=4,
        n_layers=MIXTURE_LAYERS,
        d_expert=24,
        n_experts=EXPERTS,
        top_k=TOP_K,
        balance_weight=0.1,
        bias_rate=0.01,
    )


def mixture_trial(**changes: Any) -> Trial:
    return Trial(
        build=seeded(mixture),
        loss=lambda model, batch: model(*batch),
        batch=language_batch,
        tensor_plan=MIXTURE_PLAN,
        **changes,
    )


def masked_batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences of which some labels do not count.

    In every second one only the first few count, which belong to one worker in any order.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 29, (BATCH, 33), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1::2, 5:] = -100
    targets[::2, 20:23] = -100
    return tokens[:, :-1], targets


def masked_trial(**changes: Any) -> Trial:
    """A GPT with rotary embeddings, whose loss is the mean over the labels that count."""
    return Trial(
        build=seeded(lambda: GPT(29, d_model=16, n_layers=2, n_heads=4, tie_weights=True)),
        loss=language_loss,
        batch=masked_batch,
        items=lambda batch: (batch[1] >= 0).sum(),
        tensor_plan=gpt.TENSOR_PLAN,
        heads=4,
        **changes,
    )


class FunctionalTie(nn.Module):
    """Reads its embedding's weight itself, and has tensors in every place of a module.

    These are a parameter, buffers that are saved or not, and a plain attribute.
    """

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
    """A language model with an LSTM, which keeps a second list of its parameters."""

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
        self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Stages of blocks, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3)
    )


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

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())


ZOO: dict[str, Trial] = {
    "functional tie": Trial(seeded(FunctionalTie), language_loss, language_batch, steps=2),
    "recurrent": Trial(seeded(Recurrent), language_loss, language_batch, steps=2),
    "residual": Trial(seeded(SmallResNet), classifier_loss, image_batch, steps=2),
    "mlp": Trial(seeded(mlp), classifier_loss, vector_batch, steps=2),
}
"""Models written without a look at our documentation."""
LLAMA = Trial(seeded(llama), llama_loss, language_batch, steps=2)

# --- rows -----------------------------------------------------------------------------------------

_COVERED_BY_OTHERS = (
    "zero1+tensor",
    "zero2+tensor",
    "zero1+context",
    "zero2+context",
    "zero3",
    "zero1+expert",
    "zero2+expert",
    "hsdp+expert",
    "ddp+tensor+expert",
    "ddp+tensor",
    "tensor+pipeline",
    "fsdp+pipeline",  # tests/strategies/test_parallelize.py trains it
    "fsdp+tensor+expert",
    "fsdp+pipeline+expert",
    "ddp+pipeline+expert",
    "pipeline+context",
    "tensor+context",
    "ddp+context",
    "fsdp+context+expert",
)
"""Strategies that do what other rows try in pairs, or what zero1 and zero2 try alone."""
_FAST_WIDE_ROWS = ("pipeline (pp 4) zb_h2",)


def _row_params() -> list[Any]:
    """All rows of the parity matrix. Those that repeat another row's way are slow."""
    first_rows: dict[str, Row] = {}
    for row in (*ROWS, *MIXTURES):
        if row.name not in _COVERED_BY_OTHERS:
            first_rows.setdefault(row.name, row)
    params = []
    for row in (*ROWS, *MIXTURES, *MIXTURES_OF_MORE_DIMENSIONS):
        is_fast = row in first_rows.values() or str(row) in _FAST_WIDE_ROWS
        marks = [] if is_fast else [pytest.mark.slow]
        params.append(pytest.param(row, id=str(row), marks=marks))
    return params


ROW_PARAMS = _row_params()
