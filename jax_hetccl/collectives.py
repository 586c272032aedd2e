"""lax's collectives over a spanning axis, with a check that the axis spans.

Over a spanning axis ``jax.lax.psum`` and ``jax_hetccl.psum`` are the same thing; these functions only make sure that
the program means what it says. They accept the same arguments, have the same gradients and batching, and work in
``shard_map`` with both ``check_vma`` modes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jax_hetccl import session
from jax_hetccl._errors import UnsupportedError

AxisName = Hashable | Sequence[Hashable]


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """Sum over a spanning axis: ``jax.lax.psum`` over the ranks of all clusters.

    Algorithm: hierarchical reduction (HetCCL papers, arXiv 2601.22585 and 2605.31000): local reduce(-scatter), an
    exchange between clusters, local all-gather; see ``docs/algorithms.md`` for steps and bytes. Floats below 32 bits
    are added in float32 and rounded once. Every rank gets the same bits.

    Args:
      x: array or pytree, any dtype ``lax.psum`` takes; the same shapes and dtypes on every rank.
      axis_name: mesh axis or tuple of axes, one of which spans.
      axis_index_groups: must be None over a spanning axis in this version.

    Returns:
      Arrays of the same shapes; bool becomes int32, as in lax.

    Raises:
      UnsupportedError: no axis spans, or ``axis_index_groups`` is given.
      jax.errors.JaxRuntimeError: at run time, with the peer's cluster and rank, if an exchange fails;
        ``hetccl.check()`` raises it as a typed error.

    Example:
      >>> grads = hetccl.psum(grads, "data")
    """
    _require_spanning("psum", axis_name)
    return jax.lax.psum(x, axis_name, axis_index_groups=axis_index_groups)


def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """Mean over a spanning axis: :func:`psum` divided by the axis' global size.

    Args, errors and algorithm as for :func:`psum`.

    Example:
      >>> loss = hetccl.pmean(loss, "data")
    """
    _require_spanning("pmean", axis_name)
    return jax.lax.pmean(x, axis_name, axis_index_groups=axis_index_groups)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """Maximum over a spanning axis. Args, errors and algorithm as for :func:`psum`.

    Example:
      >>> largest = hetccl.pmax(jnp.max(jnp.abs(x)), "data")
    """
    _require_spanning("pmax", axis_name)
    return jax.lax.pmax(x, axis_name, axis_index_groups=axis_index_groups)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """Minimum over a spanning axis. Args, errors and algorithm as for :func:`psum`.

    Example:
      >>> smallest = hetccl.pmin(x, "data")
    """
    _require_spanning("pmin", axis_name)
    return jax.lax.pmin(x, axis_name, axis_index_groups=axis_index_groups)


def axis_index(axis_name: Hashable) -> jax.Array:
    """This rank's global index along a spanning axis: an int32 scalar, clusters in order.

    Example:
      >>> key = jax.random.fold_in(key, hetccl.axis_index("data"))
    """
    _require_spanning("axis_index", axis_name)
    return jax.lax.axis_index(axis_name)


def axis_size(axis_name: AxisName) -> int:
    """The global size of a spanning axis, over all clusters, as a Python int.

    Example:
      >>> n = hetccl.axis_size("data")
    """
    _require_spanning("axis_size", axis_name)
    return jax.lax.axis_size(axis_name)


def _require_spanning(op: str, axis_name: AxisName) -> None:
    hooks = session.hooks()
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not any(hooks.spans(n) for n in names):
        shown = ", ".join(repr(n) for n in names)
        known = ", ".join(repr(n) for n in hooks.world.axes) or "none"
        raise UnsupportedError(
            f"hetccl.{op} over {shown}: no axis of that name spans clusters (spanning: {known}). Name it in "
            f"hetccl.initialize(axes=({names[0]!r},)), or use jax.lax.{op} for an axis inside the cluster."
        )
