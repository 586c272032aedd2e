"""First runs of programs, which load what they launch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jax_hetccl._compat.hooks import Hooks


def first_runs_apart(hooks: Hooks, stock: Callable[..., Any]) -> Callable[..., Any]:
    """``pxla.ExecuteReplicated.__call__`` whose first run of each program ends inside of a section.

    JAX comes here for the first run of everything that it runs, before its C++ path takes over. Clients may launch in
    the background, so that only a result says that all has been launched, and thereby loaded.
    """
    loaded: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(stock)
    def run(self: Any, *args: Any) -> Any:
        if self in loaded:
            return stock(self, *args)
        section = hooks.loading(self._local_devices)
        if section is None:
            loaded.add(self)
            return stock(self, *args)
        with section:
            results = stock(self, *args)
            _await(results)
        loaded.add(self)
        return results

    return run


def _await(results: Any) -> None:
    """Waits for the end of a program. What went wrong in it is raised where its results are used, as ever."""
    arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
    try:
        if arrays:
            jax.block_until_ready(arrays)
        else:  # it is run for its effects
            jax.effects_barrier()
    except Exception:
        return
