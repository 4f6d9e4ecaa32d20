"""One sequence over several workers: the algorithms, what is cut and counted, what is refused. For training see
test_parity.py."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

from strategies import torch_internals
from strategies.context import attention
from strategies.context.apply import METHODS, ContextPlan, check_length, choose_method
from strategies.context.attention import kept_bytes, register_group
from strategies.layout import choose
from strategies.parallelize import Options, ParallelDims, parallelize
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import CPU, assert_refused, language_loss, masked_trial, random, saved, seeded


def _attentions(rank: int, name: str) -> list[float]:
    return [_attention(rank, name, causal, kernel) for causal in (True, False) for kernel in (True, False)]


def _attention(rank: int, name: str, causal: bool, kernel: bool) -> float:
    """The largest difference of output and gradients from one device's."""
    ways, method = dist.get_world_size(), METHODS[name]
    if not kernel:
        attention.flash_attention, attention.MAX_SCORES = lambda q, v: None, 1000  # type: ignore[assignment]

    def cut(x: Tensor) -> Tensor:
        pieces = x.chunk(2 * ways, 2)
        return torch.cat([pieces[rank], pieces[-1 - rank]], 2) if method.is_zigzag else x.chunk(ways, 2)[rank]

    q, *keys = (torch.randn(2, heads, 8 * ways, 6, requires_grad=True) for heads in (2 * ways, ways, ways))
    whole = F.scaled_dot_product_attention(q, *keys, is_causal=causal, scale=0.3, enable_gqa=True)
    upstream = torch.randn(whole.shape)
    (whole * upstream).sum().backward()
    own = [cut(x.detach()).clone().requires_grad_() for x in (q, *keys)]
    with saved() as kept:
        found = method.attention(*own, is_causal=causal, scale=0.3, group=register_group(dist.group.WORLD))
    if kernel:
        keys_and_values = own[1].numel() + own[2].numel()
        assert models.stored(kept) == kept_bytes(
            queries=own[0].numel(), keys=keys_and_values, rows=own[0].numel() // 6, itemsize=4
        )
    (found * cut(upstream)).sum().backward()
    attention.flash_attention, attention.MAX_SCORES = torch_internals.flash_attention, 1 << 24
    pairs = [(found.detach(), whole.detach()), *((a.grad, b.grad) for a, b in zip(own, (q, *keys)))]
    return max(float((a - cut(b)).abs().max()) for a, b in pairs)


@pytest.mark.alone
@pytest.mark.parametrize("name", METHODS)
def test_attention_across_workers_is_attention(name: str) -> None:
    """With torch's kernel, which keeps for backward what it is told to cost, and without."""
    assert max(max(found) for found in run_distributed(_attentions, 4, name)) < 5e-6


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.pure
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_torchs_kernel_gives_what_products_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys in two parts, whose results are joined: the second half of the queries sees all of the first."""
    tensors = [random(2, 4, 256, 64, seed=seed).to(device, torch.bfloat16) for seed in range(4)]

    def attended() -> list[Tensor]:
        q, grad = (tensor[:, :, 128:] for tensor in (tensors[0], tensors[3]))
        before, own = ([tensor[:, :, part] for tensor in tensors[1:3]] for part in (slice(128), slice(128, None)))
        out, lse = attention.attend(q, *own, is_causal=True, scale=0.2)
        out = out.float()
        attention.join_(out, lse, *attention.attend(q, *before, is_causal=False, scale=0.2))
        of = attention.Attended(grad, q, out.bfloat16(), lse)
        backward = attention.attend_backward
        parts = [*backward(of, *own, is_causal=True, scale=0.2), *backward(of, *before, is_causal=False, scale=0.2)]
        return [out, lse, *parts]

    found = attended()
    monkeypatch.setattr(attention, "flash_attention", lambda q, v: None)
    for one, other in zip(found, attended(), strict=True):
        assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()


def _operators(_: int) -> set[str]:
    """What torch's own check of operators says, for compiled code: shapes, layouts, gradients."""
    number, ops = register_group(dist.group.WORLD), torch.ops.trireme
    q, k, v = (torch.randn(2, 8, heads, 6, requires_grad=True).transpose(1, 2) for heads in (4, 2, 2))
    for name in ("ring_attention", "allgather_attention"):
        whole = (q, k, v, True, 0.3, number)
        torch.library.opcheck(getattr(ops, name).default, whole)
        out, lse = (x.detach() for x in getattr(ops, name)(*whole))
        tensors = (x.detach() for x in (out, q, k, v, out, lse))
        torch.library.opcheck(getattr(ops, f"{name}_backward").default, (*tensors, True, 0.3, number))
    return set(torch.library.opcheck(ops.all_to_all.default, (q, number)).values())


@pytest.mark.alone
@pytest.mark.slow
def test_compiled_code_is_told_what_operators_give() -> None:
    assert run_distributed(_operators, 1) == [{"SUCCESS"}]


# --- models -----------------------------------------------------------------------------------------------------------


def _metrics(rank: int, dims: dict[str, int]) -> tuple[float, float]:
    """Evaluation's mean, and a total over workers, of what each has."""
    parallel = parallelize(masked_trial().build, choose("auto", 4, **dims), device=CPU)
    value = parallel.forward(lambda model, own: {"loss": language_loss(model, own)}, models.masked_batch(0))
    return float(parallel.total(value["loss"])), float(parallel.total(torch.tensor(3.0)))


@pytest.mark.alone
def test_evaluation_counts_each_sequence_once() -> None:
    truth = language_loss(masked_trial().build(), models.masked_batch(0)).item()
    for dims, copies in (({"cp": 4}, 1), ({"cp": 2}, 2)):
        found = run_distributed(_metrics, 4, dims)[1]
        assert found == (pytest.approx(copies * truth, rel=1e-6), pytest.approx(3 * copies))


def _mean_by_hand(model: nn.Module, batch: Any) -> Tensor:
    """Its own division: of a part without a label both the value and the gradient would be nan."""
    tokens, labels = batch
    counts = (labels != -100).flatten()
    each = F.cross_entropy(model(tokens).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * counts).sum() / counts.sum()


def _unevenly_masked() -> list[tuple[Tensor, Tensor]]:
    """Of four quarters of each sequence, labels in the last; in the middle; nowhere."""
    source = torch.Generator().manual_seed(3)
    batches = []
    for labelled in (slice(24, 32), slice(8, 24), slice(0, 0)):
        tokens = torch.randint(0, 29, (2, 32), generator=source)
        labels = torch.full_like(tokens, -100)
        labels[:, labelled] = tokens[:, labelled]
        batches.append((tokens, labels))
    return batches


def _left_out(rank: int, dims: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step in which some parts of sequences, and a whole micro-batch, have no label."""
    batches = _unevenly_masked()
    layout = choose("auto", dist.get_world_size() if dist.is_initialized() else 1, **dims)
    example = (_mean_by_hand, batches[0])
    parallel = parallelize(masked_trial().build, layout, device=CPU, example=example)
    data_rank, ways = layout.dims.data_rank(rank), layout.dims.dp
    counts = [float((labels != -100).sum()) for _, labels in batches]
    weights = [count / sum(counts) for count in counts]
    mine = [at for at in range(len(batches)) if ways == 1 or (at == 0) == (data_rank == 0)]
    mine += [2] * (2 - len(mine))  # as many micro-batches on every worker
    total = parallel.forward_backward([batches[at] for at in mine], [weights[at] for at in mine], _mean_by_hand)
    gradients = {name: p.grad.detach() for name, p in parallel.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    loss = parallel.total(total)
    if layout.dims.pp > 1:
        dist.all_reduce(loss)
        loss = loss * layout.dims.pp / layout.dims.world_size
    return float(loss), whole


@pytest.mark.alone
@pytest.mark.parametrize("dims", [{"cp": 2}, {"cp": 4}, {"cp": 2, "dp_replicate": 2}, {"cp": 2, "dp_shard": 2}])
def test_parts_of_sequences_and_micro_batches_without_a_label_are_left_out(dims: dict[str, int]) -> None:
    loss, gradients = _left_out(0, {})
    assert loss > 0 and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    found_loss, found = run_distributed(_left_out, 2 if dims == {"cp": 2} else 4, dims)[0]
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def _kept(_: int, workers: int, method: str) -> int:
    """Bytes that backward keeps of forward: distinct storages, but for parameters."""
    layout, batch = choose("auto", workers, cp=workers), (torch.zeros(1, 1024, dtype=torch.int64),) * 2
    parallel = parallelize(masked_trial().build, layout, Options(context=method), device=CPU)
    with saved() as kept:
        parallel.forward_backward([batch], [1.0], language_loss)
    return models.stored(kept, parallel.parameters())


@pytest.mark.alone
@pytest.mark.parametrize("method", METHODS)
def test_activations_fall_as_the_number_of_workers(method: str) -> None:
    assert max(run_distributed(_kept, 4, 4, method)) == pytest.approx(_kept(0, 1, method) / 4, rel=0.05)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q = (self.linear(x) + places[0].float()[:, None, None]).movedim(0, 1).unsqueeze(1)
        return scaled_dot_product_attention(q, q, q)  # by a name of this module's


def _own_plan(_: int) -> float:
    plan = ContextPlan(
        keywords=lambda places: {"places": places},
        cut=lambda batch, part: {"x": part(batch["x"], 0), "name": batch["name"]},
        labels=lambda batch: torch.tensor(len(batch["x"])),
    )
    parallel = parallelize(seeded(TimeFirst), choose("auto", 2, cp=2), device=CPU, context_plan=plan)
    batch = {"x": random(8, 3, 4), "name": "a"}
    return float(parallel.total(parallel.forward_backward([batch], [1.0], lambda model, own: model(own["x"]).mean())))


@pytest.mark.alone
def test_a_plan_of_ones_own() -> None:
    truth = float(seeded(TimeFirst)()(random(8, 3, 4), torch.arange(8).unsqueeze(0)).mean())
    assert run_distributed(_own_plan, 2)[0] == pytest.approx(truth, rel=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q = self.linear(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, **self.how) if self.how else q.softmax(-1)


def _refusals(_: int) -> None:
    layout, mask = choose("auto", 2, cp=2), torch.ones(4, 4, dtype=torch.bool)
    for how, length, words in (
        ({}, 8, ["not F.scaled_dot_product_attention"]),
        ({"attn_mask": mask}, 8, ["a mask", "parallel.cp"]),
        ({"dropout_p": 0.5}, 8, ["with probability 0.5"]),
        ({"is_causal": True}, 10, ["a sequence of 10 tokens", "4 equal pieces", "8 or 12"]),
    ):
        parallel = parallelize(functools.partial(Attends, how), layout, device=CPU)
        step = functools.partial(parallel.forward_backward, [torch.randn(1, length, 4)], [1.0])
        assert_refused(words, step, lambda model, x: model(x).mean())
    plain = functools.partial(nn.Linear, 4, 4)
    assert_refused(["Linear cannot be told"], parallelize, plain, layout, device=CPU)  # it has no places, and no plan


@pytest.mark.alone
def test_a_model_that_cannot_be_split_is_refused_by_every_worker() -> None:
    run_distributed(_refusals, 2)


@pytest.mark.pure
def test_lengths_and_methods() -> None:
    check_length(64, 4, "ring")
    assert_refused(["3 tokens", "write a sequence length of 8"], check_length, 3, 4, "ring")
    choose_method_of = functools.partial(choose_method, dims=ParallelDims(cp=4, tp=2))
    assert choose_method_of("auto", heads=16, workers_per_node=8) == "ulysses"
    assert choose_method_of("ring", heads=16, workers_per_node=8) == "ring"
    for heads, workers_per_node in ((16, 4), (16, None), (12, 8), (None, 8)):
        assert choose_method_of("auto", heads=heads, workers_per_node=workers_per_node) == "ring"
