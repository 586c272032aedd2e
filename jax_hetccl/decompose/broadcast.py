"""pbroadcast over a spanning axis.

The source's cluster hands each of its ranks a piece of the operand, the pieces go to every other cluster over all
links, and an all-gather inside makes them whole. (Scatter and all-gather, as van de Geijn's broadcast of long vectors.)
"""

from __future__ import annotations

from typing import Any

from jax_hetccl import plan
from jax_hetccl._compat import hlo, ir
from jax_hetccl.decompose.common import Site, unpacked


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers pbroadcast from one global index; arguments as in :func:`reduce.lower`."""
    source, ranks = int(params["source"]), site.order.total
    if not -ranks <= source < ranks:
        raise IndexError(f"{site.text}: source {source} is no index of {site.axes}, whose size is {ranks}")
    n, dtype = site.elements, unpacked(site.lowering.dtype)
    if n == 0:
        return x
    cluster, member = site.order.place(source % ranks)
    pieces = [-(-n // size) for size in site.sizes]
    own, flat = site.me == cluster, site.reshape(site.convert(x, dtype), n)
    # The others send nothing, but the exchange takes their operand too: its place in the program must depend on the
    # same values in all clusters.
    sent, received = site.exchange(
        "broadcast",
        lambda lane: plan.broadcast(lane, site.me, cluster, n * dtype.itemsize, lambda c: pieces[c] * dtype.itemsize),
        _scattered(site, flat, member, pieces[cluster]) if own else flat,
        [] if own else [(pieces[site.me],)],
        dtype,
        detail=(source % ranks,),
    )
    (piece,) = [sent] if own else received
    whole = site.gather(piece) if site.size > 1 else piece
    flat = hlo.slice(whole, [0], [n], [1])
    return site.convert(site.reshape(flat, *site.lowering.shape), site.lowering.dtype)


def _scattered(site: Site, flat: ir.Value, member: int, piece: int) -> ir.Value:
    """One member's vector, cut into a piece for each rank of the cluster."""
    if site.size == 1:
        return flat
    dtype = unpacked(site.lowering.dtype)
    rows = site.reshape(site.pad(flat, piece * site.size, dtype), site.size, piece)
    rows = site.lowering.local_all_to_all(rows, (site.size, piece), dtype, site.axes)
    return site.reshape(hlo.slice(rows, [member, 0], [member + 1, piece], [1, 1]), piece)
