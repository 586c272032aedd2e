"""What each operation returns, in both spellings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import OFF, ON, Program, case
from harness.env import D, Env

_API = ("lax", "hetccl")


@case("core", "smoke", api=_API, exact=True, table={op: {"op": op} for op in ("psum", "pmean", "pmax", "pmin")})
def reduce(env: Env) -> Any:
    """One array, sharded by rows."""
    return Program(env.smap(lambda x: getattr(env.api, env.params["op"])(x, D), P(D), P()), (env.rows(),))


@case("core", "smoke", api=_API, exact=True)
def axis_index_and_size(env: Env) -> Any:
    """Every rank knows its place in the whole world and how large it is."""

    def f(x: jax.Array) -> Any:
        return x * env.axis_size(D) + env.axis_index(D), env.axis_index(D)[None]

    return Program(env.smap(f, P(D), P(D)), (env.rows(),))


@case("core", api=_API, exact=True)
def axis_size_is_static(env: Env) -> Any:
    """The size can make shapes."""

    def f(x: jax.Array) -> Any:
        n = env.axis_size(D)
        assert isinstance(n, int)
        return env.psum(jnp.zeros((n, 6)).at[env.axis_index(D)].set(x[0]), D), jnp.arange(n)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", api=_API, exact=True)
def closed_form(env: Env) -> Any:
    """Sums of rank numbers, against Gauss rather than against lax."""
    n = env.size
    if env.oracle:
        return (
            env.same(np.int32(n * (n + 1) // 2)),
            env.same(np.float32((n + 1) / 2)),
            env.same(np.int32(n)),
            env.same(np.int32(1)),
        )

    def f(x: jax.Array) -> Any:
        one = env.axis_index(D) + 1
        return env.psum(one, D), env.pmean(one, D), env.pmax(one, D), env.pmin(one, D)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", api=_API, exact=True)
def python_scalars(env: Env) -> Any:
    """psum(1) is the classic spelling of the axis size; constants need no exchange."""

    def f(x: jax.Array) -> Any:
        n = env.psum(1, D)
        return x * n + env.psum(2.5, D) + env.pmean(3.0, D), jnp.float32(env.psum(np.float32(0.5), D))

    return Program(env.smap(f, P(D), (P(D), P())), (env.rows(),))


@case("core", exact=True)
def python_scalars_minmax(env: Env) -> Any:
    """pmax and pmin of constants."""
    return Program(env.smap(lambda x: x + env.pmax(2.0, D) - env.pmin(3, D), P(D), P(D)), (env.rows(),))


@case("core", api=_API, exact=True)
def tuple_of_one_axis(env: Env) -> Any:
    """An axis tuple with one name."""

    def f(x: jax.Array) -> Any:
        return env.psum(x, (D,)), env.pmax(x, (D,)), env.axis_index((D,))[None] * 0 + env.axis_size((D,))

    return Program(env.smap(f, P(D), (P(), P(), P(D))), (env.rows(),))


@case("core", exact=True)
def no_axes(env: Env) -> Any:
    """An empty axis tuple reduces over nothing."""
    return Program(env.smap(lambda x: env.psum(x, ()) * 2, P(D), P(D)), (env.rows(),))


@case("core", "smoke", api=_API, exact=True)
def pytree(env: Env) -> Any:
    """Structure, empty parts and None survive."""

    def f(x: jax.Array) -> Any:
        return env.psum({"a": x, "b": (x[0], jnp.sum(x)), "n": None, "e": (), "i": x.astype(jnp.int32)}, D)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", api=_API, table={op: {"op": op} for op in ("psum", "pmean", "pmax", "pmin")})
def scalars_and_weak_types(env: Env) -> Any:
    """Rank-0 operands; weak types stay as lax makes them."""

    def f(x: jax.Array) -> Any:
        op = getattr(env.api, env.params["op"])
        return op(jnp.sum(x), D), op(jnp.sum(x) > 0, D), op(x[0, 0] * 1 + jnp.asarray(2), D)

    return Program(env.smap(f, P(D), P()), (env.rows(),))


@case("core", vma=ON, exact=True)
def invariant_operand(env: Env) -> Any:
    """psum of a value that is already the same everywhere multiplies by the world's size."""
    return Program(
        env.smap(lambda x, w: (env.psum(w, D), env.pmean(w, D), env.pmax(w, D)), (P(D), P()), P()),
        (env.rows(), env.weights(6, 3)),
    )


@case("core", vma=OFF, exact=True)
def replicated_operand(env: Env) -> Any:
    """The same without vma types."""
    return Program(
        env.smap(lambda x, w: (env.psum(w, D), env.pmean(w, D), env.pmin(w, D)), (P(D), P()), P()),
        (env.rows(), env.weights(6, 3)),
    )


@case("core", "smoke", exact=True)
def eager(env: Env) -> Any:
    """Without jit."""
    return env.smap(lambda x: env.pmean(x, D) + env.psum(jnp.sum(x), D), P(D), P())(env.rows())


@case("core", exact=True)
def eager_index(env: Env) -> Any:
    """axis_index without jit."""
    return env.smap(lambda x: x + env.axis_index(D) * env.axis_size(D), P(D), P(D))(env.rows())


@case("core", vma=ON, exact=True)
def pcast_to_varying(env: Env) -> Any:
    """An explicit cast from replicated to varying, then a sum over ranks."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        return env.psum(jax.lax.pcast(w, D, to="varying") * (env.axis_index(D) + 1), D)

    return Program(env.smap(f, (P(D), P()), P()), (env.rows(), env.weights(4)))


@case("core", vma=ON, exact=True)
def unreduced(env: Env) -> Any:
    """Values that are parts of a sum, by their type: their sum and its shards."""

    def f(x: jax.Array) -> Any:
        parts = jax.lax.pcast(jnp.tile(x, (env.axis_size(D), 1)), D, to="unreduced")
        return env.psum(parts, D), jax.lax.psum_scatter(parts, D, tiled=True)

    return Program(env.smap(f, P(D), (P(), P(D))), (env.rows(),))


@case("core", vma=ON)
def reduced(env: Env) -> Any:
    """Values whose cotangents are parts of a sum: a cast's and a gather's gradients reduce them."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> Any:
            rows = jax.lax.all_gather(x, D, tiled=True, to="reduced")
            mine = jax.lax.pcast(jnp.arange(rows.size, dtype=x.dtype).reshape(rows.shape), D, to="varying")
            return jnp.sum(jnp.sin(rows) * mine) + jnp.sum(jax.lax.pcast(w, D, to="reduced") * x)

        return jax.grad(loss, argnums=(0, 1))(x, w)

    return Program(env.smap(f, (P(D), P()), (P(D), P())), (env.rows(), env.weights(4, 6)))


@case("core", exact=True)
def reduction_beside_local_output(env: Env) -> Any:
    """A sharded and a replicated output of one program."""
    return Program(env.smap(lambda x: (x - env.pmean(x, D), env.psum(x, D)), P(D), (P(D), P())), (env.rows(),))


@case("core")
def batch_norm(env: Env) -> Any:
    """Statistics over the whole batch: mean and variance."""

    def f(x: jax.Array) -> Any:
        mean = env.pmean(jnp.mean(x, 0), D)
        var = env.pmean(jnp.mean((x - mean) ** 2, 0), D)
        return (x - mean) / jnp.sqrt(var + 1e-5)

    return Program(env.smap(f, P(D), P(D)), (env.normal(16, 12),))


@case("core")
def log_softmax_over_ranks(env: Env) -> Any:
    """pmax then psum, the sharded softmax."""

    def f(x: jax.Array) -> Any:
        top = jax.lax.stop_gradient(env.pmax(jnp.max(x, 0), D))
        return x - top - jnp.log(env.psum(jnp.sum(jnp.exp(x - top), 0), D))

    return Program(env.smap(f, P(D), P(D)), (env.normal(8, 5),))


@case("core", exact=True)
def key_per_rank(env: Env) -> Any:
    """fold_in(axis_index) gives every rank of the world its own random numbers."""

    def f(x: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(0), env.axis_index(D))
        return jax.random.bits(key, (4,))

    return Program(env.smap(f, P(D), P(D)), (env.rows(),))
