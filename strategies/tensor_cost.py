"""What tensor parallelism (tensor.py) costs: its part of the parameters, and what it sends."""

from __future__ import annotations

from dataclasses import replace

from strategies.costs import ModelSize, all_reduce


def part(size: ModelSize, ways: int, sequence_parallel: bool = True) -> ModelSize:
    """The model that one of `ways` workers holds: parameters exact, that of the first rank, which is never short.

    With sequence parallelism activations divide too; without it, about a third of a block's (norms, dropout, what
    flows between blocks) is on every worker.
    """
    if ways == 1:
        return size
    parameters = tuple(p if p.split_dim is None else p.part(ways, p.split_dim) for p in size.parameters)
    share = 1 / ways if sequence_parallel else (1 + 2 / ways) / 3
    return replace(
        size,
        parameters=parameters,
        activation_bytes=int(size.activation_bytes * share),
        boundary_bytes=size.boundary_bytes // ways if sequence_parallel else size.boundary_bytes,
    )


def sent(size: ModelSize, ways: int, pairs: int, micro_batches: int = 1) -> dict[str, int]:
    """For each pair of split layers one all-reduce of the activations forward and one backward (or, along the sequence,
    a reduce-scatter and an all-gather, which send the same); one forward for the embedding, one backward for the head.
    """
    if ways == 1:
        return {}
    return {"tensor": all_reduce(size.boundary_bytes, ways) * (2 * pairs + 2) * micro_batches}
