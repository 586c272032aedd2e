"""First runs of programs, which load what they launch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
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
            _await([results, _updated(self, args)])
        loaded.add(self)
        return results

    return run


def _updated(program: Any, args: Sequence[Any]) -> list[Any]:
    """The buffers of the Refs that a program has written, which are no results of its."""
    if program.mut is None:
        return []
    kept = [x for i, x in enumerate(args) if i in program.kept_var_idx]
    refs = [*kept, *program.mut.in_mut]
    return [refs[i]._refs._buf for i in program.mut.out_mut if i is not None]


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
