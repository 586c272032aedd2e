"""``hetccl.sync``: equal arrays in all clusters, at jit level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl import session
from jax_hetccl._errors import ConfigError

_OPS = ("mean", "sum", "max", "min")


def sync(
    tree: Any, op: str = "mean", weight: Any = None, *, buckets: int | Sequence[str] | None = None, name: str = ""
) -> Any:
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
      buckets: how the leaves are cut into parts whose exchanges start one by one, each as soon as its leaves exist, so
        that they run beside what is still computed; all of them end before any result is used. The bits are the same with
        and without. A number: so many buckets of about equal bytes, in the order in which the program computes the leaves
        (in a backward pass the last layers first), as it follows from data dependences in the surrounding
        ``jit`` function. Or prefixes of paths such as ``("head", "layers/1", "")``, in the order of starts: a leaf is in
        the bucket of the longest one that fits, so that "" takes the rest. The same in all clusters. None: the order of the
        tree, in which the last leaf of a gradient is often the first to be ready, and nothing overlaps. See
        docs/training.md.
      name: tells this sync apart from others of equal arrays, where those are sharded differently or run on other
        devices. The same in all clusters.

    Returns:
      The combined tree.

    Raises:
      ConfigError: ``op``, ``weight`` or ``buckets`` is none that there is; a leaf is in no bucket, a bucket has no leaf.
      UnsupportedError: inside ``shard_map``, or a leaf whose type the operation does not fit.
      AgreementError: another cluster syncs something else, or in other buckets; names the first leaf or bucket that differs.

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
    cut = bucketed(buckets, [path for path, _ in paths])
    return jax.tree.unflatten(treedef, session.hooks().combiner.combine(op, names, leaves, weights, name, cut))


def grad_sync(
    tree: Any, op: str = "mean", weight: Any = None, *, buckets: int | Sequence[str] | None = None, name: str = ""
) -> Any:
    """The identity, whose gradient is synced: :func:`sync` where the backward pass has the gradient.

    For parameters inside of a loop over layers (``jax.lax.scan``): their gradients leave the loop stacked, behind its last
    trip, and a sync of them there overlaps with nothing. Put around one layer's parameters at the beginning of the loop's
    body, it exchanges each layer's gradient in the trip of the backward loop that computes it.

    What the loop's body closes over has a gradient in every trip, and would be exchanged in each: sync that behind the loop.

    Args:
      tree: arrays of floats, such as a layer's parameters.
      op: see :func:`sync`; "mean" or "sum".
      weight: see :func:`sync`. It has no derivative.
      buckets: see :func:`sync`.
      name: see :func:`sync`.

    Returns:
      The tree.

    Raises:
      ConfigError: as for :func:`sync`, or ``op`` is another one.

    What :func:`sync` raises is raised when the gradient is traced.

    Example:
      >>> def layer(x, params):
      ...     params = hetccl.grad_sync(params)
      ...     return jnp.tanh(x @ params["w"] + params["b"]), None
      >>> loss, grads = jax.value_and_grad(lambda p: loss_fn(jax.lax.scan(layer, x, p)[0]))(params)  # of all clusters
    """
    if op not in ("mean", "sum"):
        raise ConfigError(f"grad_sync: op={op!r}; it is mean or sum")
    if weight is not None and op != "mean":
        raise ConfigError(f"grad_sync: weight goes with op='mean', not with op={op!r}")
    bucketed(buckets, [path for path, _ in jax.tree.flatten_with_path(tree)[0]])

    @jax.custom_vjp
    def identity(tree: Any, weight: Any) -> Any:
        return tree

    def backward(weight: Any, gradient: Any) -> tuple[Any, None]:
        return sync(gradient, op, weight, buckets=buckets, name=name), None

    identity.defvjp(lambda tree, weight: (tree, weight), backward)
    return identity(tree, None if weight is None else scalar_weight(weight))


def bucketed(buckets: Any, paths: Sequence[Any]) -> int | tuple[int, ...] | None:
    """Checks the argument ``buckets``.

    Args:
      buckets: a number, prefixes of paths, or None.
      paths: of the leaves, as JAX has them.

    Returns:
      The number, or for each leaf the number of its bucket; or None.
    """
    if buckets is None:
        return None
    if isinstance(buckets, int) and not isinstance(buckets, bool):
        if buckets < 1:
            raise ConfigError(f"buckets={buckets}; it is 1 or more")
        return buckets
    if isinstance(buckets, str) or not isinstance(buckets, Sequence) or not all(isinstance(b, str) for b in buckets):
        raise ConfigError(
            f"buckets={buckets!r}; it is a number of buckets, or prefixes of paths: ('head', 'layers/1', '')"
        )
    if len(set(buckets)) < len(buckets):
        raise ConfigError(f"buckets={tuple(buckets)!r}: the same prefix twice")
    found = []
    for path in paths:
        label = jax.tree_util.keystr(path, simple=True, separator="/")
        fits = [n for n, prefix in enumerate(buckets) if not prefix or f"{label}/".startswith(f"{prefix}/")]
        if not fits:
            raise ConfigError(f"buckets={tuple(buckets)!r}: no prefix fits the leaf {label!r}; '' takes the rest")
        found.append(max(fits, key=lambda n: len(buckets[n])))
    if unused := [prefix for n, prefix in enumerate(buckets) if n not in found]:
        raise ConfigError(f"buckets={tuple(buckets)!r}: no leaf is in the bucket {unused[0]!r}")
    return tuple(found)


def scalar_weight(weight: Any) -> jax.Array:
    """A cluster's weight as float32; an error if it is not one real number."""
    given = jnp.asarray(weight)
    if given.shape != () or jnp.issubdtype(given.dtype, jnp.complexfloating):
        raise ConfigError(f"sync: weight is one real number for the cluster, not {given.dtype.name}{list(given.shape)}")
    return given.astype(np.float32)
