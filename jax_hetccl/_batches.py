"""Each cluster's and process's part of a global batch, and parts that take equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_hetccl import session
from jax_hetccl._errors import AgreementError, ConfigError
from jax_hetccl._world import World
from jax_hetccl.portions import balanced, portions, process_part


def batch_sizes(
    n: int, weights: Sequence[float] | None = None, *, multiples: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns how many rows of a global batch each cluster takes. Nothing is sent.

    Args:
      n: rows of the global batch.
      weights: what the parts are in proportion to, one number for each cluster: rows per second, or the rows that
        :func:`balance` proposes. Left out, every device of every cluster gets equally many rows.
      multiples: each cluster's part is a multiple of this, one number for each cluster: into how many parts its mesh splits the
        rows. Left out, its number of devices; give it where devices share rows (tensor parallelism).

    Returns:
      Rows of each cluster, in rank order; together ``n``. Rows of a cluster are the ones behind those of the clusters before.

    Raises:
      ConfigError: ``n`` cannot be split so, or weights or multiples are wrong.

    Example:
      >>> hetccl.batch_sizes(96)  # clusters of two devices and one
      (64, 32)
    """
    return _sizes("batch_sizes", session.hooks().world, n, weights, multiples)


def process_slice(n: int, weights: Sequence[float] | None = None, *, multiples: Sequence[int] | None = None) -> slice:
    """Returns which rows of a global batch this process loads. Nothing is sent.

    The processes of a cluster share its rows out by their devices, in order, as ``jax.make_array_from_process_local_data`` puts
    them together again where rows are split over all devices of a mesh in their order; :func:`shard_batch` does for any
    other. All processes' slices together are the batch: in rank order, without gap or overlap.

    Args:
      n, weights, multiples: as for :func:`batch_sizes`.

    Returns:
      A slice of ``range(n)``.

    Raises:
      ConfigError: as :func:`batch_sizes`; or this cluster's rows do not divide among the devices of its several processes.

    Example:
      >>> rows = dataset[hetccl.process_slice(96)]
      >>> batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
    """
    world = session.hooks().world
    sizes = _sizes("process_slice", world, n, weights, multiples)
    owners = [world.process_of_rank(rank)[1] for rank in world.ranks_of_cluster(world.cluster)]
    part = process_part(sizes, world.cluster, owners, world.process)
    if part is None:
        raise ConfigError(
            f"process_slice: the {sizes[world.cluster]} rows of cluster {world.config.cluster_name} do not divide among the "
            f"{len(owners)} devices of its {len(set(owners))} processes; use hetccl.shard_batch, which knows the sharding"
        )
    return part


def shard_batch(
    batch: Any,
    sharding: jax.sharding.Sharding,
    weights: Sequence[float] | None = None,
    *,
    multiples: Sequence[int] | None = None,
) -> Any:
    """Puts this cluster's rows of a global batch on its devices. Nothing is sent.

    Every process has the same global batch in its memory (or a view of a mapped file); each device gets its own rows. Where
    that is too much to load, load only :func:`process_slice`.

    Args:
      batch: pytree of host arrays, all of the same first dimension: the rows of the global batch.
      sharding: how this cluster shards its rows; the first dimension over all devices that do not share rows.
      weights, multiples: as for :func:`batch_sizes`.

    Returns:
      Arrays with this cluster's rows, sharded like that.

    Raises:
      ConfigError: as :func:`batch_sizes`; or the leaves have no rows, or not equally many.

    Example:
      >>> x, y = hetccl.shard_batch((x, y), NamedSharding(mesh, P("data")))
    """
    world = session.hooks().world
    paths, treedef = jax.tree.flatten_with_path(batch)
    leaves = [np.asarray(leaf) for _, leaf in paths]
    rows = {jax.tree_util.keystr(path): x.shape[:1] for (path, _), x in zip(paths, leaves, strict=True)}
    if len(set(rows.values())) != 1 or () in rows.values():
        shown = ", ".join(f"{name or 'x'}: {shape[0] if shape else 'a scalar'}" for name, shape in rows.items())
        raise ConfigError(f"shard_batch: the leaves must all have the same number of rows, but have {shown or 'none'}")
    sizes = _sizes("shard_batch", world, leaves[0].shape[0], weights, multiples)
    start = sum(sizes[: world.cluster])
    placed = [_placed(x[start : start + sizes[world.cluster]], sharding) for x in leaves]
    return jax.tree.unflatten(treedef, placed)


def balance(batches: Sequence[int], seconds: float, *, multiples: Sequence[int] | None = None) -> tuple[int, ...]:
    """Proposes how many rows each cluster takes so that all clusters' steps take equally long.

    Call it in every process, outside of ``jit``, from time to time. It shares the measurements over the control plane, so
    that all processes get the same answer. A cluster's rows become proportional to the rows per second that it had; a cluster's
    slowest process counts. Training stays exact if the means are weighted: ``hetccl.sync(grads, weight=rows)``.

    Measure what the cluster computes *by itself*, before it takes anything from the others: the time of a step with a sync or a
    collective over a spanning axis is that of the slowest cluster everywhere. The median of some steps is better than one.

    Args:
      batches: the rows of each cluster that were measured, as :func:`batch_sizes` or the last call gave them; equal everywhere.
      seconds: the time that this process's cluster needed for its rows.
      multiples: as for :func:`batch_sizes`; equal everywhere.

    Returns:
      New rows of each cluster; together as many as before.

    Raises:
      ConfigError: in every process alike: a time is not a positive number, or there are fewer rows than devices.
      AgreementError: the processes gave different ``batches`` or ``multiples``.

    Example:
      >>> rows = hetccl.batch_sizes(96)            # (64, 32)
      >>> ...                                      # some steps, each with time.perf_counter() around the gradients
      >>> rows = hetccl.balance(rows, statistics.median(times))
      >>> batch = hetccl.shard_batch(batch, sharding, weights=rows)
    """
    world = session.hooks().world
    given = None if multiples is None else [int(m) for m in multiples]
    mine = {"batches": [int(n) for n in batches], "multiples": given, "seconds": float(seconds)}
    said = world.control.meet("balance", mine, world.config.arrival_timeout)
    members = world.control.members
    here = world.control.me
    for member, theirs in sorted(said.items()):
        for what in ("batches", "multiples"):
            if theirs[what] != said[0][what]:
                raise AgreementError(
                    f"balance: {what} are {said[0][what]} in {members[0].name}, but {theirs[what]} in "
                    f"{members[member].name}; every process gives the same (this is {members[here].name})"
                )
    units = _multiples(world, given)
    if len(batches) != len(world.clusters) or min(mine["batches"]) < 1:
        raise ConfigError(
            f"balance: batches={tuple(batches)}; give the rows of each of the {len(world.clusters)} clusters, as "
            "hetccl.batch_sizes gives them"
        )
    slowest = [0.0] * len(world.clusters)
    for member, theirs in sorted(said.items()):
        if not (math.isfinite(theirs["seconds"]) and theirs["seconds"] > 0):
            raise ConfigError(
                f"balance: {members[member].name} measured {theirs['seconds']} s; a step's time is a positive number"
            )
        slowest[members[member].cluster] = max(slowest[members[member].cluster], theirs["seconds"])
    return balanced(mine["batches"], slowest, units)


def _sizes(
    op: str, world: World, n: int, weights: Sequence[float] | None, multiples: Sequence[int] | None
) -> tuple[int, ...]:
    given = None if weights is None else [float(w) for w in weights]
    return portions(op, int(n), given, _multiples(world, multiples, op))


def _multiples(world: World, multiples: Sequence[int] | None, op: str = "balance") -> tuple[int, ...]:
    if multiples is None:
        return tuple(cluster.devices for cluster in world.clusters)
    if len(multiples) != len(world.clusters):
        raise ConfigError(
            f"{op}: {len(multiples)} multiples, but there are {len(world.clusters)} clusters; give one for each cluster"
        )
    return tuple(int(m) for m in multiples)


def _placed(rows: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
