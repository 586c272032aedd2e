"""psum, pmax and pmin over a spanning axis.

Local reductions are the vendor's collectives, combining is XLA's arithmetic; an exchange moves bytes only. Four ways
(costs in ``docs/algorithms.md``):

* **whole**, for small payloads and for two clusters of one device each: reduce inside, exchange the result whole,
  combine in cluster order.
* **pieces**, for large payloads of two clusters of one platform: reduce-scatter inside, exchange the own piece with
  the ranks of the other cluster that hold (parts of) it, combine in cluster order, all-gather inside.
* **owned**, for three clusters and more, and where platforms differ (a CPU flushes denormals, a GPU does not): each
  element is computed by one cluster and copied by all others, so that every rank ends with the same bits. (Between
  platforms this is for sums; pmax, pmin and reductions in groups may still differ there in the sign of a zero, in
  denormals and in what a NaN carries.)
* **central**, where a cluster of one CPU device meets one of one accelerator: as *owned*, but the accelerator computes
  everything. A CPU would need longer to cut, add and join than all bytes need on the way.

Floats below 32 bits are added in float32 and rounded once, as lax does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hetccl import group_plan, plan
from jax_hetccl._compat import hlo, ir, is_byte_float
from jax_hetccl._errors import UnsupportedError
from jax_hetccl.decompose.common import Site, accumulator, unpacked
from jax_hetccl.decompose.groups import Grouping

# Below this a second phase costs more than the bytes it saves (one exchange takes tens of microseconds).
SMALL_BYTES = 64 << 10


def lower(site: Site, x: ir.Value, params: dict[str, Any]) -> ir.Value:
    """Lowers psum, pmax or pmin.

    Args:
      site: the collective.
      x: the operand.
      params: the primitive's parameters.

    Returns:
      The reduced value, with the same bits on every rank that reduces together (see above for other platforms).
    """
    if 0 in site.lowering.shape:
        return x
    if site.op != "psum" and jnp.issubdtype(site.lowering.dtype, jnp.complexfloating):
        raise UnsupportedError(f"{site.text}: XLA has no {site.op[1:]} reduction of complex values; reduce their parts")
    dtype = _computes_in(site)
    x = site.convert(x, dtype)
    if params.get("axis_index_groups") is not None:
        return _grouped(site, x, dtype, Grouping.of(site, params["axis_index_groups"], equal=False))
    nbytes = site.elements * dtype.itemsize
    return _WAYS[choose(site.op, dtype, nbytes, site.sizes, site.platforms)](site, x, dtype)


def choose(op: str, dtype: np.dtype, nbytes: int, sizes: Sequence[int], platforms: Sequence[str]) -> str:
    """Which way a reduction goes; depends only on what all clusters know.

    Args:
      op: "psum", "pmax" or "pmin".
      dtype: computed in.
      nbytes: of the payload.
      sizes: ranks that reduce together, by cluster.
      platforms: of the clusters.

    Returns:
      "whole", "pieces", "owned" or "central".
    """
    inexact = op == "psum" and jnp.issubdtype(dtype, jnp.inexact)
    one_each = len(sizes) == 2 and max(sizes) == 1
    if inexact and len(set(platforms)) > 1:
        return "central" if one_each and "cpu" in platforms else "owned"
    if nbytes <= SMALL_BYTES or one_each:
        return "whole"
    return "pieces" if len(sizes) == 2 else "owned"


def _whole(site: Site, x: ir.Value, dtype: np.dtype) -> ir.Value:
    if site.size > 1:
        x = _inside(site, x, dtype, lambda x, dtype: site.lowering.local_reduce(site.op, x, dtype, site.axes))
    shape, wire = site.lowering.shape, site.partial_dtype(dtype, site.alone)
    nbytes = site.elements * wire.itemsize
    way = lambda lane: plan.whole(lane, site.me, nbytes)  # noqa: E731
    return _combined(site, *site.exchange("whole", way, x, [shape] * len(site.others), wire), dtype)


def _pieces(site: Site, x: ir.Value, dtype: np.dtype) -> ir.Value:
    multiple = math.lcm(*site.sizes)
    total = -(-site.elements // multiple) * multiple
    shape, wire = (total // site.size,), site.partial_dtype(dtype, site.alone)
    piece = _scattered(site, x, total, dtype)
    way = lambda lane: plan.pieces(lane, site.me, total * wire.itemsize)  # noqa: E731
    return _gathered(site, _combined(site, *site.exchange("pieces", way, piece, [shape], wire), dtype), total)


def _owned(site: Site, x: ir.Value, dtype: np.dtype) -> ir.Value:
    cut = plan.atoms(site.lanes[0], site.elements)
    atoms, others = cut.per_piece(site.size), len(site.others)
    shape, wire, result = (atoms, cut.part), site.partial_dtype(dtype, site.alone), site.lowering.dtype
    piece = site.reshape(_scattered(site, x, cut.elements, dtype), atoms, cut.clusters, cut.part)
    scatter = lambda lane: plan.owned_reduce_scatter(lane, site.me, cut, wire.itemsize)  # noqa: E731
    sent, received = site.exchange("scatter", scatter, piece, [shape] * others, wire)
    own = hlo.slice(sent, [0, site.me, 0], [atoms, site.me + 1, cut.part], [1, 1, 1])
    own = _combined(site, site.reshape(own, *shape), received, dtype)
    gather = lambda lane: plan.owned_all_gather(lane, site.me, cut, unpacked(result).itemsize)  # noqa: E731
    own, received = site.exchange("gather", gather, own, [shape] * others, unpacked(result))
    columns = [site.convert(p, result) for p in (*received[: site.me], own, *received[site.me :])]
    columns = [site.reshape(p, atoms, 1, cut.part) for p in columns]
    return _gathered(site, site.reshape(hlo.concatenate(columns, 1), cut.elements // site.size), cut.elements)


def _central(site: Site, x: ir.Value, dtype: np.dtype) -> ir.Value:
    center = next((c for c, platform in enumerate(site.platforms) if platform != "cpu"), 0)
    computes, shape = site.me == center, site.lowering.shape
    wire, result = site.partial_dtype(dtype, site.alone), unpacked(site.lowering.dtype)
    there, back = ([((a, 0), (b, 0))] for a, b in ((1 - center, center), (center, 1 - center)))
    bring = lambda lane: plan.permuted(lane, site.me, site.elements * wire.itemsize, there)  # noqa: E731
    # The other cluster receives a zero, and sends that again: so its second exchange, into whose buffer the sum comes,
    # begins when the operand has left, and XLA may put the sum into the operand's memory.
    value, received = site.exchange("to the center", bring, x, [shape if computes else (1,)], wire)
    value = _combined(site, value, received, dtype) if computes else received[0]
    copy = lambda lane: plan.permuted(lane, site.me, site.elements * result.itemsize, back)  # noqa: E731
    value, received = site.exchange("from the center", copy, value, [] if computes else [shape], result)
    return site.convert(value if computes else received[0], site.lowering.dtype)


_WAYS = {"whole": _whole, "pieces": _pieces, "owned": _owned, "central": _central}


def _grouped(site: Site, x: ir.Value, dtype: np.dtype, grouping: Grouping) -> ir.Value:
    """A reduction within groups of global indices, which may stay in a cluster, cross, and differ in size."""
    if any(len(part) > 1 for part in grouping.here):
        reduce = lambda x, dtype: site.lowering.local_reduce(site.op, x, dtype, site.axes, grouping.here)  # noqa: E731
        x = _inside(site, x, dtype, reduce)
    if not grouping.crosses:
        return site.rounded(x, site.lowering.dtype)
    shape, wire = site.lowering.shape, unpacked(dtype)
    nbytes = site.elements * wire.itemsize
    lane_plan = lambda lane: group_plan.reduced(lane, site.me, grouping.split, nbytes)  # noqa: E731
    x, received = site.exchange("groups", lane_plan, x, [shape] * len(site.others), wire, detail=(grouping.groups,))
    values = [site.convert(r, dtype) for r in received]
    values.insert(site.me, site.convert(x, dtype))
    return site.rounded(grouping.combined(values, _combiner(site)), site.lowering.dtype)


def _computes_in(site: Site) -> np.dtype:
    return accumulator(site.lowering.dtype) if site.op == "psum" else unpacked(site.lowering.dtype)


def _combined(site: Site, own: ir.Value, others: Sequence[ir.Value], dtype: np.dtype) -> ir.Value:
    """Combines the clusters' values in cluster order and rounds once, to the result's dtype."""
    values = [site.convert(v, dtype) for v in others]
    values.insert(site.me, site.convert(own, dtype))
    return site.rounded(functools.reduce(_combiner(site), values), site.lowering.dtype)


def _scattered(site: Site, x: ir.Value, total: int, dtype: np.dtype) -> ir.Value:
    """The operand, padded to ``total`` elements and reduced within the cluster: the own piece of it."""
    x = site.pad(site.reshape(x, site.elements), total, dtype)
    if site.size == 1:
        return x
    scatter = lambda x, dtype: site.lowering.local_reduce_scatter(site.op, x, total, dtype, site.axes, site.size)  # noqa: E731
    return _inside(site, x, dtype, scatter)


def _inside(site: Site, x: ir.Value, dtype: np.dtype, reduce: Callable[[ir.Value, np.dtype], ir.Value]) -> ir.Value:
    """A reduction by the vendor's collectives, which take no floats of 8 bits; float32 holds all of these."""
    wide = np.dtype(np.float32) if is_byte_float(dtype) else dtype
    return site.convert(reduce(site.convert(x, wide), wide), dtype)


def _gathered(site: Site, piece: ir.Value, total: int) -> ir.Value:
    """The whole result out of the pieces of the cluster's ranks."""
    whole = piece
    if site.size > 1:
        whole = site.lowering.local_all_gather(piece, total, site.lowering.dtype, site.axes, site.size)
    if total != site.elements:
        whole = hlo.slice(whole, [0], [site.elements], [1])
    return site.reshape(whole, *site.lowering.shape)


def _combiner(site: Site) -> Callable[[ir.Value, ir.Value], ir.Value]:
    return {"psum": hlo.add, "pmax": hlo.maximum, "pmin": hlo.minimum}[site.op]
