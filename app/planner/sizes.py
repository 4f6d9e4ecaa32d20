"""Bytes of parameters per kind of part, for every pair of (tp, dp_shard) at once; strategies/costs.py says them for one
layout, and a test holds the two against each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.planner.fitted import Costs
from app.planner.read import ModelRead
from app.planner.trace import AFTER, BEFORE
from strategies.costs import STATES, ParameterSize

Array = np.ndarray


@dataclass
class Sizes:
    """(kinds, rows): what one device holds of each part. `local` after tp, `shard` after dp_shard, padding included."""

    local: Array
    shard: Array
    padded: Array
    """Numbers (not bytes) that a gathering gives, padding included."""
    trainable_local: Array
    trainable_shard: Array
    tensors: Array
    """Trainable tensors of each kind: (kinds,)."""


def owners(model: ModelRead, costs: Costs) -> dict[str, list[ParameterSize]]:
    """The parameters of one part of each kind; a parameter outside blocks is before or after by where it stands."""
    kinds = dict(zip(model.blocks, costs.order)) if len(costs.order) == len(model.blocks) else {}
    chosen: dict[str, str] = {}
    for block, kind in kinds.items():
        chosen.setdefault(kind, block)
    first = {block: kind for kind, block in chosen.items()}
    found: dict[str, list[ParameterSize]] = {kind: [] for kind in costs.parts}
    seen = False
    for parameter in model.size.parameters:
        inside = next((b for b in kinds if parameter.name.startswith(b + ".")), None)
        if inside is None:
            side = AFTER if seen and AFTER in found else BEFORE if BEFORE in found else next(iter(found))
            found[side].append(parameter)
            continue
        seen = True
        if inside in first:
            found[first[inside]].append(parameter)
    return found


def sizes(model: ModelRead, costs: Costs, tp: Array, shard: Array) -> Sizes:
    """For rows of (tp, dp_shard); each unlike pair is computed once."""
    pairs, rows = np.unique(np.stack([tp, shard]), axis=1, return_inverse=True)
    rows = rows.reshape(-1)
    ways_tp, ways_shard = pairs
    owned = owners(model, costs)
    tables = {name: np.zeros((len(owned), pairs.shape[1])) for name in ("local", "shard", "padded", "tl", "ts")}
    tensors = np.zeros(len(owned))
    for i, parameters in enumerate(owned.values()):
        for parameter in parameters:
            numel, part = _parts(parameter, ways_tp, ways_shard)
            tables["local"][i] += numel * parameter.itemsize
            tables["shard"][i] += part * parameter.itemsize
            tables["padded"][i] += part * ways_shard
            if parameter.trainable:
                tables["tl"][i] += numel * parameter.itemsize
                tables["ts"][i] += part * parameter.itemsize
                tensors[i] += 1
    wide = {name: table[:, rows] for name, table in tables.items()}
    return Sizes(wide["local"], wide["shard"], wide["padded"], wide["tl"], wide["ts"], tensors)


def _parts(parameter: ParameterSize, tp: Array, shard: Array) -> tuple[Array, Array]:
    """Numbers held after tp, and after dp_shard on top: slices of dimension 0 are rounded up."""
    shape = [np.full(len(tp), float(s)) for s in parameter.shape or (1,)]
    if parameter.split_dim is not None:
        shape[parameter.split_dim] = np.ceil(shape[parameter.split_dim] / tp)
    rest = np.prod(shape[1:], axis=0) if len(shape) > 1 else np.ones(len(tp))
    return shape[0] * rest, np.ceil(shape[0] / shard) * rest


def states(trainable: Array, tensors: Array, optimizer: str) -> Array:
    """Bytes of optimizer state for bytes of trainable parameters; Adam also counts steps, 4 bytes per tensor.

    An optimizer that is not ours is taken to keep as much as Adam."""
    count = 4.0 * tensors if optimizer != "sgd" else 0.0
    return STATES.get(optimizer, 2) * trainable + count
