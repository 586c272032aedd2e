"""Collectives in groups of ranks (axis_index_groups): in one cluster, across, in parts of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import DATA_MODEL, OFF, ON, Program, case
from harness.env import D, Env, M

Groups = list[list[int]]


def _equal(n: int, how: str) -> Groups:
    """Groups of one size, of ``n`` ranks; an odd number of them is all in one."""
    ranks, half = list(range(n)), n // 2
    if how == "one" or (n % 2 and how not in ("each", "turned")):
        return [ranks]
    table: dict[str, Groups] = {
        "turned": [ranks[1:] + ranks[:1]],
        "each": [[r] for r in ranks],
        "neighbours": [[r, r + 1] for r in ranks[::2]],  # in one cluster wherever its ranks are even in number
        "halves": [ranks[:half], ranks[half:]],  # of 4 and 2 ranks: three of one, then one and two
        "far": [[r + half, r] for r in ranks[:half]],  # each across clusters, the later rank first
        "combs": [ranks[::2], ranks[:0:-2]],  # every group has ranks of every cluster
        "mixed": [[0, n - 1], *[[r, r + 1] for r in ranks[1:-1:2]]],  # the last with the first, the others neighbours
    }
    return table[how]


_INSIDE_AND_ACROSS = ("neighbours", "halves", "far", "combs", "mixed")


def _any(n: int, how: str) -> Groups:
    """Groups that a reduction takes."""
    if how == "cross":  # the first and the last rank together: they are in different clusters
        return [[0, n - 1], *[[r] for r in range(1, n - 1)]] if n != 4 else [[0, 3], [1, 2]]
    if how == "uneven":
        return [list(range(n // 2)), list(range(n // 2, n))]
    return _equal(n, how)


def _values(env: Env, *shape: int, dtype: str = "float32") -> jax.Array:
    """Rank-unique values of this shape on every rank, exact in every dtype."""
    rng = np.random.default_rng(len(shape))
    return env.put(rng.integers(-8, 8, (env.size, *shape)).astype(dtype), P(D))


def _run(env: Env, f: Callable[[jax.Array], Any], *shape: int, dtype: str = "float32") -> Any:
    """Runs ``f`` on each rank's own array of this shape; every rank's result is compared."""
    x = _values(env, *shape, dtype=dtype)
    return Program(env.smap(lambda x: jax.tree.map(lambda t: t[None], f(x[0])), P(D), P(D)), (x,))


def _moves(groups: Groups, axes: Any = D) -> list[Callable[[jax.Array], jax.Array]]:
    """Operations on an array of shape (2 g, 3 g, 2) for groups of g."""
    g, kw = len(groups[0]), {"axis_index_groups": groups}
    return [
        lambda x: lax.all_gather(x, axes, axis=1, **kw),
        lambda x: lax.all_gather(x, axes, axis=2, tiled=True, **kw),
        lambda x: lax.psum_scatter(x, axes, tiled=True, **kw),
        lambda x: lax.psum_scatter(x[:, :g], axes, scatter_dimension=1, **kw),
        lambda x: lax.all_to_all(x, axes, 0, 1, tiled=True, **kw),
        lambda x: lax.all_to_all(x[:g], axes, 0, 2, **kw),
        lambda x: lax.pswapaxes(x[:, :g], axes, 1, **kw),
    ]


def _moved(env: Env, groups: Groups, dtype: str = "float32") -> Any:
    g = len(groups[0])
    return _run(env, lambda x: [f(x) for f in _moves(groups)], 2 * g, 3 * g, 2, dtype=dtype)


@case("core", vma=OFF, exact=True, table={g: {"how": g} for g in ("one", "each", "uneven", "cross")})
def reduce(env: Env) -> Any:
    """Reductions in groups of ranks: in one cluster, across, uneven."""
    kw = {"axis_index_groups": _any(env.size, env.params["how"])}
    return _run(env, lambda x: [op(x, D, **kw) for op in (lax.psum, lax.pmax, lax.pmin, lax.pmean)], 5)


@case("mesh", vma=OFF, exact=True, table={g: {"how": g} for g in _INSIDE_AND_ACROSS})
def reduce_in_larger_clusters(env: Env) -> Any:
    """The same with several ranks of a group in one cluster."""
    kw = {"axis_index_groups": _any(env.size, env.params["how"])}
    return _run(env, lambda x: [op(x, D, **kw) for op in (lax.psum, lax.pmax, lax.pmin, lax.pmean)], 5)


@case("core", exact=True, table={g: {"how": g} for g in ("one", "turned", "each")})
def move(env: Env) -> Any:
    """Every collective that moves data, in the groups that every world has."""
    return _moved(env, _equal(env.size, env.params["how"]))


@case("mesh", exact=True, table={g: {"how": g} for g in _INSIDE_AND_ACROSS})
def move_in_larger_clusters(env: Env) -> Any:
    """The same with groups inside and across clusters, and parts of several sizes."""
    return _moved(env, _equal(env.size, env.params["how"]))


@case("mesh", vma=OFF, exact=True, table={d: {"dtype": d} for d in ("bfloat16", "int8", "int4", "complex64")})
def dtype(env: Env) -> Any:
    """Other dtypes: sums of narrow floats in float32, packed integers a byte each."""
    return _moved(env, _equal(env.size, "mixed" if env.size % 2 == 0 else "turned"), env.params["dtype"])


@case("mesh", vma=OFF, exact=True)
def zero_size(env: Env) -> Any:
    """Empty operands: the results' shapes."""
    groups = _equal(env.size, "mixed")
    g = len(groups[0])
    return _run(env, lambda x: [jnp.array(f(x[..., :0]).shape) for f in _moves(groups)], 2 * g, 3 * g, 2)


@case("core", "mesh", table={"turned": {"how": "turned"}, "mixed": {"how": "mixed"}})
def gradient(env: Env) -> Any:
    """vjp of each, inside; lax itself has none of an all_to_all that moves an axis and is not tiled."""
    groups = _equal(env.size, env.params["how"])
    g = len(groups[0])
    moves = _moves(groups)

    def f(x: jax.Array) -> Any:
        out = []
        for op in (*moves[:5], moves[6]):
            y, back = jax.vjp(lambda v, op=op: jnp.sin(op(v)), x)
            out.append((y, back(y * 2)[0]))
        return out

    return _run(env, f, 2 * g, 3 * g, 2)


@case("core", exact=True)
def vmap(env: Env) -> Any:
    """Batched over another axis; lax does not batch an all_to_all in groups."""
    groups = _equal(env.size, "turned")
    g = len(groups[0])
    return _run(env, lambda x: [jax.vmap(op)(x) for op in _moves(groups)[:4]], 2, 2 * g, 3 * g, 2)


@case("mesh", vma=OFF, table={g: {"how": g} for g in ("uneven", "mixed")})
def gradient_of_sums(env: Env) -> Any:
    """grad around the region, of sums in groups."""
    groups = _any(env.size, env.params["how"])
    f = env.smap(
        lambda w, x: lax.pmean(jnp.mean(lax.psum(x * w, D, axis_index_groups=groups) ** 2), D), (P(), P(D)), P()
    )
    return Program(jax.value_and_grad(f, argnums=(0, 1)), (env.weights(6), env.rows()))


@case("mesh", mesh=DATA_MODEL, exact=True)
def two_axes(env: Env) -> Any:
    """Groups along one of two axes, and along both in both orders."""
    rng = np.random.default_rng(0)
    x = env.put(rng.integers(-8, 8, (env.size, 2, 4, 6, 2)).astype(np.float32), P(D, M))

    def f(x: jax.Array) -> Any:
        out = []
        for axes, n in ((D, env.size), ((D, M), 2 * env.size), ((M, D), 2 * env.size)):
            for how in ("far", "mixed"):
                groups = _equal(n, how)
                if len(groups[0]) == 2:
                    out += [op(x[0, 0]) for op in _moves(groups, axes)]
        return [t[None, None] for t in out]

    return Program(env.smap(f, P(D, M), P(D, M)), (x,))


@case("mesh", mesh=DATA_MODEL, exact=True)
def partial_manual(env: Env) -> Any:
    """In a partly manual region."""
    groups = _equal(env.size, "far")
    g = len(groups[0])
    x = env.put(np.arange(env.size * 2 * g * 3 * g * 2, dtype=np.float32).reshape(-1, 3 * g, 2) % 13, P(D))
    out = NamedSharding(env.mesh, P(D))
    f = env.smap(lambda x: [op(x) for op in _moves(groups)], P(D), P(D), axis_names={D})
    return jax.jit(f, out_shardings=out)(x)


_REJECTED: dict[str, tuple[str, Callable[[int], Groups]]] = {
    "all_gather uneven": ("all_gather", lambda n: [list(range(n - 1)), [n - 1]]),
    "psum_scatter uneven": ("psum_scatter", lambda n: [list(range(n - 1)), [n - 1]]),
    "all_to_all uneven": ("all_to_all", lambda n: [list(range(n - 1)), [n - 1]]),
    "all_gather twice": ("all_gather", lambda n: [list(range(n)), list(range(n))]),
    "psum twice": ("psum", lambda n: [list(range(n)), [0]]),
    "psum missing": ("psum", lambda n: [list(range(n - 1))]),
    "all_gather missing": ("all_gather", lambda n: [list(range(n - 1))]),
    "psum unknown": ("psum", lambda n: [[*range(n - 1), n]]),
}


def _reject(env: Env, op: str, groups: Groups) -> Any:
    sized = {"psum_scatter": (lax.psum_scatter, {"tiled": True}), "all_gather": (lax.all_gather, {})}
    g = len(groups[0])

    def f(x: jax.Array) -> Any:
        x = x[0]
        if op == "all_to_all":
            return lax.all_to_all(x, D, 0, 0, tiled=True, axis_index_groups=groups)[None]
        fn, kw = sized.get(op, (lax.psum, {}))
        return fn(x, D, axis_index_groups=groups, **kw)[None]

    return Program(env.smap(f, P(D), P(D)), (_values(env, g * 2, 3),))


# The groups of two ranks are even, and what is missing there leaves stock to an error of XLA's.
_TABLE = {k: {"what": k, "ranks": 3 if "uneven" in k or "missing" in k else 1} for k in _REJECTED}


@case("core", vma=OFF, rejects=OFF, table=_TABLE)
def rejected(env: Env) -> Any:
    """Groups that lax does not take: an error before anything is sent, and the world goes on."""
    op, groups = _REJECTED[env.params["what"]]
    return _reject(env, op, groups(env.size))


@case("core", vma=ON, rejects=ON)
def sums_with_check_vma(env: Env) -> Any:
    """Stock lax has no sums in groups where it checks along which axes values vary."""
    return _reject(env, "psum", [list(range(env.size))])
