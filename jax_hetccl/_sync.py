"""``hetccl.sync``: equal arrays in all clusters, at jit level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl import session
from jax_hetccl._errors import ConfigError

_OPS = ("mean", "sum", "max", "min")


def sync(tree: Any, op: str = "mean", weight: Any = None, *, name: str = "") -> Any:
    """Combines a pytree over all clusters, element by element; every cluster gets the same bits.

    Call it inside ``jax.jit``, outside of ``shard_map``, for example on the gradients of a step whose arrays are sharded
    over the cluster's own mesh. The leaves have the same paths, global shapes and dtypes in every cluster; how they
    are sharded, and over how many devices, is each cluster's own business. Each device exchanges its own shard with
    the devices of the other clusters that hold parts of the same elements; results are sharded like the arguments.

    Derivatives: sums and means are linear, and their transpose is the same sum or mean of the cotangents. A cluster's
    gradient is then that of all clusters' losses together with respect to its own values, as for ``lax.psum`` in pmap; a
    gradient with respect to parameters that all clusters share must be synced itself, as always. The weight has no
    derivative, and neither have "max" and "min". Under ``vmap`` a batched leaf is one larger leaf.

    Args:
      tree: arrays.
      op: "mean", "sum", "max" or "min", over the clusters: each cluster's value counts once, however many devices
        it has. "mean" takes floats only.
      weight: the cluster's weight in the mean, such as its batch size: ``sum(weight * x) / sum(weight)``. A number or
        a traced scalar; in every cluster or in none. A cluster of weight 0 counts as absent, also where its values
        are not finite; if all weights are 0 the result is NaN.
      name: tells this sync apart from others of equal arrays, where those are sharded differently or run on other
        devices. The same in all clusters.

    Returns:
      The combined tree.

    Raises:
      UnsupportedError: inside ``shard_map``, or a leaf whose type the operation does not fit.
      AgreementError: another cluster syncs something else; names the first leaf that differs.

    Example:
      >>> @jax.jit
      ... def step(params, batch):
      ...     loss, grads = jax.value_and_grad(loss_fn)(params, batch)
      ...     grads = hetccl.sync(grads, weight=batch.shape[0])
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    """
    if op not in _OPS:
        raise ConfigError(f"sync: op={op!r}; it is one of {', '.join(_OPS)}")
    if weight is not None and op != "mean":
        raise ConfigError(f"sync: weight goes with op='mean', not with op={op!r}")
    paths, treedef = jax.tree.flatten_with_path(tree)
    leaves = [jnp.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf for _, leaf in paths]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    weights = None if weight is None else scalar_weight(weight)
    return jax.tree.unflatten(treedef, session.hooks().combiner.combine(op, names, leaves, weights, name))


def scalar_weight(weight: Any) -> jax.Array:
    """A cluster's weight as float32; an error if it is not one real number."""
    given = jnp.asarray(weight)
    if given.shape != () or jnp.issubdtype(given.dtype, jnp.complexfloating):
        raise ConfigError(f"sync: weight is one real number for the cluster, not {given.dtype.name}{list(given.shape)}")
    return given.astype(np.float32)
