"""Without jit, and in pmap.

The behaviour is what JAX's tests check: shard_map_test.py (every systematic case runs eagerly too; control flow, jvp,
custom rules, indices without jit) and pmap_test.py (all of it).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, LINEAR, PRIMITIVES, folded, on_ranks, op, table, values
from harness.case import OFF, Program, case
from harness.env import D, Env


def _eager(env: Env, f: Any, *shape: int, **more: Any) -> Program:
    return Program(on_ranks(env, f), (values(env, *shape, **more),), how="eager")


@case("conform", table=table(KINDS))
def eager(env: Env) -> Any:
    """The collective alone."""
    return _eager(env, op(env, env.params["op"]), 2 * env.size, 2)


@case("turn", table=table(tuple(k for k in PRIMITIVES if k in LINEAR)))
def eager_vjp(env: Env) -> Any:
    """Value and cotangent inside, without jit."""

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: jnp.sin(op(env, env.params["op"])(x)), x)
        return y, back(y * 2)[0]

    return _eager(env, f, 2 * env.size, 2)


@case("conform")
def eager_python_branch(env: Env) -> Any:
    """Python looks at a value that is the same everywhere."""

    def f(x: jax.Array) -> Any:
        return x if bool(lax.psum(jnp.sum(x) * 0 + 1, D) < 0) else -x

    if env.vma:
        return _eager(env, f, 3)
    # Without types stock JAX does not know that the ranks agree, and keeps the value of each.
    return _eager(env, lambda x: -x + lax.psum(jnp.sum(x) * 0, D), 3)


@case("conform")
def eager_with_inner_functions(env: Env) -> Any:
    """jit, scan and checkpoint inside of an eager region."""
    g = folded(op(env, "ppermute"))
    h = jax.jit(g)

    def f(x: jax.Array) -> Any:
        return h(x), lax.scan(lambda c, t: (g(c * t), None), x, jnp.arange(3.0))[0], jax.checkpoint(g)(x)

    return _eager(env, f, 2 * env.size, 2)


@case("conform")
def eager_gradient_outside(env: Env) -> Any:
    """grad around the region, without jit."""
    f = env.smap(lambda w, x: lax.pmean(jnp.mean(jnp.sin(lax.psum(x[0] * w, D))), D), (P(), P(D)), P())
    return Program(jax.value_and_grad(f, (0, 1)), (env.weights(2), values(env, 4, 2)), how="eager")


@case("conform")
def disabled_jit(env: Env) -> Any:
    """With jit switched off."""

    def f(x: jax.Array) -> Any:
        with jax.disable_jit():
            return on_ranks(env, lambda x: lax.psum(x, D) + lax.axis_index(D))(x)

    return Program(f, (values(env, 3),), how="eager")


# --- pmap: it has no check_vma; its mesh is that of all devices along one axis -----------------------------------


def _mapped(env: Env, f: Any, *shape: int, wrap: Any = lambda f: f, dtype: str = "float32", **more: Any) -> Program:
    """pmap of ``f`` over arrays with a leading dimension of this cluster's devices."""
    every = np.random.default_rng(0).integers(-4, 4, (env.size, *shape))
    x = every[env.first : env.first + env.count].astype(dtype)
    return Program(wrap(jax.pmap(f, axis_name=D, devices=list(env.mesh.devices.flat), **more)), (x,), how="eager")


@case("conform", vma=OFF, table=table(KINDS))
def pmap(env: Env) -> Any:
    """Every collective."""
    return _mapped(env, op(env, env.params["op"]), 2 * env.size, 2)


@case("turn", vma=OFF, table=table(PRIMITIVES))
def pmap_of_vmap(env: Env) -> Any:
    """Batched inside."""
    return _mapped(env, jax.vmap(op(env, env.params["op"]), 1, 1), 2 * env.size, 3)


@case("turn", vma=OFF, table=table(("psum", "pmean", "pmax", "pmin")))
def pmap_and_vmap(env: Env) -> Any:
    """Reductions over the mapped and the vmapped axis together."""
    f = jax.vmap(lambda v: v + getattr(lax, env.params["op"])(v, (D, "v")), axis_name="v")
    return _mapped(env, f, 3, 2)


@case("turn", vma=OFF, table=table(tuple(k for k in PRIMITIVES if k in LINEAR)))
def pmap_gradient(env: Env) -> Any:
    """grad inside."""
    g = op(env, env.params["op"])
    return _mapped(env, jax.grad(lambda x: jnp.sum(jnp.sin(g(x)) * x[0])), 2 * env.size)


@case("conform", vma=OFF)
def pmap_index(env: Env) -> Any:
    """Indices and sizes, also in a loop."""

    def f(x: jax.Array) -> Any:
        c, _ = lax.scan(lambda c, t: (c + t + lax.axis_index(D), None), x[0], x)
        return c, x + lax.axis_index(D), jnp.int32(lax.axis_size(D))

    return _mapped(env, f, 4, dtype="int32")


@case("conform", vma=OFF)
def pmap_booleans(env: Env) -> Any:
    """Sums and means of booleans."""
    return _mapped(env, lambda x: (lax.psum(x > 0, D), lax.pmean(x > 0, D), lax.all_gather(x > 0, D)), 3)


@case("conform", vma=OFF)
def pmap_jitted_inside(env: Env) -> Any:
    """jit inside of pmap."""
    h = jax.jit(lambda x: lax.psum(x, D) * 2)
    return _mapped(env, lambda x: h(x) + h(x + 1), 3)
