"""The gradient of a coupled loss in parts, beside a single graph's, and what cannot be gathered."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.gather import BatchGather
from strategies.parallel import Parallel
from strategies.parallelize import choose, parallelize
from tests.pool import run_distributed
from tests.strategies.models import CPU, assert_refused, random, seeded

SIZES = (3, 3, 2)
WEIGHTS = [size / sum(SIZES) for size in SIZES]
ROW_TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
)

Gather = Callable[[Any], Tensor]
TensorLoss = Callable[[Any, Tensor], Tensor]


class TorchRandomness:
    """torch's generator of the CPU."""

    def state(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)


def _model() -> nn.Module:
    """A model with random numbers and running statistics."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 5)
    )


def _parallel_and_gather(
    strategy: str = "single", workers: int = 1
) -> tuple[Parallel, BatchGather]:
    parallel = parallelize(seeded(_model), choose(strategy, workers), device=CPU)
    gather = BatchGather(
        parallel,
        count_samples=len,
        randomness=TorchRandomness(),
        without_logging=contextlib.nullcontext,
    )
    return parallel, gather


def _parts() -> list[Tensor]:
    return list(random(sum(SIZES), 4, seed=3).split(SIZES))


def _pair_loss(gathered: Tensor, labels: Tensor) -> Tensor:
    """Whether two samples have one label, from their products, with dropout."""
    normalized = F.normalize(gathered, dim=1)
    logits = F.dropout(normalized @ normalized.t(), 0.3)
    same_label = (labels[:, None] == labels).float()
    return F.binary_cross_entropy_with_logits(logits, same_label)


def _coupled_loss(gather: Gather) -> TensorLoss:
    """A coupled loss, plus a term of the micro-batch alone; random after what is gathered."""

    def loss(module: Any, x: Tensor) -> Tensor:
        z = module(x)
        gathered = gather(z)
        labels = gather(x.sum(1) > 0)
        coupled = _pair_loss(gathered, labels)
        return coupled + F.dropout(z, 0.2).square().mean()

    return loss


def _loss_of_one_graph(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The step's loss, computed in one graph with the random numbers of the three passes.

    Returns:
        The loss, and copies of the module's buffers after one forward of each part.
    """
    states = []
    rows = []
    labels = []
    for x in _parts():
        # The first pass draws what the loss draws, which the next part's state depends on.
        states.append(torch.get_rng_state())
        z = module(x)
        rows.append(z)
        labels.append(x.sum(1) > 0)
        F.dropout(torch.zeros(8, 8), 0.3)
        F.dropout(z, 0.2)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    all_rows = torch.cat(rows)
    all_labels = torch.cat(labels)
    total = torch.zeros(())
    for state, z, weight in zip(states, rows, WEIGHTS, strict=True):
        torch.set_rng_state(state)
        F.dropout(torch.zeros(len(z), 8), 0.4)  # draws what the model draws
        coupled = _pair_loss(all_rows, all_labels)
        total = total + weight * (coupled + F.dropout(z, 0.2).square().mean())
    return total, buffers


@pytest.mark.pure
def test_gradients_in_parts_are_those_of_one_graph() -> None:
    parallel, gather = _parallel_and_gather()
    torch.manual_seed(5)
    total = gather.forward_backward(_parts(), WEIGHTS, _coupled_loss(gather), scale=8.0)

    module = seeded(_model)()
    torch.manual_seed(5)
    expected, buffers = _loss_of_one_graph(module)
    (expected * 8.0).backward()

    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    pairs = zip(parallel.named_parameters(), module.parameters(), strict=True)
    for (name, parameter), expected_parameter in pairs:
        assert parameter.grad is not None
        assert expected_parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, expected_parameter.grad, rtol=1e-5, atol=1e-6, msg=name
        )
    buffers_after = dict(parallel.inner.named_buffers())
    assert buffers_after["1.num_batches_tracked"] == len(SIZES)
    for name, expected_buffer in buffers.items():
        assert torch.allclose(buffers_after[name], expected_buffer), name


@pytest.mark.pure
def test_a_batch_that_the_model_changes_in_place_is_changed_once() -> None:
    """The loss is computed several times."""

    def gradients(change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        parallel, gather = _parallel_and_gather()
        loss = _coupled_loss(gather)
        torch.manual_seed(5)
        gather.forward_backward(_parts(), WEIGHTS, lambda module, x: loss(module, change(x)))
        return [parameter.grad for parameter in parallel.parameters()]

    in_place = gradients(lambda x: x.mul_(0.5))
    out_of_place = gradients(lambda x: x * 0.5)
    for changed, expected in zip(in_place, out_of_place, strict=True):
        assert changed is not None
        assert expected is not None
        assert torch.equal(changed, expected)


def _gathers_twice_the_rows(gather: Gather) -> TensorLoss:
    return lambda module, x: gather(torch.cat([module(x), module(x)])).sum()


def _gathers_a_number(gather: Gather) -> TensorLoss:
    return lambda module, x: gather(module(x).sum())


def _gathers_a_python_number(gather: Gather) -> TensorLoss:
    return lambda module, x: gather(1.5)


def _gathers_what_depends_on_gathered_rows(gather: Gather) -> TensorLoss:
    return lambda module, x: gather(x * gather(module(x)).sum()).sum()


def _gathers_numbers_of_its_own_generator(gather: Gather) -> TensorLoss:
    generator = torch.Generator().manual_seed(0)

    def loss(module: Any, x: Tensor) -> Tensor:
        return gather(module(x) + torch.rand(len(x), 1, generator=generator)).sum()

    return loss


def _gathers_once_more_in_the_last_part(gather: Gather) -> TensorLoss:
    def loss(module: Any, x: Tensor) -> Tensor:
        total = gather(module(x)).sum()
        return total + gather(x).sum() if len(x) == SIZES[-1] else total

    return loss


def _gathers_rows_of_the_parts_size(gather: Gather) -> TensorLoss:
    return lambda module, x: gather(module(x)[:, : len(x)]).sum()


@pytest.mark.pure
@pytest.mark.parametrize(
    "make_loss, words",
    [
        (_gathers_twice_the_rows, ["shape (6, 5)", "3 samples"]),
        (_gathers_a_number, ["shape ()", "3 samples"]),
        (_gathers_a_python_number, ["float", "one row a sample"]),
        (
            _gathers_what_depends_on_gathered_rows,
            ["other rows", "its call 2", "micro_batch_size"],
        ),
        (_gathers_numbers_of_its_own_generator, ["other rows", "its call 1"]),
        (_gathers_once_more_in_the_last_part, ["1 times for one micro-batch and 2 times"]),
        (_gathers_rows_of_the_parts_size, ["rows of shape (3,)", "gave (2,)"]),
    ],
)
def test_what_cannot_be_gathered_in_parts_is_refused(
    make_loss: Callable[[Gather], TensorLoss], words: list[str]
) -> None:
    _, gather = _parallel_and_gather()
    weights = [1 / len(SIZES)] * len(SIZES)
    assert_refused(words, gather.forward_backward, _parts(), weights, make_loss(gather))


def _gather_different_shapes(rank: int, batch_count: int) -> None:
    _, gather = _parallel_and_gather("ddp", 2)
    words = ["rows of shape", "gave (", "pool or pad them"]
    batches = [random(3, 4) for _ in range(batch_count)]
    weights = [0.5 / batch_count] * batch_count

    def loss(module: Any, x: Tensor) -> Tensor:
        return gather(module(x)[:, : 2 + rank]).sum()

    assert_refused(words, gather.forward_backward, batches, weights, loss)


@pytest.mark.alone
@pytest.mark.parametrize("batch_count", [1, 2])
def test_rows_whose_shapes_differ_between_workers_are_refused(batch_count: int) -> None:
    run_distributed(_gather_different_shapes, 2, batch_count)


def _gather_each_type(rank: int, batch_count: int) -> list[tuple[bool, float]]:
    """Gather rows of each type, half of them on each worker.

    Returns:
        For each type, whether the rows came in order, and the error of the gradient of the sum of
        their squares.
    """
    results = []
    for dtype in ROW_TYPES:
        parts = [(torch.arange(4 * 3) % 7).view(4, 3).add(r).to(dtype) for r in range(2)]
        rows = parts[rank].clone()
        if rows.is_floating_point() or rows.is_complex():
            rows.requires_grad_()
        gathered, gradient = _gather_rows(rows, batch_count)
        is_in_order = torch.equal(gathered, torch.cat(parts))
        # Both workers have the same loss, and DDP takes the mean of their gradients.
        error = 0.0
        if gradient is not None:
            error = (gradient - 4 * parts[rank]).abs().max().item()
        results.append((is_in_order, error))
    return results


def _gather_rows(rows: Tensor, batch_count: int) -> tuple[Tensor, Tensor | None]:
    """Gather rows in a step of two workers.

    Args:
        rows: This worker's rows, in as many micro-batches.
        batch_count: The number of micro-batches, 1 or 2.

    Returns:
        The gathered rows of the last micro-batch, and the gradient of this worker's rows.
    """
    _, gather = _parallel_and_gather("ddp", 2)
    gathered_by_pass: list[Tensor] = []

    def loss(module: Any, positions: Tensor) -> Tensor:
        gathered = gather(rows[positions[:, 0].long()])
        gathered_by_pass.append(gathered.detach())
        zero_of_model = module(random(4, 4)).square().mean() * 0
        if not rows.requires_grad:
            return zero_of_model
        return gathered.abs().float().square().sum() + zero_of_model

    positions = torch.arange(4.0).view(4, 1)
    batches = [positions] if batch_count == 1 else list(positions.split([3, 1]))
    gather.forward_backward(batches, [len(batch) / 8 for batch in batches], loss)
    return gathered_by_pass[-1], rows.grad


@pytest.mark.alone
@pytest.mark.parametrize("batch_count", [1, 2])
def test_rows_of_every_type_come_in_order_and_gradients_go_back(batch_count: int) -> None:
    for results in run_distributed(_gather_each_type, 2, batch_count):
        for is_in_order, error in results:
            assert is_in_order
            assert error == 0


def _gradient_penalty_error(rank: int) -> tuple[float, float]:
    """The gradient of a squared gradient over two workers, beside the same on one.

    Returns:
        Its error, and its largest element.
    """
    _, gather = _parallel_and_gather("ddp", 2)
    all_rows = random(4, 3, seed=1)
    rows_of_rank = slice(2 * rank, 2 * rank + 2)
    rows = all_rows[rows_of_rank].clone().requires_grad_()

    def cubes(z: Tensor) -> Tensor:
        return (z.pow(3).sum(1) * z[0, 0]).sum()

    def loss(module: Any, _: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(cubes(gather(rows)), rows, create_graph=True)
        return gather(slope).square().sum() + module(random(4, 4)).mean() * 0

    gather.forward_backward([torch.zeros(2, 1)], [0.5], loss)
    leaf = all_rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cubes(leaf), leaf, create_graph=True)
    (2 * slope).square().sum().backward()  # both workers differentiate the same sum
    assert rows.grad is not None
    assert leaf.grad is not None
    error = (rows.grad / 2 - leaf.grad[rows_of_rank]).abs().max().item()
    return error, leaf.grad.abs().max().item()


@pytest.mark.alone
def test_a_gradient_penalty_across_workers_is_that_of_one() -> None:
    for error, largest in run_distributed(_gradient_penalty_error, 2):
        assert largest > 1
        assert error < 1e-4 * largest
