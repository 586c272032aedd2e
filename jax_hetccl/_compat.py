"""The only place that knows JAX's private names.

Everything else sees the small interface below: :func:`install` puts the hooks of a spanning axis into JAX's tracing
and lowering, :class:`Lowering` is one equation being lowered, ``ir`` and ``hlo`` are jaxlib's MLIR bindings.
``tests/test_compat.py`` checks every private name on its own, so that a JAX release that moves one says which.

Supported: jax 0.10 to 0.12 (0.10.2 and 0.12.0.1 are tested).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import compiler, config, core, dispatch, distributed, effects, source_info_util, xla_metadata_lib
from jax._src import mesh as mesh_lib
from jax._src import shard_map as shard_map_lib
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import lax, parallel
from jax._src.lax.control_flow import loops
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect
from jax._src.lib.mlir.dialects import hlo, sdy
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax.experimental.xla_metadata import set_xla_metadata

__all__ = ["Hooks", "Lowering", "concrete_mesh", "func_dialect", "hlo", "install", "ir", "sdy", "uninstall"]

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

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
_NO_COMMUNICATION = {"preduced_p", "vary_unreduced_cast_p", "axis_index_p", "done_p"}


class Hooks(Protocol):
    """What a spanning axis changes in JAX; implemented by :mod:`jax_hetccl.spanning`."""

    def global_sizes(self, mesh: AnyMesh) -> Mapping[str, int]:
        """The sizes, over all clusters, of the axes of ``mesh`` that span."""
        ...

    def local_offset(self, mesh: AnyMesh, axis: str) -> int:
        """The global index of the own cluster's first rank along ``axis``; 0 if it does not span."""
        ...

    def spans(self, axis: object) -> bool:
        """Whether a collective over an axis of that name spans clusters here: not inside ``local()``."""
        ...

    def could_span(self, axis: object) -> bool:
        """Whether an axis of that name spans clusters outside of ``local()``."""
        ...

    def lower(
        self, op: str, lowering: Lowering, x: ir.Value, axes: tuple[str, ...], params: dict[str, Any]
    ) -> ir.Value:
        """Lowers a collective over ``axes``, one of which spans, in a fully manual region."""
        ...

    def refuse(self, op: str, axes: Sequence[object], why: str) -> None:
        """Raises the error for a collective that cannot span yet."""
        ...

    def cotangent(self, mesh: AnyMesh, axes: frozenset[str], mentioned: frozenset[str], check_vma: bool) -> float:
        """The factor for a cotangent that enters a shard_map from outside, or an error if it has no meaning."""
        ...

    def finish_module(self, module: ir.Module) -> None:
        """Orders the exchanges of a whole lowered program, in place."""
        ...

    def compiled(self, module: ir.Module) -> None:
        """Is told when XLA has compiled a program."""
        ...

    def lowering_failed(self, error: Exception) -> None:
        """Is told of a program that was not lowered here."""
        ...

    def compile_failed(self, module: ir.Module, error: Exception) -> None:
        """Is told of a program that XLA did not compile here; may raise a better error."""
        ...


# Our wrappers are no place in the user's program: JAX leaves their frames out of the locations it keeps.
source_info_util.register_exclusion(__file__)

_state = threading.local()
_undo: list[Callable[[], None]] = []
_stock_rules: dict[core.Primitive, Callable[..., Any]] = {}


def install(hooks: Hooks) -> None:
    """Puts ``hooks`` into JAX. One set at a time; :func:`uninstall` restores stock JAX exactly."""
    if _undo:
        raise RuntimeError("hooks are installed already")
    _replace(shard_map_lib, "_extend_axis_env", functools.partial(_extend_axis_env, hooks))
    _replace(mlir, "lower_jaxpr_to_module", _finishing(hooks, mlir.lower_jaxpr_to_module))
    _replace(core.AxisEnv, "axis_size", _axis_size(hooks, core.AxisEnv.axis_size))
    _replace(mlir, "wrap_xla_metadata_in_place", _without_local_mark(mlir.wrap_xla_metadata_in_place))
    _replace(compiler, "compile_or_get_cached", _reporting(hooks, compiler.compile_or_get_cached))
    _replace(loops, "_scan_known_hoisting", _not_of_communication(loops._scan_known_hoisting))
    transposes: Any = next(
        table
        for table in (getattr(ad, "fancy_transposes", {}), ad.primitive_transposes)
        if shard_map_lib.shard_map_p in table
    )
    _replace_item(
        transposes,
        shard_map_lib.shard_map_p,
        functools.partial(_transpose, hooks, transposes[shard_map_lib.shard_map_p]),
    )
    _replace(core.ShapedArray, "nospec", functools.partialmethod(_residual_spec, hooks, core.ShapedArray.nospec))
    for name in sorted(n for n in dir(parallel) if n.endswith("_p")):
        primitive = getattr(parallel, name)
        if not isinstance(primitive, core.Primitive) or name in _NO_COMMUNICATION:
            continue
        if name in DECOMPOSED:
            _wrap_lowering(primitive, functools.partial(_decomposed, hooks, primitive, DECOMPOSED[name]), False)
        else:
            _wrap_lowering(primitive, functools.partial(_refuse, hooks, name.removesuffix("_p")), True)
    _wrap_lowering(parallel.axis_index_p, functools.partial(_axis_index, hooks), False)
    _wrap_lowering(shard_map_lib.shard_map_p, functools.partial(_bounded_shard_map, hooks), True)


def uninstall() -> None:
    """Takes the hooks out again and drops every program that was traced with them."""
    while _undo:
        _undo.pop()()
    _stock_rules.clear()


def _replace(owner: Any, name: str, value: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, old))


def _replace_item(table: Any, key: Any, value: Any) -> None:
    old = table[key]
    table[key] = value
    _undo.append(lambda: table.__setitem__(key, old))


def _wrap_lowering(primitive: core.Primitive, wrapper: Callable[..., Any], cacheable: bool) -> None:
    """Registers ``wrapper(stock_rule, ctx, *args, **params)`` wherever the primitive has a lowering rule."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    platforms: list[str | None] = [None, *mlir._platform_specific_lowerings]
    for table, platform in zip(tables, platforms, strict=True):
        if primitive not in table:
            continue
        old = table[primitive]
        if platform is None:
            _stock_rules[primitive] = old.rule
        _undo.append(functools.partial(table.__setitem__, primitive, old))
        was_cacheable = primitive not in mlir._uncacheable_primitives
        mlir.register_lowering(
            primitive,
            functools.partial(wrapper, old.rule),
            platform=platform,
            inline=old.inline,
            cacheable=cacheable,
        )
        if was_cacheable and not cacheable:
            _undo.append(functools.partial(mlir._uncacheable_primitives.discard, primitive))


# --- tracing -----------------------------------------------------------------------------------------------------


def _extend_axis_env(hooks: Hooks, mesh: AnyMesh, manual: Any) -> Any:
    """Gives a spanning axis its global size while a shard_map's body is traced, transposed or lowered."""
    axes = set(manual) | set(mesh.manual_axes if isinstance(mesh, jax.sharding.AbstractMesh) else ())
    sizes = {name: size for name, size in mesh.shape.items() if name in axes}
    sizes.update((name, n) for name, n in hooks.global_sizes(mesh).items() if name in axes)
    return core.extend_axis_env_nd(list(sizes.items()))


# Equations keep the metadata in force when they were traced, through differentiation, batching and lowering. That is how
# a collective remembers that it was written inside `local()`.
_LOCAL = "hetccl_local"
_FRONTEND = "mhlo.frontend_attributes"


def local() -> Any:
    """Context manager: collectives traced inside mean the own cluster only."""
    return set_xla_metadata(**{_LOCAL: "true"})


def in_local() -> bool:
    """Whether the collective being traced, transposed or lowered was written inside :func:`local`."""
    return _LOCAL in (xla_metadata_lib.current_xla_metadata() or {})


def _axis_size(hooks: Hooks, stock: Callable[..., int]) -> Callable[..., int]:
    def axis_size(env: Any, name: Any) -> int:
        size = stock(env, name)
        if in_local() and hooks.could_span(name):
            return mesh_lib.get_abstract_mesh().shape.get(name, size)
        return size

    return axis_size


def _without_local_mark(stock: Callable[..., None]) -> Callable[..., None]:
    """Keeps the mark out of the program: what is local compiles to what stock JAX compiles it to."""

    def wrap_xla_metadata_in_place(ctx: Any, value: Any) -> None:
        stock(ctx, value)
        op = mlir._get_owner(value)
        if not isinstance(op, ir.Operation) or _FRONTEND not in op.attributes:
            return
        old = ir.DictAttr(op.attributes[_FRONTEND])
        kept = {a.name: a.attr for a in old if a.name != _LOCAL}
        if kept:
            op.attributes[_FRONTEND] = ir.DictAttr.get(kept)
        else:
            del op.attributes[_FRONTEND]

    return wrap_xla_metadata_in_place


def _transpose(hooks: Hooks, stock: Callable[..., Any], out_cts: Any, *args: Any, **params: Any) -> Any:
    mesh, check_vma, manual = params["mesh"], params["check_vma"], params["newly_manual_axes"]

    def enter(spec: Any, ct: Any) -> Any:
        if type(ct) is ad.Zero or getattr(ct, "dtype", None) == jax.dtypes.float0 or spec in _residual_specs.values():
            return ct
        mentioned = frozenset(a for part in _ct_spec(spec) if part is not None for a in _tuple(part))
        factor = hooks.cotangent(mesh, frozenset(manual), mentioned, check_vma)
        return ct if factor == 1 else ct * np.asarray(factor, ct.dtype)

    out_cts = [enter(spec, ct) for spec, ct in zip(params["out_specs"], out_cts, strict=True)]
    return stock(out_cts, *args, **params)


# The specs of residuals: like any other, but not the same object (JAX compares specs by identity).
_residual_specs: dict[Any, Any] = {}


def _residual_spec(aval: Any, hooks: Hooks, stock: Callable[..., Any], mesh: Any, check_vma: bool, names: Any) -> Any:
    """The spec that JAX gives a residual that it takes out of a shard_map on its own.

    It looks like that of a user's output sharded over all axes, but its cotangent comes from another shard_map of the
    same differentiation and has its global meaning.
    """
    spec = stock(aval, mesh, check_vma, names)
    if not any(hooks.spans(a) for a in mesh.axis_names):
        return spec
    if spec not in _residual_specs:
        twin = object.__new__(type(spec))
        for slot in type(spec).__slots__:
            if slot != "__weakref__":
                object.__setattr__(twin, slot, getattr(spec, slot))
        _residual_specs[spec] = twin
    return _residual_specs[spec]


def _ct_spec(spec: Any) -> tuple[Any, ...]:
    spec = spec.to_ct_spec() if hasattr(spec, "to_ct_spec") else spec
    return tuple(spec)


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


# --- lowering ----------------------------------------------------------------------------------------------------


class Lowering:
    """One equation that is being lowered inside a shard_map: what it works on, and how to emit operations for it."""

    def __init__(self, ctx: mlir.LoweringRuleContext, primitive: core.Primitive, stock: Callable[..., Any]):
        self._ctx, self._primitive, self._stock = ctx, primitive, stock
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

    def local_reduce(
        self, x: ir.Value, dtype: Any, axes: tuple[str, ...], groups: Sequence[Sequence[int]] | None = None
    ) -> ir.Value:
        """The stock reduction within the cluster; ``x`` has the equation's shape and the given dtype."""
        ctx = self._with(self._aval(self.shape, dtype), self._aval(self.shape, dtype))
        kw = {} if self._primitive is parallel.psum_invariant_p else {"axis_index_groups": groups}
        return self._one(self._stock(ctx, x, axes=axes, **kw))

    def local_reduce_scatter(
        self, op: str, x: ir.Value, elements: int, dtype: Any, axes: tuple[str, ...], size: int
    ) -> ir.Value:
        """Stock ``psum_scatter`` of a vector within the cluster, over ``size`` ranks; also for "pmax" and "pmin"."""
        ctx = self._with(self._aval((elements,), dtype), self._aval((elements // size,), dtype))
        params = dict(axis_name=axes, scatter_dimension=0, axis_index_groups=None, axis_size=size, tiled=True)
        reducer = {"psum": lax.add_p, "pmax": lax.max_p, "pmin": lax.min_p}[op]
        # The rule is a partial over the reducer; only the sum has a primitive of its own.
        return self._one(_stock_rule(parallel.reduce_scatter_p).func(reducer, ctx, x, **params))

    def local_all_gather(self, x: ir.Value, elements: int, dtype: Any, axes: tuple[str, ...], size: int) -> ir.Value:
        """Stock ``all_gather`` of a vector's pieces within the cluster; ``elements`` is the result's."""
        ctx = self._with(self._aval((elements // size,), dtype), self._aval((elements,), dtype))
        params = dict(axis_name=axes, all_gather_dimension=0, axis_index_groups=None, axis_size=size, tiled=True)
        return self._one(_stock_rule(parallel.all_gather_p)(ctx, x, **params))

    def local_all_to_all(self, x: ir.Value, shape: Sequence[int], dtype: Any, axes: tuple[str, ...]) -> ir.Value:
        """Stock ``all_to_all`` of rows within the cluster: row ``i`` goes to rank ``i``."""
        ctx = self._with(self._aval(shape, dtype), self._aval(shape, dtype))
        params = dict(axis_name=axes, split_axis=0, concat_axis=0, axis_index_groups=None, tiled=True)
        return self._one(_stock_rule(parallel.all_to_all_p)(ctx, x, **params))

    def local_permute(
        self, x: ir.Value, dtype: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]
    ) -> ir.Value:
        """Stock ``ppermute`` within the cluster."""
        if not pairs:
            return constant(np.zeros(self.shape, dtype))
        ctx = self._with(self._aval(self.shape, dtype), self._aval(self.shape, dtype))
        return self._one(_stock_rule(parallel.ppermute_p)(ctx, x, axis_name=axes, perm=tuple(pairs)))

    def pick(self, where: np.ndarray, yes: ir.Value, no: ir.Value, axes: tuple[str, ...]) -> ir.Value:
        """``yes`` on the ranks whose number within the cluster is set in ``where``, ``no`` on the others.

        The program is the same for all ranks: each looks its number up.
        """
        if where.all() or not where.any():
            return yes if where.all() else no
        index = constant(np.int32(0))
        for axis in axes:
            ctx = self._ctx.replace(primitive=None, avals_in=[], avals_out=None)
            (local,) = _stock_rule(parallel.axis_index_p)(ctx, axis_name=axis)
            size = constant(np.int32(self.mesh.shape[axis]))
            index = hlo.add(hlo.multiply(index, size), local)
        table = constant(where)
        mine = hlo.dynamic_slice(table, [index], [1])
        type_ = ir.RankedTensorType(yes.type)
        scalar = hlo.reshape(ir.RankedTensorType.get([], ir.IntegerType.get_signless(1)), mine)
        mask_type = ir.RankedTensorType.get(type_.shape, ir.IntegerType.get_signless(1))
        return hlo.select(hlo.broadcast_in_dim(mask_type, scalar, []), yes, no)

    def in_manual_region(self, x: ir.Value, params: dict[str, Any]) -> ir.Value:
        """Lowers the same equation again inside a nested shard_map over the axes that are not manual yet.

        A custom call in a partly manual region is refused by the partitioner; nested, every axis is manual. Operand
        and result keep their own sharding over the further axes where their types know it (explicit axes).
        """
        aval, out = self._in, self._out
        variant = {
            parallel.psum_invariant_p: parallel.psum_p,
            parallel.all_gather_invariant_p: parallel.all_gather_p,
        }.get(self._primitive)
        if variant is not None:  # inside, with check_vma off, there is no invariance to keep
            params = {**params, "axis_index_groups": None}
        body = functools.partial((variant or self._primitive).bind, **params)
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
        names = tuple(a for a in _tuple(part) if isinstance(a, str) and a not in manual) if part is not None else ()
        parts.append(names or None)
    return jax.sharding.PartitionSpec(*parts)


def _stock_rule(primitive: core.Primitive) -> Any:
    """A collective's stock rule, past the wrapper that :func:`install` put around it."""
    return _stock_rules.get(primitive) or mlir._lowerings[primitive].rule


def _decomposed(hooks: Hooks, primitive: Any, op: str, stock: Any, ctx: Any, x: Any, **params: Any) -> Any:
    axes = _tuple(params.get("axis_name", params.get("axes", ())))
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


def _refuse(hooks: Hooks, op: str, stock: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    axes = _tuple(params.get("axis_name", params.get("axes", ())))
    if any(hooks.spans(a) for a in axes) and isinstance(ctx.module_context.axis_context, SPMDAxisContext):
        hooks.refuse(op, axes, "")
    return stock(ctx, *args, **params)


def _axis_index(hooks: Hooks, stock: Any, ctx: Any, *, axis_name: Any) -> Any:
    """The stock index within the cluster plus the ranks of the clusters before it."""
    axis_context = ctx.module_context.axis_context
    # Under a partly manual mesh the stock rule binds this primitive again in a nested shard_map: add once, here.
    outermost = not getattr(_state, "in_axis_index", False)
    _state.in_axis_index = True
    try:
        (index,) = stock(ctx, axis_name=axis_name)
    finally:
        _state.in_axis_index = not outermost
    (axis,) = _tuple(axis_name)
    if outermost and hooks.spans(axis) and isinstance(axis_context, SPMDAxisContext):
        offset = hooks.local_offset(axis_context.mesh, axis)
        index = hlo.add(index, mlir.ir_constant(np.int32(offset))) if offset else index
    return [index]


def _bounded_shard_map(hooks: Hooks, stock: Any, ctx: Any, *args: Any, **params: Any) -> Any:
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


# --- primitives of our own ---------------------------------------------------------------------------------------


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


def _not_of_communication(stock: Callable[..., Any]) -> Callable[..., Any]:
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


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes along which a value's type says that it varies; empty with ``check_vma=False``."""
    return frozenset(core.typeof(x).manual_axis_type.varying)


def checks_vma() -> bool:
    """Whether the surrounding shard_map tracks along which axes values vary."""
    return bool(config._check_vma.value)


COLLECTIVE_CHANNEL, DEVICE_TO_DEVICE = mlir.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE

# Markers that the ordering pass reads and removes.
REGION_BEGIN, REGION_END = "hetccl_region_begin", "hetccl_region_end"
LOWERED_BEGIN, LOWERED_END = "hetccl_lowered_begin", "hetccl_lowered_end"
MARKERS = (REGION_BEGIN, REGION_END, LOWERED_BEGIN, LOWERED_END)


def custom_call(
    target: str,
    operands: Sequence[ir.Value],
    result_types: Sequence[ir.Type],
    attributes: Mapping[str, ir.Attribute],
    *,
    side_effect: bool,
    aliases: Mapping[int, int] | None = None,
) -> ir.Operation:
    """A typed-FFI custom call with row-major operands and results."""
    layouts = [list(range(ir.RankedTensorType(v.type).rank))[::-1] for v in operands]
    result_layouts = [list(range(ir.RankedTensorType(t).rank))[::-1] for t in result_types]
    op = mlir.custom_call(
        target,
        result_types=list(result_types),
        operands=list(operands),
        backend_config=dict(attributes),
        has_side_effect=side_effect,
        api_version=4,
        operand_output_aliases=dict(aliases or {}),
        operand_layouts=layouts,
        result_layouts=result_layouts,
    )
    return op.operation


def constant(value: np.ndarray | np.generic) -> ir.Value:
    """An IR constant."""
    return mlir.ir_constant(value)


def _finishing(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def lower_jaxpr_to_module(*args: Any, **kwargs: Any) -> Any:
        try:
            result = stock(*args, **kwargs)
            hooks.finish_module(result.module)
        except Exception as error:
            hooks.lowering_failed(error)
            raise
        return result

    return lower_jaxpr_to_module


def _reporting(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile_or_get_cached(backend: Any, module: ir.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            # Partitioners call back into tracing; what they trace is one device's, whatever mesh is in force here.
            with mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh):
                result = stock(backend, module, *args, **kwargs)
        except Exception as error:
            hooks.compile_failed(module, error)
            raise
        hooks.compiled(module)
        return result

    return compile_or_get_cached


# --- per-device programs at jit level ----------------------------------------------------------------------------

# Markers of the ordering pass: CHAIN_BEGIN stands for the chain at that place; CHAIN_END hands it on (first operand),
# and its further operands pass through.
CHAIN_BEGIN, CHAIN_END = "hetccl_chain_begin", "hetccl_chain_end"
PARTITIONED = "CustomSPMDPartitioning"

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


def on_one_device(fn: Callable[..., Any], label: str, results: int, *arrays: Any) -> list[Any]:
    """``fn(devices, *arrays)`` in a program of one device, known when it is lowered. The results are like the first
    ``results`` arrays."""
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
        return _stock_rule(parallel.axis_index_p)(ctx, axis_name=axis)
    if of == "pmax":
        return _stock_rule(parallel.pmax_p)(ctx, *args, axes=(axis,), axis_index_groups=None)
    params = dict(
        axis_name=(axis,), all_gather_dimension=0, axis_index_groups=groups, axis_size=len(groups[0]), tiled=True
    )
    return _stock_rule(parallel.all_gather_p)(ctx, *args, **params)


def _chain_begin_lowering(ctx: Any) -> Any:
    types = [mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])]
    return list(custom_call(CHAIN_BEGIN, [], types, {}, side_effect=True).results)


def _chain_end_lowering(ctx: Any, chain: Any, *arrays: Any, key: int) -> Any:
    attributes = {"plan": mlir.ir_attribute(np.uint64(key).astype(np.int64))}
    return list(
        custom_call(CHAIN_END, [chain, *arrays], [x.type for x in arrays], attributes, side_effect=True).results
    )


def _on_one_device_lowering(ctx: Any, *args: Any, fn: Any, label: str, results: int) -> Any:
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or tuple(jax.local_devices()[:1])
    if isinstance(context, SPMDAxisContext) or len(devices) != 1:
        raise NotImplementedError(f"{label}: stands inside a shard_map; use the lax collectives there")
    return mlir.lower_fun(functools.partial(fn, devices), multiple_results=True)(ctx, *args)


_chain_begin_p.def_abstract_eval(lambda: core.ShapedArray((4,), np.dtype(np.uint32)))
_chain_end_p.def_abstract_eval(lambda chain, *arrays, key: list(arrays))
_on_one_device_p.def_abstract_eval(lambda *arrays, fn, label, results: list(arrays[:results]))
_local_p.def_abstract_eval(_local_abstract)
mlir.register_lowering(_chain_begin_p, _chain_begin_lowering, cacheable=False)
mlir.register_lowering(_chain_end_p, _chain_end_lowering, cacheable=False)
mlir.register_lowering(_on_one_device_p, _on_one_device_lowering, cacheable=False)
mlir.register_lowering(_local_p, _local_lowering, cacheable=False)


# --- facts -------------------------------------------------------------------------------------------------------


def concrete_mesh() -> jax.sharding.Mesh | None:
    """The mesh that ``jax.set_mesh`` put in force, if any."""
    mesh = mesh_lib.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def removes_size_one_axes() -> bool:
    """Whether JAX drops axes of local size 1 from types, which would drop a one-device cluster's collectives."""
    return bool(config.remove_size_one_mesh_axis_from_type.value)


def uses_shardy() -> bool:
    """Whether programs are partitioned by Shardy; the ordering pass knows its regions only."""
    return bool(config.use_shardy_partitioner.value)


def abandon_distributed() -> None:
    """Takes ``jax.distributed`` out of the way of an end of this process whose cluster has lost a process.

    At exit JAX waits for all processes of the cluster, 100 s for a dead one, and then aborts. The objects are leaked on
    purpose: destroying them waits too.
    """
    state = distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        owned = getattr(state, name)
        if owned is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))
            setattr(state, name, None)
