"""One sequence over several workers: attention, parts of sequences, bytes, and refusals.

test_parity.py compares training.
"""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

from strategies import torch_internals
from strategies.context import attention, ring
from strategies.context.apply import METHODS, ContextPlan, check_length, choose_method
from strategies.context.attention import kept_bytes, register_group
from strategies.layout import choose
from strategies.parallelize import Options, ParallelDims, parallelize
from strategies.passing import Passing
from tests.pool import run_distributed
from tests.strategies import models
from tests.strategies.models import (
    CPU,
    assert_refused,
    language_loss,
    masked_trial,
    random,
    saved_for_backward,
    seeded,
)

Batch = tuple[Tensor, Tensor]


# --- attention ------------------------------------------------------------------------------------


def _largest_attention_error(rank: int, method_name: str) -> float:
    errors = []
    for is_causal in (True, False):
        for has_kernel in (True, False):
            errors.append(
                _attention_error(rank, method_name, is_causal=is_causal, has_kernel=has_kernel)
            )
    return max(errors)


def _attention_error(rank: int, method_name: str, *, is_causal: bool, has_kernel: bool) -> float:
    """The largest error of output and gradients.

    With torch's kernel, what is kept for backward is compared with its cost.
    """
    workers = dist.get_world_size()
    method = METHODS[method_name]
    if not has_kernel:
        attention.flash_attention = lambda q, v: None
        attention.MAX_SCORES = 1000

    def part_of(x: Tensor) -> Tensor:
        """This worker's tokens of (B, H, T, K)."""
        if not method.is_zigzag:
            return x.chunk(workers, 2)[rank]
        pieces = x.chunk(2 * workers, 2)
        return torch.cat([pieces[rank], pieces[-1 - rank]], 2)

    width = 6
    head_counts = (2 * workers, workers, workers)
    whole_inputs = [
        torch.randn(2, heads, 8 * workers, width, requires_grad=True) for heads in head_counts
    ]
    whole_output = F.scaled_dot_product_attention(
        *whole_inputs, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    output_gradient = torch.randn(whole_output.shape)
    (whole_output * output_gradient).sum().backward()

    inputs = [part_of(x.detach()).clone().requires_grad_() for x in whole_inputs]
    group = register_group(dist.group.WORLD)
    with saved_for_backward() as saved:
        output = method.attention(*inputs, is_causal=is_causal, scale=0.3, group=group)
    if has_kernel:
        q, k, v = inputs
        expected_bytes = kept_bytes(
            queries=q.numel(), keys=k.numel() + v.numel(), rows=q.numel() // width, itemsize=4
        )
        assert models.storage_bytes(saved) == expected_bytes
    (output * part_of(output_gradient)).sum().backward()
    attention.flash_attention = torch_internals.flash_attention
    attention.MAX_SCORES = 1 << 24

    errors = [(output.detach() - part_of(whole_output.detach())).abs().max()]
    for x, whole_x in zip(inputs, whole_inputs):
        assert x.grad is not None
        assert whole_x.grad is not None
        errors.append((x.grad - part_of(whole_x.grad)).abs().max())
    return max(float(error) for error in errors)


@pytest.mark.alone
@pytest.mark.parametrize("method_name", METHODS)
def test_attention_across_workers_is_that_of_one_device(method_name: str) -> None:
    assert max(run_distributed(_largest_attention_error, 4, method_name)) < 5e-6


def _ring_in_bfloat16(rank: int) -> tuple[int, int, list[float], list[float]]:
    """A ring's forward and backward in 16 bits, with heads of queries that share one of keys.

    Returns:
        The bytes that are sent, and that the planner counts; by gradient, how far that of the ring
        and that of one device are from float32's, relative to its norm.
    """
    workers = dist.get_world_size()
    sent_bytes = 0

    class CountedPassing(Passing):
        def __init__(self, tensors: list[Tensor], *args: Any) -> None:
            nonlocal sent_bytes
            sent_bytes += sum(tensor.nbytes for tensor in tensors)
            super().__init__(tensors, *args)

    def part_of(x: Tensor) -> Tensor:
        pieces = x.chunk(2 * workers, 2)
        return torch.cat([pieces[rank], pieces[-1 - rank]], 2)

    exact = [random(2, heads, 16 * workers, 16, seed=heads) for heads in (8, 2, 2)]
    narrow = [x.bfloat16().requires_grad_() for x in exact]
    exact = [x.detach().float().requires_grad_() for x in narrow]
    inputs = [part_of(x.detach()).clone().requires_grad_() for x in narrow]
    output_gradient = random(2, 8, 16 * workers, 16, seed=9)
    for tensors in (exact, narrow):
        output = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        output.backward(output_gradient.to(output.dtype))
    group = register_group(dist.group.WORLD)
    with mock.patch.object(ring, "Passing", CountedPassing):
        output = METHODS["ring"].attention(*inputs, is_causal=True, scale=0.25, group=group)
        output.backward(part_of(output_gradient).bfloat16())

    def error(gradient: Tensor | None, exact_gradient: Tensor | None) -> float:
        assert gradient is not None
        assert exact_gradient is not None
        truth = part_of(exact_gradient)
        return float((gradient.float() - truth).norm() / truth.norm())

    of_ring = [error(x.grad, whole.grad) for x, whole in zip(inputs, exact)]
    of_one = [error(part_of(torch.as_tensor(x.grad)), y.grad) for x, y in zip(narrow, exact)]
    planned = METHODS["ring"].sent_bytes(
        queries=inputs[0].numel(), keys=2 * inputs[1].numel(), cp=workers, itemsize=2
    )
    return sent_bytes, int(sum(planned)), of_ring, of_one


@pytest.mark.alone
def test_a_ring_sends_16_bits_of_shared_keys_and_of_their_gradients() -> None:
    workers = 4
    part_bytes = 2 * (2 * 2 * 16 * 16) * 2  # of keys and values, which 4 heads of queries share
    for sent, planned, of_ring, of_one in run_distributed(_ring_in_bfloat16, workers):
        assert sent == planned == part_bytes * (2 * (workers - 1) + workers)
        for ring_error, one_error in zip(of_ring, of_one):
            assert ring_error < max(3 * one_error, 2**-7), "sums of 4 workers are rounded 3 times"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _attend_in_two_parts(q: Tensor, k: Tensor, v: Tensor, output_gradient: Tensor) -> list[Tensor]:
    """Attention of the second half of the queries to all keys, in two parts that are joined.

    Returns:
        The output, the log-sum-exp, and the gradients of both parts.
    """
    half = q.size(2) // 2
    late_q = q[:, :, half:]
    early = (k[:, :, :half], v[:, :, :half])
    late = (k[:, :, half:], v[:, :, half:])
    out, lse = attention.attend(late_q, *late, is_causal=True, scale=0.2)
    out = out.float()
    early_out, early_lse = attention.attend(late_q, *early, is_causal=False, scale=0.2)
    attention.join_(out, lse, early_out, early_lse)
    attended = attention.Attended(output_gradient[:, :, half:], late_q, out.bfloat16(), lse)
    late_gradients = attention.attend_backward(attended, *late, is_causal=True, scale=0.2)
    early_gradients = attention.attend_backward(attended, *early, is_causal=False, scale=0.2)
    return [out, lse, *late_gradients, *early_gradients]


@pytest.mark.pure
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_torchs_kernel_gives_what_products_of_matrices_give(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, output_gradient = (
        random(2, 4, 256, 64, seed=seed).to(device, torch.bfloat16) for seed in range(4)
    )
    by_kernel = _attend_in_two_parts(q, k, v, output_gradient)
    monkeypatch.setattr(attention, "flash_attention", lambda q, v: None)
    by_products = _attend_in_two_parts(q, k, v, output_gradient)
    for actual, expected in zip(by_kernel, by_products, strict=True):
        assert (actual.float() - expected.float()).norm() < 0.02 * expected.float().norm()


def _check_operators(rank: int) -> set[str]:
    """Run torch's check of custom operators: their shapes, layouts and gradients."""
    ops = torch.ops.trireme
    group = register_group(dist.group.WORLD)
    q, k, v = (
        torch.randn(2, 8, heads, 6, requires_grad=True).transpose(1, 2) for heads in (4, 2, 2)
    )
    for name in ("ring_attention", "allgather_attention"):
        operator = getattr(ops, name)
        backward_operator = getattr(ops, f"{name}_backward")
        arguments = (q, k, v, True, 0.3, group)
        torch.library.opcheck(operator.default, arguments)
        out, lse = (x.detach() for x in operator(*arguments))
        tensors = [x.detach() for x in (out, q, k, v, out, lse)]
        torch.library.opcheck(backward_operator.default, (*tensors, True, 0.3, group))
    return set(torch.library.opcheck(ops.all_to_all.default, (q, group)).values())


@pytest.mark.alone
@pytest.mark.slow
def test_the_operators_describe_their_results_to_the_compiler() -> None:
    assert run_distributed(_check_operators, 1) == [{"SUCCESS"}]


# --- models ---------------------------------------------------------------------------------------


def _evaluate(rank: int, dims: dict[str, int]) -> tuple[float, float]:
    """The totals over workers of their mean losses, and of a number that each has."""
    parallel = parallelize(masked_trial().build, choose("auto", 4, **dims), device=CPU)

    def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": language_loss(model, batch)}

    values = parallel.forward(metrics, models.masked_batch(0))
    assert values is not None
    return float(parallel.total(values["loss"])), float(parallel.total(torch.tensor(3.0)))


@pytest.mark.alone
@pytest.mark.parametrize(("dims", "copies"), [({"cp": 4}, 1), ({"cp": 2}, 2)])
def test_an_evaluation_counts_each_sequence_once(dims: dict[str, int], copies: int) -> None:
    expected = language_loss(masked_trial().build(), models.masked_batch(0)).item()
    loss, number = run_distributed(_evaluate, 4, dims)[1]
    assert loss == pytest.approx(copies * expected, rel=1e-6)
    assert number == pytest.approx(3 * copies)


def _mean_loss_by_division(model: nn.Module, batch: Batch) -> Tensor:
    """Value and gradient are nan for a part of a sequence without labels."""
    tokens, labels = batch
    is_label = (labels != -100).flatten()
    targets = labels.clamp(min=0).flatten()
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets, reduction="none")
    return (losses * is_label).sum() / is_label.sum()


def _unevenly_labelled_batches() -> list[Batch]:
    """Batches of 32 tokens with labels in the last quarter, in the middle half, and nowhere."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for labelled in (slice(24, 32), slice(8, 24), slice(0, 0)):
        tokens = torch.randint(0, 29, (2, 32), generator=generator)
        labels = torch.full_like(tokens, -100)
        labels[:, labelled] = tokens[:, labelled]
        batches.append((tokens, labels))
    return batches


def _numbers_of_own_batches(data_rank: int, dp: int) -> list[int]:
    """Which of the three batches a worker has; every worker has equally many of them."""
    if dp == 1:
        return [0, 1, 2]
    return [0, 2] if data_rank == 0 else [1, 2]


def _train_on_uneven_labels(rank: int, dims: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
    """A step in which parts of sequences, and a whole micro-batch, have no labels.

    Returns:
        The loss of the global batch, and the whole gradients.
    """
    batches = _unevenly_labelled_batches()
    workers = dist.get_world_size() if dist.is_initialized() else 1
    layout = choose("auto", workers, **dims)
    example = (_mean_loss_by_division, batches[0])
    parallel = parallelize(masked_trial().build, layout, device=CPU, example=example)
    label_counts = [float((labels != -100).sum()) for _, labels in batches]
    weights = [count / sum(label_counts) for count in label_counts]
    numbers = _numbers_of_own_batches(layout.dims.data_rank(rank), layout.dims.dp)
    own_loss = parallel.forward_backward(
        [batches[number] for number in numbers],
        [weights[number] for number in numbers],
        _mean_loss_by_division,
    )
    gradients = {}
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            is_sharded = isinstance(gradient, DTensor)
            gradients[name] = gradient.full_tensor() if is_sharded else gradient
    return float(parallel.total(own_loss)), gradients


@pytest.mark.alone
@pytest.mark.parametrize(
    ("workers", "dims"),
    [
        (2, {"cp": 2}),
        (4, {"cp": 4}),
        (4, {"cp": 2, "dp_replicate": 2}),
        (4, {"cp": 2, "dp_shard": 2}),
    ],
)
def test_parts_of_sequences_and_micro_batches_without_labels_are_left_out(
    workers: int, dims: dict[str, int]
) -> None:
    expected_loss, expected_gradients = _train_on_uneven_labels(0, {})
    assert expected_loss > 0
    loss, gradients = run_distributed(_train_on_uneven_labels, workers, dims)[0]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        assert torch.isfinite(expected).all(), name
        assert torch.allclose(gradients[name], expected, atol=1e-6), name


def _kept_bytes_of_forward(rank: int, workers: int, method: str) -> int:
    """Bytes that backward keeps of forward, without parameters."""
    layout = choose("auto", workers, cp=workers)
    tokens = torch.zeros(1, 1024, dtype=torch.int64)
    parallel = parallelize(masked_trial().build, layout, Options(context=method), device=CPU)
    with saved_for_backward() as saved:
        parallel.forward_backward([(tokens, tokens)], [1.0], language_loss)
    return models.storage_bytes(saved, parallel.parameters())


@pytest.mark.alone
@pytest.mark.parametrize("method", METHODS)
def test_activations_are_divided_by_the_number_of_workers(method: str) -> None:
    by_rank = run_distributed(_kept_bytes_of_forward, 4, 4, method)
    on_one_device = _kept_bytes_of_forward(0, 1, method)
    assert max(by_rank) == pytest.approx(on_one_device / 4, rel=0.05)


class TimeFirst(nn.Module):
    """A model of (T, B, D) that is given positions, and calls attention by an imported name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        shifted = self.linear(x) + positions[0].float()[:, None, None]
        q = shifted.movedim(0, 1).unsqueeze(1)
        return scaled_dot_product_attention(q, q, q)


def _mean_under_a_plan(rank: int) -> float:
    plan = ContextPlan(
        keywords=lambda positions: {"positions": positions},
        cut=lambda batch, part: {"x": part(batch["x"], 0), "name": batch["name"]},
        labels=lambda batch: torch.tensor(len(batch["x"])),
    )
    layout = choose("auto", 2, cp=2)
    parallel = parallelize(seeded(TimeFirst), layout, device=CPU, context_plan=plan)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).mean()

    batch = {"x": random(8, 3, 4), "name": "a"}
    return float(parallel.total(parallel.forward_backward([batch], [1.0], loss)))


@pytest.mark.alone
def test_a_task_may_have_its_own_context_plan() -> None:
    model = seeded(TimeFirst)()
    with torch.no_grad():
        expected = float(model(random(8, 3, 4), torch.arange(8).unsqueeze(0)).mean())
    assert run_distributed(_mean_under_a_plan, 2)[0] == pytest.approx(expected, rel=1e-6)


# --- what is refused ------------------------------------------------------------------------------


class Attends(nn.Module):
    """Calls attention with these arguments, or does not call it if there are none."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q = self.linear(x).unsqueeze(1)
        if not self.arguments:
            return q.softmax(-1)
        return F.scaled_dot_product_attention(q, q, q, **self.arguments)


def _check_refusals(rank: int) -> None:
    layout = choose("auto", 2, cp=2)
    mask = torch.ones(4, 4, dtype=torch.bool)
    cases: list[tuple[dict[str, Any], int, list[str]]] = [
        ({}, 8, ["not F.scaled_dot_product_attention"]),
        ({"attn_mask": mask}, 8, ["a mask", "parallel.cp"]),
        ({"dropout_p": 0.5}, 8, ["with probability 0.5"]),
        ({"is_causal": True}, 10, ["a sequence of 10 tokens", "4 equal pieces", "8 or 12"]),
    ]
    for arguments, length, words in cases:
        parallel = parallelize(functools.partial(Attends, arguments), layout, device=CPU)
        batches = [torch.randn(1, length, 4)]
        assert_refused(
            words, parallel.forward_backward, batches, [1.0], lambda model, x: model(x).mean()
        )
    # A linear layer takes no positions, and has no plan.
    build = functools.partial(nn.Linear, 4, 4)
    assert_refused(["Linear cannot be told"], parallelize, build, layout, device=CPU)


@pytest.mark.alone
def test_every_worker_refuses_a_model_that_cannot_be_split() -> None:
    run_distributed(_check_refusals, 2)


@pytest.mark.pure
def test_a_sequence_that_is_too_short_is_refused() -> None:
    check_length(64, 4, "ring")
    assert_refused(["3 tokens", "write a sequence length of 8"], check_length, 3, 4, "ring")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("method", "heads", "workers_per_node", "expected"),
    [
        ("auto", 16, 8, "ulysses"),
        ("ring", 16, 8, "ring"),
        ("auto", 16, 4, "ring"),
        ("auto", 16, None, "ring"),
        ("auto", 12, 8, "ring"),
        ("auto", None, 8, "ring"),
    ],
)
def test_auto_is_ulysses_within_a_node_if_the_heads_divide(
    method: str, heads: int | None, workers_per_node: int | None, expected: str
) -> None:
    dims = ParallelDims(cp=4, tp=2)
    chosen = choose_method(method, dims=dims, heads=heads, workers_per_node=workers_per_node)
    assert chosen == expected
