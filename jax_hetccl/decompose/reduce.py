"""psum, pmax and pmin over a spanning axis.

Local reductions are the vendor's collectives, combining is XLA's arithmetic; an exchange moves bytes only. Three ways
(costs in ``docs/algorithms.md``):

* **whole**, for small payloads and for two clusters of one device each: reduce inside, exchange the result whole,
  combine in cluster order.
* **pieces**, for large payloads of two clusters of one platform: reduce-scatter inside, exchange the own piece with
  the ranks of the other cluster that hold (parts of) it, combine in cluster order, all-gather inside.
* **owned**, for three clusters and more, and where platforms differ (a CPU flushes denormals, a GPU does not): each
  element is computed by one cluster and copied by all others, so that every rank ends with the same bits.

Floats below 32 bits are added in float32 and rounded once, as lax does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl import exchange, plan
from jax_hetccl._compat import Lowering, constant, hlo, ir
from jax_hetccl.agreement import MeshView
from jax_hetccl.world import World

# Below this a second phase costs more than the bytes it saves (one exchange takes tens of microseconds).
SMALL_BYTES = 64 << 10

Combine = Callable[[ir.Value, ir.Value], ir.Value]


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """One reduction that is being lowered. It computes in ``dtype``; ``lowering.dtype`` is the result's."""

    registry: exchange.Registry
    view: MeshView
    op: str
    lowering: Lowering
    axes: tuple[str, ...]
    dtype: np.dtype

    @functools.cached_property
    def lanes(self) -> list[tuple[tuple[int, ...], ...]]:
        return self.view.lanes(self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks reduce together in each cluster."""
        return tuple(len(g) for g in self.lanes[0])

    @property
    def me(self) -> int:
        return self.view.cluster

    @property
    def size(self) -> int:
        return self.sizes[self.me]

    @property
    def elements(self) -> int:
        return math.prod(self.lowering.shape)

    @property
    def partial_dtype(self) -> np.dtype:
        """In which dtype a cluster's reduced value crosses: with one rank in each cluster that is the operand itself,
        so nothing is lost in its own dtype."""
        return self.lowering.dtype if max(self.sizes) == 1 and not _is_packed(self.lowering.dtype) else self.dtype

    @property
    def text(self) -> str:
        shape = ",".join(map(str, self.lowering.shape))
        where = f" {self.lowering.name_stack}" if self.lowering.name_stack else ""
        return f"{self.op}/{','.join(self.axes)} {self.lowering.dtype.name}[{shape}]{where}"

    def convert(self, x: ir.Value, dtype: np.dtype) -> ir.Value:
        type_ = self.lowering.type(ir.RankedTensorType(x.type).shape, dtype)
        return x if x.type == type_ else hlo.convert(type_, x)

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        type_ = ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type)
        return x if x.type == type_ else hlo.reshape(type_, x)

    def combine(self, own: ir.Value, others: Sequence[ir.Value], shape: Sequence[int]) -> ir.Value:
        """Combines the clusters' values in cluster order and rounds once, to the result's dtype."""
        values = [self.convert(v, self.dtype) for v in others]
        values.insert(self.me, own)
        total = functools.reduce(_combiner(self.op, self.lowering, shape, self.dtype), values)
        return self.convert(total, self.lowering.dtype)

    def exchange(
        self, way: str, lane_plan: Callable[[Sequence[Sequence[int]], int], plan.Plan], x: ir.Value, shape: Sequence[int]
    ) -> list[ir.Value]:
        """Exchanges ``x``; returns one array of ``shape`` from each other cluster, in cluster order."""
        others = len(self.sizes) - 1
        dtype = self.lowering.dtype if way == "gather" else self.partial_dtype
        type_ = self.lowering.type(shape, dtype)
        spec = exchange.Exchange(
            plan=plan.union(lane_plan(lane, dtype.itemsize) for lane in self.lanes),
            sends=1,
            recvs=others,
            wire=(self.op, self.axes, dtype.name, self.elements, way, self.view.key),
            text=self.text,
            payload=self.elements * self.dtype.itemsize,
            group=self.view.key,
        )
        return exchange.emit(self.registry, spec, [self.convert(x, dtype)], [type_] * others)


def lower(
    world: World,
    registry: exchange.Registry,
    view: MeshView,
    op: str,
    lowering: Lowering,
    x: ir.Value,
    axes: tuple[str, ...],
) -> ir.Value:
    """Lowers one reduction in a fully manual region.

    Args:
      world: for the platforms of the clusters.
      registry: takes the exchanges.
      view: the mesh as all clusters see it.
      op: "psum", "pmax" or "pmin".
      lowering: the equation; its shape is the result's too.
      x: the operand.
      axes: reduced over, one of them spanning.

    Returns:
      The reduced value, with the same bits on every rank of every cluster.
    """
    if 0 in lowering.shape:
        return x
    r = _Reduction(registry, view, op, lowering, axes, _accumulator(op, lowering.dtype))
    nbytes = r.elements * r.dtype.itemsize
    way = _WAYS[choose(op, r.dtype, nbytes, r.sizes, [c.platform for c in world.clusters])]
    return way(r, r.convert(x, r.dtype))


def choose(op: str, dtype: np.dtype, nbytes: int, sizes: Sequence[int], platforms: Sequence[str]) -> str:
    """Which way a reduction goes; depends only on what all clusters know.

    Args:
      op: "psum", "pmax" or "pmin".
      dtype: computed in.
      nbytes: of the payload.
      sizes: ranks that reduce together, by cluster.
      platforms: of the clusters.

    Returns:
      "whole", "pieces" or "owned".
    """
    inexact = op == "psum" and jnp.issubdtype(dtype, jnp.inexact)
    if inexact and len(set(platforms)) > 1:
        return "owned"
    whole = nbytes <= SMALL_BYTES or (len(sizes) == 2 and max(sizes) == 1)
    if whole or (op != "psum" and jnp.issubdtype(dtype, jnp.complexfloating)):  # no vendor scatters complex maxima
        return "whole"
    return "pieces" if len(sizes) == 2 else "owned"


def _whole(r: _Reduction, x: ir.Value) -> ir.Value:
    if r.size > 1:
        x = r.lowering.local_reduce(x, r.dtype, r.axes)
    received = r.exchange("whole", lambda lane, w: plan.whole(lane, r.me, r.elements * w), x, r.lowering.shape)
    return r.combine(x, received, r.lowering.shape)


def _pieces(r: _Reduction, x: ir.Value) -> ir.Value:
    multiple = math.lcm(*r.sizes)
    total = -(-r.elements // multiple) * multiple
    shape = (total // r.size,)
    piece = _scattered(r, x, total)
    received = r.exchange("pieces", lambda lane, w: plan.pieces(lane, r.me, total * w), piece, shape)
    return _gathered(r, r.combine(piece, received, shape), total)


def _owned(r: _Reduction, x: ir.Value) -> ir.Value:
    cut = plan.atoms(r.lanes[0], r.elements)
    atoms, part = cut.per_piece(r.size), (cut.per_piece(r.size), cut.part)
    piece = r.reshape(_scattered(r, x, cut.elements), atoms, cut.clusters, cut.part)
    received = r.exchange("scatter", lambda lane, w: plan.owned_reduce_scatter(lane, r.me, cut, w), piece, part)
    own = hlo.slice(piece, [0, r.me, 0], [atoms, r.me + 1, cut.part], [1, 1, 1])
    own = r.combine(r.reshape(own, *part), received, part)
    received = r.exchange("gather", lambda lane, w: plan.owned_all_gather(lane, r.me, cut, w), own, part)
    columns = [r.reshape(p, atoms, 1, cut.part) for p in (*received[: r.me], own, *received[r.me :])]
    return _gathered(r, r.reshape(hlo.concatenate(columns, 1), cut.elements // r.size), cut.elements)


_WAYS = {"whole": _whole, "pieces": _pieces, "owned": _owned}


def _scattered(r: _Reduction, x: ir.Value, total: int) -> ir.Value:
    """The operand, padded to ``total`` elements and reduced within the cluster: the own piece of it."""
    x = r.reshape(x, r.elements)
    if total != r.elements:
        x = hlo.pad(x, constant(np.zeros((), r.dtype)), [0], [total - r.elements], [0])
    return x if r.size == 1 else r.lowering.local_reduce_scatter(r.op, x, total, r.dtype, r.axes, r.size)


def _gathered(r: _Reduction, piece: ir.Value, total: int) -> ir.Value:
    """The whole result out of the pieces of the cluster's ranks."""
    whole = piece if r.size == 1 else r.lowering.local_all_gather(piece, total, r.lowering.dtype, r.axes, r.size)
    if total != r.elements:
        whole = hlo.slice(whole, [0], [r.elements], [1])
    return r.reshape(whole, *r.lowering.shape)


def _accumulator(op: str, dtype: np.dtype) -> np.dtype:
    """The dtype a reduction computes in."""
    if op == "psum" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    if _is_packed(dtype):
        return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
    return dtype


def _is_packed(dtype: np.dtype) -> bool:
    """Whether several values share a byte in a device buffer."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and jnp.iinfo(dtype).bits < 8


def _combiner(op: str, lowering: Lowering, shape: Sequence[int], dtype: np.dtype) -> Combine:
    if op == "psum":
        return hlo.add
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return {"pmax": hlo.maximum, "pmin": hlo.minimum}[op]
    function = {"pmax": jax.lax.max, "pmin": jax.lax.min}[op]  # lexicographic, as lax orders complex numbers
    return lambda a, b: lowering.function(function, shape, dtype, a, b)
