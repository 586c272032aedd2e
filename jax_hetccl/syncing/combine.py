"""A sync or gather of a list of arrays: checks, the weight, and the primitives, with the derivative of a sync."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jax_hetccl import _compat
from jax_hetccl._errors import UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.decompose.common import accumulator, unpacked
from jax_hetccl.ordering import readiness
from jax_hetccl.syncing.agree import Syncs
from jax_hetccl.syncing.partition import OPERATION, operation
from jax_hetccl.syncing.spec import Buckets, Item, Spec, in_order

# Where a sync comes from: the program, or its differentiation. Each has layouts of its own.
PRIMAL, TANGENT, COTANGENT = "", "tangent", "cotangent"


class Combiner:
    """The syncs of a world as JAX sees them.

    Args:
      world: the world.
      syncs: its syncs.
    """

    def __init__(self, world: World, syncs: Syncs):
        self._world, self._syncs = world, syncs

    def combine(
        self,
        op: str,
        paths: Sequence[str],
        leaves: Sequence[jax.Array],
        weight: jax.Array | None,
        name: str,
        buckets: Buckets = None,
    ) -> list[jax.Array]:
        """Combines arrays over all clusters.

        Args:
          op: "mean", "sum", "max" or "min".
          paths: names of the arrays.
          leaves: the arrays, tracers or not.
          weight: the cluster's weight, a float32 scalar.
          name: see ``hetccl.sync``.
          buckets: how many, or the bucket of each array.
        """
        for path, leaf in zip(paths, leaves, strict=True):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise UnsupportedError(f"sync: {path or 'the argument'} is an array of {leaf.dtype}; it has no {op}")
        some = [i for i, leaf in enumerate(leaves) if math.prod(leaf.shape)]
        params = {"op": op, "paths": tuple(paths[i] for i in some), "name": name, "role": PRIMAL}
        params["buckets"] = _of(buckets, some)
        spec = self._spec([leaves[i] for i in some], [leaves[i].dtype for i in some], weight is not None, **params)
        if refusal := spec.refusal():
            raise UnsupportedError(f"sync: {refusal}")
        _refuse_manual(spec)
        if len(self._world.clusters) == 1:
            return list(leaves)
        if not some:
            self._syncs.nothing(spec)
            return list(leaves)
        values = [leaves[i] for i in some]
        if weight is not None:
            values = [*(_weighted(x, weight) for x in values), weight]
        results = list(leaves)
        dtypes = tuple(np.dtype(leaves[i].dtype) for i in some)
        for i, result in zip(some, _bind(*values, results=dtypes, combiner=self, **params), strict=True):
            results[i] = result
        return results

    def gather(
        self,
        paths: Sequence[str],
        leaves: Sequence[jax.Array],
        name: str,
        wire_dtype: str,
        buckets: Buckets = None,
    ) -> list[list[jax.Array]]:
        """Collects every cluster's values; all get the same bits, their own as the others got them.

        Args:
          paths: names of the arrays.
          leaves: the arrays, of types that cross as they are.
          name: see ``hetccl.sync``.
          wire_dtype: what the arrays are made of, in which the clusters must agree.
          buckets: how many, or the bucket of each array.

        Returns:
          For each array all clusters' values, in the order of clusters.
        """
        clusters = len(self._world.clusters)
        some = [i for i, leaf in enumerate(leaves) if math.prod(leaf.shape)]
        params = {"paths": tuple(paths[i] for i in some), "name": name, "wire_dtype": wire_dtype}
        params["buckets"] = _of(buckets, some)
        values = [leaves[i] for i in some]
        spec = self._gather_spec(values, **params)
        _refuse_manual(spec)
        results = [[leaf] * clusters for leaf in leaves]
        if clusters == 1:
            return results
        if not some:
            self._syncs.nothing(spec)
            return results
        found = _collect(*values, copies=clusters, combiner=self, **params)
        for at, i in enumerate(some):
            results[i] = found[at * clusters : (at + 1) * clusters]
        return results

    def run_gather(self, *arrays: Any, copies: int, **params: Any) -> list[jax.Array]:
        """The program of a gather."""
        return self._run(self._gather_spec(arrays, **params), arrays)

    def run(self, *arrays: Any, results: tuple[np.dtype, ...], **params: Any) -> list[jax.Array]:
        """The program of a sync."""
        items = arrays[: len(results)]
        return self._run(self._spec(items, results, len(arrays) > len(results), **params), arrays)

    def _run(self, spec: Spec, arrays: Sequence[Any]) -> list[jax.Array]:
        if spec.key not in self._syncs.operations:
            self._syncs.operations[spec.key] = operation(self._world, self._syncs, spec)
        return _with_automatic_axes(self._syncs.operations[spec.key], arrays, len(spec.items), spec.copies)

    def _spec(
        self,
        arrays: Sequence[Any],
        results: Sequence[Any],
        weighted: bool,
        *,
        op: str,
        paths: Any,
        name: str,
        role: str,
        buckets: Buckets,
        depths: Sequence[int] = (),
    ) -> Spec:
        clusters = self._world.clusters
        platforms = {c.platform for c in clusters}
        items = _items(paths, arrays, results)
        return Spec(
            op=op,
            items=items,
            weighted=weighted,
            # Only then do all clusters end with the same bits where platforms round differently; and for three clusters
            # and more it moves fewer bytes.
            owned=len(clusters) > 2 or (len(platforms) > 1 and op in ("sum", "mean")),
            clusters=len(clusters),
            bucket_bytes=self._bucket_bytes,
            name=" ".join(filter(None, (name, role))),
            order=_order(buckets, items, depths),
        )

    def _gather_spec(
        self,
        arrays: Sequence[Any],
        *,
        paths: Sequence[str],
        name: str,
        wire_dtype: str,
        buckets: Buckets,
        depths: Sequence[int] = (),
    ) -> Spec:
        items = _items(paths, arrays, [x.dtype for x in arrays])
        return Spec(
            op="gather",
            items=items,
            weighted=False,
            owned=False,
            clusters=len(self._world.clusters),
            bucket_bytes=self._bucket_bytes,
            name=name,
            wire_dtype=wire_dtype,
            order=_order(buckets, items, depths),
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self._world.config.bucket_mb * (1 << 20))


class _Rules:
    """Differentiation and batching; see ``_compat.Combination``.

    Sums and means are linear in the clusters' values, and the same for all of them: a cluster's gradient is that of
    all clusters' losses together, which is the sum or mean of their cotangents. That is what ``lax.psum`` means in pmap.
    """

    def run(self, *arrays: Any, combiner: Combiner, **params: Any) -> list[jax.Array]:
        return combiner.run(*arrays, **params)

    def lowered(self, values: Sequence[Any], block: Any, module: Any, params: dict[str, Any]) -> dict[str, Any]:
        return _with_depths(values, block, module, params)

    def tangent(self, which: Sequence[int], weight_moves: bool, params: dict[str, Any]) -> dict[str, Any]:
        op = params["op"]
        if op not in ("sum", "mean"):
            raise UnsupportedError(
                f"sync with op={op!r} has no derivative, as lax.p{op} has none; put jax.lax.stop_gradient around its "
                "argument"
            )
        if weight_moves:
            raise UnsupportedError(
                "sync: the weight depends on what is differentiated; put jax.lax.stop_gradient around it, or sync the "
                "products and the weights with op='sum' and divide"
            )
        return self._of(which, params, COTANGENT if params["role"] == COTANGENT else TANGENT)

    def cotangent(self, which: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        return self._of(which, params, TANGENT if params["role"] == COTANGENT else COTANGENT)

    def refuse_batched_weight(self, params: dict[str, Any]) -> None:
        raise UnsupportedError("sync under vmap: the weight is one number for the cluster, and cannot be batched")

    def _of(self, which: Sequence[int], params: dict[str, Any], role: str) -> dict[str, Any]:
        paths = tuple(params["paths"][i] for i in which)
        return {**params, "paths": paths, "buckets": _of(params["buckets"], which), "role": role}


def _run_gather(*arrays: Any, combiner: Combiner, **params: Any) -> list[jax.Array]:
    return combiner.run_gather(*arrays, **params)


def _with_depths(values: Sequence[Any], block: Any, module: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Says how late the arrays become ready, where that decides in which buckets they travel."""
    if not isinstance(params["buckets"], int):
        return params
    return {**params, "depths": readiness.depths(values[: len(params["paths"])], block, module)}


_bind = _compat.combining_primitive(OPERATION, _Rules())
_collect = _compat.collecting_primitive("hetccl_gather", _run_gather, _with_depths)


def _items(paths: Sequence[str], arrays: Sequence[Any], results: Sequence[Any]) -> tuple[Item, ...]:
    return tuple(
        Item(path, tuple(x.shape), np.dtype(x.dtype), np.dtype(to))
        for path, x, to in zip(paths, arrays, results, strict=True)
    )


def _of(buckets: Buckets, which: Sequence[int]) -> Buckets:
    """The buckets of some of the arrays."""
    return tuple(buckets[i] for i in which) if isinstance(buckets, tuple) else buckets


def _order(buckets: Buckets, items: Sequence[Item], depths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The items' buckets in the order of their starts; without depths (nothing is lowered yet) as if all were ready at once."""
    sizes = [math.prod(i.shape) * unpacked(i.dtype).itemsize for i in items]
    return in_order(buckets, sizes, depths or [0] * len(sizes)) if items else ()


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    """What a cluster adds to a weighted mean. Nothing with weight zero, not even what is not finite."""
    product = lax.convert_element_type(x, accumulator(np.dtype(x.dtype)))
    product = product * lax.convert_element_type(weight, product.dtype)
    return lax.select(weight == 0, lax.full_like(product, 0), product)


def _refuse_manual(spec: Spec) -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise UnsupportedError(
            f"{spec.text}: called inside a shard_map over {', '.join(map(str, manual))}; sync belongs outside of it, at "
            "jit level. Inside, reduce over a spanning axis: jax.lax.pmean(x, axis)."
        )


def _with_automatic_axes(run: Callable[..., Any], arguments: Sequence[Any], items: int, copies: int) -> list[jax.Array]:
    """Calls ``run`` with explicit axes made automatic; of its results ``copies`` each are typed like the first arguments."""
    shardings = [jax.typeof(x).sharding for x in arguments]
    mesh = next((s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types), None)
    if mesh is None:
        return list(run(*arguments))
    outs: Any = [s if s.mesh.axis_names else jax.sharding.NamedSharding(mesh, PartitionSpec()) for s in shardings]
    automatic: Any = jax.sharding.auto_axes(
        functools.partial(_listed, run), out_sharding=[s for s in outs[:items] for _ in range(copies)]
    )
    return list(automatic(*arguments))


def _listed(run: Any, *arguments: Any) -> list[jax.Array]:
    return list(run(*arguments))
