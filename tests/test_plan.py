"""Plans are pure functions: what one rank sends is what the other expects, and everyone gets all bytes once."""

import collections
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl import group_plan, plan

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


@given(SIZES, st.integers(0, 3), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_broadcast_brings_each_byte_once_to_each_other_cluster(sizes, source, elements, itemsize):
    groups, source = groups_of(sizes), source % len(sizes)
    pieces, nbytes = [-(-elements // n) * itemsize for n in sizes], elements * itemsize
    whole = [*range(nbytes), *[None] * (pieces[source] * sizes[source] - nbytes)]
    buffers = {r: [whole[j * pieces[source] :][: pieces[source]]] for j, r in enumerate(groups[source])}
    received, plans = run(
        groups,
        lambda c: plan.broadcast(groups, c, source, nbytes, lambda k: pieces[k]),
        buffers,
        lambda r: [pieces[cluster_of(groups, r)]] * (r not in groups[source]),
    )
    assert plan.bytes_sent(plans) == nbytes * (len(sizes) - 1)
    for c, group in enumerate(groups):
        if c != source:
            assert [b for rank in group for b in received[rank][0]][:nbytes] == list(range(nbytes))


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


@st.composite
def split_lanes(draw):
    """Ranks of a lane, its members in groups, and the size of a group if they have one."""
    groups = groups_of(draw(SIZES))
    members = draw(st.permutations([(c, m) for c, g in enumerate(groups) for m in range(len(g))]))
    ways = [n for n in range(1, len(members) + 1) if len(members) % n == 0]
    size = draw(st.sampled_from(ways))
    return groups, [members[i : i + size] for i in range(0, len(members), size)], size


@given(split_lanes(), st.integers(1, 3))
def test_gathered_in_groups_brings_each_shard_once_to_each_cluster(lane, shard):
    groups, split, _ = lane
    buffers = {r: [[(r, b) for b in range(shard)]] for g in groups for r in g}
    arrives = [group_plan.spread(split, c) for c in range(len(groups))]
    slots = [max((s + 1 for _, s in a.values()), default=0) for a in arrives]
    sizes_of = lambda r: [slots[cluster_of(groups, r)] * shard]  # noqa: E731
    received, plans = run(groups, lambda c: group_plan.gathered(groups, c, split, shard), buffers, sizes_of)
    crossing = 0
    for group in split:
        for c in {c for c, _ in group}:
            for other, m in (at for at in group if at[0] != c):
                member, slot = arrives[c][other, m]
                assert (c, member) in group, "taken by a rank of another group"
                rank = groups[other][m]
                got = received[groups[c][member]][0][slot * shard : (slot + 1) * shard]
                assert got == [(rank, b) for b in range(shard)]
                crossing += shard
    assert plan.bytes_sent(plans) == crossing


@given(split_lanes(), st.integers(1, 3))
def test_scattered_in_groups_brings_the_own_chunk_of_every_cluster(lane, chunk):
    groups, split, size = lane
    # A buffer holds (group, cluster, byte): all members of a part hold the same sums.
    buffers = {
        groups[c][m]: [[(i, c, b) for b in range(size * chunk)]] for i, group in enumerate(split) for c, m in group
    }
    rows = len(groups) - 1
    received, _ = run(
        groups, lambda c: group_plan.scattered(groups, c, split, chunk), buffers, lambda r: [rows * chunk]
    )
    for i, group in enumerate(split):
        for at, (c, m) in enumerate(group):
            for row, other in enumerate(plan.others(groups, c)):
                got = received[groups[c][m]][0][row * chunk : (row + 1) * chunk]
                there = any(k == other for k, _ in group)
                want = [(i, other, b) for b in range(at * chunk, (at + 1) * chunk)] if there else [None] * chunk
                assert got == want


@given(split_lanes(), st.integers(1, 3))
def test_direct_in_groups_brings_every_remote_members_chunk(lane, chunk):
    groups, split, size = lane
    buffers = {r: [[(r, b) for b in range(size * chunk)]] for g in groups for r in g}
    received, _ = run(groups, lambda c: group_plan.direct(groups, c, split, chunk), buffers, lambda r: [size * chunk])
    for group in split:
        for at, (c, m) in enumerate(group):
            for i, (k, j) in enumerate(group):
                got = received[groups[c][m]][0][i * chunk : (i + 1) * chunk]
                want = [(groups[k][j], b) for b in range(at * chunk, (at + 1) * chunk)] if k != c else [None] * chunk
                assert got == want


@given(split_lanes(), st.integers(1, 3))
def test_reduced_in_groups_brings_every_other_clusters_value(lane, nbytes):
    groups, split, _ = lane
    buffers = {groups[c][m]: [[(i, c, b) for b in range(nbytes)]] for i, group in enumerate(split) for c, m in group}
    received, _ = run(
        groups,
        lambda c: group_plan.reduced(groups, c, split, nbytes),
        buffers,
        lambda r: [nbytes] * (len(groups) - 1),
    )
    for i, group in enumerate(split):
        for c, m in group:
            for got, other in zip(received[groups[c][m]], plan.others(groups, c), strict=True):
                there = any(k == other for k, _ in group)
                assert got == ([(i, other, b) for b in range(nbytes)] if there else [None] * nbytes)


def test_lanes_do_not_share_ranks():
    with pytest.raises(ValueError, match="rank 0 is in two lanes"):
        plan.union([plan.whole([[0], [1]], 0, 4), plan.whole([[0], [2]], 0, 4)])
