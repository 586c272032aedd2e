"""How the leaves of a sync are cut into buckets."""

from __future__ import annotations

import itertools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl._errors import ConfigError
from jax_hetccl._sync import bucketed
from jax_hetccl.syncing.agree import difference
from jax_hetccl.syncing.spec import in_order

TREE = {"embed": 0, "head": 0, "layers": [{"b": 0, "w": 0} for _ in range(11)]}
PATHS = [path for path, _ in jax.tree.flatten_with_path(TREE)[0]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1), st.integers(1, 20))
def test_a_number_of_buckets_follows_readiness(arrays, count):
    sizes, depths = zip(*arrays, strict=True)
    cut = in_order(count, sizes, depths)
    assert sorted(i for bucket in cut for i in bucket) == list(range(len(sizes))) and len(cut) <= count
    assert all(list(bucket) == sorted(bucket) for bucket in cut)
    for before, after in itertools.pairwise(cut):  # nothing waits for what becomes ready later
        assert max(depths[i] for i in before) <= min(depths[i] for i in after)
    spare = sum(sizes) / count + max(sizes)
    assert all(sum(sizes[i] for i in bucket) <= spare + 1 for bucket in cut)


def test_named_buckets_keep_their_order_and_the_longest_prefix_counts():
    assert in_order((1, 0, 1), [4, 4, 4], []) == ((1,), (0, 2))
    cut = bucketed(("head", "layers/1", "", "layers/10"), PATHS)
    assert cut[:2] == (2, 0)
    assert cut[2:] == tuple(n for layer in range(11) for n in 2 * [{1: 1, 10: 3}.get(layer, 2)])
    assert bucketed(None, PATHS) is None and bucketed(3, PATHS) == 3


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "head", (1,), ("head", "head"), ("head",), ("", "tail")])
def test_what_is_no_cut_is_refused(bad):
    with pytest.raises(ConfigError, match="buckets="):
        bucketed(bad, PATHS)


def test_a_difference_names_the_bucket():
    def said(*buckets):
        return {
            "items": ["['a'] float32[2]", "['b'] float32[2]"],
            "op": "mean",
            "name": "",
            "weighted": False,
            "buckets": buckets,
        }

    text = difference(said(["['a']"], ["['b']"]), said(["['b']"], ["['a']"]), "left", "right")
    assert "bucket 0 is [\"['a']\"] in 'left', [\"['b']\"] in 'right'" in text and "buckets=(" in text
    assert "nothing in 'right'" in difference(said(["['a']"]), said(), "left", "right")
