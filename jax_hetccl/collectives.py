"""lax's collectives over a spanning axis, with a check that the axis spans.

Over a spanning axis ``jax.lax.psum`` and ``jax_hetccl.psum`` are the same thing; these functions only make sure that
the program means what it says. They accept the same arguments, have the same gradients and batching, and work in
``shard_map`` with both ``check_vma`` modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jax_hetccl import _compat, session
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
      axis_index_groups: as in lax: lists of global indices along the axis, together all of them; each reduces alone.

    Returns:
      Arrays of the same shapes; bool becomes int32, as in lax.

    Raises:
      UnsupportedError: no axis spans.
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


def all_gather(
    x: Any, axis_name: AxisName, *, axis_index_groups: Any = None, axis: int = 0, tiled: bool = False, **kwargs: Any
) -> Any:
    """Gathers every rank's array along a spanning axis: ``jax.lax.all_gather`` over the ranks of all clusters.

    Algorithm: the vendor's all-gather inside; of every other cluster's shards each rank receives one piece, so that
    each byte crosses once, and a second local all-gather spreads the pieces.

    Args:
      x: array or pytree; the same shapes and dtypes on every rank.
      axis_name: mesh axis or tuple of axes, one of which spans.
      axis_index_groups: as in :func:`psum`, of one size.
      axis: where the rank dimension goes.
      tiled: concatenate along ``axis`` instead of adding a dimension.
      **kwargs: passed on to ``jax.lax.all_gather`` (such as ``to``).

    Returns:
      Arrays with a dimension of the axis' global size at ``axis``, or ``axis`` that many times as long.

    Raises:
      UnsupportedError: no axis spans. ValueError: groups of several sizes. At run time as :func:`psum`.

    Example:
      >>> everyone = hetccl.all_gather(x, "data", tiled=True)
    """
    _require_spanning("all_gather", axis_name)
    return jax.lax.all_gather(x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, **kwargs)


def psum_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, axis_index_groups: Any = None, tiled: bool = False
) -> Any:
    """Sum over a spanning axis of which each rank keeps its part: ``jax.lax.psum_scatter`` over all clusters.

    Algorithm: one local reduce-scatter of what goes to each cluster, one exchange; every element is added up on one
    rank, in cluster order.

    Args:
      x: array or pytree; ``scatter_dimension`` has the axis' global size, or a multiple of it if ``tiled``.
      axis_name: mesh axis or tuple of axes, one of which spans.
      scatter_dimension: the dimension that is distributed.
      axis_index_groups: as in :func:`psum`, of one size.
      tiled: keep the dimension, divided by the axis' size.

    Returns:
      This rank's part.

    Raises:
      As :func:`all_gather`; ValueError from lax for a dimension that does not divide.

    Example:
      >>> mine = hetccl.psum_scatter(grads, "data", tiled=True)
    """
    _require_spanning("psum_scatter", axis_name)
    return jax.lax.psum_scatter(
        x, axis_name, scatter_dimension=scatter_dimension, axis_index_groups=axis_index_groups, tiled=tiled
    )


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Any = None,
    tiled: bool = False,
) -> Any:
    """Transposes between ranks: ``jax.lax.all_to_all`` over the ranks of all clusters.

    Chunks for ranks of other clusters go there directly, the others by the vendor's all-to-all.

    Args:
      x: array or pytree; ``split_axis`` has the axis' global size, or a multiple of it if ``tiled``.
      axis_name: mesh axis or tuple of axes, one of which spans.
      split_axis: the dimension that is distributed.
      concat_axis: where the received chunks are put together.
      axis_index_groups: as in :func:`psum`, of one size.
      tiled: as in lax.

    Returns:
      Arrays as lax returns them on one world of the same size.

    Raises:
      As :func:`psum_scatter`.

    Example:
      >>> y = hetccl.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)
    """
    _require_spanning("all_to_all", axis_name)
    return jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled)


def ppermute(x: Any, axis_name: AxisName, perm: Any) -> Any:
    """Sends from rank to rank: ``jax.lax.ppermute`` over the ranks of all clusters.

    Pairs that cross clusters go directly, the others by the vendor's permute.

    Args:
      x: array or pytree; the same shapes and dtypes on every rank.
      axis_name: mesh axis or tuple of axes, one of which spans.
      perm: pairs ``(source, destination)`` of global indices, each at most once.

    Returns:
      What the source had; zeros on ranks that are no destination.

    Raises:
      UnsupportedError: no axis spans. ValueError from lax for repeated indices.

    Example:
      >>> n = hetccl.axis_size("data")
      >>> left = hetccl.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])
    """
    _require_spanning("ppermute", axis_name)
    return jax.lax.ppermute(x, axis_name, perm)


def pshuffle(x: Any, axis_name: Hashable, perm: Sequence[int]) -> Any:
    """:func:`ppermute` with ``perm[i]`` the source of rank ``i``, as ``jax.lax.pshuffle``."""
    _require_spanning("pshuffle", axis_name)
    return jax.lax.pshuffle(x, axis_name, perm)


def pswapaxes(x: Any, axis_name: Hashable, axis: int, *, axis_index_groups: Any = None) -> Any:
    """Swaps the rank dimension with ``axis``, as ``jax.lax.pswapaxes``; see :func:`all_to_all`."""
    _require_spanning("pswapaxes", axis_name)
    return jax.lax.pswapaxes(x, axis_name, axis, axis_index_groups=axis_index_groups)


def pbroadcast(x: Any, axis_name: AxisName, source: int | jax.Array) -> Any:
    """One rank's value on every rank: ``jax.lax.pbroadcast`` over the ranks of all clusters, on every platform.

    Algorithm: the source's cluster scatters it among its ranks, the pieces go to each other cluster once, and an
    all-gather inside makes them whole.

    Args:
      x: array or pytree; the same shapes and dtypes on every rank, with ``check_vma=True`` varying along the axis.
      axis_name: mesh axis or tuple of axes, one of which spans.
      source: the global index of the rank that has the value; with jax 0.12 also an int32 scalar that the program
        computes, the same on all ranks, which costs what :func:`psum` costs.

    Returns:
      What the source had.

    Raises:
      UnsupportedError: no axis spans. IndexError: there is no such rank.

    Example:
      >>> best = hetccl.pbroadcast(params, "data", 3)
    """
    _require_spanning("pbroadcast", axis_name)
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    return jax.lax.pbroadcast(x, names, source)


def local() -> contextlib.AbstractContextManager[Any]:
    """Restricts lax to the own cluster: collectives traced inside the block mean this cluster's part of the axis.

    They have the axis' local size and compile to exactly what stock JAX compiles them to. Gradients of them stay local
    too.

    Example:
      >>> with hetccl.local():
      ...     inside = jax.lax.psum(x, "data")    # over this cluster's devices
      >>> everywhere = jax.lax.psum(x, "data")
    """
    return _compat.local()


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
