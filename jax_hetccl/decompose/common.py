"""What the decompositions share: the site of one collective, with its ranks and the operations it emits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hetccl import exchange, plan
from jax_hetccl._compat import Lowering, constant, hlo, ir
from jax_hetccl.agreement import MeshView

LanePlan = Callable[[plan.Groups], plan.Plan]


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective over a spanning axis that is being lowered in a fully manual region.

    Attributes:
      registry: takes the exchanges.
      view: the mesh as all clusters see it.
      op: lax's name of the collective.
      lowering: the equation.
      axes: the axes it runs over, one of them spanning; ranks are numbered row-major in this order.
      platforms: the clusters' platforms.
    """

    registry: exchange.Registry
    view: MeshView
    op: str
    lowering: Lowering
    axes: tuple[str, ...]
    platforms: tuple[str, ...]

    @functools.cached_property
    def lanes(self) -> list[tuple[tuple[int, ...], ...]]:
        """The ranks that communicate: for each lane, for each cluster, its members."""
        return self.view.lanes(self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The members of a lane in each cluster."""
        return tuple(len(g) for g in self.lanes[0])

    @property
    def alone(self) -> bool:
        """Whether a lane has one member in each cluster."""
        return max(self.sizes) == 1

    @property
    def me(self) -> int:
        return self.view.cluster

    @property
    def size(self) -> int:
        return self.sizes[self.me]

    @property
    def others(self) -> list[int]:
        """The other clusters, in order: the order of an exchange's receive buffers."""
        return [c for c in range(len(self.sizes)) if c != self.me]

    @functools.cached_property
    def order(self) -> Order:
        """How the lane's members are numbered over all clusters."""
        at = self.axes.index(self.view.axis)
        local = [self.view.shapes[self.me][self.view.names.index(a)] for a in self.axes]
        return Order(math.prod(local[:at]), self.view.sizes, math.prod(local[at + 1 :]))

    @property
    def elements(self) -> int:
        return math.prod(self.lowering.shape)

    @property
    def text(self) -> str:
        shape = ",".join(map(str, self.lowering.shape))
        where = f" {self.lowering.name_stack}" if self.lowering.name_stack else ""
        return f"{self.op}/{','.join(self.axes)} {self.lowering.dtype.name}[{shape}]{where}"

    def partial_dtype(self, dtype: np.dtype, alone: bool) -> np.dtype:
        """In which dtype a cluster's part of a reduction crosses: that in which it is computed, but where no cluster
        has two ranks that reduce together (``alone``) it is the operand itself, so nothing is lost in its own dtype."""
        return self.lowering.dtype if alone and not is_packed(self.lowering.dtype) else dtype

    # --- operations ---

    def convert(self, x: ir.Value, dtype: np.dtype) -> ir.Value:
        type_ = self.lowering.type(shape_of(x), dtype)
        return x if x.type == type_ else hlo.convert(type_, x)

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        type_ = ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type)
        return x if x.type == type_ else hlo.reshape(type_, x)

    def pad(self, x: ir.Value, elements: int, dtype: np.dtype) -> ir.Value:
        """A vector with zeros added at its end."""
        missing = elements - shape_of(x)[0]
        return hlo.pad(x, constant(np.zeros((), dtype)), [0], [missing], [0]) if missing else x

    def zeros(self, shape: Sequence[int], dtype: np.dtype) -> ir.Value:
        return constant(np.zeros(shape, dtype))

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        return x if list(order) == sorted(order) else hlo.transpose(x, list(order))

    def gather(self, x: ir.Value) -> ir.Value:
        """A vector's all-gather within the cluster."""
        dtype = unpacked(self.lowering.dtype)
        return self.lowering.local_all_gather(x, shape_of(x)[0] * self.size, dtype, self.axes, self.size)

    def exchange(
        self,
        way: str,
        lane_plan: LanePlan,
        x: ir.Value,
        shapes: Sequence[Sequence[int]],
        dtype: np.dtype,
        *,
        detail: tuple[Any, ...] = (),
    ) -> tuple[ir.Value, list[ir.Value]]:
        """Exchanges ``x``, in ``dtype``.

        Args:
          way: names the step; both sides must mean the same.
          lane_plan: the plan of one lane, given its groups.
          x: the buffer sent.
          shapes: of the receive buffers.
          dtype: in which it crosses.
          detail: what else both sides must agree on.

        Returns:
          ``x`` as it was sent, from which the own part of the result must be made, and the receive buffers.
        """
        spec = exchange.Exchange(
            plan=plan.union(lane_plan(lane) for lane in self.lanes),
            sends=1,
            recvs=len(shapes),
            wire=(self.op, self.axes, dtype.name, self.elements, way, self.view.key, *detail),
            text=self.text,
            payload=self.elements * dtype.itemsize,
            group=self.view.key,
        )
        types = [self.lowering.type(shape, dtype) for shape in shapes]
        *received, sent = exchange.emit(self.registry, spec, [self.convert(x, dtype)], types)
        return sent, received

    def rounded(self, x: ir.Value, dtype: np.dtype) -> ir.Value:
        """``x`` in a narrower float type. The rounding is explicit: compilers may leave out a conversion and its
        inverse, in one cluster's program and not in another's."""
        if dtype in _IEEE_LIKE and x.type != self.lowering.type(shape_of(x), dtype):
            x = hlo.reduce_precision(x, *_IEEE_LIKE[dtype])
        return self.convert(x, dtype)


@dataclasses.dataclass(frozen=True)
class Order:
    """Global numbers of a lane's members: index (a, i, b), row-major, with i along the spanning axis."""

    before: int
    spans: tuple[int, ...]
    after: int

    @property
    def total(self) -> int:
        return self.before * sum(self.spans) * self.after

    def number(self, cluster: int, member: int) -> int:
        """The global number of a cluster's member."""
        a, rest = divmod(member, self.spans[cluster] * self.after)
        return a * sum(self.spans) * self.after + sum(self.spans[:cluster]) * self.after + rest

    def place(self, number: int) -> tuple[int, int]:
        """The cluster and the member there that have a global number."""
        a, rest = divmod(number, sum(self.spans) * self.after)
        cluster = 0
        while rest >= self.spans[cluster] * self.after:
            rest -= self.spans[cluster] * self.after
            cluster += 1
        return cluster, a * self.spans[cluster] * self.after + rest

    def block(self, site: Site, x: ir.Value, cluster: int) -> ir.Value:
        """The rows of one cluster's members, ``[members, m]``, out of all rows ``[total, m]``."""
        m = shape_of(x)[1]
        first, n = sum(self.spans[:cluster]), self.spans[cluster]
        x = site.reshape(x, self.before, sum(self.spans), self.after * m)
        x = hlo.slice(x, [0, first, 0], [self.before, first + n, self.after * m], [1, 1, 1])
        return site.reshape(x, self.before * n * self.after, m)

    def join(self, site: Site, blocks: Sequence[ir.Value]) -> ir.Value:
        """All rows ``[total, m]`` out of the clusters' blocks ``[members, m]``."""
        m = shape_of(blocks[0])[1]
        parts = [site.reshape(b, self.before, n, self.after * m) for b, n in zip(blocks, self.spans, strict=True)]
        return site.reshape(hlo.concatenate(parts, 1), self.total, m)


def shape_of(x: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(x.type).shape)


# Exponent and mantissa bits of the narrow float types that reduce_precision knows how to round to.
_IEEE_LIKE = {
    np.dtype(t): (jnp.finfo(t).nexp, jnp.finfo(t).nmant) for t in (jnp.bfloat16, jnp.float16, jnp.float8_e5m2)
}


def rounding(dtype: np.dtype) -> tuple[int, int] | None:
    """The exponent and mantissa bits to which ``reduce_precision`` rounds for a narrow float type, if it can."""
    return _IEEE_LIKE.get(np.dtype(dtype))


def is_packed(dtype: np.dtype) -> bool:
    """Whether several values share a byte in a device buffer."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 8


def unpacked(dtype: np.dtype) -> np.dtype:
    """The dtype in which values cross: a whole number of bytes each."""
    if not is_packed(dtype):
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype in which values are added."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return unpacked(dtype)
