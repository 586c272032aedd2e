"""Which elements of an array every rank speaks for, and which byte ranges ranks of different clusters exchange.

Pure functions of boxes: no JAX, no I/O. In every cluster an array is cut into boxes, one for each rank; ranks with the
same box are replicas and share it out, so that each element has exactly one speaker in each cluster. Two ranks of
different clusters exchange the elements for which both speak, in row-major order of the *global* index: that order is
the same on both sides, whatever the two shardings look like.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jax_hetccl.plan import Plan, Range, RankPlan

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """An interval of a box's elements, row-major: those for which one rank speaks."""

    box: Box
    first: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array as all clusters hold it.

    Attributes:
      shares: for each cluster, each rank's share.
      cells: boxes that together make up the array, each with the cluster that computes it (see :func:`cells`).
      itemsize: bytes of an element on the wire.
      whole: every rank takes the other clusters' whole value instead of a share; for single elements, where a local
        all-gather would cost more than it saves.
    """

    shares: tuple[Mapping[int, Share], ...]
    cells: tuple[tuple[Box, int], ...]
    itemsize: int
    whole: bool = False


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def replicas(boxes: Sequence[Box]) -> list[list[int]]:
    """Positions with the same box, in order of the first of each."""
    groups: dict[Box, list[int]] = {}
    for i, box in enumerate(boxes):
        groups.setdefault(box, []).append(i)
    return list(groups.values())


def part_elements(boxes: Sequence[Box]) -> int:
    """Elements of the buffer that holds a rank's share; the last replicas' shares may be shorter."""
    return -(-volume(boxes[0]) // len(replicas(boxes)[0]))


def shares(ranks: Sequence[int], boxes: Sequence[Box]) -> dict[int, Share]:
    """Shares a cluster's boxes out.

    Args:
      ranks: the cluster's ranks.
      boxes: what each holds; equal boxes are replicas.

    Returns:
      Each rank's share.

    Example:
      >>> shares([4, 5], [((0, 3),), ((0, 3),)])[5]
      Share(box=((0, 3),), first=2, elements=1)
    """
    part, result = part_elements(boxes), {}
    for group in replicas(boxes):
        for j, i in enumerate(group):
            first = min(j * part, volume(boxes[i]))
            result[ranks[i]] = Share(boxes[i], first, min(part, volume(boxes[i]) - first))
    return result


def block_sizes(shape: Sequence[int], clusters: int) -> tuple[int, ...]:
    """Sizes of the cells along each dimension: the two longest dimensions are cut, finely enough that every share
    meets cells of every owner."""
    longest = sorted(range(len(shape)), key=lambda d: (-shape[d], d))[:2]
    return tuple(max(1, -(-n // (2 * clusters)) if d in longest else n) for d, n in enumerate(shape))


def cells(shape: Sequence[int], clusters: int) -> tuple[tuple[Box, int], ...]:
    """Cuts an array into cells and gives each an owner, like the colours of a checkerboard: block numbers along the
    dimensions, added, modulo the number of clusters."""
    cut = []
    for n, size in zip(shape, block_sizes(shape, clusters), strict=True):
        cut.append([(i, (at, min(at + size, n))) for i, at in enumerate(range(0, n, size))])
    return tuple(
        (tuple(bounds for _, bounds in cell), sum(i for i, _ in cell) % clusters) for cell in itertools.product(*cut)
    )


def one_cell(shape: Sequence[int]) -> tuple[tuple[Box, int], ...]:
    """The whole array as a cell without an owner."""
    return ((tuple((0, n) for n in shape), -1),)


def runs(a: Share, b: Share, within: Box) -> list[tuple[int, int, int]]:
    """The elements in both shares and in ``within``, in global order.

    Returns:
      ``(offset in a, offset in b, elements)``, as few as contiguous memory on both sides allows.
    """
    low = [max(x[0], y[0], w[0]) for x, y, w in zip(a.box, b.box, within, strict=True)]
    high = [min(x[1], y[1], w[1]) for x, y, w in zip(a.box, b.box, within, strict=True)]
    if any(lo >= hi for lo, hi in zip(low, high, strict=True)) or not a.elements or not b.elements:
        return []
    d, length = len(low), 1
    while d > 0:
        d -= 1
        length *= high[d] - low[d]
        if not a.box[d] == b.box[d] == (low[d], high[d]):
            break
    at_a, at_b = _starts(a.box, low, high, d) - a.first, _starts(b.box, low, high, d) - b.first
    skip = np.maximum(0, np.maximum(-at_a, -at_b))
    end = np.minimum(length, np.minimum(a.elements - at_a, b.elements - at_b))
    keep = skip < end
    found = zip((at_a + skip)[keep].tolist(), (at_b + skip)[keep].tolist(), (end - skip)[keep].tolist(), strict=True)
    return list(found)


def _starts(box: Box, low: Sequence[int], high: Sequence[int], outer: int) -> np.ndarray:
    """Offsets in a box of the runs of the region [low, high), which are contiguous from dimension ``outer`` on."""
    stride, at = 1, np.zeros(1, np.int64)
    for d in reversed(range(len(box))):
        start, stop = box[d]
        steps = np.arange(low[d], high[d]) if d < outer else np.asarray([low[d]])
        at = ((steps - start)[:, None] * stride + at[None, :]).reshape(-1)
        stride *= stop - start
    return at


def all_to_all(leaves: Sequence[Leaf], me: int, ranks: Sequence[int]) -> Plan:
    """Every rank sends its share to all who hold it in the other clusters, and receives theirs.

    Buffer ``i`` of the sends is leaf ``i``'s share. Buffer ``i * others + b`` of the receives is laid out like it and
    takes the value of the ``b``-th other cluster.

    Args:
      leaves: the arrays.
      me: the own cluster.
      ranks: the ranks to plan, of ``me``.
    """
    others = len(leaves[0].shares) - 1
    return _planned(leaves, me, ranks, _always, _always, lambda i, b: i * others + b)


def to_owners(leaves: Sequence[Leaf], me: int, ranks: Sequence[int]) -> Plan:
    """First of two phases: every element goes to the cluster that owns it. Buffers as in :func:`all_to_all`."""
    others = len(leaves[0].shares) - 1
    return _planned(
        leaves, me, ranks, lambda owner, c: owner == c, lambda owner, c: owner == me, lambda i, b: i * others + b
    )


def from_owners(leaves: Sequence[Leaf], me: int, ranks: Sequence[int]) -> Plan:
    """Second phase: owners send what they computed. One receive buffer for each leaf, laid out like the share; the own
    cluster's elements in it are not touched."""
    return _planned(leaves, me, ranks, lambda owner, c: owner == me, lambda owner, c: owner == c, lambda i, b: i)


def _always(owner: int, other: int) -> bool:
    return True


Choice = Callable[[int, int], bool]  # (owner of a cell, other cluster) -> whether it travels


def _planned(
    leaves: Sequence[Leaf],
    me: int,
    ranks: Sequence[int],
    sent: Choice,
    received: Choice,
    buffer: Callable[[int, int], int],
) -> dict[int, RankPlan]:
    result = {}
    others = [c for c in range(len(leaves[0].shares)) if c != me]
    for rank in ranks:
        sends: list[Range] = []
        recvs: list[Range] = []
        for (i, leaf), (b, c) in itertools.product(enumerate(leaves), enumerate(others)):
            if leaf.whole:
                out, into = _whole(leaf, me, rank, c)
                sends += [Range(peer, i, 0, leaf.itemsize) for peer in out]
                recvs.append(Range(into, buffer(i, b), 0, leaf.itemsize))
                continue
            for peer, owner, at, n in _meetings(leaf, me, rank, c):
                r = Range(peer, i, at * leaf.itemsize, n * leaf.itemsize)
                if sent(owner, c):
                    sends.append(r)
                if received(owner, c):
                    recvs.append(dataclasses.replace(r, buffer=buffer(i, b)))
        result[rank] = RankPlan(tuple(sends), tuple(recvs))
    return result


def _meetings(leaf: Leaf, me: int, rank: int, other: int) -> Iterator[tuple[int, int, int, int]]:
    """What a rank's share has in common with those of another cluster: (peer, owner, first element, elements)."""
    mine = leaf.shares[me][rank]
    for peer, theirs in leaf.shares[other].items():
        if any(x[0] >= y[1] or y[0] >= x[1] for x, y in zip(mine.box, theirs.box, strict=True)):
            continue
        for cell, owner in leaf.cells:
            for at, _, n in runs(mine, theirs, cell):
                yield peer, owner, at, n


def _whole(leaf: Leaf, me: int, rank: int, other: int) -> tuple[list[int], int]:
    """To whom in another cluster a rank sends a whole value, and from whom it takes that cluster's."""
    mine, theirs = list(leaf.shares[me]), list(leaf.shares[other])
    j = mine.index(rank)
    return [peer for i, peer in enumerate(theirs) if i % len(mine) == j], theirs[j % len(theirs)]
