"""Programs without communication: tests of the harness itself run them on clusters that share nothing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import DATA_MODEL, MeshSpec, case
from harness.env import D, Env, M


@case("alone")
def rows(env: Env) -> Any:
    """Sharded rows and a replicated array."""
    return {"x": jax.jit(lambda x: x * 2)(env.rows()), "w": env.weights(3)}


@case("alone", mesh=DATA_MODEL)
def grid(env: Env) -> Any:
    """Both axes, each alone, and one dimension over both."""
    value = np.arange(env.size * 4 * 6, dtype=np.float32).reshape(-1, 6)
    return [env.put(value, spec) for spec in (P(D, M), P(D), P(None, M), P((D, M)), P((M, D)), P())]


@case("alone", mesh=MeshSpec(("model", "data"), (("model", 2),)))
def grid_transposed(env: Env) -> Any:
    """The spanning axis as the minor one."""
    value = np.arange(env.size * 4 * 6, dtype=np.float32).reshape(-1, 6)
    return [env.put(value, spec) for spec in (P(D, M), P((M, D)), P((D, M)))]


@case("alone")
def wrong_value(env: Env) -> Any:
    """A value that depends on the cluster, where the oracle has another."""
    return env.same(np.full(3, env.first + (0 if env.oracle else 1), np.float32))


@case("alone")
def wrong_replica(env: Env) -> Any:
    """Within tolerance of the oracle, but not the same bits everywhere."""
    return env.same(np.float32(1 + (1e-6 if env.first else 0)))


@case("alone", refused="UnsupportedError", says=("psum",))
def never_refuses(env: Env) -> Any:
    """Marked as refused, but accepted."""
    return env.rows()


@case("alone")
def raises_in_one_cluster(env: Env) -> Any:
    """Raises where the first rank is not zero."""
    if env.first:
        raise ValueError("not here")
    return env.rows()


@case("alone", limit_s=1.0)
def hangs(env: Env) -> Any:
    """Never ends outside the oracle."""
    import time

    if not env.oracle:
        time.sleep(3600)
    return env.rows()


@case("alone")
def dies(env: Env) -> Any:
    """Ends its process outside the oracle."""
    import os

    if not env.oracle:
        os._exit(7)
    return env.rows()
