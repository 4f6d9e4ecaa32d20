"""The costs of a part for any micro-batch and tensor-parallel degree, from a few traces of it.

Every cost is

    cost(b, t) = c0 + c1·b + (c2 + c3·b) / t + (c4 + c5·b)·[t > 1]       b samples in a micro-batch

for t tensor-parallel workers: exactly in b for nearly all models, and within a few per cent in t.
The last term is what only split layers do, such as gathering their input; it needs two values of t.
What is alive is such a line for each moment, because another moment may be the worst of another
batch; a chunk of a loss that does not grow with the batch is counted apart
(strategies/row_chunks.py).
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from app.planner.model_costs import Floats, Moments, PartCosts, basis, chunk_numbers
from app.planner.part_trace import PartTrace, Product

Key = tuple[int, int]
"""(samples of the micro-batch, degree of tensor parallelism)"""


def fit_part(traces: Mapping[Key, PartTrace]) -> PartCosts:
    """The costs of a part for any micro-batch and degree.

    Args:
        traces: Traces of the part: of two batches, with one to three degrees each.
    """
    names = {name for trace in traces.values() for name in trace.values}
    values = {
        name: _fit({key: trace.values[name] for key, trace in traces.items()}) for name in names
    }
    products: dict[str, Floats] = {}
    repeats: dict[str, Floats] = {}
    for phase in ("forward", "backward"):
        products_by_key = {key: trace.products[phase] for key, trace in traces.items()}
        products[phase], repeats[phase] = _fit_products(products_by_key)
    unsplit_traces = {key: trace for key, trace in traces.items() if key[1] == 1}
    split_traces = {key: trace for key, trace in traces.items() if key[1] > 1}
    moments = _fit_moments(unsplit_traces)
    split_moments = _fit_moments(split_traces, unsplit_traces) if split_traces else None
    return PartCosts(values, products, repeats, moments, split_moments)


def _fit_products(products: Mapping[Key, list[Product]]) -> tuple[Floats, Floats]:
    """The distinct products of a phase for any micro-batch and degree.

    Args:
        products: The products of a phase in each trace, in the order of their computation.

    Returns:
        ((P, 4, 6): the coefficients of m, n, k and batch; (P,): how often each is computed)
    """
    if len({len(of_trace) for of_trace in products.values()}) > 1:
        # The split model has other products; take those of the whole one for all degrees.
        products = {(batch, tp): products[batch, tp] for batch, tp in products if tp == 1}
    distinct: Counter[tuple[float, ...]] = Counter()
    for i in range(min(len(of_trace) for of_trace in products.values())):
        coefficients = [
            _fit({key: float(of_trace[i][side]) for key, of_trace in products.items()})
            for side in range(4)
        ]
        distinct[tuple(np.round(np.concatenate(coefficients), 4))] += 1
    return (
        np.array(list(distinct), float).reshape(-1, 4, 6),
        np.array(list(distinct.values()), float),
    )


def _fit_moments(
    traces: Mapping[Key, PartTrace], unsplit: Mapping[Key, PartTrace] | None = None
) -> Moments:
    """The moments of a part; only the worst if traces do not have the same ones.

    Args:
        traces: All of the whole model, or all of the split one.
        unsplit: Those of the whole model, if `traces` are of the split one. With them a single
            degree gives the worst moment of other degrees.
    """
    operations = {tuple(moment.operation for moment in trace.moments) for trace in traces.values()}
    is_one_degree = len({tp for _, tp in traces}) == 1
    if len(operations) > 1 or (unsplit and is_one_degree):
        worst = {key: _worst_of(trace) for key, trace in {**(unsplit or {}), **traces}.items()}
        return Moments(_fit(worst).reshape(1, 6), np.zeros(1))
    sizes = {key: [moment.size for moment in trace.moments] for key, trace in traces.items()}
    of_largest = traces[max(traces)].moments
    chunk = np.array([moment.chunk for moment in of_largest])
    in_forward = np.array([float(moment.is_in_forward) for moment in of_largest])
    return Moments(_fit(sizes).T, chunk, in_forward).distinct()


def _worst_of(trace: PartTrace) -> float:
    """Bytes at the worst moment of a trace."""
    numbers = chunk_numbers(trace.values["chunked_rows"], trace.values["chunked_numbers"])
    sizes = (moment.size + moment.chunk * numbers for moment in trace.moments)
    return max(sizes, default=0.0)


def _fit(values: Mapping[Key, float] | Mapping[Key, list[float]]) -> Floats:
    """The coefficients c0 … c5 of a value, (6,), or of M values, (6, M).

    Those that the traces do not determine are 0.
    """
    known = 2 * len({tp for _, tp in values})
    equations = np.array([basis(batch, tp)[:known] for batch, tp in values])
    observed = np.array(list(values.values()))
    coefficients = np.zeros((6, *observed.shape[1:]))
    coefficients[:known] = np.linalg.lstsq(equations, observed, rcond=None)[0]
    return coefficients
