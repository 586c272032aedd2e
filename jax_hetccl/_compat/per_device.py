"""Primitives of per-device programs at jit level: the chain of exchanges, and stock collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jax._src.sharding_impls import SPMDAxisContext

from jax_hetccl._compat.emit import CHAIN_BEGIN, CHAIN_END, custom_call
from jax_hetccl._compat.patches import stock_rule

_chain_begin_p, _chain_end_p = core.Primitive("hetccl_chain_begin"), core.Primitive("hetccl_chain_end")
_on_one_device_p = core.Primitive("hetccl_on_one_device")
_chain_end_p.multiple_results = _on_one_device_p.multiple_results = True
_local_p = core.Primitive("hetccl_local")


def chain_begin() -> Any:
    """The token that orders exchanges, as it is at this place of the program: ``u32[4]``."""
    return _chain_begin_p.bind()


def chain_end(chain: Any, arrays: Sequence[Any], key: int) -> list[Any]:
    """Says that ``chain`` is the token behind what was computed since :func:`chain_begin`; returns the arrays.

    ``key`` names what was computed, alike in all clusters.
    """
    return _chain_end_p.bind(chain, *arrays, key=key)


def on_one_device(
    fn: Callable[..., Any], label: str, results: tuple[tuple[int, np.dtype], ...], *arrays: Any
) -> list[Any]:
    """``fn(devices, *arrays)`` in a program of one device, known when it is lowered.

    ``results`` says for each result which of the arrays it is like, and its dtype.
    """
    return _on_one_device_p.bind(*arrays, fn=fn, label=label, results=results)


def local_index(axis: str) -> Any:
    """The index along an axis of the program's own mesh."""
    return _local_p.bind(axis=axis, of="axis_index")


def local_max(x: Any, axis: str) -> Any:
    """The stock ``pmax``."""
    return _local_p.bind(x, axis=axis, of="pmax")


def local_gather(x: Any, axis: str, groups: Sequence[Sequence[int]]) -> Any:
    """The stock ``all_gather`` of vectors, end to end, within groups of equal size."""
    return _local_p.bind(x, axis=axis, of="all_gather", groups=tuple(map(tuple, groups)))


def devices_of(sharding: jax.sharding.Sharding) -> tuple[Any, ...]:
    """A sharding's devices in the order of the program."""
    return tuple(sharding._device_assignment)


def _local_abstract(*avals: Any, of: str, groups: Any = None, axis: str) -> core.ShapedArray:
    if of == "axis_index":
        return core.ShapedArray((), np.dtype(np.int32))
    (x,) = avals
    return core.ShapedArray((x.shape[0] * len(groups[0]),), x.dtype) if groups else core.ShapedArray(x.shape, x.dtype)


def _local_lowering(ctx: Any, *args: Any, of: str, axis: str, groups: Any = None) -> Any:
    if of == "axis_index":
        return stock_rule(parallel.axis_index_p)(ctx, axis_name=axis)
    if of == "pmax":
        return stock_rule(parallel.pmax_p)(ctx, *args, axes=(axis,), axis_index_groups=None)
    params = dict(
        axis_name=(axis,), all_gather_dimension=0, axis_index_groups=groups, axis_size=len(groups[0]), tiled=True
    )
    return stock_rule(parallel.all_gather_p)(ctx, *args, **params)


def _chain_begin_lowering(ctx: Any) -> Any:
    types = [mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])]
    return list(custom_call(CHAIN_BEGIN, [], types, {}, side_effect=True).results)


def _chain_end_lowering(ctx: Any, chain: Any, *arrays: Any, key: int) -> Any:
    attributes = {"plan": mlir.ir_attribute(np.uint64(key).astype(np.int64))}
    return list(
        custom_call(CHAIN_END, [chain, *arrays], [x.type for x in arrays], attributes, side_effect=True).results
    )


def _on_one_device_lowering(ctx: Any, *args: Any, fn: Any, label: str, results: Any) -> Any:
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or tuple(jax.local_devices()[:1])
    if isinstance(context, SPMDAxisContext) or len(devices) != 1:
        raise NotImplementedError(f"{label}: stands inside a shard_map; use the lax collectives there")
    return mlir.lower_fun(functools.partial(fn, devices), multiple_results=True)(ctx, *args)


_chain_begin_p.def_abstract_eval(lambda: core.ShapedArray((4,), np.dtype(np.uint32)))
_chain_end_p.def_abstract_eval(lambda chain, *arrays, key: list(arrays))
_on_one_device_p.def_abstract_eval(lambda *arrays, fn, label, results: [arrays[i].update(dtype=d) for i, d in results])
_local_p.def_abstract_eval(_local_abstract)
mlir.register_lowering(_chain_begin_p, _chain_begin_lowering, cacheable=False)
mlir.register_lowering(_chain_end_p, _chain_end_lowering, cacheable=False)
mlir.register_lowering(_on_one_device_p, _on_one_device_lowering, cacheable=False)
mlir.register_lowering(_local_p, _local_lowering, cacheable=False)
