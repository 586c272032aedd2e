"""Lowering rules of lax's collectives: decomposed or refused over a spanning axis, stock elsewhere."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import SPMDAxisContext

from jax_hetccl._compat.base import as_tuple
from jax_hetccl._compat.emit import LOWERED_BEGIN, LOWERED_END, REGION_BEGIN, REGION_END, custom_call
from jax_hetccl._compat.hooks import Hooks
from jax_hetccl._compat.lowering import Lowering

# Collectives that are decomposed when an axis spans; every other one in lax.parallel is refused there.
DECOMPOSED = {
    "psum_p": "psum",
    "psum_invariant_p": "psum",
    "pmax_p": "pmax",
    "pmin_p": "pmin",
    "all_gather_p": "all_gather",
    "all_gather_invariant_p": "all_gather",
    "reduce_scatter_p": "psum_scatter",
    "all_to_all_p": "all_to_all",
    "ppermute_p": "ppermute",
}
# Casts between types, without communication.
NO_COMMUNICATION = {"preduced_p", "vary_unreduced_cast_p", "axis_index_p", "done_p"}

_state = threading.local()


def decomposed(hooks: Hooks, primitive: Any, op: str, stock: Any, ctx: Any, x: Any, **params: Any) -> Any:
    """The rule of a collective that is decomposed over a spanning axis."""
    axes = as_tuple(params.get("axis_name", params.get("axes", ())))
    if not any(hooks.spans(a) for a in axes) or not isinstance(ctx.module_context.axis_context, SPMDAxisContext):
        return stock(ctx, x, **params)
    if any(isinstance(a, int) for a in axes):
        ctx, x, axes = _reduced_by_position(stock, ctx, x, axes)
        params = {**params, "axes": axes}
    if params.get("axis_index_groups") is not None and op not in ("psum", "pmax", "pmin"):
        hooks.refuse(op, axes, "with axis_index_groups ")
    lowering = Lowering(ctx, primitive, stock)
    if not lowering.fully_manual:
        return [lowering.in_manual_region(x, params)]
    custom_call(LOWERED_BEGIN, [], [], {}, side_effect=True)
    result = hooks.lower(op, lowering, x, axes, params)
    custom_call(LOWERED_END, [], [], {}, side_effect=True)
    return [result]


def _reduced_by_position(stock: Any, ctx: Any, x: Any, axes: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Reduces over the positional axes first, which a vmap over a named axis leaves behind; returns what remains."""
    positions = tuple(a for a in axes if isinstance(a, int))
    (aval,) = ctx.avals_in
    out = aval.update(shape=tuple(n for i, n in enumerate(aval.shape) if i not in positions))
    reduce = mlir.lower_fun(stock.args[1], multiple_results=False)  # the rule is a partial over (reducer, reduction)
    (x,) = reduce(ctx.replace(primitive=None, avals_out=None), x, axes=positions)
    return ctx.replace(avals_in=[out]), x, tuple(a for a in axes if not isinstance(a, int))


def refuse(hooks: Hooks, op: str, stock: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """The rule of every other collective."""
    axes = as_tuple(params.get("axis_name", params.get("axes", ())))
    if any(hooks.spans(a) for a in axes) and isinstance(ctx.module_context.axis_context, SPMDAxisContext):
        hooks.refuse(op, axes, "")
    return stock(ctx, *args, **params)


def axis_index(hooks: Hooks, stock: Any, ctx: Any, *, axis_name: Any) -> Any:
    """The stock index within the cluster plus the ranks of the clusters before it."""
    axis_context = ctx.module_context.axis_context
    # Under a partly manual mesh the stock rule binds this primitive again in a nested shard_map: add once, here.
    outermost = not getattr(_state, "in_axis_index", False)
    _state.in_axis_index = True
    try:
        (index,) = stock(ctx, axis_name=axis_name)
    finally:
        _state.in_axis_index = not outermost
    (axis,) = as_tuple(axis_name)
    if outermost and hooks.spans(axis) and isinstance(axis_context, SPMDAxisContext):
        offset = hooks.local_offset(axis_context.mesh, axis)
        index = hlo.add(index, mlir.ir_constant(np.int32(offset))) if offset else index
    return [index]


def bounded_shard_map(hooks: Hooks, stock: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """Marks where a shard_map begins and ends if JAX lowers it without a region (all its axes have local size 1).

    The other clusters have a region there, which bounds how exchanges may move; see ordering/.
    """
    mesh = params["mesh"]
    inline = all(mesh.shape[a] == 1 for a in params["newly_manual_axes"])
    if not inline or not any(hooks.spans(a) for a in mesh.axis_names):
        return stock(ctx, *args, **params)
    custom_call(REGION_BEGIN, [], [], {}, side_effect=True)
    results = list(stock(ctx, *args, **params))
    custom_call(REGION_END, [], [], {}, side_effect=True)
    return results
