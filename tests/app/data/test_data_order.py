"""Data order: a pure function of (seed, position) that visits every sample once per epoch."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.order import SORT_UP_TO, Order, held_out, hold_out, shares
from app.errors import UserError

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("n", [1, 2, 97, SORT_UP_TO, SORT_UP_TO + 1])
def test_every_epoch_has_each_sample_once_in_another_order(n: int) -> None:
    epochs = [Order(n, seed=3).indices(epoch * n, n) for epoch in range(2)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n))
    for another_order in (epochs[1], Order(n, 1).indices(0, n), np.arange(n)):
        assert n < 64 or (epochs[0] == another_order).mean() < 0.1


@settings(max_examples=50)
@given(
    n=st.integers(1, 150_000),
    seed=st.integers(-(2**70), 2**70),
    start=st.integers(0, 10**12),
    data=st.data(),
)
def test_a_range_is_the_same_as_its_two_parts(
    n: int, seed: int, start: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, 300))
    split = data.draw(st.integers(0, count))
    full_range = Order(n, seed).indices(start, count)
    order = Order(n, seed)
    late = order.indices(start + split, count - split)
    early = order.indices(start, split)
    assert np.array_equal(full_range, np.concatenate([early, late]))
    assert len(full_range) == count and ((full_range >= 0) & (full_range < n)).all()


def test_a_billion_samples_are_accessed_at_random_in_little_memory() -> None:
    n = 10**9
    order = Order(n, seed=0)
    tracemalloc.start()
    samples = np.concatenate(
        [order.indices(start, 5000) for start in (0, n // 2, n - 2500, 7 * n + 123_456_789)]
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6, "bytes; a permutation would take 8e9"
    assert ((samples >= 0) & (samples < n)).all()
    assert len(np.unique(samples[:12_500])) == 12_500, "all those of the first epoch"
    assert abs(samples.mean() / n - 0.5) < 0.02
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.05, "no order is left"


def test_the_order_never_changes_between_versions() -> None:
    assert Order(10, 0).indices(0, 12).tolist() == [2, 6, 5, 3, 0, 4, 7, 1, 8, 9, 7, 8]
    assert Order(10**9, 0).indices(0, 3).tolist() == [182330180, 86705560, 492790745]
    assert Order(SORT_UP_TO, 0).indices(0, 3).tolist() == [58565, 44521, 44766]
    assert Order(SORT_UP_TO + 1, 0).indices(0, 3).tolist() == [14768, 30730, 12186]
    assert hold_out(120, 30, np.arange(120) % 24)[1][:4].tolist() == [74, 119, 69, 114]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([500] * 10, [100] * 10),
        ([7, 90, 3], [1, 9, 0]),
        ([5] * 24, [2] * 6 + [1] * 18),
        ([50, 50], [0, 0]),
    ],
)
def test_hold_out_is_class_balanced_disjoint_and_complete(
    sizes: list[int], expected: list[int]
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = sum(expected)
    train, held_out_ = hold_out(len(labels), count, labels)
    assert np.bincount(labels[held_out_], minlength=len(sizes)).tolist() == expected
    assert sorted([*train, *held_out_]) == list(range(len(labels)))
    assert np.array_equal(train, hold_out(len(labels), count, labels)[0]), "always the same"
    for part in (held_out_, train) if len(sizes) == 10 else ():
        assert len(set(labels[part[:20]])) > 4 and len(set(labels[part[-20:]])) > 4, "shuffled"
    plain = hold_out(len(labels), count)
    assert sorted(np.concatenate(plain)) == list(range(len(labels)))


def test_the_number_of_held_out_samples_is_given_or_a_share() -> None:
    assert held_out(20, None, 0.1) == 2
    assert held_out(2, None, 0.9) == 1
    assert held_out(5, 4, 0.1) == 4
    assert held_out(5, 0, 0.1) == 0
    for eval_samples in (5, -1, True, 2.0):
        message = rf"^task_args.eval_samples is {eval_samples}; write a whole number below 5, the"
        with pytest.raises(UserError, match=message):
            held_out(5, eval_samples, 0.1)  # type: ignore[arg-type]


def test_ranks_share_samples_as_equally_as_possible() -> None:
    assert shares(8, 3) == [slice(0, 3), slice(3, 6), slice(6, 8)]
