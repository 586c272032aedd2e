"""psum_scatter over a spanning axis.

Each cluster reduce-scatters what it has: for its own ranks their chunks, for every other cluster one piece for each
own rank. The pieces go to the ranks whose chunks they are part of, which add in cluster order. One local collective,
one exchange, and every element is computed by one rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_hetccl import group_plan, plan
from jax_hetccl._compat import hlo, ir
from jax_hetccl.decompose.common import Site, accumulator, shape_of
from jax_hetccl.decompose.groups import Grouping


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers psum_scatter, tiled or not; arguments as in :func:`reduce.lower`."""
    if site.lowering.dtype == np.bool_:
        # lax finds out where it adds, which a cluster of one device does not.
        raise TypeError(f"{site.text}: psum_scatter does not add booleans; convert them to an integer type")
    out = site.lowering.out_shape
    if 0 in site.lowering.shape:
        return site.zeros(out, site.lowering.dtype)
    dtype, groups = accumulator(site.lowering.dtype), params.get("axis_index_groups")
    grouping = None if groups is None else Grouping.of(site, groups)
    ranks = site.order.total if grouping is None else grouping.size
    rows = _chunks(site, site.convert(x, dtype), params["scatter_dimension"], ranks)
    total = _total(site, rows, dtype) if grouping is None else _grouped_total(site, rows, dtype, grouping)
    return site.reshape(site.rounded(total, site.lowering.dtype), *out)


def _total(site: Site, rows: ir.Value, dtype: np.dtype) -> ir.Value:
    """The sum of the own chunk."""
    m = shape_of(rows)[1]

    def piece(of: int, to: int) -> int:
        return -(-site.sizes[to] * m // site.sizes[of])

    widths = [m if c == site.me else piece(site.me, c) for c in range(len(site.sizes))]
    where = [0, *itertools.accumulate(widths)]
    if site.size == 1:  # the rows as they are
        held = site.reshape(rows, where[-1])
    else:
        held = _laid_out(site, rows, widths, dtype)
        held = site.lowering.local_reduce_scatter("psum", held, site.size * where[-1], dtype, site.axes, site.size)
    wire = site.partial_dtype(dtype, site.alone)
    width = wire.itemsize
    held, received = site.exchange(
        "chunks",
        lambda lane: plan.scattered(
            lane, site.me, m * width, lambda of, to: piece(of, to) * width, [w * width for w in where]
        ),
        held,
        [(m,)] * len(site.others),
        wire,
    )
    values = [site.convert(r, dtype) for r in received]
    values.insert(site.me, site.convert(hlo.slice(held, [where[site.me]], [where[site.me] + m], [1]), dtype))
    return functools.reduce(hlo.add, values)


def _laid_out(site: Site, rows: ir.Value, widths: Sequence[int], dtype: np.dtype) -> ir.Value:
    """The rows in an order in which each own rank's piece has ``widths[c]`` elements for cluster c."""
    columns = []
    for c, width in enumerate(widths):
        block = site.reshape(site.order.block(site, rows, c), site.sizes[c] * shape_of(rows)[1])
        columns.append(site.reshape(site.pad(block, width * site.size, dtype), site.size, width))
    return site.reshape(hlo.concatenate(columns, 1), site.size * sum(widths))


def _grouped_total(site: Site, rows: ir.Value, dtype: np.dtype, grouping: Grouping) -> ir.Value:
    """The sum of the own chunk over the own group.

    The parts of groups in a cluster may differ in size, which a reduce-scatter does not take: where a group crosses
    clusters, each part sums all chunks and sends every rank elsewhere its own one.
    """
    ranks, m = shape_of(rows)
    if not grouping.crosses:
        flat = site.reshape(rows, ranks * m)
        if ranks == 1:
            return flat
        return site.lowering.local_reduce_scatter("psum", flat, ranks * m, dtype, site.axes, ranks, grouping.here)
    if any(len(part) > 1 for part in grouping.here):
        rows = site.lowering.local_reduce("psum", rows, dtype, site.axes, grouping.here)
    wire = site.partial_dtype(dtype, grouping.alone)
    rows, (received,) = site.exchange(
        "group chunks",
        lambda lane: group_plan.scattered(lane, site.me, grouping.split, m * wire.itemsize),
        rows,
        [(len(site.others), m)],
        wire,
        detail=grouping.groups,
    )
    values: list[ir.Value] = [hlo.slice(received, [b, 0], [b + 1, m], [1, 1]) for b in range(len(site.others))]
    mine = [[grouping.group_of(member).index((site.me, member))] for member in range(site.size)]
    values.insert(site.me, grouping.rows(rows, mine))
    return grouping.combined([site.convert(v, dtype) for v in values], hlo.add)


def _chunks(site: Site, x: ir.Value, dimension: int, ranks: int) -> ir.Value:
    """The operand as ``[ranks, elements of a chunk]``, in global order."""
    shape = list(site.lowering.shape)
    rest = shape[dimension] // ranks
    x = site.reshape(x, *shape[:dimension], ranks, rest, *shape[dimension + 1 :])
    order = [dimension, *range(dimension), *range(dimension + 1, len(shape) + 1)]
    return site.reshape(site.transpose(x, order), ranks, site.elements // ranks)
