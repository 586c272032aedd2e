"""all_gather over a spanning axis.

The own cluster's shards are gathered by the vendor. Of every other cluster's shards each rank receives one piece, so
that each byte crosses once and all links work; a second local all-gather spreads the pieces.
"""

from __future__ import annotations

import math
from typing import Any

from jax_hetccl import plan
from jax_hetccl._compat import hlo, ir
from jax_hetccl.decompose.common import Site, unpacked


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers all_gather and all_gather_invariant, tiled or not; arguments as in :func:`reduce.lower`."""
    rows = _rows(site, x)
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


def _placed(site: Site, rows: ir.Value, dimension: int, tiled: bool) -> ir.Value:
    """Rows ``[ranks, elements]`` with the rank dimension where the caller wants it."""
    shape, ranks = list(site.lowering.shape), site.order.total
    x = site.reshape(rows, ranks, *shape)
    order = [*range(1, dimension + 1), 0, *range(dimension + 1, len(shape) + 1)]
    x = site.transpose(x, order)
    if tiled:
        shape[dimension] *= ranks
    else:
        shape.insert(dimension, ranks)
    assert math.prod(shape) == ranks * site.elements
    return site.reshape(x, *shape)
