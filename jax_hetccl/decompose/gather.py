"""all_gather over a spanning axis.

The own cluster's shards are gathered by the vendor. Of every other cluster's shards each rank receives one piece, so
that each byte crosses once and all links work; a second local all-gather spreads the pieces.
"""

from __future__ import annotations

import math
from typing import Any

from jax_hetccl import group_plan, plan
from jax_hetccl._compat import hlo, ir
from jax_hetccl.decompose.common import Site, shape_of, unpacked
from jax_hetccl.decompose.groups import Grouping


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers all_gather and all_gather_invariant, tiled or not; arguments as in :func:`reduce.lower`."""
    groups = params.get("axis_index_groups")
    rows = _rows(site, x) if groups is None else _grouped_rows(site, x, Grouping.of(site, groups))
    return _placed(site, rows, params["all_gather_dimension"], params["tiled"])


def _rows(site: Site, x: ir.Value) -> ir.Value:
    """Every rank's shard as a row, in global order."""
    n, dtype = site.elements, unpacked(site.lowering.dtype)
    if n == 0:
        return site.zeros((site.order.total, 0), site.lowering.dtype)
    flat = site.convert(site.reshape(x, n), dtype)

    def piece(of: int, to: int) -> int:
        return -(-site.sizes[of] * n // site.sizes[to])

    flat, received = site.exchange(
        "shards",
        lambda lane: plan.gathered(lane, site.me, n * dtype.itemsize, lambda of, to: piece(of, to) * dtype.itemsize),
        flat,
        [(piece(c, site.me),) for c in site.others],
        dtype,
    )
    blocks = [_spread(site, r, site.sizes[c] * n) for c, r in zip(site.others, received, strict=True)]
    blocks = [site.reshape(b, site.sizes[c], n) for c, b in zip(site.others, blocks, strict=True)]
    own = site.gather(flat) if site.size > 1 else flat
    blocks.insert(site.me, site.reshape(own, site.size, n))
    return site.convert(site.order.join(site, blocks), site.lowering.dtype)


def _spread(site: Site, piece: ir.Value, elements: int) -> ir.Value:
    """A cluster's shards, end to end, out of the pieces that our ranks received."""
    whole = site.gather(piece) if site.size > 1 else piece
    return hlo.slice(whole, [0], [elements], [1])


def _grouped_rows(site: Site, x: ir.Value, grouping: Grouping) -> ir.Value:
    """The shards of the own group as rows, in its order.

    The ranks of a cluster take the other clusters' shards in turn, one local all-gather spreads what they hold, and
    each rank picks the rows of its group.
    """
    n, dtype = site.elements, unpacked(site.lowering.dtype)
    if n == 0:
        return site.zeros((grouping.size, 0), site.lowering.dtype)
    held = [site.reshape(site.convert(x, dtype), 1, n)]
    arrives = group_plan.spread(grouping.split, site.me)
    slots = 1 + max((slot + 1 for _, slot in arrives.values()), default=0)
    if grouping.crosses:
        held[0], received = site.exchange(
            "group shards",
            lambda lane: group_plan.gathered(lane, site.me, grouping.split, n * dtype.itemsize),
            held[0],
            [(slots - 1, n)] * (slots > 1),
            dtype,
            detail=grouping.groups,
        )
        held += received
    rows = hlo.concatenate(held, 0) if len(held) > 1 else held[0]
    ranks = grouping.together
    if ranks > 1:
        rows = site.lowering.local_all_gather(
            site.reshape(rows, slots * n), ranks * slots * n, dtype, site.axes, ranks, grouping.local
        )
        rows = site.reshape(rows, ranks * slots, n)

    def place(at: tuple[int, int]) -> int:
        member, slot = (at[1], 0) if at[0] == site.me else (arrives[at][0], arrives[at][1] + 1)
        return grouping.seat(member) * slots + slot

    table = [[place(at) for at in grouping.group_of(member)] for member in range(site.size)]
    return site.convert(grouping.rows(rows, table), site.lowering.dtype)


def _placed(site: Site, rows: ir.Value, dimension: int, tiled: bool) -> ir.Value:
    """Rows ``[ranks, elements]`` with the rank dimension where the caller wants it."""
    shape, ranks = list(site.lowering.shape), shape_of(rows)[0]
    x = site.reshape(rows, ranks, *shape)
    order = [*range(1, dimension + 1), 0, *range(dimension + 1, len(shape) + 1)]
    x = site.transpose(x, order)
    if tiled:
        shape[dimension] *= ranks
    else:
        shape.insert(dimension, ranks)
    assert math.prod(shape) == ranks * site.elements
    return site.reshape(x, *shape)
