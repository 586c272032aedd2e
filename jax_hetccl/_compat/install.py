"""The places in JAX where a spanning axis is hooked in."""

from __future__ import annotations

import functools
from typing import Any

from jax._src import compiler, core
from jax._src import shard_map as shard_map_lib
from jax._src.interpreters import ad, mlir, pxla
from jax._src.lax import parallel
from jax._src.lax.control_flow import loops

from jax_hetccl._compat import collectives, compiling, differentiation, loading, tracing
from jax_hetccl._compat.communication import not_of_communication
from jax_hetccl._compat.hooks import Hooks
from jax_hetccl._compat.patches import patched, replace, replace_item, undo_all, wrap_lowering


def install(hooks: Hooks) -> None:
    """Puts ``hooks`` into JAX. One set at a time; :func:`uninstall` restores stock JAX exactly."""
    if patched():
        raise RuntimeError("hooks are installed already")
    replace(shard_map_lib, "_extend_axis_env", functools.partial(tracing.extend_axis_env, hooks))
    replace(mlir, "lower_jaxpr_to_module", compiling.finishing(hooks, mlir.lower_jaxpr_to_module))
    replace(core.AxisEnv, "axis_size", tracing.axis_size_rule(hooks, core.AxisEnv.axis_size))
    replace(mlir, "wrap_xla_metadata_in_place", tracing.without_local_mark(mlir.wrap_xla_metadata_in_place))
    replace(compiler, "compile_or_get_cached", compiling.reporting(hooks, compiler.compile_or_get_cached))
    run = pxla.ExecuteReplicated.__call__
    replace(pxla.ExecuteReplicated, "__call__", loading.first_runs_apart(hooks, run))
    replace(loops, "_scan_known_hoisting", not_of_communication(loops._scan_known_hoisting))
    transposes: Any = next(
        table
        for table in (getattr(ad, "fancy_transposes", {}), ad.primitive_transposes)
        if shard_map_lib.shard_map_p in table
    )
    replace_item(
        transposes,
        shard_map_lib.shard_map_p,
        functools.partial(differentiation.transpose, hooks, transposes[shard_map_lib.shard_map_p]),
    )
    replace(
        core.ShapedArray,
        "nospec",
        functools.partialmethod(differentiation.residual_spec, hooks, core.ShapedArray.nospec),
    )
    for name in sorted(n for n in dir(parallel) if n.endswith("_p")):
        primitive = getattr(parallel, name)
        if not isinstance(primitive, core.Primitive) or name in collectives.NO_COMMUNICATION:
            continue
        if op := collectives.DECOMPOSED.get(name):
            wrap_lowering(
                primitive, functools.partial(collectives.decomposed, hooks, primitive, op), False, everywhere=True
            )
        elif name == "pbroadcast_dynamic_p":  # not in jax 0.10
            wrap_lowering(primitive, functools.partial(collectives.broadcast_from_any, hooks), False, everywhere=True)
        else:
            wrap_lowering(primitive, functools.partial(collectives.refuse, hooks, name.removesuffix("_p")), True)
    wrap_lowering(parallel.axis_index_p, functools.partial(collectives.axis_index, hooks), False)
    wrap_lowering(shard_map_lib.shard_map_p, functools.partial(collectives.bounded_shard_map, hooks), True)


def uninstall() -> None:
    """Takes the hooks out again and drops every program that was traced with them."""
    undo_all()
