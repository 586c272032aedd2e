"""all_to_all over a spanning axis: chunks for ranks of other clusters go there directly, the others by the vendor's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jax_hetccl import group_plan, plan
from jax_hetccl._compat import hlo, ir
from jax_hetccl.decompose.common import Site, shape_of, unpacked
from jax_hetccl.decompose.groups import Grouping


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers all_to_all; arguments as in :func:`reduce.lower`."""
    split, concat, groups = params["split_axis"], params["concat_axis"], params["axis_index_groups"]
    if 0 in site.lowering.shape:
        return site.zeros(site.lowering.out_shape, site.lowering.dtype)
    grouping = None if groups is None else Grouping.of(site, groups)
    shape, dtype = list(site.lowering.shape), unpacked(site.lowering.dtype)
    ranks = site.order.total if grouping is None else grouping.size
    chunk = [*shape[:split], shape[split] // ranks, *shape[split + 1 :]]
    x = site.reshape(site.convert(x, dtype), *shape[:split], ranks, chunk[split], *shape[split + 1 :])
    x = site.transpose(x, [split, *range(split), *range(split + 1, len(shape) + 1)])
    x = site.reshape(x, ranks, site.elements // ranks)
    exchanged = _exchanged if grouping is None else functools.partial(_grouped, grouping)
    rows = site.reshape(exchanged(site, x, dtype, (split, concat)), ranks, *chunk)
    moved = site.transpose(rows, [*range(1, concat + 1), 0, *range(concat + 1, len(chunk) + 1)])
    return site.convert(site.reshape(moved, *site.lowering.out_shape), site.lowering.dtype)


def _exchanged(site: Site, x: ir.Value, dtype: np.dtype, detail: tuple[int, int]) -> ir.Value:
    """Row ``i`` of the result is the row that rank ``i`` has for this one."""
    m = shape_of(x)[1]
    x, received = site.exchange(
        "direct",
        lambda lane: plan.direct(lane, site.me, m * dtype.itemsize, site.order.number),
        x,
        [(site.sizes[c], m) for c in site.others],
        dtype,
        detail=detail,
    )
    own = site.order.block(site, x, site.me)
    if site.size > 1:
        own = site.lowering.local_all_to_all(own, (site.size, m), dtype, site.axes)
    received.insert(site.me, own)
    return site.order.join(site, received)


def _grouped(grouping: Grouping, site: Site, x: ir.Value, dtype: np.dtype, detail: tuple[int, int]) -> ir.Value:
    """The same within groups; ranks are numbered as their group lists them."""
    (ranks, m), blocks = shape_of(x), []
    if ranks == 1:
        return x
    if grouping.crosses:
        x, blocks = site.exchange(
            "group direct",
            lambda lane: group_plan.direct(lane, site.me, grouping.split, m * dtype.itemsize),
            x,
            [(ranks, m)],
            dtype,
            detail=(*detail, *grouping.groups),
        )
    members = range(site.size)
    positions = [{m: p for p, (c, m) in enumerate(grouping.group_of(member)) if c == site.me} for member in members]
    # Where the groups' parts here differ in size, all ranks take part, and rows between groups carry nothing.
    peers = [next((p for p in grouping.local or () if member in p), list(members)) for member in members]
    inside = grouping.rows(x, [[positions[m].get(peer, 0) for peer in peers[m]] for m in members])
    if grouping.together > 1:
        inside = site.lowering.local_all_to_all(inside, (grouping.together, m), dtype, site.axes, grouping.local)
    rows = hlo.concatenate([*blocks, inside], 0) if blocks else inside
    first = ranks * len(blocks)
    table = [
        [first + grouping.seat(m) if c == site.me else p for p, (c, m) in enumerate(grouping.group_of(member))]
        for member in members
    ]
    return grouping.rows(rows, table)
