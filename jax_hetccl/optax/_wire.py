"""The mean of a pytree over all clusters, in a narrow format between them, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hetccl import session
from jax_hetccl._errors import UnsupportedError
from jax_hetccl._sync import bucketed, scalar_weight, sync
from jax_hetccl._world import world
from jax_hetccl.decompose.common import rounding
from jax_hetccl.syncing import formats


def zeros(tree: Any) -> Any:
    """The first residual: float32 zeros like the arrays of a tree."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, np.float32), tree)


def mean(
    tree: Any,
    residual: Any,
    weight: Any,
    wire_dtype: str | None,
    name: str,
    buckets: int | Sequence[str] | None = None,
) -> tuple[Any, Any]:
    """``sync(tree, weight=weight)``, but what crosses between clusters is ``wire_dtype``.

    Each cluster sends its product with the weight, plus the residual, rounded to the format; what was lost by that is
    the next residual. All add what they received, and their own part as the others received it, in float32 in
    the order of clusters.

    Args:
      tree: arrays of floats of 32 bits at most.
      residual: float32, a tree like ``tree``; or None: what is lost is lost.
      weight: see :func:`hetccl.sync`. With weight 0 nothing is sent, and the residual stays.
      wire_dtype: a name in ``formats.FORMATS``; None: :func:`hetccl.sync`, and the residual stays.
      name: see :func:`hetccl.sync`.
      buckets: see :func:`hetccl.sync`.

    Returns:
      The mean, and the new residual (None if there was none).
    """
    if wire_dtype is None:
        return sync(tree, weight=weight, buckets=buckets, name=name), residual
    paths, treedef = jax.tree.flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [_no_derivative(_checked(label, jnp.asarray(x))) for label, (_, x) in zip(names, paths, strict=True)]
    cut = bucketed(buckets, [path for path, _ in paths])
    here = world()
    if len(here.clusters) == 1:
        return jax.tree.unflatten(treedef, leaves), residual
    kept = [None] * len(leaves) if residual is None else [_no_derivative(r) for r in treedef.flatten_up_to(residual)]
    weights = None if weight is None else _no_derivative(scalar_weight(weight))
    form = formats.format_of(wire_dtype)

    sent = [_contribution(x, r, weights) for x, r in zip(leaves, kept, strict=True)]
    arrays, labels = [] if weights is None else [weights], [] if weights is None else ["weight"]
    for label, x in zip(names, sent, strict=True):
        arrays += form.encode(x)
        labels += [f"{label} {part}".strip() for part in form.parts]
    if isinstance(cut, tuple):  # the weight is there first
        cut = (0,) * (weights is not None) + tuple(n for n in cut for _ in form.parts)
    found = iter(session.hooks().combiner.gather(labels, arrays, name, wire_dtype, cut))

    everyones = None if weights is None else next(found)
    results, residuals = [], []
    for x, leaf, old in zip(sent, leaves, kept, strict=True):
        parts = [next(found) for _ in form.parts]
        values = [form.decode(p) for p in zip(*parts, strict=True)]
        results.append(rounded(formats.mean(values, everyones), leaf.dtype))
        residuals.append(None if old is None else _left(x, values[here.cluster], old, weights))
    return jax.tree.unflatten(treedef, results), None if residual is None else jax.tree.unflatten(treedef, residuals)


def _checked(label: str, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise UnsupportedError(
            f"wire_dtype: {label or 'the argument'} is {x.dtype.name}[{','.join(map(str, x.shape))}]; narrow formats are "
            "for floats of 32 bits at most, which are added in float32. Leave wire_dtype out for trees with other arrays."
        )
    return x


def _contribution(x: jax.Array, residual: jax.Array | None, weight: jax.Array | None) -> jax.Array:
    """What a cluster adds to the sum, in float32. Nothing with weight zero, not even what is not finite."""
    x = lax.convert_element_type(x, np.float32)
    if weight is not None:
        x = x * weight
    if residual is not None:
        x = x + residual
    return x if weight is None else jnp.where(weight == 0, np.float32(0), x)


def _left(x: jax.Array, sent: jax.Array, old: jax.Array, weight: jax.Array | None) -> jax.Array:
    """What is still to be sent. Where a value is not finite there is nothing to correct later: that step is lost."""
    error = x - sent
    left = jnp.where(jnp.isfinite(error), error, old)
    return left if weight is None else jnp.where(weight == 0, old, left)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in a type; the compiler does not take the rounding away."""
    if x.dtype != dtype and (bits := rounding(dtype)) is not None:
        x = lax.reduce_precision(x, *bits)
    return lax.convert_element_type(x, dtype)


@jax.custom_jvp
def _no_derivative(x: jax.Array) -> jax.Array:
    return x


@_no_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        "wire_dtype: rounding has no useful derivative; put jax.lax.stop_gradient around what is synced, or leave wire_dtype out"
    )
