"""Models that know nothing of pipelines, whose blocks form a chain, and refusals of others."""

import contextlib
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
from tests.strategies.models import (
    CPU,
    HEADS,
    VOCABULARY,
    WIDTH,
    Block,
    PlainGPT,
    assert_refused,
    language_loss,
)

pytestmark = pytest.mark.pure


class Skips(nn.Module):
    """Has values that skip blocks, and a parameter that several stages read.

    The embedding goes to every block and the head, and the outputs of the first two blocks go to
    the inputs of the last two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.mix = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        x = embedded
        early_outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            block_input = x + early_outputs.pop() if i >= 2 else x
            x = block(block_input) * self.mix[i] + 0.1 * embedded
            if i < 2:
                early_outputs.append(x)
        return self.head(x + embedded)


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, state: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        x = state["x"] + torch.tanh(self.linear(self.norm(state["x"]))) * scale
        return {
            "x": x,
            "extra": state["extra"] + x.pow(2).mean(),
            "depth": state["depth"] + 1,
            "nothing": None,
        }


class Dicts(nn.Module):
    """Has blocks that take and return a dict, and take a mask that is made from the input."""

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
    """A sequence of layers, some of which have running statistics."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(7, 3))


class Routed(Block):
    """Reads numbers of its activations to choose a layer's input, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        rows = torch.nonzero(x.sum(-1) > 0, as_tuple=True)
        if rows[0].numel() == 0:
            return x
        return x.index_put(rows, self.expert(x[rows]), accumulate=True)


class RoutedGPT(PlainGPT):
    def __init__(self) -> None:
        super().__init__(False, 4)
        self.blocks = nn.ModuleList(Routed() for _ in range(4))


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    """Reads numbers of the data and of the logits."""
    tokens, targets = batch
    logits = model(tokens)
    assert bool(torch.isfinite(logits).all())
    counts = targets != 3
    total = nn.functional.cross_entropy(logits[counts], targets[counts], reduction="sum")
    return total / targets.numel()


def t5() -> nn.Module:
    """An encoder and a decoder.

    Three places read one embedding, and every block of the decoder reads the encoder's output.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def frozen() -> nn.Module:
    """A GPT that is trained from its second block on."""
    model = PlainGPT(layers=4)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def translation_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, labels = batch
    attention_mask = (tokens % 7 != 0).long()
    outputs = model(
        input_ids=tokens,
        attention_mask=attention_mask,
        labels=labels.contiguous(),
        use_cache=False,
    )
    return outputs.loss


CHAINS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[int], Any]]] = {
    "t5": (t5, translation_loss, models.language_batch),
    "skips": (Skips, language_loss, models.language_batch),
    "dicts": (Dicts, models.classifier_loss, models.vector_batch),
    "resnet": (models.SmallResNet, models.classifier_loss, models.image_batch),
    "experts": (RoutedGPT, masked_loss, models.language_batch),
    "frozen": (frozen, language_loss, models.language_batch),
    "norms": (norms, models.classifier_loss, models.vector_batch),
}


def chain_trial(name: str) -> Trial:
    build, loss, batch = CHAINS[name]
    return Trial(
        build=models.seeded(build), loss=loss, batch=batch, steps=2, micro_batches=4, clip=0.5
    )


# --- stages ---------------------------------------------------------------------------------------


def _assign_stages(model: nn.Module, **options: Any) -> Any:
    """Divide a model into two stages."""
    example = (language_loss, models.language_batch(0))
    blocks = find_blocks(model)
    plan = plan_stages(model, blocks, Options(**options), stages=2, example=example, device=CPU)
    return plan.assignment


def test_a_stage_sends_only_what_later_stages_need() -> None:
    plain = _assign_stages(PlainGPT(tied=True, layers=4), stages=(2, 2))
    assert plain.sends == (("blocks.1",),)
    assert plain.owners["embed.weight"] == {0, 1}
    assert plain.owners["norm.weight"] == {1}
    skips = _assign_stages(Skips(), stages=(2, 2))
    assert skips.sends == (("embed", "blocks.0", "blocks.1"),)
    assert skips.owners["mix"] == {0, 1}
    assert skips.owners["embed.weight"] == {0}


def test_a_large_head_leaves_fewer_blocks_to_the_last_stage() -> None:
    assert _assign_stages(PlainGPT(layers=6)).sizes == (3, 3)
    wide = PlainGPT(layers=6)
    wide.head = nn.Linear(WIDTH, 500, bias=False)
    assert _assign_stages(wide).sizes[0] > 3


# --- refusals -------------------------------------------------------------------------------------


class GPTWithOtherPath(PlainGPT):
    """A GPT in which `path` says how blocks are called with the embedded tokens."""

    def __init__(self, path: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.path = path

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.path(self.blocks, self.embed(tokens))))


def _block_that_returns_an_iterator() -> nn.Module:
    model = PlainGPT()
    model.blocks[0].forward = lambda x: iter([x])
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            GPTWithOtherPath(lambda blocks, x: blocks[0](x) + blocks[1](x)),
            "blocks.1 does not use the output of blocks.0, it branches at its input",
        ),
        (
            GPTWithOtherPath(lambda blocks, x: blocks[1](blocks[0](blocks[0](x)))),
            "calls its block blocks.0 twice",
        ),
        (
            GPTWithOtherPath(lambda blocks, x: blocks[0](x) if x.norm() > 1 else x),
            "reads values of a tensor that comes from embed",
        ),
        (GPTWithOtherPath(lambda blocks, x: blocks[0](x)), "never calls its block blocks.1"),
        (
            _block_that_returns_an_iterator(),
            "block blocks.0 returns a list_iterator, which cannot be sent",
        ),
        (nn.Linear(7, 3), "no repeating blocks: "),
    ],
)
def test_models_whose_blocks_are_not_a_chain_are_refused(model: nn.Module, sentence: str) -> None:
    assert_refused([sentence], _assign_stages, model)


def test_a_block_that_returns_something_else_than_in_the_trace_is_refused() -> None:
    model = RoutedGPT()
    first_block = model.blocks[0]
    forward = first_block.forward
    first_block.forward = lambda x: (forward(x), x)
    blocks = find_blocks(model)
    batch = models.language_batch(0)
    example = (language_loss, batch)
    plan = plan_stages(model, blocks, Options(), stages=2, example=example, device=CPU)
    stage = Stage(model, blocks, assignment=plan.assignment, tracer=plan.tracer, parts=[0])
    placeholders = stage.placeholders(stage.signature(batch), language_loss, batch)
    words = ["the block blocks.0 reads values of tensors (", "but it returns a tuple: let it"]
    run = functools.partial(
        stage.run,
        placeholders=placeholders,
        inputs=[],
        timed_block=lambda _: contextlib.nullcontext(),
    )
    assert_refused(words, run, 0, language_loss, batch)
