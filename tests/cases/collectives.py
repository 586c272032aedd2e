"""The collectives that move data: all_gather, psum_scatter, all_to_all, ppermute and those built on them; groups."""

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


def _values(env: Env, *shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Rank-unique values of this shape on every rank, exact in every dtype."""
    rng = np.random.default_rng(seed)
    value = rng.integers(0, 2, (env.size, *shape)) if dtype == "bool" else rng.integers(-8, 8, (env.size, *shape))
    return env.put(value.astype(dtype), P(D))


def _run(env: Env, f: Callable[[jax.Array], Any], *shape: int, dtype: str = "float32") -> Any:
    """Runs ``f`` on each rank's own array of this shape; every rank's result is compared."""
    x = _values(env, *shape, dtype=dtype)
    return Program(env.smap(lambda x: jax.tree.map(lambda t: t[None], f(x[0])), P(D), P(D)), (x,))


def _ring(env: Env, by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % env.size) for i in range(env.size)]


def _operation(env: Env, name: str) -> Callable[[jax.Array], jax.Array]:
    """Operations on an array of shape (2 n, 3 n, 4) for n ranks, by name."""
    n = env.size
    table: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all_gather": lambda x: lax.all_gather(x, D),
        "all_gather axis=1": lambda x: lax.all_gather(x, D, axis=1),
        "all_gather axis=-1": lambda x: lax.all_gather(x, D, axis=-1),
        "all_gather tiled": lambda x: lax.all_gather(x, D, tiled=True),
        "all_gather tiled axis=2": lambda x: lax.all_gather(x, D, axis=2, tiled=True),
        "psum_scatter tiled": lambda x: lax.psum_scatter(x, D, tiled=True),
        "psum_scatter tiled dim=1": lambda x: lax.psum_scatter(x, D, scatter_dimension=1, tiled=True),
        "psum_scatter": lambda x: lax.psum_scatter(x[:n], D),
        "psum_scatter dim=1": lambda x: lax.psum_scatter(x[:, :n], D, scatter_dimension=1),
        "all_to_all tiled": lambda x: lax.all_to_all(x, D, 0, 0, tiled=True),
        "all_to_all tiled 0->1": lambda x: lax.all_to_all(x, D, 0, 1, tiled=True),
        "all_to_all tiled 1->2": lambda x: lax.all_to_all(x, D, 1, 2, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x[:n], D, 0, 0),
        "all_to_all 1->0": lambda x: lax.all_to_all(x[:, :n], D, 1, 0),
        "all_to_all 0->2": lambda x: lax.all_to_all(x[:n], D, 0, 2),
        "ppermute ring": lambda x: lax.ppermute(x, D, _ring(env)),
        "ppermute back": lambda x: lax.ppermute(x, D, _ring(env, n - 1)),
        "ppermute one": lambda x: lax.ppermute(x, D, [(0, n - 1)]),
        "ppermute stay": lambda x: lax.ppermute(x, D, [(i, i) for i in range(n)]),
        "ppermute none": lambda x: lax.ppermute(x, D, []),
        "ppermute reverse": lambda x: lax.ppermute(x, D, [(i, n - 1 - i) for i in range(n)]),
        "pshuffle": lambda x: lax.pshuffle(x, D, [(i + 1) % n for i in range(n)]),
        "pswapaxes": lambda x: lax.pswapaxes(x[:n], D, 0),
        "pswapaxes axis=1": lambda x: lax.pswapaxes(x[:, :n], D, 1),
    }
    return table[name]


_NAMES = (
    "all_gather", "all_gather axis=1", "all_gather axis=-1", "all_gather tiled", "all_gather tiled axis=2",
    "psum_scatter tiled", "psum_scatter tiled dim=1", "psum_scatter", "psum_scatter dim=1",
    "all_to_all tiled", "all_to_all tiled 0->1", "all_to_all tiled 1->2", "all_to_all", "all_to_all 1->0",
    "all_to_all 0->2", "ppermute ring", "ppermute back", "ppermute one", "ppermute stay", "ppermute none",
    "ppermute reverse", "pshuffle", "pswapaxes", "pswapaxes axis=1",
)  # fmt: skip
_KINDS = ("all_gather tiled", "psum_scatter tiled", "all_to_all tiled", "ppermute ring")


@case("core", exact=True, table={n: {"op": n} for n in _NAMES})
def form(env: Env) -> Any:
    """Every form of every collective."""
    return _run(env, _operation(env, env.params["op"]), 2 * env.size, 3 * env.size, 4)


@case("core", "smoke", exact=True)
def all_kinds(env: Env) -> Any:
    """One of each, independent, in one program."""
    return _run(env, lambda x: [_operation(env, k)(x) for k in _KINDS], 2 * env.size, 3 * env.size, 4)


_DTYPES = ("bool", "int8", "int32", "float16", "bfloat16", "complex64", "float8_e5m2", "int4")


@case("core", "wire", exact=True, vma=OFF, table={d: {"dtype": d} for d in _DTYPES})
def dtype(env: Env) -> Any:
    """All kinds in other dtypes; sums only where there is a sum."""
    kinds = [k for k in _KINDS if env.params["dtype"] != "bool" or "psum" not in k]
    return _run(env, lambda x: [_operation(env, k)(x) for k in kinds], env.size, 3, dtype=env.params["dtype"])


@case("core", exact=True, vma=OFF)
def zero_size(env: Env) -> Any:
    """Empty operands: the results' shapes, and values beside them."""

    def f(x: jax.Array) -> Any:
        empty = [_operation(env, k)(x[:, :0]) for k in _KINDS]
        return [jnp.array(t.shape) for t in empty], [
            _operation(env, k)(x) + jnp.sum(t) for k, t in zip(_KINDS, empty, strict=True)
        ]

    return _run(env, f, env.size, 2)


@case("core", "wire", exact=True, vma=OFF)
def large(env: Env) -> Any:
    """Hundreds of kilobytes per rank, in odd sizes."""
    return _run(env, lambda x: [jnp.sum(_operation(env, k)(x), 0) for k in _KINDS], env.size * 31, 2003)


@case("core", exact=True)
def scalars(env: Env) -> Any:
    """Rank-0 operands where lax takes them."""
    return _run(env, lambda x: (lax.all_gather(jnp.sum(x), D), lax.ppermute(jnp.sum(x), D, _ring(env))), 3)


@case("core", table={n: {"op": n} for n in _KINDS})
def gradient_inside(env: Env) -> Any:
    """vjp of each kind, inside."""
    op = _operation(env, env.params["op"])

    def f(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda v: jnp.sin(op(v)), x)
        return y, back(y * 2)[0]

    return _run(env, f, 2 * env.size, 3)


@case("core", table={n: {"op": n} for n in _KINDS})
def gradient_outside(env: Env) -> Any:
    """grad around the region, through each kind and a mean over ranks."""
    op = _operation(env, env.params["op"])
    x = _values(env, 2 * env.size, 3)
    f = env.smap(lambda w, x: env.pmean(jnp.mean(jnp.tanh(op(x[0] * w)) ** 2), D), (P(), P(D)), P())
    return Program(jax.value_and_grad(lambda w, x: f(w, x), argnums=(0, 1)), (env.weights(3), x))


@case("core", exact=True)
def vmap(env: Env) -> Any:
    """Batched."""

    def f(x: jax.Array) -> Any:
        return [jax.vmap(_operation(env, k), in_axes=1, out_axes=1)(x) for k in _KINDS]

    return _run(env, f, env.size, 3, 2)


@case("core", "order", exact=True)
def in_loops_and_branches(env: Env) -> Any:
    """scan, cond, remat and nested jit around each kind."""

    def f(x: jax.Array) -> Any:
        shift = jax.jit(lambda v: lax.ppermute(v, D, _ring(env)))
        c, _ = lax.scan(lambda c, _: (shift(c), None), x, None, length=env.size + 1)
        c = lax.cond(env.psum(jnp.sum(c), D) < 1e9, lambda v: lax.all_to_all(v, D, 0, 0, tiled=True), lambda v: v, c)
        return (
            c,
            jax.checkpoint(lambda v: lax.all_gather(v, D, tiled=True))(c),
            shift(lax.psum_scatter(c, D, tiled=True)),
        )

    return _run(env, f, env.size, 3)


@case("core", exact=True)
def fully_sharded_matmul(env: Env) -> Any:
    """FSDP's pattern: gather a weight shard, multiply, scatter the sum."""
    x = _values(env, 4, 2 * env.size)
    w = _values(env, 2, 6, seed=3)

    def f(w: jax.Array, x: jax.Array) -> Any:
        full = lax.all_gather(w[0], D, tiled=True)
        return lax.psum_scatter(full * jnp.sum(x), D, tiled=True)[None], (x[0] @ full)[None]

    return Program(env.smap(f, (P(D), P(D)), P(D)), (w, x))


@case("mesh", mesh=DATA_MODEL, exact=True)
def two_axes(env: Env) -> Any:
    """Each kind over the spanning axis, and over both axes in both orders."""
    rng = np.random.default_rng(0)
    n = env.size * 2
    x = env.put(rng.integers(-8, 8, (env.size, 2, n, n, 3)).astype(np.float32), P(D, M))

    def f(x: jax.Array) -> Any:
        y = x[0, 0]
        out = []
        for axes in (D, (D, M), (M, D)):
            out += [lax.all_gather(y, axes, tiled=True), lax.psum_scatter(y, axes, tiled=True)]
            out += [lax.all_to_all(y, axes, 0, 1, tiled=True)]
        out.append(lax.ppermute(y, D, _ring(env)))
        return [t[None, None] for t in out]

    return Program(env.smap(f, P(D, M), P(D, M)), (x,))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual(env: Env) -> Any:
    """Each kind in a partly manual region."""
    x = env.put(np.arange(env.size * env.size * 2 * 6, dtype=np.float32).reshape(-1, 6) % 13, P(D, M))

    def f(x: jax.Array) -> Any:
        return [_operation(env, k)(x) for k in _KINDS]

    out = NamedSharding(env.mesh, P(D))  # over the automatic axis it is the compiler's choice otherwise
    return jax.jit(env.smap(f, P(D), P(D), axis_names={D}), out_shardings=out)(x)
