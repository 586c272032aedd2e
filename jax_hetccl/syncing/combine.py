"""A sync of a list of arrays: checks, axis types, and the operation for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jax_hetccl._errors import UnsupportedError
from jax_hetccl._world import World
from jax_hetccl.syncing.agree import Syncs
from jax_hetccl.syncing.partition import operation
from jax_hetccl.syncing.spec import Item, Spec


def combine(
    world: World,
    syncs: Syncs,
    op: str,
    paths: Sequence[str],
    leaves: Sequence[jax.Array],
    weight: jax.Array | None,
    name: str,
) -> list[jax.Array]:
    """Combines arrays over all clusters.

    Args:
      world: the world.
      syncs: its syncs.
      op: "mean", "sum", "max" or "min".
      paths: names of the arrays.
      leaves: the arrays, tracers or not.
      weight: the cluster's weight, a float32 scalar.
      name: see ``hetccl.sync``.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UnsupportedError(f"sync: {path or 'the argument'} is an array of {leaf.dtype}; it has no {op}")
    if len(world.clusters) == 1:
        return list(leaves)
    some = [i for i, leaf in enumerate(leaves) if math.prod(leaf.shape)]
    if not some:
        return list(leaves)
    spec = _spec(world, op, [Item(paths[i], tuple(leaves[i].shape), leaves[i].dtype) for i in some], weight, name)
    if refusal := spec.refusal():
        raise UnsupportedError(f"sync: {refusal}")
    _refuse_manual(spec)
    syncs.register(spec)
    run = syncs.operations.setdefault(spec.key, operation(world, syncs, spec))
    arguments = [leaves[i] for i in some] + ([] if weight is None else [weight])
    results = list(leaves)
    for i, result in zip(some, _with_automatic_axes(run, arguments, len(some)), strict=True):
        results[i] = result
    return results


def _spec(world: World, op: str, items: Sequence[Item], weight: Any, name: str) -> Spec:
    platforms = {c.platform for c in world.clusters}
    return Spec(
        op=op,
        items=tuple(items),
        weighted=weight is not None,
        # Only then do all clusters end with the same bits where platforms round differently; and for three clusters
        # and more it moves fewer bytes.
        owned=len(world.clusters) > 2 or (len(platforms) > 1 and op in ("sum", "mean")),
        clusters=len(world.clusters),
        bucket_bytes=int(world.config.bucket_mb * (1 << 20)),
        name=name,
    )


def _refuse_manual(spec: Spec) -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise UnsupportedError(
            f"{spec.text}: called inside a shard_map over {', '.join(map(str, manual))}; sync belongs outside of it, at "
            "jit level. Inside, reduce over a spanning axis: jax.lax.pmean(x, axis)."
        )


def _with_automatic_axes(run: Any, arguments: Sequence[jax.Array], results: int) -> list[jax.Array]:
    """Calls ``run`` with explicit axes made automatic; its results are typed like the arguments."""
    shardings = [jax.typeof(x).sharding for x in arguments]
    mesh = next((s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types), None)
    if mesh is None:
        return list(run(*arguments))
    outs: Any = [s if s.mesh.axis_names else jax.sharding.NamedSharding(mesh, PartitionSpec()) for s in shardings]
    automatic: Any = jax.sharding.auto_axes(functools.partial(_listed, run), out_sharding=outs[:results])
    return list(automatic(*arguments))


def _listed(run: Any, *arguments: Any) -> list[jax.Array]:
    return list(run(*arguments))
