"""Who speaks for which elements: drawn shardings of different clusters exchange every element exactly once."""

import collections
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl.syncing import shares


@st.composite
def sharded(draw, shape):
    """A cluster's boxes: the array cut along each dimension, each box on several devices, in any order."""
    ways = [draw(st.sampled_from([d for d in (1, 2, 3, 4) if n % d == 0])) for n in shape]
    cuts = [[(i * n // w, (i + 1) * n // w) for i in range(w)] for n, w in zip(shape, ways, strict=True)]
    boxes = list(itertools.product(*cuts)) * draw(st.integers(1, 3))
    return draw(st.permutations(boxes))


@st.composite
def worlds(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), max_size=3)))
    clusters, first = [], 0
    for _ in range(draw(st.integers(2, 3))):
        boxes = draw(sharded(shape))
        clusters.append((list(range(first, first + len(boxes))), boxes))
        first += len(boxes)
    return shape, clusters


def indices(shape, box, first, count):
    """Global numbers of a share's elements, in its order."""
    whole = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return whole[tuple(slice(*b) for b in box)].reshape(-1)[first : first + count]


def carried(plans, buffers, sizes):
    """Carries plans out on buffers of whole numbers (itemsize 8): the receive buffers, None where nothing landed."""
    messages = collections.defaultdict(list)
    for rank, part in plans.items():
        for r in part.sends:
            messages[rank, r.peer] += buffers[rank][r.buffer][r.offset // 8 : (r.offset + r.nbytes) // 8].tolist()
    result = {}
    for rank, part in plans.items():
        mine = [[None] * n for n in sizes(rank)]
        for r in part.recvs:
            message = messages[r.peer, rank]
            at, n = r.offset // 8, r.nbytes // 8
            assert mine[r.buffer][at : at + n] == [None] * n, "written twice"
            mine[r.buffer][at : at + n], messages[r.peer, rank] = message[:n], message[n:]
        result[rank] = mine
    assert not any(messages.values()), "sent but not received"
    return result


def spoken(shape, clusters):
    held = [shares.shares(ranks, boxes) for ranks, boxes in clusters]
    return held, {r: indices(shape, s.box, s.first, s.elements) for c in held for r, s in c.items()}


@given(worlds())
def test_each_cluster_speaks_once_for_every_element(world):
    shape, clusters = world
    held, numbers = spoken(shape, clusters)
    for cluster in held:
        said = sorted(n for rank in cluster for n in numbers[rank])
        assert said == list(range(int(np.prod(shape))))


@given(worlds())
def test_everyone_gets_the_others_values_of_its_share(world):
    shape, clusters = world
    held, numbers = spoken(shape, clusters)
    leaf = shares.Leaf(tuple(held), shares.one_cell(shape), 8)
    plans = {}
    for c, (ranks, _) in enumerate(clusters):
        plans |= shares.all_to_all([leaf, leaf], c, ranks)
    buffers = {r: [n, n + 1000] for r, n in numbers.items()}
    got = carried(plans, buffers, lambda rank: [len(numbers[rank])] * 2 * (len(clusters) - 1))
    for rank, found in got.items():
        others = len(clusters) - 1
        for b in range(others):
            assert found[b] == numbers[rank].tolist()
            assert found[others + b] == (numbers[rank] + 1000).tolist()


@given(worlds())
def test_owners_get_all_values_and_give_the_result_back(world):
    shape, clusters = world
    held, numbers = spoken(shape, clusters)
    cells = shares.cells(shape, len(clusters))
    owner = np.full(shape, -1)
    for box, c in cells:
        assert (owner[tuple(slice(*b) for b in box)] == -1).all(), "two cells overlap"
        owner[tuple(slice(*b) for b in box)] = c
    assert (owner >= 0).all()
    owner = owner.reshape(-1)
    leaf = shares.Leaf(tuple(held), cells, 8)
    there: dict = {}
    back: dict = {}
    for c, (ranks, _) in enumerate(clusters):
        there |= shares.to_owners([leaf], c, ranks)
        back |= shares.from_owners([leaf], c, ranks)
    buffers = {r: [n] for r, n in numbers.items()}
    got = carried(there, buffers, lambda rank: [len(numbers[rank])] * (len(clusters) - 1))
    copied = carried(back, buffers, lambda rank: [len(numbers[rank])])
    for c, (ranks, _) in enumerate(clusters):
        for rank in ranks:
            for found in got[rank]:
                assert found == [n if owner[n] == c else None for n in numbers[rank]]
            assert copied[rank][0] == [None if owner[n] == c else n for n in numbers[rank]]


def test_single_elements_go_whole_from_any_holder():
    held = ({0: shares.Share((), 0, 1), 1: shares.Share((), 1, 0)}, {2: shares.Share((), 0, 1)})
    leaf = shares.Leaf(held, shares.one_cell(()), 4, whole=True)
    left, right = shares.all_to_all([leaf], 0, [0, 1]), shares.all_to_all([leaf], 1, [2])
    assert [r.peer for r in left[0].recvs + left[1].recvs] == [2, 2]
    assert [r.peer for r in right[2].sends] == [0, 1]
    assert [r.peer for r in right[2].recvs] == [0]
    assert [r.peer for r in left[0].sends] == [2] and not left[1].sends


def test_equal_shardings_meet_in_one_run():
    box = ((0, 4), (2, 4))
    share = shares.Share(box, 0, 8)
    assert shares.runs(share, share, ((0, 4), (0, 8))) == [(0, 0, 8)]
