"""One equation that is being lowered inside a shard_map."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, core
from jax._src import shard_map as shard_map_lib
from jax._src.interpreters import mlir
from jax._src.lax import lax, parallel
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import SPMDAxisContext

from jax_hetccl._compat.base import AnyMesh, as_tuple
from jax_hetccl._compat.emit import constant
from jax_hetccl._compat.patches import stock_rule

# Primitives that only say more about types, and those without.
_PLAIN = {
    "psum_invariant_p": "psum_p",
    "unreduced_psum_p": "psum_p",
    "unreduced_pmax_p": "pmax_p",
    "unreduced_pmin_p": "pmin_p",
    "all_gather_invariant_p": "all_gather_p",
    "all_gather_reduced_p": "all_gather_p",
    "unreduced_reduce_scatter_p": "reduce_scatter_p",
}

# Groups of numbers within the cluster, for a stock collective.
Groups = Sequence[Sequence[int]] | None


def is_byte_float(dtype: Any) -> bool:
    """Whether values are floats of eight bits, which vendors' collectives know in part or not at all."""
    # Not by numpy's size of an item, which is a byte for floats of four bits, too.
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits == 8


class Lowering:
    """One equation that is being lowered inside a shard_map: what it works on, and how to emit operations for it."""

    def __init__(self, ctx: mlir.LoweringRuleContext, primitive: core.Primitive):
        self._ctx, self._primitive = ctx, primitive
        axis_context = ctx.module_context.axis_context
        assert isinstance(axis_context, SPMDAxisContext)
        self.mesh: AnyMesh = axis_context.mesh
        self.manual_axes = frozenset(axis_context.manual_axes)
        self._in: Any = ctx.avals_in[0]
        self._out: Any = ctx.avals_out[0]
        self.shape: tuple[int, ...] = tuple(self._in.shape)
        self.out_shape: tuple[int, ...] = tuple(self._out.shape)
        self.dtype = np.dtype(self._in.dtype)
        self.name_stack = str(ctx.name_stack)

    @property
    def fully_manual(self) -> bool:
        return self.manual_axes == frozenset(self.mesh.axis_names)

    def type(self, shape: Sequence[int], dtype: Any) -> ir.Type:
        """The IR type of an array."""
        return mlir.aval_to_ir_type(self._ctx.module_context, core.ShapedArray(tuple(shape), np.dtype(dtype)))

    def local_reduce(self, op: str, x: ir.Value, dtype: Any, axes: tuple[str, ...], groups: Groups = None) -> ir.Value:
        """Stock "psum", "pmax" or "pmin" within the cluster."""
        aval = self._aval(ir.RankedTensorType(x.type).shape, dtype)
        primitive = {"psum": parallel.psum_p, "pmax": parallel.pmax_p, "pmin": parallel.pmin_p}[op]
        ctx = self._with(aval, aval)
        return self._one(stock_rule(primitive)(ctx, x, axes=axes, axis_index_groups=groups))

    def local_reduce_scatter(
        self, op: str, x: ir.Value, elements: int, dtype: Any, axes: tuple[str, ...], size: int, groups: Groups = None
    ) -> ir.Value:
        """Stock ``psum_scatter`` of a vector within the cluster, over ``size`` ranks; also for "pmax" and "pmin"."""
        ctx = self._with(self._aval((elements,), dtype), self._aval((elements // size,), dtype))
        params = dict(axis_name=axes, scatter_dimension=0, axis_index_groups=groups, axis_size=size, tiled=True)
        reducer = {"psum": lax.add_p, "pmax": lax.max_p, "pmin": lax.min_p}[op]
        # The rule is a partial over the reducer; only the sum has a primitive of its own.
        return self._one(stock_rule(parallel.reduce_scatter_p).func(reducer, ctx, x, **params))

    def local_all_gather(
        self, x: ir.Value, elements: int, dtype: Any, axes: tuple[str, ...], size: int, groups: Groups = None
    ) -> ir.Value:
        """Stock ``all_gather`` of a vector's pieces within the cluster; ``elements`` is the result's."""
        params = dict(axis_name=axes, all_gather_dimension=0, axis_index_groups=groups, axis_size=size, tiled=True)
        return self._moved(parallel.all_gather_p, x, (elements,), dtype, params)

    def local_all_to_all(
        self, x: ir.Value, shape: Sequence[int], dtype: Any, axes: tuple[str, ...], groups: Groups = None
    ) -> ir.Value:
        """Stock ``all_to_all`` of rows within the cluster: row ``i`` goes to rank ``i``."""
        params = dict(axis_name=axes, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)
        return self._moved(parallel.all_to_all_p, x, shape, dtype, params)

    def local_permute(
        self, x: ir.Value, dtype: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]
    ) -> ir.Value:
        """Stock ``ppermute`` within the cluster."""
        params = dict(axis_name=axes, perm=tuple(pairs))
        return self._moved(parallel.ppermute_p, x, self.shape, dtype, params)

    def _moved(
        self, primitive: core.Primitive, x: ir.Value, shape: Sequence[int], dtype: Any, params: dict[str, Any]
    ) -> ir.Value:
        """A stock collective that only moves values; ``shape`` is the result's. Floats of eight bits go as integers: NCCL
        knows but two kinds."""
        before, byte = ir.RankedTensorType(x.type).shape, is_byte_float(dtype)
        carried = np.uint8 if byte else dtype
        if byte:
            x = hlo.bitcast_convert(self.type(before, carried), x)
        ctx = self._with(self._aval(before, carried), self._aval(shape, carried))
        y = self._one(stock_rule(primitive)(ctx, x, **params))
        return hlo.bitcast_convert(self.type(shape, dtype), y) if byte else y

    def pick(self, where: np.ndarray, yes: ir.Value, no: ir.Value, axes: tuple[str, ...]) -> ir.Value:
        """``yes`` on the ranks whose number within the cluster is set in ``where``, ``no`` on the others.

        The program is the same for all ranks: each looks its number up.
        """
        if where.all() or not where.any():
            return yes if where.all() else no
        index = self._member(axes)
        table = constant(where)
        mine = hlo.dynamic_slice(table, [index], [1])
        type_ = ir.RankedTensorType(yes.type)
        scalar = hlo.reshape(ir.RankedTensorType.get([], ir.IntegerType.get_signless(1)), mine)
        mask_type = ir.RankedTensorType.get(type_.shape, ir.IntegerType.get_signless(1))
        return hlo.select(hlo.broadcast_in_dim(mask_type, scalar, []), yes, no)

    def take_rows(self, x: ir.Value, table: np.ndarray, axes: tuple[str, ...]) -> ir.Value:
        """The rows of ``x`` that line ``i`` of ``table`` names, on the rank with number ``i`` within the cluster."""
        columns = ir.RankedTensorType(x.type).shape[1]
        count = table.shape[1]
        i32 = ir.IntegerType.get_signless(32)
        line = hlo.dynamic_slice(constant(table), [self._member(axes), constant(np.int32(0))], [1, count])
        numbers = hlo.reshape(ir.RankedTensorType.get([count, 1], i32), line)
        where = hlo.GatherDimensionNumbers.get([1], [0], [], [], [0], 1)
        return hlo.gather(x, numbers, where, mlir.dense_int_array([1, columns]), indices_are_sorted=False)

    def _member(self, axes: tuple[str, ...]) -> ir.Value:
        """The own number within the cluster, row-major over ``axes``."""
        index = constant(np.int32(0))
        for axis in axes:
            ctx = self._ctx.replace(primitive=None, avals_in=[], avals_out=None)
            (local,) = stock_rule(parallel.axis_index_p)(ctx, axis_name=axis)
            size = constant(np.int32(self.mesh.shape[axis]))
            index = hlo.add(hlo.multiply(index, size), local)
        return index

    def in_manual_region(self, x: ir.Value, params: dict[str, Any]) -> ir.Value:
        """Lowers the same equation again inside a nested shard_map over the axes that are not manual yet.

        A custom call in a partly manual region is refused by the partitioner; nested, every axis is manual. Operand
        and result keep their own sharding over the further axes where their types know it (explicit axes).
        """
        aval, out = self._in, self._out
        # Inside, with check_vma off, types do not say along which axes values vary, and the plain primitive does.
        plain = getattr(parallel, _PLAIN.get(f"{self._primitive.name}_p", ""), self._primitive)
        if plain is not self._primitive:
            params = {**params, "axis_index_groups": None}
        body = functools.partial(plain.bind, **params)
        specs = _own_spec(aval, self.manual_axes), _own_spec(out, self.manual_axes)

        def nested(y: Any) -> Any:
            return shard_map_lib.shard_map(body, check_vma=False, in_specs=specs[0], out_specs=specs[1])(y)

        if hasattr(core, "empty_mat"):
            aval = aval.update(manual_axis_type=core.empty_mat)
        ctx = self._ctx.replace(primitive=None, avals_in=[aval], avals_out=None)
        with config._check_vma(False):
            return self._one(mlir.lower_fun(nested, multiple_results=False)(ctx, x))

    def _aval(self, shape: Sequence[int], dtype: Any) -> core.ShapedArray:
        mesh = self._in.sharding.mesh
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
        return core.ShapedArray(tuple(shape), np.dtype(dtype), sharding=sharding)

    def _with(self, aval_in: core.ShapedArray, aval_out: core.ShapedArray) -> mlir.LoweringRuleContext:
        return self._ctx.replace(avals_in=[aval_in], avals_out=[aval_out])

    @staticmethod
    def _one(results: Sequence[Any]) -> ir.Value:
        (result,) = results
        return result


def _own_spec(aval: Any, manual: frozenset[str]) -> jax.sharding.PartitionSpec:
    parts = []
    for part in aval.sharding.spec:
        names = tuple(a for a in as_tuple(part) if isinstance(a, str) and a not in manual) if part is not None else ()
        parts.append(names or None)
    return jax.sharding.PartitionSpec(*parts)
