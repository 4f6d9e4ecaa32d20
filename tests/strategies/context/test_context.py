"""One sequence over several workers: the algorithms, what is cut and counted, what is refused."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.gpt import GPT
from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from experiments.parity.rows import SINGLE, Row
from strategies import torch_internals
from strategies.context import attention
from strategies.context.apply import METHODS, ContextPlan, check_length, choose_method
from strategies.context.attention import kept_bytes, number_of
from strategies.layout import choose
from strategies.parallelize import LayoutError, Options, ParallelDims, parallelize
from tests.pool import run_distributed
from tests.strategies.models import assert_refused, seeded

CPU = torch.device("cpu")


def _part(x: Tensor, rank: int, ways: int, zigzag: bool) -> Tensor:
    pieces = x.chunk(2 * ways, 2)
    return torch.cat([pieces[rank], pieces[-1 - rank]], 2) if zigzag else x.chunk(ways, 2)[rank]


@contextlib.contextmanager
def _saved() -> Iterator[list[Tensor]]:
    """What is kept for backward of what is computed under it."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        yield kept


def _bytes(tensors: list[Tensor], but: Iterable[Tensor] = ()) -> int:
    """Of the distinct storages."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for place, size in storages.items() if place not in {x.untyped_storage().data_ptr() for x in but})


def _attention(rank: int, name: str, causal: bool, kernel: bool) -> float:
    """The largest difference of output and gradients from one device's."""
    ways, method = dist.get_world_size(), METHODS[name]
    if not kernel:
        attention.flash_attention, attention.SCORES = lambda q, v: None, 1000  # type: ignore[assignment]
    q, *keys = (torch.randn(2, heads, 8 * ways, 6, requires_grad=True) for heads in (2 * ways, ways, ways))
    whole = F.scaled_dot_product_attention(q, *keys, is_causal=causal, scale=0.3, enable_gqa=True)
    upstream = torch.randn(whole.shape)
    (whole * upstream).sum().backward()
    cut = functools.partial(_part, rank=rank, ways=ways, zigzag=method.ZIGZAG)
    own = [cut(x.detach()).clone().requires_grad_() for x in (q, *keys)]
    with _saved() as kept:
        found = method.attention(*own, causal, 0.3, number_of(dist.group.WORLD))
    if kernel:
        keys_and_values = own[1].numel() + own[2].numel()
        assert _bytes(kept) == kept_bytes(own[0].numel(), keys_and_values, own[0].numel() // 6, 4)
    (found * cut(upstream)).sum().backward()
    attention.flash_attention, attention.SCORES = torch_internals.flash_attention, 1 << 24
    pairs = [(found.detach(), whole.detach()), *((a.grad, b.grad) for a, b in zip(own, (q, *keys)))]
    return max(float((a - cut(b)).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_attention_across_workers_is_attention(name: str, causal: bool, kernel: bool) -> None:
    assert max(run_distributed(_attention, 4, name, causal, kernel)) < 5e-6


def _operators(_: int) -> set[str]:
    """What torch's own check of operators says, for compiled code: shapes, layouts, gradients."""
    number, ops = number_of(dist.group.WORLD), torch.ops.trireme
    q, k, v = (torch.randn(2, 8, heads, 6, requires_grad=True).transpose(1, 2) for heads in (4, 2, 2))
    for name in ("ring_attention", "allgather_attention"):
        whole = (q, k, v, True, 0.3, number)
        torch.library.opcheck(getattr(ops, name).default, whole)
        out, lse = (x.detach() for x in getattr(ops, name)(*whole))
        tensors = (x.detach() for x in (out, q, k, v, out, lse))
        torch.library.opcheck(getattr(ops, f"{name}_backward").default, (*tensors, True, 0.3, number))
    return set(torch.library.opcheck(ops.exchange.default, ([q, k], True, number)).values())


def test_compiled_code_is_told_what_operators_give() -> None:
    assert run_distributed(_operators, 1) == [{"SUCCESS"}]


# --- models -----------------------------------------------------------------------------------------------------------


def _build() -> nn.Module:
    return GPT(29, d_model=16, n_layers=2, n_heads=4)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """In the second sequence only the first labels count, which in any order are one worker's."""
    tokens = torch.randint(0, 29, (2, 33), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[1, 5:] = -100
    targets[0, 20:23] = -100
    return tokens[:, :-1], targets


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


MASKED = Trial(seeded(_build), _loss, _batch, steps=3, clip=0.1, heads=4)


def _train(_: int, row: Row, options: dict[str, Any]) -> Curve:
    return curves.train(MASKED, row.layout, Options(**(row.options | options)), CPU)


WAYS: list[Any] = [(method, {}) for method in METHODS]
WAYS += [(method, {"activation_checkpointing": "selective"}) for method in METHODS]
WAYS.append(pytest.param("ring", {"compile": True, "compile_backend": "aot_eager"}, marks=pytest.mark.slow))


@pytest.mark.parametrize(("method", "options"), WAYS, ids=str)
def test_places_and_labels_that_do_not_count(method: str, options: dict[str, Any]) -> None:
    """Rotary embeddings turn by the place in the whole sequence, and the loss is the mean of the labels that count."""
    row = Row("context", 4, options={"context": method})
    found = curves.difference(_train(0, SINGLE, {}), run_distributed(_train, 4, row, options)[0])
    assert found.within(1e-5), found


def _metrics(rank: int, dims: dict[str, int]) -> tuple[float, float]:
    """Evaluation's mean, and a total over workers, of what each has."""
    parallel = parallelize(MASKED.build, choose("auto", 4, **dims), device=CPU)
    batch = _batch(0)
    value = parallel.forward(lambda model, own: {"loss": _loss(model, own)}, batch)
    assert value is not None
    return float(parallel.total(value["loss"])), float(parallel.total(torch.tensor(3.0)))


def test_evaluation_counts_each_sequence_once() -> None:
    truth = _loss(seeded(_build)(), _batch(0)).item()
    for dims, copies in (({"cp": 4}, 1), ({"cp": 2}, 2)):
        loss, three = run_distributed(_metrics, 4, dims)[1]
        assert loss == pytest.approx(copies * truth, rel=1e-6) and three == pytest.approx(3 * copies)


def _kept(_: int, workers: int, method: str) -> int:
    """Bytes that backward keeps of forward: distinct storages, but for parameters."""
    parallel = parallelize(LONG.build, choose("auto", workers, cp=workers), Options(context=method), device=CPU)
    with _saved() as kept:
        parallel.forward_backward([LONG.batch(0)], [1.0], LONG.loss)
    return _bytes(kept, parallel.parameters())


LONG = replace(MASKED, batch=lambda step: (torch.zeros(1, 1024, dtype=torch.int64),) * 2)


@pytest.mark.parametrize("method", METHODS)
def test_activations_fall_as_the_number_of_workers(method: str) -> None:
    whole = _kept(0, 1, method)
    for workers in (2, 4):
        assert max(run_distributed(_kept, workers, workers, method)) == pytest.approx(whole / workers, rel=0.05)


# --- what is refused --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q = self.linear(x).unsqueeze(1)
        if not self.how:
            return q.softmax(-1)
        how = {"attn_mask": torch.ones(x.size(1), x.size(1), dtype=torch.bool)} if "mask" in self.how else self.how
        return F.scaled_dot_product_attention(q, q, q, **how)


def _refusal(_: int, how: dict[str, Any], length: int) -> str:
    parallel = parallelize(seeded(lambda: Masked(**how)), choose("auto", 2, cp=2), device=CPU)
    try:
        parallel.forward_backward([torch.randn(1, length, 4)], [1.0], lambda model, x: model(x).mean())
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "length", "words"),
    [
        ({}, 8, ["not F.scaled_dot_product_attention"]),
        ({"mask": True}, 8, ["a mask", "parallel.cp"]),
        ({"dropout_p": 0.5}, 8, ["with probability 0.5"]),
        ({"is_causal": True}, 10, ["a sequence of 10 tokens", "4 equal pieces", "8 or 12"]),
        ({"is_causal": True}, 8, []),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(how: dict[str, Any], length: int, words: list[str]) -> None:
    for said in run_distributed(_refusal, 2, how, length):
        assert bool(said) == bool(words) and all(word in said for word in words), said


def _without_places(_: int) -> str:
    with pytest.raises(LayoutError) as caught:
        parallelize(seeded(lambda: nn.Linear(4, 4)), choose("auto", 2, cp=2), device=CPU)
    return str(caught.value)


def test_a_model_without_places_needs_a_plan() -> None:
    assert "Linear cannot be told" in run_distributed(_without_places, 2)[0]


def test_lengths_and_methods() -> None:
    check_length(64, 4, "ring")
    assert_refused(["3 tokens", "write a sequence length of 8"], check_length, 3, 4, "ring")
    near = ParallelDims(cp=4, tp=2)
    assert choose_method("auto", 16, near, 8) == "ulysses" and choose_method("ring", 16, near, 8) == "ring"
    assert {choose_method("auto", *asked) for asked in ((16, near, 4), (12, near, 8), (None, near, 8))} == {"ring"}


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q = (self.linear(x) + places[0].float()[:, None, None]).movedim(0, 1).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q)


def _own_plan(_: int) -> float:
    plan = ContextPlan(
        keywords=lambda places: {"places": places},
        cut=lambda batch, part: {"x": part(batch["x"], 0), "name": batch["name"]},
        labels=lambda batch: torch.tensor(len(batch["x"])),
    )
    parallel = parallelize(seeded(TimeFirst), choose("auto", 2, cp=2), device=CPU, context_plan=plan)
    batch = {"x": torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0)), "name": "a"}
    loss = parallel.forward_backward([batch], [1.0], lambda model, own: model(own["x"]).mean())
    return float(parallel.total(loss))


def test_a_plan_of_ones_own() -> None:
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))
    truth = float(seeded(TimeFirst)()(x, torch.arange(8).unsqueeze(0)).mean())
    assert run_distributed(_own_plan, 2)[0] == pytest.approx(truth, rel=1e-6)
