"""Seconds of a step's communication, by cause: what is exposed, and what computation hides.

The parameters of a sharded block are gathered while the block before it computes, and its gradients
are scattered while the backward of the next one runs. Communication is exposed where it takes
longer than that computation, and where it cannot start earlier (the root's parameters). An
all-reduce over replicas hides behind the last backward, except for its last bucket. Tensor
parallelism hides the sums of its backward behind the gradients of the weights that used them, and
what it gathers again behind the gradients of inputs; with parallel.async_tp it hides a share of
everything (`Device.async_tp`, less what products lose to it) if the products beside it take as
long. Exchanging tokens with experts hides nothing, except in trainers that interleave two
micro-batches (`Device.exchange_overlap`). Experts are assumed to be used evenly, and to be gathered
and averaged over as many workers as the other parameters.

All-gathers and reduce-scatters are rings over the links between the devices that take part (Thakur
et al. 2005), all-reduces trees over their nodes, as NCCL has them. A ring of R devices on several
nodes sends (R - 1) / R of the tensor over each node's link, also what began in the node that gets
it. A tree over N nodes sends (N - 1) / N of it each way. Ranks are numbered so that tp peers are
next to one another, then those of cp, dp_shard and dp_replicate, then stages (strategies/dims.py);
a node holds `per_node` consecutive ranks. A group whose neighbours are `stride` ranks apart has
min(n, per_node / stride) members in a node; the other ranks of the node run the same collective in
groups of their own and share the node's link.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from app.planner.case import Case
from app.planner.part_costs import PartCost
from strategies.activation_offloading import moved_blocks
from strategies.context.apply import METHODS
from strategies.costs import Collective, UnitSize
from strategies.pipeline.schedules import SPLIT

OVERLAPPABLE_SHARE = 2 / 3
"""Share of a block's products that run beside the collectives of asynchronous tensor parallelism.

Of several layers with the same input only the first does: in a gated block q, out, gate and down.
"""
FIRST_LAYERS_SHARE = 0.3
"""Share of a block's products that belong to the first layers with an input: q and gate."""


class Communication(NamedTuple):
    """Seconds of a step's communication that has one cause.

    Args:
        exposed: Seconds in which the device waits for it.
        hidden: Seconds in which the device computes beside it.
    """

    exposed: float = 0.0
    hidden: float = 0.0


def communication_by_cause(case: Case, compute_seconds: float) -> dict[str, Communication]:
    """The communication of a step, except for what a pipeline's stages send.

    Args:
        case: The layout.
        compute_seconds: Seconds in which the slowest stage computes a micro-batch.
    """
    return {
        "tensor": _tensor_parallelism(case),
        "context": _context_parallelism(case),
        "expert": _expert_parallelism(case, compute_seconds),
        "shard": _sharded_parameters(case),
        "host": _moved_activations(case),
        "replicate": _averaged_gradients(case),
    }


# --- tensor parallelism ---------------------------------------------------------------------------


def _tensor_parallelism(case: Case) -> Communication:
    """The collectives of tensor parallelism, some of which products hide."""
    candidate = case.candidate
    tp = candidate.dims.tp
    if tp == 1:
        return Communication()
    links = case.machine.links
    sent_bytes = case.sum_over_parts([part.tp_bytes for part in case.parts])
    collectives = case.sum_over_parts([part.tp_collectives for part in case.parts])
    hop_seconds = links.hop_across if tp > links.per_node else links.hop_within
    seconds = links.gather(sent_bytes * tp / (tp - 1), tp, 1)  # with the hops of one collective
    seconds += max(collectives - 1, 0) * ((tp - 1) * hop_seconds)
    if not sent_bytes or candidate.schedule in SPLIT:
        return Communication(exposed=seconds * candidate.micro_batches)
    seconds_per_byte = seconds / sent_bytes
    if case.options.async_tp:
        hidden = case.sum_over_parts(
            [_hidden_by_async_tp(case, part, seconds_per_byte) for part in case.parts]
        )
        # What products lose to it is in `Device.async_tp`, so it does not slow them down further.
        return Communication(exposed=(seconds - hidden) * candidate.micro_batches)
    hidden = case.sum_over_parts(
        [_hidden_in_backward(case, part, seconds_per_byte) for part in case.parts]
    )
    return Communication(
        exposed=(seconds - hidden) * candidate.micro_batches,
        hidden=hidden * candidate.micro_batches,
    )


def _hidden_by_async_tp(case: Case, part: PartCost, seconds_per_byte: float) -> float:
    """Seconds of a part's collectives that asynchronous tensor parallelism hides."""
    hideable_per_byte = seconds_per_byte * case.machine.device.async_tp
    return min(hideable_per_byte * part.tp_bytes, OVERLAPPABLE_SHARE * part.overlappable_seconds)


def _hidden_in_backward(case: Case, part: PartCost, seconds_per_byte: float) -> float:
    """Seconds of a part's tensor-parallel collectives that its backward hides."""
    hiding_seconds = case.machine.device.hidden * FIRST_LAYERS_SHARE * part.weight_gradient_seconds
    beside_weights = min(seconds_per_byte * part.tp_bytes_beside_weights, hiding_seconds)
    beside_inputs = min(seconds_per_byte * part.tp_bytes_beside_inputs, hiding_seconds)
    return beside_weights + beside_inputs


# --- context parallelism --------------------------------------------------------------------------


def _context_parallelism(case: Case) -> Communication:
    """What attention over a split sequence sends; a ring's messages hide behind attention."""
    candidate = case.candidate
    cp = candidate.dims.cp
    if cp == 1:
        return Communication()
    method = METHODS[case.context_method]
    exposed = 0.0
    hidden = 0.0
    for part, count in zip(case.parts, case.counts):
        sent = method.sent_bytes(
            queries=part.query_numel,
            keys=part.key_value_numel,
            cp=cp,
            itemsize=case.work.itemsize,
        )
        repeats = (part.attention_forwards, 1.0)
        for bytes_sent, times, attention_seconds in zip(sent, repeats, part.attention_seconds):
            seconds = case.machine.links.gather(bytes_sent * cp / (cp - 1), cp, candidate.dims.tp)
            left = max(0.0, seconds - attention_seconds) if method.hides_sending else seconds
            exposed += left * times * count * candidate.micro_batches
            hidden += (seconds - left) * times * count * candidate.micro_batches
    return Communication(exposed, hidden)


# --- expert parallelism ---------------------------------------------------------------------------


def _expert_parallelism(case: Case, compute_seconds: float) -> Communication:
    """The exchange of tokens with experts, which hides behind another micro-batch's computation.

    Args:
        case: The layout.
        compute_seconds: Seconds in which the slowest stage computes a micro-batch.
    """
    if case.candidate.dims.ep == 1:
        return Communication()
    micro_batches = case.candidate.micro_batches
    seconds = _exchange_seconds(case)
    hidden = min(seconds, case.machine.device.exchange_overlap * compute_seconds)
    return Communication(exposed=(seconds - hidden) * micro_batches, hidden=hidden * micro_batches)


def _exchange_seconds(case: Case) -> float:
    """Seconds of sending a micro-batch's tokens to experts and back.

    With `Device.dispatch` a token goes once to each worker that has any of its k experts, and from
    node to node once to each such node, which passes it on (DeepEP, https://github.com/deepseek-ai/
    DeepEP); results come back as sums.
    """
    dims = case.candidate.dims
    device = case.machine.device
    links = case.machine.links
    exchange = case.exchange
    sent_bytes = exchange.sent_bytes * device.exchange
    if not device.dispatch:
        return links.exchange(sent_bytes, dims.ep, dims.tp)
    nodes = links.nodes(dims.ep, dims.tp)
    return links.exchange(
        sent_bytes,
        dims.ep,
        dims.tp,
        share_within=chosen_share(exchange.workers, exchange.experts, exchange.top_k),
        share_across=chosen_share(nodes, exchange.experts, exchange.top_k),
    )


def chosen_share(groups: int, experts: int, top_k: int) -> float:
    """To how many groups of experts a token goes on average, for each of its experts.

    A group has none of k experts that are chosen by chance with the probability
    C(E - E/groups, k) / C(E, k).

    Args:
        groups: The number of groups into which the experts are split.
        experts: E, the number of experts.
        top_k: k, the number of experts that a token chooses.
    """
    others = experts - experts // groups
    chosen = 1 - math.comb(others, top_k) / math.comb(experts, top_k)
    return groups * chosen / top_k


# --- data parallelism -----------------------------------------------------------------------------


def _sharded_parameters(case: Case) -> Communication:
    """Gathering sharded parameters and scattering gradients, beside the parts' computation."""
    if case.candidate.dims.dp_cp == 1 or not case.candidate.strategy.is_sharded:
        return Communication()
    exposed = 0.0
    hidden = 0.0
    for part, unit, count in zip(case.parts, case.units, case.counts):
        for phase, compute_seconds in (
            ("forward", part.forward_seconds),
            ("backward", part.backward_seconds),
        ):
            hiding_seconds = 0.0
            if part.is_block:
                hiding_seconds = compute_seconds * case.machine.device.hidden
            for seconds, times in _collectives_together(case, part, unit, phase):
                exposed += max(seconds - hiding_seconds, 0.0) * times * count
                hidden += min(seconds, hiding_seconds) * times * count
    return Communication(exposed, hidden)


def _collectives_together(
    case: Case, part: PartCost, unit: UnitSize, phase: str
) -> Iterator[tuple[float, int]]:
    """The collectives of a part that run together in a phase of a micro-batch.

    With some micro-batches all of the part's collectives run, with others only a few of them.

    Yields:
        (seconds of all of them, how often a step runs them)
    """
    collectives = [
        collective
        for collective in case.candidate.strategy.collectives(unit, case.step)
        if collective.phase == phase and collective.times
    ]
    previous_times = 0
    for times in sorted({collective.times for collective in collectives}):
        seconds = sum(
            _collective_seconds(case, collective, part)
            for collective in collectives
            if collective.times >= times
        )
        yield seconds, times - previous_times
        previous_times = times


def _collective_seconds(case: Case, collective: Collective, part: PartCost) -> float:
    """Seconds of one collective over data-parallel workers for the parameters of a part."""
    dims = case.candidate.parameter_dims
    links = case.machine.links
    device = case.machine.device
    if collective.name == "all_gather" and part.is_block and case.work.precision == "fp8":
        # Trainers that multiply in 8 bits may gather the blocks' weights in 8 bits as well.
        size = collective.bytes * (device.gather or case.work.itemsize) / case.work.itemsize
        collective = replace(collective, bytes=size)
    ways = getattr(dims, collective.over)
    stride = dims.tp * (dims.dp_shard if collective.over == "dp_replicate" else 1)
    if collective.name == "all_reduce":
        return links.reduce(collective.bytes, ways, stride)
    return links.gather(collective.bytes, ways, stride)


def _averaged_gradients(case: Case) -> Communication:
    """The all-reduce of whole gradients in buckets, behind the last backward."""
    if case.candidate.dims.dp_cp == 1 or case.candidate.strategy.is_sharded:
        return Communication()
    dims = case.candidate.parameter_dims
    links = case.machine.links
    size = sum(
        float(collective.bytes) * count
        for unit, count in zip(case.units, case.counts)
        for collective in case.candidate.strategy.collectives(unit, case.step)
        if collective.over == "dp_replicate"
    )
    last_bucket = min(size, case.options.bucket_mb * 2**20)
    seconds = links.reduce(size, dims.dp_replicate, dims.tp)
    last_bucket_seconds = links.reduce(last_bucket, dims.dp_replicate, dims.tp)
    backward_seconds = case.sum_over_parts([part.backward_seconds for part in case.parts])
    not_hidden = seconds - case.machine.device.hidden * backward_seconds
    left = min(seconds, max(not_hidden, last_bucket_seconds))
    return Communication(exposed=left, hidden=seconds - left)


# --- host memory and pipelines --------------------------------------------------------------------


def _moved_activations(case: Case) -> Communication:
    """Copying saved tensors to the host and back, where it takes longer than what runs beside it.

    While a block computes, the tensors of the block before are copied, and in backward likewise.
    The memory of a CPU is the host's, where the copies wait for nothing but hide behind nothing.
    The copies are assumed not to slow down the computation that hides them.
    """
    candidate = case.candidate
    device = case.machine.device
    if not candidate.moves_activations:
        return Communication()
    bytes_per_second = device.bandwidth / 2 if device.is_cpu else device.gpu.link_host
    blocks = case.blocks(case.counts)
    moved = moved_blocks(blocks, is_pipeline=candidate.dims.pp > 1)
    exposed = 0.0
    for part, count in zip(case.parts, case.counts):
        if not part.is_block:
            continue
        copy_seconds = part.moved_bytes / bytes_per_second
        times = count * moved / blocks * candidate.micro_batches
        for compute_seconds in (part.forward_seconds, part.backward_seconds):
            hidden = 0.0 if device.is_cpu else min(copy_seconds, compute_seconds)
            exposed += (copy_seconds - hidden) * times
    return Communication(exposed)


def stage_sends(case: Case, micro_batch_seconds: float) -> float:
    """Exposed seconds of sending activations to the next stage and gradients back, for each chunk.

    While the pipeline fills and drains every hop is waited for. In between, a send has the time in
    which its stage computes another micro-batch or chunk.

    Args:
        case: The layout.
        micro_batch_seconds: Seconds of a micro-batch on a stage.
    """
    candidate = case.candidate
    dims = candidate.dims
    if dims.pp == 1:
        return 0.0
    sent_bytes = max(part.stage_input_bytes for part in case.parts)
    seconds = case.machine.links.send(sent_bytes, dims.dp_cp * dims.tp)
    hiding_seconds = case.machine.device.hidden * micro_batch_seconds / candidate.chunks / 2
    steady_seconds = candidate.micro_batches * candidate.chunks * max(0.0, seconds - hiding_seconds)
    return 2 * (seconds * (dims.pp - 1) + steady_seconds)
