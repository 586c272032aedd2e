"""What a sync combines and in which exchanges: the part that is equal in all clusters."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hetccl.decompose.common import accumulator, unpacked
from jax_hetccl.exchange import fingerprint


@dataclasses.dataclass(frozen=True)
class Item:
    """One array: its key path, global shape, dtype, and the dtype of the combined array."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    result: np.dtype

    def __str__(self) -> str:
        return f"{self.path or 'x'} {self.result.name}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Spec:
    """One sync.

    Attributes:
      op: "mean", "sum", "max" or "min"; or "gather": nothing is combined, everyone gets all clusters' values.
      items: the arrays.
      weighted: a float32 scalar, the cluster's weight, comes behind the arrays: their sum is divided by the weights'.
      owned: one cluster computes each element and the others copy it; else everyone computes what it holds.
      clusters: how many there are.
      bucket_bytes: arrays travel together up to this size.
      name: tells apart syncs of the same arrays that are sharded differently.
      wire_dtype: of a gather, the format in which the arrays hold what the user syncs.
      order: the user's buckets, as numbers of items, in the order in which they start; empty: there are none.
    """

    op: str
    items: tuple[Item, ...]
    weighted: bool
    owned: bool
    clusters: int
    bucket_bytes: int
    name: str = ""
    wire_dtype: str | None = None
    order: tuple[tuple[int, ...], ...] = ()

    @functools.cached_property
    def key(self) -> int:
        """64 bits, equal in all clusters for the same sync."""
        parts = [(i.path, i.shape, i.dtype.name, i.result.name) for i in self.items]
        return fingerprint(
            ("sync", self.op, parts, self.weighted, self.owned, self.clusters, self.bucket_bytes, self.name)
            + ((self.wire_dtype,) if self.wire_dtype else ())
            + (("order", self.order) if self.order else ())
        )

    @property
    def described(self) -> dict[str, Any]:
        """What clusters compare, for people."""
        items = [str(i) for i in self.items]
        described: dict[str, Any] = {"items": items, "op": self.op, "name": self.name, "weighted": self.weighted}
        if self.wire_dtype:
            described["wire_dtype"] = self.wire_dtype
        if self.order:
            described["buckets"] = [[self.items[i].path or "x" for i in bucket] for bucket in self.order]
        return described

    @property
    def text(self) -> str:
        if not self.items:
            return f"sync/{self.name or self.op} of no arrays"
        first, *rest = self.items
        more = f" and {len(rest)} more" if rest else ""
        return f"sync/{self.name or self.op} {first}{more}"

    @functools.cached_property
    def arrays(self) -> tuple[Item, ...]:
        """All that crosses: the arrays, and the weight."""
        weight = (Item("weight", (), np.dtype(np.float32), np.dtype(np.float32)),) if self.weighted else ()
        return (*self.items, *weight)

    @property
    def copies(self) -> int:
        """How many results each array has."""
        return self.clusters if self.op == "gather" else 1

    def computes_in(self, i: int) -> np.dtype:
        """The dtype in which array ``i`` is combined."""
        dtype = self.arrays[i].dtype
        return accumulator(dtype) if self.op in ("sum", "mean") else unpacked(dtype)

    def wire(self, i: int) -> np.dtype:
        """The dtype in which a cluster's value of array ``i`` crosses."""
        return unpacked(self.arrays[i].dtype)

    def result_wire(self, i: int) -> np.dtype:
        """The dtype in which the combined array ``i`` crosses."""
        return unpacked(self.arrays[i].result)

    def whole(self, i: int) -> bool:
        """Whether every rank takes the other clusters' value of array ``i`` whole."""
        is_weight = i == len(self.items)
        return is_weight or (math.prod(self.arrays[i].shape) == 1 and not self.owned)

    @functools.cached_property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The arrays that travel together, in order; the weight is in the first bucket."""
        if self.order:
            first, *rest = self.order
            return ((len(self.items), *first) if self.weighted else first, *rest)
        order = list(range(len(self.items)))
        order[:0] = [len(self.items)] if self.weighted else []
        result: list[list[int]] = [[]]
        size = 0
        for i in order:
            n = 0 if i == len(self.items) else math.prod(self.arrays[i].shape) * self.wire(i).itemsize
            if size and size + n > self.bucket_bytes:
                result.append([])
                size = 0
            result[-1].append(i)
            size += n
        return tuple(tuple(b) for b in result)

    def bucket_bytes_of(self, bucket: tuple[int, ...]) -> int:
        """Bytes of a bucket's arrays."""
        return sum(math.prod(self.arrays[i].shape) * self.wire(i).itemsize for i in bucket)

    def refusal(self) -> str | None:
        """Why this sync has no meaning, if so."""
        for item in self.items:
            if self.op == "mean" and not jnp.issubdtype(item.result, jnp.inexact):
                return f"the mean of {item} is not of its type; sync it with op='max', or convert it to a float"
            if self.op == "sum" and item.dtype == np.bool_:
                return f"a sum of {item} is not of its type; convert it to an integer, or use op='max'"
            if self.op in ("max", "min") and jnp.issubdtype(item.dtype, jnp.complexfloating):
                return f"complex values such as {item} have no order; sync their parts"
        return None


# What a user says about buckets: how many, or for each array the number of its bucket; or nothing.
Buckets = int | tuple[int, ...] | None


def in_order(buckets: Buckets, sizes: Sequence[int], depths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The buckets of a sync in the order in which they start.

    Args:
      buckets: what the user said.
      sizes: bytes of each array.
      depths: for each array, how late it becomes ready (``ordering.readiness``); used where ``buckets`` is a number.

    Returns:
      Numbers of arrays, bucket by bucket, within one in their own order. At most so many buckets as were asked for.

    Example:
      >>> in_order(2, [4, 4, 4, 4], depths=[7, 5, 3, 3])  # the first layer's gradient comes last
      ((2, 3), (0, 1))
    """
    if buckets is None:
        return ()
    if isinstance(buckets, int):
        number, total, before = [0] * len(sizes), max(1, sum(sizes)), 0
        for i in sorted(range(len(sizes)), key=lambda i: (depths[i], i)):
            number[i] = min((2 * before + sizes[i]) * buckets // (2 * total), buckets - 1)
            before += sizes[i]
    else:
        number = list(buckets)
    return tuple(tuple(i for i, n in enumerate(number) if n == bucket) for bucket in sorted(set(number)))
