"""vmap, loops, branches, nested jit, and the ways to compile and call a program."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import OFF, ON, Program, case
from harness.env import D, Env


@case("core", exact=True, table={op: {"op": op} for op in ("psum", "pmean", "pmax", "pmin")})
def vmap(env: Env) -> Any:
    """Batched over the columns."""
    op = getattr(env.api, env.params["op"])
    return Program(env.smap(lambda x: jax.vmap(lambda y: op(y, D), in_axes=1, out_axes=1)(x), P(D), P()), (env.rows(),))


@case("core", exact=True)
def vmap_nested_and_partly(env: Env) -> Any:
    """Two levels of vmap; one operand not batched; a pytree."""

    def f(x: jax.Array) -> Any:
        return jax.vmap(jax.vmap(lambda a, b: env.psum((a * b, b), D), (0, None)), (None, 0))(x, x[0])

    return Program(env.smap(f, P(D), P()), (env.rows(),))


# With vma types lax itself refuses a tuple of a vmapped and a manual axis.
@case("core", exact=True, table={"typed": {"vma": ON, "rejects": ON}, "untyped": {"vma": OFF}})
def vmap_named_axis(env: Env) -> Any:
    """psum over a vmapped axis and the spanning axis together."""

    def f(x: jax.Array) -> Any:
        return jax.vmap(lambda v: (env.psum(v, (D, "v")), lax.psum(v, "v"), env.psum(v, ("v", D))), axis_name="v")(x)

    return Program(env.smap(f, P(D), (P(), P(D), P())), (env.rows(),))


@case("core", exact=True)
def vmap_index(env: Env) -> Any:
    """axis_index in a batched function."""

    def f(x: jax.Array) -> Any:
        return jax.vmap(lambda v: v + env.axis_index(D) * env.axis_size(D))(x)

    return Program(env.smap(f, P(D), P(D)), (env.rows(),))


@case("core", exact=True)
def vmap_outside(env: Env) -> Any:
    """vmap of the whole shard_map."""
    f = env.smap(lambda x, w: env.psum(x * w, D), (P(D), P()), P())
    return Program(jax.vmap(f, (None, 0)), (env.rows(), env.weights(3, 6)))


@case("core", "smoke")
def scan(env: Env) -> Any:
    """A psum of the carry in every step."""

    def f(x: jax.Array) -> Any:
        def body(c: jax.Array, t: jax.Array) -> Any:
            s = env.psum(jnp.sum(x) * t + c, D) * 0.125
            return s, s * 2

        return lax.scan(body, jnp.float32(1), jnp.arange(5.0))

    return Program(env.smap(f, P(D), (P(), P())), (env.rows(),))


@case("core", exact=True)
def scan_integers(env: Env) -> Any:
    """Integer carry, unrolled and reversed."""

    def f(x: jax.Array) -> Any:
        def body(c: jax.Array, t: jax.Array) -> Any:
            return c + env.psum(t.astype(jnp.int32), D), c

        zero = jnp.zeros(6, jnp.int32)
        return (
            lax.scan(body, zero, x, unroll=2),
            lax.scan(body, zero, x, reverse=True),
            lax.scan(body, zero, x[:1]),
        )

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", exact=True)
def scan_nested(env: Env) -> Any:
    """A scan in a scan, exchanges on both levels."""

    def f(x: jax.Array) -> Any:
        def outer(c: jax.Array, t: jax.Array) -> Any:
            inner, _ = lax.scan(lambda d, u: (d + env.psum(x[0] * u, D), None), c, jnp.arange(3.0))
            return env.pmax(inner, D) * 0.5 + t, None

        return lax.scan(outer, jnp.zeros(6), jnp.arange(2.0))[0]

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core")
def fori_loop(env: Env) -> Any:
    """A loop of fixed length."""

    def f(x: jax.Array) -> Any:
        return lax.fori_loop(0, 6, lambda i, c: c * 0.5 + env.pmean(x * i, D), jnp.zeros((4, 6)))

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", "smoke")
def while_body(env: Env) -> Any:
    """A loop whose length depends on the exchanged values."""

    def f(x: jax.Array) -> Any:
        total = env.psum(jnp.sum(jnp.abs(x)), D)

        def body(c: Any) -> Any:
            return c[0] + env.psum(jnp.sum(jnp.abs(x)), D), c[1] + 1

        return lax.while_loop(lambda c: c[0] < total * 7.5, body, (total, jnp.int32(0)))

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", "smoke")
def while_predicate(env: Env) -> Any:
    """A psum in the predicate, and one in the body."""

    def f(x: jax.Array) -> Any:
        top = env.psum(jnp.sum(jnp.abs(x)), D)

        def more(c: jax.Array) -> jax.Array:
            return env.psum(jnp.sum(jnp.abs(x)), D) * c < top * 9.5

        return lax.while_loop(more, lambda c: c + env.psum(x[0, 0] * 0 + 1, D) / env.size, jnp.float32(1))

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", exact=True)
def while_predicate_only(env: Env) -> Any:
    """The predicate alone communicates; no trip at all, and some trips."""

    def f(x: jax.Array) -> Any:
        def run(start: int) -> jax.Array:
            return lax.while_loop(lambda c: env.pmax(jnp.abs(x[0, 0]), D) + c < 5, lambda c: c + 1, jnp.float32(start))

        return run(0), run(9)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", "smoke", exact=True)
def cond(env: Env) -> Any:
    """Different reductions in the branches, the same predicate everywhere."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        return lax.cond(k > 1, lambda y: env.pmean(y, D), lambda y: env.psum(y * 2, D), x)

    g = jax.jit(env.smap(f, (P(D), P()), P()))
    return [g(env.rows(), env.same(np.int32(k))) for k in (0, 2)]


@case("core", exact=True)
def cond_one_side(env: Env) -> Any:
    """Only one branch communicates; an exchange follows."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        y = lax.cond(k > 1, lambda y: env.psum(y, D), lambda y: jnp.zeros((4, 6)), x)
        return y, env.psum(x[0], D)

    g = jax.jit(env.smap(f, (P(D), P()), P()))
    return [g(env.rows(), env.same(np.int32(k))) for k in (0, 2, 0)]


@case("core", exact=True)
def switch(env: Env) -> Any:
    """Three branches: with no, one and two exchanges."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        branches = (
            lambda y: jnp.ones(6),
            lambda y: env.psum(y[0], D),
            lambda y: env.psum(y[0], D) + env.pmax(y[1], D),
        )
        return lax.switch(k, branches, x)

    g = jax.jit(env.smap(f, (P(D), P()), P()))
    return [g(env.rows(), env.same(np.int32(k))) for k in (2, 0, 1)]


@case("core", exact=True)
def cond_on_an_exchanged_value(env: Env) -> Any:
    """The predicate comes from a psum, inside a scan."""

    def f(x: jax.Array) -> Any:
        def body(c: jax.Array, row: jax.Array) -> Any:
            s = env.psum(jnp.sum(row), D)
            return lax.cond(s > 0, lambda v: v + env.pmax(row, D), lambda v: v - 1, c), s

        return lax.scan(body, jnp.zeros(6), x)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", exact=True)
def nested_jit(env: Env) -> Any:
    """jit in jit in shard_map, inlined and not."""
    h = jax.jit(lambda y: env.psum(y, D) * 2)
    k = jax.jit(lambda y: h(y) + 1, inline=True)
    return Program(env.smap(lambda x: (h(x), k(x + 1), jax.jit(k)(x[0])), P(D), P()), (env.rows(),))


@case("core", exact=True)
def eager_with_inner_jit(env: Env) -> Any:
    """An eager shard_map that calls a jitted function."""
    h = jax.jit(lambda y: env.pmean(y, D))
    return env.smap(lambda x: h(x) + h(x * 2), P(D), P())(env.rows())


@case("core", exact=True)
def eager_loops(env: Env) -> Any:
    """scan and cond in an eager shard_map."""

    def f(x: jax.Array) -> Any:
        c, _ = lax.scan(lambda c, t: (c + env.psum(t, D), None), jnp.zeros(6), x)
        return lax.cond(c[0] < 1e9, lambda v: env.pmax(v, D), lambda v: v, c)

    return env.smap(f, P(D), P())(env.rows())


@case("core", exact=True)
def map_and_associative(env: Env) -> Any:
    """lax.map and associative_scan around reductions."""

    def f(x: jax.Array) -> Any:
        return lax.map(lambda row: env.psum(row, D), x), lax.associative_scan(jnp.add, env.psum(x, D))

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", "smoke", exact=True)
def loops_around_the_region(env: Env) -> Any:
    """scan, fori, cond and while at jit level, each around a whole shard_map."""
    a = env.smap(lambda x, c: env.psum(x, D) * 0.25 + c, (P(D), P()), P())

    def f(x: jax.Array) -> Any:
        c, _ = lax.scan(lambda c, _: (a(x, c), None), jnp.zeros((4, 6)), None, length=3)
        c = lax.fori_loop(0, 2, lambda i, c: a(x, c * 0.5), c)
        c = lax.cond(jnp.sum(c) < 1e9, lambda c: a(x, c), lambda c: c, c)
        n, c = lax.while_loop(lambda t: t[0] < 3, lambda t: (t[0] + 1, a(x, t[1])), (0, c))
        return c, n

    return Program(f, (env.rows(),))


@case("core", exact=True)
def ahead_of_time(env: Env) -> Any:
    """lower, compile, call."""
    x = env.rows()
    compiled = jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P())).lower(x).compile()
    return compiled(x), compiled(x * 2)


@case("core", exact=True)
def traced_only(env: Env) -> Any:
    """eval_shape and make_jaxpr give global shapes and touch nobody."""
    x = env.rows()

    def f(x: jax.Array) -> Any:
        return env.psum(x, D), jnp.zeros((env.axis_size(D), 2))

    g = env.smap(f, P(D), P())
    shapes = jax.eval_shape(g, x)
    jax.make_jaxpr(g)(x)
    jax.jit(g).lower(x)
    return [np.array(s.shape) for s in shapes], jax.jit(g)(x)


@case("core", exact=True)
def recompiled(env: Env) -> Any:
    """Shapes A, B, A, and another dtype: every variant has its own program."""
    f = jax.jit(env.smap(lambda x: env.psum(x, D) + 1, P(D), P()))
    return f(env.rows()), f(env.rows(2, 3)), f(env.rows()), f(env.rows(dtype=np.int32)), f(env.rows(2, 3))


@case("core", exact=True)
def cached(env: Env) -> Any:
    """A second call traces nothing."""
    traces = []

    def f(x: jax.Array) -> Any:
        traces.append(1)
        return env.psum(x * 7, D)

    g = jax.jit(env.smap(f, P(D), P()))
    first = g(env.rows())
    count = len(traces)
    second = g(env.rows(seed=1))
    assert len(traces) == count, "traced again"
    return first, second


@case("core", exact=True)
def static_arguments(env: Env) -> Any:
    """Static arguments that choose the operation."""

    @partial(jax.jit, static_argnums=1)
    def f(x: jax.Array, op: str) -> Any:
        return env.smap(lambda x: getattr(env.api, op)(x, D), P(D), P())(x)

    return [f(env.rows(), op) for op in ("psum", "pmax", "psum", "pmean")]


@case("core", "smoke", exact=True)
def donated(env: Env) -> Any:
    """Donated operands, twice."""
    f = jax.jit(env.smap(lambda x: (x + 1, env.psum(x, D)), P(D), (P(D), P())), donate_argnums=0)
    y = jax.jit(lambda x: x + 0)(env.rows())
    y, first = f(y)
    y, second = f(y)
    return first, second, y


@case("core", exact=True)
def not_donated(env: Env) -> Any:
    """Operands that are not donated keep their values."""
    x = env.rows(64, 33)
    f = jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P()))
    return f(x), x, f(x)


@case("core", exact=True)
def set_mesh(env: Env) -> Any:
    """The mesh comes from the context."""
    with jax.set_mesh(env.mesh):
        f = jax.shard_map(lambda x: env.psum(x, D) + env.axis_size(D), in_specs=P(D), out_specs=P(), check_vma=env.vma)
        return jax.jit(f)(env.rows())


@case("core", exact=True)
def shardings_of_jit(env: Env) -> Any:
    """in_shardings and out_shardings on the jit around."""
    row, all_ = NamedSharding(env.mesh, P(D)), NamedSharding(env.mesh, P())
    f = env.smap(lambda x: (x * 2, env.psum(x, D)), P(D), (P(D), P()))
    return jax.jit(f, in_shardings=row, out_shardings=(row, all_))(env.rows())


@case("core")
def results_feed_jit_code(env: Env) -> Any:
    """Ordinary jit code before and after the region, on sharded and on replicated arrays."""
    f = env.smap(lambda x: env.psum(x, D), P(D), P())
    return Program(lambda x: jnp.sin(f(x * 2 + 1)).T @ jnp.cos(f(x)), (env.rows(),))


@case("core", exact=True)
def named_scopes(env: Env) -> Any:
    """Names of scopes and functions do not disturb the agreement between clusters."""

    def f(x: jax.Array) -> Any:
        with jax.named_scope("grads"), jax.named_scope("layer0"):
            return env.psum(x, D)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", vma=ON, exact=True)
def constants(env: Env) -> Any:
    """A psum of a constant array, and constants captured by the region."""
    table = np.arange(12, dtype=np.float32).reshape(2, 6)

    def f(x: jax.Array) -> Any:
        return env.psum(jnp.asarray(table), D), env.psum(x[:2] * table, D)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", vma=OFF, exact=True)
def user_error_then_success(env: Env) -> Any:
    """A program that fails to trace on every cluster leaves the world usable."""
    try:
        jax.jit(env.smap(lambda x: env.psum(x, D) @ jnp.zeros((99, 99)), P(D), P()))(env.rows())
    except TypeError:
        pass
    else:
        raise AssertionError("the product of wrong shapes was accepted")
    return Program(env.smap(lambda x: env.psum(x, D), P(D), P()), (env.rows(),))
