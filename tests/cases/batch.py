"""Cases that return a `Program`, put together into one; see `harness.batches`."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from harness.case import CASES, Program, case
from harness.env import Env

# LLVM takes most of the time; what XLA does before it is the same.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@case("batch", limit_s=120)
def together(env: Env) -> Any:
    """All cases named: as one program where they allow it."""
    programs: dict[str, Program] = {}
    results: dict[str, Any] = {}  # of cases that run several programs, or none
    for name in env.params["cases"]:
        importlib.import_module("cases." + name.split(".")[0])
        found = CASES[name].run(env.given(CASES[name].params))
        (programs if isinstance(found, Program) else results)[name] = found
    args = {name: p.args for name, p in programs.items() if p.how == "together"}
    together = jax.jit(lambda args: {name: programs[name].fn(*args[name]) for name in args}, compiler_options=_QUICK)
    return results | together(args) | {name: p.result() for name, p in programs.items() if p.how != "together"}
