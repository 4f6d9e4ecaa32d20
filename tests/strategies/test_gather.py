"""The gradient of a coupled loss in parts, beside one that keeps every part's graph; and what is refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.gather import BatchGather
from strategies.parallelize import Options, choose, parallelize
from tests.pool import run_distributed
from tests.strategies.models import CPU, assert_refused, random, seeded

SIZES = (3, 3, 2)


class Torch:
    def state(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)


def model() -> nn.Module:
    """With random numbers and running statistics."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 5))


def gatherer(strategy: str = "single", workers: int = 1, **options: Any) -> tuple[Any, BatchGather]:
    parallel = parallelize(seeded(model), choose(strategy, workers), Options(**options), device=CPU)
    return parallel, BatchGather(parallel, len, Torch(), contextlib.nullcontext)


def parts() -> list[Tensor]:
    return list(random(sum(SIZES), 4, seed=3).split(SIZES))


def loss_of(gather: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A coupled loss with a part that is the micro-batch's own, and random numbers after what is gathered."""

    def loss(module: Any, x: Tensor) -> Tensor:
        z = module(x)
        whole, target = gather(z), gather(x.sum(1) > 0)
        logits = F.dropout(F.normalize(whole, dim=1) @ F.normalize(whole, dim=1).t(), 0.3)
        own = F.dropout(z, 0.2).square().mean()
        return F.binary_cross_entropy_with_logits(logits, (target[:, None] == target).float()) + own

    return loss


@pytest.mark.pure
def test_gradients_in_parts_are_those_of_one_graph_with_the_same_random_numbers() -> None:
    weights = [size / sum(SIZES) for size in SIZES]
    parallel, gather = gatherer()
    torch.manual_seed(5)
    total = gather.forward_backward(parts(), weights, loss_of(gather), scale=8.0)

    module = seeded(model)()
    torch.manual_seed(5)
    states, rows, targets = [], [], []
    keep: list[tuple[Tensor, Tensor]] = []
    for x in parts():  # states as the collecting pass leaves them: it draws what the loss draws
        states.append(torch.get_rng_state())
        z = module(x)
        rows.append(z)
        targets.append(x.sum(1) > 0)
        F.dropout(torch.zeros(8, 8), 0.3)
        F.dropout(z, 0.2)
        keep.append((x, z))
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    whole, target = torch.cat(rows), torch.cat(targets)
    expected = torch.zeros(())
    for state, (x, z), weight in zip(states, keep, weights, strict=True):
        torch.set_rng_state(state)
        F.dropout(torch.zeros(len(x), 8), 0.4)  # the model's own
        logits = F.dropout(F.normalize(whole, dim=1) @ F.normalize(whole, dim=1).t(), 0.3)
        own = F.dropout(z, 0.2).square().mean()
        expected = expected + weight * (
            F.binary_cross_entropy_with_logits(logits, (target[:, None] == target).float()) + own
        )
    (expected * 8.0).backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, mine), other in zip(parallel.named_parameters(), module.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-6), name
    after = dict(parallel.inner.named_buffers())
    assert after["1.num_batches_tracked"] == len(SIZES)
    assert all(torch.allclose(after[name], value) for name, value in buffers.items())


@pytest.mark.pure
def test_a_batch_that_the_model_changes_in_place_is_changed_once() -> None:
    """Although the loss is computed several times."""

    def gradients(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        parallel, gather = gatherer()
        loss = loss_of(gather)
        torch.manual_seed(5)
        weights = [size / sum(SIZES) for size in SIZES]
        gather.forward_backward(parts(), weights, lambda module, x: loss(module, change(x)), scale=1.0)
        return [parameter.grad for parameter in parallel.parameters()]

    in_place = gradients(lambda x: x.mul_(0.5))
    out_of_place = gradients(lambda x: x * 0.5)
    assert all(torch.equal(mine, other) for mine, other in zip(in_place, out_of_place, strict=True))


@pytest.mark.pure
def test_what_cannot_be_gathered_in_parts_is_one_sentence() -> None:
    def fails(words: list[str], loss: Callable[[BatchGather], Any], batches: list[Tensor] | None = None) -> None:
        _, gather = gatherer()
        batches = parts() if batches is None else batches
        weights = [1 / len(batches)] * len(batches)
        assert_refused(words, gather.forward_backward, batches, weights, loss(gather))

    fails(["shape (6, 5)", "3 samples"], lambda g: lambda m, x: g(torch.cat([m(x), m(x)])).sum())
    fails(["shape ()", "3 samples"], lambda g: lambda m, x: g(m(x).sum()))
    fails(["float", "one row a sample"], lambda g: lambda m, x: g(1.5))
    fails(["other rows", "its call 2", "micro_batch_size"], lambda g: lambda m, x: g(x * g(m(x)).sum()).sum())
    own = torch.Generator().manual_seed(0)
    fails(["other rows", "its call 1"], lambda g: lambda m, x: g(m(x) + torch.rand(len(x), 1, generator=own)).sum())
    fails(
        ["1 times for one micro-batch and 2 times"],
        lambda g: lambda m, x: g(m(x)).sum() + (g(x).sum() if len(x) == 2 else 0),
    )
    fails(["rows of shape (3,)", "gave (2,)"], lambda g: lambda m, x: g(m(x)[:, : len(x)]).sum())


def ranks_differ(rank: int, batches: int) -> None:
    _, gather = gatherer("ddp", 2)
    words = ["rows of shape", "gave (", "pool or pad them"]
    given = [random(3, 4) for _ in range(batches)]
    assert_refused(
        words, gather.forward_backward, given, [0.5 / batches] * batches, lambda m, x: gather(m(x)[:, : 2 + rank]).sum()
    )


@pytest.mark.alone
@pytest.mark.parametrize("batches", [1, 2])
def test_workers_that_give_rows_of_different_shapes_say_so(batches: int) -> None:
    run_distributed(ranks_differ, 2, batches)


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


def every_type(rank: int, batches: int) -> list[tuple[bool, float]]:
    """Whether rows come in order, and the gradient of the sum of squares, of which each worker has half."""
    found = []
    for dtype in KINDS:
        _, gather = gatherer("ddp", 2)
        x = (torch.arange(4 * 3) % 7).view(4, 3).add(rank).to(dtype)
        whole = torch.cat([(torch.arange(4 * 3) % 7).view(4, 3).add(r).to(dtype) for r in range(2)])
        leaf = x.clone().requires_grad_(x.is_floating_point() or x.is_complex())
        seen: list[Tensor] = []

        def loss(
            module: Any, rows: Tensor, leaf: Tensor = leaf, seen: list[Tensor] = seen, gather: Any = gather
        ) -> Tensor:
            gathered = gather(leaf[rows[:, 0].long()])
            seen.append(gathered)
            of_model = module(random(4, 4)).square().mean() * 0
            return (gathered.abs().float().square().sum() if leaf.requires_grad else 0.0) + of_model

        places = torch.arange(4.0).view(4, 1)
        given = [places] if batches == 1 else list(places.split([3, 1]))
        gather.forward_backward(given, [len(part) / 8 for part in given], loss)
        same = torch.equal(seen[-1].detach(), whole)
        found.append((same, 0.0 if leaf.grad is None else (leaf.grad - 4 * x).abs().max().item()))
    return found


@pytest.mark.alone
@pytest.mark.parametrize("batches", [1, 2])
def test_rows_of_every_type_come_in_order_and_gradients_go_back(batches: int) -> None:
    """Times the two workers whose mean DDP takes."""
    for answers in run_distributed(every_type, 2, batches):
        assert all(same and off == 0 for same, off in answers), answers


def penalty(rank: int) -> tuple[float, float]:
    """The gradient of a gradient's square, by one worker and by two."""
    _, gather = gatherer("ddp", 2)
    whole = random(4, 3, seed=1)
    own = whole[2 * rank : 2 * rank + 2].clone().requires_grad_()

    def loss(module: Any, _: Tensor) -> Tensor:
        z = gather(own)
        (slope,) = torch.autograd.grad((z.pow(3).sum(1) * z[0, 0]).sum(), own, create_graph=True)
        return gather(slope).square().sum() + module(random(4, 4)).mean() * 0

    gather.forward_backward([torch.zeros(2, 1)], [0.5], loss)
    alone = whole.clone().requires_grad_()
    (slope,) = torch.autograd.grad((alone.pow(3).sum(1) * alone[0, 0]).sum(), alone, create_graph=True)
    (2 * slope).square().sum().backward()  # both workers differentiate the same sum
    assert own.grad is not None and alone.grad is not None
    return (own.grad / 2 - alone.grad[2 * rank : 2 * rank + 2]).abs().max().item(), alone.grad.abs().max().item()


@pytest.mark.alone
def test_a_gradient_penalty_across_workers() -> None:
    for off, size in run_distributed(penalty, 2):
        assert size > 1 and off < 1e-4 * size
