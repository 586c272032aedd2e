"""Plans: which byte ranges every rank sends to and receives from which rank.

Pure functions of cluster sizes and byte counts: no JAX, no I/O. A plan is computed for one *lane*, the ranks
that reduce together: ``groups[c]`` lists the world ranks of cluster ``c`` in that lane, in the order in which the
vendor's local reduce-scatter hands out pieces.

The cost of each plan stands in ``docs/algorithms.md``; ``tests/test_plan.py`` checks that what one rank sends is
exactly what the other expects, for drawn sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """``nbytes`` at ``offset`` of buffer number ``buffer``, to or from world rank ``peer``."""

    peer: int
    buffer: int
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank sends and receives. All ranges with one peer travel as one message, in this order."""

    sends: tuple[Range, ...] = ()
    recvs: tuple[Range, ...] = ()

    def shifted(self, sends: int, recvs: int) -> RankPlan:
        """The same plan with its buffers numbered from ``sends`` and ``recvs`` on."""
        return RankPlan(
            tuple(dataclasses.replace(r, buffer=r.buffer + sends) for r in self.sends),
            tuple(dataclasses.replace(r, buffer=r.buffer + recvs) for r in self.recvs),
        )


Plan = Mapping[int, RankPlan]  # world rank -> its part


def whole(groups: Groups, me: int, nbytes: int) -> Plan:
    """Every rank of every cluster gets each other cluster's buffer of ``nbytes``.

    All ranks of a cluster hold the same buffer, so member ``j`` takes cluster ``c``'s from its member
    ``j mod size``: the receivers spread evenly over the senders. Buffer ``b`` of the receives is the ``b``-th
    *other* cluster.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      nbytes: size of the buffer.

    Returns:
      A plan for each rank of ``groups[me]``.

    Example:
      >>> whole([[0], [1]], me=0, nbytes=8)[0].sends
      (Range(peer=1, buffer=0, offset=0, nbytes=8),)
    """
    away = others(groups, me)
    mine = groups[me]
    plan = {}
    for j, rank in enumerate(mine):
        sends = tuple(Range(peer, 0, 0, nbytes) for c in away for i, peer in enumerate(groups[c]) if i % len(mine) == j)
        recvs = tuple(Range(groups[c][j % len(groups[c])], b, 0, nbytes) for b, c in enumerate(away))
        plan[rank] = RankPlan(sends, recvs)
    return plan


def pieces(groups: Groups, me: int, nbytes: int) -> Plan:
    """Every rank gets the other clusters' bytes for the piece it holds after a local reduce-scatter.

    ``nbytes`` is divisible by every cluster's size; member ``j`` of a cluster of ``n`` holds bytes
    ``[j, j + 1) * nbytes / n``. Uneven clusters meet by interval overlap. Buffer ``b`` of the receives has the
    size of the own piece and belongs to the ``b``-th other cluster.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      nbytes: size of the whole (padded) payload.

    Returns:
      A plan for each rank of ``groups[me]``.
    """
    mine = nbytes // len(groups[me])
    plan = {}
    for j, rank in enumerate(groups[me]):
        sends, recvs = [], []
        for b, c in enumerate(others(groups, me)):
            theirs = nbytes // len(groups[c])
            for i, peer in enumerate(groups[c]):
                low, high = max(j * mine, i * theirs), min((j + 1) * mine, (i + 1) * theirs)
                if low < high:
                    sends.append(Range(peer, 0, low - j * mine, high - low))
                    recvs.append(Range(peer, b, low - j * mine, high - low))
        plan[rank] = RankPlan(tuple(sends), tuple(recvs))
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class Atoms:
    """How a payload is cut when one cluster owns each part of it (see :func:`owned_reduce_scatter`).

    The payload is padded to ``count * clusters * part`` elements: ``count`` atoms (the least common multiple of the
    group sizes, so that every piece is a whole number of them), each cut into one part for each owner cluster.
    """

    count: int
    clusters: int
    part: int

    @property
    def elements(self) -> int:
        return self.count * self.clusters * self.part

    def per_piece(self, group_size: int) -> int:
        return self.count // group_size


def atoms(groups: Groups, elements: int) -> Atoms:
    """The :class:`Atoms` of a payload of ``elements`` (at least one part each)."""
    count = math.lcm(*(len(g) for g in groups))
    return Atoms(count, len(groups), max(1, -(-elements // (count * len(groups)))))


def owned_reduce_scatter(groups: Groups, me: int, cut: Atoms, itemsize: int) -> Plan:
    """First half of a reduction where one cluster computes each element: bring the parts to their owners.

    A rank's send buffer is its piece, ``[atoms per piece, clusters, part]``; it receives for each other cluster
    ``[atoms per piece, part]`` (buffer ``b`` for the ``b``-th other cluster).

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      cut: from :func:`atoms`.
      itemsize: bytes of an element.

    Returns:
      A plan for each rank of ``groups[me]``.
    """
    return _owned(groups, me, cut, itemsize, lambda atom, owner: atom * cut.clusters + owner)


def owned_all_gather(groups: Groups, me: int, cut: Atoms, itemsize: int) -> Plan:
    """Second half: every owner sends the parts it computed to all who hold that piece.

    A rank sends ``[atoms per piece, part]``, the parts its cluster owns, and receives for each other cluster the
    parts that one owns, in the same shape (buffer ``b`` for the ``b``-th other cluster).
    """
    return _owned(groups, me, cut, itemsize, lambda atom, owner: atom)


def _overlaps(n: int, size: int, m: int, other: int) -> Iterable[tuple[int, int, int, int]]:
    """Where intervals of ``n`` ranks, ``size`` each, meet intervals of ``m`` ranks, ``other`` each, over the same bytes.

    Yields ``(rank of n, rank of m, first byte, bytes)`` in order of the bytes.
    """
    total = min(n * size, m * other)
    at = 0
    while at < total:
        i, j = at // size, at // other
        end = min((i + 1) * size, (j + 1) * other, total)
        yield i, j, at, end - at
        at = end


def gathered(groups: Groups, me: int, shard: int, piece: Callable[[int, int], int]) -> Plan:
    """all_gather: a cluster's shards, end to end, are cut into one piece for each rank of every other cluster.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      shard: bytes that each rank holds and sends.
      piece: ``piece(of, to)``, the bytes of the piece that each rank of cluster ``to`` takes of cluster ``of``'s
        shards; the last pieces may be shorter.

    Returns:
      A plan for each rank of ``groups[me]``; receive buffer ``b`` takes the piece of the ``b``-th other cluster.
    """
    sends: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    recvs: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    for b, c in enumerate(others(groups, me)):
        for i, j, at, n in _overlaps(len(groups[me]), shard, len(groups[c]), piece(me, c)):
            sends[groups[me][i]].append(Range(groups[c][j], 0, at - i * shard, n))
        for i, j, at, n in _overlaps(len(groups[c]), shard, len(groups[me]), piece(c, me)):
            recvs[groups[me][j]].append(Range(groups[c][i], b, at - j * piece(c, me), n))
    return {rank: RankPlan(tuple(sends[rank]), tuple(recvs[rank])) for rank in groups[me]}


def scattered(groups: Groups, me: int, chunk: int, piece: Callable[[int, int], int], where: Sequence[int]) -> Plan:
    """psum_scatter: each rank holds a piece of what its cluster has for every other cluster, whose ranks want chunks.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      chunk: bytes of the result of each rank.
      piece: ``piece(of, to)``, the bytes of the piece that each rank of cluster ``of`` holds of what goes to ``to``.
      where: for each cluster, the offset of its piece in the send buffer.

    Returns:
      A plan for each rank of ``groups[me]``; receive buffer ``b`` takes the ``b``-th other cluster's chunk.
    """
    sends: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    recvs: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    for b, c in enumerate(others(groups, me)):
        for i, j, at, n in _overlaps(len(groups[me]), piece(me, c), len(groups[c]), chunk):
            sends[groups[me][i]].append(Range(groups[c][j], 0, where[c] + at - i * piece(me, c), n))
        for i, j, at, n in _overlaps(len(groups[c]), piece(c, me), len(groups[me]), chunk):
            recvs[groups[me][j]].append(Range(groups[c][i], b, at - j * chunk, n))
    return {rank: RankPlan(tuple(sends[rank]), tuple(recvs[rank])) for rank in groups[me]}


def direct(groups: Groups, me: int, chunk: int, number: Callable[[int, int], int]) -> Plan:
    """all_to_all: every rank sends one chunk to every rank of every other cluster.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      chunk: bytes for each rank.
      number: ``number(cluster, member)``, the position of that rank's chunk in the send buffer.

    Returns:
      A plan for each rank of ``groups[me]``; receive buffer ``b`` holds the ``b``-th other cluster's chunks in order
      of its members.
    """
    plan = {}
    for rank in groups[me]:
        sends, recvs = [], []
        for b, c in enumerate(others(groups, me)):
            for i, peer in enumerate(groups[c]):
                sends.append(Range(peer, 0, number(c, i) * chunk, chunk))
                recvs.append(Range(peer, b, i * chunk, chunk))
        plan[rank] = RankPlan(tuple(sends), tuple(recvs))
    return plan


def permuted(groups: Groups, me: int, nbytes: int, pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> Plan:
    """ppermute: the pairs ``(cluster, member) -> (cluster, member)`` that cross clusters, each sent directly.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      nbytes: size of the operand.
      pairs: sources and destinations, each at most once.

    Returns:
      A plan for each rank of ``groups[me]``; the only receive buffer stays as it is where nothing arrives.
    """
    plan = {rank: RankPlan() for rank in groups[me]}
    for (c, i), (k, j) in pairs:
        if c == k:
            continue
        source, destination = groups[c][i], groups[k][j]
        if c == me:
            plan[source] = RankPlan((Range(destination, 0, 0, nbytes),), plan[source].recvs)
        if k == me:
            plan[destination] = RankPlan(plan[destination].sends, (Range(source, 0, 0, nbytes),))
    return plan


def broadcast(groups: Groups, me: int, source: int, nbytes: int, piece: Callable[[int], int]) -> Plan:
    """pbroadcast: one cluster's payload, cut into a piece for each of its ranks, to every other cluster, cut likewise.

    Args:
      groups: world ranks of the lane, a sequence for each cluster.
      me: the cluster whose ranks are planned.
      source: the cluster that has the payload.
      nbytes: size of the payload.
      piece: ``piece(cluster)``, the bytes of each rank's piece there; the last pieces may be shorter.

    Returns:
      A plan for each rank of ``groups[me]``; the only buffer, of those that send as of those that receive, is the
      rank's piece.
    """
    sends: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    recvs: dict[int, list[Range]] = {rank: [] for rank in groups[me]}
    for c in others(groups, source):
        for i, j, at, n in _overlaps(len(groups[source]), piece(source), len(groups[c]), piece(c)):
            n = min(n, nbytes - at)
            if n > 0 and me == source:
                sends[groups[me][i]].append(Range(groups[c][j], 0, at - i * piece(source), n))
            if n > 0 and me == c:
                recvs[groups[me][j]].append(Range(groups[source][i], 0, at - j * piece(c), n))
    return {rank: RankPlan(tuple(sends[rank]), tuple(recvs[rank])) for rank in groups[me]}


def union(plans: Iterable[Plan]) -> dict[int, RankPlan]:
    """The plans of several lanes as one; a rank belongs to one lane."""
    result: dict[int, RankPlan] = {}
    for plan in plans:
        for rank, part in plan.items():
            if rank in result:
                raise ValueError(f"rank {rank} is in two lanes")
            result[rank] = part
    return result


def merge(plans: Sequence[tuple[Plan, int, int]]) -> dict[int, RankPlan]:
    """One bucket out of several exchanges: each is ``(plan, number of sends, number of receives)`` in buffers.

    The buffers are numbered on in order; the ranges with one peer stay in order of the exchanges, so that both
    sides agree on the layout of the merged message.
    """
    result: dict[int, RankPlan] = {}
    sends = recvs = 0
    for plan, n_sends, n_recvs in plans:
        for rank, part in plan.items():
            before, more = result.get(rank, RankPlan()), part.shifted(sends, recvs)
            result[rank] = RankPlan(before.sends + more.sends, before.recvs + more.recvs)
        sends, recvs = sends + n_sends, recvs + n_recvs
    return result


def bytes_sent(plan: Plan) -> int:
    """Payload bytes that leave the planned ranks together."""
    return sum(r.nbytes for part in plan.values() for r in part.sends)


def others(groups: Groups, me: int) -> list[int]:
    """The other clusters, in order."""
    return [c for c in range(len(groups)) if c != me]


def _owned(groups: Groups, me: int, cut: Atoms, itemsize: int, place: Callable[[int, int], int]) -> Plan:
    """One part for each atom between those who hold it; ``place(atom, other cluster)`` is a sent part's number in its
    buffer, a received one is number ``atom`` in the other cluster's."""
    part = cut.part * itemsize
    plan = {}
    for j, rank in enumerate(groups[me]):
        sends, recvs = [], []
        for b, c in enumerate(others(groups, me)):
            for k, peer in _holders(groups, me, j, c, cut):
                sends.append(Range(peer, 0, place(k, c) * part, part))
                recvs.append(Range(peer, b, k * part, part))
        plan[rank] = RankPlan(tuple(sends), tuple(recvs))
    return plan


def _holders(groups: Groups, me: int, member: int, other: int, cut: Atoms) -> Iterable[tuple[int, int]]:
    """For each atom of a member's piece: (its number within the piece, who holds it in cluster ``other``)."""
    mine, theirs = cut.per_piece(len(groups[me])), cut.per_piece(len(groups[other]))
    for k in range(mine):
        yield k, groups[other][(member * mine + k) // theirs]
