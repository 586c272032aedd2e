"""What one device computes in a sync: its share of every array, exchanged, combined, and gathered from the replicas.

Bits: a cluster's value crosses as it is; everyone combines the clusters' values in the same order; floats below 32
bits are combined in float32 and rounded once, explicitly. What is sent passes through the start: a compiler could compute
the own value again, fused with what follows, and then differ from the bytes that were sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hetccl import _compat
from jax_hetccl.decompose.common import rounding
from jax_hetccl.exchange import CHAIN_WORDS, CHECK, DONE, START
from jax_hetccl.ordering.module import INFLIGHT_BYTES
from jax_hetccl.syncing import shares
from jax_hetccl.syncing.agree import Layout, ids, signed
from jax_hetccl.syncing.spec import Spec

DEVICES = "hetccl_devices"  # the axis over all devices of a program, in its order

Array: TypeAlias = jax.Array


class Shard:
    """One device's part of a sync, the same text for all devices of a cluster.

    Args:
      spec: the sync.
      layout: of the own cluster.
      me: the own cluster.
    """

    def __init__(self, spec: Spec, layout: Layout, me: int):
        self.spec, self.layout, self.me = spec, layout, me
        self.devices = len(layout.ranks)
        self.groups = [shares.replicas(boxes) for boxes in layout.boxes]
        self.parts = [shares.part_elements(boxes) for boxes in layout.boxes]

    def __call__(self, chain: Array, *arrays: Array) -> list[Array]:
        """The chain and the results' shards. ``arrays`` are the shards, and the weight if there is one."""
        self.index = _compat.local_index(DEVICES) if self.devices > 1 else np.int32(0)
        values: list[list[Array]] = [[] for _ in arrays]
        weight: Array | None = None  # 1 / the sum of all weights
        step = 0
        for group in _rounds(self.spec):
            sends = [[self.outgoing(i, arrays) for i in bucket] for bucket in group]
            stride = 2 if self.spec.owned else 1
            recvs = [[(i, self.spec.wire(i)) for i in b for _ in range(self.spec.clusters - 1)] for b in group]
            steps = [step + stride * n for n in range(len(group))]
            chain, received = self.exchange(chain, steps, sends, recvs)
            shared: list[list[list[Array]]] = []
            for bucket, (theirs, own) in zip(group, received, strict=True):
                found = {i: self.ordered(n, theirs, own) for n, i in enumerate(bucket)}
                if len(arrays) - 1 in found and self.spec.weighted:
                    total = functools.reduce(lax.add, found.pop(len(arrays) - 1))
                    (weight,) = _opaque([lax.div(lax.full(total.shape, np.float32(1)), total)])
                gathers = self.spec.op == "gather"
                shared.append([v if gathers else [self.combined(i, v, weight)] for i, v in found.items()])
            if self.spec.owned:
                chain, shared = self.copied(chain, steps, group, shared)
            for bucket, results in zip(group, shared, strict=True):
                for i, copies in zip((i for i in bucket if i < len(self.spec.items)), results, strict=True):
                    values[i] = [self.gathered(i, value, arrays[i].shape) for value in copies]
            step += stride * len(group)
        return self.checked(chain, [v for copies in values for v in copies])

    # --- steps ---

    def outgoing(self, i: int, arrays: Sequence[Array]) -> Array:
        """The own share of an array as it crosses: a vector, padded to the size of the longest share."""
        x = lax.convert_element_type(arrays[i], self.spec.wire(i))
        flat = lax.reshape(x, (x.size,))
        return flat if self.spec.whole(i) else self.own(i, flat)

    def own(self, i: int, flat: Array) -> Array:
        """This device's share out of all elements of its box."""
        count = len(self.groups[i][0])
        if count == 1:
            return flat
        missing = count * self.parts[i] - flat.size
        flat = lax.pad(flat, np.zeros((), flat.dtype), [(0, missing, 0)]) if missing else flat
        number = {at: j for group in self.groups[i] for j, at in enumerate(group)}
        first = np.asarray([number[at] * self.parts[i] for at in range(self.devices)], np.int32)
        return lax.dynamic_slice(flat, [self.pick(first)], [self.parts[i]])

    def pick(self, table: np.ndarray) -> Array:
        """This device's entry of a table."""
        return lax.reshape(lax.dynamic_slice(jnp.asarray(table), [self.index], [1]), ())

    def exchange(
        self,
        chain: Array,
        steps: Sequence[int],
        sends: Sequence[Sequence[Array]],
        recvs: Sequence[Sequence[tuple[int, np.dtype]]],
    ) -> tuple[Array, list[tuple[list[Array], list[Array]]]]:
        """Starts all buckets, then finishes them; for each bucket what was received, and what was sent.

        The sends are operands of the end, too: XLA would use their memory again while it is being sent.
        """
        token = jax.ShapeDtypeStruct((CHAIN_WORDS,), np.uint32)
        started = []
        for step, out, into in zip(steps, sends, recvs, strict=True):
            types = [jax.ShapeDtypeStruct((self.buffer(i),), dtype) for i, dtype in into]
            kept = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in out]
            aliases = {1 + i: 2 + len(types) + i for i in range(len(out))}
            results = [token, token, *types, *kept]
            call = jax.ffi.ffi_call(START, results, has_side_effect=True, input_output_aliases=aliases)
            chain, ticket, *buffers = call(chain, *out, **self.names(step), kept=np.int64(len(out)))
            started.append((ticket, buffers[: len(types)], buffers[len(types) :]))
        result = []
        for step, (ticket, buffers, out) in zip(steps, started, strict=True):
            types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in buffers]
            aliases = {2 + i: 1 + i for i in range(len(buffers))}
            call = jax.ffi.ffi_call(DONE, [token, *types], has_side_effect=True, input_output_aliases=aliases)
            chain, *filled = call(chain, ticket, *buffers, *out, **self.names(step))
            result.append((list(filled), list(out)))
        return chain, result

    def names(self, step: int) -> dict[str, Any]:
        plan, program = ids(self.spec, self.layout, step)
        return {"plan": np.int64(signed(plan)), "program": np.int64(signed(program)), "index": np.int64(step)}

    def buffer(self, i: int) -> int:
        """Elements of an array's buffers."""
        return 1 if self.spec.whole(i) else self.parts[i]

    def ordered(self, n: int, theirs: Sequence[Array], own: Sequence[Array]) -> list[Array]:
        """The clusters' values of the bucket's array number ``n``, in cluster order."""
        others = self.spec.clusters - 1
        found = list(theirs[n * others : (n + 1) * others])
        found.insert(self.me, own[n])
        return found

    def combined(self, i: int, values: Sequence[Array], weight: Array | None) -> Array:
        """The result, in its own dtype."""
        dtype = self.spec.computes_in(i)
        total = functools.reduce(_COMBINE[self.spec.op], [lax.convert_element_type(v, dtype) for v in values])
        if self.spec.op == "mean":
            # Not a division: XLA replaces some by a multiplication, but not in every program.
            by = jnp.asarray(1 / self.spec.clusters, dtype) if weight is None else lax.reshape(weight, ())
            total = lax.mul(total, lax.broadcast(lax.convert_element_type(by, dtype), total.shape))
        to = self.spec.arrays[i].result
        if to != dtype and (bits := rounding(to)) is not None:
            total = lax.reduce_precision(total, *bits)
        return lax.convert_element_type(total, to)

    def copied(
        self,
        chain: Array,
        steps: Sequence[int],
        group: Sequence[Sequence[int]],
        shared: Sequence[Sequence[list[Array]]],
    ) -> tuple[Array, list[list[list[Array]]]]:
        """Second phase of owned syncs: takes the other owners' elements from them."""
        arrays = [[i for i in bucket if i < len(self.spec.items)] for bucket in group]
        sends = [
            [lax.convert_element_type(v, self.spec.result_wire(i)) for i, (v,) in zip(a, values, strict=True)]
            for a, values in zip(arrays, shared, strict=True)
        ]
        recvs = [[(i, self.spec.result_wire(i)) for i in a] for a in arrays]
        chain, received = self.exchange(chain, [s + 1 for s in steps], sends, recvs)
        results = []
        for a, (theirs, own) in zip(arrays, received, strict=True):
            chosen = [lax.select(self.owned(i), o, t) for i, t, o in zip(a, theirs, own, strict=True)]
            results.append(
                [[lax.convert_element_type(v, self.spec.arrays[i].result)] for i, v in zip(a, chosen, strict=True)]
            )
        return chain, results

    def owned(self, i: int) -> Array:
        """Which elements of the own share the own cluster owns; the same rule as :func:`shares.cells`."""
        boxes, shape = self.layout.boxes[i], self.spec.arrays[i].shape
        local = tuple(stop - start for start, stop in boxes[0])
        block = lax.full(local, np.int32(0))
        for d, size in enumerate(shares.block_sizes(shape, self.spec.clusters)):
            start = self.pick(np.asarray([box[d][0] for box in boxes], np.int32))
            at = lax.add(lax.broadcasted_iota(np.int32, local, d), lax.broadcast(start, local))
            block = lax.add(block, lax.div(at, lax.full(local, np.int32(size))))
        owner = lax.rem(block, lax.full(local, np.int32(self.spec.clusters)))
        flat = lax.reshape(owner, (shares.volume(boxes[0]),))
        return lax.eq(self.own(i, flat), lax.full((self.parts[i],), np.int32(self.me)))

    def gathered(self, i: int, value: Array, shape: tuple[int, ...]) -> Array:
        """The whole shard, out of its replicas' shares."""
        groups = self.groups[i]
        if len(groups[0]) > 1 and not self.spec.whole(i):
            dtype = value.dtype
            wire = lax.convert_element_type(value, self.spec.result_wire(i))
            value = lax.convert_element_type(_compat.local_gather(wire, DEVICES, groups), dtype)
            value = lax.slice(value, [0], [shares.volume(self.layout.boxes[i][0])])
        return lax.reshape(value, shape)

    def checked(self, chain: Array, values: Sequence[Array]) -> list[Array]:
        """The chain and the values behind the check; a program of one device has it at its end."""
        if self.devices == 1 or not values:
            return [chain, *values]
        flag = _compat.local_max(lax.slice(chain, [CHAIN_WORDS - 1], [CHAIN_WORDS]), DEVICES)
        return [chain, *_check(flag, values)]


def _check(flag: Array, values: Sequence[Array]) -> list[Array]:
    """Raises the world's error if the flag is set; the values pass through."""
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    aliases = {1 + i: i for i in range(len(values))}
    call: Callable[..., Any] = jax.ffi.ffi_call(CHECK, types, has_side_effect=True, input_output_aliases=aliases)
    return list(call(flag, *values))


def _opaque(values: Sequence[Array]) -> list[Array]:
    """The values in buffers of their own, through a call that no compiler looks into: a check that never fails."""
    return _check(lax.full((1,), np.uint32(0)), values)


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {"sum": lax.add, "mean": lax.add, "max": lax.max, "min": lax.min}


def _rounds(spec: Spec) -> list[list[tuple[int, ...]]]:
    """Buckets that are in flight together."""
    result: list[list[tuple[int, ...]]] = [[]]
    size = 0
    for bucket in spec.buckets:
        n = spec.bucket_bytes_of(bucket)
        if result[-1] and size + n > INFLIGHT_BYTES:
            result.append([])
            size = 0
        result[-1].append(bucket)
        size += n
    return result
