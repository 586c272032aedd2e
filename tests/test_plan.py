"""Plans are pure functions: what one rank sends is what the other expects, and everyone gets all bytes once."""

import collections
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl import plan

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=4)


def groups_of(sizes):
    first = [sum(sizes[:c]) for c in range(len(sizes))]
    return [list(range(f, f + n)) for f, n in zip(first, sizes, strict=True)]


def run(groups, lane_plan, buffers, recv_bytes):
    """Carries out the plans of all clusters: returns every rank's receive buffers (None where nothing landed)."""
    plans = plan.union(lane_plan(c) for c in range(len(groups)))
    messages = collections.defaultdict(list)
    for rank, part in plans.items():
        for r in part.sends:
            messages[rank, r.peer].append(buffers[rank][r.buffer][r.offset : r.offset + r.nbytes])
    received = {}
    for rank, part in plans.items():
        mine = [[None] * n for n in recv_bytes(rank)]
        expected = collections.defaultdict(list)
        for r in part.recvs:
            expected[r.peer].append(r)
        for peer, ranges in expected.items():
            message = [b for piece in messages.pop((peer, rank)) for b in piece]
            assert len(message) == sum(r.nbytes for r in ranges)
            for r in ranges:
                assert mine[r.buffer][r.offset : r.offset + r.nbytes] == [None] * r.nbytes, "written twice"
                mine[r.buffer][r.offset : r.offset + r.nbytes] = message[: r.nbytes]
                message = message[r.nbytes :]
        received[rank] = mine
    assert not messages, "sent but not expected"
    return received, plans


def cluster_of(groups, rank):
    return next(c for c, g in enumerate(groups) if rank in g)


@given(SIZES, st.integers(1, 9))
def test_whole_brings_every_other_cluster(sizes, nbytes):
    groups = groups_of(sizes)
    buffers = {r: [[(c, i) for i in range(nbytes)]] for c, g in enumerate(groups) for r in g}
    received, plans = run(
        groups, lambda c: plan.whole(groups, c, nbytes), buffers, lambda r: [nbytes] * (len(sizes) - 1)
    )
    for rank, got in received.items():
        others = [c for c in range(len(sizes)) if c != cluster_of(groups, rank)]
        assert got == [[(c, i) for i in range(nbytes)] for c in others]
    for c, group in enumerate(groups):  # the sends are spread evenly over a cluster's ranks
        for other in range(len(groups)):
            counts = [sum(s.peer in groups[other] for s in plans[r].sends) for r in group if other != c]
            assert not counts or max(counts) - min(counts) <= 1


@given(SIZES, st.integers(1, 4))
def test_pieces_bring_the_own_interval(sizes, factor):
    groups = groups_of(sizes)
    nbytes = math.lcm(*sizes) * factor
    buffers, expected = {}, {}
    for c, group in enumerate(groups):
        n = nbytes // len(group)
        for j, rank in enumerate(group):
            buffers[rank] = [[(c, i) for i in range(j * n, (j + 1) * n)]]
            others = [o for o in range(len(groups)) if o != c]
            expected[rank] = [[(o, i) for i in range(j * n, (j + 1) * n)] for o in others]
    sizes_of = lambda r: [nbytes // len(groups[cluster_of(groups, r)])] * (len(groups) - 1)  # noqa: E731
    received, plans = run(groups, lambda c: plan.pieces(groups, c, nbytes), buffers, sizes_of)
    assert received == expected
    assert plan.bytes_sent(plans) == nbytes * len(groups) * (len(groups) - 1)


@given(SIZES, st.integers(1, 60), st.sampled_from([1, 2, 4]))
def test_owned_computes_each_element_once_and_copies_it(sizes, elements, itemsize):
    groups = groups_of(sizes)
    cut = plan.atoms(groups, elements)
    assert cut.elements >= elements and cut.count == math.lcm(*sizes)
    part = cut.part * itemsize
    total = cut.elements * itemsize

    def piece(c, j):  # (cluster, byte) of [atoms, clusters, part]
        n = total // len(groups[c])
        return [(c, i) for i in range(j * n, (j + 1) * n)]

    where = {rank: (c, j) for c, g in enumerate(groups) for j, rank in enumerate(g)}
    here = {rank: cut.per_piece(len(groups[c])) for rank, (c, _) in where.items()}
    sizes_of = lambda r: [here[r] * part] * (len(groups) - 1)  # noqa: E731
    buffers = {rank: [piece(*where[rank])] for rank in where}
    received, _ = run(groups, lambda c: plan.owned_reduce_scatter(groups, c, cut, itemsize), buffers, sizes_of)

    owned = {}  # what each rank computes: byte positions of the payload
    for rank, (c, j) in where.items():
        start = j * here[rank] * cut.clusters * part
        spots = [start + (k * cut.clusters + c) * part + b for k in range(here[rank]) for b in range(part)]
        others = [o for o in range(len(groups)) if o != c]
        assert received[rank] == [[(o, i) for i in spots] for o in others]
        owned[rank] = spots

    results = {rank: [owned[rank]] for rank in where}
    received, _ = run(groups, lambda c: plan.owned_all_gather(groups, c, cut, itemsize), results, sizes_of)
    for rank, (c, j) in where.items():
        others = [o for o in range(len(groups)) if o != c]
        everything = sorted(owned[rank] + [i for b in received[rank] for i in b])
        n = total // len(groups[c])
        assert everything == list(range(j * n, (j + 1) * n))
        for o, got in zip(others, received[rank], strict=True):
            assert all((i // part) % cut.clusters == o for i in got), "copied from a cluster that does not own it"


@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_a_bucket_is_its_exchanges_one_after_the_other(sizes, lengths):
    groups = groups_of(sizes)
    others = len(sizes) - 1
    merged = lambda c: plan.merge([(plan.whole(groups, c, n), 1, others) for n in lengths])  # noqa: E731
    buffers = {
        r: [[(c, k, i) for i in range(n)] for k, n in enumerate(lengths)] for c, g in enumerate(groups) for r in g
    }
    received, _ = run(groups, merged, buffers, lambda r: [n for n in lengths for _ in range(others)])
    for rank, got in received.items():
        clusters = [c for c in range(len(sizes)) if c != cluster_of(groups, rank)]
        assert got == [[(c, k, i) for i in range(n)] for k, n in enumerate(lengths) for c in clusters]


def test_lanes_do_not_share_ranks():
    with pytest.raises(ValueError, match="rank 0 is in two lanes"):
        plan.union([plan.whole([[0], [1]], 0, 4), plan.whole([[0], [2]], 0, 4)])
