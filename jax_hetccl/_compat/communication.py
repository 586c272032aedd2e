"""Primitives that talk to another cluster on their own: never dropped, merged or hoisted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, effects
from jax._src.interpreters import batching, mlir
from jax._src.lib.mlir import ir
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext

from jax_hetccl._compat.lowering import Lowering


class CommunicationEffect(effects.Effect):
    """Keeps an operation that talks to another cluster in the program, whether or not its result is used."""

    __str__ = __repr__ = lambda self: "hetccl"


_COMMUNICATION = CommunicationEffect()
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.partial_eval_kept_effects,
):
    _allowed.add_type(CommunicationEffect)


def not_of_communication(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Differentiating a scan moves what does not change out of it; a receive gets another value every time."""

    @functools.wraps(stock)
    def scan_known_hoisting(jaxpr: Any, consts: Any, residuals: int, *rest: Any) -> Any:
        if any(isinstance(e, CommunicationEffect) for e in jaxpr.effects):
            return jaxpr, consts, [False] * residuals, []
        return stock(jaxpr, consts, residuals, *rest)

    return scan_known_hoisting


class Placed(Lowering):
    """An equation that is being lowered in a fully manual shard_map or in a program of one device.

    Attributes:
      supported: whether it is.
      mesh: the mesh; missing in a program of one device.
      device: that device.
    """

    def __init__(self, ctx: mlir.LoweringRuleContext, primitive: core.Primitive):
        axis_context = ctx.module_context.axis_context
        self.device: Any = None
        self.supported = True
        if isinstance(axis_context, SPMDAxisContext):
            super().__init__(ctx, primitive, primitive.bind)
            self.supported = self.fully_manual
            return
        self._ctx, self._primitive = ctx, primitive
        aval: Any = ctx.avals_in[0]
        self.shape, self.dtype = tuple(aval.shape), np.dtype(aval.dtype)
        self.name_stack = str(ctx.name_stack)
        assignment = axis_context.device_assignment if isinstance(axis_context, ShardingContext) else None
        if assignment is not None and len(assignment) == 1:
            self.device = assignment[0]
        else:
            self.supported = False

    @property
    def in_mesh(self) -> bool:
        return self.device is None


def communicating_primitive(name: str, *, scalar: bool, lower: Callable[..., ir.Value]) -> Callable[..., Any]:
    """Makes a primitive of one operand that is never dropped, merged or hoisted.

    Args:
      name: its name in jaxprs.
      scalar: whether its result is a float32 scalar; else it has the operand's type.
      lower: ``lower(placed, x, **params)``.

    Returns:
      The function that binds it. A batched operand is one larger operand, its batch dimension in front.
    """
    primitive = core.Primitive(name)

    def abstract_eval(x: Any, **_: Any) -> Any:
        if not scalar:
            return x.update(weak_type=False), {_COMMUNICATION}
        sharding = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
        return x.update(shape=(), dtype=np.dtype(np.float32), weak_type=False, sharding=sharding), {_COMMUNICATION}

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        result = primitive.bind(batching.moveaxis(args[0], dims[0], 0), **params)
        return result, None if scalar else 0

    def rule(ctx: mlir.LoweringRuleContext, x: ir.Value, **params: Any) -> list[ir.Value]:
        return [lower(Placed(ctx, primitive), x, **params)]

    primitive.def_effectful_abstract_eval(abstract_eval)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, rule, cacheable=False)
    # The program depends on the device it is for: which rank sends is a part of it.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive.bind
