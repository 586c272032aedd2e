"""While JAX lowers and compiles a whole program: it is finished, and what went wrong is told."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from jax._src import compiler
from jax._src import mesh as mesh_lib
from jax._src.lib.mlir import ir

from jax_hetccl._compat.hooks import Hooks


def finishing(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Lowering of a whole program, finished by the hooks."""

    @functools.wraps(stock)
    def lower_jaxpr_to_module(*args: Any, **kwargs: Any) -> Any:
        hooks.lowering_begins()
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
    def compile_or_get_cached(
        backend: Any, module: ir.Module, devices: Any, options: Any, callbacks: Any, on: Any, *more: Any, **kwargs: Any
    ) -> Any:
        def run(compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                # Partitioners call back into tracing; what they trace is one device's, whatever mesh is in force here.
                # Autotuning allocates, loads and runs kernels.
                with (
                    mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh),
                    hooks.loading(devices.flat) or contextlib.nullcontext(),
                ):
                    return compile_(backend, module, *args, **kwargs)
            except Exception as error:
                hooks.compile_failed(module, error)
                raise

        result = run(stock, devices, options, callbacks, on, *more, **kwargs)
        if not hooks.compiled(module):
            result = run(compiler.backend_compile_and_load, on, options, callbacks)
            if not hooks.compiled(module):
                raise RuntimeError("the partitioner did not ask for the layouts of this program's syncs")
        return result

    return compile_or_get_cached
