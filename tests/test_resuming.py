"""From which step clusters go on: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl import _values
from jax_hetccl._errors import AgreementError
from jax_hetccl.resuming import Resumption, dropped, resumption


def _names(held: list[list[int]]) -> list[tuple[str, int, list[int]]]:
    return [(f"c{cluster}/0", cluster, steps) for cluster, steps in enumerate(held)]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ([[], []], Resumption(None, 0, new=True)),
        ([[3, 4], [3, 4]], Resumption(4, 0, new=False)),
        ([[3, 4], [4, 5]], Resumption(4, 0, new=False)),  # one step apart
        ([[], [6, 7], [6, 7]], Resumption(7, 1, new=True)),  # the first cluster came back
        ([[0], [0], []], Resumption(0, 0, new=True)),
    ],
)
def test_resumption(held: list[list[int]], wanted: Resumption) -> None:
    assert resumption(_names(held)) == wanted


def test_processes_of_a_cluster_must_hold_it_all() -> None:
    assert resumption([("a/0", 0, [1, 2]), ("a/1", 0, [2, 3]), ("b/0", 1, [2, 3])]).step == 2
    with pytest.raises(AgreementError, match="a/0 holds 1, 2, a/1 holds none"):
        resumption([("a/0", 0, [1, 2]), ("a/1", 0, []), ("b/0", 1, [1, 2])])


def test_no_common_step_says_who_holds_what() -> None:
    with pytest.raises(AgreementError, match="c0/0 holds 3, 4, c1/0 holds 5, 6.*depth"):
        resumption(_names([[3, 4], [6, 5]]))


class _Training:
    """Clusters that step and keep as `Snapshots` does; a step ends nowhere before every cluster has begun it."""

    def __init__(self, clusters: int, every: int, depth: int) -> None:
        self.begun, self.done = [0] * clusters, [0] * clusters
        self.kept: list[dict[int, None]] = [{0: None} for _ in range(clusters)]
        self._every, self._depth = every, depth

    def move(self, cluster: int) -> None:
        """Begins the next step, which everything of the last one is behind, or ends it if it can end."""
        if self.begun[cluster] == self.done[cluster]:
            self.begun[cluster] += 1
        elif all(begun >= self.begun[cluster] for begun in self.begun):
            step = self.done[cluster] = self.begun[cluster]
            if step % self._every == 0:
                for old in dropped({**self.kept[cluster], step: None}, self._depth):
                    del self.kept[cluster][old]
                self.kept[cluster][step] = None


@given(st.integers(2, 4), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=200))
def test_two_kept_steps_hold_a_common_one_at_every_moment(clusters: int, every: int, moves: list[int]) -> None:
    """What `Snapshots` claims, over every order in which clusters move and every moment at which one may die."""
    training = _Training(clusters, every, 2)
    for move in moves:
        training.move(move % clusters)
        found = resumption(_names([list(kept) for kept in training.kept]))
        assert found.step is not None
        assert min(training.done) - every < found.step <= min(training.done)


@pytest.mark.parametrize(
    "value", ["third,left", "third:2,left:1", ["left", "third"], {"left": 1, "third": 2}, [("third", 2), "left"]]
)
def test_some_clusters_of_a_job(value: object) -> None:
    assert _values.parse_subset(value, [("left", 1), ("right", 2), ("third", 2)]) == ("left", "third")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("lift", "no cluster 'lift' in the job, which has left, right; did you mean left"),
        ("right:1", r"right has 2 process\(es\), not 1"),
        ("", "expected the names"),
    ],
)
def test_wrong_clusters_of_a_job(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _values.parse_subset(value, [("left", 1), ("right", 2)])
