"""Dropout over tensor-parallel workers.

Workers draw the same masks for what all of them have, and different masks for what is split.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.parallelize import Options, choose, parallelize
from strategies.seeding import seed_generators
from tests.pool import run_distributed
from tests.strategies.models import CPU, language_loss, seeded

pytestmark = pytest.mark.alone

VOCABULARY = 20
WIDTH = 16
HEADS = 4
SEQUENCE = 16
ROWS = 8
PLAN = {
    "embed": "embedding",
    "norm": "sequence",
    "head": "head",
    "blocks.*.norm1": "sequence",
    "blocks.*.norm2": "sequence",
    "blocks.*.drop": "sequence",
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
}

ALONG_SEQUENCE = ("embedding", "entering", "after rowwise", "noise")
"""Names of masks that are split along the sequence, if it is split."""
SPLIT = ("attention", "between")
"""Names of masks that are split over heads or hidden features."""
WHOLE = ("logits", "depth")
"""Names of masks that all tensor-parallel workers have."""


# --- a model that records what it draws -----------------------------------------------------------

recorded_masks: dict[str, list[Tensor]] = {}
"""What each random operation has kept, in the order of its calls."""


def record_mask(name: str, mask: Tensor) -> None:
    recorded_masks.setdefault(name, []).append(mask.detach())


def recorded_dropout(name: str, x: Tensor, p: float) -> Tensor:
    """Dropout by a function, as the code of a model may call it."""
    mask = F.dropout(torch.ones_like(x), p, training=True)
    record_mask(name, mask != 0)
    return x * mask


class Block(nn.Module):
    """A transformer block with every kind of random operation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(p)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = recorded_dropout("entering", x, self.p / 2)
        attended = self._attention(self.norm1(x)).transpose(1, 2).flatten(2)
        x = x + recorded_dropout("after rowwise", self.out(attended), self.p)
        hidden = F.gelu(recorded_dropout("between", self.up(self.norm2(x)), self.p))
        x = x + self.drop(self.down(hidden))
        stochastic_depth = x.new_empty((len(x), 1, 1)).bernoulli_(1 - self.p)
        record_mask("depth", stochastic_depth != 0)
        noise = torch.rand_like(x)
        record_mask("noise", noise > 0.5)
        return x * (0.5 + stochastic_depth) + 0.1 * noise

    def _attention(self, y: Tensor) -> Tensor:
        head_width = WIDTH // HEADS
        q = self.q(y).unflatten(-1, (-1, head_width)).transpose(1, 2)
        k = self.k(y).unflatten(-1, (-1, head_width)).transpose(1, 2)
        v = self.v(y).unflatten(-1, (-1, head_width)).transpose(1, 2)
        # With the identity in place of values, the output shows which weights are dropped.
        identity = torch.eye(k.size(2)).expand(*k.shape[:2], -1, -1)
        identity = identity + 0 * v.sum(-1, keepdim=True)
        weights = F.scaled_dot_product_attention(q, k, identity, dropout_p=self.p)
        record_mask("attention", weights != 0)
        return weights @ v


class RecordingNet(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = recorded_dropout("embedding", self.embed(tokens), self.p)
        for block in self.blocks:
            x = block(x)
        return recorded_dropout("logits", self.head(self.norm(x)) + 0, self.p)


def _was_computed(mask: Tensor) -> bool:
    """Whether a mask has numbers. A pipeline also traces the model, on placeholders."""
    return not mask.is_meta and not getattr(mask, "is_placeholder", False)


def _correlation(mask: Tensor, other: Tensor) -> float:
    masks = torch.stack([mask.flatten(), other.flatten()]).float()
    return float(torch.corrcoef(masks)[0, 1])


def _are_independent(mask: Tensor, other: Tensor) -> bool:
    return abs(_correlation(mask, other)) < 4 / math.sqrt(mask.numel())


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass
class Training:
    """What a rank has after a few steps.

    Attributes:
        masks: The masks of the first step.
        norm: The gradient norm of the last step.
        random_state: The state of the generator that all tensor-parallel workers share.
        replicated: The parameters that are not split.
        weights: The whole model, on rank 0.
    """

    masks: dict[str, list[Tensor]]
    norm: float
    random_state: Tensor
    replicated: dict[str, Tensor]
    weights: dict[str, Tensor]


def _train(
    rank: int, strategy: str, degrees: dict[str, int], steps: int, **options: Any
) -> Training:
    layout = choose(strategy, math.prod(degrees.values()), **degrees)
    dims = layout.dims
    parallel = parallelize(
        seeded(RecordingNet),
        layout,
        Options(**options),
        device=CPU,
        tensor_plan=PLAN,
        example=(language_loss, _batch()) if dims.pp > 1 else None,
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    optimizer = parallel.prepare_optimizer(optimizer)
    data_rank = dims.data_rank(rank)
    inputs, targets = (side.chunk(dims.dp)[data_rank] for side in _batch())
    micro_batch_count = 2 if dims.pp > 1 else 1
    micro_batches = list(
        zip(inputs.chunk(micro_batch_count), targets.chunk(micro_batch_count), strict=True)
    )
    weights = [1 / dims.dp / micro_batch_count] * micro_batch_count
    recorded_masks.clear()
    masks: dict[str, list[Tensor]] = {}
    norm = 0.0
    for step in range(steps):
        seed_generators(100 * step + data_rank, CPU)
        parallel.forward_backward(micro_batches, weights, language_loss)
        if step == 0:
            for name, masks_of_name in recorded_masks.items():
                masks[name] = [mask.clone() for mask in masks_of_name if _was_computed(mask)]
        norm = float(parallel.grad_norm_(None))
        optimizer.step()
        optimizer.zero_grad()
    whole_shapes = {name: p.shape for name, p in RecordingNet().named_parameters()}
    replicated = {}
    for name, parameter in parallel.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.shape == whole_shapes[name]:
            replicated[name] = local.detach()
    return Training(
        masks=masks,
        norm=norm,
        random_state=torch.get_rng_state(),
        replicated=replicated,
        weights=parallel.full_model_state(),
    )


@functools.cache
def _trained_on_two(is_sequence_split: bool, mode: str = "none", steps: int = 3) -> list[Training]:
    """What each of two tensor-parallel workers has, once for all tests that look at it."""
    function = functools.partial(
        _train, sequence_parallel=is_sequence_split, activation_checkpointing=mode
    )
    return run_distributed(function, 2, "tensor", {"tp": 2}, steps)


@pytest.mark.parametrize("is_sequence_split", [True, False])
def test_masks_of_parts_are_independent_and_those_of_wholes_the_same(
    is_sequence_split: bool,
) -> None:
    first, second = _trained_on_two(is_sequence_split)
    for name in (*SPLIT, *ALONG_SEQUENCE):
        for mask, other in zip(first.masks[name], second.masks[name], strict=True):
            if name in SPLIT or is_sequence_split:
                assert _are_independent(mask, other), name
                assert 0.3 < mask.float().mean() < 0.85
            else:
                assert torch.equal(mask, other), name
    for name in WHOLE:
        for mask, other in zip(first.masks[name], second.masks[name], strict=True):
            assert torch.equal(mask, other), name
    first_block_mask, second_block_mask, *_ = first.masks["between"]
    assert not torch.equal(first_block_mask, second_block_mask), "two calls draw the same"


@pytest.mark.parametrize("is_sequence_split", [True, False])
def test_what_all_workers_have_stays_the_same(is_sequence_split: bool) -> None:
    first, second = _trained_on_two(is_sequence_split)
    assert torch.equal(first.random_state, second.random_state)
    assert first.norm == second.norm
    assert first.replicated.keys() == second.replicated.keys()
    for name, value in first.replicated.items():
        assert torch.equal(value, second.replicated[name]), name


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("fsdp+tensor", {"tp": 2, "dp_shard": 2}),
        pytest.param("ddp+tensor", {"tp": 2, "dp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_data_parallel_workers_have_masks_of_their_own(
    strategy: str, degrees: dict[str, int]
) -> None:
    trainings = run_distributed(_train, 4, strategy, degrees, 2)
    for name in (*SPLIT, *ALONG_SEQUENCE):
        for rank, other_rank in ((0, 1), (0, 2), (0, 3), (2, 3)):
            mask = trainings[rank].masks[name][0]
            other = trainings[other_rank].masks[name][0]
            assert _are_independent(mask, other), (name, rank, other_rank)
    for name in WHOLE:
        first, tensor_neighbour, data_neighbour, _ = (
            training.masks[name][0] for training in trainings
        )
        assert torch.equal(first, tensor_neighbour)
        assert not torch.equal(first, data_neighbour)


@pytest.mark.parametrize(
    ("mode", "is_sequence_split"),
    [
        ("full", True),
        ("selective", False),
        pytest.param("full", False, marks=pytest.mark.slow),
        pytest.param("selective", True, marks=pytest.mark.slow),
    ],
)
def test_recomputation_draws_the_same_masks_again(mode: str, is_sequence_split: bool) -> None:
    plain = _trained_on_two(is_sequence_split, steps=2)
    recomputing = _trained_on_two(is_sequence_split, mode, steps=2)
    for name, value in plain[0].weights.items():
        assert torch.allclose(recomputing[0].weights[name], value, atol=1e-6), name
    for plain_training, recomputing_training in zip(plain, recomputing, strict=True):
        for name in SPLIT:
            masks = plain_training.masks[name]
            # Backward recomputes the last block first.
            expected = [*masks, *reversed(masks)]
            pairs = zip(recomputing_training.masks[name], expected, strict=True)
            assert all(torch.equal(mask, other) for mask, other in pairs), name


def test_the_workers_of_each_pipeline_stage_have_masks_of_their_own() -> None:
    trainings = run_distributed(_train, 4, "tensor+pipeline", {"tp": 2, "pp": 2}, 2)
    names_of_blocks = {"entering", "after rowwise", "attention", "between", "noise", "depth"}
    stages = (
        (trainings[0], trainings[1], names_of_blocks | {"embedding"}),
        (trainings[2], trainings[3], names_of_blocks | {"logits"}),
    )
    for first, second, names in stages:
        for name in names:
            assert first.masks[name], name
            for mask, other in zip(first.masks[name], second.masks[name], strict=True):
                if name in WHOLE:
                    assert torch.equal(mask, other), name
                else:
                    assert _are_independent(mask, other), name
        for name, value in first.replicated.items():
            assert torch.equal(value, second.replicated[name]), name
        assert torch.equal(first.random_state, second.random_state)


# --- layers that compute in other ways ------------------------------------------------------------


class DropoutBlock(nn.Module):
    """A block whose dropout is visible in what the block adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


DROPOUT_PLAN = {
    "embed": "embedding",
    "head": "head",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm": "sequence",
    "blocks.*.drop": "sequence",
}


def _masks_of_blocks(rank: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    """The masks of two steps, and the state of the shared generator."""
    parallel = parallelize(
        seeded(DropoutNet),
        choose("tensor", 2),
        Options(**options),
        device=CPU,
        tensor_plan=DROPOUT_PLAN,
    )
    masks: list[Tensor] = []

    def record(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        added = output - inputs[0]
        masks.append(added.detach() != 0)

    for block in parallel.inner.get_submodule("blocks"):
        block.register_forward_hook(record)
    for step in range(2):
        seed_generators(step, CPU)
        parallel.forward_backward([_batch()], [1.0], language_loss)
        parallel.grad_norm_(None)
    return masks, torch.get_rng_state()


@pytest.mark.parametrize(
    "options",
    [
        {"async_tp": True},
        pytest.param({"compile": True, "compile_backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=["sent in pieces", "compiled"],
)
def test_masks_are_independent_however_layers_compute(options: dict[str, Any]) -> None:
    function = functools.partial(_masks_of_blocks, **options)
    (masks, state), (other_masks, other_state) = run_distributed(function, 2)
    assert torch.equal(state, other_state)
    for mask, other in zip(masks, other_masks, strict=True):
        assert 0.3 < mask.float().mean() < 0.7
        assert _are_independent(mask, other)


class PlainNet(nn.Module):
    """What `RecordingNet` computes, without the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        hidden = F.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        x = x + self.drop(self.down(hidden))
        return self.head(self.norm(x))


PLAIN_PLAN = {
    "embed": "embedding",
    "up": "colwise",
    "down": "rowwise",
    "norm": "sequence",
    "head": "head",
}


def _losses_of_draws(rank: int, strategy: str, workers: int, draws: int) -> list[float]:
    """The loss of one batch with different masks.

    One step computes all draws, as copies of the batch: masks of different rows are independent.
    """
    layout = choose(strategy, workers)
    parallel = parallelize(seeded(PlainNet), layout, device=CPU, tensor_plan=PLAIN_PLAN)
    losses: list[float] = []

    def loss_of_copies(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        by_token = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        is_split = hasattr(by_token, "full_tensor")
        losses_of_tokens = by_token.full_tensor() if is_split else by_token
        losses.extend(losses_of_tokens.detach().view(draws, -1).mean(1).tolist())
        return losses_of_tokens.mean()

    inputs, targets = _batch()
    copies = inputs.repeat(draws, 1), targets.repeat(draws, 1)
    seed_generators(0, CPU)
    parallel.forward_backward([copies], [1.0], loss_of_copies)
    return losses


def test_the_expected_loss_and_its_variance_are_those_of_one_device() -> None:
    """If masks were the same in each part, the variance would be nearly twice as large."""
    draws = 300
    single = torch.tensor(_losses_of_draws(0, "single", 1, draws))
    losses_by_rank = run_distributed(_losses_of_draws, 2, "tensor", 2, draws)
    first, second = (torch.tensor(losses) for losses in losses_by_rank)
    assert torch.equal(first, second)
    standard_error = math.sqrt((single.var() + first.var()) / draws)
    assert abs(single.mean() - first.mean()) < 4 * standard_error
    assert 0.75 < float(single.var() / first.var()) < 1 / 0.75


def _is_watched_in_each_step(rank: int, p: float) -> list[bool]:
    """Whether the strategy follows which tensors are split, in each of three micro-batches."""
    parallel = parallelize(
        seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 4))),
        choose("tensor", 2),
        Options(),
        device=CPU,
        tensor_plan={"0": "colwise", "2": "rowwise"},
    )
    is_watched = []

    def loss(model: Any, x: Tensor) -> Tensor:
        def look(*_: Any) -> None:
            is_watched.append(torch.overrides._get_current_function_mode_stack() != [])

        with model[1].register_forward_hook(look):
            return model(x).square().mean()

    for _ in range(3):
        parallel.forward_backward([torch.ones(2, 4)], [1.0], loss)
    return is_watched


def test_a_model_without_random_numbers_is_watched_in_its_first_step_only() -> None:
    assert run_distributed(_is_watched_in_each_step, 2, 0.5) == [[True, True, True]] * 2
    assert run_distributed(_is_watched_in_each_step, 2, 0.0) == [[True, False, False]] * 2
