"""What all_gather, psum_scatter, all_to_all, ppermute, pshuffle, pswapaxes and pbroadcast return.

The behaviour is what JAX's tests check: pmap_test.py (gathers and scatters, tiled and not, along every axis, negative
ones, of booleans; transposes of all pairs of axes; permutations as lists, zips and shuffles; the cellular automaton;
groups), shard_map_test.py (gathers that become invariant, transposes, permutations, broadcasts) and batching_test.py
(random permutations, gathers of constants).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from cases.kinds import KINDS, PRIMITIVES, Op, each, op, ring, table, values
from harness.case import BOTH, Program, case
from harness.env import D, Env

_MOVES = KINDS[4:]
_MOVING = ("all_gather tiled", "psum_scatter tiled", "all_to_all tiled", "ppermute")


@case("conform", "main", table=table(_MOVES))
def value(env: Env) -> Any:
    """The form that the other modules use."""
    return each(env, op(env, env.params["op"]), 2 * env.size, 3)


def _axes(*axes: int) -> dict[str, dict[str, Any]]:
    return {f"axis={a}": {"axis": a} for a in axes}


@case("conform", table=_axes(0, 1, 2, 3, -1, -2))
def all_gather(env: Env) -> Any:
    """The new dimension of ranks, anywhere."""
    return each(env, lambda x: lax.all_gather(x, D, axis=env.params["axis"]), 2, 3, 4)


@case("conform", table=_axes(0, 1, 2, -1))
def all_gather_tiled(env: Env) -> Any:
    """Ranks end to end, along any dimension."""
    return each(env, lambda x: lax.all_gather(x, D, axis=env.params["axis"], tiled=True), 2, 3, 4)


_INVARIANT = {f"{'tiled ' * t}axis={a}": {"axis": a, "tiled": t} for t in (False, True) for a in (0, 1)}


@case("conform", table=_INVARIANT)
def all_gather_invariant(env: Env) -> Any:
    """A gather whose result is known to be the same everywhere: an output without the axis."""
    axis, tiled = env.params["axis"], env.params["tiled"]
    f = env.smap(lambda x: lax.all_gather(x, D, axis=axis, tiled=tiled, to="invarying"), P(D), P())
    return Program(f, (values(env, 3, 2),))


@case("conform")
def all_gather_of_constants(env: Env) -> Any:
    """Numbers and arrays that are equal everywhere."""
    return each(env, lambda x: (lax.all_gather(jnp.ones_like(x), D), jnp.asarray(lax.all_gather(1, D))), 3)


@case("conform", table={"tiled": {"tiled": True}, "untiled": {"tiled": False}})
def all_gather_of_replicated(env: Env) -> Any:
    """An operand without the axis becomes one row for each rank."""
    f = env.smap(lambda w: lax.all_gather(w, D, tiled=env.params["tiled"])[None], P(), P(D))
    return Program(f, (env.weights(2, 3),))


@case("conform", table=_axes(0, 1, 2))
def psum_scatter(env: Env) -> Any:
    """The dimension of ranks disappears."""
    shape = [2, 3, 4]
    shape[env.params["axis"]] = env.size
    return each(env, lambda x: lax.psum_scatter(x, D, scatter_dimension=env.params["axis"]), *shape)


@case("conform", table=_axes(0, 1, 2))
def psum_scatter_tiled(env: Env) -> Any:
    """The dimension is divided."""
    shape = [2, 3, 4]
    shape[env.params["axis"]] *= env.size
    return each(env, lambda x: lax.psum_scatter(x, D, scatter_dimension=env.params["axis"], tiled=True), *shape)


_PAIRS = {f"{s}->{c}": {"split": s, "concat": c} for s in range(3) for c in range(3)}


@case("conform", table=_PAIRS)
def all_to_all(env: Env) -> Any:
    """One dimension is scattered and disappears, ranks appear elsewhere."""
    split, concat = env.params["split"], env.params["concat"]
    shape = [2, 3, 4]
    shape[split] = env.size
    return each(env, lambda x: lax.all_to_all(x, D, split, concat), *shape)


@case("conform", table=_PAIRS)
def all_to_all_tiled(env: Env) -> Any:
    """One dimension is divided, another one grows."""
    split, concat = env.params["split"], env.params["concat"]
    shape = [2, 3, 4]
    shape[split] *= env.size
    return each(env, lambda x: lax.all_to_all(x, D, split, concat, tiled=True), *shape)


@case("conform", table=_axes(0, 1, 2))
def pswapaxes(env: Env) -> Any:
    """The dimension of ranks and another one change places."""
    shape = [2, 3, 4]
    shape[env.params["axis"]] = env.size
    return each(env, lambda x: lax.pswapaxes(x, D, env.params["axis"]), *shape)


def _pairs(n: int, how: str) -> Any:
    rng = np.random.default_rng(n)
    return {
        "ring": ring(n),
        "back": ring(n, n - 1),
        "by two": ring(n, 2),
        "shift": [(i, i + 1) for i in range(n - 1)],
        "reverse": [(i, n - 1 - i) for i in range(n)],
        "first to last": [(0, n - 1)],
        "swap": [(0, n - 1), (n - 1, 0)],
        "stay": [(i, i) for i in range(n)],
        "none": [],
        "lists": [[i, (i + 1) % n] for i in range(n)],
        "zip": list(zip([n - 1, *range(n - 1)], range(n), strict=True)),
        "numpy": list(np.stack([np.arange(n), rng.permutation(n)], 1)),
        "shuffled pairs": [(int(i), int(n - 1 - i)) for i in rng.permutation(n)],
    }[how]


_PERMUTATIONS = (
    "ring", "back", "by two", "shift", "reverse", "first to last", "swap", "stay", "none", "lists", "zip", "numpy",
    "shuffled pairs",
)  # fmt: skip


@case("conform", table={how: {"how": how} for how in _PERMUTATIONS})
def ppermute(env: Env) -> Any:
    """Whole and partial permutations; who receives nothing gets zeros."""
    perm = _pairs(env.size, env.params["how"])
    return each(env, lambda x: (lax.ppermute(x, D, perm), x - lax.ppermute(x, D, perm)), 3, 2)


@case("conform", table={"forward": {"by": 1}, "backward": {"by": -1}, "identity": {"by": 0}})
def pshuffle(env: Env) -> Any:
    """The same by sources."""
    n, by = env.size, env.params["by"]
    return each(env, lambda x: lax.pshuffle(x, D, [(i + by) % n for i in range(n)]), 3)


@case("conform")
def cellular_automaton(env: Env) -> Any:
    """Rule 30 on a line of cells that is cut between ranks: halos travel both ways in every step."""
    n = env.size

    def step(cells: jax.Array) -> jax.Array:
        left = lax.ppermute(cells[-1:], D, ring(n))
        right = lax.ppermute(cells[:1], D, ring(n, n - 1))
        wide = jnp.concatenate([left, cells, right])
        return wide[:-2] ^ (wide[1:-1] | wide[2:])

    def f(cells: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (step(c), c), cells, None, length=9)[1]

    return each(env, f, 8, dtype="bool")


_DTYPES = ("bool", "int4", "int8", "uint16", "int32", "uint32", "float16", "bfloat16", "complex64", "float8_e5m2")


@case("conform", table={d: {"dtype": d} for d in _DTYPES})
def dtypes(env: Env) -> Any:
    """Every collective that moves, in every dtype; booleans have no psum_scatter."""
    names = [k for k in _MOVING if env.params["dtype"] != "bool" or "psum" not in k]
    return each(env, lambda x: [op(env, k)(x) for k in names], 2 * env.size, 3, dtype=env.params["dtype"])


@case("turn", table=table(_MOVING))
def trees(env: Env) -> Any:
    """Nested containers of several dtypes and shapes."""
    n = env.size
    whole: Any = {
        "all_gather tiled": lambda t: lax.all_gather(t, D, tiled=True),
        "psum_scatter tiled": lambda t: lax.psum_scatter(t, D, tiled=True),
        "all_to_all tiled": lambda t: lax.all_to_all(t, D, 0, 0, tiled=True),
        "ppermute": lambda t: lax.ppermute(t, D, ring(n)),
    }[env.params["op"]]
    return each(env, lambda x: whole({"a": x, "b": [x[:, 0], (x.astype(jnp.int32), None)], "c": {}}), 2 * n, 3)


@case("conform", table=table(("all_gather", "ppermute")))
def scalars(env: Env) -> Any:
    """Operands of rank 0."""
    return each(env, lambda x: op(env, env.params["op"])(jnp.sum(x)), 3)


@case("turn", table=table(_MOVING))
def large(env: Env) -> Any:
    """Hundreds of kilobytes, in odd sizes."""
    return each(env, lambda x: jnp.sum(op(env, env.params["op"])(x), 0), 2 * env.size, 10007)


@case("turn", table=table(_MOVING))
def empty(env: Env) -> Any:
    """No elements: the result's shape."""
    return each(env, lambda x: (x, jnp.array(op(env, env.params["op"])(x[:, :0]).shape)), 2 * env.size, 2)


@case("turn", table=table(PRIMITIVES))
def of_replicated(env: Env) -> Any:
    """Operands that are the same everywhere."""
    f: Op = op(env, env.params["op"])
    return Program(env.smap(lambda w: f(w)[None], P(), P(D)), (env.weights(2 * env.size, 3),))


# --- groups ------------------------------------------------------------------------------------------------------


def _groups(env: Env, how: str) -> list[list[int]]:
    """Groups of one size, which these collectives ask for."""
    n = env.size
    if how == "all":
        return [list(range(n))]
    if how == "backwards":
        return [list(range(n))[::-1]]
    if how == "each" or n % 2:
        return [[r] for r in range(n)]
    return {
        "halves": [list(range(n // 2)), list(range(n // 2, n))],
        "interleaved": [list(range(0, n, 2)), list(range(1, n, 2))],
    }[how]


def _grouped(env: Env, name: str, groups: list[list[int]]) -> Op:
    k = len(groups[0])
    return {
        "all_gather": lambda x: lax.all_gather(x, D, axis_index_groups=groups),
        "all_gather tiled": lambda x: lax.all_gather(x, D, axis=1, tiled=True, axis_index_groups=groups),
        "psum_scatter": lambda x: lax.psum_scatter(x[:k], D, axis_index_groups=groups),
        "psum_scatter tiled": lambda x: lax.psum_scatter(x, D, tiled=True, axis_index_groups=groups),
        "all_to_all": lambda x: lax.all_to_all(x[:k], D, 0, 1, axis_index_groups=groups),
        "all_to_all tiled": lambda x: lax.all_to_all(x, D, 0, 1, tiled=True, axis_index_groups=groups),
        "pswapaxes": lambda x: lax.pswapaxes(x[:k], D, 0, axis_index_groups=groups),
    }[name]


_GROUPED = (
    "all_gather",
    "all_gather tiled",
    "psum_scatter",
    "psum_scatter tiled",
    "all_to_all",
    "all_to_all tiled",
    "pswapaxes",
)
_HOW = ("all", "each", "halves", "interleaved", "backwards")


@case("turn", "groups", table={f"{o} {h}": {"op": o, "how": h} for o in _GROUPED for h in _HOW})
def groups(env: Env) -> Any:
    """Each group of global indices for itself."""
    return each(env, _grouped(env, env.params["op"], _groups(env, env.params["how"])), 4 * env.size, 3)


# Stock JAX's transpose of an untiled all_to_all along two different dimensions has the wrong shape.
@case("conform", "groups", table={o: {"op": o, "rejects": BOTH if o == "all_to_all" else ()} for o in _GROUPED})
def gradient_of_groups(env: Env) -> Any:
    """Cotangents stay in their group."""
    f = _grouped(env, env.params["op"], _groups(env, "halves"))

    def g(x: jax.Array) -> Any:
        y, back = jax.vjp(lambda x: jnp.sin(f(x)), x)
        return y, back(y * 2)[0]

    return each(env, g, 4 * env.size, 3)


# --- pbroadcast: stock JAX lowers it on GPUs only, so in the oracle's place stands a row of a gather -------------


def _broadcast(env: Env, x: Any, source: int) -> Any:
    if env.oracle:
        return jax.tree.map(lambda x: lax.all_gather(x, D)[source], x)
    return lax.pbroadcast(x, (D,), source)  # stock takes a tuple only


_SOURCES = {"first": {"source": 0}, "last": {"source": -1}}


@case("conform", "main", "pbroadcast", table=_SOURCES)
def pbroadcast(env: Env) -> Any:
    """Every rank has what the source had."""
    source = env.params["source"] % env.size
    return each(env, lambda x: (_broadcast(env, x, source), _broadcast(env, x[:, 0] > 0, source)), 3, 2)


@case("conform", "pbroadcast")
def pbroadcast_vmap(env: Env) -> Any:
    """Batched."""
    return each(env, lambda x: jax.vmap(lambda v: _broadcast(env, v, 1), 1, 1)(x), 3, 2)
