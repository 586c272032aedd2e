"""Programs whose exchanges a compiler would reorder, merge, drop or hoist. Each runs several times in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import OFF, case
from harness.env import D, Env


def _repeat(f: Callable[..., Any], *args: Any, times: int = 8) -> Any:
    """The last of several runs; all must be equal on this process."""
    first: Any = None
    for _ in range(times):
        last = jax.block_until_ready(f(*args))
        first = last if first is None else first
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
            mine = zip(a.addressable_shards, b.addressable_shards, strict=True)
            assert all(np.asarray(s.data).tobytes() == np.asarray(t.data).tobytes() for s, t in mine), "runs differ"
    return last


def _heavy(y: jax.Array) -> jax.Array:
    """Some work, so that devices reach exchanges at different times."""
    for _ in range(3):
        y = jnp.sin(y) + y[::-1] * 0.5
    return y


@case("core", "order", exact=True)
def independent(env: Env) -> Any:
    """Psums without data edges between them, of distinct shapes."""

    def f(x: jax.Array) -> Any:
        return (
            env.psum(x, D),
            env.psum(jnp.sum(x, 0), D),
            env.pmax(x[:, :3], D),
            env.psum(x[0], D),
            env.pmin(x[:2], D),
        )

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def two_equal(env: Env) -> Any:
    """Two identical psums: merged or not, on all clusters alike."""
    return _repeat(jax.jit(env.smap(lambda x: (env.psum(x, D), env.psum(x, D)), P(D), P())), env.rows())


@case("core", "order", exact=True)
def same_form_other_values(env: Env) -> Any:
    """Equal equations on different values: a cached lowering must not give one exchange for all."""

    def f(x: jax.Array) -> Any:
        return [env.psum(x * k, D) for k in (1, 3, 5)] + [env.psum(x[i], D) for i in range(3)]

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def unused_in_jax(env: Env) -> Any:
    """A psum whose result nobody uses."""

    def f(x: jax.Array) -> Any:
        env.psum(x * 2, D)
        return env.psum(x[0], D)

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def unused_in_xla(env: Env) -> Any:
    """Only XLA finds that the first result does not matter."""

    def f(x: jax.Array) -> Any:
        i = env.psum(x.astype(jnp.int32), D)
        return env.psum(x[0], D), i * 0

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def unused_outputs_of_jit(env: Env) -> Any:
    """A region of which jit keeps one output."""
    f = env.smap(lambda x: (env.psum(x, D), env.pmax(x, D), env.psum(x[0], D)), P(D), P())
    return _repeat(jax.jit(lambda x: f(x)[1]), env.rows())


@case("core", "order", exact=True)
def loop_invariant(env: Env) -> Any:
    """The same psum in every step of a scan, beside the same psum outside."""

    def f(x: jax.Array) -> Any:
        return lax.scan(lambda c, t: (c + t, env.psum(x, D)), 0.0, jnp.arange(3.0)), env.psum(x, D)

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def scan_beside_a_chain(env: Env) -> Any:
    """A scan with exchanges, and a chain of exchanges that does not depend on it."""

    def f(x: jax.Array) -> Any:
        a, _ = lax.scan(lambda c, t: (c + env.psum(x[:, :2] * t, D), None), jnp.zeros((4, 2)), jnp.arange(4.0))
        b = env.psum(env.psum(x[0], D) * (env.axis_index(D) + 1), D)
        return a, b, env.pmax(x[:, 0], D)

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def cond_beside_a_chain(env: Env) -> Any:
    """A cond with exchanges, and a chain that does not depend on it."""

    def f(x: jax.Array, k: jax.Array) -> Any:
        a = env.psum(x[:, :2], D)
        b = lax.cond(k > 0, lambda t: env.psum(t, D), lambda t: env.psum(t * 2, D) + env.pmax(t, D), x[:, :5])
        return a, b, env.psum(x[1], D), env.psum(x[:, :3] * 2, D)

    g = jax.jit(env.smap(f, (P(D), P()), P()))
    return [_repeat(g, env.rows(), env.same(np.int32(k)), times=4) for k in (0, 1)]


@case("core", "order", exact=True)
def loops_side_by_side(env: Env) -> Any:
    """Two scans and a while without data edges between them."""

    def f(x: jax.Array) -> Any:
        a, _ = lax.scan(lambda c, t: (c + env.psum(x[:, :2] * t, D), None), jnp.zeros((4, 2)), jnp.arange(3.0))
        b = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + env.psum(x[0], D)), (0, jnp.zeros(6)))
        c, _ = lax.scan(
            lambda c, t: (jnp.maximum(c, env.pmax(x[:, :3] + t, D)), None), jnp.zeros((4, 3)), jnp.arange(2.0)
        )
        return a, b, c

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def nested_jit_twice(env: Env) -> Any:
    """One inner function, two calls."""
    h = jax.jit(lambda y: env.psum(y, D) * 2)
    return _repeat(jax.jit(env.smap(lambda x: (h(x), h(x + 1), env.psum(x[0], D)), P(D), P())), env.rows())


@case("core", "order", exact=True)
def nested_jit_mixed(env: Env) -> Any:
    """An inner function with two exchanges, called twice, beside a checkpointed one."""
    h = jax.jit(lambda y: (env.psum(y, D), env.psum(y[:, 0], D)))

    def f(x: jax.Array) -> Any:
        return h(x), h(x * 2), env.psum(x[0], D), jax.checkpoint(lambda x: env.psum(x[:, :4], D))(x)

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def nested_jit_in_loops(env: Env) -> Any:
    """The same inner function in a scan, in a cond and outside."""
    h = jax.jit(lambda y: env.psum(y, D))

    def f(x: jax.Array) -> Any:
        a, _ = lax.scan(lambda c, t: (c + h(x * t), None), jnp.zeros((4, 6)), jnp.arange(3.0))
        b = lax.cond(jnp.sum(h(x)) < 1e9, lambda t: h(t), lambda t: h(t * 2), x)
        return a, b, h(x + 1)

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows())


@case("core", "order", exact=True)
def two_shard_maps(env: Env) -> Any:
    """Separate regions in one program, interleaved."""
    a = env.smap(lambda x: env.psum(x, D), P(D), P())
    b = env.smap(lambda x: env.psum(x[0], D), P(D), P())
    return _repeat(jax.jit(lambda x: (a(x), b(x), b(x * 2), a(x * 2))), env.rows())


@case("core", "order", exact=True)
def regions_in_branches_and_loops(env: Env) -> Any:
    """Regions inside jit-level control flow, beside a region outside."""
    a = env.smap(lambda x: env.psum(x, D), P(D), P())
    b = env.smap(lambda x: env.pmax(x[0], D), P(D), P())

    def f(x: jax.Array, k: jax.Array) -> Any:
        u = lax.cond(k > 0, lambda x: a(x), lambda x: a(x * 2) + b(x), x)
        v, _ = lax.scan(lambda c, t: (c + a(x * t), b(x + t)), jnp.zeros((4, 6)), jnp.arange(3.0))
        return u, v, b(x * 5)

    g = jax.jit(f)
    return [_repeat(g, env.rows(), env.same(np.int32(k)), times=4) for k in (0, 1)]


@case("core", "order", "wide", exact=True)
def thirty_two(env: Env) -> Any:
    """32 independent psums in one program: more than there are threads."""

    def f(x: jax.Array) -> Any:
        return [env.psum(x[:, : 1 + i % 6] * (i + 1), D) for i in range(32)]

    return _repeat(jax.jit(env.smap(f, P(D), P())), env.rows(), times=20)


@case("core", "order", "wide", exact=True, vma=OFF)
def thirty_two_large(env: Env) -> Any:
    """32 independent psums that take the path for large payloads."""
    x = env.put((np.arange(env.size * 40_000) % 97).reshape(env.size, 40_000).astype(np.float32), P(D))
    f = jax.jit(env.smap(lambda x: [env.psum(x * (i + 1), D) for i in range(32)], P(D), P()))
    return [jnp.sum(t.astype(jnp.int32)) for t in _repeat(f, x, times=3)]


@case("core", "order", exact=True)
def chained_200(env: Env) -> Any:
    """200 dependent repetitions: equal bits on all ranks at the end."""
    f = jax.jit(env.smap(lambda x, c: env.psum(x, D) * 0.25 + c * 0.5, (P(D), P()), P()))
    x, c = env.rows(), env.same(np.zeros((4, 6), np.float32))
    for i in range(200):
        c = f(x, c)
        if i % 8 == 7:
            c.block_until_ready()
    return c


@case("core", "order")
def chained_200_inside(env: Env) -> Any:
    """The same as one program: a scan of 200 steps on normal data."""

    def f(x: jax.Array) -> Any:
        return lax.scan(
            lambda c, _: (env.psum(jnp.sin(x * 1.0) + c * 0.1, D) / env.size, None),
            jnp.zeros((4, 6)),
            None,
            length=200,
        )[0]

    return jax.jit(env.smap(f, P(D), P()))(env.normal(4, 6))


@case("core", "order", exact=True)
def two_programs_in_flight(env: Env) -> Any:
    """Two programs dispatched without waiting, several rounds."""
    a = jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P()))
    b = jax.jit(env.smap(lambda x: env.psum(x[0] * 2, D), P(D), P()))
    x, out = env.rows(), []
    for _ in range(4):
        out += [a(x), b(x)]
    return out


@case("core", "order", exact=True)
def eager_in_flight(env: Env) -> Any:
    """Eager regions dispatched without waiting."""
    f = env.smap(lambda x: env.psum(x, D), P(D), P())
    x = env.rows()
    return [f(x), f(x * 2), f(x[:, :3])]


@case("core", "order", "wide", vma=OFF)
def stress(env: Env) -> Any:
    """Large independent exchanges through jit, remat, scan, cond and two regions at once."""
    h = jax.jit(lambda y: (env.psum(_heavy(y), D), env.psum(y[:, :1000], D)))

    def f(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        r: list[Any] = [h(a), h(a + 1), h(b), env.psum(_heavy(c), D)]
        r.append(jax.checkpoint(lambda t: env.psum(_heavy(t), D))(b))
        r.append(
            lax.scan(
                lambda q, t: (q + env.psum(c[:, :512] * t, D), env.psum(jnp.sum(c, 1), D)),
                jnp.zeros((8, 512)),
                jnp.arange(3.0),
            )
        )
        r.append(
            lax.cond(
                jnp.sum(env.psum(a[0, :1], D)) > 1e9,
                lambda t: env.psum(t, D),
                lambda t: env.psum(t * 2, D),
                c[:, 100:400],
            )
        )
        r.append(h(b * 2))
        return [jax.tree.map(jnp.sum, q) for q in r]

    region = env.smap(f, P(D), P())
    other = env.smap(lambda a: jnp.sum(env.psum(_heavy(a)[:, :99], D)), P(D), P())
    g = jax.jit(lambda a, b, c: (region(a, b, c), other(a), other(a * 2)))
    rng = np.random.default_rng(1)
    xs = [env.put(rng.integers(-4, 4, (env.size * 8, 2048 + 256 * i)).astype(np.float32), P(D)) for i in range(3)]
    return _repeat(g, *xs, times=4)


@case("soak", "order", vma=OFF, limit_s=600)
def chained_20000(env: Env) -> Any:
    """A long run."""
    f = jax.jit(env.smap(lambda x, c: (env.psum(x + c[0, 0], D) * 0.01 + c * 0.5, env.pmax(x, D)), (P(D), P()), P()))
    x, c = env.rows(), env.same(np.zeros((4, 6), np.float32))
    for i in range(20_000):
        c, m = f(x, c)
        if i % 8 == 7:
            c.block_until_ready()
    return c, m
