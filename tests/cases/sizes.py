"""Sizes: nothing, one element, odd lengths, many leaves, megabytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from harness.case import OFF, Program, case
from harness.env import D, Env

_OPS = ("psum", "pmean", "pmax", "pmin")


def _all(env: Env, x: jax.Array, ops: tuple[str, ...] = _OPS) -> Any:
    spec = P(D, *[None] * (x.ndim - 1))
    return Program(env.smap(lambda x: [getattr(env.api, op)(x, D) for op in ops], spec, P()), (x,))


def _counting(env: Env, *shape: int, dtype: str = "float32") -> jax.Array:
    """Values that differ in every element and rank, with exact sums."""
    full = (env.size * shape[0], *shape[1:])
    value = (np.arange(int(np.prod(full)), dtype=np.int64) * 7919 % 251 - 125).reshape(full)
    return env.put(value.astype(dtype), P(D, *[None] * (len(shape) - 1)))


@case(
    "core",
    "wire",
    exact=True,
    table={"x".join(map(str, s)): {"shape": list(s)} for s in ((0, 3), (2, 0), (1, 0, 4), (0, 0))},
)
def zero_size(env: Env) -> Any:
    """Arrays without elements: nothing to send, but still the right shape and type."""
    return _all(env, _counting(env, *env.params["shape"]))


@case("core", "wire", exact=True)
def zero_size_beside_others(env: Env) -> Any:
    """An empty leaf in a tree that has others."""
    f = env.smap(lambda x: env.psum({"a": x[:0], "b": x, "c": x[:, :0], "d": jnp.sum(x)}, D), P(D), P())
    return Program(f, (env.rows(),))


_SHAPES = (
    (1,),
    (1, 1),
    (2,),
    (3,),
    (5, 1),
    (7,),
    (1, 2, 1, 3, 1),
    (13, 11),
    (2, 3, 5, 7),
    (1, 127),
    (1, 1009),
)


@case("core", exact=True, vma=OFF, table={"x".join(map(str, s)): {"shape": list(s)} for s in _SHAPES})
def shape(env: Env) -> Any:
    """Small and odd shapes, which no cluster size divides."""
    return _all(env, _counting(env, *env.params["shape"]))


@case("core", "wire", exact=True)
def lengths_one_to_nineteen(env: Env) -> Any:
    """All short lengths in one program: every kind of padding."""
    x = _counting(env, 1, 19)
    return Program(env.smap(lambda x: [env.psum(x[:, :n], D) for n in range(1, 20)], P(D), P()), (x,))


@case("core", "wire", exact=True)
def many_leaves(env: Env) -> Any:
    """A pytree of 24 leaves of uneven sizes, 1 MB together: one bucket or several, the values are the same."""
    x = _counting(env, 1, 30_000)
    cuts = {f"leaf{i}": (i * 7919 % 15_000, 1 + i * i * 17 % 29_000) for i in range(24)}

    def f(x: jax.Array) -> Any:
        return env.psum({k: x[:, start : start + n] for k, (start, n) in cuts.items()}, D)

    return Program(env.smap(f, P(D), P()), (x,))


@case("core", exact=True, vma=OFF)
def large_tree(env: Env) -> Any:
    """Megabytes in leaves of mixed size and dtype: more than one bucket."""
    x = _counting(env, 1, 300_007)

    def f(x: jax.Array) -> Any:
        y = x.reshape(-1)
        tree = {
            "a": y,
            "b": y[:1000].reshape(10, 100),
            "c": y[:200_000].astype(jnp.bfloat16),
            "d": y.astype(jnp.int32),
            "e": y[0],
        }
        return env.psum({**tree, "f": y * 2}, D), env.psum(y, D)

    return Program(env.smap(f, P(D), P()), (x,))


_LARGE = {
    "psum-4MB": {"op": "psum", "n": 1 << 20, "dtype": "float32"},
    "psum-odd": {"op": "psum", "n": 1_000_003, "dtype": "float32"},
    "psum-bf16": {"op": "psum", "n": 1_500_001, "dtype": "bfloat16"},
    "psum-int8": {"op": "psum", "n": 3_000_001, "dtype": "int8"},
    "pmax-4MB": {"op": "pmax", "n": 1 << 20, "dtype": "float32"},
    "pmean-4MB": {"op": "pmean", "n": 1 << 20, "dtype": "float32"},
    "pmin-odd": {"op": "pmin", "n": 600_011, "dtype": "int32"},
}


@case("core", "wire", exact=True, vma=OFF, table=_LARGE)
def large(env: Env) -> Any:
    """Megabytes in one array."""
    p = env.params
    value = _counting(env, 1, p["n"], dtype=p["dtype"])
    return Program(env.smap(lambda x: getattr(env.api, p["op"])(x, D), P(D), P()), (value,))


@case("core", exact=True)
def around_the_threshold(env: Env) -> Any:
    """Powers of two and their neighbours, from a few bytes to a megabyte: wherever small becomes large."""
    x = _counting(env, 1, (1 << 18) + 1)
    cuts = [(1 << k) + d for k in (8, 10, 12, 14, 16, 18) for d in (-1, 1)]
    f = jax.jit(env.smap(lambda x: [env.psum(x[0, :n], D) for n in cuts], P(D), P()))
    # In integers, since platforms add floats in different orders.
    return [jnp.sum(jnp.abs(t).astype(jnp.int32) * (1 + jnp.arange(t.size) % 3)) for t in f(x)]


@case("core", "wire", exact=True, vma=OFF)
def large_repeated(env: Env) -> Any:
    """The same megabytes many times: buffers and slots are reused."""
    x = _counting(env, 1, 500_009)
    f = jax.jit(env.smap(lambda x, c: env.psum(x, D) - c, (P(D), P()), P()))
    c = env.same(np.zeros((1, 500_009), np.float32))
    for _ in range(12):
        c = f(x, c)
    return c


@case("soak", exact=True, vma=OFF, limit_s=300)
def huge(env: Env) -> Any:
    """64 MB, several times."""
    x = _counting(env, 1, 16 << 20)
    f = jax.jit(env.smap(lambda x: env.psum(x, D), P(D), P()))
    for _ in range(5):
        y = jax.block_until_ready(f(x))
    return y
