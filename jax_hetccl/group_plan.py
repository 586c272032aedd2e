"""Plans within groups of ranks (``axis_index_groups``), which may lie in one cluster or in several.

Pure functions like :mod:`jax_hetccl.plan`, for one lane each. ``split`` is the lane's members as groups of
``(cluster, member)``, in the order in which lax numbers a group. A group inside one cluster gets no ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jax_hetccl.plan import Groups, Plan, Range, RankPlan, others, whole

Split = Sequence[Sequence[tuple[int, int]]]
_Pair = tuple[
    tuple[int, int], tuple[int, int], int, int
]  # source, target, offset in its send and in its receive buffer


def reduced(groups: Groups, me: int, split: Split, nbytes: int) -> Plan:
    """psum, pmax, pmin: :func:`plan.whole` within each group.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      split: the groups.
      nbytes: size of the buffer.

    Returns:
      A plan for each rank of ``groups[me]``. Buffer ``b`` of the receives belongs to the ``b``-th other cluster and
      stays as it is where the rank's group has no member in that cluster.
    """
    plan: dict[int, RankPlan] = {rank: RankPlan() for rank in groups[me]}
    for group in split:
        members = [[groups[c][m] for k, m in group if k == c] for c in range(len(groups))]
        present = [c for c in range(len(groups)) if members[c]]
        if me not in present or len(present) == 1:
            continue
        buffers = [others(groups, me).index(c) for c in present if c != me]
        for rank, part in whole([members[c] for c in present], present.index(me), nbytes).items():
            recvs = tuple(dataclasses.replace(r, buffer=buffers[r.buffer]) for r in part.recvs)
            plan[rank] = RankPlan(part.sends, recvs)
    return plan


def spread(split: Split, me: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Who in cluster ``me`` takes which other cluster's shard of an all_gather: ``j``-th of them the ``j``-th, in turn.

    Returns:
      For each member of another cluster, ``(member of me, slot)``: where its shard arrives.
    """
    found = {}
    for group in split:
        here = [m for c, m in group if c == me]
        if here:
            away = [at for at in group if at[0] != me]
            found |= {at: (here[i % len(here)], i // len(here)) for i, at in enumerate(away)}
    return found


def gathered(groups: Groups, me: int, split: Split, shard: int) -> Plan:
    """all_gather: every shard goes once to each other cluster in which its group has members, see :func:`spread`.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      split: the groups.
      shard: bytes that each rank holds.

    Returns:
      A plan for each rank of ``groups[me]``; the only receive buffer has a slot for each shard that the rank takes.
    """
    arrives = {c: spread(split, c) for c in range(len(groups))}

    def pairs() -> Iterator[_Pair]:
        for group in split:
            for source in group:
                for c in sorted({k for k, _ in group} - {source[0]}):
                    member, slot = arrives[c][source]
                    yield source, (c, member), 0, slot * shard

    return _pairwise(groups, me, pairs(), shard)


def scattered(groups: Groups, me: int, split: Split, chunk: int) -> Plan:
    """psum_scatter: each rank gets the sum of its chunk over each other cluster of its group, from one member there.

    Every rank of a group's part in a cluster holds the sums of all chunks of the group, in order of the group.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      split: the groups.
      chunk: bytes for each rank.

    Returns:
      A plan for each rank of ``groups[me]``; the only receive buffer has a row for each other cluster, which stays as
      it is where the group has no member there.
    """

    def pairs() -> Iterator[_Pair]:
        for group in split:
            for at, target in enumerate(group):
                for row, c in enumerate(others(groups, target[0])):
                    there = [source for source in group if source[0] == c]
                    if there:
                        yield there[at % len(there)], target, at * chunk, row * chunk

    return _pairwise(groups, me, pairs(), chunk)


def direct(groups: Groups, me: int, split: Split, chunk: int) -> Plan:
    """all_to_all: every rank sends one chunk to every member of its group in another cluster.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      split: the groups.
      chunk: bytes for each rank.

    Returns:
      A plan for each rank of ``groups[me]``; the send buffer and the only receive buffer have a row for each member of
      the group, and the rows of members of the own cluster stay as they are.
    """

    def pairs() -> Iterator[_Pair]:
        for group in split:
            for i, source in enumerate(group):
                for j, target in enumerate(group):
                    if source[0] != target[0]:
                        yield source, target, j * chunk, i * chunk

    return _pairwise(groups, me, pairs(), chunk)


def _pairwise(groups: Groups, me: int, pairs: Iterable[_Pair], nbytes: int) -> Plan:
    """The plan of messages of ``nbytes``; two ranks see theirs in the same order."""
    sends: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    recvs: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    for (c, i), (k, j), there, here in pairs:
        source, target = groups[c][i], groups[k][j]
        if c == me:
            sends[source].append(Range(target, 0, there, nbytes))
        if k == me:
            recvs[target].append(Range(source, 0, here, nbytes))
    return {rank: RankPlan(tuple(sends[rank]), tuple(recvs[rank])) for rank in groups[me]}
