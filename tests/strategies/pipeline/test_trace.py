"""Models that know nothing of pipelines, whose blocks are a chain, more or less; and what those that are not get."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.parity.curves import Trial
from strategies.blocks import find_blocks
from strategies.options import Options
from strategies.parallel import Loss
from strategies.pipeline.apply import plan_stages
from strategies.pipeline.stage import Stage
from tests.strategies import models
from tests.strategies.models import CPU, HEADS, VOCABULARY, WIDTH, Block, PlainGPT, assert_refused, language_loss

pytestmark = pytest.mark.pure


class Skips(nn.Module):
    """Values that skip ahead of blocks: the embedding to every block and the head, a block's output to a later one's
    input; and a bare parameter that several stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.mix = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x + kept.pop() if i >= 2 else x) * self.mix[i] + 0.1 * first
            kept += [x] if i < 2 else []
        return self.head(x + first)


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, state: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        x = state["x"] + torch.tanh(self.linear(self.norm(state["x"]))) * scale
        return {"x": x, "extra": state["extra"] + x.pow(2).mean(), "depth": state["depth"] + 1, "nothing": None}


class Dicts(nn.Module):
    """Blocks that take and return a dict, and a mask made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 16)
        self.blocks = nn.ModuleList(DictBlock() for _ in range(4))
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.inner(x), "extra": x.new_zeros(()), "depth": 0, "nothing": None}
        mask = (x.abs().mean(-1, keepdim=True) > 0.7).float()
        for block in self.blocks:
            state = block(state, scale=mask)
        return self.outer(state["x"]) + 0.01 * state["extra"] * state["depth"]


def norms() -> nn.Module:
    """Nothing but layers, of which some keep running statistics."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(7, 3))


class Routed(Block):
    """Looks at its activations' numbers to choose what a layer is given, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        rows = torch.nonzero(x.sum(-1) > 0, as_tuple=True)
        return x.index_put(rows, self.expert(x[rows]), accumulate=True) if rows[0].numel() > 0 else x


class Experts(PlainGPT):
    def __init__(self) -> None:
        super().__init__(False, 4)
        self.blocks = nn.ModuleList(Routed() for _ in range(4))


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    """Chooses by numbers, in the data and in the logits."""
    tokens, targets = batch
    logits = model(tokens)
    kept = targets != 3
    assert bool(torch.isfinite(logits).all())
    return nn.functional.cross_entropy(logits[kept], targets[kept], reduction="sum") / targets.numel()


def t5() -> nn.Module:
    """Encoder and decoder: one table read at three places, the encoder's output read by every decoder block."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    )


def frozen() -> nn.Module:
    """Nothing before the second block is trained."""
    model = PlainGPT(False, 4)
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    return model


def translation_loss(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch[0] % 7 != 0).long()
    return model(input_ids=batch[0], attention_mask=mask, labels=batch[1].contiguous(), use_cache=False).loss


CHAINS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[int], Any]]] = {
    "t5": (t5, translation_loss, models.language_batch),
    "skips": (Skips, language_loss, models.language_batch),
    "dicts": (Dicts, models.classifier_loss, models.vector_batch),
    "resnet": (models.SmallResNet, models.classifier_loss, models.image_batch),
    "experts": (Experts, masked_loss, models.language_batch),
    "frozen": (frozen, language_loss, models.language_batch),
    "norms": (norms, models.classifier_loss, models.vector_batch),
}


def chain_trial(name: str) -> Trial:
    build, loss, batch = CHAINS[name]
    return Trial(models.seeded(build), loss, batch, steps=2, micro_batches=4, clip=0.5)


# --- what a trace finds --------------------------------------------------------------------------------------------


def _cut(model: nn.Module, **options: Any) -> Any:
    example = (language_loss, models.language_batch(0))
    plan = plan_stages(model, find_blocks(model), Options(**options), stages=2, example=example, device=CPU)
    return plan.assignment


def test_only_what_later_stages_need_is_sent() -> None:
    plain, skips = _cut(PlainGPT(True, 4), stages=(2, 2)), _cut(Skips(), stages=(2, 2))
    assert plain.sends == (("blocks.1",),) and skips.sends == (("embed", "blocks.0", "blocks.1"),)
    assert plain.owners["embed.weight"] == {0, 1} and plain.owners["norm.weight"] == {1}
    assert skips.owners["mix"] == {0, 1} and skips.owners["embed.weight"] == {0}


def test_head_and_embedding_weigh_in_the_cut() -> None:
    wide = PlainGPT(False, 6)
    wide.head = nn.Linear(WIDTH, 500, bias=False)
    assert _cut(wide).sizes[0] > 3 and _cut(PlainGPT(False, 6)).sizes == (3, 3)


# --- what bad models get --------------------------------------------------------------------------------------------


class Bent(PlainGPT):
    """Does with the embedded tokens what `way` says."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.way(self.blocks, self.embed(tokens))))


def iterators() -> nn.Module:
    model = PlainGPT()
    model.blocks[0].forward = lambda x: iter([x])  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            Bent(lambda b, x: b[0](x) + b[1](x)),
            "blocks.1 does not use what blocks.0 puts out, it branches at its input",
        ),
        (Bent(lambda b, x: b[1](b[0](b[0](x)))), "calls its block blocks.0 twice"),
        (Bent(lambda b, x: b[0](x) if x.norm() > 1 else x), "looks at numbers that come from embed"),
        (Bent(lambda b, x: b[0](x)), "never calls its block blocks.1"),
        (iterators(), "block blocks.0 returns a list_iterator, which cannot be sent"),
        (nn.Linear(7, 3), "no repeating blocks, "),
    ],
)
def test_models_that_are_no_chain(model: nn.Module, sentence: str) -> None:
    assert_refused([sentence], _cut, model)


def test_a_block_that_returns_other_than_it_was_taken_to_is_named() -> None:
    model, batch = Experts(), models.language_batch(0)
    first, forward = model.blocks[0], model.blocks[0].forward
    first.forward = lambda x: (forward(x), x)  # type: ignore[assignment]
    blocks = find_blocks(model)
    example = (language_loss, batch)
    plan = plan_stages(model, blocks, Options(), stages=2, example=example, device=CPU)
    stage = Stage(model, blocks, assignment=plan.assignment, tracer=plan.tracer, parts=[0])
    placeholders = stage.placeholders(stage.signature(batch), language_loss, batch)
    words = ["the block blocks.0 looks at numbers (", "but it returns a tuple: let it"]
    run = functools.partial(stage.run, placeholders=placeholders, inputs=[])
    assert_refused(words, run, 0, language_loss, batch)
