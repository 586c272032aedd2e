"""pbroadcast: one rank's value on every rank. Stock JAX has it on GPUs only, so a gather and an index say what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import DATA_MODEL, OFF, Program, case
from harness.env import D, Env, M

_API = ("lax", "hetccl")


def _broadcast(env: Env, x: Any, axes: tuple[str, ...], source: Any) -> Any:
    if env.oracle:
        return jax.tree.map(lambda t: lax.all_gather(t, axes)[source], x)
    return env.api.pbroadcast(x, axes, source)


def _run(env: Env, f: Callable[[jax.Array], Any], *shape: int, dtype: str = "float32") -> Any:
    """Runs ``f`` on each rank's own array of this shape; every rank's result is compared."""
    x = env.put(np.random.default_rng(1).integers(-8, 8, (env.size, *shape)).astype(dtype), P(D))
    return Program(env.smap(lambda x: jax.tree.map(lambda t: t[None], f(x[0])), P(D), P(D)), (x,))


@case("smoke", "core", api=_API, exact=True)
def from_each(env: Env) -> Any:
    """From every rank: a pytree, scalars, lengths that no cluster divides."""

    def f(x: jax.Array) -> Any:
        tree = {"x": x, "s": jnp.sum(x), "i": (x[0].astype(jnp.int32), x[:, :3])}
        return [_broadcast(env, tree, (D,), source) for source in range(env.size)]

    return _run(env, f, 3, 7)


_DTYPES = ("bool", "int8", "float16", "bfloat16", "complex64", "float8_e5m2", "int4")


@case("core", exact=True, vma=OFF, table={d: {"dtype": d} for d in _DTYPES})
def dtype(env: Env) -> Any:
    """Other dtypes, from the first and the last rank."""
    return _run(env, lambda x: [_broadcast(env, x, (D,), s) for s in (0, -1)], 5, 3, dtype=env.params["dtype"])


@case("core", "wire", exact=True, vma=OFF)
def large_and_empty(env: Env) -> Any:
    """A megabyte in an odd length, and nothing."""

    def f(x: jax.Array) -> Any:
        y = jnp.arange(300_007) + x[0].astype(jnp.int32)
        far, empty = _broadcast(env, y, (D,), env.size - 1), _broadcast(env, x[:0], (D,), 0)
        return jnp.sum(far * (jnp.arange(300_007) % 5)), jnp.array(empty.shape)

    return _run(env, f, 2)


@case("core", exact=True, vma=OFF)
def special_values(env: Env) -> Any:
    """Bits stay as they are: signed zeros, infinities, denormals."""

    def f(x: jax.Array) -> Any:
        # Chosen, not computed: a CPU flushes denormals when it multiplies, a GPU does not.
        y = jnp.where(x[0] > 99, 2, jnp.array([-0.0, jnp.inf, -jnp.inf, 1e-45, 3e38], jnp.float32))
        return lax.bitcast_convert_type(_broadcast(env, y, (D,), env.size - 1), jnp.int32)

    return _run(env, f, 1)


@case("core", "order", exact=True)
def in_loops_and_between_sums(env: Env) -> Any:
    """Its operand depends on a sum and a sum on it, in a scan; the order is the same in all clusters."""

    def f(x: jax.Array) -> Any:
        def step(c: jax.Array, source: Any) -> Any:
            y = _broadcast(env, c + env.pmax(c, D), (D,), 1)
            return c + env.pmax(y, D) * 0 + y % 3, _broadcast(env, c, (D,), env.size - 1)

        return lax.scan(step, x, None, length=3)

    return _run(env, f, 6)


@case("core")
def gradient(env: Env) -> Any:
    """The source gets the sum of the cotangents; JAX has the gradient of scalars only. vmapped."""

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda v: jnp.sin(_broadcast(env, jnp.sum(v), (D,), env.size - 1)), x)
        return y, back(y * (1 + lax.axis_index(D)))[0], jax.vmap(lambda v: _broadcast(env, v, (D,), 1))(x)

    return _run(env, f, 4)


@case("mesh", mesh=DATA_MODEL, exact=True)
def two_axes(env: Env) -> Any:
    """Over both axes in both orders."""
    x = env.put(np.arange(env.size * 2 * 6, dtype=np.float32).reshape(env.size, 2, 6), P(D, M))

    def f(x: jax.Array) -> Any:
        return [_broadcast(env, x, a, s) for a in ((D,), (D, M), (M, D)) for s in (0, env.size - 1)]

    return Program(env.smap(f, P(D, M), P(D, M)), (x,))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual(env: Env) -> Any:
    """In a partly manual region."""
    x = env.put(np.arange(env.size * 2 * 6, dtype=np.float32).reshape(-1, 6), P(D))
    f = env.smap(lambda x: _broadcast(env, x, (D,), 1), P(D), P(D), axis_names={D})
    return jax.jit(f, out_shardings=NamedSharding(env.mesh, P(D)))(x)


@case("core", exact=True)
def from_a_computed_rank(env: Env) -> Any:
    """The source is a value of the program; jax 0.12 takes that."""

    def f(x: jax.Array) -> Any:
        source = env.pmax(lax.axis_index(D), D) - 1 if jax.__version_info__ >= (0, 12) else env.size - 2
        return [_broadcast(env, t, (D,), source) for t in (x, x > 0)]

    return _run(env, f, 5)


@case("core", vma=OFF, refused="IndexError", says=("pbroadcast", D))
def no_such_rank(env: Env) -> Any:
    """An index outside of the axis."""
    return _run(env, lambda x: _broadcast(env, x, (D,), env.size), 3)
