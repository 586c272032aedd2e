"""The collectives by name, in forms that take one kind of operand, and ways to run them on every rank.

What a transformation or a mesh does to a collective is tested for each of them alike; the modules ``conform_*`` say
what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from harness.case import Program
from harness.env import D, Env, M

_ROWS = P(D)
Op = Callable[[jax.Array], jax.Array]

LINEAR = (
    "psum", "pmean", "all_gather", "all_gather tiled", "psum_scatter", "psum_scatter tiled", "all_to_all",
    "all_to_all tiled", "ppermute", "pshuffle", "pswapaxes",
)  # fmt: skip
# Of each primitive one, in the form that its own transformations and lowering see.
PRIMITIVES = ("psum", "pmax", "all_gather tiled", "psum_scatter tiled", "all_to_all tiled", "ppermute")
KINDS = (*LINEAR[:2], "pmax", "pmin", *LINEAR[2:])


def table(names: Sequence[str], **more: Any) -> dict[str, dict[str, Any]]:
    """A row for each collective named."""
    return {name: {"op": name, **more} for name in names}


def ring(n: int, by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % n) for i in range(n)]


def op(env: Env, name: str, axes: Any = D, n: int | None = None) -> Op:
    """A collective over ``axes`` (of ``n`` ranks together) for operands of ``2 n`` rows."""
    n = env.size if n is None else n
    return {
        "psum": lambda x: lax.psum(x, axes),
        "pmean": lambda x: lax.pmean(x, axes),
        "pmax": lambda x: lax.pmax(x, axes),
        "pmin": lambda x: lax.pmin(x, axes),
        "all_gather": lambda x: lax.all_gather(x, axes),
        "all_gather tiled": lambda x: lax.all_gather(x, axes, tiled=True),
        "psum_scatter": lambda x: lax.psum_scatter(x[:n], axes),
        "psum_scatter tiled": lambda x: lax.psum_scatter(x, axes, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x[n:], axes, 0, 0),
        "all_to_all tiled": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, axes, ring(n)),
        "pshuffle": lambda x: lax.pshuffle(x, axes, [(i + 1) % n for i in range(n)]),
        "pswapaxes": lambda x: lax.pswapaxes(x[:n], axes, 0),
    }[name]


def values(env: Env, *shape: int, dtype: str = "float32", seed: int = 0, spec: P = _ROWS) -> jax.Array:
    """Rank-unique small integers in this dtype, of this shape on every rank: sums of them are exact."""
    ranks = [env.size if a == D else 2 for a in spec]
    rng = np.random.default_rng(seed)
    low = 0 if dtype.startswith(("bool", "u")) else -4
    value = rng.integers(low, 2 if dtype == "bool" else 4, (*ranks, *shape))
    if dtype.startswith("complex"):
        value = value + 1j * rng.integers(low, 4, value.shape)
    return env.put(value.astype(dtype), spec)


def each(env: Env, f: Callable[..., Any], *shape: int, operands: int = 1, **more: Any) -> Program:
    """``f`` on each rank's own arrays of this shape; the result of every rank is compared."""
    xs = tuple(values(env, *shape, seed=seed, **more) for seed in range(operands))
    return Program(on_ranks(env, f), xs)


def on_ranks(env: Env, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` on each rank's part of arrays with a leading dimension for ranks."""
    return env.smap(lambda *xs: jax.tree.map(lambda t: t[None], f(*(x[0] for x in xs))), P(D), P(D))


def grid(env: Env, f: Callable[[jax.Array], Any], *shape: int, dtype: str = "float32") -> Program:
    """The same over a mesh of two axes."""
    x = values(env, *shape, dtype=dtype, spec=P(D, M))
    return Program(env.smap(lambda x: jax.tree.map(lambda t: t[None, None], f(x[0, 0])), P(D, M), P(D, M)), (x,))


def folded(f: Op) -> Op:
    """``f`` as a map from arrays to arrays of the same shape, whatever shape ``f`` returns: for loops."""
    return lambda x: x * 0.5 + jnp.sum(jnp.sin(f(x))) * 0.125
