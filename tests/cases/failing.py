"""Programs for tests of failures. What each cluster runs, and whether its peer runs anything, the test decides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, folded, op
from harness.case import OFF, case
from harness.env import D, Env


def _data(env: Env, cols: int, dtype: str = "float32") -> jax.Array:
    return env.put(np.ones((env.size, cols), dtype), P(D))


_VARIANTS = {
    "psum f32[4]": {"op": "psum", "cols": 4, "dtype": "float32"},
    "psum f32[8]": {"op": "psum", "cols": 8, "dtype": "float32"},
    "psum i32[4]": {"op": "psum", "cols": 4, "dtype": "int32"},
    "pmax f32[4]": {"op": "pmax", "cols": 4, "dtype": "float32"},
    "psum f32[2M]": {"op": "psum", "cols": 2 << 20, "dtype": "float32"},
}


@case("failing", vma=OFF, table=_VARIANTS)
def one(env: Env) -> Any:
    """One reduction, then work that depends on it, on every device."""
    op = getattr(env.api, env.params["op"])
    f = env.smap(lambda x: (x + op(x, D), op(x, D)[:, :1] * 2), P(D), (P(D), P()))
    return jax.jit(f)(_data(env, env.params["cols"], env.params["dtype"]))


@case("failing", vma=OFF, limit_s=50)
def endless(env: Env) -> Any:
    """Large transfers until something fails; a bound of some 40 s of them."""
    f = jax.jit(env.smap(lambda x, c: env.psum(x, D) * 0.5 + c * 0.5, (P(D), P()), P()))
    x, c = _data(env, 2 << 20), env.same(np.zeros((1, 2 << 20), np.float32))
    for i in range(2000):
        c = f(x, c)
        if i % 4 == 3:
            try:
                c.block_until_ready()
            except jax.errors.JaxRuntimeError:
                return c
    raise AssertionError("nothing failed")


@case("failing", vma=OFF, limit_s=50)
def endless_loop_on_device(env: Env) -> Any:
    """One program with a very long loop of small integer exchanges: poison is 0, so the loop itself must end it."""

    def f(x: jax.Array) -> Any:
        i = x.astype(jnp.int32)
        return lax.fori_loop(0, 1_000_000_000, lambda _, c: env.psum(i, D) + c * 0, i * 0)

    return jax.jit(env.smap(f, P(D), P(D)))(_data(env, 4))


@case("failing", vma=OFF, table={"left": {"k": 0}, "right": {"k": 1}})
def divergent_cond(env: Env) -> Any:
    """A predicate that differs between clusters: one runs psum, the other pmax."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        return lax.cond(k > 0, lambda t: env.pmax(t, D), lambda t: env.psum(t, D), x)

    return jax.jit(env.smap(f, (P(D), P()), P()))(_data(env, 4), env.same(np.int32(env.params["k"])))


_SIDES = {"takes": 1, "leaves": 0}


@case("failing", vma=OFF, table={f"{o} {s}": {"op": o, "k": k} for o in KINDS for s, k in _SIDES.items()})
def one_sided(env: Env) -> Any:
    """A collective in a branch that only one cluster takes, then a sum of integers in both."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        y = lax.cond(k > 0, folded(op(env, env.params["op"])), lambda t: t, x[0])
        return lax.psum(jnp.sum(y).astype(jnp.int32), D)[None], y[None]

    x = env.put(np.ones((env.size, 2 * env.size, 2), np.float32), P(D))
    return jax.jit(env.smap(f, (P(D), P()), P(D)))(x, env.same(np.int32(env.params["k"])))


@case("failing", vma=OFF, table={"left": {"n": 3}, "right": {"n": 5}})
def divergent_loop(env: Env) -> Any:
    """A loop that is longer in one cluster, then another exchange."""

    def f(x: jax.Array, n: jax.Array) -> Any:
        c = lax.fori_loop(0, n, lambda i, c: env.psum(x, D) + c, x * 0)
        return env.pmax(jnp.sum(c), D)

    return jax.jit(env.smap(f, (P(D), P()), P()))(_data(env, 4), env.same(np.int32(env.params["n"])))


@case("failing", vma=OFF, table={"left": {"first": "psum"}, "right": {"first": "pmax"}})
def swapped(env: Env) -> Any:
    """The same two reductions in another order."""

    def f(x: jax.Array) -> Any:
        if env.params["first"] == "psum":
            a = env.psum(x, D)
            return a, env.pmax(x, D)
        b = env.pmax(x, D)
        return env.psum(x, D), b

    return jax.jit(env.smap(f, P(D), P()))(_data(env, 4))


@case("failing", vma=OFF, table={"good": {"bad": 0}, "bad": {"bad": 1}})
def compile_error(env: Env) -> Any:
    """One cluster cannot compile its program."""

    def f(x: jax.Array) -> Any:
        y = env.psum(x, D)
        if env.params["bad"]:
            y = y + jax.lax.psum(x.astype(jnp.int2), D).astype(x.dtype)  # XLA's all-reduce refuses two-bit integers
        return y

    return jax.jit(env.smap(f, P(D), P()))(_data(env, 4))


@case("failing", vma=OFF, table={"good": {"bad": 0}, "bad": {"bad": 1}})
def lowering_error(env: Env) -> Any:
    """One cluster cannot lower its program: JAX has no such rule for its platform."""
    import jax_hetccl

    def f(x: jax.Array) -> Any:
        y = env.psum(x, D)
        if env.params["bad"]:
            with jax_hetccl.local():
                y = y + lax.pbroadcast(x, (D,), 0)
        return y

    return jax.jit(env.smap(f, P(D), P()))(_data(env, 4))
