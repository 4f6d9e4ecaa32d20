"""Data order: a pure function of (seed, position) that visits every sample once per epoch."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.order import SORT_UP_TO, Order, hold_out


@pytest.mark.parametrize("n", [1, 2, 97, 4000, SORT_UP_TO, SORT_UP_TO + 1, 200_003])
def test_every_sample_exactly_once_per_epoch_in_another_order(n: int) -> None:
    epochs = [Order(n, seed=3).indices(epoch * n, n) for epoch in range(2)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n))
    for other in (epochs[1], Order(n, 1).indices(0, n), np.arange(n)):
        assert n < 64 or (epochs[0] == other).mean() < 0.1


@settings(max_examples=50)
@given(n=st.integers(1, 150_000), seed=st.integers(-(2**70), 2**70), start=st.integers(0, 10**12), data=st.data())
def test_any_range_is_the_same_however_it_is_asked_for(n: int, seed: int, start: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 300))
    cut = data.draw(st.integers(0, count))
    whole = Order(n, seed).indices(start, count)
    order = Order(n, seed)
    late, early = order.indices(start + cut, count - cut), order.indices(start, cut)
    assert np.array_equal(whole, np.concatenate([early, late]))
    assert len(whole) == count and ((whole >= 0) & (whole < n)).all()


def test_a_billion_samples_are_accessed_at_random_in_little_memory() -> None:
    n = 10**9
    order = Order(n, seed=0)
    tracemalloc.start()
    seen = np.concatenate([order.indices(start, 5000) for start in (0, n // 2, n - 2500, 7 * n + 123_456_789)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6, "bytes; a permutation would take 8e9"
    assert ((seen >= 0) & (seen < n)).all()
    within_first_epoch = np.concatenate([seen[:10_000], seen[10_000:12_500]])
    assert len(np.unique(within_first_epoch)) == len(within_first_epoch)
    assert abs(seen.mean() / n - 0.5) < 0.02
    assert abs(np.corrcoef(seen[:-1], seen[1:])[0, 1]) < 0.05, "no order is left"


def test_orders_of_a_small_set_are_evenly_distributed() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        drawn = tuple(Order(3, seed=epoch).indices(0, 3).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts.values()) < 150


def test_the_order_never_changes_between_versions() -> None:
    assert Order(10, 0).indices(0, 12).tolist() == [2, 6, 5, 3, 0, 4, 7, 1, 8, 9, 7, 8]
    assert Order(10**9, 0).indices(0, 3).tolist() == [182330180, 86705560, 492790745]


@pytest.mark.parametrize(("sizes", "count"), [((500,) * 10, 1000), ((7, 90, 3), 10), ((1, 1, 1), 2), ((50, 50), 0)])
def test_hold_out_is_class_balanced_disjoint_and_complete(sizes: tuple[int, ...], count: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, held = hold_out(len(labels), count, labels)
    assert len(held) == count
    assert sorted([*train, *held]) == list(range(len(labels)))
    for label, size in enumerate(sizes):
        assert abs((labels[held] == label).sum() - size * count / len(labels)) <= 1
    assert np.array_equal(train, hold_out(len(labels), count, labels)[0]), "always the same"
    for part in (held, train) if len(sizes) == 10 else ():
        assert len(set(labels[part[:20]])) > 4 and len(set(labels[part[-20:]])) > 4, "shuffled"
    plain = hold_out(len(labels), count)
    assert sorted(np.concatenate(plain)) == list(range(len(labels)))
