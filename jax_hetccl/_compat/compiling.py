"""While JAX lowers and compiles a whole program: it is finished, and what went wrong is told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import mesh as mesh_lib
from jax._src.lib.mlir import ir

from jax_hetccl._compat.hooks import Hooks


def finishing(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Lowering of a whole program, finished by the hooks."""

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


def reporting(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Compilation of a whole program, of which the hooks are told."""

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
