"""Tensor parallelism: what backward keeps, pieces that travel, and the loss of split logits.

Along a split sequence, backward gathers inputs again instead of keeping them whole. Pieces travel
while others are multiplied.
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from experiments.parity.curves import Curve, Trial, difference, parallelize_trial, train
from strategies import row_chunks, torch_internals
from strategies.context.apply import Context
from strategies.layout import choose
from strategies.options import Options
from strategies.parallelize import parallelize
from strategies.passing import Passing
from strategies.precision import Product
from strategies.tensor import apply as tensor_apply
from strategies.tensor import ops, overlap
from strategies.tensor.apply import one_part
from strategies.tensor.layers import SplitLayers
from strategies.tensor.loss import VocabularyLogits
from tests.pool import run_distributed
from tests.strategies.models import (
    COMPILED,
    CPU,
    GPT_PLAN,
    WIDTH,
    ZOO,
    PlainGPT,
    gpt_trial,
    random,
    saved_for_backward,
    slow,
    storage_bytes,
)

BATCH = 2
SEQUENCE = 64
LAYERS = 2
ASYNC_TP = {"async_tp": True}


def _world_peers() -> ops.Peers:
    return ops.Peers(dist.group.WORLD)  # type: ignore[arg-type]


# --- what backward keeps --------------------------------------------------------------------------


def _train_and_measure(rank: int, changes: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    """Forward and backward of a GPT.

    Returns:
        Bytes kept for backward, how often something was gathered along the sequence in it, and the
        gradients.
    """
    trial = gpt_trial(layers=LAYERS)
    parallel = parallelize(
        trial.build,
        choose("tensor", 2),
        Options(**changes),
        device=CPU,
        tensor_plan=trial.tensor_plan,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 8, (BATCH, SEQUENCE), generator=generator)
    kept: list[Tensor] = []

    def loss(model: Any, batch: Any) -> Tensor:
        with saved_for_backward() as saved:
            value = model(batch).square().mean()
        kept.extend(saved)
        return value

    start_gather = ops.Peers.start_gather
    with mock.patch.object(
        ops.Peers, "start_gather", autospec=True, side_effect=start_gather
    ) as gathers:
        parallel.forward_backward([tokens], [1.0], loss)
    gradients = {name: p.grad.full_tensor() for name, p in parallel.module.named_parameters()}
    return storage_bytes(kept, parallel.parameters()), gathers.call_count, gradients


def _measure_with_split_and_whole_inputs(rank: int, changes: dict[str, Any]) -> tuple[Any, Any]:
    """`_train_and_measure`, and the same if inputs are kept whole, uncompiled."""
    split = _train_and_measure(rank, changes)
    reference_changes = {} if changes == COMPILED else changes
    keeping = functools.partial(_keeping_layers, SplitLayers)
    with mock.patch.object(tensor_apply, "SplitLayers", keeping):
        whole = _train_and_measure(rank, reference_changes)
    return split, whole


def _keeping_layers(kind: type[SplitLayers], *args: Any, **options: Any) -> SplitLayers:
    return kind(*args, **options | {"keeps_gathered": True})


class Conditioned(nn.Module):
    """Blocks whose only split layers have one input, such as the time in a diffusion model.

    The last of them, the head, is a block too: it is called last, and recomputed first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shift = x.sin()
        for block in self.blocks:
            x = block(x, shift)
        return x


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(6, 6)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x + self.shift(shift))


def _conditioned() -> Trial:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Conditioned()

    return Trial(
        build,
        lambda model, x: model(x).square().mean(),
        lambda step: torch.randn(8, 6, generator=torch.Generator().manual_seed(step)),
        steps=3,
        micro_batches=2,
    )


def _recomputed(rank: int, mode: str) -> Curve:
    options = Options(activation_checkpointing=mode)
    return train(_conditioned(), choose("tensor", 2), options, CPU)


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["full", slow("selective"), slow("every_2")])
def test_blocks_whose_layers_have_one_input_can_be_recomputed(mode: str) -> None:
    one_device = train(_conditioned(), choose("single", 1), Options(), CPU)
    curve = run_distributed(_recomputed, 2, mode)[0]
    assert difference(one_device, curve).within(1e-5)


def _notes(rank: int, name: str) -> tuple[str, ...]:
    layout = choose("tensor", 2)
    return parallelize_trial(ZOO[name], layout, Options(async_tp=True), CPU).notes


@pytest.mark.alone
def test_a_note_says_why_nothing_is_sent_in_pieces() -> None:
    notes = run_distributed(_notes, 2, "mlp")[0]
    assert [note for note in notes if "async_tp" in note] == [
        "parallel.async_tp does nothing, because the model is not split along its sequence"
    ]


@pytest.mark.alone
@pytest.mark.parametrize(
    "changes", [{}, slow({"precision": "bf16"}), slow(COMPILED), ASYNC_TP], ids=str
)
def test_backward_gathers_inputs_again_instead_of_keeping_them(changes: dict[str, Any]) -> None:
    results = run_distributed(_measure_with_split_and_whole_inputs, 2, changes)[0]
    split, whole = results
    split_bytes, split_gathers, split_gradients = split
    whole_bytes, whole_gathers, whole_gradients = whole
    # A block has one input of queries, keys and values, and one of its MLP; the head has one.
    inputs = 2 * LAYERS + 1
    # What the compiler gathers itself is not counted.
    assert split_gathers == (1 if changes == COMPILED else inputs)
    assert whole_gathers == 0
    itemsize = 2 if "precision" in changes else 4
    input_bytes = BATCH * SEQUENCE * WIDTH * itemsize
    assert whole_bytes - split_bytes == inputs * input_bytes / 2
    for name, gradient in split_gradients.items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.alone
def test_inputs_of_recomputed_blocks_are_not_gathered_a_third_time() -> None:
    _, gathers, _ = run_distributed(_train_and_measure, 2, {"activation_checkpointing": "full"})[0]
    assert gathers == 0


@pytest.mark.pure
def test_a_worker_without_processes_sends_what_a_real_one_does() -> None:
    module = PlainGPT(layers=LAYERS)
    peers, _ = one_part(module, GPT_PLAN, 2)
    module(torch.randint(0, 8, (BATCH, SEQUENCE))).square().mean().backward()
    embedding_sums = 1
    block_inputs_and_sums = 4 * LAYERS
    head_inputs = 1
    sent_in_both_directions = embedding_sums + block_inputs_and_sums + head_inputs
    head_outputs = 1  # backward does not send them
    gathered_again = 2 * LAYERS + 1
    assert sum(peers.calls.values()) == 2 * sent_in_both_directions + head_outputs + gathered_again


# --- copies, and sums beside products -------------------------------------------------------------


class Operations(torch_internals.OperationMode):  # type: ignore[misc]
    """Records the names of operations, and the bytes of activations that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        self.names.append(name)
        if name in ("cat", "clone"):
            is_activation = result.dim() > 2 and result.size(-1) in (WIDTH, WIDTH // 2)
            self.copied_bytes += result.nbytes if is_activation else 0
        return result


def _record_step(rank: int, samples: int) -> tuple[list[str], float]:
    """Forward and backward of a GPT on two workers.

    Returns:
        What backward does, and how many inputs of a block are copied.
    """
    trial = gpt_trial(layers=1)
    parallel = parallelize(
        trial.build, choose("tensor", 2), Options(), device=CPU, tensor_plan=trial.tensor_plan
    )
    tokens = torch.randint(0, 8, (samples, SEQUENCE))
    with Operations() as operations:
        value = parallel.call(lambda model, batch: model(batch).square().mean(), tokens)
        forward = len(operations.names)
        value.backward()
    input_bytes = samples * SEQUENCE * WIDTH * 4
    return operations.names[forward:], operations.copied_bytes / input_bytes


def _sums_of_compiled_block(rank: int) -> list[int]:
    """How many sums each compiled backward has."""
    counts: list[int] = []

    def keep(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def count(graph: Any, _: Any) -> Any:
        counts.append(sum("reduce_scatter" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=count)
    torch._dynamo.register_backend(backend, name="counting")
    trial = gpt_trial(layers=2)
    parallel = parallelize(
        trial.build,
        choose("tensor", 2),
        Options(compile=True, compile_backend="counting"),
        device=CPU,
        tensor_plan=trial.tensor_plan,
    )
    tokens = torch.randint(0, 8, (BATCH, SEQUENCE))
    parallel.forward_backward([tokens], [1.0], lambda model, batch: model(batch).square().mean())
    return counts


@pytest.mark.alone
def test_backward_sums_beside_products_and_one_sample_is_not_copied() -> None:
    backward, copied_of_one = run_distributed(_record_step, 2, 1)[0]
    _, copied_of_two = run_distributed(_record_step, 2, 2)[0]
    starts = [i for i, name in enumerate(backward) if name == "reduce_scatter_tensor"]
    assert len(starts) == 3, "one for the head, the MLP, and queries, keys and values together"
    for start in starts:
        until_wait = backward[start : backward.index("wait_tensor", start)]
        assert "mm" in until_wait, "the product for the gradient of a weight"
    assert copied_of_one == 1, "logits, which are gathered"
    # Around every collective they would be: 3 gatherings and 3 sums, the same in backward, and for
    # queries, keys, values, the MLP and the head another gathering.
    assert copied_of_one < copied_of_two < copied_of_one + 17


@pytest.mark.slow
@pytest.mark.alone
def test_compiled_layers_with_one_input_sum_its_gradient_once() -> None:
    assert run_distributed(_sums_of_compiled_block, 2)[0] == [2], "one for attention, one for MLP"


# --- pieces that travel ---------------------------------------------------------------------------


def _overlapped_layers(rank: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Forward and backward of two layers whose pieces travel while others are multiplied.

    Returns:
        The events in order, and the results beside the expected ones.
    """
    events: list[str] = []

    class RecordedPassing(Passing):
        def __init__(self, tensors: list[Tensor], *args: Any) -> None:
            events.append(f"send {sum(t.nbytes for t in tensors)}")
            super().__init__(tensors, *args)

        def arrived(self) -> list[Tensor]:
            events.append("wait")
            return super().arrived()

    class RecordedProduct:
        def __getattr__(self, name: str) -> Any:
            if name in ("forward", "input_gradient"):
                events.append("multiply")
            return getattr(Product, name)

    peers = _world_peers()
    product = cast(Any, RecordedProduct())
    x = random(2, 8, 6)
    up = random(12, 6, seed=1)
    down = random(6, 12, seed=2)
    gradient = random(2, 8, 6, seed=3)
    x_part = peers.part(x, 1).clone().requires_grad_()
    up_part = peers.part(up, 0).clone().requires_grad_()
    down_part = peers.part(down, 1).clone().requires_grad_()
    with mock.patch.object(overlap, "Passing", RecordedPassing):
        gathered, hidden = overlap.columns(
            x_part,
            up_part,
            None,
            group=peers.group,
            product=product,
            start_gather=lambda part: peers.start_gather(part, 1),
        )
        hidden = hidden + 0.0 * gathered.sum()
        y_part = overlap.rows(hidden, down_part, group=peers.group, product=product)
        y_part.backward(peers.part(gradient, 1))

    whole_x, whole_up, whole_down = (t.clone().requires_grad_() for t in (x, up, down))
    y = whole_x @ whole_up.T @ whole_down.T
    y.backward(gradient)
    expected = [
        peers.part(y, 1),
        peers.part(_gradient_of(whole_x), 1),
        peers.part(_gradient_of(whole_up), 0),
        peers.part(_gradient_of(whole_down), 1),
    ]
    results = [y_part, _gradient_of(x_part), _gradient_of(up_part), _gradient_of(down_part)]
    return events, results, expected


def _gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.alone
def test_pieces_travel_while_others_are_multiplied() -> None:
    pieces = 4
    send = f"send {2 * 8 // pieces * 6 * 4}"
    gather = [send, "multiply", "wait"] * (pieces - 1) + ["multiply"]
    scatter = ["multiply"] + [send, "multiply", "wait"] * (pieces - 1)
    for events, results, expected in run_distributed(_overlapped_layers, pieces):
        assert events == gather + scatter + gather + scatter
        torch.testing.assert_close(results, expected)


# --- the loss of split logits ---------------------------------------------------------------------

LOSS_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
]
SPLIT_USES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, 7),
    "reshape": lambda x: x.reshape(6, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "shifted": lambda x: x[:, :-1],
    "shifted with dots": lambda x: x[..., :-1, :].contiguous(),
}
"""Uses of logits that leave them split."""
GATHERING_USES: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: F.softmax(x, -1),
    "transposed": lambda x: x.transpose(1, 2),
    "scaled": lambda x: x / 2,
}


def _check_cross_entropy(rank: int) -> None:
    """Compare the loss of split logits and its gradient with those of whole logits."""
    peers = _world_peers()
    row_chunks.CHUNK_NUMBERS = 4  # two rows of two words
    for vocabulary, arguments in itertools.product((7, 3), LOSS_ARGUMENTS):
        torch.manual_seed(3)
        whole = (5 * torch.randn(6, vocabulary)).requires_grad_()
        target = torch.randint(0, vocabulary, (6,))
        target[2] = -100
        local = peers.part(whole.detach(), -1).clone().requires_grad_()
        expected = F.cross_entropy(whole, target, **arguments)
        actual = F.cross_entropy(VocabularyLogits(local, peers, vocabulary), target, **arguments)
        assert type(actual) is Tensor
        assert actual.shape == expected.shape
        weights = torch.arange(1.0, 7.0) if actual.dim() else 1.0
        (expected * weights).sum().backward()
        (actual * weights).sum().backward()
        loss_error = (actual - expected).abs().max()
        expected_gradient = peers.part(_gradient_of(whole), -1)
        gradient_error = (_gradient_of(local) - expected_gradient).abs().sum()
        assert loss_error + gradient_error < 1e-5, (vocabulary, arguments)


@pytest.mark.alone
def test_cross_entropy_of_split_logits_is_that_of_whole_logits() -> None:
    """Of 3 words over 4 workers, one worker has none. One target is ignored."""
    run_distributed(_check_cross_entropy, 4)


def _check_uses_of_split_logits(rank: int) -> None:
    peers = _world_peers()
    whole = torch.arange(42.0).reshape(2, 3, 7)
    split = VocabularyLogits(peers.part(whole, -1), peers, 7)
    rounded = whole.bfloat16()
    split_rounded = VocabularyLogits(peers.part(rounded, -1), peers, 7).float()
    for logits, expected_logits in ((split, whole), (split_rounded, rounded.float())):
        for name, use in SPLIT_USES.items():
            value = use(logits)
            expected = use(expected_logits)
            assert isinstance(value, VocabularyLogits), name
            assert value.dtype == expected.dtype, name
            assert value.shape == expected.shape, name
            torch.testing.assert_close(value.gathered(), expected, msg=name)
        for name, use in GATHERING_USES.items():
            value = use(logits)
            assert not isinstance(value, VocabularyLogits), name
            torch.testing.assert_close(value, use(expected_logits), msg=name)


@pytest.mark.alone
def test_split_logits_stay_split_where_a_loss_needs_it_and_are_right() -> None:
    run_distributed(_check_uses_of_split_logits, 4)


class LargestFloat32(torch_internals.OperationMode):  # type: ignore[misc]
    """Measures the largest float32 tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.dtype == torch.float32 and not value.is_meta:
                self.numel = max(self.numel, value.numel())
        return result


def _float32_memory_of_loss(rank: int) -> tuple[int, int]:
    """The loss of split 16-bit logits and its backward.

    Returns:
        The numbers of the largest float32 tensor, and the bytes kept for backward.
    """
    peers = _world_peers()
    row_chunks.CHUNK_NUMBERS = 1024
    local = random(64, 512, seed=rank).bfloat16().requires_grad_()
    with LargestFloat32() as largest:
        with saved_for_backward() as kept:
            logits = VocabularyLogits(local, peers, 1024).float()
            value = F.cross_entropy(logits, torch.arange(64))
        value.backward()
    assert _gradient_of(local).dtype == local.dtype
    assert value.dtype == torch.float32
    return largest.numel, storage_bytes(kept, [local])


@pytest.mark.alone
def test_split_logits_become_float32_a_few_rows_at_a_time() -> None:
    """All 64 rows of 512 words in float32 would be 128 KiB."""
    for numel, kept_bytes in run_distributed(_float32_memory_of_loss, 2):
        assert numel <= 1024
        assert kept_bytes < 4096


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.pure
def test_split_logits_have_no_gradient_if_no_label_of_the_part_counts(has_labels: bool) -> None:
    """With tp and cp together; test_parity.py trains such a row."""
    local = random(4, 8).requires_grad_()
    logits = VocabularyLogits(local * 2, ops.ShapePeers(2), 16)
    context = cast(Any, SimpleNamespace(_has_labels=torch.tensor(has_labels)))
    gated = Context._gate_output(context, nn.Linear(1, 1), (), logits)
    assert isinstance(gated, VocabularyLogits)
    assert gated.shape == logits.shape
    gated.local.sum().backward()
    torch.testing.assert_close(local.grad, torch.full_like(local, 2.0 * has_labels))
