"""The primitives of operations on arrays and their counterparts elsewhere: combined element by element, or collected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jax._src import core, dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.lib.mlir import ir


class Combination(Protocol):
    """What the operation is. ``params`` are the primitive's own; they name the arrays one by one."""

    def run(self, *arrays: Any, results: tuple[np.dtype, ...], **params: Any) -> Sequence[Any]:
        """Computes the results; traced when the program is lowered."""
        ...

    def lowered(
        self, values: Sequence[ir.Value], block: ir.Block, module: ir.Module, params: dict[str, Any]
    ) -> dict[str, Any]:
        """The parameters with which it is run, given what it works on where it is lowered."""
        ...

    def tangent(self, which: Sequence[int], weight_moves: bool, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters for the tangents of some of the arrays, or an error if there is no derivative."""
        ...

    def cotangent(self, which: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        """The parameters for the cotangents of some of the arrays: the transposed operation."""
        ...

    def refuse_batched_weight(self, params: dict[str, Any]) -> None:
        """Raises the error for a ``vmap`` in which the weight differs."""
        ...


def combining_primitive(name: str, rules: Combination) -> Callable[..., list[Any]]:
    """Makes a primitive that is linear in its arrays, elementwise, and its own transpose up to dtypes.

    Args:
      name: its name in jaxprs.
      rules: what it is.

    Returns:
      The function that binds it: ``(*arrays, [weight], results=dtypes, **params)``. The results are like the arrays, in
      these dtypes. A batched array is one larger array.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, results: tuple[np.dtype, ...], **_: Any) -> list[Any]:
        return [a.update(dtype=d) for a, d in zip(avals, results, strict=False)]

    def batch(args: Sequence[Any], dims: Sequence[Any], *, results: tuple[np.dtype, ...], **params: Any) -> Any:
        if any(d is not None for d in dims[len(results) :]):
            rules.refuse_batched_weight(params)
        return primitive.bind(*args, results=results, **params), list(dims[: len(results)])

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, results: tuple[np.dtype, ...], **params: Any) -> Any:
        n = len(results)
        out = primitive.bind(*primals, results=results, **params)
        which = [i for i in range(n) if type(tangents[i]) is not ad.Zero]
        moving: dict[int, Any] = {}
        weight_moves = any(type(t) is not ad.Zero for t in tangents[n:])
        if which or weight_moves:
            more = rules.tangent(which, weight_moves, params)
            arrays = [*(tangents[i] for i in which), *primals[n:]]
            moving = dict(zip(which, primitive.bind(*arrays, results=_of(results, which), **more), strict=True))
        return out, [moving[i] if i in moving else ad.p2tz(x) for i, x in enumerate(out)]

    def transpose(cts: Sequence[Any], *args: Any, results: tuple[np.dtype, ...], **params: Any) -> list[Any]:
        n = len(results)
        linear = [ad.is_undefined_primal(x) for x in args]
        which = [i for i in range(n) if linear[i] and type(cts[i]) is not ad.Zero]
        found: dict[int, Any] = {}
        if which:
            dtypes = tuple(np.dtype(args[i].aval.dtype) for i in which)
            arrays = [*(cts[i] for i in which), *args[n:]]
            more = rules.cotangent(which, params)
            found = dict(zip(which, primitive.bind(*arrays, results=dtypes, **more), strict=True))
        return [
            found[i] if i in found else ad.Zero(x.aval.to_ct_aval()) if linear[i] else None for i, x in enumerate(args)
        ]

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    return _finished(primitive, abstract_eval, rules.run, rules.lowered)


# ``(values, block, module, params) -> params``; see ``Combination.lowered``.
Lowered = Callable[[Sequence[ir.Value], ir.Block, ir.Module, dict[str, Any]], dict[str, Any]]


def collecting_primitive(name: str, run: Callable[..., Sequence[Any]], lowered: Lowered) -> Callable[..., list[Any]]:
    """Makes a primitive that gives several copies of each array, one from each place. It has no derivative.

    Args:
      name: its name in jaxprs.
      run: computes the results; traced when the program is lowered.
      lowered: see :class:`Combination`.

    Returns:
      The function that binds it: ``(*arrays, copies=n, **params)``; first the copies of the first array, and so on. A
      batched array is one larger array.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, copies: int, **_: Any) -> list[Any]:
        return [a for a in avals for _ in range(copies)]

    def batch(args: Sequence[Any], dims: Sequence[Any], *, copies: int, **params: Any) -> Any:
        return primitive.bind(*args, copies=copies, **params), [d for d in dims for _ in range(copies)]

    batching.primitive_batchers[primitive] = batch
    return _finished(primitive, abstract_eval, run, lowered)


def _finished(
    primitive: Any, abstract_eval: Callable[..., Any], run: Callable[..., Any], lowered: Lowered
) -> Callable[..., list[Any]]:
    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        here: Any = ir.InsertionPoint.current
        params = lowered(args, here.block, ctx.module_context.module, params)
        return mlir.lower_fun(functools.partial(run, **params), multiple_results=True)(ctx, *args)

    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    mlir.register_lowering(primitive, lower, cacheable=False)
    # The program depends on the devices that it is for.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive.bind


def _of(items: Sequence[Any], which: Sequence[int]) -> tuple[Any, ...]:
    return tuple(items[i] for i in which)
