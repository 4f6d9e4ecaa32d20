"""What a model costs, part by part, for any micro-batch and tensor-parallel degree (fitting.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.planner.part_trace import AFTER, BEFORE
from strategies.costs import ParameterSize
from strategies.row_chunks import chunk_rows

Floats = npt.NDArray[np.float64]


def basis(batch: float, tp: float) -> Floats:
    """The factors of the coefficients c0 … c5, (6,).

    Args:
        batch: Samples of the micro-batch.
        tp: The degree of tensor parallelism.
    """
    is_split = float(tp > 1)
    return np.array([1.0, batch, 1.0 / tp, batch / tp, is_split, batch * is_split])


def chunk_numbers(rows: float, numbers: float) -> float:
    """Logits of a chunk of a loss.

    Args:
        rows: Rows of all chunks; below 1 if no loss has bounded chunks.
        numbers: Logits of all chunks.
    """
    if rows < 1:
        return 0.0
    words = max(1, round(numbers / rows))
    return float(chunk_rows(round(rows), words) * words)


@dataclass
class Moments:
    """What a part has allocated beyond what it saves, moment by moment.

    The worst moment is another one for other batches: one moment has more that grows with the
    batch, another one copies of weights. So each moment is a line of its own.

    Args:
        coefficients: (M, 6), of bytes without those of a chunk.
        chunk: (M,), bytes for each logit of a chunk of a loss (strategies/row_chunks.py).
        in_forward: (M,), 1 for a moment of forward, 0 for one of backward; None: all may be.
    """

    coefficients: Floats
    chunk: Floats
    in_forward: Floats | None = None

    def worst(
        self, batch: float, tp: float, *, logits_of_chunk: float, forward_bytes: float = 0.0
    ) -> float:
        """Bytes at the worst moment, at least 0.

        Args:
            batch: Samples of the micro-batch.
            tp: The degree of tensor parallelism.
            logits_of_chunk: Logits of a chunk of a loss.
            forward_bytes: Bytes that are there besides, in forward only.
        """
        sizes = self.coefficients @ basis(batch, tp) + self.chunk * logits_of_chunk
        sizes = sizes + forward_bytes * (1.0 if self.in_forward is None else self.in_forward)
        return float(sizes.max(initial=0.0))

    def distinct(self) -> Moments:
        """Those moments that may be the worst: no other one has at least as much of everything."""
        c0, c1, c2, c3, c4, c5 = self.coefficients.T
        # A size is linear in the batch, and both its coefficients are linear in 1/tp, 0 to 1.
        rows = [c0, c0 + c2, c1, c1 + c3, c4, c5, self.chunk]
        if self.in_forward is not None:
            rows.append(self.in_forward)
        traits, indices = np.unique(np.column_stack(rows).round(3), axis=0, return_index=True)
        kept = [
            index
            for trait, index in zip(traits, indices)
            if (traits >= trait).all(axis=1).sum() == 1
        ]
        in_forward = None if self.in_forward is None else self.in_forward[kept]
        return Moments(self.coefficients[kept], self.chunk[kept], in_forward)


@dataclass
class PartCosts:
    """The coefficients c0 … c5 of one part's costs.

    Args:
        values: (6,) for each value of a trace (part_trace.py).
        products: (P, 4, 6) for each phase: m, n, k and batch of its distinct products.
        repeats: (P,) for each phase: how often each product is computed.
        moments: Of the whole model.
        split_moments: Of one that tensor parallelism splits; None if it is not split.
    """

    values: dict[str, Floats]
    products: dict[str, Floats]
    repeats: dict[str, Floats]
    moments: Moments
    split_moments: Moments | None = None

    def at(self, batch: float, tp: float) -> dict[str, float]:
        """Every value for a micro-batch and a degree; none is below 0, unknown names are 0."""
        factors = basis(batch, tp)
        values: dict[str, float] = defaultdict(float)
        for name, coefficients in self.values.items():
            values[name] = max(0.0, float(coefficients @ factors))
        return values

    def working_bytes(self, batch: float, tp: float, forward_bytes: float = 0.0) -> float:
        """What is alive at the worst moment of forward or backward, beyond what is saved.

        Args:
            batch: Samples of the micro-batch.
            tp: The degree of tensor parallelism.
            forward_bytes: Bytes that are there besides, in forward only.
        """
        moments = self.moments
        if tp > 1 and self.split_moments is not None:
            moments = self.split_moments
        factors = basis(batch, tp)
        rows, numbers = (
            float(self.values[name] @ factors) if name in self.values else 0.0
            for name in ("chunked_rows", "chunked_numbers")
        )
        logits_of_chunk = chunk_numbers(rows, numbers)
        return moments.worst(
            batch, tp, logits_of_chunk=logits_of_chunk, forward_bytes=forward_bytes
        )

    def products_at(self, phase: str, batch: float, tp: float) -> Floats:
        """(P, 5): m, n, k, batch and repeats of the products of a phase."""
        return np.column_stack([self.products[phase] @ basis(batch, tp), self.repeats[phase]])


@dataclass
class ModelCosts:
    """The parts of a model under one variant of its computation.

    Args:
        parts: By name, in the order of forward.
        order: The part of each block.
        parameters: By name, the parameters of one such part.
    """

    parts: dict[str, PartCosts]
    order: list[str]
    parameters: dict[str, tuple[ParameterSize, ...]]

    @property
    def counts(self) -> dict[str, int]:
        """How many of each part the whole model has."""
        counts = Counter(self.order)
        counts[BEFORE] = 1
        counts[AFTER] = 1
        return {name: counts[name] for name in self.parts}
