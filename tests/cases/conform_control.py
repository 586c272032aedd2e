"""Every collective in loops, branches, nested functions, and all of these inside each other.

The behaviour is what JAX's tests check: shard_map_test.py (scan, while, cond and switch with replicated and varying
values, rematerialisation, nested jit, custom rules) and pmap_test.py (indices in loops, rematerialisation, loops in
jit in pmap). The collectives are made into maps of a shape onto itself, see `cases.kinds.folded`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, PRIMITIVES, Op, each, folded, op, table, values
from harness.case import Program, case
from harness.env import D, Env


def _folded(env: Env) -> Op:
    return folded(op(env, env.params["op"]))


@case("turn", table=table(KINDS))
def scan(env: Env) -> Any:
    """In every step, with an output for every step; reversed and unrolled."""
    g = _folded(env)

    def f(x: jax.Array) -> Any:
        forward = lax.scan(lambda c, t: (g(c * t), jnp.sum(c)), x, jnp.arange(1.0, 4.0))
        backward = lax.scan(lambda c, t: (g(c + t), c[0]), x, jnp.arange(3.0), reverse=True, unroll=2)
        return forward, backward

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def fori(env: Env) -> Any:
    """A loop of fixed length, with its counter."""
    g = _folded(env)
    return each(env, lambda x: lax.fori_loop(0, 3, lambda i, c: g(c + i), x), 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def while_body(env: Env) -> Any:
    """A loop that ends by a value that all ranks know."""
    g = _folded(env)

    def f(x: jax.Array) -> Any:
        def more(c: Any) -> jax.Array:
            return c[1] < 3

        return lax.while_loop(more, lambda c: (g(c[0]), c[1] + 1), (x, lax.pmin(jnp.int32(x[0, 0] * 0), D)))

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def while_predicate(env: Env) -> Any:
    """The collective decides whether the loop goes on, on all ranks alike."""

    def f(x: jax.Array) -> Any:
        def more(c: Any) -> jax.Array:
            return lax.pmax(jnp.sum(jnp.abs(op(env, env.params["op"])(c))), D) > 0.25

        return lax.while_loop(more, lambda c: c * 0.25, x)

    return each(env, f, 2 * env.size, 2)


@case("conform", table=table(KINDS))
def cond(env: Env) -> Any:
    """In one branch, taken and not taken; the predicate is the same everywhere."""
    g = _folded(env)

    def f(k: jax.Array, x: jax.Array) -> Any:
        taken = lax.cond(k > 0, g, lambda c: c + 1, x[0])
        missed = lax.cond(k < 0, g, lambda c: c + 1, x[0])
        return taken[None], missed[None]

    return Program(env.smap(f, (P(), P(D)), P(D)), (env.same(np.int32(1)), values(env, 2 * env.size, 2)))


@case("turn", table=table(PRIMITIVES))
def switch(env: Env) -> Any:
    """Branches with none, one and two of them."""
    g = _folded(env)

    def f(x: jax.Array) -> Any:
        branches = (lambda c: c + 1, g, lambda c: g(g(c) + 1))
        top = lax.pmax(jnp.int32(1), D)
        return [lax.switch(top + k, branches, x) for k in (-1, 0, 1)]

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def inner_functions(env: Env) -> Any:
    """jit, inlined and not, checkpoint and map, of one function that is used several times."""
    g = jax.jit(_folded(env))

    def f(x: jax.Array) -> Any:
        inline = jax.jit(lambda c: g(c) + 1, inline=True)
        return g(x), inline(x), jax.checkpoint(g)(x + 1), lax.map(g, jnp.stack([x, x * 2]))

    return each(env, f, 2 * env.size, 2)


@case("conform", table=table(KINDS))
def nested(env: Env) -> Any:
    """A function in a checkpoint in a branch in a loop in a loop, beside the same collective on every level.

    Nothing but the order of the program connects the levels, so every cluster must find the same one.
    """
    g = _folded(env)

    def f(x: jax.Array) -> Any:
        h = jax.checkpoint(jax.jit(lambda c: g(c + 1)))

        def inner(c: Any) -> Any:
            return lax.cond(lax.pmax(jnp.sum(c[0]), D) < 1e9, lambda t: h(t) + g(x), lambda t: t, c[0]), c[1] + 1

        def outer(c: jax.Array, t: jax.Array) -> Any:
            beside = jnp.sum(g(x * t))
            zero = lax.pmin(jnp.int32(x[0, 0] * 0), D)
            return lax.while_loop(lambda c: c[1] < 2, inner, (c, zero))[0] * 0.125, beside

        before = jnp.sum(g(x * 3))
        return lax.scan(outer, x, jnp.arange(2.0)), before, jnp.sum(h(x * 5))

    return each(env, f, 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def regions_in_loops(env: Env) -> Any:
    """Whole regions in loops and branches outside, beside one that is in none."""
    g = env.smap(lambda x: _folded(env)(x[0])[None], P(D), P(D))
    # XLA chooses how the result of a loop is sharded, and for GPUs not as for CPU devices.
    sharded = env.smap(lambda y: y, P(D), P(D))

    def f(x: jax.Array, k: jax.Array) -> Any:
        a, _ = lax.scan(lambda c, _: (g(c), None), x, None, length=2)
        b = lax.cond(k > 0, lambda x: g(x + 1), lambda x: x, x)
        c, _ = lax.while_loop(lambda c: c[1] < 2, lambda c: (g(c[0]), c[1] + 1), (x, 0))
        return sharded(a), sharded(b), sharded(c), g(x * 2)

    return Program(f, (values(env, 2 * env.size, 2), env.same(np.int32(1))))


# --- who am I ----------------------------------------------------------------------------------------------------


@case("conform", "main")
def index_and_size(env: Env) -> Any:
    """The index has lax's dtype, the size is a Python number."""

    def f(x: jax.Array) -> Any:
        n = lax.axis_size(D)
        assert isinstance(n, int)
        return x + lax.axis_index(D), jnp.full(n, lax.axis_index((D,))), lax.axis_size((D,)) + jnp.int32(0)

    return each(env, f, 3, dtype="int32")


@case("conform")
def index_in_loops(env: Env) -> Any:
    """In a scan's body, in a checkpoint, in both branches of a cond that ranks take differently."""

    def f(x: jax.Array) -> Any:
        c, _ = lax.scan(lambda c, t: (c + t + lax.axis_index(D), None), x[0], x)
        own = lax.cond(lax.axis_index(D) % 2 == 0, lambda c: c + lax.axis_index(D), lambda c: -c, c)
        return c, own, jax.checkpoint(lambda c: c * lax.axis_index(D))(c)

    return each(env, f, 5, dtype="int32")


@case("conform")
def own_row(env: Env) -> Any:
    """The index picks rows, also of a gather."""

    def f(x: jax.Array) -> Any:
        everyone = lax.all_gather(x, D)
        i = lax.axis_index(D)
        return lax.dynamic_index_in_dim(everyone, i), everyone[i], jnp.zeros(env.size).at[i].set(1)

    return each(env, f, 3)


@case("conform")
def index_of_gradient(env: Env) -> Any:
    """grad through a product with the index."""
    return each(env, jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x * lax.axis_index(D)) + lax.psum(x, D))), 3)
