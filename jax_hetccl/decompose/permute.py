"""ppermute over a spanning axis: pairs that cross clusters go directly, the others by the vendor's permute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_hetccl import plan
from jax_hetccl._compat import constant, hlo, ir
from jax_hetccl.decompose.common import Site, unpacked


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers ppermute; arguments as in :func:`reduce.lower`. A rank that is no destination gets zeros."""
    site = _ordered(site)
    perm = [(int(s), int(d)) for s, d in params["perm"]]
    _check(perm, site.order.total)
    if 0 in site.lowering.shape:
        return x
    dtype = unpacked(site.lowering.dtype)
    x = site.convert(x, dtype)
    pairs = [(site.order.place(s), site.order.place(d)) for s, d in perm]
    inside = [(s[1], d[1]) for s, d in pairs if s[0] == d[0] == site.me]
    arrives = np.zeros(site.size, np.bool_)
    arrives[[d[1] for s, d in pairs if d[0] == site.me and s[0] != site.me]] = True
    if all(s[0] == d[0] for s, d in pairs):
        return site.convert(_inside(site, x, dtype, inside), site.lowering.dtype)
    x, (received,) = site.exchange(
        "pairs",
        lambda lane: plan.permuted(lane, site.me, site.elements * dtype.itemsize, pairs),
        x,
        [site.lowering.shape],
        dtype,
        detail=tuple(perm),
    )
    local = _inside(site, x, dtype, inside)
    return site.convert(site.lowering.pick(arrives, received, local, site.axes), site.lowering.dtype)


def _ordered(site: Site) -> Site:
    """The site with the axes in the order by which this version of lax numbers ranks: the mesh's before jax 0.11, the
    caller's from then on, where lax refuses another order than the mesh's unless told otherwise."""
    ordered = tuple(n for n in site.view.names if n in site.axes)
    strict = getattr(jax.config, "jax_raise_on_ppermute_sort_diff", None)
    if ordered != site.axes and strict:
        raise RuntimeError(
            f"{site.text}: the axes {site.axes} are not in the mesh's order {ordered}. Use that order, or set the "
            "option jax_raise_on_ppermute_sort_diff to False to number ranks by yours"
        )
    return dataclasses.replace(site, axes=ordered) if strict is None else site


def _inside(site: Site, x: ir.Value, dtype: np.dtype, pairs: list[tuple[int, int]]) -> ir.Value:
    """The permute within the cluster; zeros where nothing arrives from inside."""
    if not pairs:
        # Zeros that depend on the operand, as the result does in a cluster that has pairs: the order of exchanges
        # follows from such dependences, which must be equal everywhere.
        never = hlo.broadcast_in_dim(
            ir.RankedTensorType.get(site.lowering.shape, ir.IntegerType.get_signless(1)), constant(np.bool_(False)), []
        )
        return hlo.select(never, x, site.zeros(site.lowering.shape, dtype))
    return x if site.size == 1 else site.lowering.local_permute(x, dtype, site.axes, pairs)


def _check(perm: list[tuple[int, int]], ranks: int) -> None:
    sources, destinations = [s for s, _ in perm], [d for _, d in perm]
    if len(set(sources)) < len(sources) or len(set(destinations)) < len(destinations):
        raise ValueError(f"ppermute sources and destinations must be unique, got {perm}.")
    if any(not 0 <= i < ranks for i in sources + destinations):
        raise ValueError(f"ppermute: an index in {perm} is not below the axis size {ranks}")
