"""Pipelines: where stages are cut, how many micro-batches are in flight on each, and how long devices wait.

Stages are cut where *costs* balance, embedding and head included: the cut that makes the dearest chunk cheapest. What
schedules hold and wait for is told in strategies/pipeline/schedules.py; here it is in numpy, for many layouts at once.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray

THIRD = 1 / 3
"""Of a micro-batch's time: forward, the gradients of inputs, and those of weights take about a third each."""


def cut(weights: Array, parts: int) -> list[int]:
    """How many of consecutive items go to each part, so that the heaviest part is lightest; none is empty."""
    items = len(weights)
    low, high = float(weights.max()), float(weights.sum())
    for _ in range(40):
        middle = (low + high) / 2
        if len(_filled(weights, middle)) <= parts:
            high = middle
        else:
            low = middle
    counts = _filled(weights, high)
    while len(counts) < parts:  # fewer parts would do: take from the longest
        longest = int(np.argmax(counts))
        half = counts[longest] // 2
        counts[longest : longest + 1] = [half, counts[longest] - half]
    assert sum(counts) == items and all(counts), (counts, parts)
    return counts


def _filled(weights: Array, limit: float) -> list[int]:
    counts, load = [0], 0.0
    for weight in weights:
        if counts[-1] and load + weight > limit * (1 + 1e-12):
            counts.append(0)
            load = 0.0
        counts[-1] += 1
        load += weight
    return counts


def block_cut(order: list[str], seconds: dict[str, float], parts: int) -> list[int]:
    """Blocks per chunk; what is before the first block weighs on the first chunk, what is after on the last."""
    weights = np.array([seconds[name] for name in order])
    weights[0] += seconds.get("before", 0.0)
    weights[-1] += seconds.get("after", 0.0)
    return cut(weights, parts)


def stage_counts(order: list[str], names: list[str], blocks: list[int], pp: int, schedule: str) -> Array:
    """(stages, kinds): how many parts of each kind a stage holds. Chunk c is on stage c mod pp, of zbv in a V."""
    counts = np.zeros((pp, len(names)))
    begin = 0
    for chunk, length in enumerate(blocks):
        stage = chunk % pp
        if schedule == "zbv" and chunk >= pp:
            stage = 2 * pp - 1 - chunk
        for name in order[begin : begin + length]:
            counts[stage, names.index(name)] += 1
        if chunk == 0 and "before" in names:
            counts[stage, names.index("before")] += 1
        if chunk == len(blocks) - 1 and "after" in names:
            counts[stage, names.index("after")] += 1
        begin += length
    return counts


def in_flight(schedule: str, stage: Array, pp: Array, micro_batches: Array, chunks: Array) -> Array:
    """Micro-batches whose activations a stage holds at once, at most."""
    if schedule == "gpipe":
        most = micro_batches
    elif schedule == "interleaved_1f1b":
        most = ((chunks - 1) * pp + 2 * (pp - stage) - 1) / chunks
    elif schedule == "zb_h2":
        most = 2 * pp - 1
    elif schedule in ("zb_h1", "zbv"):
        most = pp
    else:
        most = pp - stage
    return np.minimum(micro_batches, np.maximum(most, 1))


def waits(schedule: str, pp: Array, chunks: Array) -> Array:
    """Micro-batch times (forward and backward) that a device waits for in one step."""
    share = {"zb_h1": THIRD, "zb_h2": THIRD, "zbv": THIRD / 2}.get(schedule, 1.0)
    return (pp - 1) * share / (chunks if schedule == "interleaved_1f1b" else 1)
