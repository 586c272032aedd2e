"""all_to_all over a spanning axis: chunks for ranks of other clusters go there directly, the others by the vendor's."""

from __future__ import annotations

from typing import Any

from jax_hetccl import plan
from jax_hetccl._compat import ir
from jax_hetccl.decompose.common import Site, unpacked


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers all_to_all; arguments as in :func:`reduce.lower`."""
    split, concat = params["split_axis"], params["concat_axis"]
    if 0 in site.lowering.shape:
        return site.zeros(site.lowering.out_shape, site.lowering.dtype)
    shape, ranks, dtype = list(site.lowering.shape), site.order.total, unpacked(site.lowering.dtype)
    chunk = [*shape[:split], shape[split] // ranks, *shape[split + 1 :]]
    m = site.elements // ranks
    x = site.reshape(site.convert(x, dtype), *shape[:split], ranks, chunk[split], *shape[split + 1 :])
    x = site.reshape(site.transpose(x, [split, *range(split), *range(split + 1, len(shape) + 1)]), ranks, m)

    x, received = site.exchange(
        "direct",
        lambda lane: plan.direct(lane, site.me, m * dtype.itemsize, site.order.number),
        x,
        [(site.sizes[c], m) for c in site.others],
        dtype,
        detail=(split, concat),
    )
    own = site.order.block(site, x, site.me)
    if site.size > 1:
        own = site.lowering.local_all_to_all(own, (site.size, m), dtype, site.axes)
    received.insert(site.me, own)
    rows = site.reshape(site.order.join(site, received), ranks, *chunk)
    moved = site.transpose(rows, [*range(1, concat + 1), 0, *range(concat + 1, len(chunk) + 1)])
    return site.convert(site.reshape(moved, *site.lowering.out_shape), site.lowering.dtype)
