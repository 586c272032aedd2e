"""How a global batch is split among clusters: pure decisions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl._errors import ConfigError
from jax_hetccl.portions import balanced, portions, process_part

_CLUSTERS = st.integers(1, 3).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 6), min_size=n, max_size=n),
        st.lists(st.floats(0.05, 20), min_size=n, max_size=n),
    )
)


def _every_split(total: int, multiples: list[int]) -> list[tuple[int, ...]]:
    counts = itertools.product(*[range(1, total // m + 1) for m in multiples])
    parts = [tuple(k * m for k, m in zip(every, multiples, strict=True)) for every in counts]
    return [p for p in parts if sum(p) == total]


@given(_CLUSTERS, st.integers(1, 40))
def test_the_largest_load_is_as_small_as_it_can_be(clusters: tuple[list[int], list[float]], total: int) -> None:
    multiples, weights = clusters
    splits = _every_split(total, multiples)
    if not splits:
        with pytest.raises(ConfigError, match="batch_sizes: "):
            portions("batch_sizes", total, weights, multiples)
        return

    def loads(parts: tuple[int, ...]) -> list[float]:
        return sorted((p / w for p, w in zip(parts, weights, strict=True)), reverse=True)

    found = portions("batch_sizes", total, weights, multiples)
    assert found in splits
    assert loads(found) == min(loads(p) for p in splits)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 50))
def test_every_device_gets_equally_many(devices: list[int], rows: int) -> None:
    found = portions("batch_sizes", rows * sum(devices), None, devices)
    assert found == tuple(rows * d for d in devices)
    if sum(devices) > 1:
        with pytest.raises(ConfigError, match=f"use {rows * sum(devices)} or {(rows + 1) * sum(devices)} rows"):
            portions("batch_sizes", rows * sum(devices) + 1, None, devices)


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 20),
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4) | st.none(),
)
def test_processes_cover_the_batch_in_order(clusters: list[list[int]], rows: int, weights: list[float] | None) -> None:
    """Clusters of processes of devices: their slices, one after the other, are the batch."""
    devices = [sum(processes) for processes in clusters]
    total = rows * math.lcm(*devices) * len(devices) if weights else rows * sum(devices)
    sizes = portions("process_slice", total, weights and weights[: len(clusters)], devices)
    end = 0
    for cluster, processes in enumerate(clusters):
        owners = [p for p, n in enumerate(processes) for _ in range(n)]
        for process in range(len(processes)):
            part = process_part(sizes, cluster, owners, process)
            assert part is not None
            assert part.start == end
            assert (part.stop - part.start) * devices[cluster] == sizes[cluster] * processes[process]
            end = part.stop
    assert end == total


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.001, 10)), min_size=1, max_size=4),
    st.integers(20, 2000),
)
def test_balanced_steps_differ_by_what_rounding_allows(clusters: list[tuple[int, float]], rows: int) -> None:
    devices, per_row = [d for d, _ in clusters], [s for _, s in clusters]
    total = rows * math.lcm(*devices) * len(devices)
    before = portions("batch_sizes", total, [1.0] * len(devices), devices)
    after = balanced(before, [n * s for n, s in zip(before, per_row, strict=True)], devices)
    assert sum(after) == total
    assert all(n % d == 0 and n >= d for n, d in zip(after, devices, strict=True))
    # No cluster that has more than its least could give a multiple away and leave the slowest step shorter.
    ideal = total / sum(1 / s for s in per_row)
    step = max(math.lcm(a, b) for a in devices for b in devices)
    bound = ideal + step * max(per_row)
    assert max(n * s for n, s in zip(after, per_row, strict=True)) <= bound * (1 + 1e-9)


def test_weights_that_are_a_split_are_that_split() -> None:
    assert portions("batch_sizes", 96, (80, 16), (2, 1)) == (80, 16)
    assert portions("batch_sizes", 96, (5, 1), (2, 1)) == (80, 16)


def test_balanced_again_changes_nothing() -> None:
    after = balanced((48, 48), (0.048, 0.144), (2, 1))
    assert after == (72, 24)
    assert balanced(after, (0.072, 0.072), (2, 1)) == after


def test_balance_approaches_where_a_step_has_a_fixed_part() -> None:
    rows = (48, 48)
    for _ in range(8):
        times = (0.01 + 0.001 * rows[0], 0.01 + 0.003 * rows[1])
        rows = balanced(rows, times, (1, 1))
    assert abs(0.01 + 0.001 * rows[0] - (0.01 + 0.003 * rows[1])) <= 0.004  # one row each


@pytest.mark.parametrize(
    ("total", "weights", "multiples", "said"),
    [
        (0, None, (1, 1), "a batch of 0 rows"),
        (2, (1, 1), (2, 1), "2 rows are fewer than the 3 .*2 \\+ 1"),
        (2, None, (2, 1), "use 3 rows"),
        (9, (1, 1), (2, 2), "multiples of 2, 2; use 8 or 10"),
        (8, (1,), (2, 2), "1 weights, but there are 2 clusters"),
        (8, (1, 0), (2, 2), "each is a positive number"),
        (8, (1, math.nan), (2, 2), "each is a positive number"),
        (8, (1, math.inf), (2, 2), "each is a positive number"),
        (8, None, (2, 0), "each is 1 at least"),
    ],
)
def test_wrong_input(total: int, weights: tuple[float, ...] | None, multiples: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"shard_batch: .*({said})"):
        portions("shard_batch", total, weights, multiples)


def test_odd_clusters() -> None:
    found = portions("batch_sizes", 65536, (3, 1, 2.2), (64, 48, 72))
    assert sum(found) == 65536
    assert max(n / w for n, w in zip(found, (3, 1, 2.2), strict=True)) <= 1.005 * 65536 / 6.2
