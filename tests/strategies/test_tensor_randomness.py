"""Dropout over tensor-parallel workers: alike on what all have, each worker's own on what is split."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.parallel import seed_generators
from strategies.parallelize import Options, choose, parallelize
from tests.pool import run_distributed
from tests.strategies.models import CPU, language_loss, seeded

pytestmark = pytest.mark.alone

VOCABULARY, WIDTH, HEADS, SEQUENCE, ROWS = 20, 16, 4, 16, 8
PLAN = {"embed": "embedding", "norm": "sequence", "head": "head"}
for _style, _names in (("sequence", "norm1 norm2 drop"), ("colwise", "q k v up"), ("rowwise", "out down")):
    PLAN |= {f"blocks.*.{_name}": _style for _name in _names.split()}

seen: dict[str, list[Tensor]] = {}
"""What was kept by each dropout, in the order of its calls."""


def dropped(name: str, x: Tensor, p: float) -> Tensor:
    """x with dropout by a function, as a model's own code has it."""
    mask = F.dropout(torch.ones_like(x), p, training=True)
    seen.setdefault(name, []).append(mask.detach() != 0)
    return x * mask


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.norm1, self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = dropped("entering", x, self.p / 2)
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        # The identity in place of values shows which weights attention has dropped.
        shows = torch.eye(k.size(2)).expand(*k.shape[:2], -1, -1) + 0 * v.sum(-1, keepdim=True)
        weights = F.scaled_dot_product_attention(q, k, shows, dropout_p=self.p)
        seen.setdefault("attention", []).append(weights.detach() != 0)
        x = x + dropped("after rowwise", self.out((weights @ v).transpose(1, 2).flatten(2)), self.p)
        hidden = F.gelu(dropped("between", self.up(self.norm2(x)), self.p))
        x = x + self.drop(self.down(hidden))
        deep = x.new_empty((len(x), 1, 1)).bernoulli_(1 - self.p)  # stochastic depth
        seen.setdefault("depth", []).append(deep.detach() != 0)
        noise = torch.rand_like(x)
        seen.setdefault("noise", []).append(noise.detach() > 0.5)
        return x * (0.5 + deep) + 0.1 * noise


class Net(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = dropped("embedding", self.embed(tokens), self.p)
        for block in self.blocks:
            x = block(x)
        return dropped("logits", self.head(self.norm(x)) + 0, self.p)


def is_real(mask: Tensor) -> bool:
    """Whether it was computed, and not traced by a pipeline that looks at the model."""
    return not mask.is_meta and not getattr(mask, "is_placeholder", False)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def stepped(rank: int, strategy: str, degrees: dict[str, int], steps: int, **options: Any) -> Any:
    """(masks of the first step, gradients, the common stream at the end, weights) of a few steps."""
    world = math.prod(degrees.values()) if degrees else 1
    layout = choose(strategy, world, **degrees)
    example = (language_loss, batch()) if layout.dims.pp > 1 else None
    parallel = parallelize(seeded(Net), layout, Options(**options), device=CPU, tensor_plan=PLAN, example=example)
    optimizer = parallel.prepare_optimizer(torch.optim.AdamW(parallel.parameters(), 1e-2))
    inputs, targets = batch()
    own = layout.dims.data_rank(rank)
    share = ROWS // layout.dims.dp
    part = (inputs[own * share : (own + 1) * share], targets[own * share : (own + 1) * share])
    micro = 1 + (layout.dims.pp > 1)
    parts = list(zip(*(side.chunk(micro) for side in part), strict=True))
    seen.clear()
    masks: dict[str, list[Tensor]] = {}
    for step in range(steps):
        seed_generators(100 * step + own, CPU)
        parallel.forward_backward(parts, [1 / layout.dims.dp / micro] * micro, language_loss)
        masks = masks or {name: [m.clone() for m in several if is_real(m)] for name, several in seen.items()}
        norm = float(parallel.grad_norm_(None))
        optimizer.step()
        optimizer.zero_grad()
    values = {n: (p.to_local() if hasattr(p, "to_local") else p).detach() for n, p in parallel.named_parameters()}
    replicated = {n: v for n, v in values.items() if v.shape == dict(Net().named_parameters())[n].shape}
    return masks, norm, torch.get_rng_state(), replicated, parallel.full_model_state()


def alike(first: Tensor, second: Tensor) -> float:
    """The correlation of two masks."""
    both = torch.stack([first.flatten(), second.flatten()]).float()
    return float(torch.corrcoef(both)[0, 1])


ALONG_SEQUENCE = ("embedding", "entering", "after rowwise", "noise")
SPLIT = ("attention", "between")
ALIKE = ("logits", "depth")


@pytest.mark.parametrize("sequence", [True, False])
def test_masks_of_parts_are_independent_and_those_of_wholes_are_alike(sequence: bool) -> None:
    found = run_distributed(functools.partial(stepped, sequence_parallel=sequence), 2, "tensor", {"tp": 2}, 3)
    masks = [answer[0] for answer in found]
    for name in (*SPLIT, *ALONG_SEQUENCE):
        for first, second in zip(masks[0][name], masks[1][name], strict=True):
            if name in SPLIT or sequence:
                assert abs(alike(first, second)) < 4 / math.sqrt(first.numel()), name
                assert 0.3 < first.float().mean() < 0.85
            else:
                assert torch.equal(first, second), name
    for name in ALIKE:
        assert all(map(torch.equal, masks[0][name], masks[1][name])), name
    assert not torch.equal(masks[0]["between"][0], masks[0]["between"][1]), "each call draws anew"
    assert torch.equal(found[0][2], found[1][2]), "the common streams are in step"
    assert found[0][3].keys() == found[1][3].keys() and found[0][1] == found[1][1]
    assert all(torch.equal(value, found[1][3][name]) for name, value in found[0][3].items()), "nothing drifts apart"


@pytest.mark.parametrize("strategy", ["fsdp+tensor", "ddp+tensor"])
def test_each_of_four_workers_has_masks_of_its_own_beside_data_parallelism(strategy: str) -> None:
    side = "dp_shard" if strategy.startswith("fsdp") else "dp_replicate"
    found = run_distributed(stepped, 4, strategy, {"tp": 2, side: 2}, 2)
    masks = [answer[0] for answer in found]
    for name in (*SPLIT, *ALONG_SEQUENCE):
        for first, second in ((0, 1), (0, 2), (0, 3), (2, 3)):
            a, b = masks[first][name][0], masks[second][name][0]
            assert abs(alike(a, b)) < 4 / math.sqrt(a.numel()), (name, first, second)
    for name in ALIKE:
        assert torch.equal(masks[0][name][0], masks[1][name][0])
        assert not torch.equal(masks[0][name][0], masks[2][name][0])


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("sequence", [True, False])
def test_what_is_recomputed_draws_the_same_again(mode: str, sequence: bool) -> None:
    plain, again = (
        run_distributed(
            functools.partial(stepped, sequence_parallel=sequence, activation_checkpointing=chosen),
            2,
            "tensor",
            {"tp": 2},
            2,
        )
        for chosen in ("none", mode)
    )
    for name, value in plain[0][4].items():
        assert torch.allclose(again[0][4][name], value, atol=1e-6), name
    for first, second in zip(plain, again, strict=True):
        for name in SPLIT:  # of each block, and then of its recomputation, the last block first
            masks, count = second[0][name], len(first[0][name])
            assert all(map(torch.equal, masks, [*first[0][name], *reversed(first[0][name])][: len(masks)]))
            assert len(masks) == 2 * count


def test_a_pipelines_stages_cut_what_they_get_and_have_masks_of_their_own() -> None:
    found = run_distributed(stepped, 4, "tensor+pipeline", {"tp": 2, "pp": 2}, 2)
    for one, other in ((0, 1), (2, 3)):
        first, second = found[one][0], found[other][0]
        names = {"entering", "after rowwise", "attention", "between", "noise", "depth"}
        for name in names | ({"embedding"} if one == 0 else {"logits"}):  # and placeholders of the other stage's
            assert first[name], name
            for a, b in zip(first[name], second[name], strict=True):
                if name in ALIKE:
                    assert torch.equal(a, b), name
                else:
                    assert abs(alike(a, b)) < 4 / math.sqrt(a.numel()), (one, name)
        assert all(torch.equal(value, found[other][3][name]) for name, value in found[one][3].items())
        assert torch.equal(found[one][2], found[other][2])


class Quiet(nn.Module):
    """A block whose dropout shows in what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class QuietNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Quiet() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


QUIET_PLAN = {"embed": "embedding", "head": "head", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
QUIET_PLAN |= {"blocks.*.norm": "sequence", "blocks.*.drop": "sequence"}


def added(rank: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    parallel = parallelize(
        seeded(QuietNet), choose("tensor", 2), Options(**options), device=CPU, tensor_plan=QUIET_PLAN
    )
    found: list[Tensor] = []
    for block in parallel.inner.get_submodule("blocks"):
        block.register_forward_hook(lambda _, given, y: found.append((y - given[0]).detach() != 0))
    for number in range(2):
        seed_generators(number, CPU)
        parallel.forward_backward([batch()], [1.0], language_loss)
        parallel.grad_norm_(None)
    return found, torch.get_rng_state()


@pytest.mark.parametrize(
    "options",
    [{"async_tp": True}, {"compile": True, "compile_backend": "aot_eager"}],
    ids=["sent in pieces", "compiled"],
)
def test_masks_differ_however_layers_compute(options: dict[str, Any]) -> None:
    (first, state), (second, other) = run_distributed(functools.partial(added, **options), 2)
    assert torch.equal(state, other)
    for a, b in zip(first, second, strict=True):
        assert 0.3 < a.float().mean() < 0.7 and abs(alike(a, b)) < 4 / math.sqrt(a.numel())


class Plain(nn.Module):
    """What is computed in `Net`, without what shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        x = x + self.drop(self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training)))
        return self.head(self.norm(x))


PLAIN_PLAN = {"embed": "embedding", "up": "colwise", "down": "rowwise", "norm": "sequence", "head": "head"}


def losses(rank: int, strategy: str, workers: int, draws: int) -> list[float]:
    layout = choose(strategy, workers)
    parallel = parallelize(seeded(Plain), layout, Options(), device=CPU, tensor_plan=PLAIN_PLAN)
    found = []
    for number in range(draws):
        seed_generators(number, CPU)
        found.append(float(parallel.forward_backward([batch()], [1.0], language_loss)))
        for parameter in parallel.parameters():
            parameter.grad = None
    return found


def test_the_expected_loss_and_its_spread_are_those_of_one_device() -> None:
    """With masks that repeat over the parts its variance is nearly twice as large."""
    draws = 300
    one = torch.tensor(losses(0, "single", 1, draws))
    first, second = (torch.tensor(answer) for answer in run_distributed(losses, 2, "tensor", 2, draws))
    assert torch.equal(first, second)
    error = math.sqrt((one.var() + first.var()) / draws)
    assert abs(one.mean() - first.mean()) < 4 * error
    assert 0.75 < float(one.var() / first.var()) < 1 / 0.75


def followed(rank: int, p: float) -> list[bool]:
    """Whether marks are followed in each of three micro-batches."""
    parallel = parallelize(
        seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 4))),
        choose("tensor", 2),
        Options(),
        device=CPU,
        tensor_plan={"0": "colwise", "2": "rowwise"},
    )
    found = []

    def loss(model: Any, x: Tensor) -> Tensor:
        def look(*_: Any) -> None:
            found.append(torch.overrides._get_current_function_mode_stack() != [])

        with model[1].register_forward_hook(look):
            return model(x).square().mean()

    for _ in range(3):
        parallel.forward_backward([torch.ones(2, 4)], [1.0], loss)
    return found


def test_a_model_that_draws_nothing_is_not_followed_after_its_first_micro_batch() -> None:
    assert run_distributed(followed, 2, 0.5) == [[True] * 3] * 2
    assert run_distributed(followed, 2, 0.0) == [[True, False, False]] * 2
