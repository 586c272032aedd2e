"""While JAX traces: global sizes of spanning axes, and ``local()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import core, xla_metadata_lib
from jax._src import mesh as mesh_lib
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental.xla_metadata import set_xla_metadata

from jax_hetccl._compat.base import AnyMesh
from jax_hetccl._compat.hooks import Hooks


def extend_axis_env(hooks: Hooks, mesh: AnyMesh, manual: Any) -> Any:
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


def axis_size_rule(hooks: Hooks, stock: Callable[..., int]) -> Callable[..., int]:
    """A spanning axis has its local size for what was written inside :func:`local`."""

    def axis_size(env: Any, name: Any) -> int:
        size = stock(env, name)
        if in_local() and hooks.could_span(name):
            return mesh_lib.get_abstract_mesh().shape.get(name, size)
        return size

    return axis_size


def without_local_mark(stock: Callable[..., None]) -> Callable[..., None]:
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
