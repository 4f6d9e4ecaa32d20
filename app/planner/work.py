"""Seconds that a part of the model computes, for many sizes of the micro-batch and degrees of tp at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.planner.fitted import Costs, Part, basis
from app.planner.rates import Rates
from app.planner.read import AUTOCAST, CAST, PLAIN

Array = np.ndarray


@dataclass
class Work:
    """Per kind of part (rows) and (micro-batch, tp) pair (columns): seconds, and FLOPs of forward and backward."""

    names: list[str]
    forward: Array
    backward: Array
    recompute_full: Array
    recompute_selective: Array
    flops: Array
    launched_forward: Array
    """What the host needs to launch a forward; `forward` is at least that."""
    launched_backward: Array


def precision_of(way: str, precision: str) -> str:
    return "fp32" if way == PLAIN else precision


def work(
    costs: Costs, way: str, precision: str, batch: Array, tp: Array, device: Rates, compiled: bool = False
) -> Work:
    """Roofline: products at the device's rate for their size, everything else by the bytes it moves.

    A part takes at least as long as the host needs to launch its operations. compiled: blocks are, by torch.compile.
    """
    at = basis(batch, tp)
    runs = precision_of(way, precision)
    rows: dict[str, list[Array]] = {}
    for name, part in costs.parts.items():
        fuses = compiled and name.startswith("block")
        # Of a run in fp8 only the blocks' linear layers are.
        own = "bf16" if runs == "fp8" and not name.startswith("block") else runs
        forward, f_flops, f_launched = _phase(part, "forward", own, way, at, device, fuses)
        backward, b_flops, b_launched = _phase(part, "backward", own, way, at, device, fuses)
        moved = np.maximum(part.scalars["moved_forward"] @ at, 0) / device.bandwidth
        values = {
            "forward": forward,
            "backward": backward,
            "recompute_full": forward,
            "recompute_selective": moved * (device.compiled_bytes if fuses else 1.0),
            "flops": f_flops + b_flops,
            "launched_forward": f_launched,
            "launched_backward": b_launched,
        }
        for key, value in values.items():
            rows.setdefault(key, []).append(value)
    return Work(list(costs.parts), **{key: np.array(values) for key, values in rows.items()})


def _phase(
    part: Part, phase: str, precision: str, way: str, at: Array, device: Rates, fuses: bool
) -> tuple[Array, Array, Array]:
    """Seconds, FLOPs, and the seconds that launching takes."""
    shapes, counts = part.products[phase]
    seconds = np.zeros(at.shape[1])
    flops = np.zeros(at.shape[1])
    itemsize = 4 if way == PLAIN else 2
    if len(shapes):
        m, n, k, many = np.moveaxis(shapes @ at, 1, 0)  # each (products, pairs)
        work_ = 2 * m * n * k * many * counts[:, None]
        size = k / (k + device.k_half) * (m * n * many) / (m * n * many + device.mn_half)
        moved = (m * k + k * n + m * n) * many * counts[:, None] * itemsize
        seconds += np.maximum(work_ / (device.peak(precision) * np.maximum(size, 1e-3)), moved / device.bandwidth).sum(
            0
        )
        seconds += device.packing * _weights(shapes, counts, at) * itemsize / device.bandwidth
        flops += work_.sum(0)
    attended = np.maximum(part.scalars[f"attention_{phase}"] @ at, 0)
    seconds += attended / (device.gpu.rate("bf16" if precision == "fp8" else precision) * device.attention)
    moved_ = np.maximum(part.scalars[f"moved_{phase}"] @ at, 0) * (device.compiled_bytes if fuses else 1.0)
    launched = np.maximum(part.scalars[f"operations_{phase}"] @ at, 0) * device.operation
    launched = launched * (device.compiled_operations if fuses else 1.0)
    return np.maximum(seconds + moved_ / device.bandwidth, launched), flops + attended, launched


def _weights(shapes: Array, counts: Array, at: Array) -> Array:
    """Numbers of the products' weights: of what they read or write, that which does not grow with the batch."""
    once = at.copy()
    once[1::2] = 0  # what grows with the batch is nothing then (fitted.basis)
    m, n, k, many = np.moveaxis(shapes @ once, 1, 0)
    return sum((a * b * many * (c < 0.5) * counts[:, None]).sum(0) for a, b, c in ((m, n, k), (m, k, n), (n, k, m)))


def ways_of(strategy_shards: bool, precision: str) -> str:
    """How a strategy has that precision: sharded ones cast everything, the others use autocast."""
    return PLAIN if precision == "fp32" else CAST if strategy_shards else AUTOCAST
